//! The API server: executes commands, loses some of them, and shows what has changed.

use super::{
    WATCH_TIME,
    disturb::ORPHAN_TIME,
    world::{WarmupWorld, WarmupWorldEvent},
};
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
    warmup::{
        CommandError, NodeKey, RecordedOutcome, WarmPodName, WarmupCommand, WarmupEvent, WarmupPod,
        WarmupPodState,
    },
};

/// Time from the deletion of a Pod until it is gone.
const GRACE: Millis = Millis::secs(1);
/// Time from a Pod's creation until a user deletes it, for the Pods that users delete.
const DELETED_AFTER: (u64, u64) = (100, 20_000);

impl WarmupWorld {
    pub(super) fn arrive(&mut self, epoch: u64, command: WarmupCommand, seen: Option<WarmupPodState>) {
        let faults = self.scenario.faults;
        let is_lost = self.random.chance(faults.lost_write);
        let is_outdated = self.has_changed(&command, seen.as_ref());
        let is_new_pod = matches!(command, WarmupCommand::CreatePod { .. });
        let is_refused = is_new_pod && !is_lost && self.random.chance(faults.refused_pod);
        if !is_lost && !is_outdated && !is_refused {
            self.execute(&command);
        }
        let is_unknown = is_lost || is_outdated || !is_refused && self.random.chance(faults.lost_reply);
        let outcome = if is_refused {
            self.tally.refused_pods += 1;
            let error = CommandError::Refused("exceeded quota: pods=0".to_owned());
            WarmupEvent::Failed { command, error }
        } else if is_unknown {
            WarmupEvent::Failed { command, error: CommandError::Transient }
        } else {
            WarmupEvent::Executed(command)
        };
        self.schedule(Millis(WATCH_TIME.0), WarmupWorldEvent::Observed(epoch, outcome));
    }

    /// A Pod is deleted only in the version that the leader has observed.
    fn has_changed(&self, command: &WarmupCommand, seen: Option<&WarmupPodState>) -> bool {
        let WarmupCommand::DeletePod { name, .. } = command else { return false };
        self.pods.get(name).is_some_and(|pod| Some(&pod.state) != seen)
    }

    fn execute(&mut self, command: &WarmupCommand) {
        match command {
            WarmupCommand::CreatePod { id, node, item, generation, items_hash, attempt } => {
                let name = WarmPodName::from(format!("{id}-{node}-{item}-{generation}-{attempt}"));
                let exists = self.object(id).is_some_and(|object| object.request.is_some());
                if self.pods.contains_key(&name) || !exists {
                    return;
                }
                let pod = WarmupPod {
                    warmup: id.clone(),
                    node: node.clone(),
                    item: item.clone(),
                    generation: *generation,
                    items_hash: *items_hash,
                    attempt: *attempt,
                    created: self.now,
                    terminating: false,
                    state: WarmupPodState::Pending { cause: None },
                };
                *self.created.entry((node.clone(), item.clone())).or_default() += 1;
                self.pods.insert(name.clone(), pod);
                self.count_active(id);
                self.show_pod(&name);
                if !self.nodes.contains_key(node) {
                    self.schedule(ORPHAN_TIME, WarmupWorldEvent::PodIsGone(name, self.now));
                    return;
                }
                self.start_pod(&name);
                if self.random.chance(self.scenario.faults.deleted_pod) {
                    let after = self.between(DELETED_AFTER);
                    self.schedule(after, WarmupWorldEvent::PodIsGone(name, self.now));
                }
            }
            WarmupCommand::DeletePod { name, .. } => {
                let now = self.now;
                let Some(pod) = self.pods.get_mut(name).filter(|pod| !pod.terminating) else { return };
                pod.terminating = true;
                let created = pod.created;
                self.check_deletion(name, now);
                self.show_pod(name);
                self.schedule(GRACE, WarmupWorldEvent::PodIsGone(name.clone(), created));
            }
            WarmupCommand::SetWarm { node, set } => {
                if let Some(facts) = self.nodes.get_mut(node) {
                    facts.labels_warm.insert(set.clone());
                }
                self.show_node(node);
            }
            WarmupCommand::RemoveWarm { node, set } => {
                if let Some(facts) = self.nodes.get_mut(node) {
                    facts.labels_warm.remove(set);
                }
                self.show_node(node);
            }
            WarmupCommand::DeleteWarmup { id } => {
                if let Some(object) = self.object_mut(id) {
                    object.request = None;
                }
                self.observe(WarmupEvent::WarmupDeleted(id.clone()));
                let pods =
                    self.pods.iter().filter(|(_, pod)| pod.warmup == *id).map(|(name, _)| name.clone());
                for name in pods.collect::<Vec<_>>() {
                    let created = self.pods.get(&name).map_or(self.now, |pod| pod.created);
                    self.schedule(GRACE, WarmupWorldEvent::PodIsGone(name, created));
                }
            }
        }
    }

    /// A Pod that shows a success is deleted after its node's outcome is stored, and not before.
    ///
    /// A Pod that an edit has made superfluous is deleted at any time. Of a node that replaced another, a new leader
    /// cannot know to which of the two the success belongs while the record is that of the former.
    fn check_deletion(&mut self, name: &WarmPodName, now: Tick) {
        let Some(pod) = self.pods.get(name) else { return };
        let Some(object) = self.object(&pod.warmup) else { return };
        let is_wanted = object.items.contains(&pod.item) && !object.was_just_edited(now);
        if !is_wanted || self.replaced.contains(&pod.node) {
            return;
        }
        let recorded = object.stored.record.get(NodeKey::new(&pod.node));
        let has_ended = recorded.is_some_and(|node| node.outcome != RecordedOutcome::Retried);
        let is_success = matches!(pod.state, WarmupPodState::Present { .. } | WarmupPodState::Done { .. });
        if is_success && !has_ended && object.stored.completion.is_none() {
            self.violations.push(format!("{name} was deleted at {now}, and nothing has its success"));
        }
    }

    pub(super) fn remove_pod(&mut self, name: &WarmPodName, created: Tick) {
        if self.pods.get(name).is_some_and(|pod| pod.created == created) {
            self.pods.remove(name);
            self.observe(WarmupEvent::Pod { name: name.clone(), pod: None });
        }
    }

    pub(super) fn show_pod(&mut self, name: &WarmPodName) {
        if let Some(pod) = self.pods.get(name).cloned() {
            self.observe(WarmupEvent::Pod { name: name.clone(), pod: Some(pod) });
        }
    }

    pub(super) fn show_node(&mut self, name: &NodeName) {
        if let Some(facts) = self.nodes.get(name).cloned() {
            self.observe(WarmupEvent::Node { name: name.clone(), facts: Some(facts) });
        }
    }
}
