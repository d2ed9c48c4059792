//! Circuit breaker: the data path's verdict on whether an engine should get new requests.
//!
//! An engine may fail requests before the fleet knows, or in a way that the fleet never sees: the engine answers its
//! health probe and nothing else. So every gateway judges by its own requests, and ejects an engine for a time. The
//! ejection is a verdict of the data path only: no lease, gate or state changes. The driver reports it to the fleet,
//! which gives an ejected engine to no waiter meanwhile. An engine that fails at once always has the least load, so the
//! fleet would otherwise give it to nearly every waiter.
//!
//! The opposite error is dangerous: load looks like failure, and ejecting an engine under load moves its load to the
//! others, which then look worse. [`OutlierReporter`](super::OutlierReporter) defines which outcomes count and which
//! never do. Three bounds limit the harm of a wrong ejection: at most half of a model's engines are ejected
//! ([`ModelRoute::take_lease`](super::ModelRoute::take_lease)), one request tries the engine again after at most
//! [`MAX_EJECTION_TIME`] (and up to a tenth of jitter), and its success ends the ejection.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use rouse::{
    model::EngineId,
    units::{Millis, Tick},
};
use rouse_net::lease::SampleQueue;
use tokio::sync::Notify;

use super::rng::mix64;

/// The consecutive failures that eject an engine.
const MAX_CONSECUTIVE_FAILURES: u32 = 5;
/// The percentage of failures that ejects an engine, of at least [`MIN_OUTCOMES`] within [`OUTCOME_WINDOW`].
const MAX_FAILURE_PERCENT: u32 = 50;
const MIN_OUTCOMES: u32 = 20;
const OUTCOME_WINDOW: Millis = Millis::secs(30);
/// The first ejection time. It doubles with every trial.
const BASE_EJECTION_TIME: Millis = Millis::secs(10);
const MAX_EJECTION_TIME: Millis = Millis::secs(300);

/// The breaker of one engine generation, shared by all cores of this gateway. It reads no clock: callers pass the time.
#[derive(Debug)]
pub struct CircuitBreaker {
    /// When one request may try the engine again; 0 while the engine is not ejected.
    retry_at: AtomicU64,
    /// Whether a request failed recently. Only then is a success worth a lock.
    failed_recently: AtomicBool,
    /// Wakes the driver, which assigns engines to waiters, after every change.
    driver_notify: Arc<Notify>,
    /// Where a change is announced to the driver, and as which engine.
    sampling: Option<(Arc<SampleQueue>, EngineId)>,
    state: Mutex<BreakerState>,
}

/// The change that an outcome caused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerTransition {
    /// Ejected for this time; then one request tries the engine.
    Ejected(Millis),
    Restored,
}

#[derive(Debug)]
struct BreakerState {
    consecutive_failures: u32,
    window: Option<OutcomeWindow>,
    ejection: Option<Ejection>,
    /// The seed of the jitter: gateways, and engines that failed together, must not try again at the same time.
    jitter_seed: u64,
}

/// The outcomes since a failure that opened the window.
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
    /// Creates a closed breaker. `seed`: for the jitter. `driver` is notified of every change.
    #[must_use]
    pub fn new(seed: u64, driver: Arc<Notify>) -> Arc<Self> {
        Arc::new(Self::unshared(seed, driver))
    }

    /// As [`Self::new`], for a driver that samples only the engines in `queue`.
    #[must_use]
    pub fn sampled(seed: u64, driver: Arc<Notify>, queue: Arc<SampleQueue>, engine: EngineId) -> Arc<Self> {
        Arc::new(Self { sampling: Some((queue, engine)), ..Self::unshared(seed, driver) })
    }

    fn unshared(seed: u64, driver: Arc<Notify>) -> Self {
        let record =
            BreakerState { consecutive_failures: 0, window: None, ejection: None, jitter_seed: seed };
        Self {
            retry_at: AtomicU64::new(0),
            failed_recently: AtomicBool::new(false),
            driver_notify: driver,
            sampling: None,
            state: Mutex::new(record),
        }
    }

    #[must_use]
    pub fn is_ejected(&self) -> bool {
        self.retry_at.load(Ordering::Relaxed) != 0
    }

    /// When one request may try the engine. `None`: the engine is not ejected.
    #[must_use]
    pub fn retry_at(&self) -> Option<Tick> {
        Some(Tick(self.retry_at.load(Ordering::Relaxed))).filter(|again| again.0 != 0)
    }

    /// Whether the ejection time is over, so that one request may try the engine.
    #[must_use]
    pub fn is_trial_due(&self, now: Tick) -> bool {
        now.0 >= self.retry_at.load(Ordering::Relaxed)
    }

    /// Whether the caller's request is the one that tries the engine. The pause doubles until the outcome is known, and
    /// stays doubled if the outcome never arrives: an engine that swallows requests gets fewer and fewer.
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

    /// Records a successful request that was sent at `began`. Calls `now` only after a recent failure.
    pub fn record_success(&self, began: Tick, now: impl FnOnce() -> Tick) -> Option<BreakerTransition> {
        if !self.failed_recently.load(Ordering::Relaxed) {
            return None;
        }
        let mut record = self.state();
        let back = record.record_success(began, now());
        self.failed_recently.store(record.failed_recently(), Ordering::Relaxed);
        if back {
            self.retry_at.store(0, Ordering::Relaxed);
            self.notify_driver();
        }
        back.then_some(BreakerTransition::Restored)
    }

    /// Records a failure of a request that was sent at `began`, if the engine is to blame.
    pub fn record_failure(&self, began: Tick, now: Tick) -> Option<BreakerTransition> {
        let mut record = self.state();
        self.failed_recently.store(true, Ordering::Relaxed);
        let was_in = record.ejection.is_none();
        let pause = record.record_failure(began, now)?;
        self.retry_at.store((now + pause).0, Ordering::Relaxed);
        self.notify_driver();
        was_in.then_some(BreakerTransition::Ejected(pause))
    }

    fn notify_driver(&self) {
        if let Some((queue, engine)) = &self.sampling {
            queue.push(engine);
        }
        self.driver_notify.notify_one();
    }

    /// Held only for a few comparisons, and taken only for an engine that fails.
    fn state(&self) -> MutexGuard<'_, BreakerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BreakerState {
    /// Records a failure and returns the ejection time if the engine is ejected from now on.
    fn record_failure(&mut self, began: Tick, now: Tick) -> Option<Millis> {
        if let Some(out) = &self.ejection {
            // A request sent before the ejection belongs to the failures that caused it.
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

    /// Records a success and returns whether it ends the ejection.
    fn record_success(&mut self, began: Tick, now: Tick) -> bool {
        if let Some(out) = &self.ejection {
            // A request sent before the ejection does not prove a recovery.
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

    /// Starts a trial and returns the pause until the next one.
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

    /// The next ejection time, with a jitter of up to a tenth to either side.
    fn next_ejection_time(&mut self) -> Millis {
        let tries = self.ejection.as_ref().map_or(0, |out| out.trials);
        let whole = BASE_EJECTION_TIME.0.saturating_mul(1 << tries.min(16)).min(MAX_EJECTION_TIME.0);
        self.jitter_seed = self.jitter_seed.wrapping_add(1);
        let draw = mix64(self.jitter_seed) % 201;
        Millis(whole * (900 + draw) / 1000)
    }
}

#[cfg(test)]
mod tests;
