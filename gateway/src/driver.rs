//! Runs the fleet: the only caller of [`Fleet::on`], [`Fleet::plan`] and [`Fleet::issued`], and the only clock.
//!
//! One loop receives events, passes them to the fleet, asks it for a plan, records and executes that. Policy belongs in
//! `rouse::fleet`, not here. The order inside a turn matters and is always the same: gates close before the routes
//! change, and open after, so that a request with an old snapshot meets a closed gate and never the reverse.

use std::sync::Arc;

use rouse::{
    engine::Admission,
    fault::Fault,
    fleet::{
        Fleet, Plan, RoutingChanges,
        command::{CloseReason, Command},
        event::{CanaryVerdict, Event, Waiter, WaiterId},
    },
    units::{Generation, Tick},
};
use tokio::sync::{mpsc, oneshot};

use rouse_net::timer::sleep_until_some;
use rouse_platform::Platform;

mod gates;
mod handle;
mod journal;
mod parked_replies;
mod reports;
mod route_updates;
mod served_tokens;
mod timeline;
mod transition_log;
mod waits;

pub use handle::{
    CanaryGuard, ColdStart, DriverHandle, GrantedLease, LiveView, OperationStatus, ParkRequest, WaitBreakdown,
};
pub use journal::{Journal, JournalFile, replay};
pub use served_tokens::{ServedTokens, ServedTokensCache};
pub use timeline::{Timeline, TimelineEntry, TimelineKind, TimelineUpdate};
pub use waits::{QuotedWait, WaitForecasts};

use gates::EngineGates;
use handle::{DriverRequest, DriverState};
use parked_replies::ParkedReplies;
use transition_log::TransitionRecorder;
use waits::WaitRenewal;

/// Maximum number of events in a turn: a flood of events must not delay the plan.
const MAX_EVENTS_PER_TURN: usize = 256;

pub struct Driver {
    fleet: Fleet,
    platform: Arc<dyn Platform>,
    shared: Arc<DriverState>,
    requests: mpsc::Receiver<DriverRequest>,
    events: mpsc::Receiver<Event>,
    gates: EngineGates,
    queue: ParkedReplies,
    journal: Journal,
    recorder: TransitionRecorder,
    /// The last plan, for reports of reasons. Its commands are executed.
    plan: Plan,
    /// Callers that wait for the next turn's view.
    refresh_waiters: Vec<oneshot::Sender<()>>,
    /// Callers that wait for the next turn.
    turn_waiters: Vec<oneshot::Sender<()>>,
    wait_renewal: WaitRenewal,
    /// Requests that arrived since the last turn, with the place for the quote of their wait.
    unquoted: Vec<(WaiterId, QuotedWait)>,
    /// An order that arrived behind events. The fleet must process those before it validates the order.
    deferred_order: Option<DriverRequest>,
}

impl Driver {
    /// Runs until an ordered shutdown is complete.
    pub async fn run(mut self, journal: Option<JournalFile>) {
        if let Some(file) = journal {
            self.journal.write_to(file);
        }
        let mut batch = Vec::new();
        while !self.fleet.is_finished() {
            self.receive(&mut batch).await;
            self.turn(&mut batch);
        }
        // This is the final view.
        self.shared.publish_view(&self.fleet, &self.plan);
        self.queue.close();
        self.journal.close().await;
    }

    /// Decides about these events, and replaces them by the events that the execution causes.
    fn turn(&mut self, batch: &mut Vec<Event>) {
        let now = self.shared.clock.now();
        self.gates.sample(batch, self.fleet.leads(), now);
        self.shared.served_tokens.sample(&self.fleet, batch);
        for event in &*batch {
            self.fleet.on(event, now);
        }
        self.plan = self.fleet.plan(now);
        self.journal.write(now, batch, &self.fleet);
        self.fleet.issued(&self.plan.commands, now);
        debug_assert!(self.fleet.broken_invariants().is_empty(), "{:?}", self.fleet.broken_invariants());
        self.recorder.turn(&self.fleet, batch, &self.plan.commands, now);
        self.shared.count_turn();
        batch.clear();
        self.quote_arrivals(now);
        self.execute(now, batch);
        debug_assert!(
            self.gates.are_current(&self.fleet) && self.shared.is_current(&self.fleet, &self.gates)
        );
        if !self.refresh_waiters.is_empty() {
            self.shared.publish_view(&self.fleet, &self.plan);
            self.refresh_waiters.drain(..).for_each(|reply| reply.send(()).unwrap_or_default());
        }
        self.turn_waiters.drain(..).for_each(|reply| reply.send(()).unwrap_or_default());
    }

    /// Quotes their waits to the requests that arrived since the last turn and still wait.
    fn quote_arrivals(&mut self, now: Tick) {
        let unquoted = std::mem::take(&mut self.unquoted);
        if unquoted.is_empty() {
            return;
        }
        let arrived: Vec<WaiterId> = unquoted.iter().map(|(waiter, _)| *waiter).collect();
        let quotes = self.fleet.quote_arrivals(&self.plan, &arrived, now);
        for (waiter, model, forecast) in quotes {
            if let Some((_, place)) = unquoted.iter().find(|(id, _)| *id == waiter) {
                place.get_or_init(|| forecast.range);
            }
            self.shared.waits.set(model, forecast);
        }
    }

    /// Brings the expected waits that waiting requests read up to date with the changes of a turn.
    fn update_waits(&mut self, changes: &RoutingChanges, now: Tick) {
        for model in changes.demand.iter().filter(|model| self.fleet.waiting(model) == 0) {
            self.shared.waits.remove(model);
        }
        if changes.reconfigured || !changes.models.is_empty() {
            self.wait_renewal.mark_stale();
        }
        self.renew_waits(now);
    }

    /// Renews these waits if an engine has changed, and the last renewal was long enough ago.
    fn renew_waits(&mut self, now: Tick) {
        if self.wait_renewal.begin(now) {
            let waits = self.fleet.expected_waits_of(&self.plan, self.fleet.queued_models());
            self.shared.waits.replace(waits);
        }
    }

    /// Waits for an event, then takes all that are pending.
    async fn receive(&mut self, batch: &mut Vec<Event>) {
        let clock = self.shared.clock;
        let sleep = sleep_until_some(self.fleet.next_deadline().map(|at| clock.instant_at(at)));
        let renewal = sleep_until_some(self.wait_renewal.due().map(|at| clock.instant_at(at)));
        tokio::pin!(sleep, renewal);
        let mut happened = !batch.is_empty();
        // The last turn processed the events ahead of this order. The events that its execution caused are newer.
        if let Some(order) = self.deferred_order.take() {
            happened |= self.handle_request(order, batch);
        }
        happened |= self.take_reports(batch);
        while !happened {
            happened = true;
            tokio::select! {
                biased;
                Some(request) = self.requests.recv() => happened = self.accept_request(request, batch),
                () = self.shared.reports.changed() => happened = self.take_reports(batch),
                Some(event) = self.events.recv() => batch.push(event),
                () = self.gates.changed() => {}
                () = &mut sleep => {}
                () = &mut renewal => {
                    // The fleet has received no event since the last plan, so no turn is needed for that.
                    self.renew_waits(clock.now());
                    let next = self.wait_renewal.due().map(|at| clock.instant_at(at));
                    renewal.set(sleep_until_some(next));
                    happened = false;
                }
            }
        }
        // A turn that already has events yields to other tasks too.
        tokio::task::consume_budget().await;
        while batch.len() < MAX_EVENTS_PER_TURN && self.deferred_order.is_none() {
            if let Ok(request) = self.requests.try_recv() {
                self.accept_request(request, batch);
            } else if let Ok(event) = self.events.try_recv() {
                batch.push(event);
            } else {
                return;
            }
        }
    }

    /// Takes what other threads have reported. Returns whether that needs a turn: the place of a waiter that was
    /// answered as it left is released without one.
    fn take_reports(&mut self, batch: &mut Vec<Event>) -> bool {
        let before = batch.len();
        loop {
            let left = self.shared.reports.take(batch, MAX_EVENTS_PER_TURN);
            self.shared.release_positions(left.len());
            for &waiter in &left {
                if self.queue.remove(waiter).is_some() {
                    batch.push(Event::Left { waiter });
                }
            }
            // The next turn takes the others. But if all of these have their answers, there may be none.
            if left.len() < MAX_EVENTS_PER_TURN {
                return batch.len() > before;
            }
        }
    }

    /// Handles a request behind the reports that precede it. Returns whether that needs a turn.
    fn accept_request(&mut self, request: DriverRequest, batch: &mut Vec<Event>) -> bool {
        let reported = self.take_reports(batch);
        if matches!(request, DriverRequest::SubmitOrder { .. }) && !batch.is_empty() {
            self.deferred_order = Some(request);
            return true;
        }
        self.handle_request(request, batch) || reported
    }

    /// Returns whether the request needs a turn.
    fn handle_request(&mut self, request: DriverRequest, batch: &mut Vec<Event>) -> bool {
        match request {
            DriverRequest::Park { waiter, reply, quoted } => {
                // The report that the waiter has left may be taken before this request.
                let left = reply.is_closed().then_some(Event::Left { waiter: waiter.id });
                if left.is_none() {
                    self.queue.add(waiter.clone(), reply);
                    self.unquoted.push((waiter.id, quoted));
                }
                batch.push(Event::Arrived { waiter });
                batch.extend(left);
            }
            DriverRequest::SubmitOrder { model, order, reply } => {
                let answer = self.fleet.validate_action(&model, order).map(|()| {
                    let operation = self.shared.begin(model.clone(), order);
                    batch.push(Event::OperatorRequest { operation, model, action: order });
                    operation
                });
                // The requester may be gone; the order stands.
                drop(reply.send(answer));
            }
            DriverRequest::Refresh(reply) => self.refresh_waiters.push(reply),
            DriverRequest::TakeTurn(reply) => self.turn_waiters.push(reply),
            // The fleet has received no event since the last plan, so the plan's reasons hold.
            DriverRequest::Inspect(read) => {
                read(&self.fleet, &self.plan, &self.gates);
                return false;
            }
        }
        true
    }

    fn execute(&mut self, now: Tick, again: &mut Vec<Event>) {
        let commands = std::mem::take(&mut self.plan.commands);
        // Gateways share the stubs' gates, and the leader controls them. What ends only with this gateway stays local.
        let has_gates = self.platform.has_stub_gates() && self.fleet.leads();
        let elsewhere = |command: &Command| match command {
            Command::CloseGate { reason: why, .. } => has_gates && *why != CloseReason::Shutdown,
            Command::RevokeLeases { fault, .. } => has_gates && *fault != Fault::ShuttingDown,
            _ => has_gates,
        };
        for command in &commands {
            match command {
                Command::CloseGate { engine, generation, .. } => {
                    again.extend(self.gates.close(engine, *generation, elsewhere(command)))
                }
                Command::RevokeLeases { engine, generation, fault } => {
                    self.gates.revoke(engine, *generation, fault)
                }
                Command::AwaitStub { engine, generation } => {
                    self.gates.close_without_drain(engine, *generation)
                }
                _ => {}
            }
        }
        let changes = self.fleet.take_routing_changes();
        self.gates.sync(&self.fleet, &changes, self.platform.as_ref());
        self.shared.publish(&self.fleet, &changes, &self.gates);
        self.update_waits(&changes, now);
        self.platform.turn_completed(&self.fleet, &self.plan, &changes);
        for command in commands {
            match command {
                Command::OpenGate { ref engine, .. } => {
                    // A plan may open a gate and close it again. Closes went first, so the fleet's admission decides
                    // here.
                    if self
                        .fleet
                        .engine(engine)
                        .is_some_and(|e| !matches!(e.admission, Admission::Closed | Admission::AwaitingStub))
                    {
                        self.gates.open(engine);
                        if elsewhere(&command) {
                            self.platform.submit(command);
                        }
                    }
                }
                Command::Grant { waiter, engine, canary, .. } => {
                    if let Some(waiter) = self.grant(waiter, &engine, canary, now) {
                        again.push(Event::Arrived { waiter });
                        if canary {
                            let generation =
                                self.fleet.engine(&engine).map_or(Generation(0), |e| e.generation);
                            again.push(Event::Canary {
                                engine,
                                generation,
                                verdict: CanaryVerdict::Inconclusive,
                            });
                        }
                    }
                }
                Command::Refuse { waiter, fault } => {
                    self.platform.request_refused(&self.fleet, &fault);
                    if let Some((waiter, reply)) = self.queue.remove(waiter) {
                        self.recorder.refused(&waiter.model, &fault, now);
                        // An error means that the request has left.
                        drop(reply.send(Err(fault)));
                    }
                }
                Command::FinishOperation { operation, outcome } => self.shared.finish(operation, outcome),
                Command::CloseGate { .. } | Command::RevokeLeases { .. } if !elsewhere(&command) => {}
                command => self.platform.submit(command),
            }
        }
        self.gates.set_queued(&self.fleet, again);
    }

    /// Takes the lease and sends it to the waiter. If it is never received, its drop releases it.
    ///
    /// Returns the waiter if a newcomer took the last place at the same moment.
    fn grant(
        &mut self,
        id: WaiterId,
        engine: &rouse::model::EngineId,
        canary: bool,
        now: Tick,
    ) -> Option<Waiter> {
        let (waiter, reply) = self.queue.remove(id)?;
        let state = self.fleet.engine(engine)?;
        match self.gates.take_queued(engine) {
            Some(place) => {
                let waited = WaitBreakdown::of(&waiter, state, canary, now);
                let canary = canary.then(|| CanaryGuard::new(&self.shared, engine.clone(), state.generation));
                drop(reply.send(Ok(place.into_granted(engine.clone(), state.generation, canary, waited))));
                None
            }
            None => {
                self.queue.add(waiter.clone(), reply);
                Some(waiter)
            }
        }
    }
}

#[cfg(test)]
mod tests;
