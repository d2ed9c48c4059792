//! The controller of Warmups: pulls images and runs actions on nodes before the Pods that need them start.
//!
//! ```text
//!   Warmups, Pods, nodes, resolved objects ──▶ index ──▶ rouse::warmup::Warmups ──▶ commands ──▶ execute
//!                                                          ▲            │                         │
//!                                                          │            └──▶ status, Events       │
//!                                                          └───────────── outcomes ◀──────────────┘
//! ```
//!
//! Only the leader acts. The status of each Warmup is its memory, so a new leader continues where the former one was.
//! For models with `warmup: auto`, the Warmups themselves are written here, too ([`auto`]).

mod auto;
mod events;
mod execute;
mod index;
mod keys;
mod node_facts;
mod pod_facts;
mod pod_template;
mod status;
mod status_writes;
mod targets;

use std::sync::Arc;

use futures_util::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Client, ResourceExt as _};
use rouse::{
    units::Tick,
    warmup::{CommandError, WarmupCommand, WarmupEvent, WarmupPlan, Warmups},
};
use rouse_net::lease::TickClock;
use tokio::sync::watch;

use self::{
    auto::OwnedWarmups,
    events::WarmupEvents,
    execute::{WarmupExecutor, WarmupWrite},
    index::{WarmupIndex, object_name},
    pod_template::WarmupPodParts,
    status_writes::StatusWrites,
};
use crate::{
    cache::{Subscription, TermDelta},
    crd::{AcceleratorNode, Warmup, ledger::ObjectName},
    index::Resolved,
    kit::{self, Component},
    metrics::{WarmupMetrics, WarmupNodeGauges},
    recorder::EventSender,
    watch::Delta,
    writer::{ObjectWriter, fence::SeenObject},
};

pub(crate) use self::{
    execute::WarmupOutcome,
    index::{GROUP_LABEL, IndexSettings},
    node_facts::{NODE_DISK_PRESSURE_CONDITION, has_condition, slim_system},
    pod_facts::is_engine,
};

/// Label of the Pods of Warmups.
pub(crate) const WARMUP_LABEL: &str = keys::WARMUP;

/// What the controller needs.
pub(crate) struct WarmupParts {
    pub client: Client,
    pub writer: ObjectWriter,
    pub clock: TickClock,
    pub events: EventSender,
    pub metrics: WarmupMetrics,
    pub settings: IndexSettings,
    /// Whether images are mounted as volumes, on the nodes that can.
    pub image_volumes: bool,
    /// Nodes at a time that the Warmup of a model with `warmup: auto` warms.
    pub auto_parallelism: u32,
}

/// What feeds the controller. All but nodes and resolved objects are watched while leading only.
pub(crate) struct WarmupWatches {
    pub warmups: Subscription<Warmup>,
    pub warmup_pods: Subscription<Pod>,
    pub engine_pods: Subscription<Pod>,
    /// The Pods of RoleBasedGroups.
    pub group_pods: Subscription<Pod>,
    pub nodes: Subscription<Node>,
    pub accelerator_nodes: Subscription<AcceleratorNode>,
    pub resolved: watch::Receiver<Option<Arc<Resolved>>>,
}

/// A change of what the controller observes.
pub(crate) enum WarmupInput {
    Warmups(TermDelta<Warmup>),
    WarmupPods(TermDelta<Pod>),
    EnginePods(TermDelta<Pod>),
    GroupPods(TermDelta<Pod>),
    Nodes(Delta<Node>),
    AcceleratorNodes(Delta<AcceleratorNode>),
    Resolved(Arc<Resolved>),
}

/// Carries out Warmups.
pub(crate) struct WarmupController {
    executor: WarmupExecutor,
    clock: TickClock,
    metrics: WarmupMetrics,
    events: WarmupEvents,
    index: WarmupIndex,
    warmups: Warmups,
    owned: OwnedWarmups,
    statuses: StatusWrites,
    /// Image of the stub, if images are mounted as volumes.
    mounted_by: Option<String>,
    /// Epoch of the term, while this gateway leads.
    term: Option<u64>,
    /// Everything has been observed once in this term.
    is_listed: bool,
    /// Objects have changed since the Warmups of models were last looked at.
    objects_changed: bool,
    /// The API server has refused a label of a node in this term.
    label_refused: bool,
}

impl WarmupWatches {
    /// Returns everything that the controller observes as one stream.
    pub(crate) fn inputs(self) -> impl Stream<Item = WarmupInput> {
        let Self { warmups, warmup_pods, engine_pods, group_pods, nodes, accelerator_nodes, resolved } = self;
        let resolved = stream::unfold(resolved, async |mut resolved| {
            resolved.changed().await.ok()?;
            let objects = resolved.borrow_and_update().clone().unwrap_or_default();
            Some((WarmupInput::Resolved(objects), resolved))
        });
        stream::select_all([
            warmups.map(WarmupInput::Warmups).boxed(),
            warmup_pods.map(WarmupInput::WarmupPods).boxed(),
            engine_pods.map(WarmupInput::EnginePods).boxed(),
            group_pods.map(WarmupInput::GroupPods).boxed(),
            nodes.map(|TermDelta { delta, .. }| WarmupInput::Nodes(delta)).boxed(),
            accelerator_nodes.map(|TermDelta { delta, .. }| WarmupInput::AcceleratorNodes(delta)).boxed(),
            resolved.boxed(),
        ])
    }
}

impl WarmupController {
    pub(crate) fn new(parts: WarmupParts) -> Self {
        let WarmupParts { client, writer, clock, events, metrics, settings, image_volumes, auto_parallelism } =
            parts;
        let installation = settings.installation.clone();
        Self {
            executor: WarmupExecutor { client, writer, installation },
            clock,
            metrics,
            events: WarmupEvents::new(events),
            mounted_by: image_volumes.then(|| settings.stub_image.clone()),
            index: WarmupIndex::new(settings),
            warmups: Warmups::new(),
            owned: OwnedWarmups::new(auto_parallelism),
            statuses: StatusWrites::default(),
            term: None,
            is_listed: false,
            objects_changed: false,
            label_refused: false,
        }
    }

    /// Passes everything that has changed to the decisions.
    fn observe(&mut self, now: Tick) {
        for event in self.index.take_events() {
            if let WarmupEvent::WarmupDeleted(id) = &event {
                let name = object_name(id.as_str());
                self.metrics.remove_warmup(&name);
                self.events.forget(&name);
                self.statuses.forget(&name);
            }
            self.warmups.on(event, now);
        }
        for ended in self.index.take_ended() {
            self.metrics.attempt_ended(ended.cause, ended.took);
        }
        if !std::mem::replace(&mut self.is_listed, true) {
            self.warmups.on(WarmupEvent::Listed, now);
        }
    }

    /// Plans, and starts a task for each command.
    fn plan(&mut self, epoch: u64, now: Tick, tasks: &mut kit::Tasks<WarmupOutcome>) {
        let WarmupPlan { commands, reports } = self.warmups.plan(now);
        self.warmups.issued(&commands, now);
        for command in commands {
            if let WarmupCommand::DeleteWarmup { id } = &command {
                let name = object_name(id.as_str());
                let uid = self.index.warmup(&name).and_then(|known| known.object.uid());
                self.events.send_expired(&name, &uid.unwrap_or_default());
            }
            let write = self.write_of(&command, epoch);
            tasks.spawn(self.executor.clone().execute(command, write, epoch));
        }
        for (id, report) in reports {
            let name = object_name(id.as_str());
            let Some(known) = self.index.warmup(&name) else { continue };
            let stored = status::progress(&name, known.object.status.as_ref());
            self.events.send_new(&name, &known.object.uid().unwrap_or_default(), &stored, &report);
            self.metrics.set_warmup(&name, WarmupNodeGauges::of(&report));
            self.statuses.set(&name, report);
        }
    }

    /// Finds out what a command writes.
    fn write_of(&self, command: &WarmupCommand, epoch: u64) -> WarmupWrite {
        match command {
            WarmupCommand::CreatePod { id, .. } => {
                let name = object_name(id.as_str());
                let pod = self.new_pod(&name, command, epoch);
                let namespace = name.namespace;
                pod.map_or(WarmupWrite::Outdated, |pod| WarmupWrite::Create { pod: Box::new(pod), namespace })
            }
            WarmupCommand::DeletePod { name, .. } => {
                let name = object_name(name.as_str());
                match self.index.seen_pod(&name) {
                    Some(seen) => WarmupWrite::DeletePod { seen: seen.clone(), name },
                    None => WarmupWrite::Nothing,
                }
            }
            WarmupCommand::SetWarm { node, set } | WarmupCommand::RemoveWarm { node, set } => {
                let is_warm = matches!(command, WarmupCommand::SetWarm { .. });
                let Some(version) = self.index.node_version(node) else { return WarmupWrite::Nothing };
                let (node, set) = (node.clone(), set.clone());
                WarmupWrite::Label { node, set, is_warm, version: Some(version) }
            }
            WarmupCommand::DeleteWarmup { id } => {
                let name = object_name(id.as_str());
                match self.index.warmup(&name) {
                    Some(known) => {
                        WarmupWrite::DeleteWarmup { name, seen: SeenObject::of(&known.object.metadata) }
                    }
                    None => WarmupWrite::Nothing,
                }
            }
        }
    }

    /// Builds a new Pod; `None` if the Warmup has changed since it was decided.
    fn new_pod(&self, warmup: &ObjectName, command: &WarmupCommand, epoch: u64) -> Option<serde_json::Value> {
        let WarmupCommand::CreatePod { node, item, generation, items_hash, attempt, .. } = command else {
            return None;
        };
        let known = self.index.warmup(warmup)?;
        let accepted = known.accepted.as_ref().ok()?;
        if accepted.request.generation != *generation {
            return None;
        }
        let uid = known.object.metadata.uid.as_deref()?;
        let actions = known.targets.as_ref()?.actions.get(node)?;
        pod_template::pod(&WarmupPodParts {
            warmup,
            uid,
            node,
            item,
            generation: *generation,
            items_hash: *items_hash,
            attempt: *attempt,
            epoch,
            actions,
            tolerations: &known.tolerations(),
            mounted_by: self.mounted_by.as_deref().filter(|_| self.index.mounts_images(node)),
        })
    }

    /// Starts the writes of statuses that are due.
    fn write_statuses(&mut self, epoch: u64, now: Tick, tasks: &mut kit::Tasks<WarmupOutcome>) {
        let index = &self.index;
        let version = |name: &ObjectName| index.warmup(name)?.object.resource_version();
        for name in self.statuses.due(version, now) {
            let Some(known) = self.index.warmup(&name) else {
                self.statuses.forget(&name);
                continue;
            };
            let version = known.object.resource_version();
            let Some(report) = self.statuses.begin(&name) else { continue };
            let status = status::status(&known.object, known.target(), &report, now);
            if known.object.status.as_ref() == Some(&status) {
                self.statuses.skip(&name);
                continue;
            }
            let object = status::object(&name, &known.object, &status);
            tasks.spawn(self.executor.clone().write_status(name, version, object, epoch));
        }
    }

    /// Starts the writes of models' Warmups that are due.
    fn write_owned(&mut self, epoch: u64, now: Tick, tasks: &mut kit::Tasks<WarmupOutcome>) {
        let is_due = self.owned.next_deadline().is_some_and(|at| at <= now);
        if !std::mem::take(&mut self.objects_changed) && !is_due {
            return;
        }
        let Some(resolved) = self.index.resolved().cloned() else { return };
        for change in self.owned.due(&resolved, self.index.warmups(), now) {
            tasks.spawn(self.executor.clone().write_owned(change, epoch));
        }
    }

    fn export_warm_sets(&mut self) {
        if self.index.take_warm_sets_changed() {
            self.metrics.set_sets(self.index.warm_sets());
        }
    }

    /// Takes the outcome of a command.
    fn command_finished(&mut self, command: WarmupCommand, result: Result<(), CommandError>, now: Tick) {
        let is_label = matches!(command, WarmupCommand::SetWarm { .. } | WarmupCommand::RemoveWarm { .. });
        let event = match result {
            Ok(()) => WarmupEvent::Executed(command),
            Err(error) => {
                if let CommandError::Refused(message) = &error
                    && is_label
                    && !std::mem::replace(&mut self.label_refused, true)
                {
                    tracing::warn!(
                        error = message,
                        "this gateway may not label warm nodes, so scheduling does not prefer them: apply \
                         charts/rouse/rbac/warm-labels.yaml"
                    );
                }
                WarmupEvent::Failed { command, error }
            }
        };
        self.warmups.on(event, now);
    }

    /// Whether a change of this term was observed. Changes of former terms may still be on their way.
    fn is_current<K>(&self, change: &TermDelta<K>) -> bool {
        self.term == Some(change.epoch)
    }
}

impl Component for WarmupController {
    type Input = WarmupInput;
    type Outcome = WarmupOutcome;

    fn apply(&mut self, input: WarmupInput, _tasks: &mut kit::Tasks<WarmupOutcome>) {
        match input {
            WarmupInput::Warmups(change) if self.is_current(&change) => {
                self.objects_changed |= self.index.apply_warmups(&change.delta);
            }
            WarmupInput::WarmupPods(change) if self.is_current(&change) => {
                self.index.apply_warmup_pods(&change.delta, self.clock.now());
            }
            WarmupInput::EnginePods(change) if self.is_current(&change) => {
                self.index.apply_engine_pods(&change.delta);
            }
            WarmupInput::GroupPods(change) if self.is_current(&change) => {
                self.index.apply_group_pods(&change.delta);
            }
            WarmupInput::Nodes(delta) => self.index.apply_nodes(&delta, self.term.is_some()),
            WarmupInput::AcceleratorNodes(delta) => self.index.apply_accelerator_nodes(&delta),
            WarmupInput::Resolved(resolved) => {
                self.index.set_resolved(resolved);
                self.objects_changed = true;
            }
            WarmupInput::Warmups(_)
            | WarmupInput::WarmupPods(_)
            | WarmupInput::EnginePods(_)
            | WarmupInput::GroupPods(_) => {}
        }
    }

    fn finished(&mut self, outcome: WarmupOutcome, _tasks: &mut kit::Tasks<WarmupOutcome>) {
        let now = self.clock.now();
        match outcome {
            WarmupOutcome::Command { command, result } => self.command_finished(command, result, now),
            WarmupOutcome::Status { name, version, result } => {
                self.statuses.finished(&name, version, &result, now);
            }
            WarmupOutcome::Owned => {}
        }
    }

    fn term_changed(&mut self, epoch: Option<u64>, _tasks: &mut kit::Tasks<WarmupOutcome>) {
        let now = self.clock.now();
        self.term = epoch;
        self.index.begin_term();
        self.owned.clear();
        self.statuses.clear();
        self.events.clear();
        (self.is_listed, self.objects_changed, self.label_refused) = (false, true, false);
        self.metrics.reset();
        let event = if epoch.is_some() { WarmupEvent::LeadershipGained } else { WarmupEvent::LeadershipLost };
        self.warmups.on(event, now);
    }

    fn next_deadline(&self) -> Option<Tick> {
        if self.term.is_none() || !self.is_listed {
            return None;
        }
        let all = [self.warmups.next_deadline(), self.owned.next_deadline(), self.statuses.next_deadline()];
        all.into_iter().flatten().min()
    }

    fn decide(&mut self, tasks: &mut kit::Tasks<WarmupOutcome>) {
        let Some(epoch) = self.term.filter(|_| self.index.is_complete()) else { return };
        let now = self.clock.now();
        self.observe(now);
        self.plan(epoch, now, tasks);
        self.write_statuses(epoch, now, tasks);
        self.write_owned(epoch, now, tasks);
        self.export_warm_sets();
    }
}
