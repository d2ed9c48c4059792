//! `status` of an InferenceModel: what the leader found and did. Every gateway routes by `engines`.

#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use rouse::model::VariantName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{super::scalar::Quantity, saturation::SaturationStatus};

/// Observed state of the model and its engines.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InferenceModelStatus {
    /// Generation of the object that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Whether an engine serves, or the backend in mode external.
    #[serde(default)]
    pub ready: bool,
    /// Number of engines that are awake or on their way to it: starting or waking.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub replicas: u32,
    /// Number of engines that are asleep or falling asleep.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub asleep: u32,
    /// Label selector of the Pods in which the engines run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Engines of each variant: their number, and values learned from them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub variants: Vec<VariantStatus>,
    /// All engines. Gateways send requests only to engines that are Awake, at their address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["pod".into()]))]
    pub engines: Vec<EngineStatus>,
    /// Memory of one engine on each accelerator, as the model declares it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub declared_memory: Option<Quantity>,
    /// Highest memory use of an engine that was observed on one accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_peak_memory: Option<Quantity>,
    /// Observed peak, in percent of the declared memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub utilization_percent: Option<u32>,
    /// What to declare instead, if less than 90 % of the declared memory is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recommendation: Option<String>,
    /// When memory was last observed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_observation: Option<Time>,
    /// Values learned from the engines, kept across restarts. If the model has variants: those of the cheapest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learned: Option<LearnedStatus>,
    /// When a request for the model last ended, as far as the gateways have reported. Written rarely: up to a tenth of
    /// cooldownPeriod late, or 30s if that is longer; and later if more than 100 models are in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_request_time: Option<Time>,
    /// What saturation last decided about the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saturation: Option<SaturationStatus>,
    /// Accepted: the object is valid, and no older object has its names. Ready: the model serves. Available: the model
    /// serves, or would serve if requested. The reasons say why not, the messages what to do. With saturation also
    /// MetricsAvailable: the engines' metrics are known. Saturated: the model needs more engines than it has.
    /// InsufficientMemory: there is no memory for another engine that it needs. ThresholdsAccepted: False while configured
    /// thresholds are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Engines of one variant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VariantStatus {
    /// The variant's name.
    pub name: String,
    /// Number of the variant's engines that are awake, starting or waking.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub replicas: u32,
    /// Number of the variant's engines that are asleep or falling asleep.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub asleep: u32,
    /// Number of engines that the variant should have.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub desired: u32,
    /// Why the variant should have this number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When this number was decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decided: Option<Time>,
    /// Values learned from the variant's engines, if the model lists variants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learned: Option<LearnedStatus>,
}

/// One engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineStatus {
    /// Name of the Pod in which the engine runs.
    pub pod: String,
    /// Number of the engine among the variant's engines, from 0.
    #[schemars(extend("minimum" = 0))]
    pub replica: u32,
    /// The variant that the engine runs.
    #[serde(default = "default_variant")]
    pub variant: String,
    /// Where gateways send the engine's requests: an address and a port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// UUIDs of the accelerators on which the engine is, if its pool has slots.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accelerators: Vec<String>,
    /// Current state of the engine.
    pub state: EngineState,
    /// Generation of the engine, which grows with every start.
    #[schemars(extend("minimum" = 0))]
    pub generation: u64,
    /// When the engine entered this state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// Why an engine in the state Backoff is not running. Every gateway reports this to the requests that wait for the
    /// engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<EngineFailure>,
}

/// Failures of one engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineFailure {
    /// Cause of the last failure, in one word: `exited:3`, `timeout`, `unrunnable`.
    pub cause: String,
    /// Number of failures in a row.
    #[schemars(extend("minimum" = 0))]
    pub failures: u32,
    /// Number of failures since the engine last served. From the second on, requests are refused instead of waiting for
    /// the next start.
    #[schemars(extend("minimum" = 0))]
    pub fruitless: u32,
    /// When the engine is started again, if a request waits for it then.
    pub retry_after: Time,
}

/// State of an engine. Cold engines are not listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum EngineState {
    Launching,
    Loading,
    Awake,
    Draining,
    FallingAsleep,
    Asleep,
    Waking,
    Failing,
    Stopping,
    Backoff,
}

/// Values learned from a model's engines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LearnedStatus {
    /// Highest memory use of an awake engine on one accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak: Option<Quantity>,
    /// Memory that an asleep engine keeps on one accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residue: Option<Quantity>,
    /// Milliseconds from a start until the engine serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub start_millis: Option<u64>,
    /// Milliseconds that a wake takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub wake_millis: Option<u64>,
    /// Milliseconds that falling asleep takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub sleep_millis: Option<u64>,
}

impl EngineState {
    /// Whether the engine is awake or on its way to it.
    #[must_use]
    pub const fn is_replica(self) -> bool {
        matches!(self, Self::Launching | Self::Loading | Self::Awake | Self::Waking)
    }

    /// Whether the engine is asleep or on its way to it.
    #[must_use]
    pub const fn is_asleep(self) -> bool {
        matches!(self, Self::Asleep | Self::FallingAsleep)
    }
}

impl EngineStatus {
    /// Returns the variant that the engine runs.
    #[must_use]
    pub fn variant(&self) -> VariantName {
        VariantName::from(self.variant.as_str())
    }
}

fn default_variant() -> String {
    VariantName::DEFAULT.to_owned()
}
