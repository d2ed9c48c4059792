//! The messages between gateway, stub and launcher: their headers, and the bodies of the stub's API.
//!
//! Each order names the leader that sends it (`epoch`) and the engine generation it is for (`generation`). The stub
//! remembers the highest epoch it has seen and refuses orders of an older one. So a replaced leader that does not know
//! it yet can open no gate and wake no engine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use rouse::units::Generation;

/// Marks the 503 of a closed gate: no engine has seen the request, and the proxy that forwarded it may park it.
pub const GATED_HEADER: &str = "x-rouse-gated";
/// Marks the 503 of a stub that does not know its engine's address yet.
pub const NOT_READY_HEADER: &str = "x-rouse-not-ready";
/// The sender's epoch, on writes whose body does not carry it.
pub const EPOCH_HEADER: &str = "x-rouse-epoch";
/// `POST` an [`EpochAnnouncement`] here to announce the leader's epoch to a stub or a launcher. Reads do not announce
/// it.
pub const EPOCH_PATH: &str = "/v1/epoch";

/// Identifies a leader: grows with every change of leader.
pub type Epoch = u64;

/// Announces an epoch: from now on the receiver refuses orders of older ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EpochAnnouncement {
    pub epoch: Epoch,
}

/// The state of a gate; the response to `GET /v1/gate`, and to both orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateStatus {
    pub gated: bool,
    /// The newest epoch received; 0 before any.
    pub epoch: Epoch,
    pub generation: Generation,
    /// Requests in flight to the engine.
    pub leases: u32,
    /// Milliseconds until the drain's deadline, while one runs.
    #[serde(default)]
    pub deadline: Option<u64>,
    /// Number of requests that the last drain cut at its deadline, set once all of them have ended. Also set where the
    /// gate was reopened before they ended.
    #[serde(default)]
    pub cut: Option<u32>,
}

/// `POST /v1/gate`: closes the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CloseGateRequest {
    pub epoch: Epoch,
    pub generation: Generation,
    /// Milliseconds from now, since the clocks of two nodes differ. `None`: no deadline for the requests in flight.
    #[serde(default)]
    pub drain_deadline: Option<u64>,
    #[serde(default)]
    pub on_deadline: DrainDeadlineAction,
}

/// What happens to requests that are in flight at the deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DrainDeadlineAction {
    /// The requests continue, and the gate stays closed.
    #[default]
    Keep,
    /// The requests end with an error in their stream.
    Cut,
}

/// `DELETE /v1/gate`, as the body or as the query: opens the gate.
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
    /// Sleep level, 1 or 2. For a wake: the level at which the engine sleeps. `None` means 1.
    #[serde(default)]
    pub level: Option<u8>,
}

/// The 502 of both calls: the engine did not comply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ActuationFailure {
    /// A message for humans.
    pub error: String,
    /// The engine accepted the order to sleep and reports that it is awake: the gate may open again.
    #[serde(default)]
    pub stays_awake: bool,
}

/// Result of a sleep or wake call. Includes the memory use afterwards, where it can be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActuationResult {
    pub asleep: bool,
    /// Milliseconds that the engine took.
    pub took: u64,
    /// UUID to MiB in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<BTreeMap<String, u64>>,
}
