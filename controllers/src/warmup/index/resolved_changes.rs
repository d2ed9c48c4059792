//! What of the resolved objects has changed, as far as the targets of models follow from it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    crd::ledger::ObjectName,
    index::{Resolved, ResolvedPool},
};

/// The differences between two states of the resolved objects.
#[derive(Debug)]
pub(super) struct ResolvedChanges<'a> {
    before: &'a Resolved,
    after: &'a Resolved,
    /// Pools with other terms or other nodes.
    pools: BTreeSet<&'a str>,
}

impl<'a> ResolvedChanges<'a> {
    pub(super) fn between(before: &'a Resolved, after: &'a Resolved) -> Self {
        let mut pools = BTreeSet::new();
        if !Arc::ptr_eq(&before.pools, &after.pools) {
            add_pools(&mut pools, &before.pools, &after.pools);
            add_pools(&mut pools, &after.pools, &before.pools);
        }
        if !Arc::ptr_eq(&before.nodes, &after.nodes) {
            for (one, other) in [(&before.nodes, &after.nodes), (&after.nodes, &before.nodes)] {
                let changed = one.iter().filter(|(name, node)| other.get(*name) != Some(*node));
                pools.extend(changed.filter_map(|(_, node)| node.pool.as_deref()));
            }
        }
        Self { before, after, pools }
    }

    /// Whether the targets of this model may have changed.
    pub(super) fn concern(&self, model: &ObjectName) -> bool {
        let (before, after) = (self.before.served.get(model), self.after.served.get(model));
        before != after
            || self.before.rejected.get(model) != self.after.rejected.get(model)
            || after.is_some_and(|served| served.pools().any(|pool| self.pools.contains(pool.as_str())))
    }
}

/// Adds the pools of the first map whose terms differ in the other one.
fn add_pools<'a>(
    changed: &mut BTreeSet<&'a str>,
    one: &'a BTreeMap<String, ResolvedPool>,
    other: &BTreeMap<String, ResolvedPool>,
) {
    let differs = |(name, pool): &(&String, &ResolvedPool)| {
        other.get(*name).is_none_or(|other| other.terms != pool.terms)
    };
    changed.extend(one.iter().filter(differs).map(|(name, _)| name.as_str()));
}
