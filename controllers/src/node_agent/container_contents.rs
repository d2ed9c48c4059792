//! Builds what a container gets with its slots: variables, mounts, device files and annotations.
//!
//! The kubelet reads one response for each container, so several devices are merged into one. Where devices would set
//! one variable, the first device sets it; each property of each device is also in a variable of its own.

use std::collections::BTreeMap;

use rouse::{
    slots::{ConfigurationName, InstanceName, SLOT_ANNOTATION, SlotName, SlotUsage, property_suffix},
    variables::expand,
};
use rouse_kubelet::{AllocatedDevice, AllocatedMount, ContainerAllocation};

use crate::convert::device_configuration::{
    ACCELERATORS_VARIABLE, AcceptedConfiguration, AcceptedDiscovery, VISIBLE_DEVICES_VARIABLE,
};

/// One slot that a container gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GrantedSlot {
    pub(super) configuration: ConfigurationName,
    pub(super) instance: InstanceName,
    pub(super) slot: SlotName,
    pub(super) usage: SlotUsage,
    pub(super) device_id: String,
    pub(super) properties: BTreeMap<String, String>,
}

/// Returns what a container gets with these slots.
#[must_use]
pub(super) fn container_allocation(
    configuration: &AcceptedConfiguration,
    granted: &[GrantedSlot],
) -> ContainerAllocation {
    let mounts = configuration.mounts.iter().map(|mount| AllocatedMount {
        container_path: mount.container_path.clone(),
        host_path: mount.host_path.clone(),
        read_only: mount.read_only,
    });
    let devices = configuration.devices.iter().map(|device| AllocatedDevice {
        container_path: device.container_path.clone(),
        host_path: device.host_path.clone(),
        permissions: device.permissions.clone(),
    });
    let annotation = |slot: &GrantedSlot| {
        (format!("{SLOT_ANNOTATION}{}", slot.slot), format!("{} {}", slot.instance, slot.usage))
    };
    ContainerAllocation {
        env: env(configuration, granted),
        mounts: mounts.collect(),
        devices: devices.collect(),
        annotations: granted.iter().map(annotation).collect(),
    }
}

fn env(configuration: &AcceptedConfiguration, granted: &[GrantedSlot]) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    for slot in granted {
        let suffix = property_suffix(&slot.instance);
        let variable = |(name, value): (&String, &String)| {
            (format!("{}_{suffix}", name.to_ascii_uppercase()), value.clone())
        };
        env.extend(slot.properties.iter().map(variable));
    }
    if configuration.discovery == AcceptedDiscovery::Accelerators {
        let uuids = granted.iter().map(|slot| slot.device_id.as_str()).collect::<Vec<_>>().join(",");
        env.insert(ACCELERATORS_VARIABLE.to_owned(), uuids.clone());
        env.insert(VISIBLE_DEVICES_VARIABLE.to_owned(), uuids);
    }
    if let Some(first) = granted.first() {
        let property = |name: &str| first.properties.get(name).cloned();
        env.extend(configuration.env.iter().map(|(name, text)| (name.clone(), expand(text, property))));
    }
    env
}

#[cfg(test)]
mod tests;
