//! What the data path thinks of an engine: whether new requests had better go elsewhere.
//!
//! An engine may fail requests for a while before those who decide about it know, or in a way that they never will: it
//! answers its health probe and nothing else. So every gateway judges by what its own requests meet, and leaves an engine
//! out for a time. That is an opinion of the data path and nothing more: no lease, gate or state changes by it. The driver
//! tells it to the fleet, which gives such an engine to no waiter for as long: an engine that fails at once has always the
//! least to do, and would else be given to nearly everybody who waits.
//!
//! The danger is the opposite: load looks like failure, and leaving out an engine under load puts its load on the rest,
//! which then look worse ([`OutlierReporter`](super::OutlierReporter) says what counts and what never does). Three things bound the harm
//! if that happens nevertheless: at most half of a model's engines are left out
//! ([`ModelRoute::take_lease`](super::ModelRoute::take_lease)), never for longer than [`MAX_EJECTION_TIME`] before one request tries again, and its
//! success is the end of it.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use rouse::units::{Millis, Tick};
use tokio::sync::Notify;

use super::rng::mix64;

/// Failures in a row.
const MAX_CONSECUTIVE_FAILURES: u32 = 5;
/// Or so large a part (of 100) of at least so many outcomes, over so long.
const MAX_FAILURE_PERCENT: u32 = 50;
const MIN_OUTCOMES: u32 = 20;
const OUTCOME_WINDOW: Millis = Millis::secs(30);
/// Left out for so long at first, twice as long after every attempt to come back.
const BASE_EJECTION_TIME: Millis = Millis::secs(10);
const MAX_EJECTION_TIME: Millis = Millis::secs(300);

/// One life of an engine, as all cores of this gateway see it. It reads no clock: who asks says when.
#[derive(Debug)]
pub struct CircuitBreaker {
    /// When one request may try it again; 0 while it is not left out.
    retry_at: AtomicU64,
    /// Something failed lately: only then is a success worth a lock.
    failed_recently: AtomicBool,
    /// Who gives places to waiters is to hear of every change.
    driver_notify: Arc<Notify>,
    state: Mutex<BreakerState>,
}

/// What an outcome changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerTransition {
    /// For so long, then one request tries.
    Ejected(Millis),
    Restored,
}

#[derive(Debug)]
struct BreakerState {
    consecutive_failures: u32,
    window: Option<OutcomeWindow>,
    ejection: Option<Ejection>,
    /// What its pauses are varied by: gateways, and engines that failed together, should not try again together.
    jitter_seed: u64,
}

/// Begins with a failure.
#[derive(Debug)]
struct OutcomeWindow {
    since: Tick,
    successes: u32,
    failures: u32,
}

#[derive(Debug)]
struct Ejection {
    since: Tick,
    trials: u32,
}

impl CircuitBreaker {
    /// `seed`: for what varies its pauses. `driver` is notified of every change.
    #[must_use]
    pub fn new(seed: u64, driver: Arc<Notify>) -> Arc<Self> {
        let record =
            BreakerState { consecutive_failures: 0, window: None, ejection: None, jitter_seed: seed };
        Arc::new(Self {
            retry_at: AtomicU64::new(0),
            failed_recently: AtomicBool::new(false),
            driver_notify: driver,
            state: Mutex::new(record),
        })
    }

    #[must_use]
    pub fn is_ejected(&self) -> bool {
        self.retry_at.load(Ordering::Relaxed) != 0
    }

    /// When one request may try it; `None` when it is not left out.
    #[must_use]
    pub fn retry_at(&self) -> Option<Tick> {
        Some(Tick(self.retry_at.load(Ordering::Relaxed))).filter(|again| again.0 != 0)
    }

    /// Its time is over: one request may try it.
    #[must_use]
    pub fn is_trial_due(&self, now: Tick) -> bool {
        now.0 >= self.retry_at.load(Ordering::Relaxed)
    }

    /// Whether the caller is the one request that tries. Until its outcome is known, and if that never comes, the pause
    /// has doubled: an engine that swallows requests swallows fewer and fewer.
    #[must_use]
    pub fn start_trial(&self, now: Tick) -> bool {
        let mut record = self.state();
        if !self.is_trial_due(now) {
            return false;
        }
        if let Some(pause) = record.start_trial() {
            self.retry_at.store((now + pause).0, Ordering::Relaxed);
        }
        true
    }

    /// A request that went out at `began` was answered. `now` is asked for only when something failed lately.
    pub fn record_success(&self, began: Tick, now: impl FnOnce() -> Tick) -> Option<BreakerTransition> {
        if !self.failed_recently.load(Ordering::Relaxed) {
            return None;
        }
        let mut record = self.state();
        let back = record.record_success(began, now());
        self.failed_recently.store(record.failed_recently(), Ordering::Relaxed);
        if back {
            self.retry_at.store(0, Ordering::Relaxed);
            self.driver_notify.notify_one();
        }
        back.then_some(BreakerTransition::Restored)
    }

    /// A request that went out at `began` failed, and the engine is to blame.
    pub fn record_failure(&self, began: Tick, now: Tick) -> Option<BreakerTransition> {
        let mut record = self.state();
        self.failed_recently.store(true, Ordering::Relaxed);
        let was_in = record.ejection.is_none();
        let pause = record.record_failure(began, now)?;
        self.retry_at.store((now + pause).0, Ordering::Relaxed);
        self.driver_notify.notify_one();
        was_in.then_some(BreakerTransition::Ejected(pause))
    }

    /// Never held for longer than a few comparisons, and taken only for an engine that fails.
    fn state(&self) -> MutexGuard<'_, BreakerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BreakerState {
    /// How long it is to be left out from now on, if it is.
    fn record_failure(&mut self, began: Tick, now: Tick) -> Option<Millis> {
        if let Some(out) = &self.ejection {
            // What went out before is a part of what it was left out for.
            return (began >= out.since).then(|| self.next_ejection_time());
        }
        self.consecutive_failures += 1;
        let window = self.current_window(now);
        window.failures += 1;
        let outcomes = window.successes + window.failures;
        let often = outcomes >= MIN_OUTCOMES && window.failures * 100 >= outcomes * MAX_FAILURE_PERCENT;
        if self.consecutive_failures < MAX_CONSECUTIVE_FAILURES && !often {
            return None;
        }
        self.ejection = Some(Ejection { since: now, trials: 0 });
        Some(self.next_ejection_time())
    }

    /// Whether that brings it back.
    fn record_success(&mut self, began: Tick, now: Tick) -> bool {
        if let Some(out) = &self.ejection {
            // What went out before does not show that it recovered.
            let back = began >= out.since;
            if back {
                (self.consecutive_failures, self.window, self.ejection) = (0, None, None);
            }
            return back;
        }
        self.consecutive_failures = 0;
        if self.window.as_ref().is_some_and(|window| now.since(window.since) > OUTCOME_WINDOW) {
            self.window = None;
        }
        if let Some(window) = &mut self.window {
            window.successes += 1;
        }
        false
    }

    /// The pause until another request may try.
    fn start_trial(&mut self) -> Option<Millis> {
        self.ejection.as_mut()?.trials += 1;
        Some(self.next_ejection_time())
    }

    const fn failed_recently(&self) -> bool {
        self.window.is_some() || self.ejection.is_some()
    }

    fn current_window(&mut self, now: Tick) -> &mut OutcomeWindow {
        let over = |window: &OutcomeWindow| now.since(window.since) > OUTCOME_WINDOW;
        if self.window.as_ref().is_some_and(over) {
            self.window = None;
        }
        self.window.get_or_insert(OutcomeWindow { since: now, successes: 0, failures: 0 })
    }

    /// Varied by a tenth to either side.
    fn next_ejection_time(&mut self) -> Millis {
        let tries = self.ejection.as_ref().map_or(0, |out| out.trials);
        let whole = BASE_EJECTION_TIME.0.saturating_mul(1 << tries.min(16)).min(MAX_EJECTION_TIME.0);
        self.jitter_seed = self.jitter_seed.wrapping_add(1);
        let lot = mix64(self.jitter_seed) % 201;
        Millis(whole * (900 + lot) / 1000)
    }
}

#[cfg(test)]
mod tests;
