//! What the controller of slots observes, and the events that follow from it for the decisions.

mod instances;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use rouse::{
    pairing::ids::NodeName,
    slots::{
        ConfigurationFacts, ConfigurationName, InstanceFacts, InstanceName, NodeState, RejectedPod,
        SlotsEvent,
    },
};

pub(super) use self::instances::IndexedInstance;
use self::instances::InstanceMap;
use super::pod_facts;
use crate::{
    convert::device_configuration::{AcceptedConfiguration, accept},
    crd::{DeviceConfiguration, DeviceInstance, ledger::ObjectName},
    dual_pods::NODE_READY_CONDITION,
    metrics::DeviceSlotGauges,
    rejection::Rejections,
    warmup::has_condition,
    watch::{Delta, WatchedObject, missing},
    writer::fence::SeenObject,
};

/// The objects as last observed.
#[derive(Debug)]
pub(super) struct SlotsIndex {
    /// Number of initial lists of Pods.
    expected_lists: usize,
    leads: bool,
    has_configurations: bool,
    has_instances: bool,
    has_nodes: bool,
    listed_pods: BTreeSet<Option<String>>,
    configurations: BTreeMap<ConfigurationName, IndexedConfiguration>,
    instances: InstanceMap,
    /// Nodes are observed by followers, too.
    nodes: BTreeMap<NodeName, NodeState>,
    /// Nodes with slots that no agent frees: an instance names the node, which is not ready or does not offer it.
    unserved: BTreeSet<NodeName>,
    rejected: BTreeMap<ObjectName, RejectedObject>,
    /// Events that have not been passed to the decisions yet.
    events: Vec<SlotsEvent>,
    changed_configurations: BTreeSet<ConfigurationName>,
    changed_instances: BTreeSet<InstanceName>,
}

/// One DeviceConfiguration.
#[derive(Debug)]
pub(super) struct IndexedConfiguration {
    pub(super) object: Arc<DeviceConfiguration>,
    /// What is wrong with it, if it is refused.
    pub(super) refused: Option<Rejections>,
    /// The converted configuration, if it is of accelerators.
    accelerators: Option<AcceptedConfiguration>,
}

#[derive(Debug)]
struct RejectedObject {
    pod: RejectedPod,
    /// Message of its kubelet.
    message: String,
    seen: SeenObject,
}

impl SlotsIndex {
    pub(super) fn new(expected_lists: usize) -> Self {
        Self {
            expected_lists,
            leads: false,
            has_configurations: false,
            has_instances: false,
            has_nodes: false,
            listed_pods: BTreeSet::new(),
            configurations: BTreeMap::new(),
            instances: InstanceMap::default(),
            nodes: BTreeMap::new(),
            unserved: BTreeSet::new(),
            rejected: BTreeMap::new(),
            events: Vec::new(),
            changed_configurations: BTreeSet::new(),
            changed_instances: BTreeSet::new(),
        }
    }

    /// Forgets what is only observed while leading. The decisions get all nodes anew.
    pub(super) fn begin_term(&mut self, leads: bool) {
        let (nodes, has_nodes) = (std::mem::take(&mut self.nodes), self.has_nodes);
        *self = Self { leads, nodes, has_nodes, ..Self::new(self.expected_lists) };
        if leads {
            let event = |(name, state): (&NodeName, &NodeState)| node_event(name, Some(state.clone()));
            self.events = self.nodes.iter().map(event).collect();
        }
    }

    /// Whether everything was seen once.
    pub(super) fn is_complete(&self) -> bool {
        self.has_configurations
            && self.has_instances
            && self.has_nodes
            && self.listed_pods.len() >= self.expected_lists
    }

    pub(super) fn take_events(&mut self) -> Vec<SlotsEvent> {
        std::mem::take(&mut self.events)
    }

    /// Returns the configurations whose objects or sums have changed since this was last asked.
    pub(super) fn take_changed_configurations(&mut self) -> BTreeSet<ConfigurationName> {
        let mut changed = std::mem::take(&mut self.changed_configurations);
        changed.extend(self.instances.take_changed_totals());
        changed
    }

    /// Returns the instances whose objects, or whose configurations' capacities, have changed.
    pub(super) fn take_changed_instances(&mut self) -> BTreeSet<InstanceName> {
        std::mem::take(&mut self.changed_instances)
    }

    pub(super) fn configuration(&self, name: &ConfigurationName) -> Option<&IndexedConfiguration> {
        self.configurations.get(name)
    }

    /// Returns the configuration that offers the accelerators of nodes which both select, instead of the named one.
    pub(super) fn preferred_to(&self, name: &ConfigurationName) -> Option<&ConfigurationName> {
        let own = self.configurations.get(name)?.accelerators.as_ref()?;
        let all = self.configurations.values().filter_map(|known| known.accelerators.as_ref());
        let preferred = all.filter(|one| one.precedence() < own.precedence() && own.may_share_nodes(one));
        preferred.min_by_key(|one| one.precedence()).map(|one| &one.name)
    }

    pub(super) fn instance(&self, name: &InstanceName) -> Option<&IndexedInstance> {
        self.instances.get(name)
    }

    /// Returns the sums of a configuration's instances.
    pub(super) fn totals(&self, configuration: &ConfigurationName) -> DeviceSlotGauges {
        self.instances.totals(configuration)
    }

    /// Returns what the fence of a write to a rejected Pod needs, and the message of its kubelet.
    pub(super) fn rejected_pod(&self, pod: &RejectedPod) -> Option<(&SeenObject, &str)> {
        let name = ObjectName::new(pod.namespace.as_str(), pod.name.as_str());
        let known = self.rejected.get(&name).filter(|known| known.pod.uid == pod.uid)?;
        Some((&known.seen, known.message.as_str()))
    }

    /// Returns the nodes with slots that no agent frees.
    pub(super) fn unserved_nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.unserved.iter()
    }

    pub(super) fn is_ready(&self, node: &NodeName) -> bool {
        self.nodes.get(node).is_some_and(|state| state.ready)
    }

    /// Finds out anew whether an agent frees the slots of this node.
    fn check_served(&mut self, node: &NodeName) {
        let is_unserved = self.nodes.get(node).is_some_and(|state| {
            self.instances.naming(node).any(|instance| !state.ready || state.lacks_agent(instance))
        });
        if is_unserved {
            self.unserved.insert(node.clone());
        } else {
            self.unserved.remove(node);
        }
    }

    pub(super) fn apply_configurations(&mut self, delta: &Delta<DeviceConfiguration>) {
        let (gone, found) = delta.diff(self.configurations.keys());
        gone.iter().for_each(|name| self.remove_configuration(name));
        found.iter().for_each(|found| self.set_configuration(found));
        self.has_configurations |= delta.is_list();
    }

    /// An object that cannot be read keeps its instances: it counts as it was.
    fn set_configuration(&mut self, found: &WatchedObject<DeviceConfiguration>) {
        let WatchedObject::Readable(object) = found else { return };
        let name = ConfigurationName::from(object.name_any());
        let capacity = object.spec.capacity;
        let (accelerators, refused) = match accept(object) {
            Ok(accepted) => (Some(accepted).filter(AcceptedConfiguration::is_of_accelerators), None),
            Err(refused) => (None, Some(refused)),
        };
        let known = IndexedConfiguration { object: Arc::clone(object), refused, accelerators };
        let is_of_accelerators = known.accelerators.is_some();
        let before = self.configurations.insert(name.clone(), known);
        if is_of_accelerators || before.as_ref().is_some_and(|before| before.accelerators.is_some()) {
            self.mark_accelerators_changed();
        }
        if before.is_none_or(|before| before.object.spec.capacity != capacity) {
            let of_it = self.instances.names_of(&name);
            self.changed_instances.extend(of_it.cloned());
            let facts = Some(ConfigurationFacts { capacity });
            self.events.push(SlotsEvent::Configuration { name: name.clone(), facts });
        }
        self.changed_configurations.insert(name);
    }

    fn remove_configuration(&mut self, name: &ConfigurationName) {
        if let Some(before) = self.configurations.remove(name) {
            if before.accelerators.is_some() {
                self.mark_accelerators_changed();
            }
            self.changed_configurations.insert(name.clone());
            self.events.push(SlotsEvent::Configuration { name: name.clone(), facts: None });
        }
    }

    /// Marks all configurations of accelerators as changed: the status of each names the one preferred to it.
    fn mark_accelerators_changed(&mut self) {
        let all = self.configurations.iter().filter(|(_, known)| known.accelerators.is_some());
        self.changed_configurations.extend(all.map(|(name, _)| name.clone()));
    }

    pub(super) fn apply_instances(&mut self, delta: &Delta<DeviceInstance>) {
        let (gone, found) = delta.diff(self.instances.names());
        gone.iter().for_each(|name| self.remove_instance(name));
        found.iter().for_each(|found| self.set_instance(found));
        self.has_instances |= delta.is_list();
    }

    /// Nothing is decided about an object that cannot be read.
    fn set_instance(&mut self, found: &WatchedObject<DeviceInstance>) {
        let name = InstanceName::from(found.name().name);
        let WatchedObject::Readable(object) = found else { return self.remove_instance(&name) };
        for node in self.instances.set(&name, Arc::clone(object)) {
            self.check_served(&node);
        }
        let Some(known) = self.instances.get(&name) else { return };
        let facts = InstanceFacts {
            configuration: known.configuration(),
            version: object.resource_version().unwrap_or_default(),
        };
        let observed = Some((facts, known.usage.clone()));
        self.events.push(SlotsEvent::Instance { name: name.clone(), observed });
        self.changed_instances.insert(name);
    }

    fn remove_instance(&mut self, name: &InstanceName) {
        let Some(nodes) = self.instances.remove(name) else { return };
        nodes.iter().for_each(|node| self.check_served(node));
        self.changed_instances.insert(name.clone());
        self.events.push(SlotsEvent::Instance { name: name.clone(), observed: None });
    }

    pub(super) fn apply_nodes(&mut self, delta: &Delta<Node>) {
        let (gone, found) = delta.diff(self.nodes.keys());
        gone.iter().for_each(|name| self.remove_node(name));
        found.iter().for_each(|found| self.set_node(found));
        self.has_nodes |= delta.is_list();
    }

    /// A node that cannot be read exists, and counts as ready, with the agent that it had: nothing is taken from it.
    fn set_node(&mut self, found: &WatchedObject<Node>) {
        let name = NodeName::from(found.name().name);
        let before = self.nodes.get(&name);
        let state = match found {
            WatchedObject::Readable(node) => node_state(node),
            WatchedObject::Unreadable { .. } => {
                let offered = before.map(|before| before.offered.clone());
                NodeState { ready: true, offered: offered.unwrap_or_default() }
            }
        };
        if before != Some(&state) {
            self.nodes.insert(name.clone(), state.clone());
            self.check_served(&name);
            self.push_if_leading(node_event(&name, Some(state)));
        }
    }

    fn remove_node(&mut self, name: &NodeName) {
        if self.nodes.remove(name).is_some() {
            self.check_served(name);
            self.push_if_leading(node_event(name, None));
        }
    }

    /// A follower would only collect events of nodes. A new leader gets all of them.
    fn push_if_leading(&mut self, event: SlotsEvent) {
        if self.leads {
            self.events.push(event);
        }
    }

    pub(super) fn apply_rejected_pods(&mut self, delta: &Delta<Pod>) {
        match delta {
            Delta::All { namespace, objects } => {
                for name in missing(&self.rejected, namespace.as_deref(), objects) {
                    self.remove_rejected(&name);
                }
                objects.iter().for_each(|found| self.set_rejected(found));
                self.listed_pods.insert(namespace.clone());
            }
            Delta::Applied(found) => self.set_rejected(found),
            Delta::Deleted(name) => self.remove_rejected(name),
        }
    }

    fn set_rejected(&mut self, found: &WatchedObject<Pod>) {
        let name = found.name();
        let rejected = match found {
            WatchedObject::Readable(object) => {
                pod_facts::rejected(object).map(|pod| (pod, pod_facts::message(object)))
            }
            WatchedObject::Unreadable { .. } => None,
        };
        let Some((pod, message)) = rejected else { return self.remove_rejected(&name) };
        let seen = SeenObject::of(found.metadata());
        if self.rejected.get(&name).is_none_or(|known| known.pod != pod) {
            self.remove_rejected(&name);
            self.events.push(SlotsEvent::Rejected { pod: pod.clone() });
        }
        self.rejected.insert(name, RejectedObject { pod, message, seen });
    }

    fn remove_rejected(&mut self, name: &ObjectName) {
        if let Some(known) = self.rejected.remove(name) {
            self.events.push(SlotsEvent::RejectedGone { uid: known.pod.uid });
        }
    }
}

/// Returns what the kubelet of the node reports: whether it is ready, and of which devices it has slots.
pub(super) fn node_state(node: &Node) -> NodeState {
    let capacity = node.status.as_ref().and_then(|status| status.capacity.as_ref());
    let offered = capacity.into_iter().flatten().filter(|(_, amount)| amount.0 != "0");
    let offered = offered.filter_map(|(resource, _)| pod_facts::slot_resource(resource));
    NodeState {
        ready: has_condition(node, NODE_READY_CONDITION),
        offered: offered.map(InstanceName::from).collect(),
    }
}

fn node_event(name: &NodeName, state: Option<NodeState>) -> SlotsEvent {
    SlotsEvent::Node { name: name.clone(), state }
}
