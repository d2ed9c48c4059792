//! `status` of an InferenceModel: what the leader found and did. Every gateway routes by `engines`.

#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::scalar::Quantity;

/// What was found and done.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InferenceModelStatus {
    /// The generation of the object that this status speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// An engine serves, or the backend does.
    #[serde(default)]
    pub ready: bool,
    /// Engines that there are: starting, awake, asleep or on their way.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub replicas: u32,
    /// What each variant has and should have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub variants: Vec<VariantStatus>,
    /// Every engine. Gateways send requests to those that are Awake, by their address, and to no others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["pod".into()]))]
    pub engines: Vec<EngineStatus>,
    /// The memory of one engine on each accelerator, as the model declares it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub declared_memory: Option<Quantity>,
    /// The most accelerator memory that an engine was seen to use, on one accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_peak_memory: Option<Quantity>,
    /// The observed peak in percent of what is declared.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub utilization_percent: Option<u32>,
    /// What to declare instead, when less than 90 % is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recommendation: Option<String>,
    /// When memory was last observed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_observation: Option<Time>,
    /// What was learned of its engines, kept over restarts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learned: Option<LearnedStatus>,
    /// When a request for the model last ended, as far as the gateways have told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_request_time: Option<Time>,
    /// Accepted: the object is a good one and its names are its own. Ready: it serves. Available: it serves, or would when
    /// asked. Their reasons say why not, their messages what to do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// One variant's count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VariantStatus {
    /// The variant's name.
    pub name: String,
    /// Engines that it has.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub replicas: u32,
    /// Engines that it should have.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    pub desired: u32,
    /// Why so many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When that was decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decided: Option<Time>,
}

/// One engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineStatus {
    /// The Pod that it runs in.
    pub pod: String,
    /// Which of the model's engines it is, from 0.
    #[schemars(extend("minimum" = 0))]
    pub replica: u32,
    /// The variant that it runs.
    #[serde(default = "default_variant")]
    pub variant: String,
    /// Where requests for it go: an address and a port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Where it is in its life.
    pub state: EngineState,
    /// Which of its lives this is. Grows with every start.
    #[schemars(extend("minimum" = 0))]
    pub generation: u64,
    /// Since when it is in this state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// Why it is left alone, in the state Backoff. Who waits for it is told by every gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<EngineFailure>,
}

/// Failures of one engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineFailure {
    /// The last one, in a word: `exited:3`, `timeout`, `unrunnable`.
    pub cause: String,
    /// Failures in a row.
    #[schemars(extend("minimum" = 0))]
    pub failures: u32,
    /// Those of them since it last served. From the second on requests are refused instead of waiting for the next start.
    #[schemars(extend("minimum" = 0))]
    pub fruitless: u32,
    /// When it is started again, if somebody waits then.
    pub retry_after: Time,
}

/// Where an engine is in its life. One that is cold is not listed.
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

/// What was learned.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LearnedStatus {
    /// The most memory that an awake engine used, on one accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak: Option<Quantity>,
    /// What an asleep engine keeps, on one accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residue: Option<Quantity>,
    /// Milliseconds from a start until it serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub start_millis: Option<u64>,
    /// Milliseconds of a wake.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub wake_millis: Option<u64>,
    /// Milliseconds of falling asleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub sleep_millis: Option<u64>,
}

/// The variant of a model that lists none.
pub const DEFAULT_VARIANT: &str = "default";

fn default_variant() -> String {
    DEFAULT_VARIANT.to_owned()
}
