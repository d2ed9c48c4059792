//! What telemetry could not keep up with: it never holds up a request, so it must say what it let go.

use prometheus::{IntCounter, IntCounterVec, Opts, Registry};

use super::{expect_valid, register};

/// Requests of which a record was dropped, lines of the gateway's own log, and turns of the journal. It is there before the other metrics
/// are: what happens at the start is logged, too.
#[derive(Clone)]
pub struct TelemetryDropCounters {
    /// The queue to the exporter was full.
    pub(crate) traces_full: IntCounter,
    /// The collector did not take them.
    pub(crate) traces_failed: IntCounter,
    /// The queue to the access log's thread was full.
    pub(crate) access_full: IntCounter,
    pub(crate) access_failed: IntCounter,
    /// Nobody read what the gateway logged.
    pub(crate) log_full: IntCounter,
    pub(crate) log_failed: IntCounter,
    /// The queue to the journal's thread was full, or had been.
    pub(crate) journal_full: IntCounter,
    pub(crate) journal_failed: IntCounter,
    family: IntCounterVec,
}

impl Default for TelemetryDropCounters {
    fn default() -> Self {
        Self::new()
    }
}

impl TelemetryDropCounters {
    #[must_use]
    pub fn new() -> Self {
        let opts = Opts::new(
            "rouse_telemetry_dropped_total",
            "Traces of requests, lines of the logs and turns of the journal that were dropped, because a queue was full or nobody took them",
        );
        let family = expect_valid(IntCounterVec::new(opts, &["signal", "reason"]));
        let counter = |signal, reason| family.with_label_values(&[signal, reason]);
        Self {
            traces_full: counter("traces", "queue_full"),
            traces_failed: counter("traces", "export_failed"),
            access_full: counter("access_log", "queue_full"),
            access_failed: counter("access_log", "write_failed"),
            log_full: counter("log", "queue_full"),
            log_failed: counter("log", "write_failed"),
            journal_full: counter("journal", "queue_full"),
            journal_failed: counter("journal", "write_failed"),
            family,
        }
    }

    pub(super) fn register(&self, registry: &Registry) {
        register(registry, self.family.clone());
    }
}
