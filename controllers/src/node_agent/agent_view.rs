//! What the agent has observed, and what its device plugins therefore offer.
//!
//! Watches, discovery and the replies to the agent's own writes change the view through [`AgentState::update`], which
//! sends each plugin's new list to the kubelet within the same call. Nothing is believed that no object says: a claim
//! counts once the API server has returned the object with it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kube::ResourceExt as _;
use rouse::{
    pairing::ids::NodeName,
    slots::{
        ConfigurationName, InstanceName, InstanceUsage, SlotName, VirtualId, configuration_resource,
        instance_name, instance_resource, virtual_devices,
    },
    units::{Bytes, Tick},
};
use rouse_kubelet::PluginDevice;
use tokio::sync::watch;

use crate::{
    convert::device_configuration::AcceptedConfiguration,
    crd::{AcceleratorNode, DeviceInstance},
    label,
    slot_patch::instance_usage,
};

/// The view, and a notification of each change.
#[derive(Debug)]
pub(super) struct AgentState {
    pub(super) me: NodeName,
    view: Mutex<AgentView>,
    changed: watch::Sender<()>,
}

/// What the agent knows of the cluster and of its node.
#[derive(Debug, Default)]
pub(super) struct AgentView {
    /// The agent's own Node, once it is known.
    pub(super) own_node: Option<OwnNode>,
    /// Whether the DeviceConfigurations and the DeviceInstances have been listed.
    pub(super) configurations_listed: bool,
    pub(super) instances_listed: bool,
    pub(super) configurations: BTreeMap<ConfigurationName, KnownConfiguration>,
    pub(super) instances: BTreeMap<InstanceName, KnownInstance>,
    /// The AcceleratorNode of this node, if it exists.
    pub(super) accelerator_node: Option<Arc<AcceleratorNode>>,
    /// Devices that discovery sees now, by id. A configuration that has not been searched yet has no entry.
    pub(super) devices: BTreeMap<ConfigurationName, BTreeMap<String, SeenDevice>>,
    /// Devices that containers have through other device plugins, each with its resource.
    pub(super) foreign: BTreeMap<String, String>,
    /// Plugins whose last claim could not be written, and when that was. They offer nothing meanwhile.
    pub(super) claims_failed: BTreeMap<PluginKey, Tick>,
    /// The list of each running plugin.
    lists: BTreeMap<PluginKey, watch::Sender<PluginList>>,
}

/// What a plugin offers.
pub(super) type PluginList = Arc<Vec<PluginDevice>>;

/// The part of the agent's Node that decides which configurations take part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OwnNode {
    pub(super) uid: Option<String>,
    pub(super) labels: BTreeMap<String, String>,
}

/// A valid DeviceConfiguration.
#[derive(Clone, Debug)]
pub(super) struct KnownConfiguration {
    pub(super) uid: String,
    pub(super) accepted: Arc<AcceptedConfiguration>,
}

/// A DeviceInstance.
#[derive(Clone, Debug)]
pub(super) struct KnownInstance {
    pub(super) object: Arc<DeviceInstance>,
    pub(super) usage: InstanceUsage,
}

/// A device that this node sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SeenDevice {
    pub(super) properties: BTreeMap<String, String>,
    pub(super) healthy: bool,
    /// Index of an accelerator.
    pub(super) index: Option<u32>,
    /// Memory of an accelerator, without what the driver reserves for itself.
    pub(super) memory: Option<Bytes>,
}

/// A device plugin of this agent, by what it offers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PluginKey {
    Instance(InstanceName),
    Configuration(ConfigurationName),
}

/// Why no container can get a device now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DeviceProblem {
    /// This node does not see it.
    Gone,
    Faulty,
    /// A container has it through this resource of another device plugin.
    Foreign(String),
    /// This other configuration offers the accelerators of the node. Together they would offer more slots than either.
    Duplicate(ConfigurationName),
}

impl AgentState {
    pub(super) fn new(me: NodeName) -> Self {
        Self { me, view: Mutex::default(), changed: watch::Sender::new(()) }
    }

    /// Notifies of each change.
    pub(super) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(super) fn read<T>(&self, query: impl FnOnce(&AgentView) -> T) -> T {
        query(&self.lock())
    }

    /// Changes the view, and sends the plugins' lists that change with it.
    pub(super) fn update<T>(&self, change: impl FnOnce(&mut AgentView) -> T) -> T {
        let mut view = self.lock();
        let outcome = change(&mut view);
        view.publish(&self.me);
        drop(view);
        self.changed.send_replace(());
        outcome
    }

    /// Takes over an object that the API server has returned.
    pub(super) fn observe_instance(&self, object: DeviceInstance) {
        self.update(|view| view.apply_instance(Arc::new(object)));
    }

    /// Takes over what a search for a configuration's devices has found.
    pub(super) fn set_devices(&self, configuration: &ConfigurationName, found: BTreeMap<String, SeenDevice>) {
        let is_new = self.read(|view| view.devices.get(configuration) != Some(&found));
        if is_new {
            self.update(|view| view.devices.insert(configuration.clone(), found));
        }
    }

    /// Starts the list of a plugin.
    pub(super) fn open_list(&self, key: &PluginKey) -> watch::Receiver<PluginList> {
        let mut view = self.lock();
        let (tx, rx) = watch::channel(Arc::new(view.list_of(&self.me, key)));
        view.lists.insert(key.clone(), tx);
        rx
    }

    /// Ends the list of a plugin.
    pub(super) fn close_list(&self, key: &PluginKey) {
        self.lock().lists.remove(key);
    }

    fn lock(&self) -> MutexGuard<'_, AgentView> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AgentView {
    /// Whether configurations and instances have been listed.
    pub(super) const fn is_listed(&self) -> bool {
        self.configurations_listed && self.instances_listed
    }

    /// Whether the agent's own Node is known, too.
    pub(super) const fn is_complete(&self) -> bool {
        self.is_listed() && self.own_node.is_some()
    }

    /// Returns the configurations that take part on this node.
    pub(super) fn active(&self) -> impl Iterator<Item = (&ConfigurationName, &KnownConfiguration)> {
        self.configurations.iter().filter(|(_, known)| self.takes_part(&known.accepted))
    }

    /// Returns a configuration, if it takes part on this node.
    pub(super) fn active_configuration(&self, name: &str) -> Option<&KnownConfiguration> {
        self.configurations.get(name).filter(|known| self.takes_part(&known.accepted))
    }

    /// Whether this node has all labels of the configuration's selector.
    fn takes_part(&self, configuration: &AcceptedConfiguration) -> bool {
        let node = self.own_node.as_ref();
        node.is_some_and(|node| label::has_all(&node.labels, &configuration.node_selector))
    }

    /// Takes over a version of an instance, unless a newer one is known: a watch may be behind a write's reply.
    pub(super) fn apply_instance(&mut self, object: Arc<DeviceInstance>) {
        let name = InstanceName::from(object.name_any());
        if self.instances.get(&name).is_some_and(|known| is_older(&object, &known.object)) {
            return;
        }
        let usage = instance_usage(&object);
        self.instances.insert(name, KnownInstance { object, usage });
    }

    /// Returns the device that an instance stands for, if this node sees it.
    pub(super) fn device_of(&self, instance: &DeviceInstance) -> Option<&SeenDevice> {
        let configuration = instance.spec.configuration.as_str();
        let known = self.active_configuration(configuration)?;
        // After a change of `shared` the device has an instance of another name. Two instances would double its slots.
        if known.accepted.shared != instance.spec.shared {
            return None;
        }
        self.devices.get(configuration)?.get(&instance.spec.device_id)
    }

    /// Returns the devices that active configurations see, each with its instance's name.
    pub(super) fn seen_devices<'a>(
        &'a self,
        me: &'a NodeName,
    ) -> impl Iterator<Item = (InstanceName, &'a KnownConfiguration, &'a String, &'a SeenDevice)> {
        self.active().flat_map(move |(name, known)| {
            let devices = self.devices.get(name).into_iter().flatten();
            let node = (!known.accepted.shared).then_some(me);
            devices.map(move |(id, device)| (instance_name(name, id, node), known, id, device))
        })
    }

    /// Returns why no container can get this instance's device; `None` if the device is sound.
    pub(super) fn problem_of(&self, instance: &DeviceInstance) -> Option<DeviceProblem> {
        let foreign = || self.foreign.get(&instance.spec.device_id).cloned().map(DeviceProblem::Foreign);
        let duplicate = || {
            let preferred = self.preferred_to(&instance.spec.configuration);
            preferred.map(|preferred| DeviceProblem::Duplicate(preferred.name.clone()))
        };
        match self.device_of(instance) {
            None => Some(DeviceProblem::Gone),
            Some(device) if !device.healthy => Some(DeviceProblem::Faulty),
            Some(_) => foreign().or_else(duplicate),
        }
    }

    /// Returns the configuration that offers this node's accelerators. Others of accelerators offer nothing.
    pub(super) fn accelerator_configuration(&self) -> Option<&AcceptedConfiguration> {
        let all = self.active().map(|(_, known)| &*known.accepted);
        all.filter(|one| one.is_of_accelerators()).min_by_key(|one| one.precedence())
    }

    /// Returns the configuration that offers this node's accelerators instead of the named one, if there is one.
    fn preferred_to(&self, configuration: &str) -> Option<&AcceptedConfiguration> {
        let own = &*self.configurations.get(configuration)?.accepted;
        let first = self.accelerator_configuration()?;
        (own.is_of_accelerators() && first.precedence() < own.precedence()).then_some(first)
    }

    /// Returns the plugins that should run: one for each active configuration, and one for each instance of theirs that
    /// lists this node and has its slots.
    pub(super) fn plugins(&self, me: &NodeName) -> BTreeSet<PluginKey> {
        let configurations = self.active().map(|(name, _)| PluginKey::Configuration(name.clone()));
        let has_plugin = |known: &KnownInstance| {
            let is_active = self.active_configuration(&known.object.spec.configuration).is_some();
            is_active && known.usage.nodes.contains(me) && !known.usage.slots.is_empty()
        };
        let instances = self.instances.iter().filter(|(_, known)| has_plugin(known));
        configurations.chain(instances.map(|(name, _)| PluginKey::Instance(name.clone()))).collect()
    }

    /// Returns the instances of a configuration that list this node.
    pub(super) fn instances_of(
        &self,
        me: &NodeName,
        configuration: &ConfigurationName,
    ) -> BTreeMap<InstanceName, KnownInstance> {
        let is_of = |known: &KnownInstance| {
            known.object.spec.configuration == configuration.as_str() && known.usage.nodes.contains(me)
        };
        let found = self.instances.iter().filter(|(_, known)| is_of(known));
        found.map(|(name, known)| (name.clone(), known.clone())).collect()
    }

    /// Returns those of these instances whose devices are sound.
    pub(super) fn sound_among(
        &self,
        instances: &BTreeMap<InstanceName, KnownInstance>,
    ) -> BTreeSet<InstanceName> {
        let sound = instances.iter().filter(|(_, known)| self.problem_of(&known.object).is_none());
        sound.map(|(name, _)| name.clone()).collect()
    }

    /// Returns what a plugin offers.
    fn list_of(&self, me: &NodeName, key: &PluginKey) -> Vec<PluginDevice> {
        let can_claim = !self.claims_failed.contains_key(key);
        match key {
            PluginKey::Instance(name) => {
                let Some(known) = self.instances.get(name) else { return Vec::new() };
                let slots =
                    known.usage.health(name, me, can_claim && self.problem_of(&known.object).is_none());
                let device = |(slot, healthy): (SlotName, bool)| PluginDevice {
                    id: slot.as_str().to_owned(),
                    healthy,
                };
                slots.into_iter().map(device).collect()
            }
            PluginKey::Configuration(name) => {
                let instances = self.instances_of(me, name);
                let sound = if can_claim { self.sound_among(&instances) } else { BTreeSet::new() };
                let offered = virtual_devices::offered(name, &usages(&instances), me, &sound);
                let device = |id: VirtualId| PluginDevice { id: id.as_str().to_owned(), healthy: true };
                offered.into_iter().map(device).collect()
            }
        }
    }

    fn publish(&self, me: &NodeName) {
        for (key, list) in &self.lists {
            let now = self.list_of(me, key);
            list.send_if_modified(|offered| {
                let differs = **offered != now;
                if differs {
                    *offered = Arc::new(now);
                }
                differs
            });
        }
    }
}

impl PluginKey {
    /// Returns the name of the plugin's extended resource.
    pub(super) fn resource(&self) -> String {
        match self {
            Self::Instance(name) => instance_resource(name),
            Self::Configuration(name) => configuration_resource(name),
        }
    }

    /// Returns the plugin's kind, for metrics and logs.
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Instance(_) => "instance",
            Self::Configuration(_) => "configuration",
        }
    }
}

/// Returns the usage of these instances.
pub(super) fn usages(
    instances: &BTreeMap<InstanceName, KnownInstance>,
) -> BTreeMap<InstanceName, InstanceUsage> {
    instances.iter().map(|(name, known)| (name.clone(), known.usage.clone())).collect()
}

/// Whether `now` is an earlier version of the object than `known`.
fn is_older(now: &DeviceInstance, known: &DeviceInstance) -> bool {
    let version = |object: &DeviceInstance| object.resource_version()?.parse::<u64>().ok();
    let is_same = now.uid() == known.uid();
    is_same && matches!((version(now), version(known)), (Some(now), Some(known)) if now < known)
}

#[cfg(test)]
mod tests;
