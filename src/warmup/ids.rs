//! Names of Warmups, images, actions, Pods and sets of warm nodes.

use std::fmt;

use serde::{Deserialize, Serialize};

string_ids! {
    /// A Warmup: `namespace/name`.
    WarmupId;
    /// The reference of an image, as a user wrote it.
    ImageName;
    /// Hash of a custom action. An action whose template changes has another.
    ActionHash;
    /// A Pod of a Warmup: `namespace/name`.
    WarmPodName;
    /// Nodes that are warm for the same Warmup or model: 16 hexadecimal digits, as node labels have them.
    WarmSet;
    /// Hash of a Warmup's spec without `paused`.
    WarmupSpecHash;
}

/// One thing that a node should have. Images come before the action.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WarmupItem {
    Image(ImageName),
    Action(ActionHash),
}

impl WarmupItem {
    #[must_use]
    pub const fn is_action(&self) -> bool {
        matches!(self, Self::Action(_))
    }

    #[must_use]
    pub const fn image(&self) -> Option<&ImageName> {
        match self {
            Self::Image(image) => Some(image),
            Self::Action(_) => None,
        }
    }
}

/// The image, or `action`.
impl fmt::Display for WarmupItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(image) => f.write_str(image.as_str()),
            Self::Action(_) => f.write_str("action"),
        }
    }
}
