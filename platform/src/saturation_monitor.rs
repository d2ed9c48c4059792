//! Follows an engine's reported load to the limit on this gateway's requests at it.
//!
//! [`SaturationLimit`] says what limits the requests and for how long. Here the latest limit is kept for its readers:
//! the load balancer reads it for every request, and the driver passes it on to the fleet, which assigns the requests
//! that wait. From one report to the next, the ends of leases are counted: they show how fast the engine serves.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use rouse::{
    engine::saturation_limit::{ReportedUse, SaturationLimit},
    saturation::Thresholds,
    units::{Millis, Tick},
};
use rouse_net::{engine_load::EngineLoad, lease::Gate};

/// The ends of leases are counted over this time at least: over less, one batch of short requests is too much of it.
const MIN_COUNTED_TIME: Millis = Millis(500);

/// The saturation limit of one engine generation, shared by its readers and all cores.
#[derive(Debug, Default)]
pub struct SaturationMonitor {
    /// When the latest report is too old to count; 0 if the engine is not saturated.
    until: AtomicU64,
    /// The most leases, while the engine is saturated.
    leases: AtomicU32,
    state: Mutex<MonitorState>,
}

#[derive(Clone, Copy, Debug, Default)]
struct MonitorState {
    /// Those of the engine's model; the built-in ones until they are known.
    thresholds: Thresholds,
    limit: Option<SaturationLimit>,
    rate: LeaseRate,
}

/// How many of this gateway's requests at the engine end in a second.
#[derive(Clone, Copy, Debug, Default)]
struct LeaseRate {
    per_second: u32,
    /// The leases that had ended at `counted_at`.
    ended: u32,
    counted_at: Tick,
}

impl SaturationMonitor {
    /// Whether the engine is saturated. Calls `now` only if its latest report said so.
    #[must_use]
    pub fn is_saturated(&self, now: impl FnOnce() -> Tick) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        until != 0 && until > now().0
    }

    /// Whether a saturated engine with this many leases may have another one.
    #[must_use]
    pub fn has_room(&self, leases: u32) -> bool {
        leases < self.leases.load(Ordering::Relaxed)
    }

    /// Returns the latest limit, which may have ended by its time.
    #[must_use]
    pub fn limit(&self) -> Option<SaturationLimit> {
        if self.until.load(Ordering::Relaxed) == 0 { None } else { self.lock().limit }
    }

    /// Sets the thresholds by which the next reports are judged.
    pub fn set_thresholds(&self, thresholds: Thresholds) {
        self.lock().thresholds = thresholds;
    }

    /// Records a report at `now`. `gate`: that of this gateway's requests at the engine. Returns whether requests meet
    /// another limit than before: a busy engine reports a slightly different load every time.
    pub(crate) fn record(&self, load: &EngineLoad, gate: Option<&Gate>, now: Tick) -> bool {
        let (leases, ended) = gate.map_or((0, 0), |gate| (gate.leases(), gate.ended()));
        let mut state = self.lock();
        let ended_per_second = state.rate.update(ended, now);
        let EngineLoad { kv_use, waiting, running } = *load;
        let report = ReportedUse { kv_use, waiting, running, leases, ended_per_second };
        let next = SaturationLimit::after_report(state.limit, &report, &state.thresholds, now);
        self.replace(&mut state.limit, next, now)
    }

    /// Records that the load is unknown. Returns whether there was a limit.
    pub(crate) fn clear(&self) -> bool {
        // A limit that has ended counts, too, as it was active at the first tick.
        self.replace(&mut self.lock().limit, None, Tick(0))
    }

    /// Returns whether the two limits differ for requests at `now`.
    fn replace(&self, limit: &mut Option<SaturationLimit>, next: Option<SaturationLimit>, now: Tick) -> bool {
        let differs = SaturationLimit::differ(*limit, next, now);
        *limit = next;
        let leases = next.and_then(|limit| limit.leases);
        self.leases.store(leases.unwrap_or(u32::MAX), Ordering::Relaxed);
        self.until.store(next.map_or(0, |limit| limit.until.0), Ordering::Relaxed);
        differs
    }

    /// Held only for a few comparisons.
    fn lock(&self) -> MutexGuard<'_, MonitorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LeaseRate {
    /// Counts the leases that have ended, and returns how many end in a second. `ended`: since the gate was made.
    fn update(&mut self, ended: u32, now: Tick) -> u32 {
        let passed = now.since(self.counted_at);
        if passed >= MIN_COUNTED_TIME {
            // A gate that was replaced counts from 0.
            let count = ended.checked_sub(self.ended).unwrap_or(ended);
            let per_second = u64::from(count) * 1000 / passed.0;
            let per_second = u32::try_from(per_second).unwrap_or(u32::MAX);
            *self = Self { per_second, ended, counted_at: now };
        }
        self.per_second
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rouse::engine::saturation_limit::MAX_LIMIT_AGE;
    use rouse_net::lease::{Lease, TickClock};
    use tokio::time::Instant;

    use super::*;

    const NOW: Tick = Tick(1_000_000);

    fn load(kv_use: f64, waiting: f64) -> EngineLoad {
        EngineLoad { kv_use: Some(kv_use), waiting: Some(waiting), running: None }
    }

    /// A gate with this many leases.
    fn used(leases: u32) -> (Arc<Gate>, Vec<Lease>) {
        let gate = Gate::new(None, TickClock::new(Instant::now(), NOW), Arc::default());
        gate.open();
        let held = (0..leases).filter_map(|_| gate.take()).collect();
        (gate, held)
    }

    #[test]
    fn a_limit_lasts_until_a_lower_load_an_unknown_load_or_its_age() {
        let monitor = SaturationMonitor::default();
        let ((nine, _nine), (two, _two)) = (used(9), used(2));
        let never = || -> Tick { unreachable!("an engine that is not saturated needs no clock") };
        assert!(!monitor.record(&load(0.5, 0.0), Some(&nine), NOW) && !monitor.is_saturated(never));
        assert!(monitor.record(&load(0.9, 1.0), Some(&nine), NOW) && monitor.is_saturated(|| NOW));
        assert!(!monitor.record(&load(0.9, 1.0), Some(&nine), NOW), "nothing has changed");
        assert!(monitor.has_room(8) && !monitor.has_room(9));
        assert_eq!(monitor.limit().and_then(|limit| limit.leases), Some(9));
        assert!(!monitor.is_saturated(|| NOW + MAX_LIMIT_AGE));
        assert!(monitor.clear() && !monitor.clear() && monitor.limit().is_none());
        assert!(monitor.record(&load(0.9, 1.0), Some(&nine), NOW));
        assert!(monitor.record(&load(0.5, 0.0), Some(&two), NOW) && !monitor.is_saturated(never));
    }

    #[test]
    fn a_report_that_changes_no_limit_is_not_announced_and_makes_the_limit_last_longer() {
        let monitor = SaturationMonitor::default();
        let (nine, _held) = used(9);
        let [second, third] = [Millis::secs(2), Millis::secs(4)].map(|after| NOW + after);
        assert!(monitor.record(&load(0.9, 1.0), Some(&nine), NOW));
        assert!(!monitor.record(&load(0.95, 2.0), Some(&nine), second), "as many leases");
        assert!(monitor.is_saturated(|| NOW + MAX_LIMIT_AGE));
        assert!(!monitor.is_saturated(|| second + MAX_LIMIT_AGE));
        assert_eq!(monitor.limit().and_then(|limit| limit.kv_percent), Some(95));
        assert!(monitor.record(&load(0.95, 7.0), Some(&nine), third), "fewer leases");
        let long_after = third + MAX_LIMIT_AGE;
        assert!(monitor.record(&load(0.95, 7.0), Some(&nine), long_after), "the limit had ended");
    }

    #[test]
    fn an_engine_with_a_full_cache_and_no_queue_is_saturated_and_has_room() {
        let monitor = SaturationMonitor::default();
        assert!(monitor.record(&load(0.9, 0.0), Some(&used(9).0), NOW));
        assert!(monitor.is_saturated(|| NOW) && monitor.has_room(1000));
    }

    #[test]
    fn a_report_is_judged_by_the_thresholds_of_the_model() {
        let monitor = SaturationMonitor::default();
        let (gate, _held) = used(9);
        monitor.set_thresholds(Thresholds { kv_cache: 0.95, queue_length: 2.0, ..Thresholds::default() });
        assert!(!monitor.record(&load(0.9, 1.0), Some(&gate), NOW));
        assert!(monitor.record(&load(0.9, 4.0), Some(&gate), NOW));
        assert_eq!(monitor.limit().and_then(|limit| limit.leases), Some(7));
    }

    #[test]
    fn the_rate_counts_from_one_report_to_the_next_and_starts_over_with_another_gate() {
        let mut rate = LeaseRate::default();
        let mut update = |ended, millis| rate.update(ended, NOW + Millis(millis));
        assert_eq!(update(0, 0), 0);
        assert_eq!(update(900, 499), 0, "too soon to say");
        assert_eq!(update(1000, 2000), 500);
        assert_eq!(update(1001, 2001), 500);
        assert_eq!(update(40, 4000), 20);
    }
}
