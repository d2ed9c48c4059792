//! AcceleratorNode: one node's accelerators, for people and for the placing of Pods.
//!
//! The reservations here are a copy for reading, written after the pool's ledger and matched by their ids. Nothing is
//! ever decided by adding them up. What a meter reads is not here: it lives in memory and in metrics.

#![expect(clippy::duplicated_attributes, reason = "each column has its name, type and path")]
#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ledger::ReservationState, scalar::Quantity};

/// One node with accelerators; it has the node's name.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "rouse.dev",
    version = "v1alpha1",
    kind = "AcceleratorNode",
    shortname = "anode",
    category = "rouse",
    status = "AcceleratorNodeStatus",
    derive = "PartialEq",
    doc = "A node with accelerators: what they are, and a copy of what is reserved on them.",
    printcolumn(name = "Pool", type_ = "string", json_path = ".spec.pool"),
    printcolumn(name = "Type", type_ = "string", json_path = ".status.type"),
    printcolumn(name = "Accelerators", type_ = "integer", json_path = ".status.count"),
    printcolumn(name = "Healthy", type_ = "integer", json_path = ".status.healthy"),
    printcolumn(name = "Total", type_ = "string", json_path = ".status.total"),
    printcolumn(name = "Reserved", type_ = "string", json_path = ".status.reserved"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct AcceleratorNodeSpec {
    /// The AcceleratorPool that the node belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 253))]
    pub pool: Option<String>,
}

/// What there is on the node.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AcceleratorNodeStatus {
    /// Accelerators that it has.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub count: u32,
    /// Those of them that are healthy.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub healthy: u32,
    /// Of what type they are, by the node's label that its pool names.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// What may be granted on all of them together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<Quantity>,
    /// What is reserved on all of them together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<Quantity>,
    /// Each accelerator.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub accelerators: Vec<NodeAccelerator>,
    /// The list has only accelerators that stubs reported from Pods which were given them: the node may have others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// A copy of the pool's reservations on this node, for reading. The pool's ledger is what counts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub reservations: Vec<NodeReservation>,
    /// Ready: the node's accelerators are known and it may be given work.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// One accelerator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeAccelerator {
    /// Its UUID, as the driver names it.
    pub uuid: String,
    /// What may be granted on it: the total, less what the driver keeps and the headroom.
    pub capacity: Quantity,
    /// No fault was reported. On a faulty one nothing new is granted.
    pub healthy: bool,
    /// When an engine on it last fell asleep: until some time later its meter may lag behind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_sleep: Option<Time>,
}

/// One reservation on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeReservation {
    /// As in the pool's ledger.
    #[schemars(extend("minimum" = 0))]
    pub id: u64,
    /// The InferenceModel: namespace/name.
    pub model: String,
    /// Which of its engines.
    #[schemars(extend("minimum" = 0))]
    pub replica: u32,
    /// Bytes on each of the accelerators.
    pub bytes: Quantity,
    /// Bytes of the node's RAM.
    pub host_bytes: Quantity,
    /// The accelerators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uuids: Vec<String>,
    /// How far it has come.
    pub state: ReservationState,
}
