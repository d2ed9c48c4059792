//! What the inference API tells of its requests, as metrics.

use rouse::{model::ModelName, units::Millis};

use super::{Metrics, Route, Status};
use crate::http::{Finished, Meter};

impl Meter for Metrics {
    fn finished(&self, finished: &Finished<'_>) {
        let model = match finished.model {
            Some(name) => self.model(name),
            None => self.other(),
        };
        if let Some(known) = finished.model.and_then(|name| self.known(name)) {
            known.in_flight(-1);
        }
        if let Some(code) = finished.code {
            Self::refused(self, code);
        }
        model.ended(
            Route::named(finished.route),
            Status::of(finished.status),
            finished.cold_start,
            finished.duration,
        );
        if finished.parked > Millis::ZERO {
            model.waited(finished.parked);
        }
        if let Some(first_byte) = finished.first_byte {
            model.first_byte(first_byte);
        }
        if let Some(micros) = finished.added_micros {
            self.added_latency(micros);
        }
        if let Some(phase) = finished.left {
            self.client_left(phase);
        }
        model.replayed(finished.replays);
        model.bytes_in(finished.bytes_in);
        model.bytes_out(finished.bytes_out);
    }

    fn parked(&self, model: &ModelName, change: i64) {
        // One that was removed meanwhile took its gauges along.
        if let Some(model) = self.known(model) {
            model.parked(change);
        }
    }

    fn began(&self, model: &ModelName) {
        if let Some(model) = self.known(model) {
            model.in_flight(1);
        }
    }

    fn refused(&self, status: u16) {
        self.other().ended(Route::Other, Status::of(status), None, Millis::ZERO);
    }

    fn connections(&self, change: i64) {
        Self::connections(self, change);
    }
}

#[cfg(test)]
mod tests {
    use rouse::fault::Phase;

    use super::*;
    use crate::driver::ColdStart;

    #[test]
    fn a_finished_request_is_counted_in_every_family_that_speaks_of_requests() {
        let metrics = Metrics::new();
        let name = ModelName::from("m");
        metrics.configure([&name]);
        metrics.began(&name);
        metrics.finished(&Finished {
            route: "chat",
            model: Some(&name),
            status: 499,
            code: None,
            left: Some(Phase::Streaming),
            cold_start: Some(ColdStart::Hot),
            parked: Millis(40),
            added_micros: None,
            first_byte: Some(Millis(60)),
            duration: Millis(900),
            replays: 1,
            bytes_in: 10,
            bytes_out: 2000,
        });
        let text = metrics.encode();
        for line in [
            "rouse_requests_total{cold_start=\"hot\",model=\"m\",route=\"chat\",status=\"499\"} 1",
            "rouse_client_disconnects_total{phase=\"streaming\"} 1",
            "rouse_in_flight{model=\"m\"} 0",
            "rouse_wait_seconds_count{model=\"m\"} 1",
            "rouse_time_to_first_byte_seconds_count{model=\"m\"} 1",
            "rouse_added_latency_seconds_count 0",
            "rouse_replays_total{model=\"m\"} 1",
            "rouse_bytes_total{direction=\"out\",model=\"m\"} 2000",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }
}
