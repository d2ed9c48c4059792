//! The report of a plan: each model has a reason, because doing nothing needs one as much as doing something.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use crate::{
    engine::last_outcome::LastOutcome,
    fault::WaitDetails,
    fleet::event::LearnedMeasurements,
    model::{AcceleratorId, EngineId, ModelName},
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
    /// The model's last outcome, if it has not served since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_outcome: Option<LastOutcome>,
    /// Text for the admin, which may include an engine's own output: "waiting for gpu-0: held by llama, 1 lease, its
    /// turn ends at 08:15:00.000".
    pub reason: String,
    /// The same reason as data, for refused and parked requests.
    pub wait: WaitDetails,
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
    /// Of a pool that counts its accelerators: how many it has, and how many of them engines hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units_taken: Option<u32>,
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
        }
        for (accelerator, reason) in &self.accelerators {
            writeln!(f, "{accelerator}: {reason}")?;
        }
        Ok(())
    }
}
