//! `spec.saturation` and `status.saturation`: how saturation scales the model, and what it decided.

#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::scalar::Span;

/// How saturation scales the model. A threshold that is left out has the value in the ConfigMap
/// `rouse-saturation-config`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[x_kube(
    validation = Rule::new("!has(self.kvSpareTrigger) || !has(self.kvCacheThreshold) || \
                            self.kvSpareTrigger <= self.kvCacheThreshold")
        .message("kvSpareTrigger must be at most kvCacheThreshold"),
    validation = Rule::new("!has(self.queueSpareTrigger) || !has(self.queueLengthThreshold) || \
                            self.queueSpareTrigger <= self.queueLengthThreshold")
        .message("queueSpareTrigger must be at most queueLengthThreshold"),
)]
#[serde(rename_all = "camelCase")]
pub struct SaturationSpec {
    /// Whether saturation scales the model. `false`: the other engines up to maxReplicas are spares, which start when a
    /// request finds no room.
    #[serde(default = "yes")]
    pub enabled: bool,
    /// Rules of the decision. `rouse`: those of `latest`, and in addition no scale-down while metrics are missing, more
    /// than one engine at a time, and waiting requests at the gateways. `latest`: those of the public project's current
    /// version. `doc`: those of its design document. Default: `rouse`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<SaturationProfileSpec>,
    /// How the size of a step up is found. `percent`: by the use of the KV caches and the lengths of the queues.
    /// `tokens`: by the tokens that the requests need and that an engine takes, where every engine reports its size.
    #[serde(default)]
    pub analyzer: AnalyzerSpec,
    /// Share of its KV cache at which an engine counts as saturated.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 1))]
    pub kv_cache_threshold: Option<f64>,
    /// Number of waiting requests at which an engine counts as saturated.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub queue_length_threshold: Option<f64>,
    /// The model needs another engine when less than this share of KV cache is spare on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 1))]
    pub kv_spare_trigger: Option<f64>,
    /// The model needs another engine when there is room for fewer than this many further waiting requests on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub queue_spare_trigger: Option<f64>,
    /// When the model has no engine. Default: the rule of its cooldownPeriod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_to_zero: Option<ScaleToZeroSpec>,
    /// How free accelerators limit the targets. `none`: not at all, an engine without memory waits. `inventory`: a
    /// target rises only by the engines for which accelerators of its type are free in the pools; of several models the
    /// one with the highest priority goes first, and of its variants the one with the least spare KV cache.
    #[serde(default)]
    pub limiter: LimiterSpec,
    /// How long fewer engines must have been enough before the model has fewer. Default: the gateway's
    /// `kubernetes.saturation.stabilisation`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stabilisation: Option<Span>,
    /// Which engines of other models make room for another engine of this one. `idle`: those that are idle and that
    /// `turns.protect` no longer protects. `never`: none.
    #[serde(default)]
    pub may_evict: MayEvictSpec,
    /// Source of the number of engines. `own`: Rouse. `external`: an autoscaler, through the subresource `scale` of
    /// this object; Rouse starts the first engine, stops the last one and reserves memory.
    #[serde(default)]
    pub actuation: ActuationSpec,
}

/// Rules of the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum SaturationProfileSpec {
    Doc,
    Latest,
    Rouse,
}

/// How the size of a step up is found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum AnalyzerSpec {
    #[default]
    Percent,
    Tokens,
}

/// How free accelerators limit the targets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum LimiterSpec {
    #[default]
    None,
    Inventory,
}

/// When a model has no engine at all.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[x_kube(
    validation = Rule::new("!has(self.after) || self.enabled")
        .message("after is only for enabled true: remove it, because with enabled false one engine always runs"),
)]
#[serde(rename_all = "camelCase")]
pub struct ScaleToZeroSpec {
    /// Whether the model may have no engine. `false`: one engine of the cheapest variant always runs.
    #[serde(default = "yes")]
    pub enabled: bool,
    /// How long nothing must have been requested before the model has no engine. It replaces cooldownPeriod.
    /// Default: cooldownPeriod, or 10m if that is `never`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<Span>,
}

/// Which engines of other models make room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum MayEvictSpec {
    #[default]
    Idle,
    Never,
}

/// Source of the number of engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum ActuationSpec {
    #[default]
    Own,
    External,
}

/// What saturation last decided about the model. A new leader continues from here.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SaturationStatus {
    /// The last target of each variant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["variant".into()]))]
    pub targets: Vec<SaturationTarget>,
    /// The thresholds of the last decision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thresholds: Option<String>,
}

/// The number of engines that one variant should have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SaturationTarget {
    /// The variant's name.
    pub variant: String,
    /// Number of engines that the variant should have while the model is in use.
    #[schemars(extend("minimum" = 0))]
    pub replicas: u32,
    /// Why the variant should have this number.
    pub reason: String,
    /// When this number was decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decided: Option<Time>,
}

const fn yes() -> bool {
    true
}
