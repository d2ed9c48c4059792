//! What a status shows of a Warmup.

use std::{collections::BTreeMap, fmt};

use serde::{Serialize, Serializer};

use super::{cause::WarmupCause, ids::WarmupItem, progress::WarmupProgress};
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
};

/// Nodes that a report lists. A status with more would be too large for the API server.
pub const MAX_LISTED_NODES: usize = 200;

/// One Warmup as its status shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarmupReport {
    /// What the status must store.
    pub progress: WarmupProgress,
    /// Target nodes, and nodes that were deleted while they were warmed.
    pub desired: u32,
    pub active: u32,
    pub succeeded: u32,
    pub failed: u32,
    /// Numbers of images and actions of all nodes. A state without items is missing.
    pub items: BTreeMap<ItemState, u32>,
    /// Nodes that are not done or have failed, the failed ones first: [`MAX_LISTED_NODES`] at most.
    pub nodes: Vec<NodeReport>,
    /// Number of such nodes that are not listed.
    pub more_nodes: u32,
    pub reason: WarmupReason,
    /// A sentence with the numbers, and with what to do if something is wrong.
    pub message: String,
}

/// State of one item of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum ItemState {
    /// It waits: for its turn, for a node that is not usable, for the end of a back-off.
    Pending,
    /// Its Pod exists. An action runs.
    Pulling,
    Present,
    Failed,
    /// It is not tried, because the node or the Warmup has failed.
    Skipped,
}

/// One node that is not done or has failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    pub node: NodeName,
    /// The item that the rest is about; `None` if it is about the whole node.
    #[serde(serialize_with = "as_text")]
    pub item: Option<WarmupItem>,
    pub state: ItemState,
    pub cause: Option<WarmupCause>,
    /// Failures so far.
    pub attempts: u32,
    pub next_try: Option<Tick>,
    /// Duration of the last attempt that ended.
    pub duration: Option<Millis>,
    pub digest: Option<String>,
}

/// Why a Warmup is where it is, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WarmupReason {
    Warming,
    Paused,
    /// The target does not exist yet, or has no nodes.
    WaitingForTarget,
    /// None of the nodes that are left can be warmed now.
    WaitingForNodes,
    /// Admission or a quota refuses the Pods.
    PodsRefused,
    /// Every node is warm, and is kept so.
    KeepingWarm,
    AllNodesWarm,
    /// Ended with failed nodes, as many as the limit allows.
    CompletedWithFailures,
    InvalidSpec,
    TargetNotFound,
    TimeoutExceeded,
    MaxFailedNodesExceeded,
}

impl WarmupReason {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Warming => "Warming",
            Self::Paused => "Paused",
            Self::WaitingForTarget => "WaitingForTarget",
            Self::WaitingForNodes => "WaitingForNodes",
            Self::PodsRefused => "PodsRefused",
            Self::KeepingWarm => "KeepingWarm",
            Self::AllNodesWarm => "AllNodesWarm",
            Self::CompletedWithFailures => "CompletedWithFailures",
            Self::InvalidSpec => "InvalidSpec",
            Self::TargetNotFound => "TargetNotFound",
            Self::TimeoutExceeded => "TimeoutExceeded",
            Self::MaxFailedNodesExceeded => "MaxFailedNodesExceeded",
        }
    }
}

impl fmt::Display for WarmupReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

fn as_text<S: Serializer>(item: &Option<WarmupItem>, serializer: S) -> Result<S::Ok, S::Error> {
    match item {
        Some(item) => serializer.collect_str(item),
        None => serializer.serialize_none(),
    }
}
