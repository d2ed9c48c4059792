//! Why a node is not warm, in a word and in a sentence.

mod classify;

use std::fmt;

use serde::Serialize;

pub use self::classify::classify_pull;

/// Characters of a foreign message that are kept: statuses list many nodes and must stay small.
const MAX_MESSAGE_CHARS: usize = 160;

/// Why an item of a node is missing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum WarmupCause {
    /// The image does not exist.
    NotFound,
    /// The registry refuses the pull.
    Auth,
    InvalidImage,
    RateLimited,
    Network,
    NoSpace,
    /// The image is not made for the node's platform. If a container was created, the node has the image nevertheless.
    WrongPlatform,
    NodeGone,
    NodeNotReady,
    Cordoned,
    /// A taint that the Pods do not tolerate, by its key.
    Taint(String),
    /// The node has no room for another Pod.
    NodeFull,
    DiskPressure,
    /// An engine on the node waits for its own image, and goes first.
    EnginePulling,
    /// The exit code is 0 if it is not known any more.
    ActionFailed {
        exit_code: i32,
    },
    /// Admission or a quota refuses the Pod, with its message.
    Refused(String),
    Unknown(String),
}

impl WarmupCause {
    #[must_use]
    pub fn unknown(message: &str) -> Self {
        Self::Unknown(shorten(message))
    }

    #[must_use]
    pub fn refused(message: &str) -> Self {
        Self::Refused(shorten(message))
    }

    /// The cause in one word, for conditions and metrics.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::NotFound => "NotFound",
            Self::Auth => "Auth",
            Self::InvalidImage => "InvalidImage",
            Self::RateLimited => "RateLimited",
            Self::Network => "Network",
            Self::NoSpace => "NoSpace",
            Self::WrongPlatform => "WrongPlatform",
            Self::NodeGone => "NodeGone",
            Self::NodeNotReady => "NodeNotReady",
            Self::Cordoned => "Cordoned",
            Self::Taint(_) => "Taint",
            Self::NodeFull => "NodeFull",
            Self::DiskPressure => "DiskPressure",
            Self::EnginePulling => "EnginePulling",
            Self::ActionFailed { .. } => "ActionFailed",
            Self::Refused(_) => "Refused",
            Self::Unknown(_) => "Unknown",
        }
    }

    /// Returns the recorded cause of a failed node. Details that no record has are missing in it.
    #[must_use]
    pub(super) fn from_reason(reason: &str) -> Self {
        match reason {
            "NotFound" => Self::NotFound,
            "Auth" => Self::Auth,
            "InvalidImage" => Self::InvalidImage,
            "RateLimited" => Self::RateLimited,
            "Network" => Self::Network,
            "NoSpace" => Self::NoSpace,
            "WrongPlatform" => Self::WrongPlatform,
            "NodeGone" => Self::NodeGone,
            "ActionFailed" => Self::ActionFailed { exit_code: 0 },
            _ => Self::Unknown("the node failed under an earlier leader".to_owned()),
        }
    }

    /// Whether another attempt would end the same way: the node fails at once.
    #[must_use]
    pub const fn is_final(&self) -> bool {
        matches!(self, Self::NotFound | Self::Auth | Self::InvalidImage | Self::NodeGone)
    }

    /// Whether it counts as a failure of the node. Otherwise the item waits until the cause is over.
    #[must_use]
    pub const fn is_failure(&self) -> bool {
        !matches!(
            self,
            Self::NodeNotReady
                | Self::Cordoned
                | Self::Taint(_)
                | Self::NodeFull
                | Self::DiskPressure
                | Self::EnginePulling
                | Self::Refused(_)
        )
    }
}

fn shorten(message: &str) -> String {
    let message = message.trim();
    if message.chars().count() <= MAX_MESSAGE_CHARS {
        return message.to_owned();
    }
    let kept: String = message.chars().take(MAX_MESSAGE_CHARS - 1).collect();
    format!("{kept}…")
}

/// Words the cause with what to do about it, to follow the name of a node or an image.
impl fmt::Display for WarmupCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound => f.write_str("the image does not exist: correct its name or tag"),
            Self::Auth => {
                f.write_str("the registry refuses the pull: check the image's name and pullSecrets")
            }
            Self::InvalidImage => f.write_str("the image's reference is invalid: correct it"),
            Self::RateLimited => {
                f.write_str("the registry limits the rate of pulls: set pullSecrets or use a mirror")
            }
            Self::Network => {
                f.write_str("the registry cannot be reached: check its name, network and certificate")
            }
            Self::NoSpace => f.write_str("the node's disk is full: free some space"),
            Self::WrongPlatform => {
                f.write_str("the image is not made for the node's platform: use one that is")
            }
            Self::NodeGone => f.write_str("the node is gone: remove it from the targets"),
            Self::NodeNotReady => f.write_str("the node is not ready: check its kubelet"),
            Self::Cordoned => f.write_str("the node is cordoned: uncordon it"),
            Self::Taint(key) => write!(f, "the node has the taint {key}: add a toleration"),
            Self::NodeFull => f.write_str("the node has no room for another Pod: make room"),
            Self::DiskPressure => f.write_str("the node has disk pressure: free some space"),
            Self::EnginePulling => {
                f.write_str("an engine on the node pulls its image: the Warmup goes on after it")
            }
            Self::ActionFailed { exit_code: 0 } => f.write_str("the action failed: read the log of its Pod"),
            Self::ActionFailed { exit_code } => {
                write!(f, "the action ended with exit code {exit_code}: read the log of its Pod")
            }
            Self::Refused(message) => write!(f, "the Pod is refused: {message}"),
            Self::Unknown(message) => f.write_str(message),
        }
    }
}
