//! Where an engine may go: candidate sets of accelerators, and whether one has room.

use super::{
    budget::Account,
    plan::{Draft, Planner},
    portion::Portion,
};
use crate::{
    engine::{Engine, Proof, state::State},
    model::{AcceleratorId, Accelerators, EngineId, Eviction, ModelSpec},
    units::{Bytes, Millis},
};

/// One way of placing an engine.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) accelerators: Vec<AcceleratorId>,
    /// What the engine will have booked and taken on each of them.
    pub(super) need: Portion,
}

/// Whether a candidate can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// Now.
    Yes,
    /// An engine there measures free memory, or is about to change it.
    Excluded {
        by: EngineId,
    },
    /// The ledger has room; the meter was not asked since the last change.
    Unread {
        accelerator: AcceleratorId,
    },
    /// The ledger has room; the meter does not show it free yet.
    Unseen {
        accelerator: AcceleratorId,
        after: Millis,
        short: Bytes,
    },
    /// It will, once what is on its way out is gone.
    Coming,
    No,
}

/// More combinations than this are not looked at; those with the most free memory come first.
pub(super) const MOST: usize = 64;

impl Planner {
    /// Accelerators, or sets of them, on which an engine of this model could be that needs so much of each.
    pub(super) fn places_for(
        &self,
        spec: &ModelSpec,
        need: Portion,
        usable: impl Fn(&AcceleratorId) -> bool,
    ) -> Vec<Candidate> {
        let accounts = &self.ledger.accelerators;
        if spec.accelerators.is_none() {
            return vec![Candidate { accelerators: Vec::new(), need }];
        }
        let sets = match &spec.accelerators {
            Accelerators::Ids(ids) => vec![ids.clone()],
            Accelerators::Of { pool, .. } => vec![vec![pool.clone()]],
            Accelerators::Count(n) => {
                // A pool is no accelerator of this machine: it is for those who name it.
                let single = |a: &&AcceleratorId| accounts.get(a).is_some_and(|a| a.units.is_none());
                // No more of them can be in the first combinations.
                let most = (*n as usize).saturating_add(MOST);
                let free = accounts.most_free_first().filter(single);
                let ids: Vec<AcceleratorId> = free.filter(|a| usable(a)).take(most).cloned().collect();
                combinations(&ids, *n as usize)
            }
        };
        let fits = |set: &Vec<AcceleratorId>| !set.is_empty() && set.iter().all(&usable);
        sets.into_iter().filter(fits).map(|accelerators| Candidate { accelerators, need }).collect()
    }
}

impl Draft<'_> {
    /// Every candidate, those with the most free memory first. Empty: it fits nowhere, even were all else put away.
    pub(super) fn candidates(&self, id: &EngineId, spec: &ModelSpec, healthy_only: bool) -> Vec<Candidate> {
        let Some(model) = self.planner.models.get(&id.model) else {
            return Vec::new();
        };
        let need = model.need(spec, self.planner.largest(spec));
        let declared = Portion { bytes: spec.accelerators.in_one_place(spec.memory.awake), ..need };
        let accounts = &self.planner.ledger.accelerators;
        let usable = |a: &AcceleratorId| {
            accounts.get(a).is_some_and(|account| {
                let could = account.could_hold(need) || account.could_hold(declared);
                could && (account.healthy || !healthy_only)
            })
        };
        if let Some(e) = self.engine(id).filter(|e| e.state.has_process()) {
            let own = e.accelerators.clone();
            let fits = (!own.is_empty() || spec.accelerators.is_none()) && own.iter().all(usable);
            return fits.then_some(Candidate { accelerators: own, need }).into_iter().collect();
        }
        self.planner.places_for(spec, need, usable)
    }

    /// Where an asleep engine could be, were it started anew.
    pub(super) fn elsewhere(&self, id: &EngineId, spec: &ModelSpec) -> Vec<Candidate> {
        let Some(model) = self.planner.models.get(&id.model) else {
            return Vec::new();
        };
        let need = model.need(spec, self.planner.largest(spec));
        let accounts = &self.planner.ledger.accelerators;
        let usable = |a: &AcceleratorId| accounts.get(a).is_some_and(|a| a.healthy && a.could_hold(need));
        let own = self.engine(id).map(|e| e.accelerators.clone()).unwrap_or_default();
        let mut places = self.planner.places_for(spec, need, usable);
        places.retain(|c| !c.accelerators.iter().any(|a| own.contains(a)));
        places
    }

    /// What is still missing on one accelerator of a candidate: first after what is free, then after what is on its way
    /// out as well, which is never more.
    pub(super) fn shortfalls(
        &self,
        id: &EngineId,
        candidate: &Candidate,
        on: &AcceleratorId,
    ) -> (Portion, Portion) {
        let Some(account) = self.planner.ledger.accelerators.get(on) else {
            return (candidate.need, candidate.need);
        };
        let claimed = self.claims.get(on).copied().unwrap_or_default();
        let extra = candidate.need.less(account.part_of(id));
        let (free, coming) = (self.unused(id, on, account), self.coming(id, on));
        let most = (free + coming).less(claimed);
        (extra.less(free.least(most)), extra.less((free + coming).least(most)))
    }

    /// What is neither booked nor known to be somebody else's.
    fn unused(&self, id: &EngineId, on: &AcceleratorId, account: &Account) -> Portion {
        let mut free = account.free();
        if account.is_settled() {
            free = free.min(
                account
                    .capacity
                    .saturating_sub(self.used_beside(id, on))
                    .saturating_sub(account.booked_by(id)),
            );
        }
        Portion { bytes: free, units: account.free_units() }
    }

    /// What will be in use beside this engine. Where the meter names nobody and several sleep, what this one was found to
    /// keep beyond its declared residue may be another's, and counts as such.
    fn used_beside(&self, id: &EngineId, on: &AcceleratorId) -> Bytes {
        let Some(account) = self.planner.ledger.accelerators.get(on) else {
            return Bytes::ZERO;
        };
        let used = account.used_beside(id);
        let asleep = |e: &Engine| matches!(e.state, State::Asleep { .. }) && e.accelerators.contains(on);
        let named = account.reading.as_ref().is_none_or(|r| r.by_engine.is_some());
        if named || !self.engine(id).is_some_and(asleep) {
            return used;
        }
        let near = self.planner.engines.near(std::slice::from_ref(on));
        if !near.into_iter().any(|e| e.id != *id && asleep(e)) {
            return used;
        }
        let spec = self.planner.spec(&id.model);
        let declared = spec.map_or(Bytes::ZERO, |s| s.accelerators.in_one_place(s.memory.asleep));
        let doubtful = account.reading.as_ref().map_or(Bytes::ZERO, |r| r.used.saturating_sub(declared));
        used.max(doubtful)
    }

    /// Whether it could ever have this candidate: what is free and what may be put away, by policy or by idleness, is
    /// enough. What it can never have it must not keep from others.
    pub(super) fn in_reach(&self, id: &EngineId, candidate: &Candidate) -> bool {
        candidate.accelerators.iter().all(|on| {
            let Some(account) = self.planner.ledger.accelerators.get(on) else {
                return false;
            };
            let others = account.booked.iter().filter(|(other, _)| *other != id);
            let engines = others.filter_map(|(other, bytes)| Some((self.engine(other)?, bytes)));
            let asker = self.asker(id);
            let engines = engines.filter(|(e, _)| !self.is_needed_with(asker, e));
            let may_go = engines.filter(|(e, _)| self.may_ever_go(e)).map(|(e, bytes)| Portion {
                bytes,
                units: if self.may_ever_end(e) { account.taken.of(&e.id) } else { 0 },
            });
            let may_go: Portion = may_go.sum();
            let beside = self.claimed_beside(id, on);
            (account.part_of(id) + self.unused(id, on, account) + may_go).covers(candidate.need + beside)
        })
    }

    fn may_ever_go(&self, e: &Engine) -> bool {
        let Some(spec) = self.planner.spec(&e.id.model) else {
            return true;
        };
        let by_idleness = spec.idle.sleep_after.is_some() || spec.idle.stop_after.is_some();
        let eviction = self.planner.settings.eviction_of(spec);
        let own = !self.planner.is_kept(&e.id) && (by_idleness || eviction == Eviction::Residency);
        e.state.is_leaving() || (own && self.those_may_ever_go(e))
    }

    /// Those that need it, for whose sake it stays.
    fn those_may_ever_go(&self, e: &Engine) -> bool {
        let planner = &self.planner;
        if planner.keeper(e).is_none() {
            return true;
        }
        let active = planner.needs.dependents(&e.id.model).filter(|model| planner.is_active(model));
        let mut engines = active.flat_map(|model| planner.engines_of(model));
        engines.all(|e| !e.state.has_process() || self.may_ever_go(e))
    }

    /// Of one that may go: not only to sleep, which keeps the accelerators of its pool.
    fn may_ever_end(&self, e: &Engine) -> bool {
        let Some(spec) = self.planner.spec(&e.id.model) else {
            return true;
        };
        let only_sleeps = self.sleep_level(&e.id, None).is_some() && spec.idle.stop_after.is_none();
        !only_sleeps || self.planner.settings.eviction_of(spec) != Eviction::Never
    }

    /// What engines on their way out will give back on an accelerator.
    fn coming(&self, id: &EngineId, on: &AcceleratorId) -> Portion {
        self.planner.engines.leaving(on).filter(|e| e.id != *id).map(|e| self.will_free(e, on)).sum()
    }

    /// What this engine will give back on its own.
    pub(super) fn will_free(&self, e: &Engine, on: &AcceleratorId) -> Portion {
        let Some(account) = self.planner.ledger.accelerators.get(on) else {
            return Portion::default();
        };
        let all = account.part_of(&e.id);
        // The accelerators of its pool are its own while it sleeps.
        let asleep = Portion { bytes: all.bytes.saturating_sub(self.planner.residue_of(&e.id)), units: 0 };
        match &e.state {
            State::Draining { then: super::command::Then::Sleep(wish), .. } => {
                if self.sleep_level(&e.id, *wish).is_some() { asleep } else { all }
            }
            State::FallingAsleep { .. } => asleep,
            State::Asleep { .. } if e.shrinking.is_some() => asleep,
            state if state.is_leaving() => all,
            _ => Portion::default(),
        }
    }

    /// Whether the engine can be started on this candidate, and if not why.
    pub(super) fn room(&self, id: &EngineId, spec: &ModelSpec, candidate: &Candidate) -> Room {
        let mut awaits = false;
        for on in &candidate.accelerators {
            let (now, then) = self.shortfalls(id, candidate, on);
            if !then.is_nothing() {
                return Room::No;
            }
            awaits |= !now.is_nothing();
        }
        if awaits {
            return Room::Coming;
        }
        // Those that are reserved together start one by one, and each looks again.
        if self.together.is_none()
            && let Some(by) = self.excluded(id, spec, candidate)
        {
            return Room::Excluded { by };
        }
        let mut unseen = None;
        for accelerator in &candidate.accelerators {
            let Some(account) = self.planner.ledger.accelerators.get(accelerator) else {
                continue;
            };
            if !account.is_fresh(self.now) {
                return Room::Unread { accelerator: accelerator.clone() };
            }
            let used = self.used_beside(id, accelerator) + candidate.need.bytes;
            if account.metered && used > account.capacity {
                let short = used.saturating_sub(account.capacity);
                unseen =
                    Some(Room::Unseen { accelerator: accelerator.clone(), after: account.pause(), short });
            }
        }
        unseen.unwrap_or(Room::Yes)
    }

    /// An engine that must be let finish first: on one accelerator a launch that measures free memory excludes every
    /// other change of it.
    fn excluded(&self, id: &EngineId, spec: &ModelSpec, candidate: &Candidate) -> Option<EngineId> {
        let cold = !self.engine(id).is_some_and(|e| e.state.has_process());
        let launch = cold && spec.measures();
        let near = |e: &&Engine| {
            let held = e.placing.as_ref().map_or(&e.accelerators, |p| &p.accelerators);
            e.id != *id && held.iter().any(|a| candidate.accelerators.contains(a))
        };
        // What is reserved for one that lacks something is not about to be used.
        let about_to = |e: &Engine| e.placing.is_some() && self.planner.lacks(&e.id.model).is_none();
        let engines = self.planner.engines.near(&candidate.accelerators);
        let blocks = |e: &&Engine| self.disturbs(e, launch, about_to(e));
        engines.into_iter().filter(near).find(blocks).map(|e| e.id.clone())
    }

    /// What this engine does, or is about to, must be over before another one takes memory beside it. `launch`: one that
    /// measures how much is free.
    fn disturbs(&self, e: &Engine, launch: bool, about_to: bool) -> bool {
        let profiles = self.planner.spec(&e.id.model).is_none_or(ModelSpec::measures);
        if e.is_profiling() || (about_to && !e.state.has_process() && profiles) {
            return true;
        }
        // One with explicit bytes lets others start beside it at once, but takes its memory only as it loads: whoever
        // measures meanwhile would measure wrong.
        let takes = e.state.is_starting() && e.proof == Proof::NotReady && !(profiles && e.profiled);
        let moves = about_to
            || matches!(e.state, State::Waking { .. } | State::FallingAsleep { .. } | State::Stopping { .. })
            || e.shrinking.is_some()
            || takes;
        launch && moves
    }

    /// Another engine does so on these, where this one has something reserved. Who waits for nobody else starts as soon as it
    /// is reserved for; of those that do wait, the first goes ahead.
    pub(super) fn is_disturbed(&self, id: &EngineId, accelerators: &[AcceleratorId]) -> bool {
        let cold = !self.engine(id).is_some_and(|e| e.state.has_process());
        let launch = cold && self.planner.spec(&id.model).is_none_or(ModelSpec::measures);
        let about_to = |e: &Engine| e.placing.as_ref().is_some_and(|placing| !placing.patient);
        let near = self.planner.engines.near(accelerators).into_iter().filter(|e| e.id != *id);
        let mut near = near.filter(|e| e.state.has_process() || about_to(e));
        // One that fails may be measuring until it is told to end.
        near.any(|e| matches!(e.state, State::Failing { .. }) || self.disturbs(e, launch, about_to(e)))
    }
}

/// Sets of `n`, in the order of the list, at most [`MOST`].
fn combinations(ids: &[AcceleratorId], n: usize) -> Vec<Vec<AcceleratorId>> {
    let mut out = Vec::new();
    let mut chosen = Vec::new();
    descend(ids, n, &mut chosen, &mut out);
    out
}

fn descend(
    ids: &[AcceleratorId],
    n: usize,
    chosen: &mut Vec<AcceleratorId>,
    out: &mut Vec<Vec<AcceleratorId>>,
) {
    if out.len() >= MOST {
        return;
    }
    if n == 0 {
        out.push(chosen.clone());
        return;
    }
    for (at, id) in ids.iter().enumerate() {
        if ids.len() - at < n {
            return;
        }
        chosen.push(id.clone());
        descend(ids.get(at + 1..).unwrap_or_default(), n - 1, chosen, out);
        chosen.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combinations_are_complete_and_bounded() {
        let ids: Vec<AcceleratorId> = (0..4).map(|i| AcceleratorId::from(format!("gpu-{i}"))).collect();
        assert_eq!(combinations(&ids, 2).len(), 6);
        assert_eq!(combinations(&ids, 4).len(), 1);
        assert!(combinations(&ids, 5).is_empty());
        let many: Vec<AcceleratorId> = (0..16).map(|i| AcceleratorId::from(format!("gpu-{i}"))).collect();
        assert_eq!(combinations(&many, 8).len(), MOST);
    }
}
