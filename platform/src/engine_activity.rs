//! An engine's reported activity, which engine selection reads.
//!
//! Leases count the requests that this gateway has sent to an engine, but do not show how the engine copes: ten long
//! prompts fill a KV cache that a hundred short ones leave half empty. The engine's own queue shows that, so selection
//! adds the reported queue length to the engine's leases. This counts this gateway's waiting requests twice, on
//! purpose: a request in the engine's queue delays the next request more than a running one. Selection weighs both by
//! the reported use of the KV cache, and passes over an engine that is saturated (`saturation_monitor.rs`).
//!
//! The readings have several writers: the health watch with each probe, the load reader (`load_reader.rs`) while the
//! engine serves, and in a cluster the relay, from the reports of the engine's stub. A reading is a moment old, so each
//! has a time, after which it no longer counts. A failed reading leaves the last one, because a busy engine answers
//! late. The health watch clears it when it ends.
//!
//! In the other direction, the engine's watcher learns here what no health probe shows: whether the gateway has
//! requests at the engine, and which of them the engine leaves unanswered.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, Weak,
    atomic::{AtomicU64, Ordering},
};

use rouse::units::{Millis, Tick};
use rouse_net::{
    engine_load::{EngineLoad, LatestLoad},
    lease::Gate,
};

use crate::SaturationMonitor;

/// The activity of one engine generation, shared by its watcher and all cores.
#[derive(Debug, Default)]
pub struct EngineActivity {
    load: LatestLoad,
    saturation: SaturationMonitor,
    last_progress: AtomicU64,
    unanswered: Mutex<UnansweredStreak>,
    gate: Mutex<Weak<Gate>>,
}

/// Consecutive requests that ended by their deadline without a byte.
#[derive(Debug, Default)]
struct UnansweredStreak {
    requests: u32,
    /// When the latest of them ended.
    last: Tick,
}

impl EngineActivity {
    /// The engine's latest reported load.
    #[must_use]
    pub const fn load(&self) -> &LatestLoad {
        &self.load
    }

    /// The limit on this gateway's requests while the engine reports that it is saturated.
    #[must_use]
    pub const fn saturation(&self) -> &SaturationMonitor {
        &self.saturation
    }

    /// Records a reading made at `now`. Announces another limit to the driver, which may have waiters for the engine.
    pub fn record_load(&self, load: &EngineLoad, now: Tick) {
        self.load.record(load, now);
        let gate = self.gate().upgrade();
        if self.saturation.record(load, gate.as_deref(), now)
            && let Some(gate) = gate
        {
            gate.announce();
        }
    }

    /// Records that the load is unknown.
    pub fn clear_load(&self) {
        self.load.clear();
        if self.saturation.clear()
            && let Some(gate) = self.gate().upgrade()
        {
            gate.announce();
        }
    }

    /// Sets the gate through which this gateway's requests reach the engine.
    pub fn set_gate(&self, gate: &Arc<Gate>) {
        *self.gate() = Arc::downgrade(gate);
    }

    /// Whether this gateway has requests at the engine.
    #[must_use]
    pub fn has_requests(&self) -> bool {
        let gate = self.gate().upgrade();
        gate.is_some_and(|gate| gate.leases() > 0)
    }

    fn gate(&self) -> MutexGuard<'_, Weak<Gate>> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the engine's token counter has advanced.
    pub fn note_progress(&self, now: Tick) {
        self.last_progress.store(now.0, Ordering::Relaxed);
    }

    /// Records a request that ended at `now` without a byte, after its allowed time. `moved`: when the engine last sent
    /// a byte for any request. An engine that moved within the allowed time is busy and not silent.
    pub fn record_unanswered(&self, allowed: Millis, moved: Tick, now: Tick) {
        let moved = moved.max(self.last_progress());
        let mut silence = self.unanswered.lock().unwrap_or_else(PoisonError::into_inner);
        silence.requests = match silence.requests {
            _ if moved + allowed > now => 0,
            _ if moved > silence.last => 1,
            requests => requests.saturating_add(1),
        };
        silence.last = now;
    }

    /// Resets the count, because the engine was found to answer after all.
    pub fn clear_unanswered(&self) {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner).requests = 0;
    }

    /// The consecutive requests that ended by their deadline while the engine sent nothing for any request.
    #[must_use]
    pub fn unanswered_in_a_row(&self) -> u32 {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner).requests
    }

    /// When the engine last made progress; `Tick(0)` for never.
    #[must_use]
    pub fn last_progress(&self) -> Tick {
        Tick(self.last_progress.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_unanswered_in_a_row_only_while_the_engine_moves_nothing() {
        let (reported, allowed) = (EngineActivity::default(), Millis(300));
        let ends = |moved, now| {
            reported.record_unanswered(allowed, Tick(moved), Tick(now));
            reported.unanswered_in_a_row()
        };
        assert_eq!([ends(1000, 2000), ends(1000, 2000), ends(1000, 2500)], [1, 2, 3]);
        assert_eq!(ends(2800, 3000), 0, "it gave something to another meanwhile");
        assert_eq!([ends(2800, 4000), ends(2800, 5000)], [1, 2]);
        assert_eq!(ends(5500, 6000), 1, "one was answered in between");
        reported.note_progress(Tick(6100));
        assert_eq!(ends(5500, 6200), 0, "its counters moved");
        assert_eq!(ends(5500, 7000), 1);
        reported.clear_unanswered();
        assert_eq!(reported.unanswered_in_a_row(), 0);
    }
}
