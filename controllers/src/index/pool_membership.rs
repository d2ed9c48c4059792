//! Assigns nodes to pools and sums the pools' capacities.
//!
//! A node in two pools counts for neither, since its memory would be granted twice. Two pools also conflict without
//! such a node if one selector contains the other: any node of the narrower pool would be in both.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::Arc,
};

use rouse::{model::AcceleratorId, units::Bytes};

use super::{
    node::{IndexedNode, ListedAccelerators, NodeCapacity, node_capacity, slot_capacity},
    pool::{PoolEntry, PoolTerms},
    resolved::{PoolProblem, ResolvedNode, ResolvedPool, SlotAccelerator, list},
    selectors::Selectors,
};

#[derive(Debug)]
pub(super) struct PoolMembership {
    pub(super) pools: Arc<BTreeMap<String, ResolvedPool>>,
    pub(super) nodes: Arc<BTreeMap<String, ResolvedNode>>,
}

type NodeFactsByName = BTreeMap<String, Result<IndexedNode, String>>;
type AcceleratorsByNode = BTreeMap<String, Result<ListedAccelerators, String>>;

impl PoolMembership {
    /// Computes the membership. `nodes` is `None` if Nodes cannot be read.
    pub(super) fn compute(
        pools: &BTreeMap<String, PoolEntry>,
        nodes: Option<&NodeFactsByName>,
        stubs: &AcceleratorsByNode,
    ) -> Self {
        let selectors = Selectors::new(pools.iter().map(|(name, entry)| (name.as_str(), &entry.selector)));
        let mut overlaps = PoolOverlaps::default();
        for entry in pools.values() {
            overlaps.note(&selectors.matching_pools(&entry.selector), None);
        }
        let mut resolved_nodes = BTreeMap::new();
        let mut members: BTreeMap<&str, Vec<(&String, &IndexedNode)>> = BTreeMap::new();
        for (node, facts) in nodes.into_iter().flatten() {
            let facts = match facts {
                Ok(facts) => facts,
                Err(why) => {
                    resolved_nodes.insert(
                        node.clone(),
                        ResolvedNode { warning: Some(why.clone()), ..ResolvedNode::default() },
                    );
                    continue;
                }
            };
            match selectors.matching_pools(&facts.labels).as_slice() {
                [] => {}
                [pool] => {
                    members.entry(pool).or_default().push((node, facts));
                    let (uid, pool) = (facts.uid.clone(), Some((*pool).to_owned()));
                    resolved_nodes
                        .insert(node.clone(), ResolvedNode { uid, pool, ..ResolvedNode::default() });
                }
                several => {
                    overlaps.note(several, Some(node));
                    let named = list(several.iter().map(|pool| format!("'{pool}'")));
                    let warning =
                        Some(format!("the node matches the pools {named}, so it belongs to none of them"));
                    let uid = facts.uid.clone();
                    resolved_nodes
                        .insert(node.clone(), ResolvedNode { uid, warning, ..ResolvedNode::default() });
                }
            }
        }
        let survey = |(name, entry): (&String, &PoolEntry)| {
            let members = members.get(name.as_str()).map(Vec::as_slice).unwrap_or_default();
            let overlap = overlaps.by_pool.remove(name.as_str());
            let pool = pool(entry, nodes.is_some().then_some(members), stubs, overlap, &mut resolved_nodes);
            (name.clone(), pool)
        };
        let pools = pools.iter().map(survey).collect();
        Self { pools: Arc::new(pools), nodes: Arc::new(resolved_nodes) }
    }
}

/// Pools that share nodes with other pools.
#[derive(Default)]
struct PoolOverlaps<'a> {
    by_pool: BTreeMap<&'a str, BTreeMap<String, Option<String>>>,
    /// Sets of pools already noted: thousands of nodes in the same pools add nothing.
    seen: BTreeSet<Vec<&'a str>>,
}

impl<'a> PoolOverlaps<'a> {
    fn note(&mut self, pools: &[&'a str], node: Option<&String>) {
        if pools.len() < 2 || !self.seen.insert(pools.to_vec()) {
            return;
        }
        for pool in pools {
            let others = self.by_pool.entry(pool).or_default();
            for other in pools.iter().filter(|other| *other != pool) {
                let known = others.entry((*other).to_owned()).or_default();
                if known.is_none() {
                    *known = node.cloned();
                }
            }
        }
    }
}

/// Resolves one pool. `members` is `None` if Nodes cannot be read.
fn pool(
    entry: &PoolEntry,
    members: Option<&[(&String, &IndexedNode)]>,
    stubs: &AcceleratorsByNode,
    overlap: Option<BTreeMap<String, Option<String>>>,
    resolved_nodes: &mut BTreeMap<String, ResolvedNode>,
) -> ResolvedPool {
    let mut pool = ResolvedPool {
        uid: entry.version.uid.clone(),
        generation: entry.version.generation,
        terms: entry.terms.as_ref().ok().cloned(),
        nodes: members.map_or(0, |members| u32::try_from(members.len()).unwrap_or(u32::MAX)),
        accelerators: 0,
        total: None,
        units: None,
        slots: entry.slots.clone(),
        slot_accelerators: BTreeMap::new(),
        problem: None,
        warnings: Vec::new(),
    };
    let terms = match &entry.terms {
        Ok(terms) => terms,
        Err(problem) => return ResolvedPool { problem: Some(problem.clone()), ..pool },
    };
    let mut known: Option<Bytes> = None;
    for (name, facts) in members.into_iter().flatten() {
        let listed = stubs.get(*name);
        let capacity = match &entry.slots {
            Some(slots) => slot_capacity(listed, slots),
            None => node_capacity(facts, listed, &terms.resource),
        };
        let NodeCapacity { bytes, accelerators, capacities, indices, units, slots, warning } = capacity;
        known = plus(known, bytes, |known, more| known + more);
        pool.units = plus(pool.units, units, u32::saturating_add);
        pool.accelerators = pool.accelerators.saturating_add(accelerators);
        if let Some(warning) = &warning {
            pool.warnings.push(format!("node {name}: {warning}"));
        }
        if entry.slots.is_some() {
            add_slot_accelerators(&mut pool, name, facts.takes_pods, &capacities.by_uuid, &slots);
        }
        if let Some(resolved_node) = resolved_nodes.get_mut(*name) {
            *resolved_node = ResolvedNode {
                accelerators,
                kind: facts.labels.get(&terms.accelerator_type_label).cloned(),
                total: bytes,
                capacities,
                indices,
                slots: entry.slots.as_ref().map(|slots| slots.each),
                warning,
                uid: resolved_node.uid.take(),
                pool: resolved_node.pool.take(),
            };
        }
    }
    let total = match overlap {
        Some(overlap) => Err(PoolProblem::Overlap(overlap)),
        None if entry.slots.is_some() && known.is_none() && members.is_none_or(|nodes| !nodes.is_empty()) => {
            Err(PoolProblem::NotListed)
        }
        None => total(terms, members.map(<[_]>::len), known),
    };
    match total {
        Ok(total) => {
            divide(total, known, &mut pool.slot_accelerators);
            pool.total = Some(total);
        }
        Err(problem) => pool.problem = Some(problem),
    }
    pool
}

/// Adds the accelerators of a node to a pool with slots. Of two with one UUID, which are indistinguishable, one counts.
fn add_slot_accelerators(
    pool: &mut ResolvedPool,
    node: &str,
    takes_pods: bool,
    capacities: &BTreeMap<AcceleratorId, Bytes>,
    slots: &BTreeMap<AcceleratorId, u32>,
) {
    for (id, capacity) in capacities {
        let slots = slots.get(id).copied().unwrap_or_default();
        match pool.slot_accelerators.entry(id.clone()) {
            Entry::Vacant(entry) => {
                let node = node.to_owned();
                entry.insert(SlotAccelerator { node, takes_pods, capacity: *capacity, slots });
            }
            Entry::Occupied(known) => {
                let other = &known.get().node;
                pool.warnings.push(format!("node {node}: {id}, which node {other} lists, too"));
            }
        }
    }
}

/// Divides a pool's memory among its accelerators in proportion to their own, if it is less than theirs.
///
/// The decisions grant the memory of each accelerator, and know no limit for all together.
fn divide(total: Bytes, known: Option<Bytes>, accelerators: &mut BTreeMap<AcceleratorId, SlotAccelerator>) {
    let Some(known) = known.filter(|known| *known > total) else { return };
    for accelerator in accelerators.values_mut() {
        let part = u128::from(accelerator.capacity.0) * u128::from(total.0) / u128::from(known.0);
        accelerator.capacity = Bytes(u64::try_from(part).unwrap_or(u64::MAX));
    }
}

/// Returns the memory that may be granted, given the number of nodes and their known memory.
fn total(terms: &PoolTerms, nodes: Option<usize>, known: Option<Bytes>) -> Result<Bytes, PoolProblem> {
    if nodes == Some(0) {
        return Err(PoolProblem::NoNodes);
    }
    let total = match (known, terms.memory) {
        (Some(known), Some(cap)) => known.min(cap),
        (Some(all), None) | (None, Some(all)) => all,
        (None, None) => return Err(PoolProblem::NoCapacity),
    };
    if total == Bytes::ZERO { Err(PoolProblem::NoAccelerators) } else { Ok(total) }
}

fn plus<T>(sum: Option<T>, more: Option<T>, add: impl Fn(T, T) -> T) -> Option<T> {
    match (sum, more) {
        (Some(sum), Some(more)) => Some(add(sum, more)),
        (sum, more) => sum.or(more),
    }
}
