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

/// The accelerators behind one node selector.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "rouse.dev",
    version = "v1alpha1",
    kind = "AcceleratorPool",
    shortname = "apool",
    category = "rouse",
    status = "AcceleratorPoolStatus",
    derive = "PartialEq",
    doc = "The accelerators of the nodes behind one selector, with one memory budget and the ledger of what is reserved.",
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
        .message("runtimeClassName goes with gpuAccess runtimeClass"),
)]
#[serde(rename_all = "camelCase")]
pub struct AcceleratorPoolSpec {
    /// The pool's nodes, by their labels. A node in two pools is in neither, and both say so.
    #[schemars(extend("minProperties" = 1, "maxProperties" = 16))]
    pub node_selector: BTreeMap<String, String>,
    /// What may be reserved of all accelerators together, when that is to be less than they have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "scalar::positive")]
    pub memory: Option<Quantity>,
    /// What asleep engines may keep of each accelerator together. Without it, as much as no awake engine needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleeping_memory: Option<Quantity>,
    /// RAM of each node that engines asleep at level 1 may hold together. Without it none sleeps at level 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_sleep_memory: Option<Quantity>,
    /// How long after an engine fell asleep what a meter says is not believed. At least the scrape interval, the
    /// exporter's interval and 15s together, where meters are read through Prometheus.
    #[serde(default = "a_minute")]
    pub meter_lag: Span,
    /// Requester Pods that may be scheduled onto one accelerator. 1: it is a Pod's own.
    #[serde(default = "one")]
    #[schemars(extend("minimum" = 1, "maximum" = 256))]
    pub slots: u32,
    /// The key of the taint on the pool's nodes, which engines' Pods then tolerate.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1, "maxLength" = 316))]
    pub taint: Option<String>,
    /// The node label that says which type of accelerator a node has.
    #[serde(default = "type_label")]
    #[schemars(extend("minLength" = 1, "maxLength" = 316))]
    pub accelerator_type_label: String,
    /// The extended resource that Pods ask for to be given an accelerator.
    #[serde(default = "gpu")]
    #[schemars(extend("minLength" = 1, "maxLength" = 316))]
    pub resource: String,
    /// How a Pod that was given no accelerator by the kubelet gets at one. `envvar`: NVIDIA_VISIBLE_DEVICES alone.
    /// `runtimeClass`: that and a runtime class. `privileged`: a privileged container.
    #[serde(default)]
    pub gpu_access: GpuAccess,
    /// The runtime class; `nvidia` without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1, "maxLength" = 253))]
    pub runtime_class_name: Option<String>,
    /// Namespaces whose models may use the pool; all without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "namespaces")]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub allowed_namespaces: Option<Vec<String>>,
    /// What the models of a namespace may have reserved together, by the namespace's name. The name `*` is every
    /// namespace that is not listed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 1000))]
    pub namespace_quota: BTreeMap<String, Quantity>,
    /// The highest priority that a model has here, whatever it says.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = -1000, "maximum" = 1000))]
    pub max_priority: Option<i32>,
    /// Models may be pinned here, or have minReplicas.
    #[serde(default = "yes")]
    pub pinnable: bool,
}

/// How a Pod that was given no accelerator gets at one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum GpuAccess {
    #[default]
    Envvar,
    RuntimeClass,
    Privileged,
}

/// The ledger, and its sums.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AcceleratorPoolStatus {
    /// The generation of the object that this status speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Nodes of the pool.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub nodes: u32,
    /// Healthy accelerators on them.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub accelerators: u32,
    /// What may be granted: the sum over the accelerators, or `memory` of the spec when that is less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<Quantity>,
    /// What is reserved. Never more than total, but for what was found running when Rouse came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<Quantity>,
    /// Total less allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available: Option<Quantity>,
    /// Reservations in the ledger.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub count: u32,
    /// Under which leader the ledger is: the epoch of whoever wrote it last. It never falls, and a gateway whose own is
    /// less changes nothing here any more.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub epoch: u64,
    /// Every reservation, packed. AcceleratorNodes have them in a readable form.
    #[serde(default, skip_serializing_if = "Ledger::is_empty")]
    pub ledger: Ledger,
    /// Ready: the selector has nodes, and they are in no other pool.
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
    "nvidia.com/gpu".to_owned()
}
