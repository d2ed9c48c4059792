//! Commands of the pairing decisions. A command returns nothing; its result arrives as an
//! [`super::event::PairingEvent::Outcome`] with its serial number.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{
    event::{CommandTarget, EngineRecord, LeaderEpoch},
    ids::{NodeName, PairingEngineId, ProviderId, RequesterId, Uid},
};
use crate::{
    model::SleepLevel,
    units::{Generation, Tick},
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairingCommand {
    pub node: NodeName,
    /// Stubs and launchers answer an older epoch with a conflict.
    pub epoch: LeaderEpoch,
    /// Identifies this command; its outcome carries the same number.
    pub serial: u64,
    pub action: PairingAction,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PairingAction {
    Engine { engine: PairingEngineId, generation: Generation, step: EngineStep },
    Requester { requester: RequesterId, step: RequesterStep },
    Provider { provider: ProviderId, step: ProviderStep },
}

/// A step on an engine. Each step has one outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EngineStep {
    /// Create the engine's own Pod with its binding, record and the provider's finalizer.
    Create {
        record: EngineRecord,
    },
    /// Write the record with its requester, and the finalizer, to the provider. Must precede the launch or wake.
    Bind {
        record: EngineRecord,
    },
    /// Start a process in the launcher.
    Launch,
    /// Request one token from the engine, now that it answers.
    SendCanary,
    /// Point the requester's stub at the engine, open the gate, and let the requester become ready.
    OpenGate {
        requester: RequesterId,
    },
    /// Close the stub's gate and drain until `deadline`; then cut the remaining requests.
    CloseGate {
        requester: RequesterId,
        deadline: Tick,
    },
    /// Put the engine to sleep through the stub of `via`, or directly without one. The stub first closes its gate if it
    /// is still open.
    Sleep {
        level: SleepLevel,
        via: Option<RequesterId>,
    },
    Wake {
        level: SleepLevel,
        via: RequesterId,
    },
    /// Write to the provider that the engine is unbound, with its last use. The finalizer goes with the last bound
    /// engine. `forget` removes the whole record.
    Unbind {
        last_used: Tick,
        forget: bool,
    },
    /// Stop the process: delete its Pod, or the launcher's instance. `Done` means that a Pod's deletion is ordered, or
    /// that an instance is gone.
    Stop {
        reason: EngineStopReason,
    },
    /// Query the engine's condition. The stub or launcher records the epoch and obeys no older one afterwards.
    Query,
}

/// Why an engine is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EngineStopReason {
    /// Its requester goes, and the engine does not sleep.
    Unneeded,
    /// The engine has slept for as long as it may.
    Idle,
    /// A sleeper is stopped to free memory.
    Evicted,
    /// A sleeper is stopped because its launcher may hold no more engines.
    Displaced,
    /// Its template no longer exists.
    Obsolete,
    /// The engine sleeps at level 2, and a wake from there does not restore LoRA adapters.
    LoraAdapters,
    /// The gateway wants the engine asleep while its requester stays, and the engine does not sleep.
    CannotSleep,
    StartFailed,
    WakeFailed,
    CanaryFailed,
    SleepFailed,
    /// The engine did not answer in time, or its process is gone.
    Lost,
    /// Its deleted requester has been held for the maximum time.
    Overdue,
    /// Its node, Pod or accelerator is being removed.
    Leaving,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RequesterStep {
    /// Query its accelerators. `close_gate`: also close its gate, since it has no engine.
    QueryAccelerators { close_gate: bool },
    /// Close the stub's gate and cut requests in flight: an earlier leader may have opened it to an engine that is
    /// gone. A stub without a gate becomes not ready.
    CloseGate,
    /// Delete the Pod if its UID still matches.
    Delete { reason: RequesterDeleteReason },
    /// Add or remove our finalizer.
    SetFinalizer { present: bool },
    /// Let the stub, which delays its termination, end now.
    Release,
}

/// Why a requester is deleted to be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RequesterDeleteReason {
    EngineGone,
    ProviderDeleted,
    Cordoned,
    NodeGone,
    AcceleratorFaulty,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProviderStep {
    /// Create a launcher of the build that this requester requests.
    Create { requester: Option<RequesterId> },
    /// Delete a launcher; `uid: None` deletes any Pod with its name.
    Delete { uid: Option<Uid>, reason: LauncherDeleteReason },
}

/// Why a launcher is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LauncherDeleteReason {
    /// The launcher does not work, is unneeded, or its node or accelerator is being removed.
    Useless,
    /// Its build is obsolete or not the requested one. The launcher is not faulty, so the next one is created at once.
    Replaced,
}

impl PairingAction {
    #[must_use]
    pub fn target(&self) -> CommandTarget {
        match self {
            Self::Engine { engine, generation, .. } => CommandTarget::Engine(engine.clone(), *generation),
            Self::Requester { requester, .. } => CommandTarget::Requester(requester.clone()),
            Self::Provider { provider, .. } => CommandTarget::Provider(provider.clone()),
        }
    }
}

/// Describes the action for transcripts.
impl fmt::Display for PairingAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine { engine, step, .. } => match step {
                EngineStep::Create { record } => {
                    write!(f, "create the provider of {engine} for {}", owner(record))
                }
                EngineStep::Bind { record } => write!(f, "bind {engine} to {}", owner(record)),
                EngineStep::Launch => write!(f, "launch {engine}"),
                EngineStep::SendCanary => write!(f, "send a canary to {engine}"),
                EngineStep::OpenGate { requester } => write!(f, "open the gate of {requester} to {engine}"),
                EngineStep::CloseGate { requester, deadline } => {
                    write!(f, "close the gate of {requester} to {engine}, drain until {deadline}")
                }
                EngineStep::Sleep { level, via } => {
                    let via = via.as_ref().map(|r| format!(" through {r}")).unwrap_or_default();
                    write!(f, "put {engine} to sleep at level {}{via}", level.number())
                }
                EngineStep::Wake { via, .. } => write!(f, "wake {engine} through {via}"),
                EngineStep::Unbind { forget: true, .. } => write!(f, "forget {engine}"),
                EngineStep::Unbind { .. } => write!(f, "unbind {engine}"),
                EngineStep::Stop { reason: why } => write!(f, "stop {engine}: {why}"),
                EngineStep::Query => write!(f, "query {engine}"),
            },
            Self::Requester { requester, step } => match step {
                RequesterStep::QueryAccelerators { .. } => write!(f, "query the accelerators of {requester}"),
                RequesterStep::CloseGate => write!(f, "close the gate of {requester}"),
                RequesterStep::Delete { reason: why } => write!(f, "delete {requester}: {why}"),
                RequesterStep::SetFinalizer { present: true } => {
                    write!(f, "add the finalizer to {requester}")
                }
                RequesterStep::SetFinalizer { .. } => write!(f, "remove the finalizer from {requester}"),
                RequesterStep::Release => write!(f, "release the stub of {requester}"),
            },
            Self::Provider { provider, step: ProviderStep::Create { .. } } => write!(f, "create {provider}"),
            Self::Provider { provider, step: ProviderStep::Delete { reason: why, .. } } => {
                write!(f, "delete {provider}: {why}")
            }
        }
    }
}

fn owner(record: &EngineRecord) -> &str {
    record.requester.as_ref().map_or("no requester", RequesterId::as_str)
}

impl fmt::Display for EngineStopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unneeded => "the requester is gone",
            Self::Idle => "the engine has slept for as long as stopAfter allows",
            Self::Evicted => "the engine's memory is needed",
            Self::Displaced => "the launcher is full",
            Self::Obsolete => "the engine's template no longer exists",
            Self::LoraAdapters => "the engine sleeps at level 2, which loses its LoRA adapters",
            Self::CannotSleep => "the gateway wants the engine asleep, and it cannot sleep",
            Self::StartFailed => "the engine did not start",
            Self::WakeFailed => "the engine did not wake",
            Self::CanaryFailed => "the engine answered but could not serve",
            Self::SleepFailed => "the engine did not fall asleep",
            Self::Lost => "the engine is gone or unreachable",
            Self::Overdue => "the deleted requester has been held for the maximum time",
            Self::Leaving => "the engine's node, Pod or accelerator is going away",
        })
    }
}

impl fmt::Display for LauncherDeleteReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Useless => "the launcher is unusable or unneeded",
            Self::Replaced => "the launcher's build is obsolete or not the requested one",
        })
    }
}

impl fmt::Display for RequesterDeleteReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EngineGone => "the engine is gone",
            Self::ProviderDeleted => "the provider is being deleted",
            Self::Cordoned => "the node is cordoned",
            Self::NodeGone => "the node is gone",
            Self::AcceleratorFaulty => "the accelerator is faulty",
        })
    }
}
