//! Facts about nodes and their accelerators, and which of them changed.
//!
//! A pool defines which nodes belong to Rouse, what asleep engines may keep of an accelerator, and how much memory
//! there is. The kubelet identifies accelerators by UUID; people and CUDA use their index on the node. The ConfigMap
//! `gpu-map` maps between the two. Without that ConfigMap, the node's AcceleratorNode has the indices that the driver
//! reports, and where it has none, UUIDs suffice. With the ConfigMap, an accelerator that it lacks waits until it is
//! listed there.

mod last_sent;
mod meter_samples;
mod node_facts;
mod observed_node;
mod tracked_set;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::api::core::v1::{ConfigMap, Node};
use rouse::{
    model::AcceleratorId,
    pairing::{
        event::{CommandReply, EngineRecord, PairingEvent, RequestedEngine},
        ids::{EngineFingerprint, LauncherBuild, NodeName, ProviderId, ProviderMode},
    },
};
use rouse_config::LORA_AT_LEVEL_2;

pub(super) use self::last_sent::FactChanges;
pub use self::observed_node::{NODE_READY_CONDITION, takes_pods};
use self::{
    last_sent::{DirtyFacts, LastSentFacts},
    observed_node::{ObservedNode, parse_gpu_map},
    tracked_set::TrackedSet,
};
use super::{
    fma_configs::{self, FmaConfigs},
    index::{ProviderPod, RequesterPod},
    population::ExistingLauncher,
    template_revisions::TemplateRevisions,
};
use crate::{
    crd::fma::LauncherConfig,
    dual_pods::{access::AcceleratorAccess, keys},
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
    /// Accelerators that were seen assigned to a Pod on each node, while the node exists.
    assigned_accelerators: BTreeMap<NodeName, BTreeSet<AcceleratorId>>,
    /// Configurations of launchers and their engines, by name.
    pub(super) configs: FmaConfigs,
    /// Accelerators with a fault, according to Prometheus.
    faults: BTreeMap<AcceleratorId, String>,
    /// Template revisions of engines with their own Pods.
    revisions: TemplateRevisions,
    /// Engines of InferenceServerConfigs in launchers.
    fingerprints: TrackedSet<EngineFingerprint>,
    /// Sources of the launchers that were seen.
    sources: BTreeMap<LauncherBuild, LauncherRevision>,
    /// The launchers on each node.
    launchers: BTreeMap<NodeName, BTreeMap<AcceleratorId, ExistingLauncher>>,
    /// Number of engines and launcher sources that the last cleanup kept.
    retained: usize,
    /// Facts last sent to the pairing logic, and which may differ now; `changed` if there are any.
    last_sent: LastSentFacts,
    dirty: DirtyFacts,
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
        // A node that cannot be parsed still exists.
        let observe = |found: WatchedObject<Node>| {
            let name = NodeName::from(found.name().name);
            (name, found.readable().as_deref().map(ObservedNode::of).unwrap_or_default())
        };
        match change {
            Delta::All { objects, .. } => {
                self.listed = true;
                let listed: BTreeMap<_, _> = objects.into_iter().map(observe).collect();
                let missing = self.nodes.keys().filter(|name| !listed.contains_key(*name));
                let missing: Vec<NodeName> = missing.cloned().collect();
                missing.iter().for_each(|name| self.set_node(name, None));
                listed.into_iter().for_each(|(name, node)| self.set_node(&name, Some(node)));
                // Pods may be listed before nodes.
                let nodes = &self.nodes;
                self.assigned_accelerators.retain(|name, _| nodes.contains_key(name));
            }
            Delta::Applied(found) => {
                let (name, node) = observe(found);
                self.set_node(&name, Some(node));
            }
            Delta::Deleted(name) => self.set_node(&NodeName::from(name.name), None),
        }
    }

    /// Stores a node. Kubelets update their nodes' statuses all the time, and mostly in fields that are not read.
    fn set_node(&mut self, name: &NodeName, node: Option<ObservedNode>) {
        if self.nodes.get(name) == node.as_ref() {
            return;
        }
        self.mark_node(name);
        match node {
            Some(node) => drop(self.nodes.insert(name.clone(), node)),
            None => {
                self.nodes.remove(name);
                self.assigned_accelerators.remove(name);
            }
        }
    }

    /// Applies a change of the one ConfigMap of that name.
    pub(super) fn apply_gpu_map(&mut self, change: Delta<ConfigMap>) {
        let map = match change {
            Delta::All { objects, .. } => {
                objects.into_iter().find_map(WatchedObject::readable).map(|map| parse_gpu_map(&map))
            }
            Delta::Applied(found) => found.readable().map(|map| parse_gpu_map(&map)),
            Delta::Deleted(_) => None,
        };
        let before = std::mem::replace(&mut self.gpu_map, map);
        // Without a map, UUIDs suffice. So a node that no map lists differs, too, once there is a map.
        let of = |map: &Option<BTreeMap<NodeName, AcceleratorIndices>>, node: &NodeName| {
            map.as_ref().map(|map| map.get(node).cloned())
        };
        self.mark_nodes_if(|facts, node| of(&before, node) != of(&facts.gpu_map, node));
    }

    pub(super) fn set_resolved_pools(&mut self, resolved: Arc<Resolved>) {
        let before = std::mem::replace(&mut self.resolved_pools, resolved);
        let now = &self.resolved_pools;
        // Most changes concern models alone, and share the rest.
        if !Arc::ptr_eq(&before.pools, &now.pools) || !Arc::ptr_eq(&before.nodes, &now.nodes) {
            self.mark_nodes_if(|facts, node| pool_of(&before, node) != facts.node_pool(node));
        }
    }

    fn mark_nodes_if(&mut self, is_changed: impl Fn(&Self, &NodeName) -> bool) {
        let facts = &*self;
        let changed = facts.nodes.keys().filter(|&node| is_changed(facts, node));
        let changed: Vec<NodeName> = changed.cloned().collect();
        changed.iter().for_each(|node| self.mark_node(node));
    }

    /// Records the accelerators that an event shows.
    pub(super) fn observe_event(&mut self, event: &PairingEvent) {
        match event {
            PairingEvent::RequesterObserved { node, observed, .. } => {
                self.record_assigned(node, &observed.accelerators)
            }
            PairingEvent::ProviderObserved { node, provider, .. } => {
                self.record_assigned(node, &provider.accelerators);
            }
            PairingEvent::Outcome { node, result: Ok(CommandReply::Accelerators(found)), .. } => {
                self.record_assigned(node, found)
            }
            PairingEvent::ProviderGone { node, provider, .. }
            | PairingEvent::ProviderVanished { node, provider, .. }
                if provider.is_launcher() =>
            {
                let Some(launchers) = self.launchers.get_mut(node) else { return };
                let removed = provider.accelerators.iter().filter(|a| launchers.remove(*a).is_some()).count();
                if removed > 0 {
                    self.mark_node(node);
                }
            }
            _ => {}
        }
    }

    /// Records which engine the requester's template revision currently requests.
    pub(super) fn observe_requester(&mut self, requester: &RequesterPod, requested: &RequestedEngine) {
        let is_patched = requested.mode == ProviderMode::Sleep || requester.patched_launcher().is_some();
        if let Some(revision) = requester.revision.as_ref().filter(|_| is_patched) {
            let namespace = &requester.name.namespace;
            self.changed |=
                self.revisions.observe(namespace, revision, requested.fingerprint, Some(requester.created));
        }
    }

    /// Records a provider's engines. Their sources decide which requesters may still ask for them.
    pub(super) fn observe_provider(&mut self, provider: &ProviderPod, records: &[EngineRecord]) {
        // No InferenceServerConfig belongs to the engines of a server patch, so none can make them obsolete.
        if !provider.source.as_ref().is_some_and(LauncherRevision::is_of_patch) {
            let engines = records.iter().map(|record| &record.engine);
            for engine in engines.filter(|engine| engine.mode == ProviderMode::Launcher) {
                self.changed |= self.fingerprints.insert(engine.fingerprint);
            }
        }
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
        if self.sources.insert(source.build(), source.clone()).is_none() {
            (self.dirty.builds, self.changed) = (true, true);
        }
        let launcher = ExistingLauncher { config: source.config_key(), used };
        let launchers = self.launchers.entry(node.clone()).or_default();
        let is_new = |a: &&AcceleratorId| launchers.get(*a) != Some(&launcher);
        let new: Vec<_> = id.accelerators.iter().filter(is_new).cloned().collect();
        if !new.is_empty() {
            launchers.extend(new.into_iter().map(|a| (a, launcher.clone())));
            self.mark_node(node);
        }
    }

    /// Returns the LauncherConfig of a launcher that a population policy places.
    pub(super) fn populated_config(
        &self,
        node: &NodeName,
        launcher: &ProviderId,
    ) -> Option<&Arc<LauncherConfig>> {
        let configs = &self.last_sent.nodes.get(node)?.launcher_configs;
        self.configs.launcher_config(configs.get(launcher.accelerators.first()?)?)
    }

    /// The Pods of a node are deleted later than the node, and observed again when it appears.
    fn record_assigned(&mut self, node: &NodeName, accelerators: &[AcceleratorId]) {
        if self.listed && !self.has_node(node) {
            return;
        }
        let unknown =
            |a: &&AcceleratorId| self.assigned_accelerators.get(node).is_none_or(|known| !known.contains(*a));
        let new: Vec<_> = accelerators.iter().filter(unknown).cloned().collect();
        if !new.is_empty() {
            self.assigned_accelerators.entry(node.clone()).or_default().extend(new);
            self.mark_node(node);
        }
    }

    /// Returns the accelerators' indices on the node, if known; `None` if UUIDs must do.
    pub(super) fn numbers(&self, node: &NodeName, accelerators: &[AcceleratorId]) -> Option<Vec<u32>> {
        let map = match &self.gpu_map {
            Some(map) => map.get(node)?,
            None => &self.node_pool(node)?.0.indices,
        };
        accelerators.iter().map(|a| map.get(a).copied()).collect()
    }

    /// Whether all nodes were listed. Deciding earlier would take unseen nodes for gone.
    pub(super) const fn are_complete(&self) -> bool {
        self.listed
    }

    pub(super) fn has_node(&self, node: &NodeName) -> bool {
        self.nodes.contains_key(node)
    }

    /// Returns how a Pod gets access to accelerators on that node.
    pub(super) fn access(&self, node: &NodeName) -> Option<AcceleratorAccess> {
        self.node_pool(node).map(|(_, terms)| AcceleratorAccess::of(terms))
    }

    fn node_pool(&self, node: &NodeName) -> Option<(&ResolvedNode, &PoolTerms)> {
        pool_of(&self.resolved_pools, node)
    }
}

/// Returns the node as its pool knows it, and the pool's terms.
fn pool_of<'a>(resolved: &'a Resolved, node: &NodeName) -> Option<(&'a ResolvedNode, &'a PoolTerms)> {
    let resolved_node = resolved.nodes.get(node.as_str())?;
    let terms = resolved.pools.get(resolved_node.pool.as_ref()?)?.terms.as_deref()?;
    Some((resolved_node, terms))
}

#[cfg(test)]
mod tests;
