//! The slots of one instance as its status has them, and the changes that may be written to it.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ids::{InstanceName, SlotName},
    names::{MAX_CAPACITY, slot_name, slot_number},
    usage::SlotUsage,
};
use crate::{pairing::ids::NodeName, units::Tick};

/// One instance, as the object says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstanceUsage {
    /// Capacity in the instance's spec, which the leader keeps at that of the configuration.
    pub capacity: u32,
    /// Every slot. A free one is a key, too.
    pub slots: BTreeMap<SlotName, SlotUsage>,
    /// Claimed slots that no container uses, each with the moment since which that is known.
    pub unused_since: BTreeMap<SlotName, Tick>,
    /// The nodes that see the device.
    pub nodes: BTreeSet<NodeName>,
}

/// A change of one slot. It is written only if the object still has what was read.
///
/// As a JSON Patch it tests and replaces the slot's usage. A change with the same usage on both sides only changes the
/// moment since which the slot is unused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlotChange {
    pub slot: SlotName,
    pub from: SlotUsage,
    pub to: SlotUsage,
    pub unused_since: Option<UnusedChange>,
}

/// A change of the moment since which a slot is unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnusedChange {
    /// Writes the moment, whether there was one or not.
    Set { at: Tick },
    /// Removes the moment if it still is this one.
    Clear { was: Tick },
}

/// A change of the set of slots. It is written only if the object still has the version that was read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayoutChange {
    /// Adds free slots.
    Add(Vec<SlotName>),
    /// Removes slots that are free.
    Remove(Vec<SlotName>),
}

/// The object does not have what a change tests. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {0} was changed meanwhile: read the instance again")]
pub struct SlotConflict(pub SlotName);

impl InstanceUsage {
    /// Returns the changes that give the instance this many slots, as far as they are possible now.
    ///
    /// Slots above the capacity stay while they are used. The first map and a larger capacity only add slots.
    #[must_use]
    pub fn layout(&self, name: &InstanceName, capacity: u32) -> Vec<LayoutChange> {
        let capacity = capacity.min(MAX_CAPACITY);
        let wanted = (0..capacity).map(|number| slot_name(name, number));
        let missing: Vec<SlotName> = wanted.filter(|slot| !self.slots.contains_key(slot)).collect();
        let surplus = self.free_slots().filter(|slot| is_surplus(name, slot, capacity));
        let surplus: Vec<SlotName> = surplus.cloned().collect();
        let mut changes = Vec::new();
        if !missing.is_empty() {
            changes.push(LayoutChange::Add(missing));
        }
        if !surplus.is_empty() {
            changes.push(LayoutChange::Remove(surplus));
        }
        changes
    }

    /// Returns for each slot whether the kubelet of a node may allocate it.
    ///
    /// It may allocate free slots and those that the node has claimed by the resource of the instance, but none above
    /// the capacity, and none of a device that is faulty or that the node does not see. Running Pods keep their slots
    /// in any case.
    #[must_use]
    pub fn health(
        &self,
        name: &InstanceName,
        me: &NodeName,
        device_healthy: bool,
    ) -> BTreeMap<SlotName, bool> {
        let is_offered = device_healthy && self.nodes.contains(me);
        let is_usable = |usage: &SlotUsage| match usage {
            SlotUsage::Free => true,
            SlotUsage::Instance { node } => node == me,
            SlotUsage::Configuration { .. } => false,
        };
        let is_healthy = |slot: &SlotName, usage: &SlotUsage| {
            is_offered && is_usable(usage) && !self.is_surplus(name, slot)
        };
        self.slots.iter().map(|(slot, usage)| (slot.clone(), is_healthy(slot, usage))).collect()
    }

    /// The free slots, in the order of their names.
    pub fn free_slots(&self) -> impl Iterator<Item = &SlotName> {
        self.slots.iter().filter(|(_, usage)| usage.is_free()).map(|(slot, _)| slot)
    }

    /// The slots that are free and stay: those that a new claim may get, in the order of their names.
    pub(super) fn open_slots(&self, name: &InstanceName) -> impl Iterator<Item = &SlotName> {
        self.free_slots().filter(move |slot| !self.is_surplus(name, slot))
    }

    /// Whether the slot is above the capacity, and so removed once it is free.
    pub(super) fn is_surplus(&self, name: &InstanceName, slot: &SlotName) -> bool {
        is_surplus(name, slot, self.capacity)
    }

    /// Number of slots in use.
    #[must_use]
    pub fn used(&self) -> u32 {
        let used = self.slots.values().filter(|usage| !usage.is_free()).count();
        u32::try_from(used).unwrap_or(u32::MAX)
    }

    /// Returns the changes that free these slots. A slot that does not exist or is free is left out.
    #[must_use]
    pub fn free<'a>(&self, slots: impl IntoIterator<Item = &'a SlotName>) -> Vec<SlotChange> {
        slots.into_iter().filter_map(|slot| self.change(slot, SlotUsage::Free)).collect()
    }

    /// Returns the changes that free all slots of a node.
    #[must_use]
    pub fn freed_of(&self, node: &NodeName) -> Vec<SlotChange> {
        let slots = self.slots.iter().filter(|(_, usage)| usage.node() == Some(node));
        self.free(slots.map(|(slot, _)| slot))
    }

    /// Applies all changes or none, as the API server does.
    pub fn apply(&mut self, changes: &[SlotChange]) -> Result<(), SlotConflict> {
        for change in changes {
            let has_usage = self.slots.get(&change.slot) == Some(&change.from);
            let has_moment = match &change.unused_since {
                Some(UnusedChange::Clear { was }) => self.unused_since.get(&change.slot) == Some(was),
                Some(UnusedChange::Set { .. }) | None => true,
            };
            if !has_usage || !has_moment {
                return Err(SlotConflict(change.slot.clone()));
            }
        }
        for change in changes {
            self.slots.insert(change.slot.clone(), change.to.clone());
            match change.unused_since {
                Some(UnusedChange::Set { at }) => {
                    self.unused_since.insert(change.slot.clone(), at);
                }
                Some(UnusedChange::Clear { .. }) => {
                    self.unused_since.remove(&change.slot);
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Applies changes of the set of slots. They must be those of [`Self::layout`] for what this is now.
    pub fn apply_layout(&mut self, changes: &[LayoutChange]) {
        for change in changes {
            match change {
                LayoutChange::Add(slots) => {
                    self.slots.extend(slots.iter().map(|slot| (slot.clone(), SlotUsage::Free)));
                }
                LayoutChange::Remove(slots) => self.slots.retain(|slot, _| !slots.contains(slot)),
            }
        }
    }

    /// All nodes that see the device or use a slot.
    #[must_use]
    pub fn named_nodes(&self) -> BTreeSet<NodeName> {
        let users = self.slots.values().filter_map(SlotUsage::node);
        self.nodes.iter().chain(users).cloned().collect()
    }

    /// Returns the change of a slot to this usage, which also ends that the slot counts as unused.
    ///
    /// `None` if the object has that already, or if there is no such slot.
    pub(super) fn change(&self, slot: &SlotName, to: SlotUsage) -> Option<SlotChange> {
        let from = self.slots.get(slot)?;
        let unused_since = self.unused_since.get(slot).map(|was| UnusedChange::Clear { was: *was });
        if *from == to && unused_since.is_none() {
            return None;
        }
        Some(SlotChange { slot: slot.clone(), from: from.clone(), to, unused_since })
    }
}

fn is_surplus(name: &InstanceName, slot: &SlotName, capacity: u32) -> bool {
    slot_number(name, slot).is_none_or(|number| number >= capacity)
}
