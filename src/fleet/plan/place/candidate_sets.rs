//! Candidates that engines have in common.
//!
//! Most engines without a process could start on the same accelerators. Who looks at many engines makes each list of
//! candidates once.

use std::{
    cell::{OnceCell, RefCell},
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use super::PlacementCandidate;
use crate::{
    fleet::plan::PlanBuilder,
    model::{AcceleratorId, AcceleratorRequirement, EngineId, ModelSpec},
    units::Bytes,
};

/// The accelerators of an engine's candidates, most free memory first.
#[derive(Debug)]
pub(in crate::fleet) struct AcceleratorSets {
    sets: Vec<Vec<AcceleratorId>>,
    /// Every accelerator of the sets. Made when it is first read.
    all: OnceCell<BTreeSet<AcceleratorId>>,
}

/// The lists of candidates that the present draft has, and what they are made from.
#[derive(Debug, Default)]
pub(in crate::fleet) struct CandidateCache {
    /// The capacities of all accelerators.
    capacities: OnceCell<BTreeSet<Bytes>>,
    by_key: RefCell<BTreeMap<CandidateKey, Rc<AcceleratorSets>>>,
}

/// What decides the candidates of an engine, besides the accelerators. Engines with equal keys have the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CandidateKey {
    /// The pool, if its accelerators have slots.
    pool: Option<AcceleratorId>,
    count: u32,
    /// The smallest capacity that suffices; `None`: none does.
    capacity: Option<Bytes>,
}

impl AcceleratorSets {
    fn of(candidates: Vec<PlacementCandidate>) -> Self {
        let sets = candidates.into_iter().map(|candidate| candidate.accelerators).collect();
        Self { sets, all: OnceCell::new() }
    }

    pub(in crate::fleet) const fn len(&self) -> usize {
        self.sets.len()
    }

    pub(in crate::fleet) fn iter(&self) -> impl Iterator<Item = &Vec<AcceleratorId>> {
        self.sets.iter()
    }

    /// Whether one of the sets has this accelerator.
    pub(in crate::fleet) fn has(&self, accelerator: &AcceleratorId) -> bool {
        match self.sets.as_slice() {
            [only] => only.contains(accelerator),
            sets => {
                let all = || sets.iter().flatten().cloned().collect::<BTreeSet<_>>();
                self.all.get_or_init(all).contains(accelerator)
            }
        }
    }

    /// Whether an accelerator is in a set of both.
    pub(in crate::fleet) fn overlaps(&self, other: &Self) -> bool {
        if std::ptr::eq(self, other) {
            return self.sets.iter().any(|set| !set.is_empty());
        }
        let (fewer, more) = if self.len() <= other.len() { (self, other) } else { (other, self) };
        fewer.sets.iter().flatten().any(|accelerator| more.has(accelerator))
    }
}

impl PlanBuilder<'_> {
    /// Returns the accelerators of [`Self::candidates`] without lost ones. Engines that have the same share one list.
    pub(in crate::fleet) fn candidate_sets(&self, id: &EngineId, spec: &ModelSpec) -> Rc<AcceleratorSets> {
        let make = || Rc::new(AcceleratorSets::of(self.candidates(id, spec, true)));
        let Some(key) = self.candidate_key(id, spec) else { return make() };
        let known = self.cache.candidates.by_key.borrow().get(&key).cloned();
        known.unwrap_or_else(|| {
            let sets = make();
            self.cache.candidates.by_key.borrow_mut().insert(key, Rc::clone(&sets));
            sets
        })
    }

    /// Returns `None` for an engine whose candidates are its own, or are found without a search.
    fn candidate_key(&self, id: &EngineId, spec: &ModelSpec) -> Option<CandidateKey> {
        let (pool, count) = match &spec.accelerators {
            AcceleratorRequirement::Count(count) => (None, *count),
            AcceleratorRequirement::Slots { pool, count } => (Some(pool.clone()), *count),
            AcceleratorRequirement::Ids(_) | AcceleratorRequirement::InPool { .. } => return None,
        };
        let e = self.engine(id).filter(|e| !e.state.has_process())?;
        // In a pool with slots, other engines of the model and refusals of the cluster count too.
        let is_special =
            !e.denied_accelerators.is_empty() || self.planner.engines.has_several_engines(&id.model);
        if pool.is_some() && is_special {
            return None;
        }
        let declared = spec.accelerators.bytes_per_account(spec.memory.awake);
        let enough = self.needed_amount(id, spec)?.bytes.min(declared);
        let accounts = &self.planner.ledger.accelerators;
        let capacities = || accounts.iter().map(|(_, account)| account.capacity).collect::<BTreeSet<_>>();
        let capacities = self.cache.candidates.capacities.get_or_init(capacities);
        Some(CandidateKey { pool, count, capacity: capacities.range(enough..).next().copied() })
    }
}
