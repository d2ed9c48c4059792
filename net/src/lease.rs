//! Gates and leases: which requests may use an engine, and when the engine is no longer in use.
//!
//! Every eviction depends on one question: is the engine still in use? The answer must be exact, every request needs
//! it, and a request that arrives in the same nanosecond as the order to close must fall on one side or the other. So a
//! gate is a single atomic word ([`count::GateWord`], checked exhaustively with loom): a closed bit, a bit for queued
//! requests, two bits for what its owner waits for, and the number of leases. Taking a lease changes that word in one
//! step, and a closed gate refuses that step.
//!
//! The driver samples the gates each turn, and most gates are unused. So it skips a gate that it found unused, until
//! the next use lists the engine in a [`SampleQueue`].
//!
//! A gate belongs to one (engine, generation) and is never reused: a lease of an earlier generation cannot count for
//! the present one. Only the gate's owner opens and closes it: the driver in the gateway, the gate controller in the
//! stub. A lease ends when it is dropped. The response body owns it, never the response head.

use std::{
    num::NonZeroU32,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use tokio::{
    sync::{Notify, futures::OwnedNotified},
    time::Instant,
};

use rouse::{
    engine::turn_clients::{MAX_DISTINCT_CLIENTS, TurnClients},
    fault::Fault,
    model::EngineId,
    units::{Millis, Tick},
};

pub mod count;
#[cfg(test)]
mod gate_word_tests;

/// The atomics that [`count`] uses. `rouse-loom` replaces them.
mod atomic {
    pub(super) use std::sync::atomic::{AtomicU32, Ordering};
}

use count::{GateWord, ReleaseEffect, TakeEffect};

/// Converts moments to ticks. Anchored once to wall time by the driver, monotonic afterwards.
#[derive(Clone, Copy, Debug)]
pub struct TickClock {
    anchor: Instant,
    anchor_tick: Tick,
}

/// The gate of one engine generation. Closed when created.
#[derive(Debug)]
pub struct Gate {
    word: GateWord,
    /// Maximum number of concurrent leases.
    limit: AtomicU32,
    clock: TickClock,
    /// When the last lease ended, and when the last response byte passed, in ticks; 0 for never.
    last_end: AtomicU64,
    last_byte: AtomicU64,
    /// Number of leases that have ended as a use of the engine. Wraps around.
    ended: AtomicU32,
    /// Wakes the driver: a closed gate has drained, a place is free for a queued request, or a watched gate is idle.
    driver: Arc<Notify>,
    /// The clients that have held a lease since the gate last closed, as [`TurnClients`] stores them.
    clients: [AtomicU64; MAX_DISTINCT_CLIENTS],
    /// The pause before the latest use of the gate, in milliseconds plus one; 0 before any.
    pause: AtomicU64,
    fault: OnceLock<Fault>,
    revoked: Arc<Notify>,
    /// Where a use is announced, and as which engine.
    sampling: Option<(Arc<SampleQueue>, EngineId)>,
}

/// Engines whose gates may have changed since the driver last sampled them.
///
/// Bounded by the number of gates: a gate announces its use once until the driver has sampled it. A circuit breaker
/// and a changed saturation limit announce each of their rare changes too, and wake the driver, which takes the whole
/// queue.
#[derive(Debug, Default)]
pub struct SampleQueue(Mutex<Vec<EngineId>>);

/// The right of one request to use an engine. It ends when it is dropped, with the response body.
#[derive(Debug)]
pub struct Lease {
    gate: Arc<Gate>,
    /// The end of this lease counts as the engine's last use, and is not recorded yet.
    marks_use: bool,
}

impl TickClock {
    #[must_use]
    pub const fn new(origin: Instant, at: Tick) -> Self {
        Self { anchor: origin, anchor_tick: at }
    }

    #[must_use]
    pub fn now(&self) -> Tick {
        self.tick_at(Instant::now())
    }

    /// Converts a moment that was already read to a tick.
    #[must_use]
    pub fn tick_at(&self, moment: Instant) -> Tick {
        self.anchor_tick + Millis::from(moment.duration_since(self.anchor))
    }

    /// Returns when `tick` is due on the runtime's clock. A tick before the clock's anchor yields the anchor.
    #[must_use]
    pub fn instant_at(&self, tick: Tick) -> Instant {
        self.anchor + tick.since(self.anchor_tick).duration()
    }
}

impl Gate {
    /// `limit`: maximum number of concurrent leases. `driver` is notified when a release matters to it.
    #[must_use]
    pub fn new(limit: Option<NonZeroU32>, clock: TickClock, driver: Arc<Notify>) -> Arc<Self> {
        Arc::new(Self::unshared(limit, clock, driver))
    }

    /// As [`Self::new`], for a driver that samples only the engines in `queue`.
    #[must_use]
    pub fn sampled(
        limit: Option<NonZeroU32>,
        clock: TickClock,
        driver: Arc<Notify>,
        queue: Arc<SampleQueue>,
        engine: EngineId,
    ) -> Arc<Self> {
        Arc::new(Self { sampling: Some((queue, engine)), ..Self::unshared(limit, clock, driver) })
    }

    fn unshared(limit: Option<NonZeroU32>, clock: TickClock, driver: Arc<Notify>) -> Self {
        Self {
            word: GateWord::closed(),
            limit: AtomicU32::new(limit_or_max(limit)),
            clock,
            last_end: AtomicU64::new(0),
            last_byte: AtomicU64::new(0),
            ended: AtomicU32::new(0),
            driver,
            clients: [const { AtomicU64::new(0) }; MAX_DISTINCT_CLIENTS],
            pause: AtomicU64::new(0),
            fault: OnceLock::new(),
            revoked: Arc::default(),
            sampling: None,
        }
    }

    /// Takes a lease for a request that did not queue. `None` when the gate is closed or full, or when other requests
    /// queue.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> Option<Lease> {
        self.lease(false)
    }

    /// Takes a lease for a queued request, ahead of newcomers. `None` when the gate is closed or full.
    #[must_use]
    pub fn take_queued(self: &Arc<Self>) -> Option<Lease> {
        self.lease(true)
    }

    fn lease(self: &Arc<Self>, queued: bool) -> Option<Lease> {
        let effect = self.word.take(self.limit.load(Ordering::Relaxed), queued);
        if effect == TakeEffect::FirstUse
            && let Some((queue, engine)) = &self.sampling
        {
            queue.push(engine);
        }
        effect.is_taken().then(|| Lease { gate: Arc::clone(self), marks_use: true })
    }

    pub fn open(&self) {
        self.word.open();
    }

    /// Announces a change at the engine beside its leases, and wakes the driver.
    pub fn announce(&self) {
        if let Some((queue, engine)) = &self.sampling {
            queue.push(engine);
        }
        self.driver.notify_one();
    }

    /// Changes the maximum number of concurrent leases. Leases already taken stay valid.
    pub fn set_limit(&self, limit: Option<NonZeroU32>) {
        self.limit.store(limit_or_max(limit), Ordering::Relaxed);
    }

    /// Maximum number of concurrent leases; [`count::MAX_LEASES`] when none was set.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Returns the number of leases. If there are any, the end of the last one notifies the driver: the driver saw the
    /// engine in use, and must learn when it becomes idle. If there are none, the next use is announced.
    pub fn watch(&self) -> u32 {
        self.word.watch()
    }

    /// Closes the gate and returns the number of leases still out. A closed gate gives no lease, and the end of the
    /// last lease notifies the driver. Without leases the driver is notified at once, so that a drain always ends in
    /// the same way.
    pub fn close(&self) -> u32 {
        let leases = self.word.close();
        self.clients.iter().for_each(|client| client.store(0, Ordering::Relaxed));
        if leases == 0 {
            self.driver.notify_one();
        }
        leases
    }

    /// Sets whether requests queue for this engine. While they do, newcomers get no lease.
    ///
    /// Returns whether a place was free at that moment. No later release announces that place, so call
    /// [`Self::take_queued`] once more.
    pub fn set_queued(&self, queued: bool) -> bool {
        self.word.set_queued(queued) < self.limit()
    }

    /// Ends every exchange on this engine with `fault`. The gate must be closed before. Later calls change nothing.
    pub fn revoke(&self, fault: Fault) {
        if self.fault.set(fault).is_ok() {
            self.revoked.notify_waiters();
        }
    }

    /// Returns why every exchange on this engine must end at once, if it must.
    #[must_use]
    pub fn revoked(&self) -> Option<&Fault> {
        self.fault.get()
    }

    /// Completes when the leases are revoked. Register it (`enable` or poll) before the last check of
    /// [`Self::revoked`], or a revocation in between is missed.
    pub fn on_revoke(&self) -> OwnedNotified {
        Arc::clone(&self.revoked).notified_owned()
    }

    #[must_use]
    pub fn leases(&self) -> u32 {
        self.word.leases()
    }

    #[must_use]
    pub fn is_open(&self) -> bool {
        self.word.is_open()
    }

    /// Returns the clients that have held a lease since the gate last closed: the first [`MAX_DISTINCT_CLIENTS`] of
    /// them.
    #[must_use]
    pub fn clients(&self) -> TurnClients {
        TurnClients(self.clients.each_ref().map(|client| client.load(Ordering::Relaxed)))
    }

    /// Returns the latest pause between two uses of the gate.
    #[must_use]
    pub fn pause(&self) -> Option<Millis> {
        self.pause.load(Ordering::Relaxed).checked_sub(1).map(Millis)
    }

    /// When the last lease ended; `Tick(0)` for never.
    #[must_use]
    pub fn last_end(&self) -> Tick {
        Tick(self.last_end.load(Ordering::Relaxed))
    }

    /// Number of leases that have ended as a use of the engine. Wraps around.
    #[must_use]
    pub fn ended(&self) -> u32 {
        self.ended.load(Ordering::Relaxed)
    }

    /// When a response byte last passed; `Tick(0)` for never.
    #[must_use]
    pub fn last_byte(&self) -> Tick {
        Tick(self.last_byte.load(Ordering::Relaxed))
    }
}

impl SampleQueue {
    /// Announces a change at this engine. Does not wake the driver.
    pub fn push(&self, engine: &EngineId) {
        self.engines().push(engine.clone());
    }

    /// Moves the engines announced since the last call to the end of `engines`.
    pub fn take_into(&self, engines: &mut Vec<EngineId>) {
        engines.append(&mut self.engines());
    }

    fn engines(&self) -> MutexGuard<'_, Vec<EngineId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn limit_or_max(limit: Option<NonZeroU32>) -> u32 {
    limit.map_or(count::MAX_LEASES, NonZeroU32::get)
}

impl Lease {
    /// The gate that gave this lease. It shows whether the engine drains.
    #[must_use]
    pub const fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Turns this into a lease of a request that only reads: its end does not count as a use of the engine.
    #[must_use]
    pub const fn without_marking_use(mut self) -> Self {
        self.marks_use = false;
        self
    }

    /// Records which client holds this lease, and since when. `client` is a hash, 0 for an unknown client.
    pub fn record_client(&self, client: u64, now: Instant) {
        let last_end = self.gate.last_end();
        if last_end > Tick(0) && self.gate.leases() == 1 {
            let pause = self.gate.clock.tick_at(now).since(last_end);
            self.gate.pause.store(pause.0 + 1, Ordering::Relaxed);
        }
        for slot in &self.gate.clients {
            // Nearly always the client is recorded already, and then no cache line moves between cores.
            if slot.load(Ordering::Relaxed) == client
                || slot.compare_exchange(0, client, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
                return;
            }
        }
    }

    /// Ends the lease at `now`, so that the drop need not read the clock.
    pub fn end_at(mut self, now: Instant) {
        self.record_end(|| now);
    }

    /// Records the end as a use of the engine, once.
    fn record_end(&mut self, now: impl FnOnce() -> Instant) {
        if std::mem::take(&mut self.marks_use) {
            self.gate.last_end.store(self.gate.clock.tick_at(now()).0, Ordering::Relaxed);
            self.gate.ended.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records a response byte at `now`: the engine makes progress.
    pub fn progress(&self, now: Instant) {
        let now = self.gate.clock.tick_at(now).0;
        // With many streams the value is usually current already, and then no cache line moves between cores.
        if self.gate.last_byte.load(Ordering::Relaxed) != now {
            self.gate.last_byte.store(now, Ordering::Relaxed);
        }
    }

    /// Returns why this exchange must end at once, if it must.
    #[must_use]
    pub fn revoked(&self) -> Option<&Fault> {
        self.gate.revoked()
    }

    /// As [`Gate::on_revoke`].
    pub fn on_revoke(&self) -> OwnedNotified {
        self.gate.on_revoke()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.record_end(Instant::now);
        match self.gate.word.release() {
            ReleaseEffect::NoEffect => {}
            ReleaseEffect::Drained | ReleaseEffect::Freed | ReleaseEffect::Idle => {
                self.gate.driver.notify_one()
            }
        }
    }
}

#[cfg(test)]
mod tests;
