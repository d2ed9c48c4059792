//! GatewayReplica: what one gateway knows of demand, for the one that leads.

#![expect(clippy::duplicated_attributes, reason = "each column has its name, type and path")]
#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One gateway. The gateway creates the object and its Pod owns it, so the object is deleted with the Pod.
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
    doc = "A serving gateway, and the demand that it sees. Only that gateway writes the object.",
    printcolumn(name = "Address", type_ = "string", json_path = ".spec.address"),
    printcolumn(name = "Waiting", type_ = "integer", json_path = ".status.waiting"),
    printcolumn(name = "In Flight", type_ = "integer", json_path = ".status.inFlight"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct GatewayReplicaSpec {
    /// Where other gateways reach this gateway: an address and a port.
    #[schemars(extend("minLength" = 1, "maxLength" = 128))]
    pub address: String,
}

/// The demand that one gateway sees.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayReplicaStatus {
    /// Number of waiting requests, over all models.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub waiting: u32,
    /// Number of requests that engines are answering, over all models.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub in_flight: u32,
    /// Demand by modelName, for each model with requests at this gateway. An idle model stays listed for its
    /// cooldownPeriod, and for 5 minutes at least.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[x_kube(merge_strategy = MapMerge::Atomic)]
    pub models: BTreeMap<String, ModelDemand>,
    /// When the status was last written. A gateway that has not written for a minute counts as gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renewed: Option<Time>,
    /// SeesAll: the gateway may read everything that it should serve. Otherwise the message names what it leaves out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// The demand for one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelDemand {
    /// Number of requests that wait for the model. If no engine serves it or starts for it, the first one is written at
    /// once, and the loss of the last one a moment later. Other changes take seconds.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub waiting: u32,
    /// Number of requests that the model's engines are answering.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub in_flight: u32,
    /// When a request for the model last ended at this gateway. May be late by a tenth of the model's cooldownPeriod,
    /// or by 30s if that is longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_request: Option<Time>,
}
