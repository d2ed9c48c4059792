//! Turns the inference API's reports of requests into metrics.

use std::sync::Arc;

use rouse::{model::ModelName, units::Millis};

use super::{KeyMetrics, Metrics, ModelMetrics, RouteLabel, StatusClass};
use crate::http::{FinishedRequest, RequestMetricsSink};

impl RequestMetricsSink for Metrics {
    fn request_finished(&self, finished: &FinishedRequest<'_>) {
        let model = finished.model.unwrap_or(&self.other);
        if finished.model.is_some() {
            model.add_in_flight(-1);
        }
        if let Some(code) = finished.code {
            Self::request_refused(self, code);
        }
        model.request_ended(
            RouteLabel::from_label(finished.route),
            StatusClass::from_code(finished.status),
            finished.cold_start,
            finished.duration,
        );
        if let Some(parked) = finished.parked_for {
            model.observe_wait(parked);
        }
        if let Some(first_byte) = finished.first_byte {
            model.observe_first_byte(first_byte);
        }
        if let Some(micros) = finished.added_micros {
            self.observe_added_latency(micros);
        }
        if let Some(phase) = finished.left_in_phase {
            self.client_left(phase);
        }
        model.add_retries(finished.retries);
        model.add_bytes_in(finished.bytes_in);
        model.add_bytes_out(finished.bytes_out);
    }

    fn model_resolved(&self, model: &ModelName) -> Option<Arc<ModelMetrics>> {
        let model = self.configured_model(model)?;
        model.add_in_flight(1);
        Some(model)
    }

    fn key_metrics(&self, name: &str) -> Option<Arc<KeyMetrics>> {
        Some(Self::key_metrics(self, name))
    }

    fn connection_rejected(&self, status: u16) {
        self.other().request_ended(RouteLabel::Other, StatusClass::from_code(status), None, Millis::ZERO);
    }

    fn add_connections(&self, change: i64) {
        Self::add_connections(self, change);
    }

    fn connection_moved(&self) {
        Self::connection_moved(self);
    }
}

#[cfg(test)]
mod tests {
    use rouse::fault::DisconnectPhase;

    use super::*;
    use crate::driver::ColdStart;

    #[test]
    fn a_finished_request_is_counted_in_every_family_that_speaks_of_requests() {
        let metrics = Metrics::new();
        let name = ModelName::from("m");
        metrics.configure([&name]);
        let model = metrics.model_resolved(&name);
        metrics.request_finished(&FinishedRequest {
            route: "chat",
            model: model.as_deref(),
            status: 499,
            code: None,
            left_in_phase: Some(DisconnectPhase::Streaming),
            cold_start: Some(ColdStart::Hot),
            parked_for: Some(Millis(40)),
            added_micros: None,
            first_byte: Some(Millis(60)),
            duration: Millis(900),
            retries: 1,
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
            "rouse_retries_total{model=\"m\"} 1",
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
        let model = metrics.model_resolved(&name);
        metrics.configure([]);
        metrics.configure([&name]);
        metrics.request_finished(&FinishedRequest {
            route: "chat",
            model: model.as_deref(),
            status: 200,
            code: None,
            left_in_phase: None,
            cold_start: None,
            parked_for: None,
            added_micros: None,
            first_byte: None,
            duration: Millis(1),
            retries: 0,
            bytes_in: 0,
            bytes_out: 0,
        });
        let _next = metrics.model_resolved(&name);
        let text = metrics.encode();
        assert!(text.contains("rouse_in_flight{model=\"m\"} 1"), "one is, and none less: {text}");
    }
}
