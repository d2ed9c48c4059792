//! What telemetry could not keep up with: it never holds up a request, so it must say what it let go.

use prometheus::{IntCounter, IntCounterVec, Opts, Registry};

use super::{register, valid};

/// Requests of which a record was dropped.
#[derive(Clone)]
pub struct Lost {
    /// The queue to the exporter was full.
    pub(crate) traces_full: IntCounter,
    /// The collector did not take them.
    pub(crate) traces_failed: IntCounter,
    /// The queue to the access log's thread was full.
    pub(crate) access_full: IntCounter,
    pub(crate) access_failed: IntCounter,
}

impl Lost {
    pub(super) fn new(registry: &Registry) -> Self {
        let opts = Opts::new(
            "rouse_telemetry_dropped_total",
            "Requests whose trace or access log line was dropped, because a queue was full or nobody took it",
        );
        let counters = register(registry, valid(IntCounterVec::new(opts, &["signal", "reason"])));
        let counter = |signal, reason| counters.with_label_values(&[signal, reason]);
        Self {
            traces_full: counter("traces", "queue_full"),
            traces_failed: counter("traces", "export_failed"),
            access_full: counter("access_log", "queue_full"),
            access_failed: counter("access_log", "write_failed"),
        }
    }
}
