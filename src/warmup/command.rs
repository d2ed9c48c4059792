//! What the decisions of Warmups order.

use super::ids::{WarmPodName, WarmSet, WarmupId, WarmupItem};
use crate::pairing::ids::NodeName;

/// One write to the API server. Repeating it changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WarmupCommand {
    /// Creates the Pod whose name these values determine. One that exists already is a success.
    CreatePod {
        id: WarmupId,
        node: NodeName,
        item: WarmupItem,
        generation: u64,
        items_hash: u32,
        attempt: u32,
    },
    DeletePod {
        id: WarmupId,
        name: WarmPodName,
    },
    /// Labels a node as warm for a set.
    SetWarm {
        node: NodeName,
        set: WarmSet,
    },
    RemoveWarm {
        node: NodeName,
        set: WarmSet,
    },
    /// Deletes the finished Warmup whose time to live is over.
    DeleteWarmup {
        id: WarmupId,
    },
}
