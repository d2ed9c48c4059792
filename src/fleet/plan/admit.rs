//! Starts wanted models in the order of their turns.
//!
//! A model that cannot start yet claims the memory it will take. So no model behind it in line can take that memory,
//! and a stream of smaller models cannot starve it.

pub(in crate::fleet) mod closure;
pub(in crate::fleet) mod turn_order;

mod make_room;
mod reserve;

use std::sync::Arc;

use crate::{
    engine::state::LifecycleState,
    fault::FailureCause,
    fleet::{
        explain::ModelReason,
        plan::{
            PlanBuilder,
            admit::turn_order::AdmissionClass,
            evict::Victim,
            place::{PlacementCandidate, PlacementStatus},
        },
    },
    model::{AcceleratorId, EngineId, ModelSpec, QueuePolicy},
    units::Tick,
};

/// Result of an engine's turn in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::fleet) enum AdmitOutcome {
    /// The engine's memory is being reserved, or could be.
    Placed,
    /// The engine gets room without another model's turn: room is being checked, or being made.
    RoomPending,
    Blocked,
}

/// Failed starts in a row since the engine last served, after which waiters are refused and other variants go first.
///
/// An engine that served and then died, or did not wake, gets a start of its own, however often that happened.
pub(in crate::fleet) const MAX_FAILED_STARTS: u32 = 2;

impl PlanBuilder<'_> {
    pub(in crate::fleet) fn admit(&mut self) {
        self.turn_order = self.ordered_wanted_engines();
        self.turn_positions = self.turn_positions_in(&self.turn_order);
        let classes: Vec<(EngineId, AdmissionClass)> =
            self.turn_order.iter().map(|id| (id.clone(), self.planner.admission_class(id))).collect();
        let of_class =
            |class: AdmissionClass| classes.iter().filter(move |(_, of)| *of == class).map(|(id, _)| id);
        for id in of_class(AdmissionClass::First) {
            self.bring_up_any_variant(id);
        }
        for id in of_class(AdmissionClass::First) {
            self.claim_during_backoff(id);
        }
        for class in [AdmissionClass::Desired, AdmissionClass::Spare] {
            for id in of_class(class) {
                self.bring_up(id, class);
            }
        }
    }

    /// Brings up a model's first engine. If it is blocked, the other variants are tried, the cheapest first.
    fn bring_up_any_variant(&mut self, id: &EngineId) {
        let outcome = self.bring_up(id, AdmissionClass::First);
        let others =
            if outcome == AdmitOutcome::Blocked { self.planner.other_variants(id) } else { Vec::new() };
        if others.is_empty() {
            return;
        }
        let (claims, mut reason) = (self.claims.clone(), self.reasons.get(&id.model).cloned());
        for other in others {
            Arc::make_mut(&mut self.reasons).remove(&id.model);
            if let Some(position) = self.turn_positions.get(id).copied() {
                self.turn_positions.insert(other.clone(), position);
            }
            if self.bring_up(&other, AdmissionClass::First) != AdmitOutcome::Blocked {
                return;
            }
            // A variant that can never start must not refuse requests that another one may serve.
            let of_other = self.reasons.get(&id.model).cloned();
            if reason.as_ref().is_none_or(ModelReason::is_final)
                && of_other.as_ref().is_some_and(|reason| !reason.is_final())
            {
                reason = of_other;
            }
            self.claims.clone_from(&claims);
        }
        if let Some(reason) = reason {
            Arc::make_mut(&mut self.reasons).insert(id.model.clone(), reason);
        }
    }

    /// Claims room for an engine in back-off whose model has waiters.
    ///
    /// Other models in line may use that place meanwhile, but no spare engine, whose start would outlast the back-off.
    fn claim_during_backoff(&mut self, id: &EngineId) {
        let Some(spec) = self.planner.shared_engine_spec(id) else { return };
        let in_backoff = self.engine(id).is_some_and(|e| matches!(e.state, LifecycleState::Backoff { .. }));
        if !in_backoff || self.waiting(&id.model) == 0 {
            return;
        }
        let candidates = self.candidates(id, &spec, true);
        let reachable = candidates.iter().filter(|c| self.is_reachable(id, c));
        if let Some(candidate) =
            reachable.min_by_key(|c| self.placement_status(id, &spec, c) == PlacementStatus::NoRoom).cloned()
        {
            self.claim(id, &candidate);
        }
    }

    pub(in crate::fleet) fn bring_up(&mut self, id: &EngineId, class: AdmissionClass) -> AdmitOutcome {
        let Some(spec) = self.planner.shared_engine_spec(id) else {
            return AdmitOutcome::Blocked;
        };
        self.release_own_claim(id);
        let Some(e) = self.engine(id) else { return AdmitOutcome::Blocked };
        if e.pending_reservation.is_some() {
            self.set_reason(id, self.reserved_reason(id));
            return AdmitOutcome::Placed;
        }
        if e.is_rehearsing() && !e.state.is_starting() {
            let text = format!("the engine rehearses its sleep ({}) and wakes at once", e.state);
            self.set_reason(id, ModelReason::starting(&text));
            return AdmitOutcome::Placed;
        }
        match e.state.clone() {
            LifecycleState::Cold | LifecycleState::Asleep { .. } if e.releasing_since.is_none() => {
                self.start(id, &spec, class)
            }
            LifecycleState::Backoff { until, cause } => {
                self.set_reason(id, self.backoff_reason(id, &spec, until, cause));
                AdmitOutcome::Blocked
            }
            state if state.is_starting() => {
                self.set_reason(id, self.startup_reason(id, &spec));
                AdmitOutcome::Placed
            }
            LifecycleState::Awake if e.stub_gate_closed => {
                self.set_reason(id, ModelReason::stub_gate_closed(id));
                AdmitOutcome::Blocked
            }
            state => {
                // Going down while it is wanted: the engine starts again in its turn, and its place stays claimed.
                let text = format!("the engine is {state} and starts again afterwards");
                let candidate = self.candidates(id, &spec, true).into_iter().next();
                self.set_reason(id, ModelReason::starting(&text));
                let keeps = |c: &PlacementCandidate| {
                    class != AdmissionClass::Spare
                        && state != LifecycleState::Awake
                        && self.is_reachable(id, c)
                };
                if let Some(candidate) = candidate.filter(keeps) {
                    self.claim(id, &candidate);
                }
                AdmitOutcome::RoomPending
            }
        }
    }

    fn start(&mut self, id: &EngineId, spec: &ModelSpec, class: AdmissionClass) -> AdmitOutcome {
        if let Some(outcome) = self.start_closure(id, class) {
            return outcome;
        }
        let candidates = self.candidates(id, spec, true);
        if candidates.is_empty() {
            if self.leave_accelerators(id, spec) {
                return AdmitOutcome::RoomPending;
            }
            let reason = self.misfit_reason(id, spec);
            self.set_reason(id, reason);
            return AdmitOutcome::Blocked;
        }
        let statuses: Vec<PlacementStatus> =
            candidates.iter().map(|c| self.placement_status(id, spec, c)).collect();
        let find_by_status = |predicate: fn(&PlacementStatus) -> bool| {
            statuses.iter().position(predicate).and_then(|i| candidates.get(i))
        };
        if let Some(candidate) = find_by_status(|r| *r == PlacementStatus::Ready) {
            return match self.better_unread_candidate(candidates.iter().zip(&statuses)) {
                Some(better) => self.await_room(id, better, &self.placement_status(id, spec, better)),
                None => self.place(id, spec, candidate),
            };
        }
        let awaited: [fn(&PlacementStatus) -> bool; 4] = [
            |r| matches!(r, PlacementStatus::MeterStale { .. }),
            |r| matches!(r, PlacementStatus::Blocked { .. }),
            |r| matches!(r, PlacementStatus::AwaitingRelease { .. }),
            |r| *r == PlacementStatus::Freeing,
        ];
        // Memory that other engines release is not for a spare.
        let awaited = awaited.into_iter().take(if class == AdmissionClass::Spare { 3 } else { 4 });
        if let Some(candidate) = awaited.into_iter().find_map(find_by_status) {
            let room = self.placement_status(id, spec, candidate);
            return self.await_room(id, candidate, &room);
        }
        self.reread_meters(&candidates);
        if class == AdmissionClass::Spare {
            self.set_reason(
                id,
                ModelReason::starting("waiting for memory that no other model holds or wants"),
            );
            return AdmitOutcome::Blocked;
        }
        // If this plan closed its model's last engine, it gets the model's place in line with the next plan.
        let may_evict = class == AdmissionClass::First
            || self.planner.is_further_replica(id) && self.may_put_away_idle(&id.model);
        let victims = if may_evict { self.victims(id, &candidates) } else { None };
        let all_idle = victims.as_ref().is_some_and(|(_, set)| !set.iter().any(Victim::is_busy));
        if !all_idle && self.relocate(id, spec, &candidates) {
            return AdmitOutcome::RoomPending;
        }
        match victims {
            Some((candidate, _)) if self.refuses_to_wait(&candidates, id) => {
                let candidate = candidate.clone();
                self.wait_for_turn(id, &candidate);
            }
            Some((candidate, victims)) => {
                self.evict(id, candidate, &victims);
                return AdmitOutcome::RoomPending;
            }
            None => {
                let best = candidates
                    .iter()
                    .min_by_key(|c| (!self.is_reachable(id, c), self.earliest_eviction(id, c)))
                    .or_else(|| candidates.first());
                if let Some(candidate) = best.cloned() {
                    self.wait_for_turn(id, &candidate);
                }
            }
        }
        AdmitOutcome::Blocked
    }

    /// A candidate with more room than the first ready one, whose meter reading is only stale.
    ///
    /// Taking the candidate that happens to have been read would crowd all models onto it. `None` if the better
    /// candidate's meter does not answer.
    fn better_unread_candidate<'c>(
        &self,
        mut candidates: impl Iterator<Item = (&'c PlacementCandidate, &'c PlacementStatus)>,
    ) -> Option<&'c PlacementCandidate> {
        let answers = |a: &AcceleratorId| {
            self.planner.ledger.accelerators.get(a).is_some_and(|account| account.meter_answers(self.now))
        };
        let (first, room) = candidates
            .find(|(_, room)| matches!(room, PlacementStatus::Ready | PlacementStatus::MeterStale { .. }))?;
        (*room != PlacementStatus::Ready && first.accelerators.iter().all(answers)).then_some(first)
    }

    /// Whether `queue.policy` is `reject` and only busy engines could make room, which would mean waiting.
    fn refuses_to_wait(&self, candidates: &[PlacementCandidate], id: &EngineId) -> bool {
        self.rejects_waiting(id)
            && self.victims(id, candidates).is_some_and(|(_, set)| set.iter().any(Victim::is_busy))
    }

    fn rejects_waiting(&self, id: &EngineId) -> bool {
        let settings = &self.planner.settings;
        let policy = self
            .planner
            .spec(&self.on_behalf_of(id).model)
            .map_or(settings.queue.policy, |s| settings.policy_of(s));
        policy == QueuePolicy::Reject
    }

    /// Keeps the model's place in line for the candidate, when no engine may be evicted yet.
    fn wait_for_turn(&mut self, id: &EngineId, candidate: &PlacementCandidate) {
        let mut reason = self.memory_reason(id, candidate);
        let rejects = self.rejects_waiting(id);
        reason.refuses_waiters |= rejects;
        if !self.is_reachable(id, candidate) {
            match &mut self.closure_attempt {
                Some(attempt) => attempt.is_out_of_reach = true,
                None => drop(self.out_of_reach.insert(id.clone())),
            }
        } else if !rejects {
            self.claim(id, candidate);
        }
        self.set_reason(id, reason);
    }

    pub(in crate::fleet) fn set_reason(&mut self, id: &EngineId, reason: ModelReason) {
        if self.closure_attempt.is_none() && self.planner.is_scaled(&id.model) {
            let of_variant = (id.model.clone(), id.variant.clone());
            self.replica_reasons.entry(of_variant).or_insert_with(|| reason.clone());
        }
        let awake = self.planner.engines_of(&id.model).filter(|e| e.serves()).count();
        let reason = match self.planner.spec(&id.model) {
            Some(_) if awake > 0 => {
                let replicas = self.planner.expected_replicas(&id.model);
                let full = (self.waiting(&id.model) > 0).then(|| self.planner.full_text(&id.model));
                reason.for_additional_replica(awake, replicas, full.as_deref())
            }
            _ => reason,
        };
        Arc::make_mut(&mut self.reasons).entry(id.model.clone()).or_insert(reason);
    }

    /// Sets a memory reason whose text adds something to the holders of the memory.
    fn set_memory_reason(&mut self, id: &EngineId, candidate: &PlacementCandidate, text: String) {
        let mut reason = self.memory_reason(id, candidate);
        reason.text = text;
        reason.named_models.clear();
        self.set_reason(id, reason);
    }

    fn backoff_reason(
        &self,
        id: &EngineId,
        spec: &ModelSpec,
        until: Tick,
        cause: FailureCause,
    ) -> ModelReason {
        let Some(e) = self.engine(id) else { return ModelReason::default() };
        let others_serve = self.planner.engines_of(&id.model).any(crate::engine::Engine::serves);
        let refuse = (e.failures_since_serving >= MAX_FAILED_STARTS || cause.is_permanent()) && !others_serve;
        ModelReason::failed(e, spec, cause, until, refuse)
    }
}
