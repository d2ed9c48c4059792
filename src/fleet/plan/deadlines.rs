//! What time alone changes, and the next moment at which a decision may change.
//!
//! Apart from the plan, because the two belong together: a state that ends by time needs a deadline here, or the fleet
//! stalls.

use std::sync::Arc;

use crate::{
    engine::{Engine, TRIAL_IN_FLIGHT, state::LifecycleState},
    fleet::{command::CloseReason, plan::Planner},
    model::{EngineId, ModelName, ModelSpec},
    units::{Bytes, Millis, Tick},
};

impl Planner {
    /// Applies what time alone changes: ends back-offs, resets old failures, removes engines and models that are gone.
    pub(in crate::fleet) fn advance_time(&mut self, now: Tick) {
        self.last_planned = self.last_planned.max(now);
        for id in self.engines.recovered(now) {
            self.engines.change(&id, |engine| engine.failures = 0);
        }
        if self.role.decides() {
            for id in self.engines.with_ended_backoff(now) {
                self.engines.change(&id, |engine| engine.transition_to(LifecycleState::Cold, now));
            }
        }
        let models = &self.models;
        let removed = self.engines.retain(|engine| {
            let spec = models.get(&engine.id.model).and_then(|m| m.spec.as_ref());
            let configured =
                spec.is_some_and(|spec| engine.id.replica < spec.replicas_of(&engine.id.variant));
            configured
                || engine.state.has_process()
                || engine.unclosed_gate.is_some()
                || engine.pending_reservation.is_some()
        });
        for engine in &removed {
            self.last_generation = self.last_generation.max(engine.generation);
            self.remove_model_if_unused(&engine.id.model);
        }
    }

    /// Removes a model that is not configured and has no engine left.
    pub(in crate::fleet) fn remove_model_if_unused(&mut self, name: &ModelName) {
        let unused = self.models.get(name).is_some_and(|model| model.spec.is_none())
            && self.engines.of_model(name).next().is_none();
        if unused {
            Arc::make_mut(&mut self.models).remove(name);
            self.kept_awake.remove(name);
        }
    }

    /// The first moment after the last plan at which a decision may change. One too many is harmless; a missing one is
    /// a stall.
    pub(in crate::fleet) fn next_deadline(&self) -> Option<Tick> {
        let after = self.last_planned;
        let awaited = self.ledger.accelerators.awaiting_reading();
        let lost = awaited.flat_map(|(_, a)| a.reading_timeout_at().into_iter().chain(a.recovery_check_at()));
        let orders = self.operations.values().map(|op| op.issued_at + self.max_wait_of(&op.model));
        lost.chain(orders).filter(|at| *at > after).chain(self.first_engine_deadline()).min()
    }

    /// The engine's first deadline after the last planned moment.
    pub(in crate::fleet) fn first_deadline_of(&self, e: &Engine) -> Option<Tick> {
        self.deadlines_of(e, self.engine_spec(&e.id)).filter(|at| *at > self.last_planned).min()
    }

    fn deadlines_of(&self, e: &Engine, spec: Option<&ModelSpec>) -> impl Iterator<Item = Tick> + use<> {
        let idle = spec.map(|s| s.idle);
        let turns = &self.settings.turns;
        let timeouts = &self.settings.timeouts;
        let state_deadlines: [Option<Tick>; 6] = match &e.state {
            LifecycleState::Awake => [
                self.protection_end(e, self.wake_time_of(&e.id)),
                self.protection_end(e, self.start_time_of(&e.id)),
                Some(e.turn_start + turns.max_turn),
                idle.and_then(|i| self.idle_at(e, i.sleep_after?)),
                idle.and_then(|i| self.idle_at(e, i.stop_after?)),
                self.replica_rest_end(e),
            ],
            LifecycleState::Draining { reason, .. } => {
                // Other models may then take the place of an engine that a lower target drains.
                let turn_end = (*reason == CloseReason::ScaledDown).then_some(e.turn_start + turns.max_turn);
                [Some(e.since + turns.drain_deadline), turn_end, None, None, None, None]
            }
            LifecycleState::Asleep { .. } => {
                [idle.and_then(|idle| e.sleeper_stops_at(&idle)), None, None, None, None, None]
            }
            LifecycleState::Backoff { until, .. } => [Some(*until), None, None, None, None, None],
            LifecycleState::Cold => [Some(e.spare_start_at()), None, None, None, None, None],
            LifecycleState::Stopping { .. } => [Some(e.stop_retry_at), None, None, None, None, None],
            _ => [None; 6],
        };
        let common_deadlines: [Option<Tick>; 7] = [
            self.rehearsal_due_at(e, spec),
            self.overdue_at(e, spec),
            e.hung_at(timeouts),
            // Only a serving engine gets a trial request; any other is checked again when it serves.
            e.ejected_until.filter(|at| *at != TRIAL_IN_FLIGHT && e.serves()),
            // Waiters then get the engine again.
            e.saturation.filter(|_| e.serves()).map(|limit| limit.until),
            e.releasing_since.map(|at| at + timeouts.meter_lag),
            e.releasing_since.map(|at| at + Millis(timeouts.meter_lag.0 * 5)),
        ];
        state_deadlines.into_iter().chain(common_deadlines).flatten()
    }

    /// The deadline of the engine's present state.
    fn overdue_at(&self, e: &Engine, spec: Option<&ModelSpec>) -> Option<Tick> {
        // The reservation is looked up only if its size matters.
        let reserved = if e.state.moves_memory() { self.ledger.booked_bytes(&e.id) } else { Bytes::ZERO };
        e.deadline(spec, reserved, &self.settings.timeouts)
    }

    /// Whether the engine has missed the deadline of its state.
    pub(in crate::fleet) fn is_overdue(&self, id: &EngineId, now: Tick) -> bool {
        let Some(e) = self.engines.get(id) else { return false };
        self.overdue_at(e, self.engine_spec(id)).is_some_and(|at| at <= now)
    }
}
