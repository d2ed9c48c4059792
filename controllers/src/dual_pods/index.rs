//! Index of the Pods of dual pods, as last observed, by their pairing ids.

mod node_pods;
mod pod_status;
mod provider;
mod requester;
use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    model::AcceleratorId,
    pairing::{
        event::{EngineRecord, PairingEvent, ProviderPhase, RequestedEngine},
        ids::{NodeName, PairingEngineId, ProviderId, ProviderMode, RequesterId},
    },
};

use self::node_pods::NodePods;
pub(super) use self::{provider::ProviderPod, requester::RequesterPod};
use super::{
    facts::{ClusterFacts, FactChanges},
    launcher_watches::LauncherLocation,
};
use crate::{
    crd::ledger::ObjectName,
    dual_pods::{keys, record},
    platform::launcher::pod as launchers,
    watch::{Delta, WatchedObject},
};

/// All observed Pods that still exist.
#[derive(Debug)]
pub(super) struct PairingPodIndex {
    /// Mode of requesters that do not set one.
    mode: ProviderMode,
    pods: BTreeMap<ObjectName, IndexedPod>,
    requesters: BTreeMap<RequesterId, ObjectName>,
    /// The Pods of each node that has any.
    nodes: BTreeMap<NodeName, NodePods>,
    /// Launchers that changed since [`Self::take_changed_launchers`].
    changed_launchers: BTreeSet<LauncherLocation>,
    /// Failure of the last failed provider on an accelerator, until a provider is ready there or its node has no Pod.
    container_failures: BTreeMap<NodeName, BTreeMap<AcceleratorId, String>>,
}

/// A Pod's role.
#[derive(Clone, Debug)]
pub(super) enum IndexedPod {
    Requester(Box<RequesterPod>),
    Provider(Box<ProviderPod>),
}

impl PairingPodIndex {
    pub(super) const fn new(mode: ProviderMode) -> Self {
        Self {
            mode,
            pods: BTreeMap::new(),
            requesters: BTreeMap::new(),
            nodes: BTreeMap::new(),
            changed_launchers: BTreeSet::new(),
            container_failures: BTreeMap::new(),
        }
    }

    /// Returns the failure of the last provider on one of these accelerators.
    pub(super) fn container_failure(&self, node: &NodeName, on: &[AcceleratorId]) -> Option<&str> {
        let failures = self.container_failures.get(node)?;
        on.iter().find_map(|accelerator| failures.get(accelerator)).map(String::as_str)
    }

    fn record_container_failure(&mut self, provider: &ProviderPod) {
        let accelerators = provider.id.accelerators.iter();
        // A provider that serves after a restart still reports its former end.
        if provider.observed.phase == ProviderPhase::Ready {
            if let Some(failures) = self.container_failures.get_mut(&provider.node) {
                accelerators.for_each(|accelerator| drop(failures.remove(accelerator)));
            }
        } else if let Some(failure) = &provider.container_failure {
            let failures = self.container_failures.entry(provider.node.clone()).or_default();
            failures.extend(accelerators.map(|accelerator| (accelerator.clone(), failure.clone())));
        }
    }

    pub(super) fn requester(&self, id: &RequesterId) -> Option<&RequesterPod> {
        self.pods.get(self.requesters.get(id)?)?.as_requester()
    }

    pub(super) fn requesters(&self) -> impl Iterator<Item = &RequesterPod> {
        self.requesters.keys().filter_map(|id| self.requester(id))
    }

    pub(super) fn pod(&self, name: &ObjectName) -> Option<&IndexedPod> {
        self.pods.get(name)
    }

    /// Returns the names of all Pods.
    pub(super) fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.pods.keys()
    }

    pub(super) fn provider(&self, node: &NodeName, id: &ProviderId) -> Option<&ProviderPod> {
        self.provider_pod(self.nodes.get(node)?.provider(id)?)
    }

    fn provider_pod(&self, name: &ObjectName) -> Option<&ProviderPod> {
        match self.pods.get(name)? {
            IndexedPod::Provider(provider) => Some(provider),
            IndexedPod::Requester(_) => None,
        }
    }

    /// Takes the launchers that were created, updated or removed since the last call.
    pub(super) fn take_changed_launchers(&mut self) -> BTreeSet<LauncherLocation> {
        std::mem::take(&mut self.changed_launchers)
    }

    /// Returns the ports of a node's launcher engines, as recorded on the Pods.
    pub(super) fn ports<'a>(
        &'a self,
        node: &'a NodeName,
    ) -> impl Iterator<Item = (&'a PairingEngineId, u16)> {
        let launchers = self.nodes.get(node).into_iter().flat_map(NodePods::launchers);
        launchers.filter_map(|name| self.provider_pod(name)).flat_map(|provider| {
            provider.engines.iter().map(|(engine, launcher_engine)| (engine, launcher_engine.port))
        })
    }

    /// Applies a change and emits the resulting events to `emit`.
    pub(super) fn apply(
        &mut self,
        change: Delta<Pod>,
        facts: &ClusterFacts,
        emit: &mut impl FnMut(PairingEvent),
    ) {
        match change {
            Delta::All { namespace, objects } => {
                let listed: BTreeMap<ObjectName, WatchedObject<Pod>> =
                    objects.into_iter().map(|found| (found.name(), found)).collect();
                let in_scope = |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                let removed: Vec<ObjectName> = self
                    .pods
                    .keys()
                    .filter(|name| in_scope(name) && !listed.contains_key(name))
                    .cloned()
                    .collect();
                removed.iter().for_each(|name| self.remove(name, emit));
                listed
                    .into_values()
                    .filter_map(WatchedObject::readable)
                    .for_each(|pod| self.upsert(&pod, facts, emit));
            }
            Delta::Applied(found) => {
                if let Some(pod) = found.readable() {
                    self.upsert(&pod, facts, emit);
                }
            }
            Delta::Deleted(name) => self.remove(&name, emit),
        }
    }

    /// Returns the Pods that these changes may affect.
    pub(super) fn affected<'a>(&'a self, changes: &'a FactChanges) -> impl Iterator<Item = &'a IndexedPod> {
        let everywhere = changes.everywhere.then(|| self.pods.values()).into_iter().flatten();
        let nodes = changes.nodes.iter().filter(|_| !changes.everywhere);
        let names = nodes.filter_map(|node| self.nodes.get(node)).flat_map(NodePods::names);
        everywhere.chain(names.filter_map(|name| self.pods.get(name)))
    }

    /// Emits the events of the affected Pods again.
    pub(super) fn replay(
        &self,
        changes: &FactChanges,
        facts: &ClusterFacts,
        emit: &mut impl FnMut(PairingEvent),
    ) {
        self.affected(changes).for_each(|role| self.emit(role, facts, emit));
    }

    fn upsert(&mut self, pod: &Pod, facts: &ClusterFacts, emit: &mut impl FnMut(PairingEvent)) {
        // Another Pod of the same name, of any role: the earlier Pod's deletion was not seen.
        let name = ObjectName::new(pod.namespace().unwrap_or_default(), pod.name_any());
        if self.pods.get(&name).is_some_and(|before| pod.metadata.uid.as_deref() != Some(before.uid())) {
            self.remove(&name, emit);
        }
        let Some(role) = IndexedPod::of(pod, self.mode) else { return };
        if let Some(before) = self.pods.remove(role.name()) {
            self.unlink(&before);
        }
        self.link(&role);
        if let IndexedPod::Provider(provider) = &role {
            self.record_container_failure(provider);
        }
        self.emit(&role, facts, emit);
        self.pods.insert(role.name().clone(), role);
    }

    /// Adds a Pod to the maps by which Pods are found.
    fn link(&mut self, role: &IndexedPod) {
        if let IndexedPod::Requester(requester) = role {
            self.requesters.insert(requester.id.clone(), requester.name.clone());
        }
        if let Some(node) = role.node() {
            self.nodes.entry(node.clone()).or_default().insert(role);
        }
        self.changed_launchers.extend(role.launcher_location());
    }

    fn unlink(&mut self, role: &IndexedPod) {
        if let IndexedPod::Requester(requester) = role {
            self.requesters.remove(&requester.id);
        }
        if let Some(node) = role.node()
            && let Some(pods) = self.nodes.get_mut(node)
        {
            pods.remove(role);
            if pods.is_empty() {
                self.nodes.remove(node);
            }
        }
        self.changed_launchers.extend(role.launcher_location());
    }

    fn emit(&self, role: &IndexedPod, facts: &ClusterFacts, sink: &mut impl FnMut(PairingEvent)) {
        match role {
            IndexedPod::Requester(requester) => {
                let bound = || self.bound_engine(requester);
                requester.event(facts, bound).into_iter().for_each(sink);
            }
            IndexedPod::Provider(provider) => sink(PairingEvent::ProviderObserved {
                node: provider.node.clone(),
                provider: provider.id.clone(),
                observed: provider.observed.clone(),
            }),
        }
    }

    /// Returns the engine that a provider's record binds to this requester.
    fn bound_engine(&self, requester: &RequesterPod) -> Option<RequestedEngine> {
        let providers = self.nodes.get(requester.node.as_ref()?)?.bound_to(&requester.id);
        let mut records =
            providers.filter_map(|name| self.provider_pod(name)).flat_map(|provider| provider.records());
        let found = records.find(|record| record.requester.as_ref() == Some(&requester.id))?;
        let EngineRecord { engine, sizes, level, stop_after, .. } = found;
        let (mode, fingerprint) = (engine.mode, engine.fingerprint);
        Some(RequestedEngine {
            mode,
            fingerprint,
            build: None,
            sizes: *sizes,
            level: *level,
            stop_after: *stop_after,
        })
    }

    fn remove(&mut self, name: &ObjectName, emit: &mut impl FnMut(PairingEvent)) {
        let Some(role) = self.pods.remove(name) else { return };
        self.unlink(&role);
        if let Some(node) = role.node()
            && !self.nodes.contains_key(node)
        {
            // A failure is part of the status of requesters on its node.
            self.container_failures.remove(node);
        }
        match role {
            IndexedPod::Requester(requester) => {
                if let Some(node) = requester.node {
                    emit(PairingEvent::RequesterGone { node, requester: requester.id });
                }
            }
            IndexedPod::Provider(provider_pod) => {
                let ProviderPod { node, id: provider, uid, scheduled, observed, .. } = *provider_pod;
                // A kubelet reports the end of the containers before it removes the object.
                emit(if scheduled && observed.phase != ProviderPhase::Terminated {
                    PairingEvent::ProviderVanished { node, provider, uid }
                } else {
                    PairingEvent::ProviderGone { node, provider, uid }
                });
            }
        }
    }
}

impl IndexedPod {
    /// Returns `None` for a Pod that is not part of dual pods.
    fn of(pod: &Pod, mode: ProviderMode) -> Option<Self> {
        if let Some(found) = record::read(pod) {
            // A Pod with an unreadable record is no engine of ours, and stays.
            let found = found.inspect_err(|error| {
                tracing::warn!(pod = pod.name_any(), %error, "provider Pod ignored: its annotations are invalid");
            });
            let found = found.ok()?;
            return ProviderPod::of(pod, found).map(Box::new).map(Self::Provider);
        }
        if let Some((node, accelerator)) = launchers::placement_of(pod) {
            let id = ProviderId::launcher(accelerator);
            return ProviderPod::launcher(pod, node, id).map(Box::new).map(Self::Provider);
        }
        keys::is_requester(pod)
            .then(|| RequesterPod::of(pod, mode).map(Box::new).map(Self::Requester))
            .flatten()
    }

    fn name(&self) -> &ObjectName {
        match self {
            Self::Requester(requester) => &requester.name,
            Self::Provider(provider) => &provider.name,
        }
    }

    pub(super) fn as_requester(&self) -> Option<&RequesterPod> {
        match self {
            Self::Requester(requester) => Some(requester),
            Self::Provider(_) => None,
        }
    }

    /// Returns the Pod's node; `None` for a requester without one.
    fn node(&self) -> Option<&NodeName> {
        match self {
            Self::Requester(requester) => requester.node.as_ref(),
            Self::Provider(provider) => Some(&provider.node),
        }
    }

    fn launcher_location(&self) -> Option<LauncherLocation> {
        match self {
            Self::Provider(provider) if provider.is_launcher() => {
                Some((provider.node.clone(), provider.id.clone()))
            }
            _ => None,
        }
    }

    fn uid(&self) -> &str {
        match self {
            Self::Requester(requester) => requester.id.as_str(),
            Self::Provider(provider) => provider.uid.as_str(),
        }
    }
}

#[cfg(test)]
mod tests;
