//! Reports a request at its end, and its fault when it occurs.

use http::HeaderValue;
use rouse::{fault::Fault, units::Tick};
use rouse_net::openai;
use tracing::Level;

use super::{ExceptionFacts, OwnLatency, RequestContext};
use crate::{http::FinishedRequest, telemetry::RequestOutcome};

/// Logs the faults that an operator should see at once; the access log has the rest.
pub(super) fn log_fault(fault: &Fault, id: &HeaderValue) {
    let (id, code) = (id.to_str().unwrap_or("?"), openai::error::code(fault));
    match openai::error::log_level(fault) {
        Level::ERROR => tracing::error!(id, code, "{fault}"),
        Level::WARN => tracing::warn!(id, code, "{fault}"),
        _ => {}
    }
}

impl Drop for RequestContext {
    fn drop(&mut self) {
        let left_in_phase = (!self.is_complete.get()).then(|| self.phase.get());
        // Not boxed: hardly any request has exceptions.
        let no_exceptions = ExceptionFacts::default();
        let exceptions = self.exceptions.get().map_or(&no_exceptions, AsRef::as_ref);
        let finished = FinishedRequest {
            route: self.route,
            model: self.model_metrics.get().map(AsRef::as_ref),
            status: left_in_phase.map_or_else(|| self.status.get().unwrap_or(500), |_| 499),
            code: exceptions.code.get(),
            left_in_phase,
            cold_start: exceptions.wait.get().and_then(|waited| waited.cold_start),
            parked_for: exceptions.parked_for.get(),
            first_byte: self.status.get().map(|_| self.first_byte.get()),
            duration: match self.ended_at.get() {
                Tick(0) => self.now(),
                ended_at => ended_at,
            }
            .since(self.arrived),
            added_micros: match self.own_latency.get() {
                OwnLatency::Micros(micros) => Some(micros),
                OwnLatency::Unknown | OwnLatency::Since(_) => None,
            },
            retries: exceptions.retries.get(),
            bytes_in: self.bytes_in.get(),
            bytes_out: self.bytes_out.get(),
        };
        if let Some(metrics) = finished.model {
            metrics.add_tokens(self.tokens.get());
        }
        self.environment.metrics_sink.request_finished(&finished);
        let Some(recorder) = self.recorder.take() else { return };
        let outcome = RequestOutcome {
            id: Some(self.id.clone()),
            route: self.route,
            model: self.model.take(),
            key: self.key_name.take(),
            status: finished.status,
            code: finished.code,
            left_in_phase,
            cold_start: finished.cold_start,
            wait: finished.parked_for,
            retries: finished.retries,
            bytes_in: finished.bytes_in,
            bytes_out: finished.bytes_out,
        };
        recorder.into_inner().finish(outcome);
    }
}
