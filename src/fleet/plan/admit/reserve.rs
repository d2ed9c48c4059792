//! Takes the room that a candidate has: reserves it for the engine, or claims it against the models behind in line.
//!
//! Apart from the order of turns, because only this file issues reservations.

use super::AdmitOutcome;
use crate::{
    engine::state::LifecycleState,
    fleet::{
        command::Command,
        explain::ModelReason,
        plan::{
            PlanBuilder,
            place::{PlacementCandidate, PlacementStatus},
        },
        state::ledger::amount::ResourceAmount,
    },
    model::{EngineId, ModelSpec},
    units::Bytes,
};

impl PlanBuilder<'_> {
    /// Reserves a candidate that has room.
    pub(super) fn place(
        &mut self,
        id: &EngineId,
        spec: &ModelSpec,
        candidate: &PlacementCandidate,
    ) -> AdmitOutcome {
        if self.is_dry_run() {
            self.claim(id, candidate);
            let root = self.on_behalf_of(id).model.clone();
            let text = format!("there is room for it; its memory is reserved together with that of '{root}'");
            self.set_reason(id, ModelReason::starting(&text).naming(&root));
            return AdmitOutcome::Placed;
        }
        let asleep = self.engine(id).is_some_and(|e| e.state.has_process());
        // Engines that are reserved together wait for neighbouring wakes later.
        if !asleep
            && spec.profiles_memory()
            && self.closure_attempt.is_none()
            && self.reserve_waiting_wakes(id, candidate)
        {
            self.set_reason(
                id,
                ModelReason::starting("waiting for a wake on the same accelerator, which goes first"),
            );
            return AdmitOutcome::RoomPending;
        }
        self.reserve(id, candidate);
        AdmitOutcome::Placed
    }

    fn reserve(&mut self, id: &EngineId, candidate: &PlacementCandidate) {
        let asleep = self.engine(id).is_some_and(|e| e.state.has_process());
        let generation = self.generation(id);
        self.emit(Command::Reserve {
            engine: id.clone(),
            generation: if asleep { generation } else { generation.next() },
            accelerators: candidate.accelerators.clone(),
            bytes: candidate.need.bytes,
            host: Bytes::ZERO,
        });
        self.set_reason(id, ModelReason::starting("its memory is being reserved"));
    }

    /// Reserves the wakes that fit beside a launch and go first.
    ///
    /// A launch keeps its accelerators to itself for long; a wake takes a moment.
    fn reserve_waiting_wakes(&mut self, id: &EngineId, candidate: &PlacementCandidate) -> bool {
        let neighbours = self.planner.engines.on_accelerators(&candidate.accelerators).into_iter();
        let sleepers = neighbours.filter(|e| {
            e.id != *id
                && matches!(e.state, LifecycleState::Asleep { .. })
                && e.pending_reservation.is_none()
                && e.releasing_since.is_none()
                && e.accelerators.iter().any(|a| candidate.accelerators.contains(a))
                && self.is_independent(&e.id)
        });
        let mut behind: Vec<(usize, EngineId)> =
            sleepers.filter_map(|e| Some((*self.turn_positions.get(&e.id)?, e.id.clone()))).collect();
        behind.sort_unstable();
        let claims = self.claims.clone();
        self.claim(id, candidate);
        let mut first = false;
        for (_, sleeper) in behind {
            let Some(spec) = self.planner.shared_engine_spec(&sleeper) else {
                continue;
            };
            let Some(sleeper_candidate) = self.candidates(&sleeper, &spec, true).into_iter().next() else {
                continue;
            };
            match self.placement_status(&sleeper, &spec, &sleeper_candidate) {
                PlacementStatus::Ready => {
                    self.reserve(&sleeper, &sleeper_candidate);
                    first = true;
                }
                PlacementStatus::MeterStale { .. } => {
                    let room = self.placement_status(&sleeper, &spec, &sleeper_candidate);
                    self.await_room(&sleeper, &sleeper_candidate, &room);
                    first = true;
                }
                _ => {}
            }
        }
        if !first {
            self.claims = claims;
        }
        first
    }

    /// Claims the candidate's memory against models behind in line, without reserving it.
    pub(super) fn claim(&mut self, id: &EngineId, candidate: &PlacementCandidate) {
        for accelerator in &candidate.accelerators {
            let account = self.planner.ledger.accelerators.get(accelerator);
            let present = account.map_or_else(ResourceAmount::default, |account| account.amount_of(id));
            let claim = self.claims.entry(accelerator.clone()).or_default();
            *claim = *claim + candidate.need.saturating_sub(present);
        }
        if let Some(attempt) = &mut self.closure_attempt {
            attempt.claimed.insert(id.clone(), candidate.clone());
        }
    }
}
