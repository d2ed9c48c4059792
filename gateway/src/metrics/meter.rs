//! What the inference API tells of its requests, as metrics.

use std::sync::Arc;

use rouse::{model::ModelName, units::Millis};

use super::{KeyMetrics, Metrics, ModelMetrics, Route, Status};
use crate::http::{Finished, Meter};

impl Meter for Metrics {
    fn finished(&self, finished: &Finished<'_>) {
        let model = finished.model.unwrap_or(&self.other);
        if finished.model.is_some() {
            model.in_flight(-1);
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
        if let Some(parked) = finished.parked {
            model.waited(parked);
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

    fn began(&self, model: &ModelName) -> Option<Arc<ModelMetrics>> {
        let model = self.known(model)?;
        model.in_flight(1);
        Some(model)
    }

    fn key(&self, name: &str) -> Option<Arc<KeyMetrics>> {
        Some(Self::key(self, name))
    }

    fn refused(&self, status: u16) {
        self.other().ended(Route::Other, Status::of(status), None, Millis::ZERO);
    }

    fn connections(&self, change: i64) {
        Self::connections(self, change);
    }

    fn moved(&self) {
        Self::moved(self);
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
        let model = metrics.began(&name);
        metrics.finished(&Finished {
            route: "chat",
            model: model.as_deref(),
            status: 499,
            code: None,
            left: Some(Phase::Streaming),
            cold_start: Some(ColdStart::Hot),
            parked: Some(Millis(40)),
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

    #[test]
    fn a_model_that_is_removed_and_added_again_does_not_count_down_for_requests_of_before() {
        let metrics = Metrics::new();
        let name = ModelName::from("m");
        metrics.configure([&name]);
        let model = metrics.began(&name);
        metrics.configure([]);
        metrics.configure([&name]);
        metrics.finished(&Finished {
            route: "chat",
            model: model.as_deref(),
            status: 200,
            code: None,
            left: None,
            cold_start: None,
            parked: None,
            added_micros: None,
            first_byte: None,
            duration: Millis(1),
            replays: 0,
            bytes_in: 0,
            bytes_out: 0,
        });
        let _next = metrics.began(&name);
        let text = metrics.encode();
        assert!(text.contains("rouse_in_flight{model=\"m\"} 1"), "one is, and none less: {text}");
    }
}
