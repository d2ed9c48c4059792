//! An engine and all that it needs, brought up in one turn.
//!
//! Either memory is reserved for all of them that do not run, or for none: else two models could each hold what the other
//! one waits for. So it is tried out first, engine by engine, as if each stood in line alone. When every one of them has
//! room, that is how it is decided. When not, they are tried again without reserving anything: what others must give up
//! is told to go only where that makes room for all, and otherwise nothing comes of it but a claim.
//!
//! What is reserved waits until all that it needs serve (`advance`), and is given back when that comes to nothing.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use super::{
    admit::Outcome,
    command::Command,
    explain::Reason,
    placement::Candidate,
    plan::{Draft, Planner},
    portion::Portion,
};
use crate::{
    engine::Engine,
    model::{AcceleratorId, EngineId, ModelName},
    units::Bytes,
};

/// The turn of one engine that cannot start without others.
#[derive(Debug)]
pub(super) struct Together {
    /// Whose turn it is.
    root: EngineId,
    /// Else it is only found out whether there is room, or could be made.
    books: bool,
    /// What was found for each.
    pub(super) claimed: BTreeMap<EngineId, Candidate>,
}

/// A decision as it was.
struct Before {
    planner: Planner,
    claims: BTreeMap<AcceleratorId, Portion>,
    reasons: Arc<BTreeMap<ModelName, Reason>>,
    decided: usize,
}

/// How a try went: as the worst of them fared, and why that one did.
struct Tried {
    outcome: Outcome,
    last: Option<(EngineId, Reason)>,
    claimed: BTreeMap<EngineId, Candidate>,
}

impl Draft<'_> {
    /// On whose behalf this engine is brought up.
    pub(super) fn asker<'i>(&'i self, id: &'i EngineId) -> &'i EngineId {
        self.together.as_ref().map_or(id, |together| &together.root)
    }

    pub(super) fn only_claims(&self) -> bool {
        self.together.as_ref().is_some_and(|together| !together.books)
    }

    /// It is in line for itself, and needs nothing more.
    pub(super) fn is_alone(&self, id: &EngineId) -> bool {
        let needs = &self.planner.needs;
        needs.is_empty()
            || (needs.broken(&id.model).is_none()
                && self.planner.lacks(&id.model).is_none()
                && self.line.contains(id))
    }

    /// What is claimed for it by those who need it is its own to take, when it has a turn itself.
    pub(super) fn take_own_turn(&mut self, id: &EngineId) {
        if self.together.is_some() {
            return;
        }
        let Some(candidate) = self.claimed.remove(id) else { return };
        for accelerator in &candidate.accelerators {
            let account = self.planner.ledger.accelerators.get(accelerator);
            let has = account.map_or_else(Portion::default, |account| account.part_of(id));
            if let Some(claim) = self.claims.get_mut(accelerator) {
                *claim = claim.less(candidate.need.less(has));
            }
        }
    }

    /// What others of the same turn are to have of an accelerator.
    pub(super) fn claimed_beside(&self, id: &EngineId, on: &AcceleratorId) -> Portion {
        let claimed = self.together.iter().flat_map(|together| &together.claimed);
        let beside = claimed.filter(|(other, c)| *other != id && c.accelerators.contains(on));
        beside.map(|(_, candidate)| candidate.need).sum()
    }

    /// An engine that must stay for the one that asks: that needs it, or waits for it.
    pub(super) fn is_needed_with(&self, asker: &EngineId, e: &Engine) -> bool {
        let needs = &self.planner.needs;
        if needs.is_empty() {
            return false;
        }
        let needed = needs.closure(&asker.model).contains(&e.id.model) && self.planner.is_relied_on(e);
        // Who was only needed by this one, and not asked for, would be nobody's without it.
        let needing = needs.dependents(&asker.model).any(|model| *model == e.id.model);
        let fellow = self.together.is_some() && e.id.model == asker.model;
        needed || fellow || (needing && !self.is_wanted(&asker.model))
    }

    /// Why an engine that is reserved for does not start yet.
    pub(super) fn reserved(&self, id: &EngineId) -> Reason {
        let Some(model) = self.planner.lacks(&id.model) else {
            return Reason::starting("its memory is being reserved");
        };
        let state = || self.planner.leader(model).map_or_else(String::new, |e| format!("it is {}", e.state));
        let why = self.reasons.get(model).cloned().unwrap_or_else(|| Reason::starting(&state()));
        why.of_needed(model)
    }

    /// The turn of an engine that needs others which do not serve; `None`: it needs nothing more.
    pub(super) fn with_what_it_needs(&mut self, id: &EngineId, may_evict: bool) -> Option<Outcome> {
        if let Some(broken) = self.planner.needs.broken(&id.model) {
            let mut reason = Reason::starting(broken);
            reason.refuse = true;
            self.because(id, reason);
            return Some(Outcome::Stuck);
        }
        if self.together.is_some() {
            return None;
        }
        let lacks = self.planner.lacks(&id.model)?.clone();
        if !may_evict {
            self.because(id, Reason::starting("waiting until all that it needs serve").naming(&lacks));
            return Some(Outcome::Stuck);
        }
        if let Some(reason) = self.planner.never_fits_together(&id.model) {
            self.because(id, reason);
            return Some(Outcome::Stuck);
        }
        Some(self.all_or_none(id))
    }

    fn all_or_none(&mut self, id: &EngineId) -> Outcome {
        let members = self.members(id);
        let before = Before {
            planner: self.planner.clone(),
            claims: self.claims.clone(),
            reasons: Arc::clone(&self.reasons),
            decided: self.decided(),
        };
        let booked = self.try_all(id, &members, true);
        if booked.outcome == Outcome::Placed {
            self.claims = before.claims;
            return Outcome::Placed;
        }
        self.undo(&before);
        let tried = self.try_all(id, &members, false);
        let why = std::mem::replace(&mut self.reasons, Arc::clone(&before.reasons));
        let claims = self.claims.clone();
        if tried.outcome != Outcome::Coming {
            // Nobody goes for a part of them. What is somebody's for good may end all the same, and only a meter tells.
            let decided = self.undo(&before);
            let accounts = &self.planner.ledger.accelerators;
            let seen = |a: &AcceleratorId| accounts.get(a).is_some_and(super::budget::Account::is_settled);
            let looks = |command: &Command| matches!(command, Command::Meter { accelerator, .. } if seen(accelerator));
            let looks: Vec<Command> = decided.into_iter().filter(looks).collect();
            looks.into_iter().for_each(|command| self.emit(command));
        }
        // What they cannot all have they must not keep from others.
        if tried.outcome == Outcome::Coming || tried.claimed.len() == members.len() {
            self.claims = claims;
            self.claimed.extend(tried.claimed);
        } else {
            self.claims = before.claims;
        }
        let last = tried.last.or(booked.last);
        let others = if tried.outcome == Outcome::Coming {
            why
        } else {
            Arc::new(last.iter().map(|(member, reason)| (member.model.clone(), reason.clone())).collect())
        };
        self.say(id, &members, &others, last);
        tried.outcome
    }

    /// Whose turn it is is told what the one waits for that keeps the others waiting. What is said to those who want one of
    /// the others by itself is for its own turn to say.
    fn say(
        &mut self,
        id: &EngineId,
        members: &[EngineId],
        why: &BTreeMap<ModelName, Reason>,
        last: Option<(EngineId, Reason)>,
    ) {
        for member in members.iter().filter(|member| *member != id) {
            if self.is_wanted(&member.model) {
                continue;
            }
            let reason = why.get(&member.model).cloned().unwrap_or_else(|| {
                let text = format!("it waits along with '{}', which needs it", id.model);
                Reason::starting(&text).naming(&id.model)
            });
            Arc::make_mut(&mut self.reasons).entry(member.model.clone()).or_insert(reason);
        }
        match last {
            Some((member, reason)) if member != *id => self.because(id, reason.of_needed(&member.model)),
            Some((_, reason)) => self.because(id, reason),
            None => {}
        }
    }

    fn undo(&mut self, before: &Before) -> Vec<Command> {
        self.planner = before.planner.clone();
        self.claims = before.claims.clone();
        self.reasons = Arc::clone(&before.reasons);
        self.take_back(before.decided)
    }

    fn try_all(&mut self, id: &EngineId, members: &[EngineId], books: bool) -> Tried {
        self.together = Some(Together { root: id.clone(), books, claimed: BTreeMap::new() });
        let (mut worst, mut last) = (Outcome::Placed, None);
        for member in members {
            let outcome = self.bring_up(member, true);
            if outcome > worst {
                worst = outcome;
                last = self.reasons.get(&member.model).map(|reason| (member.clone(), reason.clone()));
            }
        }
        let claimed = self.together.take().map(|together| together.claimed).unwrap_or_default();
        Tried { outcome: worst, last, claimed }
    }

    /// All that are to be reserved for, those first that have the least choice.
    fn members(&self, id: &EngineId) -> Vec<EngineId> {
        let lacking = self.planner.lacking(&id.model).filter(|e| !self.planner.is_coming(&e.model));
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
