//! An engine's reported activity, which engine selection reads.
//!
//! Leases count the requests that this gateway has sent to an engine, but do not show how the engine copes: ten long
//! prompts fill a KV cache that a hundred short ones leave half empty. The engine's own queue shows that, so selection
//! adds the reported queue length to the engine's leases. This counts this gateway's waiting requests twice, on
//! purpose: a request in the engine's queue delays the next request more than a running one.
//!
//! A report is a moment old and must not outlive its source. The writer ensures that, so readers need no clock: it
//! clears the report ([`EngineActivity::clear_waiting`]) at the first failed reading and when it ends.
//!
//! In the other direction, the engine's watcher learns here what no health probe shows: requests that the engine leaves
//! unanswered.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use rouse::units::{Millis, Tick};

/// The activity of one engine generation, shared by its watcher and all cores.
#[derive(Debug, Default)]
pub struct EngineActivity {
    waiting: AtomicU32,
    last_progress: AtomicU64,
    unanswered: Mutex<UnansweredStreak>,
}

/// Consecutive requests that ended by their deadline without a byte.
#[derive(Debug, Default)]
struct UnansweredStreak {
    requests: u32,
    /// When the latest of them ended.
    last: Tick,
}

impl EngineActivity {
    /// Stores a reading: the requests in the engine's own queue.
    pub fn set_waiting(&self, requests: u64) {
        self.waiting.store(u32::try_from(requests).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Records that there is no reading.
    pub fn clear_waiting(&self) {
        self.set_waiting(0);
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

    #[must_use]
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
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
