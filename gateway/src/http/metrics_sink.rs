//! Where the gateway's server reports its requests and connections.

use std::sync::Arc;

use rouse::{fault::DisconnectPhase, model::ModelName, units::Millis};

use crate::{
    driver::ColdStart,
    metrics::{KeyMetrics, ModelMetrics},
};

/// Counts requests and connections.
pub trait RequestMetricsSink: Send + Sync {
    /// Counts a finished request; called once for each.
    fn request_finished(&self, finished: &FinishedRequest<'_>);
    /// Resolves the metrics of the request's model. The request keeps the result, because another model may have the
    /// same name when the request ends.
    fn model_resolved(&self, model: &ModelName) -> Option<Arc<ModelMetrics>>;
    /// Resolves the metrics of this key.
    fn key_metrics(&self, name: &str) -> Option<Arc<KeyMetrics>> {
        let _ = name;
        None
    }
    /// Counts a client that was refused before a request: a broken, too large or too slow head.
    fn connection_rejected(&self, status: u16);
    /// Changes the count of open client connections by `+1` or `-1`.
    fn add_connections(&self, change: i64);
    /// Counts a connection that moves to another core than the one that accepted it.
    fn connection_moved(&self) {}
}

/// Counts nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoopMetricsSink;

/// The data of a finished request.
pub struct FinishedRequest<'a> {
    pub route: &'static str,
    /// The result of [`RequestMetricsSink::model_resolved`], once the request named a configured model.
    pub model: Option<&'a ModelMetrics>,
    /// The status sent to the client; 499 for a disconnect.
    pub status: u16,
    /// The fault's code, if the gateway refused or aborted the request.
    pub code: Option<&'static str>,
    /// The phase in which the client disconnected.
    pub left_in_phase: Option<DisconnectPhase>,
    pub cold_start: Option<ColdStart>,
    /// The total time parked, whatever its outcome. `None`: the request was never parked.
    pub parked_for: Option<Millis>,
    /// The gateway's own latency in microseconds, for a request that did not park: from the last byte of its body until
    /// the request goes to the engine.
    pub added_micros: Option<u64>,
    /// From arrival to the response's head.
    pub first_byte: Option<Millis>,
    pub duration: Millis,
    /// How often the request went to another engine, or again to the same one.
    pub retries: u32,
    /// Bytes of the request's body, and (`bytes_out`) of the response's.
    pub bytes_in: u64,
    pub bytes_out: u64,
}

impl RequestMetricsSink for NoopMetricsSink {
    fn request_finished(&self, _: &FinishedRequest<'_>) {}
    fn model_resolved(&self, _: &ModelName) -> Option<Arc<ModelMetrics>> {
        None
    }
    fn connection_rejected(&self, _: u16) {}
    fn add_connections(&self, _: i64) {}
}
