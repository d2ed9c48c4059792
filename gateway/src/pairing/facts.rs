//! What is known of nodes and their accelerators, and what of it is news.
//!
//! A pool says which nodes are Rouse's, what of an accelerator sleepers may keep, and how much memory there is. The kubelet knows
//! accelerators by their UUIDs, people and CUDA by their numbers on the node: a ConfigMap `gpu-map` says which is which. Where there
//! is none, UUIDs do as well; where there is one, an accelerator that is not in it waits for it.

mod last_sent;
mod meter_samples;
mod observed_node;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::api::core::v1::{ConfigMap, Node};
use rouse::{
    model::AcceleratorId,
    pairing::{
        event::{CommandReply, EngineRecord, MemorySizes, PairingEvent, RequestedEngine},
        ids::{EngineFingerprint, LauncherBuild, NodeName, ProviderId, ProviderMode},
    },
    units::Bytes,
};

pub use self::observed_node::NODE_READY_CONDITION;
use self::{
    last_sent::LastSentFacts,
    observed_node::{ObservedNode, parse_gpu_map},
};
use super::{
    fma_configs::{self, FmaConfigs},
    index::{ProviderPod, RequesterPod},
    population::ExistingLauncher,
    template_revisions::TemplateRevisions,
};
use crate::{
    config::LORA_AT_LEVEL_2,
    controllers::{
        crd::fma::LauncherConfig,
        dual_pods::{access::AcceleratorAccess, keys, record::MemoryRequest},
        index::{PoolTerms, Resolved, ResolvedNode},
        watch::{Delta, WatchedObject},
    },
    platform::kubernetes::launcher::pod::LauncherRevision,
};

/// By UUID, the accelerators of a node.
type AcceleratorIndices = BTreeMap<AcceleratorId, u32>;

/// As they were seen last.
#[derive(Debug, Default)]
pub(super) struct ClusterFacts {
    /// Node objects. `listed`: all of them have been seen.
    nodes: BTreeMap<NodeName, ObservedNode>,
    listed: bool,
    resolved_pools: Arc<Resolved>,
    /// `None`: there is no such ConfigMap.
    gpu_map: Option<BTreeMap<NodeName, AcceleratorIndices>>,
    /// Accelerators that somebody on the node was given.
    assigned_accelerators: BTreeMap<NodeName, BTreeSet<AcceleratorId>>,
    /// What is known of launchers' engines by name.
    pub(super) configs: FmaConfigs,
    /// Those that Prometheus has a fault of.
    faults: BTreeMap<AcceleratorId, String>,
    /// Of engines with Pods of their own.
    revisions: TemplateRevisions,
    /// Of launchers' engines.
    fingerprints: BTreeSet<EngineFingerprint>,
    /// What launchers were made from that were seen.
    sources: BTreeMap<LauncherBuild, LauncherRevision>,
    launchers: BTreeMap<(NodeName, AcceleratorId), ExistingLauncher>,
    /// How many engines and launchers' sources were known when those that are no more were forgotten last.
    retained: usize,
    /// What was told of them, and whether something has come since.
    last_sent: LastSentFacts,
    changed: bool,
}

/// Why nothing can be decided about who is on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SpecResolveError {
    #[error("its node {0} is in no AcceleratorPool: make one whose nodeSelector it has")]
    NoPool(NodeName),
    #[error(
        "nothing says how much memory the accelerators of its node {0} have: label it nvidia.com/gpu.memory"
    )]
    NoCapacity(NodeName),
    #[error(
        "its node {node} lacks the taint {key} of its AcceleratorPool: anybody's Pods may be given the accelerators of its sleepers there. Taint \
         the node, or take the taint out of the pool"
    )]
    Untainted { node: NodeName, key: String },
    #[error("the annotation {} is '2': {LORA_AT_LEVEL_2}", keys::SLEEP_LEVEL)]
    LoraAdapters,
    #[error("{0}")]
    Config(#[from] fma_configs::Error),
}

impl ClusterFacts {
    pub(super) fn new(configs: FmaConfigs) -> Self {
        Self { configs, ..Self::default() }
    }

    pub(super) fn apply_nodes(&mut self, change: Delta<Node>) {
        self.changed = true;
        let saw = |nodes: &mut BTreeMap<NodeName, ObservedNode>, found: WatchedObject<Node>| {
            // A node that cannot be read is there all the same.
            let name = NodeName::from(found.name().name);
            nodes.insert(name, found.readable().as_ref().map(ObservedNode::of).unwrap_or_default());
        };
        match change {
            Delta::All { objects, .. } => {
                self.nodes.clear();
                self.listed = true;
                objects.into_iter().for_each(|found| saw(&mut self.nodes, found));
            }
            Delta::Applied(found) => saw(&mut self.nodes, *found),
            Delta::Deleted(name) => {
                self.nodes.remove(&NodeName::from(name.name));
            }
        }
    }

    /// Of the one ConfigMap of the name.
    pub(super) fn apply_gpu_map(&mut self, change: Delta<ConfigMap>) {
        self.changed = true;
        self.gpu_map = match change {
            Delta::All { objects, .. } => {
                objects.into_iter().find_map(WatchedObject::readable).map(|map| parse_gpu_map(&map))
            }
            Delta::Applied(found) => found.readable().map(|map| parse_gpu_map(&map)),
            Delta::Deleted(_) => None,
        };
    }

    pub(super) fn set_resolved_pools(&mut self, settled: Arc<Resolved>) {
        (self.resolved_pools, self.changed) = (settled, true);
    }

    /// Somebody on a node has accelerators.
    pub(super) fn observe_event(&mut self, event: &PairingEvent) {
        match event {
            PairingEvent::RequesterObserved { node, observed: seen, .. } => {
                self.record_assigned(node, &seen.accelerators)
            }
            PairingEvent::ProviderObserved { node, provider, observed: seen } => {
                self.record_assigned(node, &provider.accelerators);
                let engines = seen.records.iter().map(|record| &record.engine);
                let inside = engines.filter(|engine| engine.mode == ProviderMode::Launcher);
                for fingerprint in inside.map(|engine| engine.fingerprint) {
                    self.changed |= self.fingerprints.insert(fingerprint);
                }
            }
            PairingEvent::Outcome { node, result: Ok(CommandReply::Accelerators(found)), .. } => {
                self.record_assigned(node, found)
            }
            PairingEvent::ProviderGone { node, provider, .. }
            | PairingEvent::ProviderVanished { node, provider, .. }
                if provider.is_launcher() =>
            {
                let places = provider.accelerators.iter().map(|a| (node.clone(), a.clone()));
                let gone = places.filter(|place| self.launchers.remove(place).is_some()).count();
                self.changed |= gone > 0;
            }
            _ => {}
        }
    }

    /// What it asks for is what its template asks for by now.
    pub(super) fn observe_requester(&mut self, own: &RequesterPod, ask: &RequestedEngine) {
        if let Some(edition) = own.revision.as_ref().filter(|_| ask.mode == ProviderMode::Sleep) {
            let namespace = &own.name.namespace;
            self.changed |= self.revisions.observe(namespace, edition, ask.fingerprint, Some(own.created));
        }
    }

    pub(super) fn observe_provider(&mut self, own: &ProviderPod, records: &[EngineRecord]) {
        let Some(edition) = &own.revision else { return };
        for record in records.iter().filter(|record| record.engine.mode == ProviderMode::Sleep) {
            let namespace = &own.name.namespace;
            self.changed |= self.revisions.observe(namespace, edition, record.engine.fingerprint, None);
        }
    }

    /// There is a launcher that was made from this.
    pub(super) fn observe_launcher(
        &mut self,
        node: &NodeName,
        id: &ProviderId,
        source: &LauncherRevision,
        used: bool,
    ) {
        self.changed |= self.sources.insert(source.build(), source.clone()).is_none();
        for accelerator in id.accelerators.iter() {
            let (place, launcher) =
                ((node.clone(), accelerator.clone()), ExistingLauncher { config: source.config_key(), used });
            self.changed |= self.launchers.insert(place, launcher.clone()) != Some(launcher);
        }
    }

    /// What a launcher that is to be there whether somebody asks or not is made from.
    pub(super) fn populated_config(
        &self,
        node: &NodeName,
        launcher: &ProviderId,
    ) -> Option<&Arc<LauncherConfig>> {
        let place = (node.clone(), launcher.accelerators.first()?.clone());
        self.configs.launcher_config(self.last_sent.launcher_configs.get(&place)?)
    }

    fn record_assigned(&mut self, node: &NodeName, accelerators: &[AcceleratorId]) {
        let unknown =
            |a: &&AcceleratorId| self.assigned_accelerators.get(node).is_none_or(|known| !known.contains(*a));
        let new: Vec<_> = accelerators.iter().filter(unknown).cloned().collect();
        if !new.is_empty() {
            self.changed = true;
            self.assigned_accelerators.entry(node.clone()).or_default().extend(new);
        }
    }

    /// The accelerators' numbers on the node, where they are known; `None` where UUIDs must do.
    pub(super) fn numbers(&self, node: &NodeName, accelerators: &[AcceleratorId]) -> Option<Vec<u32>> {
        let map = self.gpu_map.as_ref()?.get(node)?;
        accelerators.iter().map(|a| map.get(a).copied()).collect()
    }

    /// Nothing is decided before: a node that was not seen would be taken for one that is gone.
    pub(super) const fn are_complete(&self) -> bool {
        self.listed
    }

    pub(super) fn has_node(&self, node: &NodeName) -> bool {
        self.nodes.contains_key(node)
    }

    /// What is wanted, in full: what is not said is what the node's accelerators have. `kv_cache`: what of each is no weights, where
    /// that is known. `resources`: how many accelerators are asked for, among other things.
    pub(super) fn sizes(
        &self,
        node: &NodeName,
        wanted: &MemoryRequest,
        kv_cache: Option<Bytes>,
        resources: &BTreeMap<String, u32>,
    ) -> Result<MemorySizes, SpecResolveError> {
        let (place, terms) = self.node_pool(node).ok_or_else(|| SpecResolveError::NoPool(node.clone()))?;
        if let Some(key) = self.missing_taint(node, terms) {
            return Err(SpecResolveError::Untainted { node: node.clone(), key: key.clone() });
        }
        let least = place.capacities.by_uuid.values().copied().filter(|c| *c > Bytes::ZERO).min();
        let capacity = least
            .or(place.capacities.unlisted_each)
            .ok_or_else(|| SpecResolveError::NoCapacity(node.clone()))?;
        let kept = terms.sleeping_memory.unwrap_or_default();
        let awake = wanted.awake.unwrap_or_else(|| capacity.saturating_sub(kept));
        let count = resources.get(&terms.resource).copied().unwrap_or(1).max(1);
        let weights = awake.saturating_sub(kv_cache.unwrap_or_default()).0.saturating_mul(u64::from(count));
        let host = wanted.host.unwrap_or(Bytes(weights));
        Ok(MemorySizes { awake, asleep: wanted.asleep.min(awake), host })
    }

    /// The key of its pool's taint, where the node has none of that key.
    fn missing_taint<'a>(&self, node: &NodeName, terms: &'a PoolTerms) -> Option<&'a String> {
        let has = |key: &String| self.nodes.get(node).is_some_and(|seen| seen.taints.contains(key));
        terms.taint.as_ref().filter(|key| !has(key))
    }

    /// How a Pod gets at accelerators there.
    pub(super) fn access(&self, node: &NodeName) -> Option<AcceleratorAccess> {
        self.node_pool(node).map(|(_, terms)| AcceleratorAccess::of(terms))
    }

    fn node_pool(&self, node: &NodeName) -> Option<(&ResolvedNode, &PoolTerms)> {
        let place = self.resolved_pools.nodes.get(node.as_str())?;
        let terms = self.resolved_pools.pools.get(place.pool.as_ref()?)?.terms.as_deref()?;
        Some((place, terms))
    }
}

#[cfg(test)]
mod tests;
