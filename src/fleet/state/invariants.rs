//! Checks the invariants of the state. Cheap enough for every step of the simulator; debug builds of the gateway run it
//! too.

use crate::{
    engine::{Admission, rehearsal::SleepRehearsal, state::LifecycleState},
    fleet::plan::Planner,
    model::AcceleratorId,
    units::Bytes,
};

impl Planner {
    pub(in crate::fleet) fn broken_invariants(&self) -> Vec<String> {
        let mut broken = Vec::new();
        for (accelerator, account) in self.ledger.accelerators.iter() {
            let lost = account.booked.iter().map(|(id, _)| id).filter(|id| !self.engines.contains_key(id));
            broken.extend(lost.map(|id| format!("{accelerator} has a booking of the unknown {id}")));
            let unbooked = account.units_taken.engines().filter(|id| account.booked.of(id).is_none());
            broken.extend(unbooked.map(|id| format!("{id} takes units of {accelerator} without a booking")));
            let untaken =
                account.booked.iter().map(|(id, _)| id).filter(|id| account.units_taken.of(id) == 0);
            let untaken = untaken.filter(|_| account.units.is_some());
            broken.extend(untaken.map(|id| format!("{id} has a booking on {accelerator} but takes no unit")));
        }
        if !self.engines.has_consistent_indexes() {
            broken.push("the indexes of the engines are inconsistent".to_owned());
        }
        if !self.kept_awake.is_consistent_with(&self.models) {
            broken.push("the index of the models that are kept awake is inconsistent".to_owned());
        }
        if !self.is_scaling_index_consistent() {
            broken.push("the index of the models with targets is inconsistent".to_owned());
        }
        broken.extend(self.models.iter().filter_map(|(name, model)| {
            let targeted = model.spec.is_some() || model.targets.is_empty();
            (!targeted).then(|| format!("{name} is not configured but has targets"))
        }));
        if !self.ledger.accelerators.has_consistent_indexes() {
            broken.push("the indexes of the accelerator accounts are inconsistent".to_owned());
        }
        broken.extend(
            self.overlooked_engines().into_iter().map(|id| format!("{id} is due before its due index entry")),
        );
        if self.first_engine_deadline() != self.scan_for_engine_deadline() {
            broken.push("the due index has another next deadline than the engines".to_owned());
        }
        let decides = self.role.decides();
        for e in self.engines.values() {
            let id = &e.id;
            let booked = |a: &AcceleratorId| {
                self.ledger.accelerators.get(a).map_or(Bytes::ZERO, |acc| acc.booked_by(id))
            };
            if e.admission != Admission::Closed
                && !matches!(
                    e.state,
                    LifecycleState::Awake
                        | LifecycleState::Loading
                        | LifecycleState::Waking { .. }
                        | LifecycleState::Failing { .. }
                )
            {
                broken.push(format!("{id} is {} with an open gate", e.state));
            }
            if e.admission == Admission::Public
                && !matches!(e.state, LifecycleState::Awake | LifecycleState::Failing { .. })
            {
                broken.push(format!("{id} is {} but in the routes", e.state));
            }
            let is_in_rehearsal = e.state.moves_memory() || matches!(e.state, LifecycleState::Asleep { .. });
            if decides && e.rehearsal == SleepRehearsal::Underway && !is_in_rehearsal {
                broken.push(format!("{id} is {} in its rehearsal", e.state));
            }
            if e.stub_gate_closed && !(e.state == LifecycleState::Awake || e.state.is_starting()) {
                broken.push(format!("{id} is {} but waits for its stub", e.state));
            }
            if e.must_await_stub() && self.adopted && self.shutdown.is_none() {
                broken.push(format!("{id} is not held although its stub has closed the gate"));
            }
            // A follower receives publications one by one: an engine may be where nothing is configured, or asleep
            // before the end of its last request is known.
            if decides
                && e.state.has_process()
                && e.accelerators.iter().any(|a| booked(a) == Bytes::ZERO)
                && self.needs_memory(e)
            {
                broken.push(format!("{id} is {} without a reservation on each of its accelerators", e.state));
            }
            if !e.state.has_process()
                && e.pending_reservation.is_none()
                && self.ledger.booked_bytes(id) > Bytes::ZERO
            {
                broken.push(format!("{id} is {} but still holds {}", e.state, self.ledger.booked_bytes(id)));
            }
            if decides
                && matches!(
                    e.state,
                    LifecycleState::Asleep { .. }
                        | LifecycleState::FallingAsleep { .. }
                        | LifecycleState::Stopping { .. }
                )
                && e.leases > 0
            {
                broken.push(format!("{id} is {} with {} leases", e.state, e.leases));
            }
        }
        broken
    }

    fn needs_memory(&self, e: &crate::engine::Engine) -> bool {
        let residue = self.residue_of(&e.id);
        let awake = self.engine_spec(&e.id).is_some_and(|s| s.memory.awake > Bytes::ZERO);
        if matches!(e.state, LifecycleState::Asleep { .. }) {
            residue > Bytes::ZERO && awake
        } else {
            awake && self.engine_spec(&e.id).is_some()
        }
    }
}
