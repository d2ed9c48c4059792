//! Gates and leases: who may use an engine, and when nobody does any more.
//!
//! Everything that puts an engine away hangs on one question: is it still used? The answer must be exact, it is asked
//! on every request, and a request that arrives in the same nanosecond as the order to close must fall on one side or
//! the other. So a gate is a single atomic word ([`count::GateWord`], checked exhaustively with loom): a closed bit, a
//! bit that says somebody queues, and the number of leases. To take a lease is to change that word in one step, which a
//! closed gate refuses.
//!
//! A gate belongs to one (engine, generation) and is never used for another: a lease of a former life cannot count
//! for the present one. Only the driver opens and closes it. A lease ends when it is dropped, and it is owned by the
//! response body, never by the response head.

use std::{
    num::NonZeroU32,
    sync::{
        Arc, OnceLock,
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
    units::{Millis, Tick},
};

pub mod count;
#[cfg(test)]
mod gate_word_tests;

/// What [`count`] is made of. `rouse-loom` gives it others.
mod atomic {
    pub(super) use std::sync::atomic::{AtomicU32, Ordering};
}

use count::{GateWord, ReleaseEffect};

/// Reads the moment. Anchored once to wall time by the driver, monotonic afterwards.
#[derive(Clone, Copy, Debug)]
pub struct TickClock {
    anchor: Instant,
    anchor_tick: Tick,
}

/// The gate of one engine's life. Closed when made.
#[derive(Debug)]
pub struct Gate {
    word: GateWord,
    /// Leases at a time.
    limit: AtomicU32,
    clock: TickClock,
    /// When the last lease ended, and when the last response byte passed: ticks, 0 for never.
    last_end: AtomicU64,
    last_byte: AtomicU64,
    /// Wakes the driver: a closed gate emptied, or a place came free that somebody waits for.
    driver: Arc<Notify>,
    /// The clients that have held a lease since the gate was last closed, as [`TurnClients`] has them.
    clients: [AtomicU64; MAX_DISTINCT_CLIENTS],
    /// The pause before the latest use of the gate, in milliseconds plus one; 0 before any.
    pause: AtomicU64,
    fault: OnceLock<Fault>,
    revoked: Arc<Notify>,
}

/// The right of one request to use an engine. It ends by being dropped, with the body of the answer.
#[derive(Debug)]
pub struct Lease {
    gate: Arc<Gate>,
    /// Its end is the engine's last use.
    marks_use: bool,
    /// When it ends, where that is known before it does.
    ended_at: Option<Instant>,
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

    /// The tick of a moment that was read already.
    #[must_use]
    pub fn tick_at(&self, moment: Instant) -> Tick {
        self.anchor_tick + Millis::from(moment.duration_since(self.anchor))
    }

    /// When `tick` is due on the runtime's clock; now, when it has passed.
    #[must_use]
    pub fn instant_at(&self, tick: Tick) -> Instant {
        self.anchor + tick.since(self.anchor_tick).duration()
    }
}

impl Gate {
    /// `limit`: leases at a time. `driver` is notified when a release matters to it.
    #[must_use]
    pub fn new(limit: Option<NonZeroU32>, clock: TickClock, driver: Arc<Notify>) -> Arc<Self> {
        Arc::new(Self {
            word: GateWord::closed(),
            limit: AtomicU32::new(limit_or_max(limit)),
            clock,
            last_end: AtomicU64::new(0),
            last_byte: AtomicU64::new(0),
            driver,
            clients: [const { AtomicU64::new(0) }; MAX_DISTINCT_CLIENTS],
            pause: AtomicU64::new(0),
            fault: OnceLock::new(),
            revoked: Arc::default(),
        })
    }

    /// A lease for a request that did not queue. `None` when the gate is closed, full, or others queue already.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> Option<Lease> {
        self.word.take(self.limit.load(Ordering::Relaxed), false).then(|| Lease {
            gate: Arc::clone(self),
            marks_use: true,
            ended_at: None,
        })
    }

    /// A lease for a request that queued: goes before newcomers. `None` when the gate is closed or full.
    #[must_use]
    pub fn take_queued(self: &Arc<Self>) -> Option<Lease> {
        self.word.take(self.limit.load(Ordering::Relaxed), true).then(|| Lease {
            gate: Arc::clone(self),
            marks_use: true,
            ended_at: None,
        })
    }

    pub fn open(&self) {
        self.word.open();
    }

    /// Another number of leases at a time, from now on. Those that are out stay out.
    pub fn set_limit(&self, limit: Option<NonZeroU32>) {
        self.limit.store(limit_or_max(limit), Ordering::Relaxed);
    }

    /// Leases at a time; [`count::MAX_LEASES`] when nothing was set.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    /// The leases now. When there are any, the driver is notified when the last one ends: it saw the engine in use, and
    /// whoever waits for it to be idle must hear of it.
    pub fn watch_for_idle(&self) -> u32 {
        self.word.watch_for_idle()
    }

    /// Closes; returns the leases still out. From here on no lease is given, and the driver is notified when the
    /// last one ends (also when there is none, so that a drain has one way of ending).
    pub fn close(&self) -> u32 {
        let leases = self.word.close();
        self.clients.iter().for_each(|client| client.store(0, Ordering::Relaxed));
        if leases == 0 {
            self.driver.notify_one();
        }
        leases
    }

    /// Says whether requests queue for this engine: newcomers then may not overtake them. Having set it, try
    /// [`Self::take_queued`] once more: a place that came free just before told nobody.
    pub fn set_queued(&self, queued: bool) {
        self.word.set_queued(queued);
    }

    /// Ends every exchange on this engine with `fault`; the gate must be closed before. Later calls change nothing.
    pub fn revoke(&self, fault: Fault) {
        if self.fault.set(fault).is_ok() {
            self.revoked.notify_waiters();
        }
    }

    /// Why every exchange on this engine must end at once, if it must.
    #[must_use]
    pub fn revoked(&self) -> Option<&Fault> {
        self.fault.get()
    }

    /// Completes when the leases are revoked. Register it (`enable` or poll) before the last look at
    /// [`Self::revoked`], else a revocation in between is missed.
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

    /// The clients that have held a lease since the gate was last closed: the first few.
    #[must_use]
    pub fn clients(&self) -> TurnClients {
        TurnClients(self.clients.each_ref().map(|client| client.load(Ordering::Relaxed)))
    }

    /// The latest pause between two uses of the gate.
    #[must_use]
    pub fn pause(&self) -> Option<Millis> {
        self.pause.load(Ordering::Relaxed).checked_sub(1).map(Millis)
    }

    /// When the last lease ended; `Tick(0)` for never.
    #[must_use]
    pub fn last_end(&self) -> Tick {
        Tick(self.last_end.load(Ordering::Relaxed))
    }

    /// When a response byte last passed; `Tick(0)` for never.
    #[must_use]
    pub fn last_byte(&self) -> Tick {
        Tick(self.last_byte.load(Ordering::Relaxed))
    }
}

fn limit_or_max(limit: Option<NonZeroU32>) -> u32 {
    limit.map_or(count::MAX_LEASES, NonZeroU32::get)
}

impl Lease {
    /// The gate it came through: tells whether the engine drains.
    #[must_use]
    pub const fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// The same, of a request that only looks: its end does not make the engine look used.
    #[must_use]
    pub const fn without_marking_use(mut self) -> Self {
        self.marks_use = false;
        self
    }

    /// Notes at the gate which client holds this lease (a hash, 0 for an unknown client) and from when on.
    pub fn record_client(&self, client: u64, now: Instant) {
        let last_end = self.gate.last_end();
        if last_end > Tick(0) && self.gate.leases() == 1 {
            let pause = self.gate.clock.tick_at(now).since(last_end);
            self.gate.pause.store(pause.0 + 1, Ordering::Relaxed);
        }
        for place in &self.gate.clients {
            // Nearly always it is there already, and no line of memory goes from core to core.
            if place.load(Ordering::Relaxed) == client
                || place.compare_exchange(0, client, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
                return;
            }
        }
    }

    /// It is about to end, at `now`: it need not read the clock itself.
    pub const fn set_end(&mut self, now: Instant) {
        self.ended_at = Some(now);
    }

    /// A response byte passed at `now`: the engine makes progress.
    pub fn progress(&self, now: Instant) {
        let now = self.gate.clock.tick_at(now).0;
        // Of many streams most find it as it should be: then no line of memory goes from core to core.
        if self.gate.last_byte.load(Ordering::Relaxed) != now {
            self.gate.last_byte.store(now, Ordering::Relaxed);
        }
    }

    /// Why this exchange must end at once, if it must.
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
        if self.marks_use {
            let now = self.ended_at.unwrap_or_else(Instant::now);
            self.gate.last_end.store(self.gate.clock.tick_at(now).0, Ordering::Relaxed);
        }
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
