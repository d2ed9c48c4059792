//! The driver's turn: passes events to the fleet, and executes what it decides, in an order that is always the same.
//!
//! ```text
//!   sample gates ─▶ Fleet::on each event ─▶ plan ─▶ journal ─▶ issued ─▶ checks ─▶ closes and revocations
//!        ▲                                                                                  │
//!        │                                                        routing changes published ◀┘
//!        │                                                                    │
//!        └──── events that the execution causes ◀──── opens, grants, refusals, submits
//! ```
//!
//! Gates close before the routes change, and open after, so that a request with an old snapshot of the routes meets a
//! closed gate and never the reverse. The gateway, the simulator and the tests of several gateways run this turn, each
//! over its own [`DriverPlatform`] and its own clock. Policy belongs in [`crate::fleet`], not here.

mod intake;
mod platform;
mod unsettled;

pub use self::{
    intake::{EventQueues, MAX_PLATFORM_EVENTS_PER_TURN, MAX_REQUESTS_PER_TURN, fill_batch},
    platform::{DriverPlatform, GateClosing, GrantOutcome, LeaseGrant},
    unsettled::{MAX_CHAINED_TURNS, TurnChain, UnsettledWork},
};
use crate::{
    engine::Admission,
    fault::Fault,
    fleet::{
        Fleet, Plan,
        command::{CloseReason, Command},
        event::{CanaryVerdict, Event, OperatorAction, WaiterId},
    },
    model::{EngineId, ModelName},
    units::{Generation, Tick},
};

/// The fleet, and its last plan. Only a turn changes either.
#[derive(Clone, Debug, Default)]
pub struct DriverCore {
    fleet: Fleet,
    plan: Plan,
    chain: TurnChain,
}

impl DriverCore {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Continues with a fleet that was restored from a journal.
    #[must_use]
    pub fn with_fleet(fleet: Fleet) -> Self {
        Self { fleet, ..Self::default() }
    }

    #[must_use]
    pub const fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// The last plan, for reports of reasons. Between two turns its commands are executed, and no longer in it.
    #[must_use]
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The chain that the last turn belongs to.
    #[must_use]
    pub const fn chain(&self) -> &TurnChain {
        &self.chain
    }

    /// The chain, which the driver begins or extends before each turn.
    pub const fn chain_mut(&mut self) -> &mut TurnChain {
        &mut self.chain
    }

    /// Checks whether an operator's order can be accepted, by the events of the turns so far.
    ///
    /// # Errors
    /// The reason why it cannot.
    pub fn validate_action(&self, model: &ModelName, order: OperatorAction) -> Result<(), String> {
        self.fleet.validate_action(model, order)
    }

    /// Decides about these events, and replaces them by the events that the execution causes. Those are for the next
    /// turn.
    pub fn turn(&mut self, platform: &mut impl DriverPlatform, batch: &mut Vec<Event>, now: Tick) {
        platform.sample(&self.fleet, batch, now);
        for event in &*batch {
            self.fleet.on(event, now);
            platform.delivered(event);
        }
        self.plan = self.fleet.plan(now);
        platform.journal(&self.fleet, batch, now);
        self.fleet.issued(&self.plan.commands, now);
        platform.decided(self, batch, now);
        if self.plan.gave_up()
            && let Some(work) = self.chain.record_given_up_plan(batch, &self.plan.commands)
        {
            platform.gave_up(&work);
        }
        self.quote_arrivals(platform, batch, now);
        batch.clear();
        self.execute(platform, batch, now);
        platform.turn_ended(self, batch, now);
    }

    /// Lists what a turn must never leave behind, as text; empty if all is well. Plans once more, so it is for tests.
    #[must_use]
    pub fn defects(&self, now: Tick) -> Vec<String> {
        let mut defects = self.fleet.broken_invariants();
        let again = self.fleet.plan(now).commands;
        if !again.is_empty() {
            defects.push(format!("planning again at the same moment gives {again:?}"));
        }
        if let Some(at) = self.fleet.next_deadline().filter(|at| *at <= now) {
            defects.push(format!("next_deadline is {at}, which is not after {now}"));
        }
        defects
    }

    /// Quotes their waits to the requests that arrived with these events and still wait.
    fn quote_arrivals(&mut self, platform: &mut impl DriverPlatform, events: &[Event], now: Tick) {
        let id = |event: &Event| match event {
            Event::Arrived { waiter } => Some(waiter.id),
            _ => None,
        };
        let arrived: Vec<WaiterId> = events.iter().filter_map(id).collect();
        for (waiter, model, forecast) in self.fleet.quote_arrivals(&self.plan, &arrived, now) {
            platform.quoted(waiter, model, forecast);
        }
    }

    fn execute(&mut self, platform: &mut impl DriverPlatform, caused: &mut Vec<Event>, now: Tick) {
        let commands = std::mem::take(&mut self.plan.commands);
        // Gateways share the stubs' gates, and the leader controls them.
        let controls_stubs = platform.has_stub_gates() && self.fleet.leads();
        for command in &commands {
            close(command, controls_stubs, platform, caused);
        }
        let changes = self.fleet.take_routing_changes();
        platform.publish(self, &changes, now);
        for command in commands {
            self.execute_after_routing(command, controls_stubs, platform, caused, now);
        }
    }

    /// Executes everything but the local part of a close, a revocation or a wait for a stub, which came before.
    fn execute_after_routing(
        &self,
        command: Command,
        controls_stubs: bool,
        platform: &mut impl DriverPlatform,
        caused: &mut Vec<Event>,
        now: Tick,
    ) {
        let is_shared = controls_stubs && !ends_only_here(&command);
        match command {
            Command::OpenGate { ref engine, generation, public } => {
                // A plan may open a gate and close it again. Closes went first, so the fleet's admission decides here.
                if self.is_open(engine) {
                    platform.open_gate(engine, generation, public);
                    if is_shared {
                        platform.submit(command);
                    }
                }
            }
            Command::Grant { waiter, engine, generation, canary } => {
                let grant = LeaseGrant { waiter, engine: &engine, generation, canary };
                if let GrantOutcome::NoPlace(waiter) = platform.grant(&self.fleet, &grant, now) {
                    caused.push(Event::Arrived { waiter });
                    if canary {
                        caused.push(self.inconclusive_canary(engine));
                    }
                }
            }
            Command::Refuse { waiter, fault } => platform.refuse(&self.fleet, waiter, fault, now),
            Command::FinishOperation { operation, outcome } => platform.finish_operation(operation, outcome),
            Command::CloseGate { .. } | Command::RevokeLeases { .. } if !is_shared => {}
            command => platform.submit(command),
        }
    }

    fn is_open(&self, engine: &EngineId) -> bool {
        let closed = |admission| matches!(admission, Admission::Closed | Admission::AwaitingStub);
        self.fleet.engine(engine).is_some_and(|e| !closed(e.admission))
    }

    fn inconclusive_canary(&self, engine: EngineId) -> Event {
        let generation = self.fleet.engine(&engine).map_or(Generation(0), |e| e.generation);
        Event::Canary { engine, generation, verdict: CanaryVerdict::Inconclusive }
    }
}

/// Closes gates and ends leases at this gateway, before the routes change.
fn close(
    command: &Command,
    controls_stubs: bool,
    platform: &mut impl DriverPlatform,
    caused: &mut Vec<Event>,
) {
    match command {
        Command::CloseGate { engine, generation, reason, successor, .. } => {
            let awaits_stub_drain = controls_stubs && !ends_only_here(command);
            let (generation, reason, successor) = (*generation, *reason, successor.as_ref());
            caused.extend(platform.close_gate(&GateClosing {
                engine,
                generation,
                reason,
                successor,
                awaits_stub_drain,
            }));
        }
        Command::RevokeLeases { engine, generation, fault } => platform.revoke(engine, *generation, fault),
        Command::AwaitStub { engine, generation } => platform.await_stub(engine, *generation),
        _ => {}
    }
}

/// Whether the command ends what this gateway does with the engine, and nothing at other gateways: this one shuts down.
fn ends_only_here(command: &Command) -> bool {
    match command {
        Command::CloseGate { reason, .. } => *reason == CloseReason::Shutdown,
        Command::RevokeLeases { fault, .. } => *fault == Fault::ShuttingDown,
        _ => false,
    }
}
