//! Makes room for a candidate that has none: by eviction, by a move to other accelerators, or by waiting for a release.
//!
//! Apart from the order of turns: the turn decides whether room may be made for a model, and this file how.

use std::collections::BTreeSet;

use super::AdmitOutcome;
use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::{
        command::{AfterDrain, CloseReason},
        explain::ModelReason,
        plan::{
            PlanBuilder,
            evict::Victim,
            place::{PlacementCandidate, PlacementStatus},
        },
    },
    model::{AcceleratorId, AcceleratorRequirement, EngineId, ModelSpec},
    units::{Millis, Tick},
};

impl PlanBuilder<'_> {
    /// Stops an asleep engine to start it where there is room now.
    ///
    /// Only if its own accelerators will not have room within the time of a cold start.
    pub(super) fn relocate(
        &mut self,
        id: &EngineId,
        spec: &ModelSpec,
        candidates: &[PlacementCandidate],
    ) -> bool {
        if !self.engine(id).is_some_and(|e| matches!(e.state, LifecycleState::Asleep { .. })) {
            return false;
        }
        let by = self.now + self.planner.start_time_of(id);
        if candidates.iter().any(|c| self.is_reachable(id, c) && self.earliest_eviction(id, c) <= by) {
            return false;
        }
        let relocations = self.relocation_candidates(id, spec);
        let find_by_status = |predicate: fn(&PlacementStatus) -> bool| {
            relocations
                .iter()
                .map(|c| (c, self.placement_status(id, spec, c)))
                .find(|(_, room)| predicate(room))
        };
        if let Some((candidate, _)) = find_by_status(|room| *room == PlacementStatus::Ready) {
            let candidate = candidate.clone();
            self.move_to(id, &candidate, "which has room");
            return true;
        }
        if let Some((candidate, room)) =
            find_by_status(|room| matches!(room, PlacementStatus::MeterStale { .. }))
        {
            let candidate = candidate.clone();
            self.await_room(id, &candidate, &room);
            return true;
        }
        false
    }

    /// Stops an asleep engine whose accelerators can no longer hold it, to start it on others of its pool.
    ///
    /// A faulty accelerator has no memory to grant, and one that is gone is no longer configured. Its sleepers cannot
    /// wake there, and need not wait until it is back.
    pub(super) fn leave_accelerators(&mut self, id: &EngineId, spec: &ModelSpec) -> bool {
        let is_asleep = self.engine(id).is_some_and(|e| matches!(e.state, LifecycleState::Asleep { .. }));
        if !is_asleep || !matches!(spec.accelerators, AcceleratorRequirement::Slots { .. }) {
            return false;
        }
        let Some(candidate) = self.relocation_candidates(id, spec).into_iter().next() else {
            return false;
        };
        self.move_to(id, &candidate, "because its own accelerators are faulty or gone");
        true
    }

    /// Stops an engine to start it on this candidate. `why` explains the move in the reason's text.
    fn move_to(&mut self, id: &EngineId, candidate: &PlacementCandidate, why: &str) {
        let text = format!("moving to {}, {why}: the engine stops first", accelerator_list(candidate));
        self.claim(id, candidate);
        self.stop(id);
        self.set_reason(id, ModelReason::starting(&text));
    }

    /// Requests readings where the meter shows other programs' memory, which only the meter can show as freed.
    pub(super) fn reread_meters(&mut self, candidates: &[PlacementCandidate]) {
        let accounts = &self.planner.ledger.accelerators;
        let is_confirmed = |a: &AcceleratorId| {
            accounts.get(a).is_some_and(crate::fleet::state::ledger::AcceleratorAccount::is_usage_confirmed)
        };
        let accelerators: BTreeSet<AcceleratorId> =
            candidates.iter().flat_map(|c| &c.accelerators).filter(|a| is_confirmed(a)).cloned().collect();
        for accelerator in accelerators {
            self.request_reading(&accelerator, Millis::secs(1));
        }
    }

    /// Waits for room that exists or is being freed; the next readings or events decide.
    pub(super) fn await_room(
        &mut self,
        id: &EngineId,
        candidate: &PlacementCandidate,
        room: &PlacementStatus,
    ) -> AdmitOutcome {
        self.claim(id, candidate);
        match room {
            PlacementStatus::MeterStale { accelerator } => {
                for accelerator in &candidate.accelerators {
                    let fresh = self
                        .planner
                        .ledger
                        .accelerators
                        .get(accelerator)
                        .is_none_or(|a| a.is_fresh(self.now));
                    if !fresh {
                        self.request_reading(accelerator, Millis::ZERO);
                    }
                }
                let text = format!("reading the memory use of {accelerator}");
                self.set_memory_reason(id, candidate, text);
            }
            PlacementStatus::AwaitingRelease { accelerator, after, missing: short } => {
                self.request_reading(accelerator, *after);
                let text = format!(
                    "waiting for memory on {accelerator} to be released: the meter does not show {short} as free yet"
                );
                self.set_memory_reason(id, candidate, text);
            }
            PlacementStatus::Blocked { by } => {
                let text = format!("waiting for {by} to finish allocating memory on the same accelerator");
                self.set_reason(id, ModelReason::starting(&text).naming(&by.model));
            }
            _ => {
                self.commit_drains(id, candidate);
                let reason = self.memory_reason(id, candidate);
                self.set_reason(id, reason);
            }
        }
        AdmitOutcome::RoomPending
    }

    /// Makes drains irrevocable that this model relies on and that could be called back.
    fn commit_drains(&mut self, id: &EngineId, candidate: &PlacementCandidate) {
        let neighbours = self.planner.engines.winding_down_on_any(&candidate.accelerators);
        let optional = neighbours.into_iter().filter(|e| {
            e.id != *id
                && self.may_commit_drain(id, e)
                && e.accelerators.iter().any(|a| candidate.accelerators.contains(a))
        });
        let drains: Vec<(EngineId, AfterDrain)> = optional
            .filter_map(|e| match e.state {
                LifecycleState::Draining { after_drain: then, .. } => Some((e.id.clone(), then)),
                _ => None,
            })
            .collect();
        for (engine, after_drain) in drains {
            self.close_gate_for(&engine, after_drain, id);
        }
    }

    /// Whether the drain of this engine, if it has one for idleness or a lower target, becomes a turn for `id`.
    ///
    /// A turn has a deadline for the requests in flight. So one of a lower target becomes a turn only once its own has
    /// lasted its maximum, and never for a further replica.
    fn may_commit_drain(&self, id: &EngineId, e: &Engine) -> bool {
        match &e.state {
            LifecycleState::Draining { reason: CloseReason::Idle, .. } => true,
            LifecycleState::Draining { reason: CloseReason::ScaledDown, .. } => {
                let turn_expired = e.turn_start + self.planner.settings.turns.max_turn <= self.now;
                let may_cut = turn_expired && !self.planner.is_further_replica(id);
                e.id.model != id.model && (self.planner.in_use_count(e) == 0 || may_cut)
            }
            _ => false,
        }
    }

    pub(super) fn evict(&mut self, id: &EngineId, candidate: &PlacementCandidate, victims: &[Victim]) {
        for victim in victims {
            // The victim goes once its dependents are asleep or gone.
            if self.engine(&victim.engine).is_some_and(|e| self.planner.keeping_dependent(e).is_some()) {
                continue;
            }
            if victim.needs_no_drain() {
                self.stop_for(&victim.engine, id);
            } else {
                self.close_gate_for(&victim.engine, victim.after_drain, id);
            }
        }
        self.commit_drains(id, candidate);
        self.claim(id, candidate);
        let names: Vec<String> =
            victims.iter().map(|v| format!("{} is {}", v.display_name(), v.action_text())).collect();
        let text = format!("making room on {}: {}", accelerator_list(candidate), names.join(", "));
        self.set_memory_reason(id, candidate, text);
    }

    /// When an engine in the way of a candidate may first be evicted. A further replica takes no place in use.
    pub(super) fn earliest_eviction(&self, id: &EngineId, candidate: &PlacementCandidate) -> Tick {
        let neighbours = self.planner.engines.on_accelerators(&candidate.accelerators);
        let for_replica = self.planner.is_further_replica(id);
        let in_the_way = neighbours.into_iter().filter(|e| {
            e.id != *id
                && e.state.has_process()
                && !(for_replica && self.planner.in_use_count(e) > 0)
                && e.accelerators.iter().any(|a| candidate.accelerators.contains(a))
        });
        in_the_way.filter_map(|e| self.evictable_at(e)).min().unwrap_or(Tick(u64::MAX))
    }
}

fn accelerator_list(candidate: &PlacementCandidate) -> String {
    let names: Vec<&str> = candidate.accelerators.iter().map(AcceleratorId::as_str).collect();
    names.join(", ")
}
