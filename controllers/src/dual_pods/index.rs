//! Index of the Pods of dual pods, as last observed, by their pairing ids.

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
        ids::{NodeName, PairingEngineId, ProviderId, ProviderMode, RequesterId, Uid},
    },
};

pub(super) use self::{provider::ProviderPod, requester::RequesterPod};
use super::facts::ClusterFacts;
use crate::{
    crd::ledger::ObjectName,
    dual_pods::{keys, record},
    platform::launcher::pod as launchers,
    watch::{self, Delta, WatchedObject},
};

/// All observed Pods that still exist.
#[derive(Debug)]
pub(super) struct PodIndex {
    /// Mode of requesters that do not set one.
    mode: ProviderMode,
    pods: BTreeMap<ObjectName, IndexedPod>,
    /// Pods that a list has shown before the watch. A deletion that the watch reports is of an earlier Pod of that
    /// name.
    ahead_of_watch: BTreeSet<ObjectName>,
    /// Watch events since the lists were requested; some are newer than the lists.
    deferred: Option<Vec<Delta<Pod>>>,
    requesters: BTreeMap<RequesterId, ObjectName>,
    providers: BTreeMap<(NodeName, ProviderId), ObjectName>,
    /// Failure of the last failed provider on an accelerator, until a provider is ready there.
    container_failures: BTreeMap<(NodeName, AcceleratorId), String>,
}

/// A Pod's role.
#[derive(Clone, Debug)]
pub(super) enum IndexedPod {
    Requester(Box<RequesterPod>),
    Provider(Box<ProviderPod>),
}

impl PodIndex {
    pub(super) const fn new(mode: ProviderMode) -> Self {
        Self {
            mode,
            pods: BTreeMap::new(),
            ahead_of_watch: BTreeSet::new(),
            deferred: None,
            requesters: BTreeMap::new(),
            providers: BTreeMap::new(),
            container_failures: BTreeMap::new(),
        }
    }

    /// Returns the failure of the last provider on one of these accelerators.
    pub(super) fn container_failure(&self, node: &NodeName, on: &[AcceleratorId]) -> Option<&str> {
        on.iter()
            .find_map(|accelerator| self.container_failures.get(&(node.clone(), accelerator.clone())))
            .map(String::as_str)
    }

    fn record_container_failure(&mut self, provider: &ProviderPod) {
        for accelerator in provider.id.accelerators.iter() {
            let key = || (provider.node.clone(), accelerator.clone());
            // A provider that serves after a restart still reports its former end.
            if provider.observed.phase == ProviderPhase::Ready {
                self.container_failures.remove(&key());
            } else if let Some(failure) = &provider.container_failure {
                self.container_failures.insert(key(), failure.clone());
            }
        }
    }

    pub(super) fn requester(&self, id: &RequesterId) -> Option<&RequesterPod> {
        match self.pods.get(self.requesters.get(id)?)? {
            IndexedPod::Requester(requester) => Some(requester),
            IndexedPod::Provider(_) => None,
        }
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
        match self.pods.get(self.providers.get(&(node.clone(), id.clone()))?)? {
            IndexedPod::Provider(provider) => Some(provider),
            IndexedPod::Requester(_) => None,
        }
    }

    /// Holds watch events back from here on until the requested lists are applied.
    pub(super) fn defer_changes(&mut self) {
        self.deferred.get_or_insert_default();
    }

    /// Applies the deferred watch events without emitting pairing events.
    pub(super) fn apply_deferred(&mut self, facts: &ClusterFacts) {
        for change in self.deferred.take().unwrap_or_default() {
            self.apply(change, facts, &mut drop);
        }
    }

    /// Applies lists, which may be ahead of the watch, and then the deferred watch events.
    pub(super) fn apply_lists(&mut self, lists: Vec<Delta<Pod>>, facts: &ClusterFacts) {
        let late = self.deferred.take();
        let before: BTreeMap<ObjectName, String> =
            self.pods.iter().map(|(name, role)| (name.clone(), role.uid().to_owned())).collect();
        lists.into_iter().for_each(|all| self.apply(all, facts, &mut drop));
        let new =
            self.pods.iter().filter(|(name, role)| before.get(*name).is_none_or(|uid| uid != role.uid()));
        self.ahead_of_watch.extend(new.map(|(name, _)| name.clone()));
        self.deferred = late;
        self.apply_deferred(facts);
    }

    /// Returns the launchers that accept calls, with their nodes.
    pub(super) fn launchers(&self) -> impl Iterator<Item = (&NodeName, &ProviderId, &ProviderPod)> {
        let all = self.providers.keys().filter_map(|(node, id)| Some((node, id, self.provider(node, id)?)));
        all.filter(|(_, id, provider)| {
            id.is_launcher() && provider.observed.phase == ProviderPhase::Ready && !provider.observed.deleting
        })
    }

    /// Returns the UIDs of all launchers' Pods, ready or not.
    pub(super) fn launcher_uids(&self) -> impl Iterator<Item = &Uid> {
        let launchers = self.providers.keys().filter(|(_, id)| id.is_launcher());
        launchers.filter_map(|(node, id)| self.provider(node, id)).map(|provider| &provider.uid)
    }

    /// Returns the ports of a node's launcher engines, as recorded on the Pods.
    pub(super) fn ports<'a>(
        &'a self,
        node: &'a NodeName,
    ) -> impl Iterator<Item = (&'a PairingEngineId, u16)> {
        let of = move |(at, id): &'a (NodeName, ProviderId)| {
            if at == node && id.is_launcher() { self.provider(at, id) } else { None }
        };
        let all = self.providers.keys().filter_map(of);
        all.flat_map(|provider| {
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
        if let Some(late) = &mut self.deferred {
            late.push(change);
            return;
        }
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
                self.ahead_of_watch.retain(|name| !in_scope(name));
                listed
                    .into_values()
                    .filter_map(WatchedObject::readable)
                    .for_each(|pod| self.upsert(&pod, facts, emit));
            }
            Delta::Applied(found) => {
                let (name, uid) = (found.name(), found.metadata().uid.clone());
                let known = self.pods.get(&name);
                let same = known.filter(|role| uid.as_deref() == Some(role.uid()));
                if self.ahead_of_watch.contains(&name) && same.is_none() {
                    return;
                }
                self.ahead_of_watch.remove(&name);
                // The list was newer.
                let stale = same.is_some_and(|role| role.version() > watch::version(found.metadata()));
                if let Some(pod) = found.readable().filter(|_| !stale) {
                    self.upsert(&pod, facts, emit);
                }
            }
            Delta::Deleted(name) if self.ahead_of_watch.contains(&name) => {}
            Delta::Deleted(name) => self.remove(&name, emit),
        }
    }

    /// Emits the events of all Pods again.
    pub(super) fn replay(&self, facts: &ClusterFacts, emit: &mut impl FnMut(PairingEvent)) {
        self.pods.values().for_each(|role| self.emit(role, facts, emit));
    }

    fn upsert(&mut self, pod: &Pod, facts: &ClusterFacts, emit: &mut impl FnMut(PairingEvent)) {
        let Some(role) = IndexedPod::of(pod, self.mode) else { return };
        // Another Pod of the same name: the earlier Pod's deletion was not seen.
        if self.pods.get(role.name()).is_some_and(|before| before.uid() != role.uid()) {
            let name = role.name().clone();
            self.remove(&name, emit);
        }
        match &role {
            IndexedPod::Requester(requester) => {
                drop(self.requesters.insert(requester.id.clone(), requester.name.clone()))
            }
            IndexedPod::Provider(provider) => {
                drop(
                    self.providers
                        .insert((provider.node.clone(), provider.id.clone()), provider.name.clone()),
                );
                self.record_container_failure(provider);
            }
        }
        self.emit(&role, facts, emit);
        self.pods.insert(role.name().clone(), role);
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
        let all = self.providers.keys().filter(|(node, _)| requester.node.as_ref() == Some(node));
        let mut records =
            all.filter_map(|(node, id)| self.provider(node, id)).flat_map(|p| &p.observed.records);
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
        match self.pods.remove(name) {
            Some(IndexedPod::Requester(requester)) => {
                self.requesters.remove(&requester.id);
                if let Some(node) = requester.node {
                    emit(PairingEvent::RequesterGone { node, requester: requester.id });
                }
            }
            Some(IndexedPod::Provider(provider_pod)) => {
                let key = (provider_pod.node, provider_pod.id);
                if self.providers.get(&key) == Some(name) {
                    self.providers.remove(&key);
                }
                let (node, provider) = key;
                let uid = provider_pod.uid;
                // A kubelet reports the end of the containers before it removes the object.
                emit(if provider_pod.scheduled && provider_pod.observed.phase != ProviderPhase::Terminated {
                    PairingEvent::ProviderVanished { node, provider, uid }
                } else {
                    PairingEvent::ProviderGone { node, provider, uid }
                });
            }
            None => {}
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

    fn uid(&self) -> &str {
        match self {
            Self::Requester(requester) => requester.id.as_str(),
            Self::Provider(provider) => provider.uid.as_str(),
        }
    }

    fn version(&self) -> u64 {
        match self {
            Self::Requester(requester) => requester.version,
            Self::Provider(provider) => provider.version,
        }
    }
}

#[cfg(test)]
mod tests;
