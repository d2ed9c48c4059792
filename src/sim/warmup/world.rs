//! The world: its state, its clock, and the checks after each step.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{WarmupRunTally, WarmupScenario};
use crate::{
    pairing::ids::NodeName,
    sim::{event_queue::EventQueue, random::SplitMix64},
    units::{Millis, Tick},
    warmup::{
        ImageName, NodeItems, WarmPodName, WarmupCommand, WarmupEvent, WarmupId, WarmupItem, WarmupNodeFacts,
        WarmupPlan, WarmupPod, WarmupPodState, WarmupProgress, WarmupReport, WarmupRequest, Warmups,
    },
};

const START: Tick = Tick(1_000_000_000);

/// A cluster with one Warmup.
#[derive(Clone, Debug)]
pub struct WarmupWorld {
    pub(super) scenario: WarmupScenario,
    pub(super) id: WarmupId,
    pub(super) now: Tick,
    pub(super) random: SplitMix64,
    pub(super) queue: EventQueue<WarmupWorldEvent>,

    // The API server
    pub(super) request: Option<Arc<WarmupRequest>>,
    pub(super) stored: Arc<WarmupProgress>,
    pub(super) nodes: BTreeMap<NodeName, WarmupNodeFacts>,
    pub(super) items: Arc<NodeItems>,
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
    pub(super) report: Option<Arc<WarmupReport>>,
    pub(super) last_status_at: Option<Tick>,
    pub(super) is_status_due: bool,

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
    /// The leader of this epoch writes the status.
    WriteStatus(u64),
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
        let facts = WarmupNodeFacts { ready: true, ..WarmupNodeFacts::default() };
        let nodes =
            (0..scenario.nodes).map(|n| (NodeName::from(format!("node-{n:05}")), facts.clone())).collect();
        let request = WarmupRequest {
            generation: 1,
            created: START,
            paused: false,
            limits: scenario.limits.clone(),
            keep_warm: false,
            set: "0123456789abcdef".into(),
            tolerations: Vec::new(),
        };
        let mut world = Self {
            scenario,
            id: "default/sim".into(),
            now: START,
            random,
            queue: EventQueue::default(),
            request: Some(Arc::new(request)),
            stored: Arc::default(),
            nodes,
            items: Arc::new(NodeItems { images, action }),
            pods: BTreeMap::new(),
            images: BTreeSet::new(),
            missing_images,
            pulls: BTreeMap::new(),
            warmups: Warmups::new(),
            observed: BTreeMap::new(),
            epoch: 0,
            report: None,
            last_status_at: None,
            is_status_due: false,
            commands_by_node: BTreeMap::new(),
            created: BTreeMap::new(),
            tally: WarmupRunTally::default(),
            violations: Vec::new(),
        };
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
        let Some(request) = &self.request else { return };
        let generation = request.generation + 1;
        let edited = WarmupRequest { paused: is_paused, generation, ..WarmupRequest::clone(request) };
        self.request = Some(Arc::new(edited));
        self.observe_warmup();
    }

    /// What the status of the Warmup stores.
    #[must_use]
    pub fn stored(&self) -> &WarmupProgress {
        &self.stored
    }

    /// The last report of the present leader.
    #[must_use]
    pub fn report(&self) -> Option<&WarmupReport> {
        self.report.as_deref()
    }

    /// Nodes that have an image, as far as they have pulled it.
    #[must_use]
    pub fn nodes_with(&self, image: &ImageName) -> usize {
        self.images.iter().filter(|(_, known)| known == image).count()
    }

    /// The images of every node.
    pub fn wanted_images(&self) -> impl Iterator<Item = &ImageName> {
        self.items.images.iter()
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
            WarmupWorldEvent::WriteStatus(epoch) => self.write_status(epoch),
            WarmupWorldEvent::LeaderBegins => self.begin_term(),
        }
    }

    pub(super) fn schedule(&mut self, after: Millis, event: WarmupWorldEvent) {
        self.queue.schedule(self.now + after, event);
    }

    pub(super) fn between(&mut self, (low, high): (u64, u64)) -> Millis {
        Millis(self.random.between(low, high))
    }

    pub(super) fn count_active(&mut self) {
        let unfinished = self.pods.values().filter(|pod| pod.is_unfinished());
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
        self.tally.is_deleted = self.request.is_none();
        if let Some(report) = &self.report {
            (self.tally.succeeded, self.tally.failed) = (report.succeeded, report.failed);
            let ended = report.progress.completion.map(|at| (report.progress.phase, at));
            self.tally.ended = ended.or(self.tally.ended);
        }
    }
}
