//! The facts of one node: what the pairing logic knows of it, and what the sizes of its requesters depend on.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    model::AcceleratorId,
    pairing::{
        event::{AcceleratorFacts, MemorySizes, PairingEvent, PairingNodeFacts},
        ids::NodeName,
    },
    units::Bytes,
};

use super::{ClusterFacts, ObservedNode, SpecResolveError};
use crate::{
    crd::ledger::ObjectName,
    dual_pods::{
        population::{self, NodeTraits},
        record::MemoryRequest,
    },
    index::{PoolTerms, ResolvedNode},
    workload::is_slot_resource,
};

/// What was sent of a node, or is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeFacts {
    facts: PairingNodeFacts,
    /// The node's kubelet has stopped reporting.
    silent: bool,
    pub(super) accelerators: BTreeMap<AcceleratorId, AcceleratorFacts>,
    /// LauncherConfigs of the launchers that population policies place.
    pub(super) launcher_configs: BTreeMap<AcceleratorId, ObjectName>,
    /// The pairing logic receives these as part of each requester.
    size_defaults: Result<SizeDefaults, SpecResolveError>,
}

/// What the sizes of a node's requesters depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SizeDefaults {
    /// Memory of each accelerator; of the smallest one, if they differ.
    capacity: Bytes,
    /// Memory that asleep engines may keep on each accelerator.
    sleeping_memory: Bytes,
    /// Extended resource that Pods request.
    resource: String,
}

impl NodeFacts {
    /// Sends what differs between two states of a node. `None`: there is no such node.
    pub(super) fn send(
        node: &NodeName,
        before: Option<&Self>,
        now: Option<&Self>,
        tell: &mut impl FnMut(PairingEvent),
    ) {
        match now {
            Some(now) if before.is_none_or(|before| before.facts != now.facts) => {
                tell(PairingEvent::Node { node: node.clone(), facts: now.facts.clone() });
            }
            Some(_) => {}
            None => tell(PairingEvent::NodeGone { node: node.clone() }),
        }
        let is_silent = |facts: Option<&Self>| facts.is_some_and(|facts| facts.silent);
        if is_silent(before) != is_silent(now) {
            tell(PairingEvent::KubeletReporting { node: node.clone(), reports: !is_silent(now) });
        }
        for (accelerator, facts) in now.into_iter().flat_map(|now| &now.accelerators) {
            if before.and_then(|before| before.accelerators.get(accelerator)) != Some(facts) {
                let (node, accelerator, facts) = (node.clone(), accelerator.clone(), facts.clone());
                tell(PairingEvent::Accelerator { node, accelerator, facts });
            }
        }
    }
}

impl ClusterFacts {
    /// Computes a node's facts; `None` if there is no such node.
    pub(super) fn node_facts(&self, node: &NodeName) -> Option<NodeFacts> {
        let ObservedNode { traits, cordoned, silent, .. } = self.nodes.get(node)?;
        let node_pool = self.node_pool(node);
        let host_sleep_memory = node_pool.map(|(_, terms)| terms.host_sleep_memory).unwrap_or_default();
        let mut facts = NodeFacts {
            facts: PairingNodeFacts { cordoned: *cordoned, host_sleep_memory },
            silent: *silent,
            accelerators: BTreeMap::new(),
            launcher_configs: BTreeMap::new(),
            size_defaults: self.size_defaults(node),
        };
        let Some((resolved_node, terms)) = node_pool else { return Some(facts) };
        let assigned = self.assigned_accelerators.get(node).into_iter().flatten();
        let numbered = self.gpu_map.iter().filter_map(|map| map.get(node)).flat_map(BTreeMap::keys);
        let all: BTreeSet<&AcceleratorId> = resolved_node
            .capacities
            .by_uuid
            .keys()
            .chain(assigned)
            .chain(numbered)
            .chain(self.sent_accelerators(node))
            .collect();
        facts.accelerators = all
            .into_iter()
            .enumerate()
            .filter_map(|(position, accelerator)| {
                let facts = self.accelerator(node, accelerator, position, resolved_node, terms)?;
                Some((accelerator.clone(), facts))
            })
            .collect();
        facts.launcher_configs = self.launcher_placement(node, traits, &facts.accelerators);
        for accelerator in facts.launcher_configs.keys() {
            if let Some(facts) = facts.accelerators.get_mut(accelerator) {
                facts.wants_launcher = true;
            }
        }
        Some(facts)
    }

    /// Returns which of these accelerators get a launcher by policy, and of which LauncherConfig.
    fn launcher_placement(
        &self,
        node: &NodeName,
        traits: &NodeTraits,
        accelerators: &BTreeMap<AcceleratorId, AcceleratorFacts>,
    ) -> BTreeMap<AcceleratorId, ObjectName> {
        let counts = self.configs.counts(traits);
        let mut healthy: Vec<_> = accelerators.iter().filter(|(_, facts)| facts.healthy).collect();
        healthy.sort_by_key(|(_, facts)| facts.index);
        let healthy: Vec<&AcceleratorId> = healthy.into_iter().map(|(accelerator, _)| accelerator).collect();
        let launchers = self.launchers.get(node).into_iter().flatten();
        let existing = launchers.filter(|(accelerator, _)| accelerators.contains_key(*accelerator)).collect();
        population::place_launchers(&counts, &healthy, &existing)
    }

    fn accelerator(
        &self,
        node: &NodeName,
        accelerator: &AcceleratorId,
        position: usize,
        resolved_node: &ResolvedNode,
        terms: &PoolTerms,
    ) -> Option<AcceleratorFacts> {
        let index = match &self.gpu_map {
            Some(map) => *map.get(node)?.get(accelerator)?,
            None => match resolved_node.indices.get(accelerator) {
                Some(index) => *index,
                None => u32::try_from(position).ok()?,
            },
        };
        let capacity = resolved_node
            .capacities
            .by_uuid
            .get(accelerator)
            .copied()
            .or(resolved_node.capacities.unlisted_each);
        // A known accelerator that is missing from the node's list is gone.
        let is_gone = || {
            let sent = self.last_sent.nodes.get(node);
            !resolved_node.capacities.by_uuid.is_empty()
                && sent.is_some_and(|sent| sent.accelerators.contains_key(accelerator))
        };
        let capacity = capacity.or_else(|| is_gone().then_some(Bytes::ZERO))?;
        Some(AcceleratorFacts {
            index,
            capacity,
            healthy: capacity > Bytes::ZERO && !self.faults.contains_key(accelerator),
            sleeping_memory: terms.sleeping_memory,
            wants_launcher: false,
        })
    }

    /// Completes the requested sizes with defaults from the node's accelerators.
    ///
    /// `kv_cache`: the part of each accelerator's memory that holds no weights, if known. `resources`: the requested
    /// amounts of extended resources, which include the number of accelerators.
    pub(in crate::dual_pods) fn sizes(
        &self,
        node: &NodeName,
        request: &MemoryRequest,
        kv_cache: Option<Bytes>,
        resources: &BTreeMap<String, u32>,
    ) -> Result<MemorySizes, SpecResolveError> {
        let SizeDefaults { capacity, sleeping_memory, resource } = self.size_defaults(node)?;
        let awake = request.awake.unwrap_or_else(|| capacity.saturating_sub(sleeping_memory));
        let count = match resources.get(&resource) {
            Some(count) => *count,
            // A requester of slots may request each accelerator by a resource of its own.
            None => {
                resources.iter().filter(|(name, _)| is_slot_resource(name)).map(|(_, count)| *count).sum()
            }
        };
        let count = count.max(1);
        // Host RAM is reserved before the sleep, so an undeclared size must be an upper bound.
        let weights = awake.saturating_sub(kv_cache.unwrap_or_default()).0.saturating_mul(u64::from(count));
        let host = request.host.unwrap_or(Bytes(weights));
        Ok(MemorySizes { awake, asleep: request.asleep.min(awake), host })
    }

    fn size_defaults(&self, node: &NodeName) -> Result<SizeDefaults, SpecResolveError> {
        let (resolved_node, terms) =
            self.node_pool(node).ok_or_else(|| SpecResolveError::NoPool(node.clone()))?;
        if let Some(key) = self.missing_taint(node, terms) {
            return Err(SpecResolveError::Untainted { node: node.clone(), key: key.clone() });
        }
        let least = resolved_node.capacities.by_uuid.values().copied().filter(|c| *c > Bytes::ZERO).min();
        let capacity = least
            .or(resolved_node.capacities.unlisted_each)
            .ok_or_else(|| SpecResolveError::NoCapacity(node.clone()))?;
        Ok(SizeDefaults {
            capacity,
            sleeping_memory: terms.sleeping_memory.unwrap_or_default(),
            resource: terms.resource.clone(),
        })
    }

    /// Returns the key of the pool's taint if the node has no taint with that key.
    fn missing_taint<'a>(&self, node: &NodeName, terms: &'a PoolTerms) -> Option<&'a String> {
        let has =
            |key: &String| self.nodes.get(node).is_some_and(|node_facts| node_facts.taints.contains(key));
        terms.taint.as_ref().filter(|key| !has(key))
    }
}
