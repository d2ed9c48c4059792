//! What an engine says about itself, for those who choose among engines.
//!
//! Leases count what this gateway has given an engine, and say nothing of how it copes: ten long prompts fill a KV cache
//! that a hundred short ones leave half empty. Its own queue says that, so what it reports as waiting is added to its
//! leases. It counts twice what is ours and waits, on purpose: a request in the engine's queue is worse for the next one
//! than a request that runs.
//!
//! A report is a moment old and must not live on when its source falls silent. That is the writer's duty, so that readers
//! need no clock: it reports nothing ([`EngineActivity::clear_waiting`]) with the first reading it does not get, and when it ends.
//!
//! In the other direction its watcher learns here what no health probe shows: requests to which the engine says nothing.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use rouse::units::{Millis, Tick};

/// One life of an engine; shared by its watcher and all cores.
#[derive(Debug, Default)]
pub struct EngineActivity {
    waiting: AtomicU32,
    last_progress: AtomicU64,
    unanswered: Mutex<UnansweredStreak>,
}

/// Requests in a row that ended by their deadline, without a byte.
#[derive(Debug, Default)]
struct UnansweredStreak {
    requests: u32,
    /// When the latest did.
    last: Tick,
}

impl EngineActivity {
    /// A reading: requests in the engine's own queue.
    pub fn set_waiting(&self, requests: u64) {
        self.waiting.store(u32::try_from(requests).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// There is no reading.
    pub fn clear_waiting(&self) {
        self.set_waiting(0);
    }

    /// Its counter of tokens was seen to have moved.
    pub fn note_progress(&self, now: Tick) {
        self.last_progress.store(now.0, Ordering::Relaxed);
    }

    /// A request ended at `now` without a byte, after as long as it was allowed. `moved`: when the engine last gave one to
    /// anybody. One that moved meanwhile is busy.
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

    /// It was found to answer after all.
    pub fn clear_unanswered(&self) {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner).requests = 0;
    }

    /// So many requests in a row ended by their deadline, while the engine moved nothing for anybody.
    #[must_use]
    pub fn unanswered_in_a_row(&self) -> u32 {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner).requests
    }

    #[must_use]
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// When it was last seen to make progress; `Tick(0)` for never.
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
