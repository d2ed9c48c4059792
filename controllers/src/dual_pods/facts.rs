//! Facts about nodes and their accelerators, and which of them changed.
//!
//! A pool defines which nodes belong to Rouse, what asleep engines may keep of an accelerator, and how much memory
//! there is. The kubelet identifies accelerators by UUID; people and CUDA use their index on the node. The ConfigMap
//! `gpu-map` maps between the two. Without that ConfigMap, UUIDs suffice. With it, an accelerator that it lacks waits
//! until it is listed there.

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
use rouse_config::LORA_AT_LEVEL_2;

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
    crd::fma::LauncherConfig,
    dual_pods::{access::AcceleratorAccess, keys, record::MemoryRequest},
    index::{PoolTerms, Resolved, ResolvedNode},
    platform::launcher::pod::LauncherRevision,
    watch::{Delta, WatchedObject},
};

/// Indices of a node's accelerators, by UUID.
type AcceleratorIndices = BTreeMap<AcceleratorId, u32>;

/// The facts as last observed.
#[derive(Debug, Default)]
pub(super) struct ClusterFacts {
    /// Node objects; `listed` once all of them have been seen.
    nodes: BTreeMap<NodeName, ObservedNode>,
    listed: bool,
    resolved_pools: Arc<Resolved>,
    /// `None` if there is no such ConfigMap.
    gpu_map: Option<BTreeMap<NodeName, AcceleratorIndices>>,
    /// Accelerators that were seen assigned to a Pod on each node.
    assigned_accelerators: BTreeMap<NodeName, BTreeSet<AcceleratorId>>,
    /// Configurations of launchers and their engines, by name.
    pub(super) configs: FmaConfigs,
    /// Accelerators with a fault, according to Prometheus.
    faults: BTreeMap<AcceleratorId, String>,
    /// Template revisions of engines with their own Pods.
    revisions: TemplateRevisions,
    /// Engines of launchers.
    fingerprints: BTreeSet<EngineFingerprint>,
    /// Sources of the launchers that were seen.
    sources: BTreeMap<LauncherBuild, LauncherRevision>,
    launchers: BTreeMap<(NodeName, AcceleratorId), ExistingLauncher>,
    /// Number of engines and launcher sources that the last cleanup kept.
    retained: usize,
    /// Facts last sent to the pairing logic, and whether any changed since.
    last_sent: LastSentFacts,
    changed: bool,
}

/// Why a requester's engine cannot be resolved on its node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SpecResolveError {
    #[error("the node {0} is in no AcceleratorPool: create one whose nodeSelector matches the node")]
    NoPool(NodeName),
    #[error(
        "the memory of the accelerators of node {0} is unknown: label the node with nvidia.com/gpu.memory"
    )]
    NoCapacity(NodeName),
    #[error(
        "the node {node} lacks the taint {key} of its AcceleratorPool, so any Pod may get the accelerators of the \
         sleeping engines there: taint the node, or remove the taint from the pool"
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
            // A node that cannot be parsed still exists.
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

    /// Applies a change of the one ConfigMap of that name.
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

    pub(super) fn set_resolved_pools(&mut self, resolved: Arc<Resolved>) {
        (self.resolved_pools, self.changed) = (resolved, true);
    }

    /// Records the accelerators and launcher engines that an event shows.
    pub(super) fn observe_event(&mut self, event: &PairingEvent) {
        match event {
            PairingEvent::RequesterObserved { node, observed, .. } => {
                self.record_assigned(node, &observed.accelerators)
            }
            PairingEvent::ProviderObserved { node, provider, observed } => {
                self.record_assigned(node, &provider.accelerators);
                let engines = observed.records.iter().map(|record| &record.engine);
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
                let locations = provider.accelerators.iter().map(|a| (node.clone(), a.clone()));
                let removed = locations.filter(|location| self.launchers.remove(location).is_some()).count();
                self.changed |= removed > 0;
            }
            _ => {}
        }
    }

    /// Records which engine the requester's template revision currently requests.
    pub(super) fn observe_requester(&mut self, requester: &RequesterPod, requested: &RequestedEngine) {
        if let Some(revision) = requester.revision.as_ref().filter(|_| requested.mode == ProviderMode::Sleep)
        {
            let namespace = &requester.name.namespace;
            self.changed |=
                self.revisions.observe(namespace, revision, requested.fingerprint, Some(requester.created));
        }
    }

    pub(super) fn observe_provider(&mut self, provider: &ProviderPod, records: &[EngineRecord]) {
        let Some(revision) = &provider.revision else { return };
        for record in records.iter().filter(|record| record.engine.mode == ProviderMode::Sleep) {
            let namespace = &provider.name.namespace;
            self.changed |= self.revisions.observe(namespace, revision, record.engine.fingerprint, None);
        }
    }

    /// Records a launcher and the source that it was made from.
    pub(super) fn observe_launcher(
        &mut self,
        node: &NodeName,
        id: &ProviderId,
        source: &LauncherRevision,
        used: bool,
    ) {
        self.changed |= self.sources.insert(source.build(), source.clone()).is_none();
        for accelerator in id.accelerators.iter() {
            let (location, launcher) =
                ((node.clone(), accelerator.clone()), ExistingLauncher { config: source.config_key(), used });
            self.changed |= self.launchers.insert(location, launcher.clone()) != Some(launcher);
        }
    }

    /// Returns the LauncherConfig of a launcher that a population policy places.
    pub(super) fn populated_config(
        &self,
        node: &NodeName,
        launcher: &ProviderId,
    ) -> Option<&Arc<LauncherConfig>> {
        let location = (node.clone(), launcher.accelerators.first()?.clone());
        self.configs.launcher_config(self.last_sent.launcher_configs.get(&location)?)
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

    /// Returns the accelerators' indices on the node, if known; `None` if UUIDs must do.
    pub(super) fn numbers(&self, node: &NodeName, accelerators: &[AcceleratorId]) -> Option<Vec<u32>> {
        let map = self.gpu_map.as_ref()?.get(node)?;
        accelerators.iter().map(|a| map.get(a).copied()).collect()
    }

    /// Whether all nodes were listed. Deciding earlier would take unseen nodes for gone.
    pub(super) const fn are_complete(&self) -> bool {
        self.listed
    }

    pub(super) fn has_node(&self, node: &NodeName) -> bool {
        self.nodes.contains_key(node)
    }

    /// Completes the requested sizes with defaults from the node's accelerators.
    ///
    /// `kv_cache`: the part of each accelerator's memory that holds no weights, if known. `resources`: the requested
    /// amounts of extended resources, which include the number of accelerators.
    pub(super) fn sizes(
        &self,
        node: &NodeName,
        request: &MemoryRequest,
        kv_cache: Option<Bytes>,
        resources: &BTreeMap<String, u32>,
    ) -> Result<MemorySizes, SpecResolveError> {
        let (resolved_node, terms) =
            self.node_pool(node).ok_or_else(|| SpecResolveError::NoPool(node.clone()))?;
        if let Some(key) = self.missing_taint(node, terms) {
            return Err(SpecResolveError::Untainted { node: node.clone(), key: key.clone() });
        }
        let least = resolved_node.capacities.by_uuid.values().copied().filter(|c| *c > Bytes::ZERO).min();
        let capacity = least
            .or(resolved_node.capacities.unlisted_each)
            .ok_or_else(|| SpecResolveError::NoCapacity(node.clone()))?;
        let kept = terms.sleeping_memory.unwrap_or_default();
        let awake = request.awake.unwrap_or_else(|| capacity.saturating_sub(kept));
        let count = resources.get(&terms.resource).copied().unwrap_or(1).max(1);
        // Host RAM is reserved before the sleep, so an undeclared size must be an upper bound.
        let weights = awake.saturating_sub(kv_cache.unwrap_or_default()).0.saturating_mul(u64::from(count));
        let host = request.host.unwrap_or(Bytes(weights));
        Ok(MemorySizes { awake, asleep: request.asleep.min(awake), host })
    }

    /// Returns the key of the pool's taint if the node has no taint with that key.
    fn missing_taint<'a>(&self, node: &NodeName, terms: &'a PoolTerms) -> Option<&'a String> {
        let has =
            |key: &String| self.nodes.get(node).is_some_and(|node_facts| node_facts.taints.contains(key));
        terms.taint.as_ref().filter(|key| !has(key))
    }

    /// Returns how a Pod gets access to accelerators on that node.
    pub(super) fn access(&self, node: &NodeName) -> Option<AcceleratorAccess> {
        self.node_pool(node).map(|(_, terms)| AcceleratorAccess::of(terms))
    }

    fn node_pool(&self, node: &NodeName) -> Option<(&ResolvedNode, &PoolTerms)> {
        let resolved_node = self.resolved_pools.nodes.get(node.as_str())?;
        let terms = self.resolved_pools.pools.get(resolved_node.pool.as_ref()?)?.terms.as_deref()?;
        Some((resolved_node, terms))
    }
}

#[cfg(test)]
mod tests;
