//! The usage of one slot, and its text in the status of an instance.

use std::{fmt, str::FromStr};

use super::ids::VirtualId;
use crate::pairing::ids::NodeName;

/// Begins a claim by the configuration, before the virtual device and the node.
const BY_CONFIGURATION: &str = "C";

/// The node that uses a slot, and the resource by which it got the slot.
///
/// Written as an empty text, as `NODE`, or as `C:VIRTUAL:NODE`. Neither a node nor a virtual device has a colon in its
/// name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SlotUsage {
    #[default]
    Free,
    /// Claimed by a node for a container that requested the instance's resource.
    Instance { node: NodeName },
    /// Claimed by a node for a container that requested the configuration's resource and got this virtual device.
    Configuration { virtual_id: VirtualId, node: NodeName },
}

/// A text that is no usage of a slot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not the usage of a slot: write nothing for a free slot, a node, or C:VIRTUAL-DEVICE:NODE")]
pub struct SlotUsageError(pub String);

impl SlotUsage {
    #[must_use]
    pub const fn is_free(&self) -> bool {
        matches!(self, Self::Free)
    }

    /// The node that uses the slot.
    #[must_use]
    pub const fn node(&self) -> Option<&NodeName> {
        match self {
            Self::Free => None,
            Self::Instance { node } | Self::Configuration { node, .. } => Some(node),
        }
    }

    /// The virtual device under which the slot is used.
    #[must_use]
    pub const fn virtual_id(&self) -> Option<&VirtualId> {
        match self {
            Self::Free | Self::Instance { .. } => None,
            Self::Configuration { virtual_id, .. } => Some(virtual_id),
        }
    }
}

impl fmt::Display for SlotUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Free => Ok(()),
            Self::Instance { node } => f.write_str(node.as_str()),
            Self::Configuration { virtual_id, node } => write!(f, "{BY_CONFIGURATION}:{virtual_id}:{node}"),
        }
    }
}

impl FromStr for SlotUsage {
    type Err = SlotUsageError;

    fn from_str(text: &str) -> Result<Self, SlotUsageError> {
        let parts: Vec<&str> = text.split(':').collect();
        match parts.as_slice() {
            [""] => Ok(Self::Free),
            [node] => Ok(Self::Instance { node: NodeName::from(*node) }),
            [BY_CONFIGURATION, virtual_id, node] if !virtual_id.is_empty() && !node.is_empty() => {
                Ok(Self::Configuration {
                    virtual_id: VirtualId::from(*virtual_id),
                    node: NodeName::from(*node),
                })
            }
            _ => Err(SlotUsageError(text.to_owned())),
        }
    }
}
