//! Counts dropped telemetry: it never delays a request, so it must report what it drops.

use prometheus::{IntCounter, IntCounterVec, Opts, Registry};

use rouse_platform::metric_builder::{expect_valid, register};

/// Counters of dropped request records, lines of the gateway's log, and turns of the journal.
///
/// They exist before the other metrics, since the start is logged too.
#[derive(Clone)]
pub struct TelemetryDropCounters {
    /// The queue to the exporter was full.
    pub(crate) traces_full: IntCounter,
    /// The collector did not accept them.
    pub(crate) traces_failed: IntCounter,
    /// The queue to the access log's thread was full.
    pub(crate) access_full: IntCounter,
    pub(crate) access_failed: IntCounter,
    /// The reader of the gateway's log was too slow.
    pub(crate) log_full: IntCounter,
    pub(crate) log_failed: IntCounter,
    /// The queue to the journal's thread is full, or was full since the last segment began.
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
            "Traces, access log lines, log lines and journal turns that were dropped, by signal and reason",
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
