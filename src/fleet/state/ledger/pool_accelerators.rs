//! The accelerators of one pool that have accounts of their own, in the order of their free memory, with sums over them.
//!
//! A pool may have thousands, and a plan asks for the few with the most room for each model that it places.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use crate::{
    fleet::state::ledger::AcceleratorAccount, model::AcceleratorId, shared_map::SharedSet, units::Bytes,
};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::fleet) struct PoolAccelerators {
    /// The most free first, then by name.
    by_free: SharedSet<(Reverse<Bytes>, AcceleratorId)>,
    /// Wider than [`Bytes`], so that the sum of what was added and subtracted stays exact.
    free: u128,
    capacity: Bytes,
    largest: Bytes,
    units: u32,
    by_node: Arc<BTreeMap<String, Vec<AcceleratorId>>>,
}

impl PoolAccelerators {
    pub(in crate::fleet) fn add(&mut self, id: &AcceleratorId, account: &AcceleratorAccount) {
        self.by_free.insert((Reverse(account.free()), id.clone()));
        self.free += u128::from(account.free().0);
        self.capacity += account.capacity;
        self.largest = self.largest.max(account.capacity);
        self.units = self.units.saturating_add(account.units.unwrap_or_default());
        if let Some(node) = &account.node {
            Arc::make_mut(&mut self.by_node).entry(node.clone()).or_default().push(id.clone());
        }
    }

    /// Records that an accelerator's free memory changed.
    pub(in crate::fleet) fn change_free(&mut self, id: &AcceleratorId, before: Bytes, now: Bytes) {
        self.by_free.remove(&(Reverse(before), id.clone()));
        self.by_free.insert((Reverse(now), id.clone()));
        self.free += u128::from(now.0);
        self.free -= u128::from(before.0);
    }

    pub(in crate::fleet) fn most_free_first(&self) -> impl Iterator<Item = &AcceleratorId> {
        self.by_free.iter().map(|(_, id)| id)
    }

    /// Those of one node.
    pub(in crate::fleet) fn of_node(&self, node: &str) -> &[AcceleratorId] {
        self.by_node.get(node).map(Vec::as_slice).unwrap_or_default()
    }

    /// Memory that may still be reserved, over all of them.
    pub(in crate::fleet) fn free(&self) -> Bytes {
        Bytes(u64::try_from(self.free).unwrap_or(u64::MAX))
    }

    /// Capacity of all of them together.
    pub(in crate::fleet) const fn capacity(&self) -> Bytes {
        self.capacity
    }

    /// Capacity of the largest.
    pub(in crate::fleet) const fn largest(&self) -> Bytes {
        self.largest
    }

    /// Slots of all of them together.
    pub(in crate::fleet) const fn units(&self) -> u32 {
        self.units
    }
}
