//! The leader's decisions about slots.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    command::SlotsCommand,
    event::{ConfigurationFacts, InstanceFacts, NodeState, SlotsEvent},
    ids::{ConfigurationName, InstanceName},
    instance::InstanceUsage,
    rejected_pods::RejectedPods,
    slot_node::SlotNode,
    tracked_instance::{InstanceContext, TrackedInstance},
};
use crate::{
    due_times::DueTimes,
    pairing::ids::NodeName,
    units::{Millis, Tick},
};

/// Time after which a command without an outcome counts as lost.
const ISSUED_WITHIN: Millis = Millis::secs(60);
/// Time from an executed command until the instance must be observed with its change.
const CHANGED_WITHIN: Millis = Millis::secs(30);
/// Pause after a write that failed. After a conflict, the newer version ends it at once.
const RETRY_PAUSE: Millis = Millis::secs(5);
const REFUSED_PAUSE: Millis = Millis::secs(60);

/// How long the leader waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotsSettings {
    /// A node without Pods is lost once it has not been ready for so long. It is lost for one instance, which no Pod of
    /// it uses, once its kubelet has not offered that one for so long. An instance is deleted once no node has seen its
    /// device for so long.
    pub node_timeout: Millis,
}

impl Default for SlotsSettings {
    fn default() -> Self {
        Self { node_timeout: Millis::secs(300) }
    }
}

/// Decides what the leader does about slots. Pure: the same events at the same moments give the same commands.
///
/// Agents claim and free slots without the leader. The leader acts for nodes that are lost, or whose agent is. It keeps
/// the number of slots at the capacity, and deletes instances and rejected Pods. It decides on one version of an
/// instance, so the API server refuses the write if an agent has changed the instance since. At most one write to an
/// instance is under way.
#[derive(Clone, Debug, Default)]
pub struct SlotsController {
    settings: SlotsSettings,
    leads: bool,
    is_listed: bool,
    configurations: BTreeMap<ConfigurationName, ConfigurationFacts>,
    instances: BTreeMap<InstanceName, TrackedInstance>,
    /// Of configurations that exist and of those that instances name.
    instances_of: BTreeMap<ConfigurationName, BTreeSet<InstanceName>>,
    nodes: BTreeMap<NodeName, SlotNode>,
    rejected: RejectedPods,
    /// Instances with events since they were last planned, or with a command that was not issued.
    dirty: BTreeSet<InstanceName>,
    /// The next deadline of each instance that has one.
    due: DueTimes<InstanceName>,
}

impl SlotsController {
    #[must_use]
    pub fn new(settings: SlotsSettings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// Records an observation or an outcome. Decides nothing.
    pub fn on(&mut self, event: SlotsEvent, now: Tick) {
        if self.leads || matches!(event, SlotsEvent::LeadershipGained) {
            self.observe(event, now);
        }
    }

    /// Plans the commands for this moment. Pass those that are executed to [`Self::issued`] first; the others are
    /// planned again.
    pub fn plan(&mut self, now: Tick) -> Vec<SlotsCommand> {
        if !self.is_listed {
            return Vec::new();
        }
        self.dirty.extend(self.due.due_by(now).cloned());
        let mut commands = Vec::new();
        for name in std::mem::take(&mut self.dirty) {
            if let Some(command) = self.plan_instance(&name, now) {
                commands.push(command);
                // Until the command is issued, it is planned again.
                self.dirty.insert(name);
            }
        }
        commands.append(&mut self.rejected.plan(now));
        commands
    }

    /// Records commands as issued, before they are executed. Planning again at the same moment yields none of them.
    pub fn issued(&mut self, commands: &[SlotsCommand], now: Tick) {
        for command in commands {
            self.hold(command, now + ISSUED_WITHIN);
            if let SlotsCommand::DeletePod { pod } = command {
                self.rejected.issued(&pod.uid, now);
            }
        }
    }

    /// The next moment at which planning may yield something without an event in between.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Tick> {
        if !self.is_listed {
            return None;
        }
        self.due.first().into_iter().chain(self.rejected.next_deadline()).min()
    }

    fn plan_instance(&mut self, name: &InstanceName, now: Tick) -> Option<SlotsCommand> {
        let Some(known) = self.instances.get_mut(name) else {
            self.due.set(name, None);
            return None;
        };
        let context = InstanceContext {
            nodes: &self.nodes,
            capacity: self.configurations.get(&known.facts.configuration).map(|facts| facts.capacity),
            node_timeout: self.settings.node_timeout,
            now,
        };
        let (command, next) = known.decide(name, &context);
        self.due.set(name, next);
        command
    }

    fn observe(&mut self, event: SlotsEvent, now: Tick) {
        match event {
            SlotsEvent::LeadershipGained => *self = Self { leads: true, ..Self::new(self.settings) },
            SlotsEvent::LeadershipLost => *self = Self::new(self.settings),
            SlotsEvent::Listed => {
                self.is_listed = true;
                self.dirty.extend(self.instances.keys().cloned());
            }
            SlotsEvent::Configuration { name, facts } => {
                let of_configuration = self.instances_of.get(&name).into_iter().flatten();
                self.dirty.extend(of_configuration.cloned());
                match facts {
                    Some(facts) => self.configurations.insert(name, facts),
                    None => self.configurations.remove(&name),
                };
            }
            SlotsEvent::Instance { name, observed } => self.observe_instance(&name, observed, now),
            SlotsEvent::Node { name, state } => self.observe_node(name, state, now),
            SlotsEvent::NodePods { node, requested } => {
                if let Some(known) = self.nodes.get_mut(&node) {
                    known.set_requested(requested);
                    self.dirty.extend(known.instances.iter().cloned());
                }
            }
            SlotsEvent::Rejected { pod } => self.rejected.observe(pod, now),
            SlotsEvent::RejectedGone { uid } => self.rejected.gone(&uid),
            SlotsEvent::Executed(command) => {
                self.hold(&command, now + CHANGED_WITHIN);
                if let SlotsCommand::DeletePod { pod } = command {
                    self.rejected.executed(&pod.uid, now);
                }
            }
            SlotsEvent::Failed { command, is_refused } => {
                self.hold(&command, now + if is_refused { REFUSED_PAUSE } else { RETRY_PAUSE });
                if let SlotsCommand::DeletePod { pod } = command {
                    self.rejected.failed(&pod.uid, is_refused, now);
                }
            }
        }
    }

    fn observe_node(&mut self, name: NodeName, state: Option<NodeState>, now: Tick) {
        let known = self.nodes.entry(name.clone()).or_insert_with(|| SlotNode::unseen(now));
        known.observe(state, now);
        self.dirty.extend(known.instances.iter().cloned());
        if known.is_forgettable() {
            self.nodes.remove(&name);
        }
    }

    fn observe_instance(
        &mut self,
        name: &InstanceName,
        observed: Option<(InstanceFacts, InstanceUsage)>,
        now: Tick,
    ) {
        let before = self.instances.remove(name);
        let named = |known: Option<&TrackedInstance>| known.map(|known| known.usage.named_nodes());
        let nodes_before = named(before.as_ref()).unwrap_or_default();
        if let Some(known) = &before {
            self.unlink_configuration(&known.facts.configuration, name);
        }
        let after = observed.map(|(facts, usage)| match before {
            Some(mut known) => {
                known.update(facts, usage);
                known
            }
            None => TrackedInstance::new(facts, usage),
        });
        let nodes_after = named(after.as_ref()).unwrap_or_default();
        if let Some(known) = after {
            let of_configuration = self.instances_of.entry(known.facts.configuration.clone());
            of_configuration.or_default().insert(name.clone());
            self.instances.insert(name.clone(), known);
        }
        for node in nodes_after.difference(&nodes_before) {
            let known = self.nodes.entry(node.clone()).or_insert_with(|| SlotNode::unseen(now));
            known.instances.insert(name.clone());
        }
        for node in nodes_before.difference(&nodes_after) {
            self.unlink_node(node, name);
        }
        self.dirty.insert(name.clone());
    }

    fn unlink_configuration(&mut self, configuration: &ConfigurationName, name: &InstanceName) {
        if let Some(instances) = self.instances_of.get_mut(configuration) {
            instances.remove(name);
            if instances.is_empty() {
                self.instances_of.remove(configuration);
            }
        }
    }

    fn unlink_node(&mut self, node: &NodeName, name: &InstanceName) {
        if let Some(known) = self.nodes.get_mut(node) {
            known.instances.remove(name);
            if known.is_forgettable() {
                self.nodes.remove(node);
            }
        }
    }

    /// Orders nothing more for the instance of this command until then, or until it has another version.
    fn hold(&mut self, command: &SlotsCommand, until: Tick) {
        let Some((name, version)) = command.target() else { return };
        let Some(known) = self.instances.get_mut(name) else { return };
        known.hold(version, until);
        if let Some(until) = known.held_until() {
            self.dirty.remove(name);
            self.due.set(name, Some(until));
        }
    }
}
