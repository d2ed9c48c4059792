//! What an engine says about itself, for those who choose among engines.
//!
//! Leases count what this gateway has given an engine, and say nothing of how it copes: ten long prompts fill a KV cache
//! that a hundred short ones leave half empty. Its own queue says that, so what it reports as waiting is added to its
//! leases. It counts twice what is ours and waits, on purpose: a request in the engine's queue is worse for the next one
//! than a request that runs.
//!
//! A report is a moment old and must not live on when its source falls silent. That is the writer's duty, so that readers
//! need no clock: it reports nothing ([`Reported::silent`]) with the first reading it does not get, and when it ends.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rouse::units::Tick;

/// One life of an engine; shared by its watcher and all cores.
#[derive(Debug, Default)]
pub struct Reported {
    waiting: AtomicU32,
    progress: AtomicU64,
}

impl Reported {
    /// A reading: requests in the engine's own queue.
    pub fn waits(&self, requests: u64) {
        self.waiting.store(u32::try_from(requests).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// There is no reading.
    pub fn silent(&self) {
        self.waits(0);
    }

    /// Its counter of tokens was seen to have moved.
    pub fn progressed(&self, now: Tick) {
        self.progress.store(now.0, Ordering::Relaxed);
    }

    #[must_use]
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// When it was last seen to make progress; `Tick(0)` for never.
    #[must_use]
    pub fn progress(&self) -> Tick {
        Tick(self.progress.load(Ordering::Relaxed))
    }
}
