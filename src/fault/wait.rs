//! What a request waited for: the details, the models in its way, and their texts in a fault's message.
//!
//! Apart from the faults, because the planner fills these details in before any request is refused.

use serde::{Deserialize, Serialize};

use super::FailureCause;
use crate::{
    fleet::quote::WaitRange,
    model::ModelName,
    units::{Bytes, Millis},
};

/// Details on what a refused or parked request waited for.
///
/// [`Fault::InsufficientMemory`](super::Fault::InsufficientMemory), [`Fault::QueueFull`](super::Fault::QueueFull) and
/// [`Fault::ModelNotReady`](super::Fault::ModelNotReady) carry them, and
/// [`Fault::EngineFailed`](super::Fault::EngineFailed) may.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitDetails {
    /// Text from the plan's report.
    pub waited_for: String,
    /// Every model that the text names.
    ///
    /// The gateway redacts these names for clients that must not know the models. They are the names in the text: the
    /// configuration may have others by the time a client reads it.
    #[serde(default, skip_serializing_if = "<[_]>::is_empty")]
    pub named_models: Box<[ModelName]>,
    pub waited: Millis,
    /// Place in the model's queue, from 1; 0 if the request was not queued.
    pub position: u32,
    /// The engines that hold the memory, at most 16: those that hold the most.
    pub holders: Vec<BlockingModel>,
    /// Number of engines that hold memory, too, and are not among `holders`; at most 65,535.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unlisted_holders: u16,
    /// When something may change at the earliest, from now.
    pub retry_after: Option<Millis>,
    /// How long a request that arrives now is expected to wait; `None` if that is unknown.
    ///
    /// Boxed to keep [`Fault`] small.
    ///
    /// [`Fault`]: super::Fault
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_wait: Option<Box<WaitRange>>,
    /// The limit that ended the wait, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expired_limit: Option<WaitLimit>,
}

const fn is_zero(number: &u16) -> bool {
    *number == 0
}

/// The limit of a request's wait for its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitLimit {
    /// The client set a limit, and it is shorter than the queue's.
    Request,
    Queue,
}

impl WaitLimit {
    const fn describe(self) -> &'static str {
        match self {
            Self::Request => "the request's x-request-timeout",
            Self::Queue => "queue.maxWait",
        }
    }
}

/// A model that holds memory that another model waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockingModel {
    pub model: ModelName,
    pub memory: Bytes,
    pub idle_for: Millis,
    pub leases: u32,
    pub pinned: bool,
}

/// Numbers on why a model does not fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryShortage {
    pub model: ModelName,
    /// Bytes per accelerator; for a pool, the sum over all that an engine takes of it.
    pub memory: Bytes,
    pub available: Bytes,
    pub permanent: bool,
    pub wait: WaitDetails,
}

impl std::fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { model, memory, available, permanent: never, wait } = self;
        let reason = &wait.waited_for;
        if *never {
            return write!(f, "Model '{model}' fits nowhere, even with all other models evicted: {reason}");
        }
        write!(f, "Cannot schedule {model}: insufficient memory ({memory} needed, {available} free)")?;
        if !reason.is_empty() {
            write!(f, ": {reason}")?;
        }
        f.write_str(&wait_expired_suffix(wait))
    }
}

/// Message of [`Fault::ModelNotReady`](super::Fault::ModelNotReady). The wait's text describes the last failed start, if
/// there is one.
pub(super) fn not_ready_message(model: &ModelName, cause: &FailureCause, wait: &WaitDetails) -> String {
    let WaitDetails { waited_for, waited, expired_limit: over, .. } = wait;
    match cause {
        FailureCause::Deadline => {
            let when = over.map(|over| format!(", when {} expired", over.describe())).unwrap_or_default();
            format!("Model '{model}' was not ready after {waited}{when}: {waited_for}")
        }
        cause => {
            let reason = if waited_for.is_empty() { cause.describe() } else { waited_for.clone() };
            format!("Model '{model}' failed to become ready: {reason}{}", wait_expired_suffix(wait))
        }
    }
}

/// Text on why the wait ended, to append to what blocked the request.
fn wait_expired_suffix(wait: &WaitDetails) -> String {
    wait.expired_limit
        .map(|over| format!("; {} expired after {}", over.describe(), wait.waited))
        .unwrap_or_default()
}

/// Text on what the queued requests wait for.
pub(super) fn queue_full_suffix(message: &str, wait: &WaitDetails) -> String {
    let reason = Some(&wait.waited_for).filter(|reason| !reason.is_empty() && *reason != message);
    reason.map(|reason| format!(": {reason}")).unwrap_or_default() + &wait_expired_suffix(wait)
}
