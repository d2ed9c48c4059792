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

/// One node with accelerators. The object has the node's name.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "rouse.dev",
    version = "v1alpha1",
    kind = "AcceleratorNode",
    shortname = "anode",
    category = "rouse",
    status = "AcceleratorNodeStatus",
    derive = "PartialEq",
    doc = "A node with accelerators: what they are, and a copy of the reservations on them.",
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

/// The node's accelerators, and a copy of the reservations on them.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AcceleratorNodeStatus {
    /// Number of accelerators on the node.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub count: u32,
    /// Number of healthy accelerators on the node.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub healthy: u32,
    /// Type of the accelerators, from the node label that the pool names (`acceleratorTypeLabel`).
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Memory that may be reserved on all accelerators of the node together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<Quantity>,
    /// Memory that is reserved on all accelerators of the node together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<Quantity>,
    /// The node's accelerators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub accelerators: Vec<NodeAccelerator>,
    /// Whether the list has only accelerators that stubs reported from the Pods that got them. The node may then have
    /// others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// Copy of the pool's reservations on this node, for reading. Only the pool's ledger counts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub reservations: Vec<NodeReservation>,
    /// Ready: the node's accelerators are known, and engines may be placed on the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// One accelerator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeAccelerator {
    /// UUID of the accelerator, as the driver reports it.
    pub uuid: String,
    /// Index of the accelerator, as the driver reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub index: Option<u32>,
    /// Memory that may be reserved on the accelerator: the total, less what the driver keeps and the headroom.
    pub capacity: Quantity,
    /// Whether no fault was reported. A faulty accelerator gets no new reservations.
    pub healthy: bool,
    /// Name of the DeviceConfiguration that offers the accelerator, if one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub configuration: Option<String>,
    /// Number of slots on the accelerator, if a DeviceConfiguration offers it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub slots: Option<u32>,
    /// When an engine on the accelerator last fell asleep. The meter may lag for some time after that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_sleep: Option<Time>,
    /// When the node's agent last saw the accelerator, if an agent lists it. May be older while the accelerator is in
    /// sight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<Time>,
}

/// One reservation on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeReservation {
    /// Id of the reservation in the pool's ledger.
    #[schemars(extend("minimum" = 0))]
    pub id: u64,
    /// The InferenceModel, as namespace/name.
    pub model: String,
    /// The variant, unless it is the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
    /// Number of the engine among the variant's engines, from 0.
    #[schemars(extend("minimum" = 0))]
    pub replica: u32,
    /// Memory on each of the accelerators, in bytes.
    pub bytes: Quantity,
    /// RAM of the node, in bytes.
    pub host_bytes: Quantity,
    /// UUIDs of the accelerators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uuids: Vec<String>,
    /// State of the reservation.
    pub state: ReservationState,
}
