//! The simulated world as the platform under the driver's turn.

use super::{platform_defect::PlatformDefect, world::SimulatedWorld};
use crate::{
    driver::{DriverCore, DriverPlatform, GateClosing, GrantOutcome, LeaseGrant, UnsettledWork},
    fault::Fault,
    fleet::{
        Fleet, RoutingChanges,
        command::Command,
        event::{Event, OperationId, WaiterId},
        quote::WaitForecast,
    },
    journal::JournalLine,
    model::{EngineId, ModelName},
    units::{Generation, Tick},
};

impl DriverPlatform for SimulatedWorld {
    fn sample(&mut self, fleet: &Fleet, batch: &mut Vec<Event>, _now: Tick) {
        batch.extend(self.sample_gates());
        self.add_served_events(fleet, batch);
    }

    fn delivered(&mut self, event: &Event) {
        self.record_delivery(event);
    }

    fn journal(&mut self, _fleet: &Fleet, events: &[Event], now: Tick) {
        if let Some(journal) = &mut self.journal {
            journal.push(JournalLine::Turn { at: now, events: events.to_vec() });
        }
    }

    fn decided(&mut self, core: &DriverCore, events: &[Event], _now: Tick) {
        self.note_stops_before_closes(&core.plan().commands);
        self.check_turn(core, events);
    }

    fn gave_up(&mut self, work: &UnsettledWork) {
        self.record_violation(work.to_string());
    }

    fn quoted(&mut self, waiter: WaiterId, _model: ModelName, forecast: WaitForecast) {
        self.record_quote(waiter, forecast);
    }

    fn close_gate(&mut self, closing: &GateClosing<'_>) -> Option<Event> {
        self.check_close(closing);
        self.close_simulated_gate(closing.engine, closing.generation);
        None
    }

    fn revoke(&mut self, engine: &EngineId, generation: Generation, _fault: &Fault) {
        self.revoke_leases(engine, generation);
    }

    fn await_stub(&mut self, engine: &EngineId, generation: Generation) {
        self.hold_for_stub(engine, generation);
    }

    fn publish(&mut self, core: &DriverCore, changes: &RoutingChanges, _now: Tick) {
        if !self.has_defect(PlatformDefect::OpensBeforeRoutes) {
            self.publish_routes(core.fleet(), changes);
        }
    }

    fn open_gate(&mut self, engine: &EngineId, generation: Generation, public: bool) {
        self.open_simulated_gate(engine, generation, public);
    }

    fn grant(&mut self, _fleet: &Fleet, grant: &LeaseGrant<'_>, _now: Tick) -> GrantOutcome {
        self.grant_lease(grant)
    }

    fn refuse(&mut self, _fleet: &Fleet, waiter: WaiterId, fault: Fault, _now: Tick) {
        self.refuse_waiter(waiter, &fault);
    }

    fn finish_operation(&mut self, operation: OperationId, outcome: Result<(), String>) {
        self.finish_order(operation, outcome.is_ok());
    }

    fn submit(&mut self, command: Command) {
        self.start_work(command);
    }

    fn turn_ended(&mut self, core: &DriverCore, _caused: &mut Vec<Event>, _now: Tick) {
        if self.has_defect(PlatformDefect::OpensBeforeRoutes) {
            let all = RoutingChanges { reconfigured: true, ..RoutingChanges::default() };
            self.publish_routes(core.fleet(), &all);
        }
        self.check_replacements();
    }
}
