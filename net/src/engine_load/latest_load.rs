//! The latest known load of one engine generation, shared by its readers and all cores.

use std::sync::atomic::{AtomicU64, Ordering};

use rouse::units::{Millis, Tick};

use super::EngineLoad;

/// A gateway asks an engine's stub for a report when it has had no reading for this time.
pub const REPORT_INTERVAL: Millis = Millis::secs(2);
/// An older reading says nothing about the engine's load: its queue grows and empties within seconds.
pub const MAX_LOAD_AGE: Millis = Millis::secs(5);

/// The latest reading of an engine's load, with its time.
///
/// All figures are single atomics: the load balancer reads them for every request, without a lock. Two readings that
/// are stored at once may mix, which is harmless, since both are correct to within a moment.
#[derive(Debug)]
pub struct LatestLoad {
    // The bits of an `f64`; not a number for unknown.
    kv_use: AtomicU64,
    waiting: AtomicU64,
    running: AtomicU64,
    /// When it was read, as a tick; 0 for no reading.
    read_at: AtomicU64,
    /// The first tick at which a stub may be asked for a report.
    report_due_at: AtomicU64,
}

impl LatestLoad {
    /// Stores a reading made at `now`. A reading without any known figure clears the earlier one.
    pub fn record(&self, load: &EngineLoad, now: Tick) {
        if load.is_unknown() {
            return self.clear();
        }
        for (cell, value) in
            [(&self.kv_use, load.kv_use), (&self.waiting, load.waiting), (&self.running, load.running)]
        {
            cell.store(value.unwrap_or(f64::NAN).to_bits(), Ordering::Relaxed);
        }
        self.report_due_at.store((now + REPORT_INTERVAL).0, Ordering::Relaxed);
        self.read_at.store(now.0, Ordering::Release);
    }

    /// Records that the load is unknown.
    pub fn clear(&self) {
        self.read_at.store(0, Ordering::Release);
        for cell in [&self.kv_use, &self.waiting, &self.running] {
            cell.store(f64::NAN.to_bits(), Ordering::Relaxed);
        }
    }

    /// Returns the latest reading and its time, however old it is.
    #[must_use]
    pub fn latest(&self) -> Option<(EngineLoad, Tick)> {
        let read_at = Tick(self.read_at.load(Ordering::Acquire));
        let load = EngineLoad {
            kv_use: value(&self.kv_use),
            waiting: value(&self.waiting),
            running: value(&self.running),
        };
        (read_at > Tick(0) && !load.is_unknown()).then_some((load, read_at))
    }

    /// Returns the latest reading unless it is older than [`MAX_LOAD_AGE`]. Calls `now` only if there is a reading.
    #[must_use]
    pub fn fresh(&self, now: impl FnOnce() -> Tick) -> Option<EngineLoad> {
        let (load, read_at) = self.latest()?;
        (read_at + MAX_LOAD_AGE >= now()).then_some(load)
    }

    /// Whether to ask the engine's stub for a report with the next request. True for one caller per
    /// [`REPORT_INTERVAL`] without a reading.
    #[must_use]
    pub fn take_report_due(&self, now: Tick) -> bool {
        let due_at = self.report_due_at.load(Ordering::Relaxed);
        now.0 >= due_at
            && self
                .report_due_at
                .compare_exchange(due_at, (now + REPORT_INTERVAL).0, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

impl Default for LatestLoad {
    fn default() -> Self {
        let unknown = || AtomicU64::new(f64::NAN.to_bits());
        Self {
            kv_use: unknown(),
            waiting: unknown(),
            running: unknown(),
            read_at: AtomicU64::new(0),
            report_due_at: AtomicU64::new(0),
        }
    }
}

fn value(cell: &AtomicU64) -> Option<f64> {
    Some(f64::from_bits(cell.load(Ordering::Relaxed))).filter(|value| !value.is_nan())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: EngineLoad = EngineLoad { kv_use: Some(0.5), waiting: None, running: Some(0.0) };

    #[test]
    fn a_reading_keeps_what_is_unknown_and_grows_old() {
        let latest = LatestLoad::default();
        assert_eq!(latest.latest(), None);
        latest.record(&LOAD, Tick(1000));
        assert_eq!(latest.latest(), Some((LOAD, Tick(1000))));
        let last = Tick(1000) + MAX_LOAD_AGE;
        assert_eq!(latest.fresh(|| last), Some(LOAD));
        assert_eq!(latest.fresh(|| last + Millis(1)), None);
        latest.record(&EngineLoad { waiting: Some(3.0), ..LOAD }, Tick(2000));
        assert_eq!(latest.latest().and_then(|(load, _)| load.waiting), Some(3.0));
        latest.record(&EngineLoad::default(), Tick(3000));
        assert_eq!(latest.latest(), None);
    }

    #[test]
    fn a_stub_is_asked_once_in_two_seconds_without_a_reading() {
        let latest = LatestLoad::default();
        assert!(latest.take_report_due(Tick(1000)) && !latest.take_report_due(Tick(1000)));
        assert!(!latest.take_report_due(Tick(2999)), "the first request may still get its report");
        assert!(latest.take_report_due(Tick(3000)), "it got none");
        latest.record(&LOAD, Tick(4000));
        assert!(!latest.take_report_due(Tick(5999)));
        assert!(latest.take_report_due(Tick(6000)));
        latest.clear();
        assert!(!latest.take_report_due(Tick(6001)), "a lost reading does not make every request ask");
    }
}
