//! The only clock, and the only caller of all three verbs.
//!
//! One loop: receive what happened, tell the fleet, ask it what to do, record that, do it. There is no policy here;
//! whatever looks like one belongs into `rouse::fleet`. The order inside a turn matters, though, and is the same every
//! time: gates close before the routes change, and open after, so that a request that reads an old snapshot meets a
//! closed gate and never the reverse.

use std::sync::Arc;

use rouse::{
    engine::Admission,
    fault::Fault,
    fleet::{
        Fleet, Plan,
        command::{CloseReason, Command},
        event::{CanaryVerdict, Event, Waiter, WaiterId},
    },
    units::{Generation, Tick},
};
use tokio::sync::{mpsc, oneshot};

use crate::platform::Platform;

mod gates;
mod handle;
mod journal;
mod parked_replies;
mod route_updates;
mod served_tokens;
mod transition_log;

pub use handle::{
    CanaryGuard, ColdStart, DriverHandle, GrantedLease, OperationStatus, ParkRequest, WaitBreakdown,
};
pub use journal::{Journal, JournalFile, replay};
pub use served_tokens::{ServedTokens, ServedTokensCache};

use gates::EngineGates;
use handle::{DriverRequest, DriverState};
use parked_replies::ParkedReplies;
use transition_log::TransitionRecorder;

/// Events in a turn at most: a flood of them must not keep the plan from running.
const MAX_EVENTS_PER_TURN: usize = 256;

pub struct Driver {
    fleet: Fleet,
    platform: Arc<dyn Platform>,
    shared: Arc<DriverState>,
    requests: mpsc::UnboundedReceiver<DriverRequest>,
    events: mpsc::Receiver<Event>,
    gates: EngineGates,
    queue: ParkedReplies,
    journal: Journal,
    recorder: TransitionRecorder,
    /// The last one, for those who ask why; what it ordered is done.
    plan: Plan,
    /// Who waits for the next turn's view.
    refresh_waiters: Vec<oneshot::Sender<()>>,
    /// An order is judged by what the fleet is: this one came behind events that it has not heard yet.
    deferred_order: Option<DriverRequest>,
}

impl Driver {
    /// Runs until shutdown was ordered and is complete.
    pub async fn run(mut self, journal: Option<JournalFile>) {
        if let Some(file) = journal {
            self.journal.write_to(file);
        }
        let mut batch = Vec::new();
        while !self.fleet.is_finished() {
            self.receive(&mut batch).await;
            self.turn(&mut batch);
        }
        // What is seen from now on.
        self.shared.publish_view(&self.fleet, &self.plan);
        self.queue.close();
        self.journal.close().await;
    }

    /// Decides about these events; they are replaced by those that follow from what was done.
    fn turn(&mut self, batch: &mut Vec<Event>) {
        let now = self.shared.clock.now();
        self.gates.sample(batch, self.fleet.leads());
        self.shared.served_tokens.sample(&self.fleet, batch);
        for event in &*batch {
            self.fleet.on(event, now);
        }
        self.plan = self.fleet.plan(now);
        self.journal.write(now, batch, &self.fleet);
        self.fleet.issued(&self.plan.commands, now);
        debug_assert!(self.fleet.broken_invariants().is_empty(), "{:?}", self.fleet.broken_invariants());
        self.recorder.turn(&self.fleet, batch, &self.plan.commands, now);
        batch.clear();
        self.execute(now, batch);
        debug_assert!(
            self.gates.are_current(&self.fleet) && self.shared.is_current(&self.fleet, &self.gates)
        );
        if !self.refresh_waiters.is_empty() {
            self.shared.publish_view(&self.fleet, &self.plan);
            self.refresh_waiters.drain(..).for_each(|reply| reply.send(()).unwrap_or_default());
        }
    }

    /// Waits for anything to happen, then takes all that has.
    async fn receive(&mut self, batch: &mut Vec<Event>) {
        let due = self.fleet.next_deadline().map(|at| self.shared.clock.instant_at(at));
        let sleep = async {
            match due {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(sleep);
        let mut happened = !batch.is_empty();
        // What it came behind was heard in the last turn. What that turn made of it is newer than the order.
        if let Some(order) = self.deferred_order.take() {
            happened |= self.handle_request(order, batch);
        }
        while !happened {
            happened = true;
            tokio::select! {
                biased;
                Some(ask) = self.requests.recv() => happened = self.handle_request(ask, batch),
                Some(event) = self.events.recv() => batch.push(event),
                () = self.gates.changed() => {}
                () = &mut sleep => {}
            }
        }
        // Also a turn that has something to do already lets others run.
        tokio::task::consume_budget().await;
        while batch.len() < MAX_EVENTS_PER_TURN && self.deferred_order.is_none() {
            if let Ok(ask) = self.requests.try_recv() {
                if matches!(ask, DriverRequest::SubmitOrder { .. }) && !batch.is_empty() {
                    self.deferred_order = Some(ask);
                } else {
                    self.handle_request(ask, batch);
                }
            } else if let Ok(event) = self.events.try_recv() {
                batch.push(event);
            } else {
                return;
            }
        }
    }

    /// Whether a turn is wanted for it.
    fn handle_request(&mut self, ask: DriverRequest, batch: &mut Vec<Event>) -> bool {
        match ask {
            DriverRequest::Park { waiter, reply } => {
                self.queue.add(waiter.clone(), reply);
                batch.push(Event::Arrived { waiter });
            }
            DriverRequest::CancelPark(waiter) => {
                if self.queue.remove(waiter).is_some() {
                    batch.push(Event::Left { waiter });
                }
            }
            DriverRequest::SubmitOrder { model, order, reply } => {
                let answer = self.fleet.validate_action(&model, order).map(|()| {
                    let operation = self.shared.begin(model.clone(), order);
                    batch.push(Event::OperatorRequest { operation, model, action: order });
                    operation
                });
                // Whoever asked may have gone; the order stands.
                drop(reply.send(answer));
            }
            DriverRequest::Event(event) => batch.push(event),
            DriverRequest::Refresh(reply) => self.refresh_waiters.push(reply),
            // Nothing was told to the fleet since the last plan: its reasons hold.
            DriverRequest::Inspect(read) => {
                read(&self.fleet, &self.plan, &self.gates);
                return false;
            }
        }
        true
    }

    fn execute(&mut self, now: Tick, again: &mut Vec<Event>) {
        let commands = std::mem::take(&mut self.plan.commands);
        // What ends with this gateway alone ends here alone: others pass the same gates, and one gateway leads them.
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
        self.platform.turn_completed(&self.fleet, &self.plan, &changes);
        for command in commands {
            match command {
                Command::OpenGate { ref engine, .. } => {
                    // A plan may open a gate and close it again; closes went first, so the last word is the fleet's.
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
                    self.queue.refuse(waiter, fault);
                }
                Command::FinishOperation { operation, outcome } => self.shared.finish(operation, outcome),
                Command::CloseGate { .. } | Command::RevokeLeases { .. } if !elsewhere(&command) => {}
                command => self.platform.submit(command),
            }
        }
        self.gates.set_queued(&self.fleet, again);
    }

    /// Takes the lease and sends it, so that one that is never received is released by its drop. Gives the waiter
    /// back when a newcomer took the last place in the same instant.
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
