//! A simulated cluster that runs the real [`Pairing`].
//!
//! The cluster contains Pods and nodes, and a kubelet that hands an accelerator on as soon as a Pod has ended, even if
//! another process still holds memory there. Owners create a new requester for each one that goes. In some clusters
//! accelerators have several slots, and the gateway wants engines awake and asleep at random times. Stubs, launchers and
//! engines are slow, fail, hang, or execute a command and lose the reply. The watch lags or breaks, and the meter lags.
//! Nodes are cordoned, cut off or lost. A new controller can replace the present one while the last calls of the old
//! one are still in flight.
//!
//! After each step an independent audit (`audit`), which knows what every process really holds, checks the controller.

mod actions;
mod audit;
mod builds;
mod evictions;
mod execute;
mod faults;
mod kubelet;
mod pods;
mod scenario;
mod wants;
mod watch;

use std::collections::{BTreeMap, BTreeSet};

pub use actions::{ClusterAction, TimedClusterAction};
pub use faults::ClusterFault;
use pods::{ProviderKey, SimulatedNode, SimulatedProvider, SimulatedRequester, VanishedProcess};
pub use scenario::{ClusterFaultRates, ClusterScenario, SimulatedOwner};

use super::{event_queue::EventQueue, random::SplitMix64};
use crate::{
    pairing::{
        Pairing, PairingPlan,
        command::PairingCommand,
        event::{LeaderEpoch, PairingEvent, TemplateStatus},
        ids::{EngineFingerprint, NodeName, PairingEngineId, ProviderId, RequesterId, Uid},
    },
    units::{Generation, Millis, Tick},
};

/// The cluster, its controller, and the records about both.
#[derive(Clone, Debug)]
pub struct SimulatedCluster {
    scenario: ClusterScenario,
    now: Tick,
    random: SplitMix64,
    nodes: BTreeMap<NodeName, SimulatedNode>,
    requesters: BTreeMap<RequesterId, SimulatedRequester>,
    providers: BTreeMap<ProviderKey, SimulatedProvider>,
    vanished_processes: Vec<VanishedProcess>,
    /// Pods whose objects vanished before their containers had ended.
    vanished_pods: BTreeSet<Uid>,
    event_queue: EventQueue<ClusterEvent>,
    last_number: u64,

    // The controller
    pairing: Pairing,
    epoch: LeaderEpoch,
    /// The previous leader, only paused and still believing that it leads, with its epoch.
    paused_leader: Option<(LeaderEpoch, Pairing)>,
    /// The controller has received the complete initial list.
    listed: bool,
    reasons: BTreeMap<(NodeName, RequesterId), String>,
    watch: watch::SimulatedWatch,
    /// Template statuses set so far. Every new leader receives them.
    template_statuses: BTreeMap<EngineFingerprint, TemplateStatus>,
    /// How often each LauncherConfig has been edited.
    launcher_config_revisions: Vec<u64>,

    quiescing: bool,
    audit: audit::ClusterAudit,
    violations: Vec<String>,
    tally: BTreeMap<&'static str, u64>,
    transcript: Option<Vec<String>>,
}

#[derive(Clone, Debug)]
enum ClusterEvent {
    /// The watch delivers an event to the controller of this epoch.
    DeliverWatchEvent(LeaderEpoch, PairingEvent),
    /// A command reaches its target.
    CommandArrives(PairingCommand),
    /// The operation that a command started is over.
    CommandFinishes(PairingCommand),
    StubStarts(RequesterId),
    StubEnds(RequesterId),
    PodRuns(ProviderKey, Uid),
    PodIsReady(ProviderKey, Uid),
    PodEnds(ProviderKey, Uid),
    VanishedProcessEnds(u64),
    /// The control plane records a node's kubelet as silent if it still is.
    CheckKubeletSilence(NodeName),
    ProcessLoaded(ProviderKey, PairingEngineId, Generation),
    /// The owner with this number checks whether its requester exists.
    EnsureRequester(usize),
    /// The owner with this number starts or stops wanting a requester.
    ToggleOwner(usize),
    ReadMeters,
    /// The gateway wants some engine awake or asleep.
    RandomWant,
    /// The gateway repeats to a new leader what it wants of this requester's engine.
    RepeatWant(RequesterId),
    Relist,
    LeaderStarts,
    /// The previous leader resumes where it was paused.
    PausedLeaderResumes,
    HealNode(NodeName),
    DeleteLostPods(NodeName),
    RandomFault,
    Action(TimedClusterAction),
}

/// Broken invariants, with the seed that reproduces them.
#[derive(Clone, Debug)]
pub struct ClusterInvariantViolation {
    pub seed: u64,
    pub at: Tick,
    pub messages: Vec<String>,
}

impl SimulatedCluster {
    #[must_use]
    pub fn new(plot: ClusterScenario) -> Self {
        let start = Tick(1_000_000_000);
        let mut cluster = Self {
            now: start,
            random: SplitMix64::new(plot.seed ^ 0xd0a1_90d5),
            nodes: plot.build_nodes(),
            requesters: BTreeMap::new(),
            providers: BTreeMap::new(),
            vanished_processes: Vec::new(),
            vanished_pods: BTreeSet::new(),
            event_queue: EventQueue::default(),
            last_number: 0,
            pairing: Pairing::new(plot.settings),
            epoch: LeaderEpoch(1),
            paused_leader: None,
            listed: false,
            reasons: BTreeMap::new(),
            watch: watch::SimulatedWatch::default(),
            template_statuses: BTreeMap::new(),
            launcher_config_revisions: vec![0; plot.launcher_max_engines.len()],
            quiescing: false,
            audit: audit::ClusterAudit::default(),
            violations: Vec::new(),
            tally: BTreeMap::new(),
            transcript: None,
            scenario: plot,
        };
        cluster.begin();
        cluster
    }

    /// Records a transcript of events and commands. Call it before the first step.
    #[must_use]
    pub fn with_transcript(mut self) -> Self {
        self.transcript = Some(Vec::new());
        self
    }

    #[must_use]
    pub fn transcript(&self) -> String {
        self.transcript.as_deref().unwrap_or_default().join("\n")
    }

    #[must_use]
    pub const fn tally(&self) -> &BTreeMap<&'static str, u64> {
        &self.tally
    }

    #[must_use]
    pub const fn pairing(&self) -> &Pairing {
        &self.pairing
    }

    #[must_use]
    pub const fn now(&self) -> Tick {
        self.now
    }

    /// Runs for this long with faults, then without, until the cluster has come to rest.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn run(&mut self, lasts: Millis) -> Result<(), ClusterInvariantViolation> {
        self.run_until(self.now + lasts)?;
        self.stop_faults();
        self.run_until(self.now + self.scenario.quiescence_timeout())?;
        self.check_quiescent();
        self.take_violations()
    }

    /// # Errors
    /// The first broken invariant.
    pub fn run_until(&mut self, end: Tick) -> Result<(), ClusterInvariantViolation> {
        while let Some(next) = self.next_moment().filter(|next| *next <= end) {
            self.now = next.max(self.now);
            let mut has_event = false;
            while let Some(event) = self.event_queue.pop_due(self.now) {
                has_event |= self.handle_event(event);
            }
            if has_event || self.pairing.next_deadline().is_some_and(|at| at <= self.now) {
                self.turn();
            }
            self.check_invariants();
            self.take_violations()?;
        }
        self.now = end;
        Ok(())
    }

    fn take_violations(&mut self) -> Result<(), ClusterInvariantViolation> {
        if self.violations.is_empty() {
            return Ok(());
        }
        Err(ClusterInvariantViolation {
            seed: self.scenario.seed,
            at: self.now,
            messages: std::mem::take(&mut self.violations),
        })
    }

    fn next_moment(&self) -> Option<Tick> {
        let deadline = self.pairing.next_deadline().filter(|_| self.listed);
        self.event_queue.next_at().into_iter().chain(deadline).min()
    }

    /// Runs one turn of the controller.
    fn turn(&mut self) {
        let plan = self.pairing.plan(self.now);
        self.check_wants(&plan);
        self.pairing.issued(&plan, self.now);
        self.check_turn(&plan);
        let PairingPlan { commands, reasons, planned_nodes: looked } = plan;
        self.reasons.retain(|(node, _), _| !looked.contains(node));
        self.reasons.extend(reasons);
        for command in commands {
            self.record_line(|| format!("  {}: {}", command.node, command.action));
            self.send(command);
        }
    }

    fn handle_event(&mut self, event: ClusterEvent) -> bool {
        match event {
            ClusterEvent::DeliverWatchEvent(epoch, event) => return self.deliver(epoch, &event),
            ClusterEvent::CommandArrives(command) => self.command_arrives(command),
            ClusterEvent::CommandFinishes(command) => self.command_finishes(command),
            ClusterEvent::StubStarts(requester) => self.stub_starts(&requester),
            ClusterEvent::StubEnds(requester) => self.stub_ends(&requester),
            ClusterEvent::PodRuns(key, uid) => self.pod_runs(&key, &uid),
            ClusterEvent::PodIsReady(key, uid) => self.pod_is_ready(&key, &uid),
            ClusterEvent::PodEnds(key, uid) => self.pod_ends(&key, &uid),
            ClusterEvent::VanishedProcessEnds(number) => self.vanished_process_ends(number),
            ClusterEvent::CheckKubeletSilence(node) => self.emit_kubelet_silence(&node),
            ClusterEvent::ProcessLoaded(key, engine, generation) => {
                self.process_loaded(&key, &engine, generation)
            }
            ClusterEvent::EnsureRequester(owner) => self.ensure_requester(owner),
            ClusterEvent::ToggleOwner(owner) => self.toggle_owner(owner),
            ClusterEvent::ReadMeters => self.read_meters(),
            ClusterEvent::RandomWant => self.random_want(),
            ClusterEvent::RepeatWant(requester) => self.repeat_want(&requester),
            ClusterEvent::Relist => self.relist(),
            ClusterEvent::LeaderStarts => self.leader_starts(),
            ClusterEvent::PausedLeaderResumes => self.resume_paused_leader(),
            ClusterEvent::HealNode(node) => self.heal_node(&node),
            ClusterEvent::DeleteLostPods(node) => self.delete_lost_pods(&node),
            ClusterEvent::RandomFault => self.random_fault(),
            ClusterEvent::Action(action) => self.apply_action(action),
        }
        false
    }

    fn schedule(&mut self, after: Millis, event: ClusterEvent) {
        self.event_queue.schedule(self.now + after, event);
    }

    fn next_uid(&mut self, kind: &str) -> String {
        self.last_number += 1;
        format!("{kind}-{}", self.last_number)
    }

    fn random_duration(&mut self, (low, high): (u64, u64)) -> Millis {
        Millis(self.random.between(low, high))
    }

    fn chance(&mut self, probability: f64) -> bool {
        !self.quiescing && self.random.chance(probability)
    }

    fn count(&mut self, counter: &'static str) {
        *self.tally.entry(counter).or_default() += 1;
    }

    fn record_line(&mut self, line: impl FnOnce() -> String) {
        let at = self.now;
        if let Some(transcript) = &mut self.transcript {
            transcript.push(format!("{at} {}", line()));
        }
    }

    fn record_violation(&mut self, message: String) {
        self.violations.push(message);
    }

    fn is_cut_off(&self, node: &NodeName) -> bool {
        self.nodes.get(node).is_none_or(|machine| machine.cut_off)
    }

    fn provider_key(node: &NodeName, provider: &ProviderId) -> ProviderKey {
        (node.clone(), provider.clone())
    }

    /// All running processes with their node and engine.
    fn processes(&self) -> impl Iterator<Item = (&NodeName, &PairingEngineId, &pods::PodProcess)> {
        self.providers.iter().flat_map(|((node, _), provider)| {
            provider.processes.iter().map(move |(engine, process)| (node, engine, process))
        })
    }

    /// Processes of vanished Pods that the present leader can know of.
    fn known_vanished_processes(&self) -> impl Iterator<Item = &VanishedProcess> {
        self.vanished_processes.iter().filter(|vanished| vanished.observed_by == Some(self.epoch))
    }

    fn node_names(&self) -> BTreeSet<NodeName> {
        self.nodes.keys().cloned().collect()
    }
}

impl std::fmt::Display for ClusterInvariantViolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "seed {} violates an invariant at {}:", self.seed, self.at)?;
        for message in &self.messages {
            writeln!(f, "  {message}")?;
        }
        Ok(())
    }
}
