//! A simulated model under load: what an autoscaler costs, and how long the model is saturated.
//!
//! ```text
//!   RequestTrace ─▶ engines (batch, KV cache, queue) ─▶ metrics ─▶ Autoscaler, HPA or KEDA
//!                      ▲                                                   │
//!                      └────────── replicas, after their start time ◀──────┘
//! ```
//!
//! Time is simulated in seconds, and a decision is made every 15. The world is the same for every policy and no
//! request is dropped, so differences come from the numbers of replicas alone. It is apart from
//! [`SimulatedWorld`](super::SimulatedWorld), whose engines have memory and states, but no speed.

mod engine;
mod hpa;
mod load_report;
mod load_shapes;
mod load_world;
mod request_trace;
mod scaling_policy;

use std::fmt;

pub use self::{
    engine::EngineSpeed,
    load_report::{LoadReport, LoadSample},
    load_shapes::{BUILT_IN, built_in, seeded},
    load_world::simulate,
    request_trace::{Error, RequestTrace, TracedRequest, read_trace},
    scaling_policy::SimulatedVariant,
};
use crate::{
    model::VariantName,
    saturation::{SaturationPolicy, Thresholds},
    units::Millis,
};

/// The simulated model and how Rouse scales it.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadScenario {
    /// At the start, each has its minimum of replicas.
    pub variants: Vec<SimulatedVariant>,
    /// Time from the order to start a replica until it serves.
    pub start_time: Millis,
    /// Of [`AutoscalerKind::Rouse`] alone.
    pub policy: SaturationPolicy,
    pub thresholds: Thresholds,
}

/// What decides the number of replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoscalerKind {
    /// [`Autoscaler`](crate::saturation::Autoscaler).
    Rouse,
    /// A HorizontalPodAutoscaler on the waiting requests of each Pod.
    Hpa,
    /// A KEDA ScaledObject on the sum of the model's waiting requests.
    Keda,
}

impl AutoscalerKind {
    pub const ALL: [Self; 3] = [Self::Rouse, Self::Hpa, Self::Keda];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rouse => "rouse",
            Self::Hpa => "hpa",
            Self::Keda => "keda",
        }
    }
}

impl fmt::Display for AutoscalerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Default for LoadScenario {
    /// One variant from 1 to 16 replicas, which start within 2 minutes.
    fn default() -> Self {
        Self {
            variants: vec![SimulatedVariant::default()],
            start_time: Millis::secs(120),
            policy: SaturationPolicy::default(),
            thresholds: Thresholds::default(),
        }
    }
}

impl Default for SimulatedVariant {
    fn default() -> Self {
        Self { name: VariantName::default(), cost: 1.0, min: 1, max: 16, speed: EngineSpeed::default() }
    }
}
