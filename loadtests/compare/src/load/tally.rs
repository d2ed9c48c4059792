//! Counts for a running load, shared by all connections of a core.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hdrhistogram::Histogram;

use super::LoadResult;

/// Latencies range from one microsecond to ten minutes.
const LONGEST_US: u64 = 600_000_000;
/// A proxy adds some hundred microseconds to a response that takes the engine a second; three digits would hide them.
const SIGNIFICANT_DIGITS: u8 = 4;

/// Shared counts. The lock only provides `Send`: all users run on one thread, so it is never contended.
#[derive(Clone, Debug)]
pub(super) struct LoadTally(Arc<Mutex<LoadCounts>>);

#[derive(Debug)]
pub(super) struct LoadCounts {
    pub(super) units: u64,
    pub(super) errors: u64,
    pub(super) corrupted: u64,
    latency: Histogram<u64>,
    lag: Histogram<u64>,
    first_ns: u64,
    last_ns: u64,
    /// The first error: one stated cause is worth more than a thousand counted errors.
    first_error: Option<String>,
}

impl LoadTally {
    pub(super) fn new() -> anyhow::Result<Self> {
        let histogram = Histogram::new_with_bounds(1, LONGEST_US, SIGNIFICANT_DIGITS)?;
        Ok(Self(Arc::new(Mutex::new(LoadCounts {
            units: 0,
            errors: 0,
            corrupted: 0,
            latency: histogram.clone(),
            lag: histogram,
            first_ns: 0,
            last_ns: 0,
            first_error: None,
        }))))
    }

    pub(super) fn counts(&self) -> MutexGuard<'_, LoadCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn error(&self, error: &anyhow::Error) {
        let mut counts = self.counts();
        counts.errors += 1;
        counts.record_first_error(|| format!("{error:#}"));
    }

    pub(super) fn corrupted(&self, unit: &str) {
        let mut counts = self.counts();
        counts.corrupted += 1;
        counts.record_first_error(|| unit.to_owned());
    }

    /// The counts and the first error.
    pub(super) fn result(&self) -> LoadResult {
        let counts = self.counts();
        LoadResult {
            units: counts.units,
            errors: counts.errors,
            corrupted: counts.corrupted,
            wall: Duration::from_nanos(counts.last_ns.saturating_sub(counts.first_ns)),
            latency: counts.latency.clone(),
            lag: counts.lag.clone(),
            first_error: counts.first_error.clone(),
        }
    }
}

impl LoadCounts {
    /// Records a unit that arrived at `now_ns`.
    pub(super) fn unit(&mut self, now_ns: u64) {
        if self.units == 0 {
            self.first_ns = now_ns;
        }
        self.last_ns = now_ns;
        self.units += 1;
    }

    pub(super) fn latency(&mut self, ns: u64) {
        self.latency.saturating_record(ns / 1000);
    }

    pub(super) fn lag(&mut self, ns: u64) {
        self.lag.saturating_record(ns / 1000);
    }

    pub(super) fn record_first_error(&mut self, message: impl FnOnce() -> String) {
        self.first_error.get_or_insert_with(message);
    }
}
