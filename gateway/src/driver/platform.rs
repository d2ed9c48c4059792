//! What a turn does in this process: gates, routes, parked requests, journal, logs; and the platform with the engines.

use std::sync::Arc;

use rouse::{
    driver::{DriverCore, DriverPlatform, GateClosing, GrantOutcome, LeaseGrant, UnsettledWork},
    fault::Fault,
    fleet::{
        Fleet, RoutingChanges,
        command::Command,
        event::{Event, OperationId, WaiterId},
        quote::WaitForecast,
    },
    model::{EngineId, ModelName},
    units::{Generation, Tick},
};
use rouse_platform::Platform;

use super::{
    CanaryGuard, Journal, QuotedWait, WaitBreakdown, gates::EngineGates, handle::DriverState,
    parked_replies::ParkedReplies, transition_log::TransitionRecorder, waits::WaitRenewal,
};

pub(super) struct GatewayPlatform {
    pub(super) engines: Arc<dyn Platform>,
    pub(super) shared: Arc<DriverState>,
    pub(super) gates: EngineGates,
    pub(super) parked: ParkedReplies,
    pub(super) journal: Journal,
    pub(super) recorder: TransitionRecorder,
    pub(super) wait_renewal: WaitRenewal,
    /// Requests that arrived since the last turn, with the place for the quote of their wait.
    pub(super) unquoted: Vec<(WaiterId, QuotedWait)>,
}

impl GatewayPlatform {
    /// Renews the expected waits that requests read if an engine has changed, and the last renewal was long enough ago.
    pub(super) fn renew_waits(&mut self, core: &DriverCore, now: Tick) {
        if self.wait_renewal.begin(now) {
            let fleet = core.fleet();
            let waits = fleet.expected_waits_of(core.plan(), fleet.queued_models());
            self.shared.waits.replace(waits);
        }
    }

    /// Brings the expected waits that waiting requests read up to date with the changes of a turn.
    fn update_waits(&mut self, core: &DriverCore, changes: &RoutingChanges, now: Tick) {
        for model in changes.demand.iter().filter(|model| core.fleet().waiting(model) == 0) {
            self.shared.waits.remove(model);
        }
        if changes.may_reconfigure_any() || !changes.models.is_empty() {
            self.wait_renewal.mark_stale();
        }
        self.renew_waits(core, now);
    }
}

impl DriverPlatform for GatewayPlatform {
    fn has_stub_gates(&self) -> bool {
        self.engines.has_stub_gates()
    }

    fn sample(&mut self, fleet: &Fleet, batch: &mut Vec<Event>, now: Tick) {
        self.gates.sample(batch, fleet.leads(), now);
        self.shared.served_tokens.sample(fleet, batch);
    }

    fn journal(&mut self, fleet: &Fleet, events: &[Event], now: Tick) {
        self.journal.write(now, events, fleet);
    }

    fn decided(&mut self, core: &DriverCore, events: &[Event], now: Tick) {
        let fleet = core.fleet();
        debug_assert!(fleet.broken_invariants().is_empty(), "{:?}", fleet.broken_invariants());
        self.recorder.turn(fleet, events, &core.plan().commands, now);
        self.shared.count_turn();
    }

    fn gave_up(&mut self, work: &UnsettledWork) {
        tracing::error!("the decisions contradict each other: {work}; please report this with the journal");
    }

    fn quoted(&mut self, waiter: WaiterId, model: ModelName, forecast: WaitForecast) {
        if let Some((_, place)) = self.unquoted.iter().find(|(id, _)| *id == waiter) {
            place.get_or_init(|| forecast.range);
        }
        self.shared.waits.set(model, forecast);
    }

    fn close_gate(&mut self, closing: &GateClosing<'_>) -> Option<Event> {
        self.gates.close(closing.engine, closing.generation, closing.awaits_stub_drain)
    }

    fn revoke(&mut self, engine: &EngineId, generation: Generation, fault: &Fault) {
        self.gates.revoke(engine, generation, fault);
    }

    fn await_stub(&mut self, engine: &EngineId, generation: Generation) {
        self.gates.close_without_drain(engine, generation);
    }

    fn publish(&mut self, core: &DriverCore, changes: &RoutingChanges, now: Tick) {
        self.gates.sync(core.fleet(), changes, self.engines.as_ref());
        self.shared.publish(core.fleet(), changes, &self.gates);
        self.update_waits(core, changes, now);
        self.engines.turn_completed(core.fleet(), core.plan(), changes);
    }

    fn open_gate(&mut self, engine: &EngineId, _generation: Generation, _public: bool) {
        self.gates.open(engine);
    }

    /// If the lease is never received, its drop releases it.
    fn grant(&mut self, fleet: &Fleet, grant: &LeaseGrant<'_>, now: Tick) -> GrantOutcome {
        let Some((waiter, reply)) = self.parked.remove(grant.waiter) else { return GrantOutcome::Granted };
        let Some(engine) = fleet.engine(grant.engine) else { return GrantOutcome::Granted };
        let Some(place) = self.gates.take_queued(grant.engine) else {
            self.parked.add(waiter.clone(), reply);
            return GrantOutcome::NoPlace(waiter);
        };
        let waited = WaitBreakdown::of(&waiter, engine, grant.canary, now);
        let (id, generation) = (grant.engine.clone(), engine.generation);
        let canary = grant.canary.then(|| CanaryGuard::new(&self.shared, id.clone(), generation));
        drop(reply.send(Ok(place.into_granted(id, generation, canary, waited))));
        GrantOutcome::Granted
    }

    fn refuse(&mut self, fleet: &Fleet, waiter: WaiterId, fault: Fault, now: Tick) {
        self.engines.request_refused(fleet, &fault);
        if let Some((waiter, reply)) = self.parked.remove(waiter) {
            self.recorder.refused(&waiter.model, &fault, now);
            // An error means that the request has left.
            drop(reply.send(Err(fault)));
        }
    }

    fn finish_operation(&mut self, operation: OperationId, outcome: Result<(), String>) {
        self.shared.finish(operation, outcome);
    }

    fn submit(&mut self, command: Command) {
        self.engines.submit(command);
    }

    fn turn_ended(&mut self, core: &DriverCore, caused: &mut Vec<Event>, _now: Tick) {
        let fleet = core.fleet();
        self.gates.set_queued(fleet, caused);
        self.unquoted.clear();
        debug_assert!(self.gates.are_current(fleet) && self.shared.is_current(fleet, &self.gates));
    }
}
