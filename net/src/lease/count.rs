//! The single word behind a gate: closed bit, queued bit, watched bit, count.
//!
//! This file uses nothing but atomics, so that loom can try every interleaving: the crate `rouse-loom` compiles it a
//! second time, with loom's atomics as `super::atomic`.

use super::atomic::{AtomicU32, Ordering};

const CLOSED: u32 = 1 << 31;
const QUEUED: u32 = 1 << 30;
const WATCHED: u32 = 1 << 29;
/// The most leases a gate can count.
pub const MAX_LEASES: u32 = WATCHED - 1;

#[derive(Debug)]
pub struct GateWord(AtomicU32);

/// What a release means to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseEffect {
    NoEffect,
    /// The gate is closed, and this was the last lease.
    Drained,
    /// A place became free while requests queue for it.
    Freed,
    /// The last lease ended on a gate that the driver had seen in use.
    Idle,
}

impl GateWord {
    #[must_use]
    pub fn closed() -> Self {
        Self(AtomicU32::new(CLOSED))
    }

    /// Adds a lease, unless the gate is closed or at `limit`. While requests queue, only a queued one gets a lease.
    pub fn take(&self, limit: u32, queued: bool) -> bool {
        let refuse = if queued { CLOSED } else { CLOSED | QUEUED };
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            if word & refuse != 0 || word & MAX_LEASES >= limit {
                return false;
            }
            // Acquire: a new lease sees everything the driver did before it opened the gate.
            match self.0.compare_exchange_weak(word, word + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(current) => word = current,
            }
        }
    }

    /// Ends a lease. Release ordering: everything the holder did happens before the drain that this may complete.
    pub fn release(&self) -> ReleaseEffect {
        let mut word = self.0.load(Ordering::Relaxed);
        let before = loop {
            debug_assert!(word & MAX_LEASES > 0, "a lease was released twice");
            // The release of the last lease clears the watch in the same step. A watch set later is for the next lease.
            let after = if word & MAX_LEASES == 1 { (word - 1) & !WATCHED } else { word - 1 };
            match self.0.compare_exchange_weak(word, after, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(before) => break before,
                Err(current) => word = current,
            }
        };
        let last = before & MAX_LEASES == 1;
        if before & CLOSED != 0 && last {
            ReleaseEffect::Drained
        } else if before & QUEUED != 0 {
            ReleaseEffect::Freed
        } else if before & WATCHED != 0 && last {
            ReleaseEffect::Idle
        } else {
            ReleaseEffect::NoEffect
        }
    }

    /// Returns the number of leases. If there are any, the end of the last one yields [`ReleaseEffect::Idle`], once.
    pub fn watch_for_idle(&self) -> u32 {
        let mut word = self.0.load(Ordering::Acquire);
        while word & MAX_LEASES > 0 && word & WATCHED == 0 {
            match self.0.compare_exchange_weak(word, word | WATCHED, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(current) => word = current,
            }
        }
        word & MAX_LEASES
    }

    pub fn open(&self) {
        self.0.fetch_and(!CLOSED, Ordering::Release);
    }

    /// Closes the gate and returns the number of leases still out.
    pub fn close(&self) -> u32 {
        self.0.fetch_or(CLOSED, Ordering::AcqRel) & MAX_LEASES
    }

    /// Sets or clears the queued bit. After setting it, take once more: a place that became free just before caused no
    /// notification.
    pub fn set_queued(&self, queued: bool) {
        if queued {
            self.0.fetch_or(QUEUED, Ordering::AcqRel);
        } else {
            self.0.fetch_and(!QUEUED, Ordering::AcqRel);
        }
    }

    #[must_use]
    pub fn leases(&self) -> u32 {
        self.0.load(Ordering::Acquire) & MAX_LEASES
    }

    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED == 0
    }
}
