//! Metrics of reading the memory of a cluster's accelerators.

use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry};
use rouse::units::Tick;

use rouse_platform::metric_builder::{expect_valid, integer, register};

/// The source of a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeterSource {
    Stub,
    Prometheus,
}

impl MeterSource {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stub => "stub",
            Self::Prometheus => "prometheus",
        }
    }
}

/// Counts readings.
#[derive(Clone)]
pub struct MeterReadMetrics {
    total: IntCounterVec,
    newest: IntGaugeVec,
}

impl MeterReadMetrics {
    #[must_use]
    pub fn new(registry: &Registry) -> Self {
        let total = Opts::new(
            "rouse_accelerator_readings_total",
            "Readings of the accelerators' memory, by source and outcome",
        );
        let newest = Opts::new(
            "rouse_accelerator_reading_timestamp_seconds",
            "Time of the newest reading, in seconds of Unix time",
        );
        Self {
            total: register(registry, expect_valid(IntCounterVec::new(total, &["source", "outcome"]))),
            newest: register(registry, expect_valid(IntGaugeVec::new(newest, &["source"]))),
        }
    }

    /// Counts a successful reading, which shows the state at `at`.
    pub fn read_succeeded(&self, source: MeterSource, at: Tick) {
        self.count(source, "done");
        self.newest.with_label_values(&[source.as_str()]).set(integer(at.0 / 1000));
    }

    /// Counts a reading without a valid response.
    pub fn read_failed(&self, source: MeterSource) {
        self.count(source, "failed");
    }

    /// Counts a reading that lacks one engine.
    pub fn read_partial(&self, source: MeterSource) {
        self.count(source, "left_out");
    }

    fn count(&self, source: MeterSource, outcome: &str) {
        self.total.with_label_values(&[source.as_str(), outcome]).inc();
    }
}
