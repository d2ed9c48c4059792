//! The controller of shared devices: what the leader does about their slots.
//!
//! ```text
//!   DeviceConfigurations, DeviceInstances,
//!   nodes, rejected Pods ──▶ index ──▶ rouse::slots::SlotsController ──▶ commands ──▶ execute
//!                              │           ▲                                             │
//!                              ▼           └───────────────── outcomes ◀─────────────────┘
//!                  statuses of configurations
//! ```
//!
//! The agents of the nodes claim and free slots, and need no leader for that. The leader frees the slots of lost nodes
//! and of those without an agent, follows changes of the capacity, deletes instances that no node needs, and deletes
//! Pods that got no slot.
//!
//! An agent has no Lease and no heartbeat: its kubelet reports whether it is there. While a device plugin runs, the
//! capacity of its Node has all slots of the plugin's devices, and some minutes after the plugin's end it has none.
//!
//! Rejected Pods are watched in the gateway's namespaces only, where it may delete Pods. The Pods of a node whose slots
//! no agent frees are listed in all namespaces ([`node_pods`]), because each may still use a slot.

mod events;
mod execute;
mod index;
mod node_pods;
mod pod_facts;
mod status;
mod write_pacer;

use std::collections::BTreeSet;

use futures_util::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Client, ResourceExt as _};
use rouse::{
    pairing::ids::NodeName,
    slots::{
        ConfigurationName, InstanceName, RejectedPod, SlotsCommand, SlotsController, SlotsEvent,
        SlotsSettings,
    },
    units::Tick,
};
use rouse_net::lease::TickClock;
use serde_json::json;

use self::{
    events::{EventDetails, SlotsEvents},
    execute::{SlotsExecutor, SlotsWrite},
    index::SlotsIndex,
    node_pods::NodePodLists,
    write_pacer::WritePacer,
};
use crate::{
    cache::{Subscription, TermDelta},
    crd::{DeviceConfiguration, DeviceInstance, ledger::ObjectName},
    kit::{self, Component},
    metrics::DeviceSlotMetrics,
    recorder::EventSender,
    slot_patch::{layout_patch, lost_node_patch},
    watch::Delta,
    writer::{Error, ObjectWriter, fence::SeenObject},
};

pub(crate) use self::{
    execute::SlotsOutcome,
    pod_facts::{is_rejected, slot_resource},
};

/// Field selector of Pods that may have been rejected.
pub(crate) const FAILED_PODS: &str = "status.phase=Failed";

/// What the controller needs.
pub(crate) struct DeviceSlotsParts {
    pub client: Client,
    pub writer: ObjectWriter,
    pub clock: TickClock,
    pub events: EventSender,
    pub metrics: DeviceSlotMetrics,
    pub settings: SlotsSettings,
    /// Number of initial lists of Pods.
    pub expected_lists: usize,
}

/// What feeds the controller. All but nodes are watched while leading only.
pub(crate) struct DeviceSlotsWatches {
    pub configurations: Subscription<DeviceConfiguration>,
    pub instances: Subscription<DeviceInstance>,
    pub rejected_pods: Subscription<Pod>,
    pub nodes: Subscription<Node>,
}

/// A change of what the controller observes.
pub(crate) enum DeviceSlotsInput {
    Configurations(TermDelta<DeviceConfiguration>),
    Instances(TermDelta<DeviceInstance>),
    RejectedPods(TermDelta<Pod>),
    Nodes(Delta<Node>),
}

/// Executes the leader's part in sharing devices.
pub(crate) struct DeviceSlotsController {
    executor: SlotsExecutor,
    clock: TickClock,
    metrics: DeviceSlotMetrics,
    events: SlotsEvents,
    index: SlotsIndex,
    slots: SlotsController,
    node_pods: NodePodLists,
    statuses: WritePacer<ConfigurationName>,
    capacities: WritePacer<InstanceName>,
    /// Configurations whose status may differ from what the object has.
    stale_statuses: BTreeSet<ConfigurationName>,
    /// Instances whose spec may have another capacity than their configuration.
    stale_capacities: BTreeSet<InstanceName>,
    /// Epoch of the term, while this gateway leads.
    term: Option<u64>,
    /// Everything has been observed once in this term.
    is_listed: bool,
    /// The API server has refused a list of a node's Pods in this term.
    lists_refused: bool,
}

impl DeviceSlotsWatches {
    /// Returns everything that the controller observes as one stream.
    pub(crate) fn inputs(self) -> impl Stream<Item = DeviceSlotsInput> {
        let Self { configurations, instances, rejected_pods, nodes } = self;
        stream::select_all([
            configurations.map(DeviceSlotsInput::Configurations).boxed(),
            instances.map(DeviceSlotsInput::Instances).boxed(),
            rejected_pods.map(DeviceSlotsInput::RejectedPods).boxed(),
            nodes.map(|TermDelta { delta, .. }| DeviceSlotsInput::Nodes(delta)).boxed(),
        ])
    }
}

impl DeviceSlotsController {
    pub(crate) fn new(parts: DeviceSlotsParts) -> Self {
        let DeviceSlotsParts { client, writer, clock, events, metrics, settings, expected_lists } = parts;
        Self {
            executor: SlotsExecutor::new(client, writer),
            clock,
            metrics,
            events: SlotsEvents::new(events),
            index: SlotsIndex::new(expected_lists),
            slots: SlotsController::new(settings),
            node_pods: NodePodLists::new(settings.node_timeout),
            statuses: WritePacer::default(),
            capacities: WritePacer::default(),
            stale_statuses: BTreeSet::new(),
            stale_capacities: BTreeSet::new(),
            term: None,
            is_listed: false,
            lists_refused: false,
        }
    }

    /// Passes everything that has changed to the decisions, and exports the sums that have changed.
    fn observe(&mut self, now: Tick) {
        for event in self.index.take_events() {
            self.slots.on(event, now);
        }
        if !std::mem::replace(&mut self.is_listed, true) {
            self.slots.on(SlotsEvent::Listed, now);
        }
        for name in self.index.take_changed_configurations() {
            self.metrics.set(&name, self.index.totals(&name));
            self.stale_statuses.insert(name);
        }
        self.stale_capacities.extend(self.index.take_changed_instances());
    }

    /// Plans, and starts a task for each command.
    fn plan(&mut self, epoch: u64, now: Tick, tasks: &mut kit::Tasks<SlotsOutcome>) {
        let commands = self.slots.plan(now);
        self.slots.issued(&commands, now);
        for command in commands {
            let (details, write) = self.write_of(&command);
            tasks.spawn(self.executor.clone().execute(command, details, write, epoch));
        }
    }

    /// Returns the write of a command, and the details of its Event.
    fn write_of(&self, command: &SlotsCommand) -> (EventDetails, SlotsWrite) {
        let write = match command {
            SlotsCommand::DeletePod { pod } => self.pod_deletion(pod),
            SlotsCommand::FreeNode { instance, version, .. }
            | SlotsCommand::SetLayout { instance, version, .. }
            | SlotsCommand::DeleteInstance { instance, version, .. } => {
                self.instance_write(command, instance, version)
            }
        };
        write.unwrap_or_else(|| (EventDetails::default(), SlotsWrite::Outdated))
    }

    fn pod_deletion(&self, pod: &RejectedPod) -> Option<(EventDetails, SlotsWrite)> {
        let (seen, message) = self.index.rejected_pod(pod)?;
        let name = ObjectName::new(pod.namespace.as_str(), pod.name.as_str());
        let details = EventDetails { rejection: message.to_owned(), ..EventDetails::default() };
        Some((details, SlotsWrite::DeletePod { pod: name, seen: seen.clone() }))
    }

    /// Builds the write to an instance; `None` if the instance has another version by now.
    fn instance_write(
        &self,
        command: &SlotsCommand,
        instance: &InstanceName,
        version: &str,
    ) -> Option<(EventDetails, SlotsWrite)> {
        let known = self.index.instance(instance)?;
        let object = &*known.object;
        if object.metadata.resource_version.as_deref() != Some(version) {
            return None;
        }
        let name = instance.to_string();
        let write = match command {
            SlotsCommand::FreeNode { node, cause, changes, .. } => SlotsWrite::FreeNode {
                instance: instance.clone(),
                configuration: known.configuration(),
                node: node.clone(),
                cause: *cause,
                operations: lost_node_patch(object, node, changes),
            },
            SlotsCommand::SetLayout { changes, .. } => {
                SlotsWrite::Layout { instance: name, operations: layout_patch(object, changes) }
            }
            SlotsCommand::DeleteInstance { .. } => {
                SlotsWrite::DeleteInstance { instance: name, seen: SeenObject::of(&object.metadata) }
            }
            SlotsCommand::DeletePod { .. } => return None,
        };
        Some((EventDetails { uid: object.uid().unwrap_or_default(), ..EventDetails::default() }, write))
    }

    /// Starts the lists of nodes' Pods that are due.
    fn list_pods(&mut self, now: Tick, tasks: &mut kit::Tasks<SlotsOutcome>) {
        for node in self.node_pods.begin_due(self.index.unserved_nodes(), now) {
            tasks.spawn(self.executor.clone().list_pods(node));
        }
    }

    /// Starts the writes of configurations' statuses that are due.
    fn write_statuses(&mut self, epoch: u64, now: Tick, tasks: &mut kit::Tasks<SlotsOutcome>) {
        for name in std::mem::take(&mut self.stale_statuses) {
            let Some(known) = self.index.configuration(&name) else {
                self.statuses.forget(&name);
                continue;
            };
            let preferred = self.index.preferred_to(&name);
            let totals = self.index.totals(&name);
            let status = status::status(&known.object, known.refused.as_ref(), preferred, totals, now);
            if known.object.status.as_ref() == Some(&status) {
                continue;
            }
            let version = known.object.resource_version();
            if self.statuses.begin(&name, version.as_deref(), now) {
                let object = status::object(&name, &known.object, &status);
                tasks.spawn(self.executor.clone().write_status(name, object, epoch));
            } else {
                self.stale_statuses.insert(name);
            }
        }
    }

    /// Starts the writes of instances' capacities that are due.
    fn write_capacities(&mut self, epoch: u64, now: Tick, tasks: &mut kit::Tasks<SlotsOutcome>) {
        for name in std::mem::take(&mut self.stale_capacities) {
            let Some(known) = self.index.instance(&name) else {
                self.capacities.forget(&name);
                continue;
            };
            let configuration = self.index.configuration(&known.configuration());
            let accepted = configuration.filter(|configuration| configuration.refused.is_none());
            let Some(capacity) = accepted.map(|configuration| configuration.object.spec.capacity) else {
                continue;
            };
            if known.object.spec.capacity == capacity {
                continue;
            }
            let version = known.object.resource_version();
            if self.capacities.begin(&name, version.as_deref(), now) {
                let metadata = json!({"resourceVersion": version, "uid": known.object.uid()});
                let patch = json!({"metadata": metadata, "spec": {"capacity": capacity}});
                tasks.spawn(self.executor.clone().write_capacity(name, patch, epoch));
            } else {
                self.stale_capacities.insert(name);
            }
        }
    }

    /// Takes the outcome of a command.
    fn command_finished(
        &mut self,
        command: SlotsCommand,
        details: &EventDetails,
        result: &Result<(), Error>,
        now: Tick,
    ) {
        let event = match result {
            Ok(()) => {
                self.events.send_executed(&command, details);
                if matches!(command, SlotsCommand::DeletePod { .. }) {
                    self.metrics.rejected_pod_deleted();
                }
                SlotsEvent::Executed(command)
            }
            Err(error) => {
                let is_refused = matches!(error, Error::Invalid(_));
                if is_refused {
                    tracing::warn!(?command, %error, "the API server refuses a write about slots");
                }
                SlotsEvent::Failed { command, is_refused }
            }
        };
        self.slots.on(event, now);
    }

    /// Takes the end of a list of a node's Pods.
    fn pods_listed(&mut self, node: NodeName, requested: Result<BTreeSet<String>, Error>, now: Tick) {
        self.node_pods.finished(&node, self.index.is_ready(&node), now);
        match requested {
            Ok(requested) => self.slots.on(SlotsEvent::NodePods { node, requested }, now),
            Err(error @ Error::Invalid(_)) if !std::mem::replace(&mut self.lists_refused, true) => {
                tracing::warn!(
                    %node,
                    %error,
                    "this gateway may not list the Pods of all namespaces, so the slots of a node that is not ready or \
                     has no agent stay claimed until its Node object is deleted: apply charts/rouse/rbac/slots.yaml"
                );
            }
            Err(error) => tracing::debug!(%node, %error, "the Pods of a node cannot be listed, retrying"),
        }
    }

    /// Whether a change of this term was observed. Changes of former terms may still be on their way.
    fn is_current<K>(&self, change: &TermDelta<K>) -> bool {
        self.term == Some(change.epoch)
    }
}

impl Component for DeviceSlotsController {
    type Input = DeviceSlotsInput;
    type Outcome = SlotsOutcome;

    fn apply(&mut self, input: DeviceSlotsInput, _tasks: &mut kit::Tasks<SlotsOutcome>) {
        match input {
            DeviceSlotsInput::Configurations(change) if self.is_current(&change) => {
                self.index.apply_configurations(&change.delta);
            }
            DeviceSlotsInput::Instances(change) if self.is_current(&change) => {
                self.index.apply_instances(&change.delta);
            }
            DeviceSlotsInput::RejectedPods(change) if self.is_current(&change) => {
                self.index.apply_rejected_pods(&change.delta);
            }
            DeviceSlotsInput::Nodes(delta) => self.index.apply_nodes(&delta),
            DeviceSlotsInput::Configurations(_)
            | DeviceSlotsInput::Instances(_)
            | DeviceSlotsInput::RejectedPods(_) => {}
        }
    }

    fn finished(&mut self, outcome: SlotsOutcome, _tasks: &mut kit::Tasks<SlotsOutcome>) {
        let now = self.clock.now();
        match outcome {
            SlotsOutcome::Command { command, details, result } => {
                self.command_finished(command, &details, &result, now);
            }
            SlotsOutcome::NodePods { node, requested } => self.pods_listed(node, requested, now),
            SlotsOutcome::Status { configuration, result } => {
                if self.statuses.finished(&configuration, &result, now) {
                    self.stale_statuses.insert(configuration);
                }
            }
            SlotsOutcome::Capacity { instance, result } => {
                if self.capacities.finished(&instance, &result, now) {
                    self.stale_capacities.insert(instance);
                }
            }
        }
    }

    fn term_changed(&mut self, epoch: Option<u64>, _tasks: &mut kit::Tasks<SlotsOutcome>) {
        let now = self.clock.now();
        self.term = epoch;
        self.index.begin_term(epoch.is_some());
        self.node_pods.clear();
        self.statuses.clear();
        self.capacities.clear();
        self.stale_statuses.clear();
        self.stale_capacities.clear();
        (self.is_listed, self.lists_refused) = (false, false);
        self.metrics.reset();
        let event = if epoch.is_some() { SlotsEvent::LeadershipGained } else { SlotsEvent::LeadershipLost };
        self.slots.on(event, now);
    }

    fn next_deadline(&self) -> Option<Tick> {
        if self.term.is_none() || !self.is_listed {
            return None;
        }
        let all = [
            self.slots.next_deadline(),
            self.node_pods.next_deadline(),
            self.statuses.next_deadline(),
            self.capacities.next_deadline(),
        ];
        all.into_iter().flatten().min()
    }

    fn decide(&mut self, tasks: &mut kit::Tasks<SlotsOutcome>) {
        let Some(epoch) = self.term.filter(|_| self.index.is_complete()) else { return };
        let now = self.clock.now();
        self.observe(now);
        self.plan(epoch, now, tasks);
        self.list_pods(now, tasks);
        self.write_statuses(epoch, now, tasks);
        self.write_capacities(epoch, now, tasks);
    }
}
