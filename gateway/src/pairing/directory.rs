//! The Pods of dual pods as they were last seen, and what the decisions call them.

mod kubelet;
mod provider;
mod requester;
use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    model::AcceleratorId,
    pairing::{
        event::{Ask, Event, Record, Stage},
        ids::{EngineId, Mode, NodeName, ProviderId, RequesterId, Uid},
    },
};

pub(super) use self::{provider::Provider, requester::Requester};
use super::facts::Facts;
use crate::{
    controllers::{
        crd::ledger::ObjectName,
        dual::{keys, record},
        watch::{self, Change, Found},
    },
    platform::kubernetes::launcher::pod as launchers,
};

/// Everything that was seen and is still there.
#[derive(Debug)]
pub(super) struct Directory {
    /// Of requesters that do not say it.
    mode: Mode,
    pods: BTreeMap<ObjectName, Role>,
    /// Pods that a list has shown and the watch not yet. What the watch says went there is one of the same name from before.
    ahead: BTreeSet<ObjectName>,
    /// What the watch has said since a list was asked for, some of which is newer than that.
    late: Option<Vec<Change<Pod>>>,
    requesters: BTreeMap<RequesterId, ObjectName>,
    providers: BTreeMap<(NodeName, ProviderId), ObjectName>,
    /// Why the last provider on an accelerator did not run that had trouble there, until one is ready.
    troubles: BTreeMap<(NodeName, AcceleratorId), String>,
}

/// What a Pod is here.
#[derive(Clone, Debug)]
pub(super) enum Role {
    Requester(Box<Requester>),
    Provider(Box<Provider>),
}

impl Directory {
    pub(super) const fn new(mode: Mode) -> Self {
        Self {
            mode,
            pods: BTreeMap::new(),
            ahead: BTreeSet::new(),
            late: None,
            requesters: BTreeMap::new(),
            providers: BTreeMap::new(),
            troubles: BTreeMap::new(),
        }
    }

    /// Why the last provider on one of these did not run.
    pub(super) fn trouble(&self, node: &NodeName, on: &[AcceleratorId]) -> Option<&str> {
        on.iter()
            .find_map(|accelerator| self.troubles.get(&(node.clone(), accelerator.clone())))
            .map(String::as_str)
    }

    fn note_trouble(&mut self, own: &Provider) {
        for accelerator in own.id.accelerators.iter() {
            let place = || (own.node.clone(), accelerator.clone());
            // A provider that serves after a restart still says how it ended before.
            if own.seen.stage == Stage::Ready {
                self.troubles.remove(&place());
            } else if let Some(trouble) = &own.trouble {
                self.troubles.insert(place(), trouble.clone());
            }
        }
    }

    pub(super) fn requester(&self, id: &RequesterId) -> Option<&Requester> {
        match self.pods.get(self.requesters.get(id)?)? {
            Role::Requester(requester) => Some(requester),
            Role::Provider(_) => None,
        }
    }

    pub(super) fn requesters(&self) -> impl Iterator<Item = &Requester> {
        self.requesters.keys().filter_map(|id| self.requester(id))
    }

    pub(super) fn role(&self, name: &ObjectName) -> Option<&Role> {
        self.pods.get(name)
    }

    /// Of all Pods.
    pub(super) fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.pods.keys()
    }

    pub(super) fn provider(&self, node: &NodeName, id: &ProviderId) -> Option<&Provider> {
        match self.pods.get(self.providers.get(&(node.clone(), id.clone()))?)? {
            Role::Provider(provider) => Some(provider),
            Role::Requester(_) => None,
        }
    }

    /// Lists are asked for. What the watch says from here on is taken note of once they have come.
    pub(super) fn await_lists(&mut self) {
        self.late.get_or_insert_default();
    }

    /// Takes note of what the watch has said meanwhile. Nobody is told.
    pub(super) fn catch_up(&mut self, facts: &Facts) {
        for change in self.late.take().unwrap_or_default() {
            self.take(change, facts, &mut drop);
        }
    }

    /// Takes note of lists that the watch may not have come to yet, and of what it has said since they were asked for.
    pub(super) fn list(&mut self, lists: Vec<Change<Pod>>, facts: &Facts) {
        let late = self.late.take();
        let before: BTreeMap<ObjectName, String> =
            self.pods.iter().map(|(name, role)| (name.clone(), role.uid().to_owned())).collect();
        lists.into_iter().for_each(|all| self.take(all, facts, &mut drop));
        let new =
            self.pods.iter().filter(|(name, role)| before.get(*name).is_none_or(|uid| uid != role.uid()));
        self.ahead.extend(new.map(|(name, _)| name.clone()));
        self.late = late;
        self.catch_up(facts);
    }

    /// Launchers that can be spoken to, with their nodes.
    pub(super) fn launchers(&self) -> impl Iterator<Item = (&NodeName, &ProviderId, &Provider)> {
        let all = self.providers.keys().filter_map(|(node, id)| Some((node, id, self.provider(node, id)?)));
        all.filter(|(_, id, own)| id.is_launcher() && own.seen.stage == Stage::Ready && !own.seen.deleting)
    }

    /// Of all launchers' Pods, whether they can be spoken to or not.
    pub(super) fn launcher_uids(&self) -> impl Iterator<Item = &Uid> {
        let launchers = self.providers.keys().filter(|(_, id)| id.is_launcher());
        launchers.filter_map(|(node, id)| self.provider(node, id)).map(|own| &own.uid)
    }

    /// Where the engines of a node's launchers listen, as far as their Pods say it.
    pub(super) fn ports<'a>(&'a self, node: &'a NodeName) -> impl Iterator<Item = (&'a EngineId, u16)> {
        let of = move |(at, id): &'a (NodeName, ProviderId)| {
            if at == node && id.is_launcher() { self.provider(at, id) } else { None }
        };
        let all = self.providers.keys().filter_map(of);
        all.flat_map(|own| own.inside.iter().map(|(engine, inside)| (engine, inside.port)))
    }

    /// Takes note of a change; what it means goes to `tell`.
    pub(super) fn take(&mut self, change: Change<Pod>, facts: &Facts, tell: &mut impl FnMut(Event)) {
        if let Some(late) = &mut self.late {
            late.push(change);
            return;
        }
        match change {
            Change::All { namespace, objects } => {
                let there: BTreeMap<ObjectName, Found<Pod>> =
                    objects.into_iter().map(|found| (found.name(), found)).collect();
                let within = |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                let gone: Vec<ObjectName> = self
                    .pods
                    .keys()
                    .filter(|name| within(name) && !there.contains_key(name))
                    .cloned()
                    .collect();
                gone.iter().for_each(|name| self.lost(name, tell));
                self.ahead.retain(|name| !within(name));
                there.into_values().filter_map(Found::good).for_each(|pod| self.saw(&pod, facts, tell));
            }
            Change::Applied(found) => {
                let (name, uid) = (found.name(), found.metadata().uid.clone());
                let known = self.pods.get(&name);
                let same = known.filter(|role| uid.as_deref() == Some(role.uid()));
                if self.ahead.contains(&name) && same.is_none() {
                    return;
                }
                self.ahead.remove(&name);
                // The list was newer.
                let stale = same.is_some_and(|role| role.version() > watch::version(found.metadata()));
                if let Some(pod) = found.good().filter(|_| !stale) {
                    self.saw(&pod, facts, tell);
                }
            }
            Change::Deleted(name) if self.ahead.contains(&name) => {}
            Change::Deleted(name) => self.lost(&name, tell),
        }
    }

    /// Everything once more, to who has forgotten it.
    pub(super) fn again(&self, facts: &Facts, tell: &mut impl FnMut(Event)) {
        self.pods.values().for_each(|role| self.say(role, facts, tell));
    }

    fn saw(&mut self, pod: &Pod, facts: &Facts, tell: &mut impl FnMut(Event)) {
        let Some(role) = Role::of(pod, self.mode) else { return };
        // Another Pod of the same name: the one before was not seen to go.
        if self.pods.get(role.name()).is_some_and(|before| before.uid() != role.uid()) {
            let name = role.name().clone();
            self.lost(&name, tell);
        }
        match &role {
            Role::Requester(own) => drop(self.requesters.insert(own.id.clone(), own.name.clone())),
            Role::Provider(own) => {
                drop(self.providers.insert((own.node.clone(), own.id.clone()), own.name.clone()));
                self.note_trouble(own);
            }
        }
        self.say(&role, facts, tell);
        self.pods.insert(role.name().clone(), role);
    }

    fn say(&self, role: &Role, facts: &Facts, tell: &mut impl FnMut(Event)) {
        match role {
            Role::Requester(own) => {
                let bound = || self.bound(own);
                own.event(facts, bound).into_iter().for_each(tell);
            }
            Role::Provider(own) => tell(Event::SeenProvider {
                node: own.node.clone(),
                provider: own.id.clone(),
                seen: own.seen.clone(),
            }),
        }
    }

    /// What a provider says that this requester has.
    fn bound(&self, own: &Requester) -> Option<Ask> {
        let all = self.providers.keys().filter(|(node, _)| own.node.as_ref() == Some(node));
        let mut records = all.filter_map(|(node, id)| self.provider(node, id)).flat_map(|p| &p.seen.records);
        let found = records.find(|record| record.requester.as_ref() == Some(&own.id))?;
        let Record { engine, sizes, level, stop_after, .. } = found;
        let (mode, fingerprint) = (engine.mode, engine.fingerprint);
        Some(Ask { mode, fingerprint, build: None, sizes: *sizes, level: *level, stop_after: *stop_after })
    }

    fn lost(&mut self, name: &ObjectName, tell: &mut impl FnMut(Event)) {
        match self.pods.remove(name) {
            Some(Role::Requester(own)) => {
                self.requesters.remove(&own.id);
                if let Some(node) = own.node {
                    tell(Event::RequesterGone { node, requester: own.id });
                }
            }
            Some(Role::Provider(own)) => {
                let place = (own.node, own.id);
                if self.providers.get(&place) == Some(name) {
                    self.providers.remove(&place);
                }
                let (node, provider) = place;
                let uid = own.uid;
                // A kubelet tells the end of what it ran before it lets the object go.
                tell(if own.placed && own.seen.stage != Stage::Ended {
                    Event::ProviderVanished { node, provider, uid }
                } else {
                    Event::ProviderGone { node, provider, uid }
                });
            }
            None => {}
        }
    }
}

impl Role {
    /// `None`: a Pod that has nothing to do with this.
    fn of(pod: &Pod, mode: Mode) -> Option<Self> {
        if let Some(found) = record::read(pod) {
            // What cannot be read is nobody's engine, and is left to whoever wrote it.
            let found =
                found.inspect_err(|error| tracing::warn!(pod = pod.name_any(), %error, "a provider")).ok()?;
            return Provider::of(pod, found).map(Box::new).map(Self::Provider);
        }
        if let Some((node, accelerator)) = launchers::place(pod) {
            let id = ProviderId::launcher(accelerator);
            return Provider::launcher(pod, node, id).map(Box::new).map(Self::Provider);
        }
        keys::is_requester(pod).then(|| Requester::of(pod, mode).map(Box::new).map(Self::Requester)).flatten()
    }

    fn name(&self) -> &ObjectName {
        match self {
            Self::Requester(own) => &own.name,
            Self::Provider(own) => &own.name,
        }
    }

    fn uid(&self) -> &str {
        match self {
            Self::Requester(own) => own.id.as_str(),
            Self::Provider(own) => own.uid.as_str(),
        }
    }

    fn version(&self) -> u64 {
        match self {
            Self::Requester(own) => own.version,
            Self::Provider(own) => own.version,
        }
    }
}

#[cfg(test)]
mod tests;
