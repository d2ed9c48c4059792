//! The fenced gate, and the target of requests while it is open.
//!
//! Relays read only the [`GateRoute`]: the current generation's gate, and the engine's address. Orders change it under
//! a lock that no request takes. A gate that a revocation or a newer generation has closed for good is never opened
//! again, so no lease of an earlier generation counts as one of the current generation. Leases of earlier generations
//! still count against a drain: a new generation number does not make the engine idle.
//!
//! Every order is fenced (see [`fence`]). A repeated order changes nothing, except that it may bring a drain's deadline
//! forward.

mod drain;
mod fence;
mod generation;

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use arc_swap::{ArcSwap, Guard};
use drain::{CutGenerations, DrainStage, GateDrain};
pub(crate) use fence::GateRejection;
pub(crate) use generation::{ExchangeTracker, GateGeneration};
use rouse::{
    fault::Fault,
    model::ModelName,
    units::{Generation, Millis, Tick},
};
use rouse_net::{
    lease::TickClock,
    stub_api::{self, CloseGateRequest, DrainDeadlineAction, Epoch, OpenGateRequest},
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep_until},
};

/// The gate and the target that a request needs.
#[derive(Clone, Debug)]
pub(crate) struct GateRoute {
    pub(crate) current: Arc<GateGeneration>,
    pub(crate) target: Option<SocketAddr>,
}

/// Opens, closes and drains the gate.
#[derive(Debug)]
pub(crate) struct GateController {
    state: Mutex<GateState>,
    route: ArcSwap<GateRoute>,
    /// Notified when an exchange ends or an order arrives.
    notify: Arc<Notify>,
    /// Notified when a drain ends.
    drain_ended_tx: watch::Sender<()>,
    clock: TickClock,
    model: ModelName,
}

#[derive(Debug)]
struct GateState {
    epoch: Epoch,
    generation: Generation,
    /// The largest number of an order of this epoch about this generation.
    sequence: u64,
    current: Arc<GateGeneration>,
    /// Earlier generations with outstanding leases.
    previous: Vec<Arc<GateGeneration>>,
    drain: Option<GateDrain>,
    /// The generations that the last drain revoked.
    cut: CutGenerations,
    /// Why the gate must not open now.
    open_blocker: Option<&'static str>,
    /// The gate will not open again.
    shutting_down: bool,
    target: Option<SocketAddr>,
}

impl GateController {
    pub(crate) fn new(model: ModelName, open: bool) -> Self {
        let wake = Arc::<Notify>::default();
        let clock = TickClock::new(Instant::now(), Tick(1));
        let initial = GateGeneration::new(Generation(0), clock, &wake);
        if open {
            initial.gate.open();
        }
        let inner = GateState {
            epoch: 0,
            generation: Generation(0),
            sequence: 0,
            current: Arc::clone(&initial),
            previous: Vec::new(),
            drain: None,
            cut: CutGenerations::default(),
            open_blocker: None,
            shutting_down: false,
            target: None,
        };
        Self {
            state: Mutex::new(inner),
            route: ArcSwap::from_pointee(GateRoute { current: initial, target: None }),
            notify: wake,
            drain_ended_tx: watch::Sender::new(()),
            clock,
            model,
        }
    }

    /// Returns the route for one request.
    pub(crate) fn route(&self) -> Guard<Arc<GateRoute>> {
        self.route.load()
    }

    pub(crate) fn target(&self) -> Option<SocketAddr> {
        self.route.load().target
    }

    pub(crate) fn set_target(&self, target: SocketAddr) {
        self.update(|inner| inner.target = Some(target));
    }

    pub(crate) fn view(&self) -> stub_api::GateStatus {
        self.update(|inner| inner.view())
    }

    pub(crate) fn is_open(&self) -> bool {
        self.route.load().current.gate.is_open()
    }

    /// Whether requests of the current generation are in flight.
    pub(crate) fn has_leases(&self) -> bool {
        self.route.load().current.gate.leases() > 0
    }

    /// Closes the gate; no lease is granted from then on.
    ///
    /// `sequence`: the number of the order; `None` if the sender counts none.
    pub(crate) fn close(
        &self,
        order: &CloseGateRequest,
        sequence: Option<u64>,
        now: Instant,
    ) -> Result<stub_api::GateStatus, GateRejection> {
        self.update(|inner| {
            // During shutdown an order may bring the last drain's deadline forward, but not postpone it.
            let again = inner.accept(order.epoch, order.generation, sequence)? || inner.shutting_down;
            let drain = GateDrain {
                deadline: order.drain_deadline.map(|ms| now + Millis(ms).duration()),
                on_deadline: order.on_deadline,
                stage: DrainStage::Running,
            };
            inner.close(drain, again);
            Ok(inner.view())
        })
    }

    /// Opens the gate for this generation. `sequence`: as for [`Self::close`].
    pub(crate) fn open(
        &self,
        order: &OpenGateRequest,
        sequence: Option<u64>,
    ) -> Result<stub_api::GateStatus, GateRejection> {
        let opened = self.update(|inner| {
            if let Some(bar) =
                inner.open_blocker.or_else(|| inner.shutting_down.then_some("the stub is shutting down"))
            {
                inner.fence(order.epoch, order.generation, sequence)?;
                return Err(GateRejection::OpenBlocked(inner.view(), bar));
            }
            inner.accept(order.epoch, order.generation, sequence)?;
            let spent =
                inner.current.gate.revoked().is_some() || inner.current.generation != order.generation;
            if spent {
                // No request takes a lease there any more, even with a route that it read earlier.
                inner.current.gate.close();
                let next_generation = GateGeneration::new(order.generation, self.clock, &self.notify);
                inner.previous.push(std::mem::replace(&mut inner.current, next_generation));
            }
            inner.drain = None;
            inner.previous.retain(|generation| generation.is_used());
            // No request sees the new gate until the route is updated.
            inner.current.gate.open();
            Ok(inner.view())
        })?;
        // An open gate ends the wait for the drain.
        self.drain_ended_tx.send_replace(());
        Ok(opened)
    }

    /// Accepts an order about the engine, fenced like an order about the gate.
    pub(crate) fn accept(&self, epoch: Epoch, generation: Generation) -> Result<(), GateRejection> {
        self.update(|inner| inner.accept(epoch, generation, None).map(drop))
    }

    /// Accepts an order that names no generation.
    pub(crate) fn accept_epoch(&self, epoch: Epoch) -> Result<(), GateRejection> {
        self.update(|inner| {
            let generation = inner.generation;
            inner.accept(epoch, generation, None).map(drop)
        })
    }

    /// Keeps the gate closed until [`Self::unblock_open`]; `bar` is the reason. With `unused`, fails unless the gate is
    /// closed and no request is in flight.
    pub(crate) fn block_open(&self, bar: &'static str, unused: bool) -> Result<(), GateRejection> {
        self.update(|inner| {
            let blocker = match inner.open_blocker {
                Some(other) => Some(other),
                None if unused && inner.current.gate.is_open() => Some("the gate is open: close it first"),
                None if unused && inner.is_used() => {
                    Some("requests are in flight: wait until the gate has drained")
                }
                None => None,
            };
            match blocker {
                Some(blocker) => Err(GateRejection::OpenBlocked(inner.view(), blocker)),
                None => {
                    inner.open_blocker = Some(bar);
                    Ok(())
                }
            }
        })
    }

    pub(crate) fn unblock_open(&self) {
        self.update(|inner| inner.open_blocker = None);
    }

    /// Closes the gate for good, whatever the epoch, because the process ends.
    pub(crate) fn close_for_shutdown(&self, deadline: Instant) {
        self.update(|inner| {
            inner.shutting_down = true;
            let drain = GateDrain {
                deadline: Some(deadline),
                on_deadline: DrainDeadlineAction::Cut,
                stage: DrainStage::Running,
            };
            // The shutdown does not extend a drain that already cuts at its deadline. A drain that keeps its requests
            // gets the whole hold.
            inner.close(drain, true);
        });
    }

    /// Waits for the end of the drain.
    ///
    /// A drain ends when no request is in flight, or at its deadline if it keeps its requests.
    pub(crate) async fn wait_drained(&self) -> stub_api::GateStatus {
        let mut ends = self.drain_ended_tx.subscribe();
        loop {
            let (done, view) = self.update(|inner| (inner.is_drain_resolved(), inner.view()));
            if done || ends.changed().await.is_err() {
                return view;
            }
        }
    }

    /// Advances drains forever. Run it once.
    pub(crate) async fn run(&self) {
        loop {
            let woken = self.notify.notified();
            match self.update(|inner| self.advance_drain(inner, Instant::now())) {
                Some(due) => tokio::select! { () = woken => {}, () = sleep_until(due) => {} },
                None => woken.await,
            }
        }
    }

    /// Advances the drain, and returns when to check it again.
    fn advance_drain(&self, inner: &mut GateState, now: Instant) -> Option<Instant> {
        let used = inner.is_used();
        let drain = inner.drain.as_mut()?;
        if drain.stage < DrainStage::Done && !used {
            drain.stage = DrainStage::Done;
            inner.cut.drain_over = true;
            inner.previous.clear();
            self.drain_ended_tx.send_replace(());
            return None;
        }
        let deadline = drain.deadline.filter(|_| drain.stage == DrainStage::Running)?;
        if now < deadline {
            return Some(deadline);
        }
        drain.stage = DrainStage::DeadlinePassed;
        if drain.on_deadline == DrainDeadlineAction::Cut {
            let over = || Fault::TurnEnded { model: self.model.clone() };
            inner.cut.generations = inner
                .all_generations()
                .filter(|generation| generation.gate.revoked().is_none())
                .map(Arc::clone)
                .collect();
            inner.cut.generations.iter().for_each(|generation| generation.gate.revoke(over()));
        }
        self.drain_ended_tx.send_replace(());
        None
    }

    fn update<T>(&self, change: impl FnOnce(&mut GateState) -> T) -> T {
        let mut inner = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut inner);
        let route = self.route.load();
        if route.target != inner.target || !Arc::ptr_eq(&route.current, &inner.current) {
            self.route
                .store(Arc::new(GateRoute { current: Arc::clone(&inner.current), target: inner.target }));
        }
        result
    }
}

impl GateState {
    fn close(&mut self, drain: GateDrain, again: bool) {
        let was_open = self.current.gate.is_open();
        self.current.gate.close();
        match &mut self.drain {
            Some(running) if again && !was_open => running.tighten(drain),
            _ => {
                self.drain = Some(drain);
                self.cut = CutGenerations::default();
            }
        }
        self.current.notify.notify_one();
    }

    fn all_generations(&self) -> impl Iterator<Item = &Arc<GateGeneration>> {
        self.previous.iter().chain([&self.current])
    }

    fn is_used(&self) -> bool {
        self.all_generations().any(|generation| generation.is_used())
    }

    fn is_drain_resolved(&self) -> bool {
        self.drain.as_ref().is_none_or(|drain| match drain.stage {
            DrainStage::Running => false,
            DrainStage::DeadlinePassed => drain.on_deadline == DrainDeadlineAction::Keep,
            DrainStage::Done => true,
        })
    }

    fn view(&self) -> stub_api::GateStatus {
        let runs = self.drain.as_ref().filter(|drain| drain.stage == DrainStage::Running);
        let time_left = runs.and_then(|drain| drain.deadline).map(|at| Millis::from(at - Instant::now()).0);
        stub_api::GateStatus {
            gated: !self.current.gate.is_open(),
            epoch: self.epoch,
            generation: self.generation,
            leases: self.all_generations().map(|generation| generation.gate.leases()).sum(),
            deadline: time_left,
            cut: self.cut.count(),
        }
    }
}

#[cfg(test)]
mod tests;
