//! The nodes, as far as Warmups are concerned.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher},
};

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use rouse::{
    pairing::ids::NodeName,
    units::Bytes,
    warmup::{ImageName, WarmSet, WarmupNodeFacts},
};

use crate::{
    crd::AcceleratorNode,
    label,
    warmup::{node_facts, targets::CandidateNode},
    watch::{Delta, WatchedObject},
};

/// The nodes, with those that have changed since they were last taken.
#[derive(Debug, Default)]
pub(super) struct NodeIndex {
    is_listed: bool,
    /// The value of the labels of this installation.
    installation: String,
    nodes: BTreeMap<NodeName, WarmupNode>,
    candidates: BTreeMap<NodeName, CandidateNode>,
    reserved: BTreeMap<NodeName, Bytes>,
    /// The images of all Warmups.
    wanted: BTreeMap<ImageKey, BTreeSet<ImageName>>,
    /// The sets whose labels a node has.
    warm: BTreeMap<NodeName, BTreeSet<WarmSet>>,
    warm_counts: BTreeMap<WarmSet, u32>,
    counts_changed: bool,
    changed: BTreeSet<NodeName>,
    candidate_changes: BTreeMap<NodeName, CandidateChange>,
}

/// What is kept of a Node. Every gateway observes all nodes, because it may lead at any time.
#[derive(Debug)]
struct WarmupNode {
    version: Option<String>,
    /// Without images: which are wanted changes with the Warmups.
    facts: WarmupNodeFacts,
    /// All images of the node, sorted.
    images: Box<[ImageKey]>,
    mounts_images: bool,
}

/// Stands for the canonical name of an image, in a few bytes. Nodes have dozens of images, and each has several names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ImageKey(u64);

/// What has changed about a node that targets are chosen from. Each value includes the former ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CandidateChange {
    /// Whether it is better than other nodes.
    Order,
    Labels,
    /// The node has come or gone.
    Existence,
}

impl NodeIndex {
    pub(super) fn new(installation: String) -> Self {
        Self { installation, ..Self::default() }
    }

    pub(super) fn apply(&mut self, delta: &Delta<Node>) {
        match delta {
            Delta::All { objects, .. } => {
                let listed: BTreeSet<String> = objects.iter().map(|found| found.name().name).collect();
                let gone = self.nodes.keys().filter(|name| !listed.contains(name.as_str()));
                for name in gone.cloned().collect::<Vec<_>>() {
                    self.remove(&name);
                }
                objects.iter().for_each(|found| self.set(found));
                self.is_listed = true;
            }
            Delta::Applied(found) => self.set(found),
            Delta::Deleted(name) => self.remove(&NodeName::from(name.name.as_str())),
        }
    }

    pub(super) fn apply_accelerators(&mut self, delta: &Delta<AcceleratorNode>) {
        match delta {
            Delta::All { objects, .. } => {
                let listed: BTreeSet<String> = objects.iter().map(|found| found.name().name).collect();
                let gone = self.reserved.keys().filter(|name| !listed.contains(name.as_str()));
                for name in gone.cloned().collect::<Vec<_>>() {
                    self.set_reserved(name, None);
                }
                objects.iter().for_each(|found| self.accelerators_applied(found));
            }
            Delta::Applied(found) => self.accelerators_applied(found),
            Delta::Deleted(name) => self.set_reserved(NodeName::from(name.name.as_str()), None),
        }
    }

    pub(super) const fn is_listed(&self) -> bool {
        self.is_listed
    }

    /// Returns the nodes that targets are chosen from.
    pub(super) const fn candidates(&self) -> &BTreeMap<NodeName, CandidateNode> {
        &self.candidates
    }

    /// Returns what has changed about these nodes since this was last asked.
    pub(super) fn take_candidate_changes(&mut self) -> BTreeMap<NodeName, CandidateChange> {
        std::mem::take(&mut self.candidate_changes)
    }

    /// Returns the version of the node that was observed last.
    pub(super) fn version(&self, name: &NodeName) -> Option<String> {
        self.nodes.get(name)?.version.clone()
    }

    /// Whether the node can mount an image as a volume.
    pub(super) fn mounts_images(&self, name: &NodeName) -> bool {
        self.nodes.get(name).is_some_and(|node| node.mounts_images)
    }

    /// Returns whether the numbers of warm nodes have changed since this was last asked.
    pub(super) fn take_counts_changed(&mut self) -> bool {
        std::mem::take(&mut self.counts_changed)
    }

    /// Returns the number of nodes with the label of each set.
    pub(super) const fn warm_counts(&self) -> &BTreeMap<WarmSet, u32> {
        &self.warm_counts
    }

    /// Sets the images that nodes are searched for, as the Warmups write them, by their canonical names.
    pub(super) fn set_wanted(&mut self, wanted: BTreeMap<String, BTreeSet<ImageName>>) {
        let wanted = wanted.into_iter().map(|(name, images)| (ImageKey::of(&name), images)).collect();
        if self.wanted != wanted {
            self.wanted = wanted;
            self.mark_all();
        }
    }

    /// Marks all nodes as changed.
    pub(super) fn mark_all(&mut self) {
        self.changed = self.nodes.keys().cloned().collect();
    }

    /// Forgets which nodes have changed, while no leader asks for them.
    pub(super) fn forget_changes(&mut self) {
        self.changed.clear();
        self.candidate_changes.clear();
    }

    /// Returns the nodes that have changed; `None` for one that does not exist any more.
    pub(super) fn take_changed(&mut self) -> Vec<(NodeName, Option<WarmupNodeFacts>)> {
        let changed = std::mem::take(&mut self.changed);
        let mut facts = Vec::with_capacity(changed.len());
        for name in changed {
            let found = self.nodes.get(&name).map(|node| node.facts(&self.wanted));
            let labels = found.as_ref().map(|facts| facts.labels_warm.clone()).unwrap_or_default();
            self.count_warm(&name, labels);
            facts.push((name, found));
        }
        facts
    }

    fn count_warm(&mut self, name: &NodeName, sets: BTreeSet<WarmSet>) {
        let is_same = match self.warm.get(name) {
            Some(before) => *before == sets,
            None => sets.is_empty(),
        };
        if is_same {
            return;
        }
        self.counts_changed = true;
        for set in self.warm.remove(name).into_iter().flatten() {
            if let Some(count) = self.warm_counts.get_mut(&set) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.warm_counts.remove(&set);
                }
            }
        }
        for set in &sets {
            *self.warm_counts.entry(set.clone()).or_default() += 1;
        }
        if !sets.is_empty() {
            self.warm.insert(name.clone(), sets);
        }
    }

    fn set(&mut self, found: &WatchedObject<Node>) {
        let WatchedObject::Readable(node) = found else { return };
        let name = NodeName::from(node.name_any());
        let observed = WarmupNode::of(node, &self.installation);
        let labels = node.labels().iter().filter(|(key, _)| !key.starts_with(label::WARM_PREFIX));
        let candidate = CandidateNode {
            labels: labels.map(|(key, value)| (key.clone(), value.clone())).collect(),
            is_schedulable: observed.facts.ready && !observed.facts.cordoned,
            reserved: self.reserved.get(&name).copied().unwrap_or_default(),
        };
        // Kubelets update their nodes' statuses all the time, and mostly in fields that are not read.
        let change = match self.candidates.get(&name) {
            Some(before) if *before == candidate => None,
            Some(before) if before.labels == candidate.labels => Some(CandidateChange::Order),
            Some(_) => Some(CandidateChange::Labels),
            None => Some(CandidateChange::Existence),
        };
        if let Some(change) = change {
            self.note_candidate(&name, change);
            self.candidates.insert(name.clone(), candidate);
        }
        if self.nodes.get(&name).is_none_or(|before| !before.is_same(&observed)) {
            self.changed.insert(name.clone());
        }
        self.nodes.insert(name, observed);
    }

    fn remove(&mut self, name: &NodeName) {
        if self.nodes.remove(name).is_some() {
            self.candidates.remove(name);
            self.changed.insert(name.clone());
            self.note_candidate(name, CandidateChange::Existence);
        }
    }

    fn note_candidate(&mut self, name: &NodeName, change: CandidateChange) {
        let noted = self.candidate_changes.entry(name.clone()).or_insert(change);
        *noted = change.max(*noted);
    }

    fn accelerators_applied(&mut self, found: &WatchedObject<AcceleratorNode>) {
        let WatchedObject::Readable(node) = found else { return };
        let reserved = node.status.as_ref().and_then(|status| status.reserved.as_ref()?.bytes().ok());
        self.set_reserved(NodeName::from(node.name_any()), Some(reserved.unwrap_or_default()));
    }

    /// Takes the memory that is reserved on a node; `None` if it has no accelerators any more.
    fn set_reserved(&mut self, name: NodeName, reserved: Option<Bytes>) {
        let now = reserved.unwrap_or_default();
        if let Some(candidate) = self.candidates.get_mut(&name).filter(|node| node.reserved != now) {
            candidate.reserved = now;
            self.note_candidate(&name, CandidateChange::Order);
        }
        match reserved {
            Some(reserved) => drop(self.reserved.insert(name, reserved)),
            None => drop(self.reserved.remove(&name)),
        }
    }
}

impl WarmupNode {
    fn of(node: &Node, installation: &str) -> Self {
        let listed = node.status.iter().flat_map(|status| status.images.iter().flatten());
        let names = listed.flat_map(|image| image.names.iter().flatten());
        let keys = names.filter_map(|name| Some(ImageKey::of(&node_facts::canonical(name)?)));
        let images: BTreeSet<ImageKey> = keys.collect();
        Self {
            version: node.resource_version(),
            facts: node_facts::node_facts(node, installation),
            images: images.into_iter().collect(),
            mounts_images: node_facts::mounts_images(node),
        }
    }

    /// Whether both are the same for the decisions.
    fn is_same(&self, other: &Self) -> bool {
        self.facts == other.facts && self.images == other.images
    }

    /// Returns the facts with those of the wanted images that the node has.
    fn facts(&self, wanted: &BTreeMap<ImageKey, BTreeSet<ImageName>>) -> WarmupNodeFacts {
        let found = wanted.iter().filter(|(key, _)| self.images.binary_search(key).is_ok());
        let images = found.flat_map(|(_, images)| images).cloned().collect();
        WarmupNodeFacts { images, ..self.facts.clone() }
    }
}

impl ImageKey {
    fn of(canonical: &str) -> Self {
        Self(BuildHasherDefault::<DefaultHasher>::default().hash_one(canonical))
    }
}
