//! DeviceInstance: one device, and which container has which of its slots.
//!
//! The status is the only record of claims. Each agent changes slots of its own node, each by a compare-and-set, so two
//! nodes that claim one slot at the same time cannot both succeed.

#![expect(clippy::duplicated_attributes, reason = "each column has its name, type and path")]
#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// One device of a DeviceConfiguration. Node agents create the object.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[kube(
    group = "rouse.dev",
    version = "v1alpha1",
    kind = "DeviceInstance",
    shortname = "devinst",
    category = "rouse",
    status = "DeviceInstanceStatus",
    derive = "PartialEq",
    doc = "A device that nodes have found, and the use of its slots. Node agents and the leader write it.",
    printcolumn(name = "Configuration", type_ = "string", json_path = ".spec.configuration"),
    printcolumn(name = "Device", type_ = "string", json_path = ".spec.deviceId", priority = 1),
    printcolumn(name = "Shared", type_ = "boolean", json_path = ".spec.shared"),
    printcolumn(name = "Capacity", type_ = "integer", json_path = ".spec.capacity"),
    printcolumn(name = "Nodes", type_ = "string", json_path = ".status.nodes"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new("self.configuration == oldSelf.configuration && self.deviceId == oldSelf.deviceId && \
                            self.shared == oldSelf.shared")
        .message("the object stands for one device: its configuration, deviceId and shared cannot be changed"),
)]
#[serde(rename_all = "camelCase")]
pub struct DeviceInstanceSpec {
    /// Name of the DeviceConfiguration.
    #[schemars(extend("minLength" = 1, "maxLength" = 253))]
    pub configuration: String,
    /// Whether nodes share the device.
    #[serde(default)]
    pub shared: bool,
    /// Number of slots, as the DeviceConfiguration has it. While slots above this number are in use, there are more.
    #[schemars(extend("minimum" = 1, "maximum" = 256))]
    pub capacity: u32,
    /// Id of the device: the UUID of an accelerator, the id of a listed device, or the URL of a server.
    #[schemars(extend("minLength" = 1, "maxLength" = 1024))]
    pub device_id: String,
    /// Properties of the device, as they were when the object was created.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 40))]
    pub properties: BTreeMap<String, String>,
}

/// Which nodes see the device, and which containers have it.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceInstanceStatus {
    /// Names of the nodes that see the device. Each agent adds and removes its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub nodes: Vec<String>,
    /// Use of each slot, by the slot's name. An empty text: free. `NODE`: a container of this node has it, which asked
    /// for the instance. `C:ID:NODE`: a container of this node has it, which asked for the configuration and got the
    /// virtual device ID.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub device_usage: BTreeMap<String, String>,
    /// Since when no container of the node has been seen with the slot that the node has claimed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unused_since: BTreeMap<String, Time>,
}
