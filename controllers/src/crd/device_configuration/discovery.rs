//! `spec.discovery` of a DeviceConfiguration: how node agents find devices.

#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

use std::collections::BTreeMap;

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the devices are found: exactly one of the fields is set.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[x_kube(
    validation = Rule::new("[has(self.accelerators), has(self.static), has(self.http)].exists_one(set, set)")
        .message("set exactly one of accelerators, static and http"),
)]
#[serde(rename_all = "camelCase")]
pub struct Discovery {
    /// The accelerators of each node, as the node's driver reports them. Write `{}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerators: Option<NodeAcceleratorDiscovery>,
    /// Devices that are listed here.
    #[serde(default, rename = "static", skip_serializing_if = "Option::is_none")]
    pub listed: Option<StaticDiscovery>,
    /// Servers that the nodes reach over the network. A node sees a server while the server answers it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpDiscovery>,
}

/// Discovery of accelerators. It has no settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeAcceleratorDiscovery {}

/// Devices by their ids.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StaticDiscovery {
    /// The devices.
    #[schemars(extend("minItems" = 1, "maxItems" = 1000))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["id".into()]))]
    pub devices: Vec<StaticDevice>,
}

/// One listed device.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StaticDevice {
    /// Id of the device. It is also its property `id`.
    #[schemars(extend("minLength" = 1, "maxLength" = 253))]
    pub id: String,
    /// Properties of the device, for `env`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub properties: BTreeMap<String, String>,
    /// Names of the nodes that see the device. Default: all nodes that take part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 1000))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub nodes: Vec<String>,
}

/// Servers that are asked whether they are there.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[x_kube(
    validation = Rule::new("self.timeoutSeconds <= self.intervalSeconds")
        .message("timeoutSeconds must be at most intervalSeconds"),
)]
#[serde(rename_all = "camelCase")]
pub struct HttpDiscovery {
    /// The servers. Each is one device, with its URL as the id.
    #[schemars(extend("minItems" = 1, "maxItems" = 256))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["url".into()]))]
    pub endpoints: Vec<HttpEndpoint>,
    /// Seconds between two questions of a node to a server.
    #[serde(default = "ten_seconds")]
    #[schemars(extend("minimum" = 1, "maximum" = 3600))]
    pub interval_seconds: u32,
    /// Seconds within which a server must answer.
    #[serde(default = "two_seconds")]
    #[schemars(extend("minimum" = 1, "maximum" = 60))]
    pub timeout_seconds: u32,
}

/// One server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpEndpoint {
    /// Address that a node asks with GET, http or https. The device is there if the answer has a status of 200 to 299.
    /// It is also the property `url`.
    #[schemars(extend("minLength" = 1, "maxLength" = 1024))]
    pub url: String,
    /// Properties of the device, for `env`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub properties: BTreeMap<String, String>,
}

const fn ten_seconds() -> u32 {
    10
}

const fn two_seconds() -> u32 {
    2
}
