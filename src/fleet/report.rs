//! The report of a plan: each model has a reason, because doing nothing needs one as much as doing something.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use crate::{
    engine::{last_outcome::LastOutcome, saturation_limit::SaturationLimit},
    fault::WaitDetails,
    fleet::{event::LearnedMeasurements, quote::WaitRange},
    model::{AcceleratorId, EngineId, ModelName, VariantName},
    units::{Bytes, Generation, Tick, pluralize},
};

/// One line for every model, ordered by name. People read the `Display` form, and golden tests compare it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    pub models: BTreeMap<ModelName, ModelReport>,
    /// Accelerators that grant nothing new, with the reason.
    pub accelerators: BTreeMap<AcceleratorId, String>,
}

/// Why a model is in its state, and what it waits for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelReport {
    pub state: ModelState,
    /// Requests that wait, at all gateways.
    pub waiting: u32,
    /// The part of `waiting` that waits at other gateways.
    #[serde(skip_serializing_if = "is_zero")]
    pub remote_waiting: u32,
    pub leases: u32,
    /// Engines of each variant, if the model lists variants or has targets.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub variants: BTreeMap<VariantName, VariantReport>,
    /// The model's last outcome, if it has not served since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_outcome: Option<LastOutcome>,
    /// Text for the admin, which may include an engine's own output: "waiting for gpu-0: held by llama, 1 lease, its
    /// turn ends at 08:15:00.000".
    pub reason: String,
    /// The same reason as data, for refused and parked requests.
    pub wait: WaitDetails,
}

/// How many engines one variant of a model has and should have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VariantReport {
    /// Engines that are awake, being woken or being launched, or whose memory is reserved for that.
    pub current: u32,
    /// Engines that sleep or fall asleep. They count neither as current nor as missing.
    pub asleep: u32,
    /// Engines that the variant should have while its model is in use; `None` without a target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<u32>,
    /// Why it should have so many, as the decision said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_reason: Option<String>,
    /// What its next engine waits for, in a model that is scaled. If its starts keep failing, also without a target for
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<ReplicaWait>,
}

/// Why an engine that a target asks for does not run yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaWait {
    pub reason: String,
    /// Its memory is not granted: other engines hold it, or a limit forbids it.
    pub insufficient_memory: bool,
    /// Its starts keep failing. It is tried again, and other variants go before it meanwhile.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
}

/// A model's state as clients and operators see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelState {
    Awake,
    Asleep,
    Launching,
    #[default]
    Cold,
    /// The last start failed; the state lasts until the next start begins.
    Failed,
    /// The model fits nowhere, even if all others are evicted.
    Unplaceable,
}

/// The whole state, as `GET /admin/v1/fleet` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetView {
    pub accelerators: Vec<AcceleratorView>,
    pub host: HostView,
    pub models: Vec<ModelView>,
    pub engines: Vec<EngineView>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AcceleratorView {
    pub id: AcceleratorId,
    pub capacity: Bytes,
    pub reserved: Bytes,
    /// Of a pool that counts its accelerators: how many it has, and how many of them engines hold. Of an accelerator with
    /// slots: the same of its slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units_taken: Option<u32>,
    /// The pool of an accelerator with slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<AcceleratorId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The last meter reading.
    pub observed: Option<Bytes>,
    pub healthy: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostView {
    pub capacity: Bytes,
    pub reserved: Bytes,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelView {
    pub name: ModelName,
    pub state: ModelState,
    pub waiting: u32,
    pub leases: u32,
    pub pinned: bool,
    /// How long a request that arrives now is expected to wait; `None` if that is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_wait: Option<WaitRange>,
    pub reason: String,
    /// The model's last outcome, if it has not served since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_outcome: Option<LastOutcome>,
    pub declared: Bytes,
    pub learned: LearnedMeasurements,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineView {
    pub engine: EngineId,
    pub generation: Generation,
    /// The engine's [`crate::engine::state::LifecycleState`] as text: `Loading`, `Asleep(1)`, ….
    pub state: String,
    pub since: Tick,
    pub leases: u32,
    /// The engine is saturated: the load that it reported, and the most requests that it gets from this gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saturation: Option<SaturationLimit>,
    pub accelerators: Vec<AcceleratorId>,
    /// Bytes reserved on each accelerator; for a pool, the sum over the engine's accelerators.
    pub reserved: Bytes,
    pub host: Bytes,
}

const fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl ModelState {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Awake => "awake",
            Self::Asleep => "asleep",
            Self::Launching => "launching",
            Self::Cold => "cold",
            Self::Failed => "failed",
            Self::Unplaceable => "unplaceable",
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (model, report) in &self.models {
            let ModelReport { waiting, remote_waiting, leases, reason, .. } = report;
            write!(f, "{model}: {}, {waiting} waiting, ", report.state.as_str())?;
            if *remote_waiting > 0 {
                write!(f, "{remote_waiting} of them at other gateways, ")?;
            }
            writeln!(f, "{}: {reason}", pluralize(leases, "lease"))?;
            for (variant, report) in &report.variants {
                writeln!(f, "  {variant}: {report}")?;
            }
        }
        for (accelerator, reason) in &self.accelerators {
            writeln!(f, "{accelerator}: {reason}")?;
        }
        Ok(())
    }
}

impl fmt::Display for VariantReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} running or starting", self.current)?;
        if let (Some(target), Some(reason)) = (self.target, &self.target_reason) {
            write!(f, ", {target} desired ({reason})")?;
        }
        if self.asleep > 0 {
            write!(f, ", {} asleep", self.asleep)?;
        }
        match &self.wait {
            Some(wait) => write!(f, "; next engine: {}", wait.reason),
            None => Ok(()),
        }
    }
}
