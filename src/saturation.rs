//! Saturation: how many replicas each variant of a model runs, from the load of its engines.
//!
//! ```text
//!   ReplicaMetrics ─▶ analyze() ─▶ ModelAnalysis ─┐
//!   VariantState ─────────────────────────────────┴─▶ targets() ─▶ zero rule ─▶ accelerators ─▶ Decision
//!        ▲                                                                                        │
//!        └─────────────── the fleet starts, wakes and stops engines ◀─────────────────────────────┘
//! ```
//!
//! A replica is *saturated* when its KV cache or its queue reaches a threshold. The other replicas have *spare*
//! capacity, and its mean decides: too little of it adds a replica of the cheapest variant, and enough of it to spread
//! the load of one more replica takes one of the dearest away. [`Profile`] has three versions of these rules.
//!
//! The simulator calls [`Autoscaler::decide`], one autoscaler for each model. It remembers what it last decided and
//! calls everything else above. Roles (prefill, decode) are decided one by one. Gateways call [`ModelScaling::step`],
//! which has an autoscaler and says what the fleet is told: the controller in a cluster
//! (`controllers/src/saturation.rs`), and a task of the gateway on one machine (`gateway/src/local_scaler.rs`). Both
//! read a [`FleetLoad`].

mod accelerator_pool;
mod analysis;
mod autoscaler;
mod decision;
mod external_replicas;
mod fleet_load;
mod limiter;
mod metrics_availability;
mod model_scaling;
mod reason;
mod refused_variants;
mod step;
mod threshold_table;
mod thresholds;
mod token_capacity;
mod transition;
mod zero;

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

pub use self::{
    accelerator_pool::{AcceleratorPool, Allocation},
    analysis::{ModelAnalysis, ScaleUpCause, VariantAnalysis, analyze},
    autoscaler::Autoscaler,
    decision::{Decision, LastDecision, ModelLoad, SaturationPolicy},
    fleet_load::{AwakeEngine, FleetLoad, VariantEngines},
    metrics_availability::{
        MetricsAvailability, PeakLoad, ReadingTimes, count_unread_as_pending, replica_metrics,
    },
    model_scaling::{
        ModelScaling, RecordedTarget, ReplicaOrder, SaturationVerdict, ScalingDirection, ScalingInput,
        ScalingStep,
    },
    reason::{Target, TargetReason},
    refused_variants::RefusalCause,
    step::{StepLimits, targets},
    threshold_table::{AnalyzerEntry, ThresholdEntry, ThresholdTable},
    thresholds::{ThresholdError, Thresholds},
    token_capacity::{EngineTokenLimits, TokenAnalysis, TokenCapacity, TokenLengths, TokenMetrics},
    transition::Transition,
    zero::ZeroRule,
};
use crate::model::{VariantName, compare_by_cost};

/// Which version of the rules decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// The design document to the letter: the base of a target is the number of replicas that report metrics.
    Doc,
    /// The public project's newest rules: the base is the current number, and pending replicas are a transition.
    Latest,
    /// [`Self::Latest`] with what experience asks for: see ADR 13.
    #[default]
    Rouse,
}

/// The part of a request that an engine computes. Each role of a model is analysed by itself.
///
/// Declared in the order of the names, in which roles are decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The whole request.
    #[default]
    #[serde(alias = "")]
    Both,
    Decode,
    Prefill,
}

/// The load of one awake replica. Sleeping engines are left out: they report an empty KV cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ReplicaMetrics {
    pub replica: String,
    pub variant: VariantName,
    pub role: Role,
    /// Used fraction of the KV cache, 0 to 1. `None`: missing or stale.
    pub kv_use: Option<f64>,
    /// Requests that wait in the engine. `None`: missing or stale.
    pub waiting: Option<f64>,
    /// The same in tokens, if the engine reports its size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<TokenMetrics>,
}

/// One variant of a model: its replicas, its bounds and its cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VariantState {
    pub variant: VariantName,
    pub role: Role,
    /// Cost of one replica, in any unit.
    pub cost: f64,
    /// Replicas that are awake, waking or launching.
    pub current: u32,
    /// The last decision, if there is one. The memory of [`Autoscaler`] wins over it.
    pub desired: Option<u32>,
    /// Those of `current` that do not serve yet.
    pub pending: u32,
    pub min: u32,
    /// The most replicas; `None` and 0 set no limit.
    pub max: Option<u32>,
    /// Accelerators of one replica; 0 counts as 1.
    pub gpus: u32,
    /// Type of these accelerators; empty if unknown.
    pub accelerator: String,
    /// Whether a node that can run it has the model's files.
    pub warm: bool,
    /// Engines that are asleep, which `current` does not count.
    pub asleep: u32,
    /// Sizes from the engine's flags, for a variant without running replicas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<EngineTokenLimits>,
}

impl Default for VariantState {
    fn default() -> Self {
        Self {
            variant: VariantName::default(),
            role: Role::Both,
            cost: Self::DEFAULT_COST,
            current: 0,
            desired: None,
            pending: 0,
            min: 0,
            max: None,
            gpus: 1,
            accelerator: String::new(),
            warm: false,
            asleep: 0,
            limits: None,
        }
    }
}

impl VariantState {
    /// Cost of a variant that states none.
    pub const DEFAULT_COST: f64 = 10.0;

    /// Returns the number of replicas within the bounds of this variant.
    ///
    /// With contradictory bounds the floor wins.
    #[must_use]
    pub const fn clamp(&self, replicas: u32) -> u32 {
        if replicas < self.min {
            return self.min;
        }
        match self.max {
            Some(max) if max > 0 && replicas > max => max,
            _ => replicas,
        }
    }

    /// Cheapest first, of equal costs by name.
    fn compare_by_cost(&self, other: &Self) -> Ordering {
        compare_by_cost((self.cost, &self.variant), (other.cost, &other.variant))
    }

    /// Accelerators of one replica, at least one.
    const fn gpus_per_replica(&self) -> u32 {
        if self.gpus == 0 { 1 } else { self.gpus }
    }

    /// How many more replicas than `replicas` the ceiling allows.
    const fn room_above(&self, replicas: u32) -> u32 {
        match self.max {
            Some(max) if max > 0 => max.saturating_sub(replicas),
            _ => u32::MAX,
        }
    }

    /// What holds without a new decision: the last one, or the current number.
    ///
    /// A decision for 0 is not kept: the rule that made it applies again for as long as it holds.
    fn held(&self) -> u32 {
        self.desired.filter(|desired| *desired > 0).unwrap_or(self.current)
    }
}
