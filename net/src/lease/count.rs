//! The single word behind a gate: closed bit, queued bit, watched bit, listed bit, count.
//!
//! This file uses nothing but atomics, so that loom can try every interleaving: the crate `rouse-loom` compiles it a
//! second time, with loom's atomics as `super::atomic`.

use super::atomic::{AtomicU32, Ordering};

const CLOSED: u32 = 1 << 31;
const QUEUED: u32 = 1 << 30;
const WATCHED: u32 = 1 << 29;
const LISTED: u32 = 1 << 28;
/// The most leases a gate can count.
pub const MAX_LEASES: u32 = LISTED - 1;

#[derive(Debug)]
pub struct GateWord(AtomicU32);

/// Result of an attempt to take a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeEffect {
    Refused,
    Taken,
    /// Taken, as the first since the driver last found the gate unused. The driver must learn of it.
    FirstUse,
}

impl TakeEffect {
    #[must_use]
    pub const fn is_taken(self) -> bool {
        !matches!(self, Self::Refused)
    }
}

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
    ///
    /// The gate counts as listed from then on, until [`Self::watch`] finds it unused.
    pub fn take(&self, limit: u32, queued: bool) -> TakeEffect {
        let refuse = if queued { CLOSED } else { CLOSED | QUEUED };
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            if word & refuse != 0 || word & MAX_LEASES >= limit {
                return TakeEffect::Refused;
            }
            let after = (word + 1) | LISTED;
            // Acquire: a new lease sees everything the driver did before it opened the gate.
            match self.0.compare_exchange_weak(word, after, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) if word & LISTED == 0 => return TakeEffect::FirstUse,
                Ok(_) => return TakeEffect::Taken,
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

    /// Returns the number of leases.
    ///
    /// If there are any, the end of the last one yields [`ReleaseEffect::Idle`], once. If there are none, the next take
    /// yields [`TakeEffect::FirstUse`], once. All that earlier holders did happens before this.
    pub fn watch(&self) -> u32 {
        let mut word = self.0.load(Ordering::Acquire);
        loop {
            let leases = word & MAX_LEASES;
            let watched = if leases > 0 { word | WATCHED } else { word & !LISTED };
            if watched == word {
                return leases;
            }
            match self.0.compare_exchange_weak(word, watched, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return leases,
                Err(current) => word = current,
            }
        }
    }

    pub fn open(&self) {
        self.0.fetch_and(!CLOSED, Ordering::Release);
    }

    /// Closes the gate and returns the number of leases still out.
    pub fn close(&self) -> u32 {
        self.0.fetch_or(CLOSED, Ordering::AcqRel) & MAX_LEASES
    }

    /// Sets or clears the queued bit, and returns the number of leases at that moment. A place that was free then
    /// caused no notification.
    pub fn set_queued(&self, queued: bool) -> u32 {
        let before = if queued {
            self.0.fetch_or(QUEUED, Ordering::AcqRel)
        } else {
            self.0.fetch_and(!QUEUED, Ordering::AcqRel)
        };
        before & MAX_LEASES
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
