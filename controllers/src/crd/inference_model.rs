//! InferenceModel as users write it: a model that clients request, and how its engines run. `convert` interprets it.

#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

mod engine;
mod saturation;
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
    engine::{
        EngineKindSpec, EngineSpec, OnDisconnectSpec, ProbeTaskSpec, RehearsalSpec, SleepLevelSpec, SleepMode,
    },
    saturation::{
        ActuationSpec, AnalyzerSpec, LimiterSpec, MayEvictSpec, SaturationProfileSpec, SaturationSpec,
        SaturationStatus, SaturationTarget, ScaleToZeroSpec,
    },
    status::{EngineFailure, EngineState, EngineStatus, InferenceModelStatus, LearnedStatus, VariantStatus},
};

/// The model's names in requests, and how Rouse runs its engines.
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
    doc = "A model that clients can request, and how Rouse runs its engines, puts them to sleep, wakes and stops them.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    validation = Rule::new("!has(self.spec.dependencies) || !(self.metadata.name in self.spec.dependencies)")
        .message("the model depends on itself: remove its own name from dependencies"),
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
        .message("mode external needs a backendUrl, and backendUrl is only for mode external"),
    validation = Rule::new("self.mode == 'external' || has(self.memory)")
        .message("memory is missing: set what one engine uses of each accelerator, such as 80Gi"),
    validation = Rule::new(
        "self.mode == 'external' ? !has(self.template) && !has(self.containerImage) : \
         has(self.template) != has(self.containerImage)")
        .message("set exactly one of template and containerImage, and neither in mode external"),
    validation = Rule::new("!has(self.resources) || has(self.containerImage)")
        .message("resources is only for containerImage: in a template, set the resources of the container"),
    validation = Rule::new(
        "self.mode != 'external' || !(has(self.memoryAsleep) || has(self.hostMemory) || has(self.stopAfter) || \
         has(self.eviction) || has(self.variants) || has(self.saturation) || self.pinned || self.minReplicas > 0 || \
         self.warmup == 'auto')")
        .message("Rouse does not start, put to sleep, stop or scale the backend of mode external: remove \
                  memoryAsleep, hostMemory, stopAfter, eviction, variants, saturation, pinned, minReplicas and warmup"),
    validation = Rule::new(
        "has(self.replicas) == (has(self.saturation) && self.saturation.actuation == 'external')")
        .message("replicas is for saturation.actuation external, which needs it: set the number of engines that the \
                  autoscaler starts from, or remove replicas and use minReplicas and maxReplicas"),
    validation = Rule::new(
        "!has(self.stopAfter) || self.stopAfter == 'never' || self.cooldownPeriod == 'never' || \
         duration(self.stopAfter) >= duration(self.cooldownPeriod)")
        .message("stopAfter is shorter than cooldownPeriod: an engine sleeps before it is stopped, so set \
                  stopAfter to at least cooldownPeriod"),
    // With variants, minReplicas is for all of them together, and maxReplicas for each.
    validation = Rule::new("has(self.variants) || self.minReplicas <= self.maxReplicas")
        .message("minReplicas must be at most maxReplicas"),
    validation = Rule::new("!has(self.aliases) || !(self.modelName in self.aliases)")
        .message("modelName is also listed in aliases: remove it there"),
    validation = Rule::new("self.modelName == oldSelf.modelName")
        .message("modelName cannot be changed, because engines run under it: create another InferenceModel, or \
                  add an alias"),
)]
#[serde(rename_all = "camelCase")]
pub struct InferenceModelSpec {
    /// The model's name in requests (`model`). Names and aliases are unique across the watched namespaces: of two
    /// objects with the same name, the newer one is not served, and its condition Accepted says so. The name cannot be
    /// changed.
    #[schemars(extend("minLength" = 1, "maxLength" = 256, "pattern" = MODEL_NAME))]
    pub model_name: String,
    /// Other names for the model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "aliases")]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub aliases: Vec<String>,
    /// Memory that one engine uses on each of its accelerators while awake: `80Gi`, `1.5Gi`, or bytes. Required except
    /// in mode external.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "scalar::positive")]
    pub memory: Option<Quantity>,
    /// Memory that an asleep engine keeps on each accelerator. Default: 4Gi, at most `memory`, until Rouse has measured
    /// it; 0 if the engine cannot sleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_asleep: Option<Quantity>,
    /// RAM of the node in which an engine asleep at level 1 keeps its weights, for each of its accelerators. Default:
    /// `memory`, less the KV cache if the command sets its size in bytes (--kv-cache-memory-bytes); 0 if the engine
    /// cannot sleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory: Option<Quantity>,
    /// Number of accelerators that one engine uses.
    #[serde(default = "one")]
    #[schemars(extend("minimum" = 1, "maximum" = 64))]
    pub accelerators: u32,
    /// Labels of the nodes on which the engines may run. They also select the AcceleratorPool: a model that no pool
    /// matches is not started.
    #[serde(default = "default_pool")]
    #[schemars(extend("minProperties" = 1, "maxProperties" = 16))]
    pub node_selector: BTreeMap<String, String>,
    /// How the engines run. `deployment`: as Pods of a Deployment, scaled from 0. `dualPods`: the Pods of a Deployment
    /// hold the accelerators, and the engines outlive these Pods. `external`: outside Rouse, which only forwards
    /// requests to backendUrl.
    #[serde(default)]
    pub mode: ServingMode,
    /// URL of the backend in mode external: http or https, no redirects. The host is a Service of the same namespace,
    /// unless the gateway's configuration allows others (`kubernetes.anyBackend`), and never a loopback, link-local or
    /// metadata address.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 2048, "pattern" = BACKEND_URL))]
    pub backend_url: Option<String>,
    /// The engine's Pod template, as in a Deployment. Every field is passed on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "template::whole")]
    pub template: Option<PodTemplateJson>,
    /// Image of the engine, instead of a template: the Pod then has one container, `engine`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1, "maxLength" = 1024))]
    pub container_image: Option<String>,
    /// Resources of the container. Only with containerImage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourcesSpec>,
    /// What the engine is, and how Rouse talks to it.
    #[serde(default)]
    pub engine: EngineSpec,
    /// Ways to run the model side by side, on other hardware or at other costs. A field that a variant leaves out has
    /// the model's value. Default: one variant, `default`, with the model's own values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub variants: Vec<VariantSpec>,
    /// Number of engines that run even without requests, over all variants. The cheapest variant runs those that the
    /// variants' own minReplicas leave. Rouse starts them at once.
    #[serde(default)]
    #[schemars(extend("minimum" = 0, "maximum" = 1000))]
    pub min_replicas: u32,
    /// Maximum number of engines of each variant.
    #[serde(default = "one")]
    #[schemars(extend("minimum" = 1, "maximum" = 1000))]
    pub max_replicas: u32,
    /// Number of engines that an autoscaler asks for, through the subresource `scale`. Only with saturation.actuation
    /// external.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 1000))]
    pub replicas: Option<u32>,
    /// How long an engine must be idle before it is put to sleep, or stopped if it cannot sleep. A model is idle from
    /// the end of its last response on any gateway. `never`: an idle engine is not put to sleep; stopAfter still
    /// applies.
    #[serde(default = "ten_minutes")]
    pub cooldown_period: SpanOrNever,
    /// How long an engine must be idle before it is stopped, even if it is asleep. `never`: it is not stopped for
    /// idleness. Default: 1h, or cooldownPeriod if that is longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_after: Option<SpanOrNever>,
    /// Time limit from the start of an engine until it serves. An engine that exceeds it is stopped; after two failures
    /// in a row, waiting requests get 503.
    #[serde(default = "five_minutes")]
    pub start_timeout: Span,
    /// When other models may evict this one. `residency`: once it is idle and `turns.protect` does not protect it, or
    /// once it has been in use for a whole turn. `cooldown`: once it is idle for its cooldownPeriod. `never`: not at
    /// all. Default: the gateway's `eviction`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eviction: Option<EvictionSpec>,
    /// Kept awake without requests, and never evicted. The pool must allow it (`pinnable`).
    #[serde(default)]
    pub pinned: bool,
    /// Higher goes first when memory is short. The pool may cap it (`maxPriority`).
    #[serde(default)]
    #[schemars(extend("minimum" = -1000, "maximum" = 1000))]
    pub priority: i32,
    /// Maximum number of requests that one engine takes at a time. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1, "maximum" = 1_000_000))]
    pub max_concurrency: Option<u32>,
    /// How requests wait for this model. A field that is left out has the gateway's value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueSpec>,
    /// Names of the InferenceModel objects, in the same namespace, that must be ready before this model starts. Rouse
    /// reserves memory for all of them or for none, and keeps them awake while this model is awake. Cycles are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "dependencies")]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub dependencies: Vec<String>,
    /// When the model needs another engine, and when it can release one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saturation: Option<SaturationSpec>,
    /// Whether the nodes on which the model's next engines may start have its images beforehand. `auto`: Rouse creates
    /// a Warmup that pulls the images there, on two nodes at a time unless the gateway's
    /// `kubernetes.warmup.autoParallelism` says another number, and pulls them again where they are lost.
    #[serde(default)]
    pub warmup: WarmupMode,
}

/// One way of running a model.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[x_kube(
    validation = Rule::new("!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas")
        .message("minReplicas must be at most maxReplicas"),
)]
#[serde(rename_all = "camelCase")]
pub struct VariantSpec {
    /// The variant's name, unique in the model.
    #[schemars(extend("minLength" = 1, "maxLength" = 63, "pattern" = DNS_LABEL))]
    pub name: String,
    /// Cost of one engine, in any unit: the cheapest variant that fits is started first.
    #[serde(default = "ten")]
    #[schemars(extend("minimum" = 0))]
    pub cost: f64,
    /// Part of the requests that its engines compute: saturation counts the load of each part by itself. `both`: whole
    /// requests. `prefill` and `decode`: for engines that pass the KV cache on to each other.
    #[serde(default)]
    pub role: EngineRoleSpec,
    /// Number of accelerators that one engine uses.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1, "maximum" = 64))]
    pub accelerators: Option<u32>,
    /// Memory that one engine uses on each accelerator while awake.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "scalar::positive")]
    pub memory: Option<Quantity>,
    /// Memory that an asleep engine keeps on each accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_asleep: Option<Quantity>,
    /// RAM of the node in which an engine asleep at level 1 keeps its weights, for each accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory: Option<Quantity>,
    /// Labels of the nodes, instead of the model's nodeSelector.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minProperties" = 1, "maxProperties" = 16))]
    pub node_selector: Option<BTreeMap<String, String>>,
    /// Changes to the model's template, merged as `kubectl patch` merges them: lists by their keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplateJson>,
    /// Number of engines of this variant that run even without requests. Default: 0; the model's minReplicas is for all
    /// variants together.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 1000))]
    pub min_replicas: Option<u32>,
    /// Maximum number of engines of this variant.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1, "maximum" = 1000))]
    pub max_replicas: Option<u32>,
}

/// Part of the requests that the engines of a variant compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum EngineRoleSpec {
    #[default]
    Both,
    Decode,
    Prefill,
}

/// How the engines run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum ServingMode {
    #[default]
    Deployment,
    DualPods,
    External,
}

/// Resources of the container of a model with `containerImage`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResourcesSpec {
    /// Resources that the container is guaranteed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<ResourceAmounts>,
    /// Resources that the container may use at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<ResourceAmounts>,
}

/// Amounts of resources, as in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResourceAmounts {
    /// Cores: `4`, `500m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 32, "pattern" = r"^[0-9]{1,9}(\.[0-9]{1,3})?m?$"))]
    pub cpu: Option<String>,
    /// RAM: `32Gi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Quantity>,
    /// Number of accelerators, as `nvidia.com/gpu`. Pods that request any tolerate the taint of that name. Default: the
    /// model's `accelerators`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 4, "pattern" = "^[0-9]{1,4}$"))]
    pub gpu: Option<String>,
}

/// Whether nodes have the model's images before its engines start.
///
/// Not `off`: kubectl reads YAML 1.1, in which that word is a boolean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum WarmupMode {
    Auto,
    #[default]
    Never,
}

/// When other models may evict this one.
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
    /// `wait`: requests wait for memory that other models hold. `reject`: they are refused at once with 429.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<QueuePolicySpec>,
    /// Maximum time that a request waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_wait: Option<Span>,
    /// Maximum number of requests that wait at once on one gateway. Further requests are refused with 429.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 1_000_000))]
    pub max_waiting: Option<u32>,
}

/// What happens to requests for a model whose memory other models hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum QueuePolicySpec {
    Wait,
    Reject,
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

/// The pool of a model that names none.
#[must_use]
pub fn default_pool() -> BTreeMap<String, String> {
    [("inference-pool".to_owned(), "default".to_owned())].into()
}
