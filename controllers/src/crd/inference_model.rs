//! InferenceModel: what a client names, and how it is run. As users write it; what it means is told by the conversion.

#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

mod engine;
mod status;

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    scalar::{self, Quantity, Span, SpanOrNever},
    template::{self, PodTemplateJson},
};

pub use self::{
    engine::{EngineKindSpec, EngineSpec, OnDisconnectSpec, ProbeTaskSpec, SleepLevelSpec, SleepMode},
    status::{
        DEFAULT_VARIANT, EngineFailure, EngineState, EngineStatus, InferenceModelStatus, LearnedStatus,
        VariantStatus,
    },
};

/// What clients name as the model of a request, and how its engines are run.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "rouse.dev",
    version = "v1alpha1",
    kind = "InferenceModel",
    namespaced,
    shortname = "im",
    category = "rouse",
    status = "InferenceModelStatus",
    derive = "PartialEq",
    doc = "A model that clients can name, and how its engines are run, put away and brought back.",
    validation = Rule::new("!has(self.spec.dependencies) || !(self.metadata.name in self.spec.dependencies)")
        .message("a model cannot depend on itself: take its own name out of dependencies"),
    printcolumn(name = "Model", type_ = "string", json_path = ".spec.modelName"),
    printcolumn(name = "Ready", type_ = "boolean", json_path = ".status.ready"),
    printcolumn(
        name = "Status",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(name = "Replicas", type_ = "integer", json_path = ".status.replicas"),
    printcolumn(name = "Memory", type_ = "string", json_path = ".spec.memory"),
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode", priority = 1),
    printcolumn(name = "Last Request", type_ = "date", json_path = ".status.lastRequestTime", priority = 1),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new("(self.mode == 'external') == has(self.backendUrl)")
        .message("backendUrl is for mode external, which needs it"),
    validation = Rule::new("self.mode == 'external' || has(self.memory)")
        .message("memory is missing: say what one engine takes of each accelerator, like 80Gi"),
    validation = Rule::new(
        "self.mode == 'external' ? !has(self.template) && !has(self.containerImage) : \
         has(self.template) != has(self.containerImage)")
        .message("an engine is run from exactly one of template and containerImage, and none in mode external"),
    validation = Rule::new("!has(self.resources) || has(self.containerImage)")
        .message("resources go with containerImage: in a template they stand at the container"),
    validation = Rule::new(
        "self.mode != 'external' || !(has(self.memoryAsleep) || has(self.hostMemory) || has(self.stopAfter) || \
         has(self.eviction) || has(self.variants) || self.pinned || self.minReplicas > 0)")
        .message("mode external is never put to sleep, stopped or scaled: take out memoryAsleep, hostMemory, \
                  stopAfter, eviction, variants, pinned and minReplicas"),
    validation = Rule::new(
        "!has(self.stopAfter) || self.stopAfter == 'never' || self.cooldownPeriod == 'never' || \
         duration(self.stopAfter) >= duration(self.cooldownPeriod)")
        .message("stopAfter is not before cooldownPeriod"),
    validation = Rule::new("self.minReplicas <= self.maxReplicas")
        .message("minReplicas is at most maxReplicas"),
    validation = Rule::new("!has(self.aliases) || !(self.modelName in self.aliases)")
        .message("modelName need not be among the aliases"),
    validation = Rule::new("self.modelName == oldSelf.modelName")
        .message("modelName cannot be changed, since engines run under it: make another InferenceModel, or add an alias"),
)]
#[serde(rename_all = "camelCase")]
pub struct InferenceModelSpec {
    /// What clients say as `model`. Unique over the watched namespaces, aliases included: of two objects with the same
    /// name the newer is not served, and its condition Accepted says so. It cannot be changed.
    #[schemars(extend("minLength" = 1, "maxLength" = 256, "pattern" = MODEL_NAME))]
    pub model_name: String,
    /// Other names that mean this model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "aliases")]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub aliases: Vec<String>,
    /// Memory that one engine takes of each of its accelerators while awake: `80Gi`, `1.5Gi`, or bytes. Required but
    /// for mode external.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "scalar::positive")]
    pub memory: Option<Quantity>,
    /// What an asleep engine keeps of each accelerator. Without it 4Gi is taken until it was measured; 0 for engines that
    /// cannot sleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_asleep: Option<Quantity>,
    /// RAM of the node that an engine asleep at level 1 keeps its weights in, for each of its accelerators. Without it as
    /// `memory`, less the KV cache where the command says its bytes (--kv-cache-memory-bytes); 0 for engines that cannot
    /// sleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory: Option<Quantity>,
    /// Accelerators that one engine takes.
    #[serde(default = "one")]
    #[schemars(extend("minimum" = 1, "maximum" = 64))]
    pub accelerators: u32,
    /// Nodes that its engines may run on, by their labels: this chooses the AcceleratorPool. A model that no pool covers is
    /// not started.
    #[serde(default = "default_pool")]
    #[schemars(extend("minProperties" = 1, "maxProperties" = 16))]
    pub node_selector: BTreeMap<String, String>,
    /// Who runs the engines. `deployment`: a Deployment of engine Pods, scaled from 0. `dualPods`: a Deployment of Pods that
    /// hold the accelerators, and engines that outlive them. `external`: somebody else; Rouse only forwards to
    /// backendUrl.
    #[serde(default)]
    pub mode: ServingMode,
    /// Where a model of mode external is served: http or https, no redirects. A Service of the same namespace, unless the
    /// gateway is started to allow more; never a loopback, link-local or metadata address.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 2048, "pattern" = BACKEND_URL))]
    pub backend_url: Option<String>,
    /// The engine's Pod, as in a Deployment. Every field is passed on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "template::whole")]
    pub template: Option<PodTemplateJson>,
    /// In place of a template: the image of a Pod with one container, `engine`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1, "maxLength" = 1024))]
    pub container_image: Option<String>,
    /// With containerImage: what its container asks for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourcesSpec>,
    /// What the engine is, and how it is spoken to.
    #[serde(default)]
    pub engine: EngineSpec,
    /// Ways of running the model, on other hardware or at other costs. What a variant leaves out is as the model has it.
    /// None: one variant, `default`, with the fields above.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub variants: Vec<VariantSpec>,
    /// Engines that run also without requests. The model is started for them at once.
    #[serde(default)]
    #[schemars(extend("minimum" = 0, "maximum" = 1000))]
    pub min_replicas: u32,
    /// Engines that run at most.
    #[serde(default = "one")]
    #[schemars(extend("minimum" = 1, "maximum" = 1000))]
    pub max_replicas: u32,
    /// Idle for so long, an engine is put to sleep; or stopped, when it cannot sleep. A model is idle from the end of its
    /// last response, on any gateway. `never`: not for idleness.
    #[serde(default = "ten_minutes")]
    pub cooldown_period: SpanOrNever,
    /// Idle for so long, an asleep engine is stopped, too. Without it 1h, or cooldownPeriod when that is longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_after: Option<SpanOrNever>,
    /// From the start of an engine until it serves. Then it is stopped, and who waits gets 503.
    #[serde(default = "five_minutes")]
    pub start_timeout: Span,
    /// When this model may be put away for another. `residency`: once idle, unless `turns.protect` protects it. `cooldown`: once idle
    /// for its cooldownPeriod. `never`. Without it as the gateway has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eviction: Option<EvictionSpec>,
    /// Kept awake without requests, and never put away for others. Its pool must allow it.
    #[serde(default)]
    pub pinned: bool,
    /// Higher goes first where memory is short. Its pool may cap it.
    #[serde(default)]
    #[schemars(extend("minimum" = -1000, "maximum" = 1000))]
    pub priority: i32,
    /// Requests that one engine takes at a time. Without it, as many as come.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1, "maximum" = 1_000_000))]
    pub max_concurrency: Option<u32>,
    /// How requests wait for this model. What it leaves out is as the gateway has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueSpec>,
    /// InferenceModels of the same namespace, by their object's name, that must be ready first. All of them are reserved
    /// memory for, or none, and none is put away while this model is awake. Cycles are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "dependencies")]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub dependencies: Vec<String>,
    /// When the model needs another engine, and when it can give one back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saturation: Option<SaturationSpec>,
}

/// One way of running a model.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[x_kube(
    validation = Rule::new("!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas")
        .message("minReplicas is at most maxReplicas"),
)]
#[serde(rename_all = "camelCase")]
pub struct VariantSpec {
    /// The variant's name, unique in the model.
    #[schemars(extend("minLength" = 1, "maxLength" = 63, "pattern" = DNS_LABEL))]
    pub name: String,
    /// What one of its engines costs, in any unit: the cheapest variant that fits is started first.
    #[serde(default = "ten")]
    #[schemars(extend("minimum" = 0))]
    pub cost: f64,
    /// Accelerators that one engine takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1, "maximum" = 64))]
    pub accelerators: Option<u32>,
    /// Memory that one engine takes of each accelerator while awake.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "scalar::positive")]
    pub memory: Option<Quantity>,
    /// What an asleep engine keeps of each accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_asleep: Option<Quantity>,
    /// RAM of the node that an engine asleep at level 1 keeps, for each accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory: Option<Quantity>,
    /// The nodes, in place of the model's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minProperties" = 1, "maxProperties" = 16))]
    pub node_selector: Option<BTreeMap<String, String>>,
    /// What is different in the engine's Pod: merged into the model's template as `kubectl patch` would, lists by their
    /// keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplateJson>,
    /// Engines that run also without requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 1000))]
    pub min_replicas: Option<u32>,
    /// Engines that run at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1, "maximum" = 1000))]
    pub max_replicas: Option<u32>,
}

/// Who runs the engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum ServingMode {
    #[default]
    Deployment,
    DualPods,
    External,
}

/// What the container of a short form asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResourcesSpec {
    /// What it is guaranteed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<ResourceAmounts>,
    /// What it may take at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<ResourceAmounts>,
}

/// Amounts, as at a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResourceAmounts {
    /// Cores: `4`, `500m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 32, "pattern" = r"^[0-9]{1,9}(\.[0-9]{1,3})?m?$"))]
    pub cpu: Option<String>,
    /// RAM: `32Gi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Quantity>,
    /// Accelerators, as `nvidia.com/gpu`; Pods that ask for some tolerate that taint. Without it as the model's
    /// accelerators.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 4, "pattern" = "^[0-9]{1,4}$"))]
    pub gpu: Option<String>,
}

/// When a model may be put away for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum EvictionSpec {
    Residency,
    Cooldown,
    Never,
}

/// How requests wait.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QueueSpec {
    /// `wait`: requests wait for memory that others hold. `reject`: they are refused at once with 429.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<QueuePolicySpec>,
    /// The longest a request waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_wait: Option<Span>,
    /// Requests that wait at once, on one gateway; more are refused with 429.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 1_000_000))]
    pub max_waiting: Option<u32>,
}

/// What becomes of requests for a model whose memory others hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum QueuePolicySpec {
    Wait,
    Reject,
}

/// Thresholds in place of those of the ConfigMap `rouse-saturation-config`. What is left out is as there.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[x_kube(
    validation = Rule::new("!has(self.kvSpareTrigger) || !has(self.kvCacheThreshold) || \
                            self.kvSpareTrigger <= self.kvCacheThreshold")
        .message("kvSpareTrigger is at most kvCacheThreshold"),
    validation = Rule::new("!has(self.queueSpareTrigger) || !has(self.queueLengthThreshold) || \
                            self.queueSpareTrigger <= self.queueLengthThreshold")
        .message("queueSpareTrigger is at most queueLengthThreshold"),
)]
#[serde(rename_all = "camelCase")]
pub struct SaturationSpec {
    /// An engine is saturated from this share of its KV cache on.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 1))]
    pub kv_cache_threshold: Option<f64>,
    /// An engine is saturated from so many waiting requests on.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub queue_length_threshold: Option<f64>,
    /// Another engine is wanted when less than this share of KV cache is spare on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 1))]
    pub kv_spare_trigger: Option<f64>,
    /// Another engine is wanted when less than so many waiting requests are spare on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub queue_spare_trigger: Option<f64>,
}

/// Nothing that means something in a path, on a command line or in a journal.
const MODEL_NAME: &str = r#"^[^\s[:cntrl:]%?#;\\"]+$"#;
const DNS_LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
const DNS_NAME: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
const BACKEND_URL: &str = r"^https?://[^\s/?#@]+(/[^\s?#]*)?$";

fn aliases(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "array",
        "maxItems": 32,
        "items": {"type": "string", "minLength": 1, "maxLength": 256, "pattern": MODEL_NAME},
    })
}

fn dependencies(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "array",
        "maxItems": 16,
        "items": {"type": "string", "minLength": 1, "maxLength": 253, "pattern": DNS_NAME},
    })
}

const fn one() -> u32 {
    1
}

const fn ten() -> f64 {
    10.0
}

fn ten_minutes() -> SpanOrNever {
    "10m".into()
}

fn five_minutes() -> Span {
    "5m".into()
}

/// The pool of who says nothing.
#[must_use]
pub fn default_pool() -> BTreeMap<String, String> {
    [("inference-pool".to_owned(), "default".to_owned())].into()
}
