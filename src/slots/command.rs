//! What the leader writes for slots.

use super::{
    event::RejectedPod,
    ids::InstanceName,
    instance::{LayoutChange, SlotChange},
};
use crate::pairing::ids::NodeName;

/// One write to the API server. Repeating it changes nothing.
///
/// A write to an instance tests the `version` of the object on which it was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotsCommand {
    /// Removes a lost node from the nodes that see the device, and frees its slots, in one patch.
    FreeNode {
        instance: InstanceName,
        version: String,
        node: NodeName,
        cause: NodeLoss,
        changes: Vec<SlotChange>,
    },
    /// Adds and removes slots.
    SetLayout {
        instance: InstanceName,
        version: String,
        changes: Vec<LayoutChange>,
    },
    DeleteInstance {
        instance: InstanceName,
        version: String,
        cause: InstanceEnd,
    },
    /// Deletes a Pod that a kubelet rejected. Its owner has created another one, or now does.
    DeletePod {
        pod: RejectedPod,
    },
}

/// Why a node counts as lost, for one instance or for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeLoss {
    /// The node object does not exist.
    Gone,
    /// It has not been ready for some minutes, and no Pod with slots is left on it.
    NotReady,
    /// It is ready, its kubelet has not offered the instance for some minutes, and no Pod on it may use the device.
    NoAgent,
}

/// Why an instance is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstanceEnd {
    /// Its configuration does not exist.
    NoConfiguration,
    /// No node has seen the device for some minutes.
    NoNodes,
}

impl SlotsCommand {
    /// The instance to write, and the version to test.
    pub(super) const fn target(&self) -> Option<(&InstanceName, &String)> {
        match self {
            Self::FreeNode { instance, version, .. }
            | Self::SetLayout { instance, version, .. }
            | Self::DeleteInstance { instance, version, .. } => Some((instance, version)),
            Self::DeletePod { .. } => None,
        }
    }
}
