//! Brings up an engine and all its dependencies in one turn.
//!
//! Memory is reserved for all of them that do not run, or for none: otherwise two models could each hold what the other
//! waits for. So a first attempt goes engine by engine, as if each stood in line alone. If every engine has room, that
//! attempt becomes the decision. If not, it is rolled back, and a second attempt reserves nothing: it evicts other
//! engines only if that makes room for all, and otherwise leaves at most a claim.
//!
//! A reservation waits until all dependencies serve (`advance`), and is released if they will not.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use crate::{
    engine::Engine,
    fleet::{
        command::Command,
        explain::ModelReason,
        plan::{
            DraftCache, PlanBuilder, Planner,
            admit::{AdmitOutcome, turn_order::AdmissionClass},
            place::PlacementCandidate,
        },
        state::ledger::amount::ResourceAmount,
    },
    model::{AcceleratorId, EngineId, ModelName},
    units::Bytes,
};

/// The turn of one engine that cannot start without others.
#[derive(Debug)]
pub(in crate::fleet) struct ClosureAttempt {
    /// The engine whose turn it is.
    root: EngineId,
    /// False: the attempt only finds out whether there is room, or could be made.
    reserves: bool,
    /// The candidate found for each engine.
    pub(in crate::fleet) claimed: BTreeMap<EngineId, PlacementCandidate>,
    /// No eviction could give one of the engines the memory that it lacks.
    pub(in crate::fleet) is_out_of_reach: bool,
}

/// The draft before an attempt, for the rollback.
struct PlanSnapshot {
    planner: Planner,
    claims: BTreeMap<AcceleratorId, ResourceAmount>,
    reasons: Arc<BTreeMap<ModelName, ModelReason>>,
    command_count: usize,
}

/// Result of an attempt: the worst outcome of its members, and the reason of that member.
struct ClosureAttemptResult {
    outcome: AdmitOutcome,
    limiting: Option<(EngineId, ModelReason)>,
    claimed: BTreeMap<EngineId, PlacementCandidate>,
    is_out_of_reach: bool,
}

impl PlanBuilder<'_> {
    /// The engine on whose behalf this engine is brought up.
    pub(in crate::fleet) fn on_behalf_of<'i>(&'i self, id: &'i EngineId) -> &'i EngineId {
        self.closure_attempt.as_ref().map_or(id, |attempt| &attempt.root)
    }

    pub(in crate::fleet) fn is_dry_run(&self) -> bool {
        self.closure_attempt.as_ref().is_some_and(|attempt| !attempt.reserves)
    }

    /// Whether the engine is in line for itself, and lacks no dependency.
    pub(in crate::fleet) fn is_independent(&self, id: &EngineId) -> bool {
        let planner = &self.planner;
        planner.dependencies.is_empty()
            || (planner.dependencies_serve(&id.model) && self.turn_order.contains(id))
    }

    /// Releases what dependents claimed for this engine, once the engine has a turn itself.
    ///
    /// That turn also decides anew whether the engine is out of reach.
    pub(in crate::fleet) fn release_own_claim(&mut self, id: &EngineId) {
        if self.closure_attempt.is_some() {
            return;
        }
        self.out_of_reach.remove(id);
        let Some(candidate) = self.dependency_claims.remove(id) else { return };
        for accelerator in &candidate.accelerators {
            let account = self.planner.ledger.accelerators.get(accelerator);
            let present = account.map_or_else(ResourceAmount::default, |account| account.amount_of(id));
            if let Some(claim) = self.claims.get_mut(accelerator) {
                *claim = claim.saturating_sub(candidate.need.saturating_sub(present));
            }
        }
    }

    /// Amount that other members of the same turn will take on an accelerator.
    pub(in crate::fleet) fn claimed_for_other_members(
        &self,
        id: &EngineId,
        on: &AcceleratorId,
    ) -> ResourceAmount {
        let claimed = self.closure_attempt.iter().flat_map(|attempt| &attempt.claimed);
        let others_claimed = claimed.filter(|(other, c)| *other != id && c.accelerators.contains(on));
        others_claimed.map(|(_, candidate)| candidate.need).sum()
    }

    /// Whether `e` must stay when `requester` needs room.
    ///
    /// This holds for a dependency that `requester` relies on, for another replica of its model during a closure attempt,
    /// and for a dependent without which `requester` would not be wanted.
    pub(in crate::fleet) fn must_stay_for(&self, requester: &EngineId, e: &Engine) -> bool {
        let dependencies = &self.planner.dependencies;
        if dependencies.is_empty() {
            return false;
        }
        let is_dependency =
            dependencies.closure(&requester.model).contains(&e.id.model) && self.planner.is_relied_on(e);
        // A dependency that is not wanted itself would be of no use without this dependent.
        let is_dependent = dependencies.dependents(&requester.model).any(|model| *model == e.id.model);
        let is_other_replica = self.closure_attempt.is_some() && e.id.model == requester.model;
        is_dependency || is_other_replica || (is_dependent && !self.is_wanted(&requester.model))
    }

    /// Why a reserved engine does not start yet.
    pub(in crate::fleet) fn reserved_reason(&self, id: &EngineId) -> ModelReason {
        let Some(model) = self.planner.first_missing(&id.model) else {
            return ModelReason::starting("its memory is being reserved");
        };
        let state = || {
            self.planner
                .primary_engine(model)
                .map_or_else(String::new, |e| format!("the engine is {}", e.state))
        };
        let reason = self.reasons.get(model).cloned().unwrap_or_else(|| ModelReason::starting(&state()));
        reason.for_dependent(model)
    }

    /// Takes the turn of an engine whose dependencies do not serve; `None` if the engine may start alone.
    pub(in crate::fleet) fn start_closure(
        &mut self,
        id: &EngineId,
        class: AdmissionClass,
    ) -> Option<AdmitOutcome> {
        if let Some(broken) = self.planner.dependencies.closure_error(&id.model) {
            let mut reason = ModelReason::starting(broken);
            reason.refuses_waiters = true;
            self.set_reason(id, reason);
            return Some(AdmitOutcome::Blocked);
        }
        if self.closure_attempt.is_some() {
            return None;
        }
        let missing = self.planner.first_missing(&id.model)?.clone();
        if class != AdmissionClass::First {
            self.set_reason(
                id,
                ModelReason::starting("waiting until all its dependencies serve").naming(&missing),
            );
            return Some(AdmitOutcome::Blocked);
        }
        if let Some(reason) = self.planner.closure_misfit_reason(&id.model) {
            self.set_reason(id, reason);
            return Some(AdmitOutcome::Blocked);
        }
        Some(self.start_all_or_none(id))
    }

    fn start_all_or_none(&mut self, id: &EngineId) -> AdmitOutcome {
        let members = self.closure_members(id);
        let before = PlanSnapshot {
            planner: self.planner.clone(),
            claims: self.claims.clone(),
            reasons: Arc::clone(&self.reasons),
            command_count: self.command_count(),
        };
        let reserving_attempt = self.attempt_all(id, &members, true);
        if reserving_attempt.outcome == AdmitOutcome::Placed {
            self.claims = before.claims;
            return AdmitOutcome::Placed;
        }
        self.roll_back(&before);
        let dry_run = self.attempt_all(id, &members, false);
        let dry_run_reasons = std::mem::replace(&mut self.reasons, Arc::clone(&before.reasons));
        let claims = self.claims.clone();
        if dry_run.outcome != AdmitOutcome::RoomPending {
            // No engine is evicted for a part of them. Usage that the meter has confirmed may still end, and only a
            // reading shows it.
            let discarded = self.roll_back(&before);
            let accounts = &self.planner.ledger.accelerators;
            let is_confirmed = |a: &AcceleratorId| {
                accounts
                    .get(a)
                    .is_some_and(crate::fleet::state::ledger::AcceleratorAccount::is_usage_confirmed)
            };
            let reads_confirmed = |command: &Command| matches!(command, Command::ReadMeter { accelerator, .. } if is_confirmed(accelerator));
            let readings: Vec<Command> = discarded.into_iter().filter(reads_confirmed).collect();
            readings.into_iter().for_each(|command| self.emit(command));
        }
        // Members that cannot all be placed must not keep memory from other models.
        if dry_run.outcome == AdmitOutcome::RoomPending || dry_run.claimed.len() == members.len() {
            self.claims = claims;
            self.dependency_claims.extend(dry_run.claimed);
        } else {
            self.claims = before.claims;
        }
        if dry_run.is_out_of_reach {
            // A member with another place in line is needed there as well.
            let place = self.turn_positions.get(id);
            let only_here = members.iter().filter(|member| self.turn_positions.get(*member) == place);
            self.out_of_reach.extend(only_here.cloned());
        }
        let last = dry_run.limiting.or(reserving_attempt.limiting);
        let member_reasons = if dry_run.outcome == AdmitOutcome::RoomPending {
            dry_run_reasons
        } else {
            Arc::new(last.iter().map(|(member, reason)| (member.model.clone(), reason.clone())).collect())
        };
        self.set_member_reasons(id, &members, &member_reasons, last);
        dry_run.outcome
    }

    /// Gives the root the reason of the member that holds all others back.
    ///
    /// A member that is wanted for itself gets its reason in its own turn.
    fn set_member_reasons(
        &mut self,
        id: &EngineId,
        members: &[EngineId],
        reasons: &BTreeMap<ModelName, ModelReason>,
        last: Option<(EngineId, ModelReason)>,
    ) {
        for member in members.iter().filter(|member| *member != id) {
            if self.is_wanted(&member.model) {
                continue;
            }
            let reason = reasons.get(&member.model).cloned().unwrap_or_else(|| {
                let text = format!("waits together with '{}', which depends on it", id.model);
                ModelReason::starting(&text).naming(&id.model)
            });
            Arc::make_mut(&mut self.reasons).entry(member.model.clone()).or_insert(reason);
        }
        match last {
            Some((member, reason)) if member != *id => {
                self.set_reason(id, reason.for_dependent(&member.model))
            }
            Some((_, reason)) => self.set_reason(id, reason),
            None => {}
        }
    }

    fn roll_back(&mut self, before: &PlanSnapshot) -> Vec<Command> {
        self.planner = before.planner.clone();
        self.cache = DraftCache::default();
        self.claims = before.claims.clone();
        self.reasons = Arc::clone(&before.reasons);
        self.take_commands_since(before.command_count)
    }

    fn attempt_all(&mut self, id: &EngineId, members: &[EngineId], reserves: bool) -> ClosureAttemptResult {
        self.closure_attempt = Some(ClosureAttempt {
            root: id.clone(),
            reserves,
            claimed: BTreeMap::new(),
            is_out_of_reach: false,
        });
        let (mut worst, mut last) = (AdmitOutcome::Placed, None);
        for member in members {
            let outcome = self.bring_up(member, AdmissionClass::First);
            if outcome > worst {
                worst = outcome;
                last = self.reasons.get(&member.model).map(|reason| (member.clone(), reason.clone()));
            }
        }
        let attempt = self.closure_attempt.take();
        let (claimed, is_out_of_reach) =
            attempt.map(|attempt| (attempt.claimed, attempt.is_out_of_reach)).unwrap_or_default();
        ClosureAttemptResult { outcome: worst, limiting: last, claimed, is_out_of_reach }
    }

    /// The engines to reserve for, those with the fewest candidates first.
    fn closure_members(&self, id: &EngineId) -> Vec<EngineId> {
        let lacking =
            self.planner.missing_engines(&id.model).filter(|e| !self.planner.is_coming_up(&e.model));
        let mut members: Vec<EngineId> = lacking.chain([id.clone()]).collect();
        members.sort_by_cached_key(|member| {
            let spec = self.planner.shared_engine_spec(member);
            let candidates =
                spec.as_deref().map_or_else(Vec::new, |spec| self.candidates(member, spec, true));
            let need = candidates.first().map_or(Bytes::ZERO, |candidate| candidate.need.bytes);
            (candidates.len(), Reverse(need))
        });
        members
    }
}
