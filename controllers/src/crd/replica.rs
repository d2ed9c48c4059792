//! GatewayReplica: what one gateway knows of demand, for the one that leads.

#![expect(clippy::duplicated_attributes, reason = "each column has its name, type and path")]
#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One gateway. Its Pod makes the object and owns it, so it goes with the Pod.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "rouse.dev",
    version = "v1alpha1",
    kind = "GatewayReplica",
    namespaced,
    shortname = "gwr",
    category = "rouse",
    status = "GatewayReplicaStatus",
    derive = "PartialEq",
    doc = "A gateway that serves, and the demand that it sees. Written by that gateway alone.",
    printcolumn(name = "Address", type_ = "string", json_path = ".spec.address"),
    printcolumn(name = "Waiting", type_ = "integer", json_path = ".status.waiting"),
    printcolumn(name = "In Flight", type_ = "integer", json_path = ".status.inFlight"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct GatewayReplicaSpec {
    /// Where other gateways reach it: an address and a port.
    #[schemars(extend("minLength" = 1, "maxLength" = 128))]
    pub address: String,
}

/// The demand that one gateway sees.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayReplicaStatus {
    /// Requests that wait, over all models.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub waiting: u32,
    /// Requests that are being answered, over all models.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub in_flight: u32,
    /// By modelName: each model that has been asked for here.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub models: BTreeMap<String, ModelDemand>,
    /// When it was last written. A gateway that has not written for a minute is taken to be gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renewed: Option<Time>,
    /// SeesAll: this gateway may see all that it is to serve. Else the message says what it leaves out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// The demand for one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelDemand {
    /// Requests that wait for the model. From 0 and to 0 it is written at once, else every few seconds.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub waiting: u32,
    /// Requests that its engines are answering.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub in_flight: u32,
    /// When a request for it last ended here. Written rarely: up to a tenth of the model's cooldownPeriod late.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_request: Option<Time>,
}
