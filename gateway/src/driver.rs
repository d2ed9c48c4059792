//! The only clock, and the only caller of all three verbs.
//!
//! One loop: receive what happened, tell the fleet, ask it what to do, record that, do it. There is no policy here;
//! whatever looks like one belongs into `rouse::fleet`. The order inside a turn matters, though, and is the same every
//! time: gates close before the routes change, and open after, so that a request that reads an old snapshot meets a
//! closed gate and never the reverse.

use std::sync::Arc;

use rouse::{
    engine::Door,
    fault::Fault,
    fleet::{
        Fleet, Plan,
        command::{Command, Why},
        event::{Event, Verdict, Waiter, WaiterId},
    },
    units::{Generation, Tick},
};
use tokio::sync::{mpsc, oneshot};

use crate::platform::Platform;

mod gates;
mod handle;
mod journal;
mod publish;
mod queue;
mod record;
mod served;

pub use handle::{Canary, ColdStart, Granted, Handle, Operation, Parking, Waited};
pub use journal::{Journal, JournalFile, replay};
pub use served::{Known, Served};

use gates::Gates;
use handle::{Ask, Shared};
use queue::Queue;
use record::Recorder;

/// Events in a turn at most: a flood of them must not keep the plan from running.
const BATCH: usize = 256;

pub struct Driver {
    fleet: Fleet,
    platform: Arc<dyn Platform>,
    shared: Arc<Shared>,
    asks: mpsc::UnboundedReceiver<Ask>,
    events: mpsc::Receiver<Event>,
    gates: Gates,
    queue: Queue,
    journal: Journal,
    recorder: Recorder,
    /// The last one, for those who ask why; what it ordered is done.
    plan: Plan,
    /// Who waits for the next turn's view.
    looking: Vec<oneshot::Sender<()>>,
    /// An order is judged by what the fleet is: this one came behind events that it has not heard yet.
    held: Option<Ask>,
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
        self.shared.show(&self.fleet, &self.plan);
        self.queue.close();
        self.journal.close().await;
    }

    /// Decides about these events; they are replaced by those that follow from what was done.
    fn turn(&mut self, batch: &mut Vec<Event>) {
        let now = self.shared.clock.now();
        self.gates.sample(batch, self.fleet.leads());
        self.shared.served.sample(&self.fleet, batch);
        for event in &*batch {
            self.fleet.on(event, now);
        }
        self.plan = self.fleet.plan(now);
        self.journal.write(now, batch, &self.fleet);
        self.fleet.issued(&self.plan.commands, now);
        debug_assert!(self.fleet.check().is_empty(), "{:?}", self.fleet.check());
        self.recorder.turn(&self.fleet, batch, &self.plan.commands, now);
        batch.clear();
        self.execute(now, batch);
        debug_assert!(
            self.gates.are_current(&self.fleet) && self.shared.is_current(&self.fleet, &self.gates)
        );
        if !self.looking.is_empty() {
            self.shared.show(&self.fleet, &self.plan);
            self.looking.drain(..).for_each(|reply| reply.send(()).unwrap_or_default());
        }
    }

    /// Waits for anything to happen, then takes all that has.
    async fn receive(&mut self, batch: &mut Vec<Event>) {
        let due = self.fleet.next_deadline().map(|at| self.shared.clock.instant(at));
        let sleep = async {
            match due {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(sleep);
        let mut happened = !batch.is_empty();
        // What it came behind was heard in the last turn. What that turn made of it is newer than the order.
        if let Some(order) = self.held.take() {
            happened |= self.take(order, batch);
        }
        while !happened {
            happened = true;
            tokio::select! {
                biased;
                Some(ask) = self.asks.recv() => happened = self.take(ask, batch),
                Some(event) = self.events.recv() => batch.push(event),
                () = self.gates.changed() => {}
                () = &mut sleep => {}
            }
        }
        // Also a turn that has something to do already lets others run.
        tokio::task::consume_budget().await;
        while batch.len() < BATCH && self.held.is_none() {
            if let Ok(ask) = self.asks.try_recv() {
                if matches!(ask, Ask::Order { .. }) && !batch.is_empty() {
                    self.held = Some(ask);
                } else {
                    self.take(ask, batch);
                }
            } else if let Ok(event) = self.events.try_recv() {
                batch.push(event);
            } else {
                return;
            }
        }
    }

    /// Whether a turn is wanted for it.
    fn take(&mut self, ask: Ask, batch: &mut Vec<Event>) -> bool {
        match ask {
            Ask::Park { waiter, reply } => {
                self.queue.add(waiter.clone(), reply);
                batch.push(Event::Arrived { waiter });
            }
            Ask::Leave(waiter) => {
                if self.queue.remove(waiter).is_some() {
                    batch.push(Event::Left { waiter });
                }
            }
            Ask::Order { model, order, reply } => {
                let answer = self.fleet.forbids(&model, order).map(|()| {
                    let operation = self.shared.begin(model.clone(), order);
                    batch.push(Event::Operator { operation, model, order });
                    operation
                });
                // Whoever asked may have gone; the order stands.
                drop(reply.send(answer));
            }
            Ask::Event(event) => batch.push(event),
            Ask::Look(reply) => self.looking.push(reply),
            // Nothing was told to the fleet since the last plan: its reasons hold.
            Ask::Read(read) => {
                read(&self.fleet, &self.plan, &self.gates);
                return false;
            }
        }
        true
    }

    fn execute(&mut self, now: Tick, again: &mut Vec<Event>) {
        let commands = std::mem::take(&mut self.plan.commands);
        // What ends with this gateway alone ends here alone: others pass the same gates, and one gateway leads them.
        let has_gates = self.platform.has_gates() && self.fleet.leads();
        let elsewhere = |command: &Command| match command {
            Command::CloseGate { why, .. } => has_gates && *why != Why::Shutdown,
            Command::Revoke { fault, .. } => has_gates && *fault != Fault::ShuttingDown,
            _ => has_gates,
        };
        for command in &commands {
            match command {
                Command::CloseGate { engine, generation, .. } => {
                    again.extend(self.gates.close(engine, *generation, elsewhere(command)))
                }
                Command::Revoke { engine, generation, fault } => {
                    self.gates.revoke(engine, *generation, fault)
                }
                Command::Hold { engine, generation } => self.gates.hold(engine, *generation),
                _ => {}
            }
        }
        let changes = self.fleet.take_changes();
        self.gates.follow(&self.fleet, &changes, self.platform.as_ref());
        self.shared.publish(&self.fleet, &changes, &self.gates);
        self.platform.follow(&self.fleet, &self.plan, &changes);
        for command in commands {
            match command {
                Command::OpenGate { ref engine, .. } => {
                    // A plan may open a gate and close it again; closes went first, so the last word is the fleet's.
                    if self.fleet.engine(engine).is_some_and(|e| !matches!(e.door, Door::Closed | Door::Held))
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
                            again.push(Event::Canary { engine, generation, verdict: Verdict::Inconclusive });
                        }
                    }
                }
                Command::Refuse { waiter, fault } => {
                    self.platform.refused(&self.fleet, &fault);
                    self.queue.refuse(waiter, fault);
                }
                Command::Finish { operation, outcome } => self.shared.finish(operation, outcome),
                Command::CloseGate { .. } | Command::Revoke { .. } if !elsewhere(&command) => {}
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
                let waited = Waited::of(&waiter, state, canary, now);
                let canary = canary.then(|| Canary::new(&self.shared, engine.clone(), state.generation));
                drop(reply.send(Ok(place.granted(engine.clone(), state.generation, canary, waited))));
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
