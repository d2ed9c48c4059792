//! What a turn of the driver needs of the world around it.

use super::{DriverCore, UnsettledWork};
use crate::{
    fault::Fault,
    fleet::{
        Fleet, RoutingChanges,
        command::{CloseReason, Command},
        event::{Event, OperationId, Waiter, WaiterId},
        quote::WaitForecast,
    },
    model::{EngineId, ModelName},
    units::{Generation, Tick},
};

/// Executes the decisions of a turn: on gates, routes and waiting requests, and through the platform's engines.
///
/// [`DriverCore::turn`] calls the methods in the order in which they stand here, those that close gates before
/// [`Self::publish`] and the others after it.
pub trait DriverPlatform {
    /// Whether engines have stubs with gates that all gateways' requests pass.
    ///
    /// If so, the leader also submits `CloseGate`, `OpenGate` and `RevokeLeases`.
    fn has_stub_gates(&self) -> bool {
        false
    }

    /// Adds what changed since the last turn without an event: samples of gates, and tokens served.
    fn sample(&mut self, fleet: &Fleet, batch: &mut Vec<Event>, now: Tick);

    /// The fleet has received this event, and decides with it in this turn.
    fn delivered(&mut self, event: &Event) {
        let _ = event;
    }

    /// Journals the events. `fleet` has received them, and has not recorded the plan.
    fn journal(&mut self, fleet: &Fleet, events: &[Event], now: Tick) {
        let _ = (fleet, events, now);
    }

    /// The plan is made and recorded, and none of its commands is executed. For checks, logs and counts.
    fn decided(&mut self, core: &DriverCore, events: &[Event], now: Tick);

    /// Reports work that was repeated until its limit and did not come to rest: a defect of the decisions.
    ///
    /// Called once while the plans of turn after turn give up.
    fn gave_up(&mut self, work: &UnsettledWork);

    /// Quotes the expected wait to a request that arrived in this turn.
    fn quoted(&mut self, waiter: WaiterId, model: ModelName, forecast: WaitForecast) {
        let _ = (waiter, model, forecast);
    }

    /// Closes a gate to drain it. Returns the drain if the engine has no gate; otherwise a sample reports it later.
    fn close_gate(&mut self, closing: &GateClosing<'_>) -> Option<Event>;

    /// Ends every lease on this engine with this fault.
    fn revoke(&mut self, engine: &EngineId, generation: Generation, fault: &Fault);

    /// Admits no more requests until the engine's stub does. Current leases stay, and no drain is reported.
    fn await_stub(&mut self, engine: &EngineId, generation: Generation);

    /// Makes gates of new engines, removes those of ended ones, and publishes the changed routes.
    fn publish(&mut self, core: &DriverCore, changes: &RoutingChanges, now: Tick);

    /// Opens a gate for granted waiters, or with `public` for every request that finds the engine in the routes.
    fn open_gate(&mut self, engine: &EngineId, generation: Generation, public: bool);

    /// Takes a lease and gives it to the waiter.
    fn grant(&mut self, fleet: &Fleet, grant: &LeaseGrant<'_>, now: Tick) -> GrantOutcome;

    /// Answers a waiter with this fault.
    fn refuse(&mut self, fleet: &Fleet, waiter: WaiterId, fault: Fault, now: Tick);

    /// Completes an operator's order, with the reason if it failed.
    fn finish_operation(&mut self, operation: OperationId, outcome: Result<(), String>);

    /// Starts a command's work. Its outcome arrives as an event.
    fn submit(&mut self, command: Command);

    /// Everything is executed. `caused` are the events for the next turn.
    fn turn_ended(&mut self, core: &DriverCore, caused: &mut Vec<Event>, now: Tick) {
        let _ = (core, caused, now);
    }
}

/// The gate that closes, and why.
#[derive(Clone, Copy, Debug)]
pub struct GateClosing<'a> {
    pub engine: &'a EngineId,
    pub generation: Generation,
    pub reason: CloseReason,
    /// The engine that gets the memory.
    pub successor: Option<&'a EngineId>,
    /// The drain also needs the report that the stub's gate is drained, which other gateways use too.
    pub awaits_stub_drain: bool,
}

/// A lease that the fleet counts as granted.
#[derive(Clone, Copy, Debug)]
pub struct LeaseGrant<'a> {
    pub waiter: WaiterId,
    pub engine: &'a EngineId,
    pub generation: Generation,
    /// The waiter's request proves the engine.
    pub canary: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrantOutcome {
    /// The waiter has the lease, or has left. A lease that nobody receives ends at once.
    Granted,
    /// The engine has no place: a newcomer took the last one at the same moment, or the same plan closed the gate. The
    /// waiter goes back to the queue.
    NoPlace(Waiter),
}
