//! What the decisions say about themselves: each model has its reason, and doing nothing needs one as much as doing something.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use crate::{
    engine::last_outcome::LastOutcome,
    fault::WaitDetails,
    fleet::event::LearnedMeasurements,
    model::{AcceleratorId, EngineId, ModelName},
    units::{Bytes, Generation, Tick, pluralize},
};

/// One line for every model, in the order of names. `Display` is what people read and what golden tests compare.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    pub models: BTreeMap<ModelName, ModelReport>,
    /// Accelerators on which nothing new is granted, and why.
    pub accelerators: BTreeMap<AcceleratorId, String>,
}

/// Why a model is as it is, and what it waits for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelReport {
    pub state: ModelState,
    /// At all gateways.
    pub waiting: u32,
    /// So many of them at others than this one.
    #[serde(skip_serializing_if = "is_zero")]
    pub remote_waiting: u32,
    pub leases: u32,
    /// What befell the model last, where it has not served since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_outcome: Option<LastOutcome>,
    /// In words, an engine's own among them, which are for the admin: "waiting for gpu-0: held by llama, 1 lease, its
    /// turn ends at 08:15:00.000".
    pub reason: String,
    /// The same as data, for those refused or parked.
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
    /// Its last start failed; it lasts until another begins.
    Failed,
    /// It fits nowhere, whatever else is put away.
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
    /// Of a pool: how many accelerators are in it, where that counts, and how many of them engines have taken.
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
    /// What befell the model last, where it has not served since.
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
    /// The engine's own state, by its name in `lifecycle`: `Loading`, `Asleep(1)`, ….
    pub state: String,
    pub since: Tick,
    pub leases: u32,
    pub accelerators: Vec<AcceleratorId>,
    /// Bytes booked on each of the accelerators; of a pool, for all that it has of it.
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
        for (model, line) in &self.models {
            let ModelReport { waiting, remote_waiting: elsewhere, leases, reason, .. } = line;
            write!(f, "{model}: {}, {waiting} waiting, ", line.state.as_str())?;
            if *elsewhere > 0 {
                write!(f, "{elsewhere} of them at other gateways, ")?;
            }
            writeln!(f, "{}: {reason}", pluralize(leases, "lease"))?;
        }
        for (accelerator, why) in &self.accelerators {
            writeln!(f, "{accelerator}: {why}")?;
        }
        Ok(())
    }
}
