//! Candidate sets of accelerators for an engine, and the order in which they are tried.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    PlacementCandidate,
    accelerator_sets::{self, MAX_CANDIDATES},
    held_or_reserved,
};
use crate::{
    fleet::{
        plan::{PlanBuilder, Planner},
        state::ledger::amount::ResourceAmount,
    },
    model::{AcceleratorId, AcceleratorRequirement, EngineId, ModelSpec},
};

impl Planner {
    /// Returns the sets of accelerators on which an engine with this spec could run.
    ///
    /// `need`: the amount on each of them. `limit`: the most sets of a pool with slots; of others, [`MAX_CANDIDATES`].
    pub(in crate::fleet) fn candidates_for(
        &self,
        spec: &ModelSpec,
        need: ResourceAmount,
        limit: usize,
        usable: impl Fn(&AcceleratorId) -> bool,
    ) -> Vec<PlacementCandidate> {
        let accounts = &self.ledger.accelerators;
        if spec.accelerators.is_none() {
            return vec![PlacementCandidate { accelerators: Vec::new(), need }];
        }
        let sets = match &spec.accelerators {
            AcceleratorRequirement::Ids(ids) => vec![ids.clone()],
            AcceleratorRequirement::InPool { pool, .. } => vec![vec![pool.clone()]],
            AcceleratorRequirement::Slots { pool, count } => {
                self.node_sets(pool, *count as usize, limit, &usable)
            }
            AcceleratorRequirement::Count(n) => {
                // A pool is no accelerator of this machine; only models that name it may use it, or what is in it.
                let single = |a: &&AcceleratorId| accounts.get(a).is_some_and(|a| a.units.is_none());
                // The first combinations never contain more accelerators than this.
                let most = (*n as usize).saturating_add(MAX_CANDIDATES);
                let free = accounts.most_free_first().filter(single);
                let ids: Vec<AcceleratorId> = free.filter(|a| usable(a)).take(most).cloned().collect();
                accelerator_sets::combinations(&ids, *n as usize)
            }
        };
        let fits = |set: &Vec<AcceleratorId>| !set.is_empty() && set.iter().all(&usable);
        sets.into_iter().filter(fits).map(|accelerators| PlacementCandidate { accelerators, need }).collect()
    }

    /// Returns sets of `count` usable accelerators of one node of the pool, at most `limit`.
    pub(super) fn node_sets(
        &self,
        pool: &AcceleratorId,
        count: usize,
        limit: usize,
        usable: impl Fn(&AcceleratorId) -> bool,
    ) -> Vec<Vec<AcceleratorId>> {
        let members = self.ledger.accelerators.in_pool(pool).filter(|(id, _)| usable(id));
        accelerator_sets::sets_of_one_node(
            members.map(|(id, account)| (id, account.node.as_deref())),
            count,
            limit,
        )
    }
}

impl PlanBuilder<'_> {
    /// Returns every candidate, most free memory first. Empty if no eviction could make the engine fit.
    ///
    /// An engine with a process has its own accelerators as the only candidate. `healthy_only` leaves out lost
    /// accelerators.
    pub(in crate::fleet) fn candidates(
        &self,
        id: &EngineId,
        spec: &ModelSpec,
        healthy_only: bool,
    ) -> Vec<PlacementCandidate> {
        let Some(need) = self.needed_amount(id, spec) else {
            return Vec::new();
        };
        let declared =
            ResourceAmount { bytes: spec.accelerators.bytes_per_account(spec.memory.awake), ..need };
        let accounts = &self.planner.ledger.accelerators;
        let usable = |a: &AcceleratorId| {
            accounts.get(a).is_some_and(|account| {
                let could = account.could_hold(need) || account.could_hold(declared);
                could && (account.healthy || !healthy_only)
            })
        };
        if let Some(e) = self.engine(id).filter(|e| e.state.has_process()) {
            let current = e.accelerators.clone();
            let fits = (!current.is_empty() || spec.accelerators.is_none()) && current.iter().all(usable);
            return fits.then_some(PlacementCandidate { accelerators: current, need }).into_iter().collect();
        }
        self.start_candidates(id, spec, need, usable)
    }

    /// Amount that the engine takes on each of its accelerators, or of its pool; `None` if its model is unknown.
    pub(in crate::fleet) fn needed_amount(&self, id: &EngineId, spec: &ModelSpec) -> Option<ResourceAmount> {
        let model = self.planner.models.get(&id.model)?;
        Some(model.needed_amount(&id.variant, spec, self.planner.largest(spec)))
    }

    /// Returns where an asleep engine could run if it were started anew, off its present accelerators.
    pub(in crate::fleet) fn relocation_candidates(
        &self,
        id: &EngineId,
        spec: &ModelSpec,
    ) -> Vec<PlacementCandidate> {
        let Some(need) = self.needed_amount(id, spec) else {
            return Vec::new();
        };
        let accounts = &self.planner.ledger.accelerators;
        let usable = |a: &AcceleratorId| accounts.get(a).is_some_and(|a| a.healthy && a.could_hold(need));
        let current = self.engine(id).map(|e| e.accelerators.clone()).unwrap_or_default();
        let mut candidates = self.start_candidates(id, spec, need, usable);
        candidates.retain(|c| !c.accelerators.iter().any(|a| current.contains(a)));
        candidates
    }

    /// Returns where the engine could start, given which accelerators are usable.
    fn start_candidates(
        &self,
        id: &EngineId,
        spec: &ModelSpec,
        need: ResourceAmount,
        usable: impl Fn(&AcceleratorId) -> bool,
    ) -> Vec<PlacementCandidate> {
        let accounts = &self.planner.ledger.accelerators;
        let (taken, denied) = (self.taken_by_twins(id, spec), self.denied_to(id, spec));
        // So the twins and the refusals, however many there are, leave as many candidates as without them.
        let limit = MAX_CANDIDATES.saturating_add(taken.len()).saturating_add(denied.len());
        let find = |is_wanted: &dyn Fn(&AcceleratorId) -> bool| {
            let is_usable = |a: &AcceleratorId| accounts.is_open(a) && is_wanted(a) && usable(a);
            let mut found = self.planner.candidates_for(spec, need, limit, is_usable);
            if !taken.is_empty() {
                found.retain(|candidate| !taken.contains(&as_set(&candidate.accelerators)));
            }
            found
        };
        let mut candidates = find(&|_: &AcceleratorId| true);
        if !denied.is_empty() {
            let others = find(&|a: &AcceleratorId| !denied.contains_key(a));
            candidates = self.prefer_others(id, &denied, others, candidates);
        }
        candidates.truncate(MAX_CANDIDATES);
        candidates
    }

    /// Returns the accelerators of a pool with slots that the engine asked for, and did not get, in that order.
    fn denied_to(&self, id: &EngineId, spec: &ModelSpec) -> BTreeMap<&AcceleratorId, usize> {
        let is_of_slots = matches!(spec.accelerators, AcceleratorRequirement::Slots { .. });
        let engine = self.engine(id).filter(|_| is_of_slots);
        let denied = engine.into_iter().flat_map(|e| &e.denied_accelerators);
        denied.enumerate().map(|(order, a)| (a, order)).collect()
    }

    /// Puts `others`, which have no accelerator that the engine was denied, before those of `all` that have one.
    ///
    /// If the cluster did not place its Pod there, the same are tried again only where no other may become free, and
    /// those first that were refused longest ago. So the starts go round, and none waits for one full accelerator.
    fn prefer_others(
        &self,
        id: &EngineId,
        denied: &BTreeMap<&AcceleratorId, usize>,
        mut others: Vec<PlacementCandidate>,
        all: Vec<PlacementCandidate>,
    ) -> Vec<PlacementCandidate> {
        let last_denied =
            |c: &PlacementCandidate| c.accelerators.iter().filter_map(|a| denied.get(a)).max().copied();
        let mut refused = all;
        refused.retain(|c| last_denied(c).is_some());
        refused.sort_by_key(last_denied);
        if self.engine(id).is_some_and(|e| e.conflicts > 0) {
            // The ledger refused the memory, which may have another cause (a quota). No engine goes for that.
            others.extend(refused);
            others
        } else if others.iter().any(|c| self.is_reachable(id, c)) {
            others
        } else {
            refused.extend(others);
            refused
        }
    }

    /// Returns, in a pool with slots, the accelerators of each other engine of the variant.
    ///
    /// A variant and its accelerators name an engine there. And two would only share the speed of the accelerators.
    fn taken_by_twins(&self, id: &EngineId, spec: &ModelSpec) -> BTreeSet<BTreeSet<AcceleratorId>> {
        let engines = &self.planner.engines;
        if !matches!(spec.accelerators, AcceleratorRequirement::Slots { .. })
            || !engines.has_several_engines(&id.model)
        {
            return BTreeSet::new();
        }
        let twins = engines.of_model(&id.model).filter(|e| e.id != *id && e.id.variant == id.variant);
        twins.map(|e| as_set(held_or_reserved(e))).filter(|accelerators| !accelerators.is_empty()).collect()
    }
}

fn as_set(accelerators: &[AcceleratorId]) -> BTreeSet<AcceleratorId> {
    accelerators.iter().cloned().collect()
}
