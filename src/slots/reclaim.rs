//! Compares the claims of a node with the slots that its containers use.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ids::{InstanceName, SlotName, VirtualId},
    instance::{InstanceUsage, SlotChange, UnusedChange},
    usage::SlotUsage,
};
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
};

/// Time from an allocation until the kubelet must report the slot of the container.
const REPORTED_WITHIN: Millis = Millis::secs(60);

/// Frees slots of this node that no container uses, and restores claims that were lost. One for each configuration.
#[derive(Clone, Debug)]
pub struct Reclaimer {
    me: NodeName,
    unused_after: Millis,
    /// The last allocation of each slot, while the kubelet may not report it yet.
    claimed: BTreeMap<SlotName, Tick>,
    /// The slots of virtual devices in use, as the instances last said. The kubelet reports the virtual device alone.
    virtual_slots: BTreeMap<VirtualId, SlotName>,
}

impl Reclaimer {
    /// Frees slots of this node that were unused for `unused_after`.
    #[must_use]
    pub const fn new(me: NodeName, unused_after: Millis) -> Self {
        Self { me, unused_after, claimed: BTreeMap::new(), virtual_slots: BTreeMap::new() }
    }

    /// Changes the time after which unused slots are freed. What is known of containers stays.
    pub const fn set_unused_after(&mut self, unused_after: Millis) {
        self.unused_after = unused_after;
    }

    /// Records that a slot was allocated to a container, with a write or without one.
    pub fn claimed(&mut self, slot: &SlotName, now: Tick) {
        self.claimed.insert(slot.clone(), now);
    }

    /// Returns the changes of each instance, to be written in one patch each.
    ///
    /// `in_use` has the slots and virtual devices of this node's containers. Without a complete answer from the kubelet
    /// or the container runtime, do not call this: what is not listed counts as unused.
    ///
    /// A claim that is not in use is first marked with the time, and freed in a later round. A change that is not
    /// written, or whose write fails, comes again.
    pub fn plan(
        &mut self,
        instances: &BTreeMap<InstanceName, InstanceUsage>,
        in_use: &BTreeSet<String>,
        now: Tick,
    ) -> Vec<(InstanceName, Vec<SlotChange>)> {
        self.claimed.retain(|_, at| now.since(*at) < REPORTED_WITHIN);
        self.remember_virtual_slots(instances, in_use);
        let mut changes = Vec::new();
        for (name, usage) in instances {
            let slots = usage.slots.iter();
            let of_instance: Vec<SlotChange> =
                slots.filter_map(|(slot, current)| self.change(usage, slot, current, in_use, now)).collect();
            if !of_instance.is_empty() {
                changes.push((name.clone(), of_instance));
            }
        }
        changes
    }

    fn remember_virtual_slots(
        &mut self,
        instances: &BTreeMap<InstanceName, InstanceUsage>,
        in_use: &BTreeSet<String>,
    ) {
        self.virtual_slots.retain(|id, _| in_use.contains(id.as_str()));
        for (slot, usage) in instances.values().flat_map(|usage| &usage.slots) {
            if let SlotUsage::Configuration { virtual_id, node } = usage
                && *node == self.me
            {
                self.virtual_slots.insert(virtual_id.clone(), slot.clone());
            }
        }
    }

    fn change(
        &self,
        usage: &InstanceUsage,
        slot: &SlotName,
        current: &SlotUsage,
        in_use: &BTreeSet<String>,
        now: Tick,
    ) -> Option<SlotChange> {
        if current.is_free() {
            return usage.change(slot, self.lost_claim(slot, in_use)?);
        }
        if current.node() != Some(&self.me) {
            return None;
        }
        let reported = current.virtual_id().map_or(slot.as_str(), VirtualId::as_str);
        if in_use.contains(reported) || self.claimed.contains_key(slot) {
            // The same usage: the only change is that the slot does not count as unused.
            return usage.change(slot, current.clone());
        }
        match usage.unused_since.get(slot) {
            Some(since) if now.since(*since) >= self.unused_after => usage.change(slot, SlotUsage::Free),
            Some(since) if *since <= now => None,
            // A moment in the future is from before the clock was set back.
            _ => Some(SlotChange {
                slot: slot.clone(),
                from: current.clone(),
                to: current.clone(),
                unused_since: Some(UnusedChange::Set { at: now }),
            }),
        }
    }

    /// The claim that a free slot should have, because a container of this node uses it.
    fn lost_claim(&self, slot: &SlotName, in_use: &BTreeSet<String>) -> Option<SlotUsage> {
        let node = self.me.clone();
        if in_use.contains(slot.as_str()) {
            return Some(SlotUsage::Instance { node });
        }
        let mut devices = self.virtual_slots.iter();
        let (virtual_id, _) = devices.find(|(id, held)| *held == slot && in_use.contains(id.as_str()))?;
        Some(SlotUsage::Configuration { virtual_id: virtual_id.clone(), node })
    }
}
