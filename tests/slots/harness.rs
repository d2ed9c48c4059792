//! Instances in any state, in few words.

use std::collections::BTreeMap;

use rouse::{
    pairing::ids::NodeName,
    slots::{InstanceName, InstanceUsage, SlotName, SlotUsage, slot_name},
    units::Tick,
};

pub(crate) const START: Tick = Tick(1_000_000_000);

pub(crate) type Instances = BTreeMap<InstanceName, InstanceUsage>;

/// An instance whose slots have these usages, in the order of their numbers. All nodes see the device.
pub(crate) fn instance_with(name: &str, usages: &[&str], nodes: &[&str]) -> InstanceUsage {
    let name = InstanceName::from(name);
    let capacity = u32::try_from(usages.len()).unwrap();
    let parse = |usage: &str| usage.parse::<SlotUsage>().unwrap();
    let slots = (0..).zip(usages).map(|(number, usage)| (slot_name(&name, number), parse(usage)));
    InstanceUsage {
        capacity,
        slots: slots.collect(),
        nodes: nodes.iter().map(|node| NodeName::from(*node)).collect(),
        ..InstanceUsage::default()
    }
}

/// The texts of the map, as the object has them.
pub(crate) fn texts(usage: &InstanceUsage) -> Vec<(String, String)> {
    usage.slots.iter().map(|(slot, usage)| (slot.to_string(), usage.to_string())).collect()
}

/// The usages of all slots in the order of their names.
pub(crate) fn usages(usage: &InstanceUsage) -> Vec<String> {
    usage.slots.values().map(SlotUsage::to_string).collect()
}

pub(crate) fn slots(names: &[&str]) -> Vec<SlotName> {
    names.iter().map(|name| SlotName::from(*name)).collect()
}
