//! The free accelerators that the models of one round of decisions share.
//!
//! A decision knows only its own model. What it takes is gone for the models after it, although no ledger shows it yet.

use std::collections::BTreeMap;

use rouse::{
    model::VariantName,
    saturation::{AcceleratorPool, VariantState},
};

use crate::index::ResolvedPool;

/// Free accelerators by type.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AcceleratorBudget(BTreeMap<String, u32>);

impl AcceleratorBudget {
    /// Adds what is free in one pool. `held`: its accelerators that the ledger has reserved.
    pub(super) fn add_pool(&mut self, kind: &str, pool: &ResolvedPool, held: u32) {
        let free = self.0.entry(kind.to_owned()).or_default();
        *free = free.saturating_add(capacity(pool).saturating_sub(held));
    }

    /// Returns what is left, for the next decision.
    pub(super) fn pool(&self) -> AcceleratorPool {
        self.0.iter().map(|(kind, free)| (kind.clone(), *free)).collect()
    }

    /// Takes the accelerators of the engines that these targets add to what runs.
    pub(super) fn take(&mut self, states: &[VariantState], targets: &BTreeMap<VariantName, u32>) {
        for state in states {
            let target = targets.get(&state.variant);
            let added = target.map_or(0, |target| target.saturating_sub(state.current));
            if let Some(free) = self.0.get_mut(&state.accelerator) {
                *free = free.saturating_sub(added.saturating_mul(state.gpus.max(1)));
            }
        }
    }
}

/// Whether the number of the pool's accelerators is known. If only its memory is, the ledger alone limits its engines.
pub(super) const fn is_counted(pool: &ResolvedPool) -> bool {
    pool.slots.is_some() || pool.accelerators > 0 || pool.total.is_none()
}

/// Returns how many engines of one accelerator the pool can have awake. With slots: the slots of accelerators that may
/// be used.
fn capacity(pool: &ResolvedPool) -> u32 {
    // The ledger grants nothing in such a pool, however many accelerators its nodes report.
    if pool.total.is_none() {
        return 0;
    }
    if pool.slots.is_some() {
        let usable = pool.slot_accelerators.values().filter(|one| one.takes_pods && one.capacity.0 > 0);
        return usable.fold(0, |sum, one| sum.saturating_add(one.slots));
    }
    if is_counted(pool) { pool.accelerators } else { u32::MAX }
}

#[cfg(test)]
mod tests {
    use rouse::units::Bytes;

    use super::*;
    use crate::index::{PoolSlots, SlotAccelerator};

    fn pool(accelerators: u32, total: Option<Bytes>) -> ResolvedPool {
        ResolvedPool {
            uid: None,
            generation: None,
            terms: None,
            nodes: 1,
            accelerators,
            total,
            units: None,
            slots: None,
            slot_accelerators: BTreeMap::new(),
            problem: None,
            warnings: Vec::new(),
        }
    }

    fn free(budget: &AcceleratorBudget) -> Vec<(&str, u32)> {
        budget.0.iter().map(|(kind, free)| (kind.as_str(), *free)).collect()
    }

    #[test]
    fn pools_of_one_type_add_up_and_what_the_ledger_has_reserved_is_not_free() {
        let mut budget = AcceleratorBudget::default();
        budget.add_pool("H100", &pool(8, Some(Bytes::gib(640))), 6);
        budget.add_pool("H100", &pool(4, Some(Bytes::gib(320))), 0);
        budget.add_pool("L4", &pool(2, Some(Bytes::gib(48))), 3);
        assert_eq!(free(&budget), [("H100", 6), ("L4", 0)]);
        assert_eq!(budget.pool().total(), 6);
    }

    #[test]
    fn slots_count_where_a_pool_has_some_and_a_pool_of_unknown_size_does_not_limit() {
        let slot = |takes_pods, gib| SlotAccelerator {
            node: "a".to_owned(),
            takes_pods,
            capacity: Bytes::gib(gib),
            slots: 3,
        };
        let mut shared = pool(3, Some(Bytes::gib(240)));
        shared.slots = Some(PoolSlots { configuration: "gpus".into(), each: 3 });
        shared.slot_accelerators = [("a", slot(true, 80)), ("b", slot(false, 80)), ("c", slot(true, 0))]
            .map(|(id, slot)| (id.into(), slot))
            .into();
        let mut budget = AcceleratorBudget::default();
        budget.add_pool("shared", &shared, 1);
        budget.add_pool("unknown", &pool(0, Some(Bytes::gib(80))), 1);
        budget.add_pool("empty", &pool(0, None), 0);
        assert_eq!(free(&budget), [("empty", 0), ("shared", 2), ("unknown", u32::MAX - 1)]);
    }

    #[test]
    fn a_pool_that_grants_no_memory_has_no_free_accelerators() {
        let mut budget = AcceleratorBudget::default();
        budget.add_pool("no memory known", &pool(8, None), 0);
        let mut overlapping = pool(1, None);
        overlapping.slots = Some(PoolSlots { configuration: "gpus".into(), each: 3 });
        let slot =
            SlotAccelerator { node: "a".to_owned(), takes_pods: true, capacity: Bytes::gib(80), slots: 3 };
        overlapping.slot_accelerators = BTreeMap::from([("a".into(), slot)]);
        budget.add_pool("overlapping", &overlapping, 0);
        assert_eq!(free(&budget), [("no memory known", 0), ("overlapping", 0)]);
    }

    #[test]
    fn what_one_model_takes_is_gone_for_the_next() {
        let mut budget = AcceleratorBudget::default();
        budget.add_pool("H100", &pool(8, Some(Bytes::gib(640))), 0);
        let state = |variant: &str, current, gpus| VariantState {
            variant: variant.into(),
            current,
            gpus,
            accelerator: "H100".to_owned(),
            ..VariantState::default()
        };
        let states = [state("up", 1, 2), state("down", 3, 1), state("other", 0, 1)];
        budget.take(&states, &BTreeMap::from([("up".into(), 3), ("down".into(), 1)]));
        assert_eq!(free(&budget), [("H100", 4)]);
    }
}
