//! AcceleratorPool: the accelerators behind one node selector, with one memory budget, and the ledger of what is
//! reserved of it. Its status is the one place where two that both believe they lead meet: a reservation is an update
//! with the resourceVersion that was read.

#![expect(clippy::duplicated_attributes, reason = "each column has its name, type and path")]
#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    ledger::Ledger,
    scalar::{self, Quantity, Span},
};

/// Extended resource of NVIDIA's device plugin, which a pool has by default.
pub const NVIDIA_GPU: &str = "nvidia.com/gpu";

/// The accelerators of the nodes that one selector matches.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "rouse.dev",
    version = "v1alpha1",
    kind = "AcceleratorPool",
    shortname = "apool",
    category = "rouse",
    status = "AcceleratorPoolStatus",
    derive = "PartialEq",
    doc = "The accelerators of the nodes that one selector matches, with one memory budget and one ledger.",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes"),
    printcolumn(name = "Accelerators", type_ = "integer", json_path = ".status.accelerators"),
    printcolumn(name = "Total", type_ = "string", json_path = ".status.total"),
    printcolumn(name = "Allocated", type_ = "string", json_path = ".status.allocated"),
    printcolumn(name = "Available", type_ = "string", json_path = ".status.available"),
    printcolumn(name = "Reservations", type_ = "integer", json_path = ".status.count", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new("!has(self.runtimeClassName) || self.gpuAccess == 'runtimeClass'")
        .message("runtimeClassName is only for gpuAccess runtimeClass: remove it, or set that gpuAccess"),
)]
#[serde(rename_all = "camelCase")]
pub struct AcceleratorPoolSpec {
    /// Labels of the pool's nodes. A node with the labels of two pools is in neither, and both pools report it.
    #[schemars(extend("minProperties" = 1, "maxProperties" = 16))]
    pub node_selector: BTreeMap<String, String>,
    /// Memory that may be reserved on all accelerators together, if it should be less than they have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "scalar::positive")]
    pub memory: Option<Quantity>,
    /// Memory that all asleep engines together may keep on each accelerator. Default: as much as no awake engine needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleeping_memory: Option<Quantity>,
    /// RAM of each node that all engines asleep at level 1 may hold together. Without it, no engine sleeps at level 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_sleep_memory: Option<Quantity>,
    /// How long meter readings are ignored after an engine fell asleep. If meters are read through Prometheus, use at
    /// least the scrape interval, the exporter's interval and 15s together.
    #[serde(default = "a_minute")]
    pub meter_lag: Span,
    /// Number of requester Pods that may be scheduled onto one accelerator. 1: a Pod has its accelerator to itself.
    #[serde(default = "one")]
    #[schemars(extend("minimum" = 1, "maximum" = 256))]
    pub slots: u32,
    /// Key of the taint on the pool's nodes, which engines' Pods then tolerate.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1, "maxLength" = 316))]
    pub taint: Option<String>,
    /// Node label that names the type of a node's accelerators.
    #[serde(default = "type_label")]
    #[schemars(extend("minLength" = 1, "maxLength" = 316))]
    pub accelerator_type_label: String,
    /// Extended resource that Pods request to get an accelerator.
    #[serde(default = "gpu")]
    #[schemars(extend("minLength" = 1, "maxLength" = 316))]
    pub resource: String,
    /// How a Pod that gets no accelerator from the kubelet gains access to one. `envvar`: NVIDIA_VISIBLE_DEVICES alone.
    /// `runtimeClass`: that variable and a runtime class. `privileged`: that variable and a privileged container.
    #[serde(default)]
    pub gpu_access: GpuAccess,
    /// Name of the runtime class. Default: `nvidia`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1, "maxLength" = 253))]
    pub runtime_class_name: Option<String>,
    /// Namespaces whose models may use the pool. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "namespaces")]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub allowed_namespaces: Option<Vec<String>>,
    /// Memory that the models of a namespace may reserve together, by the namespace's name. `*` sets the quota of each
    /// namespace that is not listed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 1000))]
    pub namespace_quota: BTreeMap<String, Quantity>,
    /// Highest priority of a model in this pool. A higher `priority` counts as this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = -1000, "maximum" = 1000))]
    pub max_priority: Option<i32>,
    /// Whether models in this pool may be pinned, or have minReplicas.
    #[serde(default = "yes")]
    pub pinnable: bool,
}

/// How a Pod that gets no accelerator from the kubelet gains access to one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum GpuAccess {
    #[default]
    Envvar,
    RuntimeClass,
    Privileged,
}

/// The pool's ledger, and its sums.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AcceleratorPoolStatus {
    /// Generation of the object that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Number of nodes in the pool.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub nodes: u32,
    /// Number of healthy accelerators in the pool.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub accelerators: u32,
    /// Memory that may be reserved: the sum over the accelerators, or `spec.memory` if that is less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<Quantity>,
    /// Reserved memory. Never more than total, except for engines that already ran when Rouse took over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<Quantity>,
    /// Total less allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available: Option<Quantity>,
    /// Number of reservations in the ledger.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub count: u32,
    /// Epoch of the leader that last wrote the ledger. It never falls, and a gateway with a lower epoch can no longer
    /// change the ledger.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub epoch: u64,
    /// All reservations, packed. AcceleratorNodes have them in a readable form.
    #[serde(default, skip_serializing_if = "Ledger::is_empty")]
    pub ledger: Ledger,
    /// Ready: the selector matches nodes, and none of them is in another pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

fn namespaces(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "array",
        "maxItems": 1000,
        "items": {"type": "string", "minLength": 1, "maxLength": 63},
    })
}

const fn one() -> u32 {
    1
}

const fn yes() -> bool {
    true
}

fn a_minute() -> Span {
    "1m".into()
}

fn type_label() -> String {
    "nvidia.com/gpu.product".to_owned()
}

fn gpu() -> String {
    NVIDIA_GPU.to_owned()
}
