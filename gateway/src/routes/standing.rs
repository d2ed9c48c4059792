//! What the data path thinks of an engine: whether new requests had better go elsewhere.
//!
//! An engine may fail requests for a while before those who decide about it know, or in a way that they never will: it
//! answers its health probe and nothing else. So every gateway judges by what its own requests meet, and leaves an engine
//! out for a time. That is an opinion of the data path and nothing more: no lease, gate or state changes by it. The driver
//! tells it to the fleet, which gives such an engine to no waiter for as long: an engine that fails at once has always the
//! least to do, and would else be given to nearly everybody who waits.
//!
//! The danger is the opposite: load looks like failure, and leaving out an engine under load puts its load on the rest,
//! which then look worse ([`Witness`](super::Witness) says what counts and what never does). Three things bound the harm
//! if that happens nevertheless: at most half of a model's engines are left out
//! ([`Route::take`](super::Route::take)), never for longer than [`LONGEST`] before one request tries again, and its
//! success is the end of it.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use rouse::units::{Millis, Tick};
use tokio::sync::Notify;

use super::lots::scramble;

/// Failures in a row.
const IN_A_ROW: u32 = 5;
/// Or so large a part (of 100) of at least so many outcomes, over so long.
const PART: u32 = 50;
const VOLUME: u32 = 20;
const WINDOW: Millis = Millis::secs(30);
/// Left out for so long at first, twice as long after every attempt to come back.
const FIRST: Millis = Millis::secs(10);
const LONGEST: Millis = Millis::secs(300);

/// One life of an engine, as all cores of this gateway see it. It reads no clock: who asks says when.
#[derive(Debug)]
pub struct Standing {
    /// When one request may try it again; 0 while it is not left out.
    again: AtomicU64,
    /// Something failed lately: only then is a success worth a lock.
    troubled: AtomicBool,
    /// Who gives places to waiters is to hear of every change.
    driver: Arc<Notify>,
    record: Mutex<Record>,
}

/// What an outcome changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// For so long, then one request tries.
    LeftOut(Millis),
    Back,
}

#[derive(Debug)]
struct Record {
    in_a_row: u32,
    window: Option<Window>,
    out: Option<Out>,
    /// What its pauses are varied by: gateways, and engines that failed together, should not try again together.
    seed: u64,
}

/// Begins with a failure.
#[derive(Debug)]
struct Window {
    since: Tick,
    good: u32,
    bad: u32,
}

#[derive(Debug)]
struct Out {
    since: Tick,
    tries: u32,
}

impl Standing {
    /// `seed`: for what varies its pauses. `driver` is notified of every change.
    #[must_use]
    pub fn new(seed: u64, driver: Arc<Notify>) -> Arc<Self> {
        let record = Record { in_a_row: 0, window: None, out: None, seed };
        Arc::new(Self {
            again: AtomicU64::new(0),
            troubled: AtomicBool::new(false),
            driver,
            record: Mutex::new(record),
        })
    }

    #[must_use]
    pub fn is_out(&self) -> bool {
        self.again.load(Ordering::Relaxed) != 0
    }

    /// When one request may try it; `None` when it is not left out.
    #[must_use]
    pub fn again(&self) -> Option<Tick> {
        Some(Tick(self.again.load(Ordering::Relaxed))).filter(|again| again.0 != 0)
    }

    /// Its time is over: one request may try it.
    #[must_use]
    pub fn is_due(&self, now: Tick) -> bool {
        now.0 >= self.again.load(Ordering::Relaxed)
    }

    /// Whether the caller is the one request that tries. Until its outcome is known, and if that never comes, the pause
    /// has doubled: an engine that swallows requests swallows fewer and fewer.
    #[must_use]
    pub fn try_again(&self, now: Tick) -> bool {
        let mut record = self.record();
        if !self.is_due(now) {
            return false;
        }
        if let Some(pause) = record.try_again() {
            self.again.store((now + pause).0, Ordering::Relaxed);
        }
        true
    }

    /// A request that went out at `began` was answered. `now` is asked for only when something failed lately.
    pub fn succeeded(&self, began: Tick, now: impl FnOnce() -> Tick) -> Option<Change> {
        if !self.troubled.load(Ordering::Relaxed) {
            return None;
        }
        let mut record = self.record();
        let back = record.succeeded(began, now());
        self.troubled.store(record.is_troubled(), Ordering::Relaxed);
        if back {
            self.again.store(0, Ordering::Relaxed);
            self.driver.notify_one();
        }
        back.then_some(Change::Back)
    }

    /// A request that went out at `began` failed, and the engine is to blame.
    pub fn failed(&self, began: Tick, now: Tick) -> Option<Change> {
        let mut record = self.record();
        self.troubled.store(true, Ordering::Relaxed);
        let was_in = record.out.is_none();
        let pause = record.failed(began, now)?;
        self.again.store((now + pause).0, Ordering::Relaxed);
        self.driver.notify_one();
        was_in.then_some(Change::LeftOut(pause))
    }

    /// Never held for longer than a few comparisons, and taken only for an engine that fails.
    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Record {
    /// How long it is to be left out from now on, if it is.
    fn failed(&mut self, began: Tick, now: Tick) -> Option<Millis> {
        if let Some(out) = &self.out {
            // What went out before is a part of what it was left out for.
            return (began >= out.since).then(|| self.pause());
        }
        self.in_a_row += 1;
        let window = self.window(now);
        window.bad += 1;
        let outcomes = window.good + window.bad;
        let often = outcomes >= VOLUME && window.bad * 100 >= outcomes * PART;
        if self.in_a_row < IN_A_ROW && !often {
            return None;
        }
        self.out = Some(Out { since: now, tries: 0 });
        Some(self.pause())
    }

    /// Whether that brings it back.
    fn succeeded(&mut self, began: Tick, now: Tick) -> bool {
        if let Some(out) = &self.out {
            // What went out before does not show that it recovered.
            let back = began >= out.since;
            if back {
                (self.in_a_row, self.window, self.out) = (0, None, None);
            }
            return back;
        }
        self.in_a_row = 0;
        if self.window.as_ref().is_some_and(|window| now.since(window.since) > WINDOW) {
            self.window = None;
        }
        if let Some(window) = &mut self.window {
            window.good += 1;
        }
        false
    }

    /// The pause until another request may try.
    fn try_again(&mut self) -> Option<Millis> {
        self.out.as_mut()?.tries += 1;
        Some(self.pause())
    }

    const fn is_troubled(&self) -> bool {
        self.window.is_some() || self.out.is_some()
    }

    fn window(&mut self, now: Tick) -> &mut Window {
        let over = |window: &Window| now.since(window.since) > WINDOW;
        if self.window.as_ref().is_some_and(over) {
            self.window = None;
        }
        self.window.get_or_insert(Window { since: now, good: 0, bad: 0 })
    }

    /// Varied by a tenth to either side.
    fn pause(&mut self) -> Millis {
        let tries = self.out.as_ref().map_or(0, |out| out.tries);
        let whole = FIRST.0.saturating_mul(1 << tries.min(16)).min(LONGEST.0);
        self.seed = self.seed.wrapping_add(1);
        let lot = scramble(self.seed) % 201;
        Millis(whole * (900 + lot) / 1000)
    }
}

#[cfg(test)]
mod tests;
