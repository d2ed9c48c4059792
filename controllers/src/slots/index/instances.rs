//! The instances, with what is counted of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::{
    pairing::ids::NodeName,
    slots::{ConfigurationName, InstanceName, InstanceUsage},
};

use crate::{crd::DeviceInstance, metrics::DeviceSlotGauges, slot_patch::instance_usage};

/// The instances as last observed. A change costs what one instance has, not what all have.
#[derive(Debug, Default)]
pub(super) struct InstanceMap {
    instances: BTreeMap<InstanceName, IndexedInstance>,
    /// The instances that name each node, as one that sees the device or that has a slot.
    naming: BTreeMap<NodeName, BTreeSet<InstanceName>>,
    totals: BTreeMap<ConfigurationName, DeviceSlotGauges>,
    changed_totals: BTreeSet<ConfigurationName>,
}

/// One instance, and what its object says.
#[derive(Debug)]
pub(in crate::slots) struct IndexedInstance {
    pub(in crate::slots) object: Arc<DeviceInstance>,
    pub(in crate::slots) usage: InstanceUsage,
}

impl IndexedInstance {
    pub(in crate::slots) fn configuration(&self) -> ConfigurationName {
        ConfigurationName::from(self.object.spec.configuration.as_str())
    }

    fn gauges(&self) -> DeviceSlotGauges {
        let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let claimed = self.usage.used();
        let unused = number(self.usage.unused_since.len()).min(claimed);
        DeviceSlotGauges {
            devices: 1,
            free: number(self.usage.free_slots().count()),
            used: claimed.saturating_sub(unused),
            unused,
        }
    }
}

impl InstanceMap {
    pub(super) fn get(&self, name: &InstanceName) -> Option<&IndexedInstance> {
        self.instances.get(name)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &InstanceName> {
        self.instances.keys()
    }

    /// Returns the instances of a configuration.
    pub(super) fn names_of(&self, configuration: &ConfigurationName) -> impl Iterator<Item = &InstanceName> {
        let wanted = configuration.as_str();
        let of_it = self.instances.iter().filter(move |(_, known)| known.object.spec.configuration == wanted);
        of_it.map(|(name, _)| name)
    }

    /// Returns the instances that name this node.
    pub(super) fn naming(&self, node: &NodeName) -> impl Iterator<Item = &InstanceName> {
        self.naming.get(node).into_iter().flatten()
    }

    /// Returns the sums of a configuration's instances.
    pub(super) fn totals(&self, configuration: &ConfigurationName) -> DeviceSlotGauges {
        self.totals.get(configuration).copied().unwrap_or_default()
    }

    /// Returns the configurations whose sums have changed since this was last asked.
    pub(super) fn take_changed_totals(&mut self) -> BTreeSet<ConfigurationName> {
        std::mem::take(&mut self.changed_totals)
    }

    /// Returns the nodes that the instance newly names, and those that it no longer names.
    pub(super) fn set(&mut self, name: &InstanceName, object: Arc<DeviceInstance>) -> BTreeSet<NodeName> {
        let before = self.remove(name).unwrap_or_default();
        let usage = instance_usage(&object);
        let known = IndexedInstance { object, usage };
        let now = known.usage.named_nodes();
        for node in &now {
            self.naming.entry(node.clone()).or_default().insert(name.clone());
        }
        let configuration = known.configuration();
        let totals = self.totals.entry(configuration.clone()).or_default();
        *totals = totals.plus(known.gauges());
        self.changed_totals.insert(configuration);
        self.instances.insert(name.clone(), known);
        before.symmetric_difference(&now).cloned().collect()
    }

    /// Returns the nodes that it named; `None` if there was no instance of this name.
    pub(super) fn remove(&mut self, name: &InstanceName) -> Option<BTreeSet<NodeName>> {
        let known = self.instances.remove(name)?;
        let nodes = known.usage.named_nodes();
        for node in &nodes {
            let Some(instances) = self.naming.get_mut(node) else { continue };
            instances.remove(name);
            if instances.is_empty() {
                self.naming.remove(node);
            }
        }
        let configuration = known.configuration();
        if let Some(totals) = self.totals.get_mut(&configuration) {
            *totals = totals.minus(known.gauges());
            if totals.devices == 0 {
                self.totals.remove(&configuration);
            }
        }
        self.changed_totals.insert(configuration);
        Some(nodes)
    }
}
