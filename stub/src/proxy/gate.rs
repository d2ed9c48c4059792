//! The gate with its epochs, and where requests go while it is open.
//!
//! Relays read one thing, the [`Route`]: the present life's gate, and the engine's address. Orders change it under a lock
//! that no request takes. A life is one generation of an engine; a gate that was closed for good, by a revocation or by
//! a newer generation, is never opened again, so that no lease of a former life counts for the present one. What it has
//! out still does count against a drain: an engine is not unused because it got another number.
//!
//! An order is fenced by (epoch, generation), compared in that order: whoever leads now knows best which life it means.
//! An order that came before changes nothing when it comes again, but that a drain may be hastened.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use arc_swap::{ArcSwap, Guard};
use rouse::{
    fault::Fault,
    lease::{Clock, Gate, Lease},
    model::ModelName,
    units::{Generation, Millis, Tick},
    wire::{self, Close, Epoch, OnDeadline, Open},
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep_until},
};

use crate::epoch::{TooFar, believe};

/// One generation of the engine.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) generation: Generation,
    pub(crate) gate: Arc<Gate>,
    /// Exchanges whose end is not told yet; a lease ends a moment before.
    untold: AtomicU32,
    /// Exchanges that a revocation ended.
    cut: AtomicU32,
    keeper: Arc<Notify>,
}

/// What a request needs to know.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) life: Arc<Life>,
    pub(crate) target: Option<SocketAddr>,
}

/// One request's part in a life, from its lease until its end is told.
#[derive(Debug)]
pub(crate) struct Part(Arc<Life>);

/// Why an order was not followed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error("an order of epoch {} and generation {} was heard before", .0.epoch, .0.generation.0)]
    Stale(wire::Gate),
    #[error("{1}")]
    Barred(wire::Gate, &'static str),
    #[error("{1}")]
    TooFar(wire::Gate, TooFar),
}

/// Closes and opens.
#[derive(Debug)]
pub(crate) struct Keeper {
    inner: Mutex<Inner>,
    route: ArcSwap<Route>,
    /// Something ended, or an order came.
    wake: Arc<Notify>,
    /// A drain came to its end.
    ends: watch::Sender<()>,
    clock: Clock,
    model: ModelName,
}

#[derive(Debug)]
struct Inner {
    epoch: Epoch,
    generation: Generation,
    life: Arc<Life>,
    /// Former ones that have leases out.
    past: Vec<Arc<Life>>,
    drain: Option<Drain>,
    /// What the last drain cut.
    cut: Cut,
    /// Why the gate may not be opened now.
    bar: Option<&'static str>,
    /// It will not be opened again.
    ends: bool,
    target: Option<SocketAddr>,
}

/// The lives that one drain revoked. A life is revoked once, so that what is cut of it is of that drain, also when it ends
/// after the gate was opened again.
#[derive(Debug, Default)]
struct Cut {
    lives: Vec<Arc<Life>>,
    /// The drain is over.
    over: bool,
}

#[derive(Debug)]
struct Drain {
    deadline: Option<Instant>,
    on_deadline: OnDeadline,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Runs,
    /// The deadline passed, and what was under way goes on, or ends just now.
    Lapsed,
    Over,
}

impl Keeper {
    pub(crate) fn new(model: ModelName, open: bool) -> Self {
        let wake = Arc::<Notify>::default();
        let clock = Clock::new(Instant::now(), Tick(1));
        let life = Life::new(Generation(0), clock, &wake);
        if open {
            life.gate.open();
        }
        let inner = Inner {
            epoch: 0,
            generation: Generation(0),
            life: Arc::clone(&life),
            past: Vec::new(),
            drain: None,
            cut: Cut::default(),
            bar: None,
            ends: false,
            target: None,
        };
        Self {
            inner: Mutex::new(inner),
            route: ArcSwap::from_pointee(Route { life, target: None }),
            wake,
            ends: watch::Sender::new(()),
            clock,
            model,
        }
    }

    /// For one request.
    pub(crate) fn route(&self) -> Guard<Arc<Route>> {
        self.route.load()
    }

    pub(crate) fn target(&self) -> Option<SocketAddr> {
        self.route.load().target
    }

    pub(crate) fn set_target(&self, target: SocketAddr) {
        self.with(|inner| inner.target = Some(target));
    }

    pub(crate) fn view(&self) -> wire::Gate {
        self.with(|inner| inner.view())
    }

    pub(crate) fn is_open(&self) -> bool {
        self.route.load().life.gate.is_open()
    }

    /// Closes the gate: no lease is given from here on.
    pub(crate) fn close(&self, order: &Close, now: Instant) -> Result<wire::Gate, Refused> {
        self.with(|inner| {
            // At the end of the process an order may hasten the last drain, and not put it off.
            let again = inner.hear(order.epoch, order.generation)? || inner.ends;
            let drain = Drain {
                deadline: order.drain_deadline.map(|ms| now + Millis(ms).duration()),
                on_deadline: order.on_deadline,
                stage: Stage::Runs,
            };
            inner.close(drain, again);
            Ok(inner.view())
        })
    }

    /// Opens the gate for this life.
    pub(crate) fn open(&self, order: &Open) -> Result<wire::Gate, Refused> {
        let opened = self.with(|inner| {
            if let Some(bar) = inner.bar.or_else(|| inner.ends.then_some("the stub is shutting down")) {
                inner.fence(order.epoch, order.generation)?;
                return Err(Refused::Barred(inner.view(), bar));
            }
            inner.hear(order.epoch, order.generation)?;
            let spent = inner.life.gate.revoked().is_some() || inner.life.generation != order.generation;
            if spent {
                // Nobody gets in there any more, also not by a route that was read before.
                inner.life.gate.close();
                let life = Life::new(order.generation, self.clock, &self.wake);
                inner.past.push(std::mem::replace(&mut inner.life, life));
            }
            inner.drain = None;
            inner.past.retain(|life| life.is_used());
            // Nobody knows a new gate yet: the route shows it a moment later.
            inner.life.gate.open();
            Ok(inner.view())
        })?;
        // Whoever waits for the end of a drain waits for nothing now.
        self.ends.send_replace(());
        Ok(opened)
    }

    /// An order about the engine itself: heard like one about the gate.
    pub(crate) fn hear(&self, epoch: Epoch, generation: Generation) -> Result<(), Refused> {
        self.with(|inner| inner.hear(epoch, generation).map(drop))
    }

    /// An order that names no life.
    pub(crate) fn hear_epoch(&self, epoch: Epoch) -> Result<(), Refused> {
        self.with(|inner| {
            let generation = inner.generation;
            inner.hear(epoch, generation).map(drop)
        })
    }

    /// Keeps the gate from being opened while `bar` holds. `unused`: only when it is closed and nothing is under way.
    pub(crate) fn bar(&self, bar: &'static str, unused: bool) -> Result<(), Refused> {
        self.with(|inner| {
            let why = match inner.bar {
                Some(other) => Some(other),
                None if unused && inner.life.gate.is_open() => Some("the gate is open: close it first"),
                None if unused && inner.is_used() => {
                    Some("requests are under way: wait until they are drained")
                }
                None => None,
            };
            match why {
                Some(why) => Err(Refused::Barred(inner.view(), why)),
                None => {
                    inner.bar = Some(bar);
                    Ok(())
                }
            }
        })
    }

    pub(crate) fn unbar(&self) {
        self.with(|inner| inner.bar = None);
    }

    /// Closes for good, whoever leads: this process ends.
    pub(crate) fn shut(&self, deadline: Instant) {
        self.with(|inner| {
            inner.ends = true;
            let drain = Drain { deadline: Some(deadline), on_deadline: OnDeadline::Cut, stage: Stage::Runs };
            // A drain that is to cut already is not given more time by the end, and one that is not is given all of it.
            inner.close(drain, true);
        });
    }

    /// Completes when nothing is under way, or the deadline of the present drain has passed and it is kept all the same.
    pub(crate) async fn drained(&self) -> wire::Gate {
        let mut ends = self.ends.subscribe();
        loop {
            let (done, view) = self.with(|inner| (inner.is_settled(), inner.view()));
            if done || ends.changed().await.is_err() {
                return view;
            }
        }
    }

    /// Ends drains; never returns. To be run once.
    pub(crate) async fn run(&self) {
        loop {
            let woken = self.wake.notified();
            match self.with(|inner| self.turn(inner, Instant::now())) {
                Some(due) => tokio::select! { () = woken => {}, () = sleep_until(due) => {} },
                None => woken.await,
            }
        }
    }

    /// Looks whether a drain is over, and when it is to be looked at again.
    fn turn(&self, inner: &mut Inner, now: Instant) -> Option<Instant> {
        let used = inner.is_used();
        let drain = inner.drain.as_mut()?;
        if drain.stage < Stage::Over && !used {
            drain.stage = Stage::Over;
            inner.cut.over = true;
            inner.past.clear();
            self.ends.send_replace(());
            return None;
        }
        let deadline = drain.deadline.filter(|_| drain.stage == Stage::Runs)?;
        if now < deadline {
            return Some(deadline);
        }
        drain.stage = Stage::Lapsed;
        if drain.on_deadline == OnDeadline::Cut {
            let over = || Fault::TurnOver { model: self.model.clone() };
            inner.cut.lives =
                inner.lives().filter(|life| life.gate.revoked().is_none()).map(Arc::clone).collect();
            inner.cut.lives.iter().for_each(|life| life.gate.revoke(over()));
        }
        self.ends.send_replace(());
        None
    }

    fn with<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut inner);
        let route = self.route.load();
        if route.target != inner.target || !Arc::ptr_eq(&route.life, &inner.life) {
            self.route.store(Arc::new(Route { life: Arc::clone(&inner.life), target: inner.target }));
        }
        result
    }
}

impl Inner {
    fn fence(&self, epoch: Epoch, generation: Generation) -> Result<bool, Refused> {
        match (epoch, generation).cmp(&(self.epoch, self.generation)) {
            std::cmp::Ordering::Less => Err(Refused::Stale(self.view())),
            order => match believe(epoch, self.epoch) {
                Ok(()) => Ok(order.is_eq()),
                Err(far) => Err(Refused::TooFar(self.view(), far)),
            },
        }
    }

    /// Takes note of an order; returns whether one of the same leader and life was heard before.
    fn hear(&mut self, epoch: Epoch, generation: Generation) -> Result<bool, Refused> {
        let again = self.fence(epoch, generation)?;
        (self.epoch, self.generation) = (epoch, generation);
        Ok(again)
    }

    fn close(&mut self, drain: Drain, again: bool) {
        let was_open = self.life.gate.is_open();
        self.life.gate.close();
        match &mut self.drain {
            Some(running) if again && !was_open => running.hasten(drain),
            _ => {
                self.drain = Some(drain);
                self.cut = Cut::default();
            }
        }
        self.life.keeper.notify_one();
    }

    fn lives(&self) -> impl Iterator<Item = &Arc<Life>> {
        self.past.iter().chain([&self.life])
    }

    fn is_used(&self) -> bool {
        self.lives().any(|life| life.is_used())
    }

    fn is_settled(&self) -> bool {
        self.drain.as_ref().is_none_or(|drain| match drain.stage {
            Stage::Runs => false,
            Stage::Lapsed => drain.on_deadline == OnDeadline::Keep,
            Stage::Over => true,
        })
    }

    fn view(&self) -> wire::Gate {
        let runs = self.drain.as_ref().filter(|drain| drain.stage == Stage::Runs);
        let left = runs.and_then(|drain| drain.deadline).map(|at| Millis::from(at - Instant::now()).0);
        wire::Gate {
            gated: !self.life.gate.is_open(),
            epoch: self.epoch,
            generation: self.generation,
            leases: self.lives().map(|life| life.gate.leases()).sum(),
            deadline: left,
            cut: self.cut.count(),
        }
    }
}

impl Cut {
    /// `None` while it may still grow, or where a drain was given up before its deadline.
    fn count(&self) -> Option<u32> {
        let ended = !self.lives.is_empty() && !self.lives.iter().any(|life| life.is_used());
        (self.over || ended).then(|| self.lives.iter().map(|life| life.cut.load(Ordering::Acquire)).sum())
    }
}

impl Drain {
    /// The same order again. It counts from the first time, or somebody who repeats it would put its deadline off.
    /// Whoever is cut is cut at a deadline that was given for that, and never at one at which they were to be kept.
    fn hasten(&mut self, again: Self) {
        match (self.stage, self.on_deadline, again.on_deadline) {
            (Stage::Runs, before, now) if before == now => {
                self.deadline = [self.deadline, again.deadline].into_iter().flatten().min();
            }
            (Stage::Runs | Stage::Lapsed, OnDeadline::Keep, OnDeadline::Cut) => *self = again,
            (Stage::Runs | Stage::Lapsed | Stage::Over, _, _) => {}
        }
    }
}

impl Life {
    fn new(generation: Generation, clock: Clock, keeper: &Arc<Notify>) -> Arc<Self> {
        Arc::new(Self {
            generation,
            gate: Gate::new(None, clock, Arc::clone(keeper)),
            untold: AtomicU32::new(0),
            cut: AtomicU32::new(0),
            keeper: Arc::clone(keeper),
        })
    }

    fn is_used(&self) -> bool {
        self.gate.leases() > 0 || self.untold.load(Ordering::Acquire) > 0
    }

    /// A lease for one request, when the gate is open.
    pub(crate) fn take(self: &Arc<Self>) -> Option<(Lease, Part)> {
        self.untold.fetch_add(1, Ordering::AcqRel);
        let part = Part(Arc::clone(self));
        Some((self.gate.take()?, part))
    }
}

impl Part {
    /// It did not end by itself. True, when a revocation is why.
    pub(crate) fn broke(&self) -> bool {
        let cut = self.0.gate.revoked().is_some();
        if cut {
            self.0.cut.fetch_add(1, Ordering::AcqRel);
        }
        cut
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if self.0.untold.fetch_sub(1, Ordering::AcqRel) == 1 && !self.0.gate.is_open() {
            self.0.keeper.notify_one();
        }
    }
}

#[cfg(test)]
mod tests;
