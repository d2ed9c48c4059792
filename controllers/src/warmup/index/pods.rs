//! The Pods of Warmups, engines that wait for their images, and the Pods of RoleBasedGroups.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
    warmup::{ActionHash, WarmupId, WarmupItem, WarmupPod, WarmupPodState},
};

use crate::{
    crd::ledger::ObjectName,
    warmup::{pod_facts, targets::GroupPod},
    watch::{Delta, WatchedObject, missing},
    writer::fence::SeenObject,
};

/// Label of a RoleBasedGroup's Pods: the name of the group, which is in their namespace.
pub(crate) const GROUP_LABEL: &str = "rbg.workloads.x-k8s.io/group-name";
/// Label of a RoleBasedGroup's Pods: their role.
const ROLE_LABEL: &str = "rbg.workloads.x-k8s.io/role-name";

/// The Pods of Warmups, with those that have changed since they were last taken.
#[derive(Debug, Default)]
pub(super) struct WarmupPods {
    listed: BTreeSet<Option<String>>,
    pods: BTreeMap<ObjectName, KnownPod>,
    /// The uids of the Warmups that exist.
    uids: BTreeMap<WarmupId, String>,
    /// The Warmups whose uid has changed since Pods were last taken.
    uids_changed: BTreeSet<WarmupId>,
    changed: BTreeSet<ObjectName>,
    ended: Vec<EndedAttempt>,
}

#[derive(Debug)]
struct KnownPod {
    facts: Option<WarmupPod>,
    /// Uid of the Warmup that owns it.
    owner: Option<String>,
    seen: SeenObject,
}

/// A Pod of a Warmup that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndedAttempt {
    /// Why it failed, in one word; `None` if it is done.
    pub(crate) cause: Option<&'static str>,
    /// Time since the Pod was created.
    pub(crate) took: Millis,
}

/// What is read from the Pods that count, by their names.
#[derive(Debug)]
struct ReadPods<T> {
    listed: BTreeSet<Option<String>>,
    by_name: BTreeMap<ObjectName, T>,
}

/// Engines whose Pods wait for an image, by their node.
#[derive(Debug, Default)]
pub(super) struct PullingEngines {
    nodes: ReadPods<NodeName>,
    changed: BTreeSet<NodeName>,
}

/// The bound Pods of RoleBasedGroups, with their groups.
#[derive(Debug, Default)]
pub(super) struct GroupPods {
    pods: ReadPods<(ObjectName, GroupPod)>,
    changed: BTreeSet<ObjectName>,
}

impl WarmupPods {
    pub(super) fn apply(&mut self, delta: &Delta<Pod>, now: Tick) {
        match delta {
            Delta::All { namespace, objects } => {
                let gone = missing(&self.pods, namespace.as_deref(), objects);
                gone.iter().for_each(|name| self.remove(name));
                let is_first = self.listed.insert(namespace.clone());
                objects.iter().for_each(|found| self.set(found, is_first, now));
            }
            Delta::Applied(found) => self.set(found, false, now),
            Delta::Deleted(name) => self.remove(name),
        }
    }

    pub(super) fn is_listed(&self, lists: usize) -> bool {
        self.listed.len() >= lists
    }

    /// Takes the uid of the Warmup of this name; `None` if there is none any more.
    pub(super) fn set_uid(&mut self, warmup: &ObjectName, uid: Option<&str>) {
        let id = super::id(warmup);
        let before = match uid {
            Some(uid) => self.uids.insert(id.clone(), uid.to_owned()),
            None => self.uids.remove(&id),
        };
        if before.as_deref() != uid {
            self.uids_changed.insert(id);
        }
    }

    /// Returns what the fence of a write to the Pod needs.
    pub(super) fn seen(&self, name: &ObjectName) -> Option<&SeenObject> {
        self.pods.get(name).map(|known| &known.seen)
    }

    /// Returns the Pods that have changed; `None` for one that does not exist any more.
    pub(super) fn take_changed(&mut self) -> Vec<(ObjectName, Option<WarmupPod>)> {
        let mut changed = std::mem::take(&mut self.changed);
        let warmups = std::mem::take(&mut self.uids_changed);
        if !warmups.is_empty() {
            let is_affected =
                |known: &KnownPod| known.facts.as_ref().is_some_and(|facts| warmups.contains(&facts.warmup));
            let affected = self.pods.iter().filter(|(_, known)| is_affected(known));
            changed.extend(affected.map(|(name, _)| name.clone()));
        }
        let facts = |name: ObjectName| {
            let facts = self.pods.get(&name).and_then(|known| self.facts_of(known));
            (name, facts)
        };
        changed.into_iter().map(facts).collect()
    }

    /// Returns the attempts that have ended under this leader.
    pub(super) fn take_ended(&mut self) -> Vec<EndedAttempt> {
        std::mem::take(&mut self.ended)
    }

    /// Returns what the decisions see of the Pod.
    ///
    /// The Pod of a deleted Warmup is surplus for one that was created again with its name: no node needs its item.
    /// Neither its success nor its failure counts then.
    fn facts_of(&self, known: &KnownPod) -> Option<WarmupPod> {
        let mut facts = known.facts.clone()?;
        let owner = known.owner.as_deref().unwrap_or_default();
        if self.uids.get(&facts.warmup).is_some_and(|uid| uid != owner) {
            // A uid is no hash of an action.
            facts.item = WarmupItem::Action(ActionHash::from(owner));
        }
        Some(facts)
    }

    /// Of a first list, ended Pods ended under a former leader.
    fn set(&mut self, found: &WatchedObject<Pod>, is_first: bool, now: Tick) {
        let WatchedObject::Readable(pod) = found else { return };
        let name = found.name();
        let facts = pod_facts::pod_facts(pod).map(|(_, facts)| facts);
        let owner = pod_facts::owner_uid(pod).map(str::to_owned);
        let known = self.pods.get(&name);
        let before = known.and_then(|known| known.facts.as_ref());
        let was_ended = before.is_some_and(|before| ended(before, now).is_some());
        let ended = facts.as_ref().and_then(|facts| ended(facts, now));
        self.ended.extend(ended.filter(|_| !was_ended && !is_first));
        if before != facts.as_ref() || known.and_then(|known| known.owner.as_ref()) != owner.as_ref() {
            self.changed.insert(name.clone());
        }
        self.pods.insert(name, KnownPod { facts, owner, seen: SeenObject::of(&pod.metadata) });
    }

    fn remove(&mut self, name: &ObjectName) {
        if self.pods.remove(name).is_some() {
            self.changed.insert(name.clone());
        }
    }
}

/// Returns how the attempt ended; `None` while it goes on.
fn ended(pod: &WarmupPod, now: Tick) -> Option<EndedAttempt> {
    let (cause, at) = match &pod.state {
        WarmupPodState::Present { at, .. } | WarmupPodState::Done { at } => (None, *at),
        WarmupPodState::Failed { cause, at } => (Some(cause.reason()), *at),
        // The kubelet would repeat the pull. Rouse deletes the Pod instead, and makes another.
        WarmupPodState::Pending { cause: Some(cause) } if cause.is_failure() => (Some(cause.reason()), now),
        WarmupPodState::Pending { .. } | WarmupPodState::Pulling | WarmupPodState::Running => return None,
    };
    Some(EndedAttempt { cause, took: at.since(pod.created) })
}

impl<T> Default for ReadPods<T> {
    fn default() -> Self {
        Self { listed: BTreeSet::new(), by_name: BTreeMap::new() }
    }
}

impl<T: Clone + PartialEq> ReadPods<T> {
    /// Takes a change, and returns what was read before and after from each Pod that reads otherwise now.
    fn apply(&mut self, delta: &Delta<Pod>, read: impl Fn(&Pod) -> Option<T>) -> Vec<T> {
        let mut changed = Vec::new();
        match delta {
            Delta::All { namespace, objects } => {
                let gone = missing(&self.by_name, namespace.as_deref(), objects);
                changed.extend(gone.iter().filter_map(|name| self.by_name.remove(name)));
                objects.iter().for_each(|found| self.set(found, &read, &mut changed));
                self.listed.insert(namespace.clone());
            }
            Delta::Applied(found) => self.set(found, &read, &mut changed),
            Delta::Deleted(name) => changed.extend(self.by_name.remove(name)),
        }
        changed
    }

    fn set(&mut self, found: &WatchedObject<Pod>, read: &impl Fn(&Pod) -> Option<T>, changed: &mut Vec<T>) {
        let WatchedObject::Readable(pod) = found else { return };
        let (name, value) = (found.name(), read(pod));
        let before = match &value {
            Some(value) => self.by_name.insert(name, value.clone()),
            None => self.by_name.remove(&name),
        };
        if before != value {
            changed.extend(before.into_iter().chain(value));
        }
    }
}

impl PullingEngines {
    pub(super) fn apply(&mut self, delta: &Delta<Pod>) {
        self.changed.extend(self.nodes.apply(delta, pod_facts::is_pulling_engine));
    }

    pub(super) fn is_listed(&self, lists: usize) -> bool {
        self.nodes.listed.len() >= lists
    }

    /// Returns the nodes whose number of such Pods may have changed, with the number.
    pub(super) fn take_changed(&mut self) -> Vec<(NodeName, u32)> {
        let changed = std::mem::take(&mut self.changed);
        if changed.is_empty() {
            return Vec::new();
        }
        let mut counts: BTreeMap<NodeName, u32> = changed.into_iter().map(|node| (node, 0)).collect();
        for node in self.nodes.by_name.values() {
            if let Some(count) = counts.get_mut(node) {
                *count += 1;
            }
        }
        counts.into_iter().collect()
    }
}

impl GroupPods {
    pub(super) fn apply(&mut self, delta: &Delta<Pod>) {
        self.changed.extend(self.pods.apply(delta, group_pod).into_iter().map(|(group, _)| group));
    }

    pub(super) fn is_listed(&self, lists: usize) -> bool {
        self.pods.listed.len() >= lists
    }

    /// Returns the Pods of a group.
    pub(super) fn of_group(&self, group: &ObjectName) -> Vec<GroupPod> {
        let own = self.pods.by_name.values().filter(|(of, _)| of == group);
        own.map(|(_, pod)| pod.clone()).collect()
    }

    /// Returns the groups that have changed.
    pub(super) fn take_changed(&mut self) -> BTreeSet<ObjectName> {
        std::mem::take(&mut self.changed)
    }
}

/// Reads a Pod of a group that is bound to a node, has not ended and is not being deleted.
fn group_pod(pod: &Pod) -> Option<(ObjectName, GroupPod)> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if pod.metadata.deletion_timestamp.is_some() || matches!(phase, Some("Succeeded" | "Failed")) {
        return None;
    }
    let labels = pod.labels();
    let group = ObjectName::new(pod.namespace()?, labels.get(GROUP_LABEL)?.as_str());
    let spec = pod.spec.as_ref()?;
    let group_pod = GroupPod {
        node: NodeName::from(spec.node_name.as_deref()?),
        role: labels.get(ROLE_LABEL)?.clone(),
        tolerations: spec.tolerations.clone().unwrap_or_default(),
    };
    Some((group, group_pod))
}
