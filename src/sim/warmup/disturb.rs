//! What users and the cloud do meanwhile: edits of the Warmup, and nodes that are deleted and created again.

use std::sync::Arc;

use super::{
    object::WarmupObject,
    world::{WarmupWorld, WarmupWorldEvent},
};
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
    warmup::{ImageName, NodeItems, NodeUidKey, WarmPodName, WarmupEvent, WarmupNodeFacts},
};

/// Time until a Pod is collected whose node does not exist.
pub(super) const ORPHAN_TIME: Millis = Millis::secs(2);
/// Time from the beginning until the edits.
const EDITED_AFTER: (u64, u64) = (1_000, 1_800_000);
/// Duration of a pause.
const PAUSED_FOR: (u64, u64) = (1_000, 600_000);
/// The pauses after a failed attempt that edits set.
const RETRY_DELAY: (u64, u64) = (5_000, 20_000);
/// Time from the first pull on a node that is deleted until its deletion.
const NODE_DELETED_AFTER: (u64, u64) = (1_000, 90_000);
/// Time until another node has the name. A target may be missing for 600 s.
const NODE_RETURNS_AFTER: (u64, u64) = (30_000, 300_000);

impl WarmupWorld {
    pub(super) fn schedule_edits(&mut self) {
        for _ in 0..self.scenario.edits {
            let after = self.between(EDITED_AFTER);
            self.schedule(after, WarmupWorldEvent::Edited);
        }
    }

    /// Edits the first Warmup: another image, another pause between attempts, or a pause for a while.
    pub(super) fn edit(&mut self) {
        let Some(request) = &self.first.request else { return };
        let generation = request.generation + 1;
        self.tally.edits += 1;
        match self.random.between(0, 2) {
            0 => {
                let NodeItems { images, action } = &*self.first.items;
                let newest = ImageName::from(format!("registry.example/engine-0:{generation}"));
                let images = images.iter().skip(1).cloned().chain([newest]).collect();
                self.first.items = Arc::new(NodeItems { images, action: action.clone() });
                self.first.edit(self.now, |_| {});
            }
            1 => {
                let retry_delay = self.between(RETRY_DELAY);
                self.first.edit(self.now, |request| request.limits.retry_delay = retry_delay);
            }
            _ => {
                self.first.edit(self.now, |request| request.paused = true);
                let after = self.between(PAUSED_FOR);
                self.schedule(after, WarmupWorldEvent::Resumed);
            }
        }
        let targets = self.first.targets(&self.nodes);
        self.observe(WarmupEvent::Targets { id: self.first.id.clone(), targets });
        self.observe_warmup(&self.first.id.clone());
    }

    /// A node of another uid for each creation.
    pub(super) fn new_node(name: &NodeName, created: Tick) -> WarmupNodeFacts {
        let uid = NodeUidKey::new(&format!("{name}-{}", created.0));
        WarmupNodeFacts { uid, ready: true, ..WarmupNodeFacts::default() }
    }

    pub(super) fn maybe_delete_node(&mut self, node: &NodeName) {
        if self.random.chance(self.scenario.faults.deleted_node) {
            let after = self.between(NODE_DELETED_AFTER);
            self.schedule(after, WarmupWorldEvent::NodeIsDeleted(node.clone()));
        }
    }

    /// Deletes a node with its images and its Pods. Another of its name comes later.
    pub(super) fn delete_node(&mut self, name: &NodeName) {
        if self.nodes.remove(name).is_none() {
            return;
        }
        self.tally.deleted_nodes += 1;
        self.replaced.insert(name.clone());
        self.images.retain(|(node, _)| node != name);
        self.pulls.retain(|(node, _), _| node != name);
        self.observe_targets();
        self.observe(WarmupEvent::Node { name: name.clone(), facts: None });
        let pods = self.pods.iter().filter(|(_, pod)| pod.node == *name).map(|(pod, _)| pod.clone());
        for pod in pods.collect::<Vec<WarmPodName>>() {
            self.pods.remove(&pod);
            self.observe(WarmupEvent::Pod { name: pod, pod: None });
        }
        let after = self.between(NODE_RETURNS_AFTER);
        self.schedule(after, WarmupWorldEvent::NodeIsCreated(name.clone()));
    }

    pub(super) fn create_node(&mut self, name: &NodeName) {
        self.nodes.insert(name.clone(), Self::new_node(name, self.now));
        self.observe_targets();
        self.show_node(name);
    }

    /// The watch delivers the targets of all Warmups, of which nodes have come or gone.
    fn observe_targets(&mut self) {
        let of = |object: &WarmupObject| WarmupEvent::Targets {
            id: object.id.clone(),
            targets: object.targets(&self.nodes),
        };
        let events: Vec<WarmupEvent> = self.objects().map(of).collect();
        events.into_iter().for_each(|event| self.observe(event));
    }

    /// Labelled nodes that lack an image, which scheduling would prefer for nothing.
    #[must_use]
    pub fn labelled_without_images(&self) -> usize {
        let lacks =
            |name: &NodeName, image: &ImageName| !self.images.contains(&(name.clone(), image.clone()));
        let is_wrong = |name: &NodeName, facts: &WarmupNodeFacts| {
            self.objects().any(|object| {
                let is_labelled =
                    object.request.as_ref().is_some_and(|request| facts.labels_warm.contains(&request.set));
                is_labelled && object.items.images.iter().any(|image| lacks(name, image))
            })
        };
        self.nodes.iter().filter(|(name, facts)| is_wrong(name, facts)).count()
    }
}
