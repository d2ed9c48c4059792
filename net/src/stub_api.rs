//! What the gateway, the stub and the launcher say to each other: the headers, and the bodies of the stub's gate.
//!
//! Whoever orders says which leader it is (`epoch`) and which life of the engine it means (`generation`). The stub
//! remembers the highest epoch it has heard and refuses orders of an older one, so that a leader that was replaced and
//! does not know it yet can open no gate and wake no engine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use rouse::units::Generation;

/// Marks the 503 of a closed gate: no engine has seen the request, and whoever forwarded it may park it.
pub const GATED_HEADER: &str = "x-rouse-gated";
/// Marks the 503 of a stub that was not told yet where its engine is.
pub const NOT_READY_HEADER: &str = "x-rouse-not-ready";
/// Of a write: who orders it, where the body does not say so.
pub const EPOCH_HEADER: &str = "x-rouse-epoch";
/// Where a stub and a launcher are told who leads: `POST` of [`EpochAnnouncement`]. A read tells them nothing.
pub const EPOCH_PATH: &str = "/v1/epoch";

/// Which leader speaks: grows with every change of leader.
pub type Epoch = u64;

/// No leader before this one is obeyed from here on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EpochAnnouncement {
    pub epoch: Epoch,
}

/// A gate as it stands; the answer of `GET /v1/gate`, and of both orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateStatus {
    pub gated: bool,
    /// The newest that was heard of; 0 before any.
    pub epoch: Epoch,
    pub generation: Generation,
    /// Requests under way to the engine.
    pub leases: u32,
    /// Milliseconds until the drain's deadline, while one runs.
    #[serde(default)]
    pub deadline: Option<u64>,
    /// How many the last drain cut at its deadline, once all of them have ended; also where the gate was opened again before
    /// that.
    #[serde(default)]
    pub cut: Option<u32>,
}

/// `POST /v1/gate`: close it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CloseGateRequest {
    pub epoch: Epoch,
    pub generation: Generation,
    /// Milliseconds from now, since clocks of two nodes differ; none: the requests under way have all the time they want.
    #[serde(default)]
    pub drain_deadline: Option<u64>,
    #[serde(default)]
    pub on_deadline: DrainDeadlineAction,
}

/// What becomes of requests that are under way at the deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DrainDeadlineAction {
    /// They go on, and the gate stays closed.
    #[default]
    Keep,
    /// They end with an error in their stream.
    Cut,
}

/// `DELETE /v1/gate`, as the body or as the query: open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenGateRequest {
    pub epoch: Epoch,
    pub generation: Generation,
}

/// `POST /v1/engine/sleep` and `/v1/engine/wake`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActuateRequest {
    pub epoch: Epoch,
    pub generation: Generation,
    /// 1 or 2; for a wake: the level at which it sleeps. 1, where nothing is said.
    #[serde(default)]
    pub level: Option<u8>,
}

/// Their 502: the engine did not follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ActuationFailure {
    /// For people.
    pub error: String,
    /// It took the order to sleep, and says that it is awake: requests may be let in again.
    #[serde(default)]
    pub stays_awake: bool,
}

/// What became of it, with the memory as it is read afterwards, where it can be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActuationResult {
    pub asleep: bool,
    /// Milliseconds that the engine took.
    pub took: u64,
    /// UUID to MiB in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<BTreeMap<String, u64>>,
}
