//! The world: its state, its clock, and the checks after each step.

use std::collections::{BTreeMap, BTreeSet};

use super::{WarmupRunTally, WarmupScenario, object::WarmupObject};
use crate::{
    pairing::ids::NodeName,
    sim::{event_queue::EventQueue, random::SplitMix64},
    units::{Millis, Tick},
    warmup::{
        ImageName, NodeItems, WarmPodName, WarmupCommand, WarmupEvent, WarmupId, WarmupItem, WarmupNodeFacts,
        WarmupPlan, WarmupPod, WarmupPodState, WarmupProgress, WarmupReport, Warmups,
    },
};

pub(super) const START: Tick = Tick(1_000_000_000);

/// A cluster with one Warmup or two.
#[derive(Clone, Debug)]
pub struct WarmupWorld {
    pub(super) scenario: WarmupScenario,
    pub(super) now: Tick,
    pub(super) random: SplitMix64,
    pub(super) queue: EventQueue<WarmupWorldEvent>,

    // The API server
    pub(super) first: WarmupObject,
    pub(super) second: Option<WarmupObject>,
    pub(super) nodes: BTreeMap<NodeName, WarmupNodeFacts>,
    /// Names of nodes of which one was deleted.
    pub(super) replaced: BTreeSet<NodeName>,
    pub(super) pods: BTreeMap<WarmPodName, WarmupPod>,

    // Kubelets and the registry
    pub(super) images: BTreeSet<(NodeName, ImageName)>,
    pub(super) missing_images: BTreeSet<ImageName>,
    pub(super) pulls: BTreeMap<(NodeName, ImageName), u32>,

    // The leader
    pub(super) warmups: Warmups,
    /// The states of Pods that the leader has observed last.
    pub(super) observed: BTreeMap<WarmPodName, WarmupPodState>,
    pub(super) epoch: u64,

    pub(super) commands_by_node: BTreeMap<NodeName, u32>,
    pub(super) created: BTreeMap<(NodeName, WarmupItem), u32>,
    pub(super) tally: WarmupRunTally,
    pub(super) violations: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) enum WarmupWorldEvent {
    /// The leader of this epoch observes something.
    Observed(u64, WarmupEvent),
    /// A command of the leader of this epoch arrives, with the state of its Pod that the leader had observed.
    Arrives(u64, WarmupCommand, Option<WarmupPodState>),
    PodMoves(WarmPodName, Tick),
    PodIsGone(WarmPodName, Tick),
    Uncordoned(NodeName),
    NodeIsDeleted(NodeName),
    NodeIsCreated(NodeName),
    Edited,
    Resumed,
    /// The leader of this epoch writes the status of this Warmup.
    WriteStatus(u64, WarmupId),
    LeaderBegins,
}

impl WarmupWorld {
    #[must_use]
    pub fn new(scenario: WarmupScenario) -> Self {
        let names = (0..scenario.images).map(|n| format!("registry.example/engine-{n}:1"));
        let images: BTreeSet<ImageName> = names.map(ImageName::from).collect();
        let mut random = SplitMix64::new(scenario.seed ^ 0x3a91_77c5);
        let missing_images =
            images.iter().filter(|_| random.chance(scenario.faults.missing_image)).cloned().collect();
        let action = scenario.has_action.then(|| "action-1".into());
        let names: BTreeSet<NodeName> =
            (0..scenario.nodes).map(|n| NodeName::from(format!("node-{n:05}"))).collect();
        let nodes = names.iter().map(|name| (name.clone(), Self::new_node(name, START))).collect();
        let object = |id: &str, age: u64, items: NodeItems, names: BTreeSet<NodeName>| {
            WarmupObject::new(id, age, scenario.limits.clone(), items, names, scenario.has_names)
        };
        let second = scenario.has_overlap.then(|| {
            let half = names.iter().skip(names.len() / 2).cloned().collect();
            object("default/overlap", 0, NodeItems { images: images.clone(), action: None }, half)
        });
        let first = object("default/sim", 1_000, NodeItems { images, action }, names);
        let mut world = Self {
            scenario,
            now: START,
            random,
            queue: EventQueue::default(),
            first,
            second,
            nodes,
            replaced: BTreeSet::new(),
            pods: BTreeMap::new(),
            images: BTreeSet::new(),
            missing_images,
            pulls: BTreeMap::new(),
            warmups: Warmups::new(),
            observed: BTreeMap::new(),
            epoch: 0,
            commands_by_node: BTreeMap::new(),
            created: BTreeMap::new(),
            tally: WarmupRunTally::default(),
            violations: Vec::new(),
        };
        world.schedule_edits();
        world.begin_term();
        world
    }

    /// Runs until nothing more happens or this much time has passed. The function plans, and may measure.
    ///
    /// # Errors
    /// Returns the broken invariants.
    pub fn run(
        &mut self,
        limit: Millis,
        plan: &mut dyn FnMut(&mut Warmups, Tick) -> WarmupPlan,
    ) -> Result<WarmupRunTally, Vec<String>> {
        let end = self.now + limit;
        self.turn(plan);
        while let Some(next) = self.next_at().filter(|at| *at <= end) {
            self.now = self.now.max(next);
            while let Some(event) = self.queue.pop_due(self.now) {
                self.happen(event);
            }
            self.turn(plan);
        }
        self.now = end;
        self.finish_tally();
        if self.violations.is_empty() { Ok(self.tally.clone()) } else { Err(self.violations.clone()) }
    }

    /// Pauses or resumes the Warmup.
    pub fn set_paused(&mut self, is_paused: bool) {
        self.first.edit(self.now, |request| request.paused = is_paused);
        self.observe_warmup(&self.first.id.clone());
    }

    /// The Warmups, those that were deleted included.
    pub(super) fn objects(&self) -> impl Iterator<Item = &WarmupObject> {
        std::iter::once(&self.first).chain(&self.second)
    }

    pub(super) fn object(&self, id: &WarmupId) -> Option<&WarmupObject> {
        self.objects().find(|object| object.id == *id)
    }

    pub(super) fn object_mut(&mut self, id: &WarmupId) -> Option<&mut WarmupObject> {
        std::iter::once(&mut self.first).chain(&mut self.second).find(|object| object.id == *id)
    }

    /// What the status of the Warmup stores.
    #[must_use]
    pub fn stored(&self) -> &WarmupProgress {
        &self.first.stored
    }

    /// The last report of the present leader.
    #[must_use]
    pub fn report(&self) -> Option<&WarmupReport> {
        self.first.report.as_deref()
    }

    /// Nodes that have an image, as far as they have pulled it.
    #[must_use]
    pub fn nodes_with(&self, image: &ImageName) -> usize {
        self.images.iter().filter(|(_, known)| known == image).count()
    }

    /// The images of every node.
    pub fn wanted_images(&self) -> impl Iterator<Item = &ImageName> {
        self.first.items.images.iter()
    }

    #[must_use]
    pub fn pod_count(&self) -> usize {
        self.pods.len()
    }

    /// Nodes that carry the label.
    #[must_use]
    pub fn labelled_nodes(&self) -> usize {
        self.nodes.values().filter(|facts| !facts.labels_warm.is_empty()).count()
    }

    fn next_at(&self) -> Option<Tick> {
        let deadline = self.warmups.next_deadline();
        self.queue.next_at().into_iter().chain(deadline).min()
    }

    fn happen(&mut self, event: WarmupWorldEvent) {
        match event {
            WarmupWorldEvent::Observed(epoch, event) if epoch == self.epoch => self.deliver(event),
            WarmupWorldEvent::Observed(..) => {}
            WarmupWorldEvent::Arrives(epoch, command, seen) => self.arrive(epoch, command, seen),
            WarmupWorldEvent::PodMoves(name, created) => self.move_pod(&name, created),
            WarmupWorldEvent::PodIsGone(name, created) => self.remove_pod(&name, created),
            WarmupWorldEvent::Uncordoned(node) => self.set_cordoned(&node, false),
            WarmupWorldEvent::NodeIsDeleted(node) => self.delete_node(&node),
            WarmupWorldEvent::NodeIsCreated(node) => self.create_node(&node),
            WarmupWorldEvent::Edited => self.edit(),
            WarmupWorldEvent::Resumed => self.set_paused(false),
            WarmupWorldEvent::WriteStatus(epoch, id) => self.write_status(epoch, &id),
            WarmupWorldEvent::LeaderBegins => self.begin_term(),
        }
    }

    pub(super) fn schedule(&mut self, after: Millis, event: WarmupWorldEvent) {
        self.queue.schedule(self.now + after, event);
    }

    pub(super) fn between(&mut self, (low, high): (u64, u64)) -> Millis {
        Millis(self.random.between(low, high))
    }

    /// Counts the nodes with unfinished Pods of the Warmup. Nothing is pulled on a node that does not exist.
    pub(super) fn count_active(&mut self, id: &WarmupId) {
        let is_active =
            |pod: &&WarmupPod| pod.warmup == *id && pod.is_unfinished() && self.nodes.contains_key(&pod.node);
        let unfinished = self.pods.values().filter(is_active);
        let active = unfinished.map(|pod| &pod.node).collect::<BTreeSet<_>>().len();
        let active = u32::try_from(active).unwrap_or(u32::MAX);
        self.tally.max_active = self.tally.max_active.max(active);
        if self.scenario.limits.parallelism.is_some_and(|limit| active > limit) {
            self.violations.push(format!("{active} nodes are active at {}", self.now));
        }
    }

    fn finish_tally(&mut self) {
        let most = |counts: Option<&u32>| counts.copied().unwrap_or_default();
        self.tally.max_commands_per_node = most(self.commands_by_node.values().max());
        self.tally.max_pods_per_item = most(self.created.values().max());
        self.tally.max_pulls_per_image = most(self.pulls.values().max());
        self.tally.is_deleted = self.first.request.is_none();
        let of_second = self.second.as_ref().and_then(|object| object.report.as_ref());
        self.tally.overlap_succeeded = of_second.map_or(0, |report| report.succeeded);
        if let Some(report) = &self.first.report {
            self.tally.desired = report.desired;
            (self.tally.succeeded, self.tally.failed) = (report.succeeded, report.failed);
            let ended = report.progress.completion.map(|at| (report.progress.phase, at));
            self.tally.ended = ended.or(self.tally.ended);
        }
    }
}
