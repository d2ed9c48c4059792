//! Claims of a node for slots of one instance.

use std::collections::BTreeSet;

use super::{
    ids::{SlotName, VirtualId},
    instance::{InstanceUsage, SlotChange},
    usage::SlotUsage,
};
use crate::pairing::ids::NodeName;

/// The advice after a lost race.
const REPLACE: &str = "delete the Pod, so that the one that replaces it gets another slot";

/// By which resource a container got a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimKind {
    Instance,
    /// The virtual device that the kubelet allocated. It stands for one slot.
    Configuration(VirtualId),
}

/// Why a claim is refused. The kubelet shows the text as the message of the rejected Pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    #[error("slot {0} is gone, with its device or because of a lower capacity: {replace}", replace = REPLACE)]
    NoSlot(SlotName),
    #[error("node {node} does not see the device now: check that the device can be reached from there")]
    NotSeen { node: NodeName },
    #[error("node {node} has claimed slot {slot} meanwhile: {replace}", replace = REPLACE)]
    TakenByNode { slot: SlotName, node: NodeName },
    /// This node uses it by the other resource of the device.
    #[error("slot {slot} is in use by the other resource of its device: {replace}", replace = REPLACE)]
    TakenByOtherPlugin { slot: SlotName },
    #[error("slot {slot} is in use as virtual device {virtual_id}: {replace}", replace = REPLACE)]
    TakenByVirtualDevice { slot: SlotName, virtual_id: VirtualId },
    #[error(
        "the container requests {wanted} different devices, and {free} can be had: request fewer, or wait until slots \
         of other devices are free"
    )]
    Insufficient { wanted: usize, free: usize },
}

impl InstanceUsage {
    /// Returns the changes that claim these slots for a node, to be written in one patch: all or none.
    ///
    /// A slot that the node has claimed by the same resource needs no claim, whether a container uses it or not. The
    /// kubelet alone allocates the slots of its node. It allocates a slot again after a container has ended, before the
    /// claim is reclaimed, and for a container whose Pod's init container had the slot. A refusal would reject that Pod
    /// and each one that replaces it. If the slot counts as unused, a change ends that, so that a reclaim that is
    /// decided meanwhile is refused.
    pub fn claim(
        &self,
        ids: &[SlotName],
        me: &NodeName,
        wanted: &ClaimKind,
    ) -> Result<Vec<SlotChange>, ClaimError> {
        if !self.nodes.contains(me) {
            return Err(ClaimError::NotSeen { node: me.clone() });
        }
        let node = me.clone();
        let wanted = match wanted {
            ClaimKind::Instance => SlotUsage::Instance { node },
            ClaimKind::Configuration(id) => SlotUsage::Configuration { virtual_id: id.clone(), node },
        };
        // A patch that tested the same slot twice would fail after its own change.
        let ids: BTreeSet<&SlotName> = ids.iter().collect();
        let mut changes = Vec::new();
        for slot in ids {
            let usage = self.slots.get(slot).ok_or_else(|| ClaimError::NoSlot(slot.clone()))?;
            if !usage.is_free() && *usage != wanted {
                return Err(taken(slot, usage, &wanted, me));
            }
            changes.extend(self.change(slot, wanted.clone()));
        }
        Ok(changes)
    }
}

fn taken(slot: &SlotName, usage: &SlotUsage, wanted: &SlotUsage, me: &NodeName) -> ClaimError {
    let slot = slot.clone();
    if let Some(node) = usage.node().filter(|node| *node != me) {
        return ClaimError::TakenByNode { slot, node: node.clone() };
    }
    match (usage.virtual_id(), wanted) {
        (Some(virtual_id), SlotUsage::Configuration { .. }) => {
            ClaimError::TakenByVirtualDevice { slot, virtual_id: virtual_id.clone() }
        }
        _ => ClaimError::TakenByOtherPlugin { slot },
    }
}
