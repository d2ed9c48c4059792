//! DeviceConfiguration: devices that Pods share by slots, and what a container with a slot gets.
//!
//! The object belongs to the administrator. Node agents find the devices and write a
//! [`DeviceInstance`](super::DeviceInstance) for each; the leader writes the status.

#![expect(clippy::duplicated_attributes, reason = "each column has its name, type and path")]
#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

mod discovery;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::discovery::{
    Discovery, HttpDiscovery, HttpEndpoint, NodeAcceleratorDiscovery, StaticDevice, StaticDiscovery,
};

/// Which devices there are, and how Pods share them.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "rouse.dev",
    version = "v1alpha1",
    kind = "DeviceConfiguration",
    shortname = "devcfg",
    category = "rouse",
    status = "DeviceConfigurationStatus",
    derive = "PartialEq",
    doc = "Devices that Pods share by slots: how they are found, how many slots each has, and what a container gets.",
    printcolumn(
        name = "Accepted",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Accepted\")].status"
    ),
    printcolumn(name = "Capacity", type_ = "integer", json_path = ".spec.capacity"),
    printcolumn(name = "Devices", type_ = "integer", json_path = ".status.devices"),
    printcolumn(name = "Slots", type_ = "integer", json_path = ".status.slots"),
    printcolumn(name = "Used", type_ = "integer", json_path = ".status.usedSlots"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new("!has(self.discovery.accelerators) || !has(self.shared) || !self.shared")
        .message("nodes cannot share accelerators: remove shared, and set capacity for several Pods on one \
                  accelerator"),
)]
#[serde(rename_all = "camelCase")]
pub struct DeviceConfigurationSpec {
    /// How the devices are found. Set exactly one of its fields.
    pub discovery: Discovery,
    /// Labels of the nodes whose agents take part. Default: all nodes with an agent.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub node_selector: BTreeMap<String, String>,
    /// Number of slots of each device: so many containers may have the device at a time, on all nodes together.
    #[serde(default = "one")]
    #[schemars(extend("minimum" = 1, "maximum" = 256))]
    pub capacity: u32,
    /// Whether the nodes share one device, with one set of slots. Otherwise each node has a device of its own, even if
    /// the ids are the same. Default: true, and false for accelerators.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<bool>,
    /// Variables of a container with a slot. `$(NAME)` stands for a property of the device.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub env: BTreeMap<String, String>,
    /// Files and folders of the node that a container with a slot gets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["containerPath".into()]))]
    pub mounts: Vec<ContainerMount>,
    /// Device files of the node that a container with a slot gets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["containerPath".into()]))]
    pub devices: Vec<ContainerDevice>,
    /// Seconds for which a claimed slot may be without a container. After that it is free again.
    #[serde(default = "five_minutes")]
    #[schemars(extend("minimum" = 1, "maximum" = 86_400))]
    pub unused_seconds: u32,
}

/// A file or folder of the node in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerMount {
    /// Path on the node.
    #[schemars(extend("minLength" = 1, "maxLength" = 1024))]
    pub host_path: String,
    /// Path in the container.
    #[schemars(extend("minLength" = 1, "maxLength" = 1024))]
    pub container_path: String,
    /// Whether the container may only read there.
    #[serde(default)]
    pub read_only: bool,
}

/// A device file of the node in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerDevice {
    /// Path on the node.
    #[schemars(extend("minLength" = 1, "maxLength" = 1024))]
    pub host_path: String,
    /// Path in the container.
    #[schemars(extend("minLength" = 1, "maxLength" = 1024))]
    pub container_path: String,
    /// What the container may do: `r` read, `w` write, `m` create the file.
    #[serde(default = "all_permissions")]
    #[schemars(extend("pattern" = "^[rwm]{1,3}$"))]
    pub permissions: String,
}

/// What became of a DeviceConfiguration.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceConfigurationStatus {
    /// Generation of the object that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Number of devices that were found: of DeviceInstances.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub devices: u32,
    /// Number of slots of all devices together.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub slots: u32,
    /// Number of claimed slots.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub used_slots: u32,
    /// Accepted: the spec is valid. If it is False, the message says what to correct, and no node offers the devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

const fn one() -> u32 {
    1
}

const fn five_minutes() -> u32 {
    300
}

fn all_permissions() -> String {
    "rwm".to_owned()
}
