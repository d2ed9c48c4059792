//! What an autoscaler is given, and what it returns.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    AcceleratorPool, Allocation, ModelAnalysis, Profile, RefusalCause, ReplicaMetrics, Role, Target,
    Thresholds, TokenAnalysis, TokenLengths, Transition, VariantState, ZeroRule,
};
use crate::{
    model::VariantName,
    units::{Millis, Tick},
};

/// How a model is scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SaturationPolicy {
    pub profile: Profile,
    /// How long a step down must have been safe before it is taken. Only [`Profile::Rouse`] waits.
    pub stabilisation: Millis,
    /// The most replicas that are added at once. The profiles other than [`Profile::Rouse`] add one.
    pub max_step: u32,
    /// Pause until a variant that is still refused a replica is tried again. It doubles while memory refuses it.
    pub refusal_retry: Millis,
    pub zero: ZeroRule,
}

impl Default for SaturationPolicy {
    fn default() -> Self {
        Self {
            profile: Profile::Rouse,
            stabilisation: Millis::secs(300),
            max_step: 4,
            refusal_retry: Millis::secs(60),
            zero: ZeroRule::Fleet,
        }
    }
}

/// The load and the state of one model at one moment. The order within the lists does not matter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ModelLoad {
    /// The awake replicas.
    pub replicas: Vec<ReplicaMetrics>,
    /// Every variant of the model.
    pub states: Vec<VariantState>,
    pub thresholds: Thresholds,
    /// Requests that wait at the gateways for this model.
    pub parked: u32,
    /// Variants that get no further replica for now.
    pub refused: BTreeMap<VariantName, RefusalCause>,
    /// How long nothing was requested; `None`: unknown.
    pub idle_for: Option<Millis>,
    /// Numbers that another autoscaler set. They replace the steps; bounds, zero and accelerators are still decided.
    pub external: Option<BTreeMap<VariantName, u32>>,
    /// Free accelerators; `None`: not limited here.
    pub accelerators: Option<AcceleratorPool>,
    /// Mean lengths of the requests; `None`: unknown.
    pub lengths: Option<TokenLengths>,
}

/// What was decided for a model, and the numbers that decided it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    pub decided_at: Tick,
    /// The thresholds that were used.
    pub thresholds: Thresholds,
    /// One for each variant, by role, then by name.
    pub targets: Vec<Target>,
    pub analyses: BTreeMap<Role, ModelAnalysis>,
    /// The token arithmetic, for roles whose engines report sizes.
    pub tokens: BTreeMap<Role, TokenAnalysis>,
    /// Why the model, or a role of it, was not decided anew.
    pub transition: Option<Transition>,
    /// Whether in some role all replicas that report are saturated. Requests that wait at the gateways do not count.
    pub saturated: bool,
    /// What variants got of the accelerators, in the order in which they were served.
    pub allocations: Vec<Allocation>,
    /// The accelerators that remain free.
    pub accelerators_left: Option<AcceleratorPool>,
}

impl Decision {
    /// Returns the target of a variant.
    #[must_use]
    pub fn target(&self, variant: &VariantName) -> Option<&Target> {
        self.targets.iter().find(|target| target.variant == *variant)
    }
}

/// The last decision, which survives a restart in the model's status.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LastDecision {
    /// When a number last changed.
    pub changed_at: Tick,
    pub replicas: BTreeMap<VariantName, u32>,
}
