//! An engine and all that it needs, brought up in one turn.
//!
//! Either memory is reserved for all of them that do not run, or for none: else two models could each hold what the other
//! one waits for. So it is tried out first, engine by engine, as if each stood in line alone. When every one of them has
//! room, that is how it is decided. When not, they are tried again without reserving anything: what others must give up
//! is told to go only where that makes room for all, and otherwise nothing comes of it but a claim.
//!
//! What is reserved waits until all that it needs serve (`advance`), and is given back when that comes to nothing.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use crate::{
    engine::Engine,
    fleet::{
        command::Command,
        explain::ModelReason,
        plan::{PlanBuilder, Planner, admit::AdmitOutcome, place::PlacementCandidate},
        state::ledger::amount::ResourceAmount,
    },
    model::{AcceleratorId, EngineId, ModelName},
    units::Bytes,
};

/// The turn of one engine that cannot start without others.
#[derive(Debug)]
pub(in crate::fleet) struct ClosureAttempt {
    /// Whose turn it is.
    root: EngineId,
    /// Else it is only found out whether there is room, or could be made.
    reserves: bool,
    /// What was found for each.
    pub(in crate::fleet) claimed: BTreeMap<EngineId, PlacementCandidate>,
}

/// A decision as it was.
struct PlanSnapshot {
    planner: Planner,
    claims: BTreeMap<AcceleratorId, ResourceAmount>,
    reasons: Arc<BTreeMap<ModelName, ModelReason>>,
    command_count: usize,
}

/// How a try went: as the worst of them fared, and why that one did.
struct ClosureAttemptResult {
    outcome: AdmitOutcome,
    limiting: Option<(EngineId, ModelReason)>,
    claimed: BTreeMap<EngineId, PlacementCandidate>,
}

impl PlanBuilder<'_> {
    /// On whose behalf this engine is brought up.
    pub(in crate::fleet) fn on_behalf_of<'i>(&'i self, id: &'i EngineId) -> &'i EngineId {
        self.closure_attempt.as_ref().map_or(id, |together| &together.root)
    }

    pub(in crate::fleet) fn is_dry_run(&self) -> bool {
        self.closure_attempt.as_ref().is_some_and(|together| !together.reserves)
    }

    /// It is in line for itself, and needs nothing more.
    pub(in crate::fleet) fn is_independent(&self, id: &EngineId) -> bool {
        let needs = &self.planner.dependencies;
        needs.is_empty()
            || (needs.closure_error(&id.model).is_none()
                && self.planner.first_missing(&id.model).is_none()
                && self.turn_order.contains(id))
    }

    /// What is claimed for it by those who need it is its own to take, when it has a turn itself.
    pub(in crate::fleet) fn release_own_claim(&mut self, id: &EngineId) {
        if self.closure_attempt.is_some() {
            return;
        }
        let Some(candidate) = self.dependency_claims.remove(id) else { return };
        for accelerator in &candidate.accelerators {
            let account = self.planner.ledger.accelerators.get(accelerator);
            let has = account.map_or_else(ResourceAmount::default, |account| account.amount_of(id));
            if let Some(claim) = self.claims.get_mut(accelerator) {
                *claim = claim.saturating_sub(candidate.need.saturating_sub(has));
            }
        }
    }

    /// What others of the same turn are to have of an accelerator.
    pub(in crate::fleet) fn claimed_for_other_members(
        &self,
        id: &EngineId,
        on: &AcceleratorId,
    ) -> ResourceAmount {
        let claimed = self.closure_attempt.iter().flat_map(|together| &together.claimed);
        let beside = claimed.filter(|(other, c)| *other != id && c.accelerators.contains(on));
        beside.map(|(_, candidate)| candidate.need).sum()
    }

    /// An engine that must stay for the one that asks: that needs it, or waits for it.
    pub(in crate::fleet) fn must_stay_for(&self, asker: &EngineId, e: &Engine) -> bool {
        let needs = &self.planner.dependencies;
        if needs.is_empty() {
            return false;
        }
        let needed = needs.closure(&asker.model).contains(&e.id.model) && self.planner.is_relied_on(e);
        // Who was only needed by this one, and not asked for, would be nobody's without it.
        let needing = needs.dependents(&asker.model).any(|model| *model == e.id.model);
        let fellow = self.closure_attempt.is_some() && e.id.model == asker.model;
        needed || fellow || (needing && !self.is_wanted(&asker.model))
    }

    /// Why an engine that is reserved for does not start yet.
    pub(in crate::fleet) fn reserved_reason(&self, id: &EngineId) -> ModelReason {
        let Some(model) = self.planner.first_missing(&id.model) else {
            return ModelReason::starting("its memory is being reserved");
        };
        let state =
            || self.planner.primary_engine(model).map_or_else(String::new, |e| format!("it is {}", e.state));
        let why = self.reasons.get(model).cloned().unwrap_or_else(|| ModelReason::starting(&state()));
        why.for_dependent(model)
    }

    /// The turn of an engine that needs others which do not serve; `None`: it needs nothing more.
    pub(in crate::fleet) fn start_closure(&mut self, id: &EngineId, may_evict: bool) -> Option<AdmitOutcome> {
        if let Some(broken) = self.planner.dependencies.closure_error(&id.model) {
            let mut reason = ModelReason::starting(broken);
            reason.refuses_waiters = true;
            self.set_reason(id, reason);
            return Some(AdmitOutcome::Blocked);
        }
        if self.closure_attempt.is_some() {
            return None;
        }
        let lacks = self.planner.first_missing(&id.model)?.clone();
        if !may_evict {
            self.set_reason(
                id,
                ModelReason::starting("waiting until all that it needs serve").naming(&lacks),
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
        let booked = self.attempt_all(id, &members, true);
        if booked.outcome == AdmitOutcome::Placed {
            self.claims = before.claims;
            return AdmitOutcome::Placed;
        }
        self.roll_back(&before);
        let tried = self.attempt_all(id, &members, false);
        let why = std::mem::replace(&mut self.reasons, Arc::clone(&before.reasons));
        let claims = self.claims.clone();
        if tried.outcome != AdmitOutcome::RoomPending {
            // Nobody goes for a part of them. What is somebody's for good may end all the same, and only a meter tells.
            let decided = self.roll_back(&before);
            let accounts = &self.planner.ledger.accelerators;
            let seen = |a: &AcceleratorId| {
                accounts
                    .get(a)
                    .is_some_and(crate::fleet::state::ledger::AcceleratorAccount::is_usage_confirmed)
            };
            let looks = |command: &Command| matches!(command, Command::ReadMeter { accelerator, .. } if seen(accelerator));
            let looks: Vec<Command> = decided.into_iter().filter(looks).collect();
            looks.into_iter().for_each(|command| self.emit(command));
        }
        // What they cannot all have they must not keep from others.
        if tried.outcome == AdmitOutcome::RoomPending || tried.claimed.len() == members.len() {
            self.claims = claims;
            self.dependency_claims.extend(tried.claimed);
        } else {
            self.claims = before.claims;
        }
        let last = tried.limiting.or(booked.limiting);
        let others = if tried.outcome == AdmitOutcome::RoomPending {
            why
        } else {
            Arc::new(last.iter().map(|(member, reason)| (member.model.clone(), reason.clone())).collect())
        };
        self.set_member_reasons(id, &members, &others, last);
        tried.outcome
    }

    /// Whose turn it is is told what the one waits for that keeps the others waiting. What is said to those who want one of
    /// the others by itself is for its own turn to say.
    fn set_member_reasons(
        &mut self,
        id: &EngineId,
        members: &[EngineId],
        why: &BTreeMap<ModelName, ModelReason>,
        last: Option<(EngineId, ModelReason)>,
    ) {
        for member in members.iter().filter(|member| *member != id) {
            if self.is_wanted(&member.model) {
                continue;
            }
            let reason = why.get(&member.model).cloned().unwrap_or_else(|| {
                let text = format!("it waits along with '{}', which needs it", id.model);
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
        self.claims = before.claims.clone();
        self.reasons = Arc::clone(&before.reasons);
        self.take_commands_since(before.command_count)
    }

    fn attempt_all(&mut self, id: &EngineId, members: &[EngineId], books: bool) -> ClosureAttemptResult {
        self.closure_attempt =
            Some(ClosureAttempt { root: id.clone(), reserves: books, claimed: BTreeMap::new() });
        let (mut worst, mut last) = (AdmitOutcome::Placed, None);
        for member in members {
            let outcome = self.bring_up(member, true);
            if outcome > worst {
                worst = outcome;
                last = self.reasons.get(&member.model).map(|reason| (member.clone(), reason.clone()));
            }
        }
        let claimed = self.closure_attempt.take().map(|together| together.claimed).unwrap_or_default();
        ClosureAttemptResult { outcome: worst, limiting: last, claimed }
    }

    /// All that are to be reserved for, those first that have the least choice.
    fn closure_members(&self, id: &EngineId) -> Vec<EngineId> {
        let lacking =
            self.planner.missing_engines(&id.model).filter(|e| !self.planner.is_coming_up(&e.model));
        let mut members: Vec<EngineId> = lacking.chain([id.clone()]).collect();
        members.sort_by_cached_key(|member| {
            let spec = self.planner.shared_spec(&member.model);
            let ways = spec.as_deref().map_or_else(Vec::new, |spec| self.candidates(member, spec, true));
            let need = ways.first().map_or(Bytes::ZERO, |candidate| candidate.need.bytes);
            (ways.len(), Reverse(need))
        });
        members
    }
}
