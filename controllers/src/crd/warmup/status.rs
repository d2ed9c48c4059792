//! `status` of a Warmup: what the leader found and did. A new leader continues from here.
//!
//! The status stays small however many nodes there are: counts of all nodes, details of 200 nodes at most, and a packed
//! record of the nodes that are done, have failed or were tried.

#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Progress of a Warmup.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WarmupStatus {
    /// Generation of the object that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Progress in one word. Absent until the Warmup has begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<WarmupStatusPhase>,
    /// What is warmed, in a few words: `model qwen3`, `group sglang`, `nodes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// When the Warmup began. An edit of the spec begins it again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Generation with which the Warmup began. Pauses do not change it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_generation: Option<i64>,
    /// Hash of the spec. Pauses do not change it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec_hash: Option<String>,
    /// When the Warmup completed or failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Number of nodes that should be warm.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub desired_node_num: u32,
    /// Number of nodes on which a Pod of the Warmup runs or waits for its image.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub active_node_num: u32,
    /// Number of nodes that have everything.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub succeeded_node_num: u32,
    /// Number of nodes that have failed for good.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub failed_node_num: u32,
    /// Names of the failed nodes, 200 at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub failed_nodes: Vec<String>,
    /// Number of images and actions over all nodes, by state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub items: Option<WarmupItemCounts>,
    /// Nodes that are not done or have failed, 200 at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub nodes: Vec<WarmupNodeStatus>,
    /// Number of such nodes that are not listed.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub more_nodes: u32,
    /// Outcomes of all nodes, packed. The next leader reads them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub record: Vec<WarmupRecordGroup>,
    /// Since when the Warmup is paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused_since: Option<Time>,
    /// Seconds that earlier pauses took, which do not count for timeoutSeconds.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub paused_seconds: u64,
    /// Accepted: the spec is valid. TargetsFound: the target exists and has nodes. Complete: every node is warm. The
    /// reasons say why not, the messages what to do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Progress of a Warmup in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WarmupStatusPhase {
    InProgress,
    Paused,
    Completed,
    Failed,
}

/// Number of images and actions over all nodes, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WarmupItemCounts {
    /// Number of items that wait.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub pending: u32,
    /// Number of images that nodes are pulling, and of actions that run.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub pulling: u32,
    /// Number of images that nodes have, and of actions that are done.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub present: u32,
    /// Number of items that have failed for good.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub failed: u32,
    /// Number of items that are not tried, because their node or the Warmup has failed.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub skipped: u32,
}

/// One node that is not done, or has failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WarmupNodeStatus {
    /// Name of the node.
    pub node: String,
    /// The image, or `action` for the custom action. Absent if the state is that of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub item: Option<String>,
    /// State of the item.
    pub state: WarmupNodeState,
    /// Cause of the state, in one word: `NotFound`, `Auth`, `Cordoned`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// The cause in a sentence, with what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Number of failures so far.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub attempts: u32,
    /// When the item is tried again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_try: Option<Time>,
    /// Milliseconds that the last attempt took.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub duration_millis: Option<u64>,
    /// Digest of the image that the node has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// State of one item of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WarmupNodeState {
    Pending,
    Pulling,
    Present,
    Failed,
    Skipped,
}

/// Nodes with the same outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WarmupRecordGroup {
    /// Outcome of the nodes.
    pub state: WarmupRecordState,
    /// Hash of what the nodes should have. A node whose items have another hash is warmed again.
    #[schemars(extend("minimum" = 0))]
    pub items: u32,
    /// Number of failures of each of the nodes.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub attempts: u32,
    /// Why the nodes failed, in one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// Hashes of the nodes' names, 8 characters each.
    pub nodes: String,
    /// Hashes of the nodes' uids, 3 characters each, in the same order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uids: Option<String>,
}

/// Outcome of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum WarmupRecordState {
    Done,
    Failed,
    Retried,
}
