//! What the decisions order. A command returns nothing; what became of it is an [`super::event::PairingEvent::Outcome`] with its
//! serial number.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{
    event::{CommandTarget, EngineRecord, Epoch},
    ids::{NodeName, PairingEngineId, ProviderId, RequesterId, Uid},
};
use crate::{
    model::SleepLevel,
    units::{Generation, Tick},
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairingCommand {
    pub node: NodeName,
    /// Stubs and launchers answer an older one with a conflict.
    pub epoch: Epoch,
    /// Of this command; its outcome carries it.
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

/// What is ordered of an engine. Each has one outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EngineStep {
    /// Make the engine's own Pod, bound from the first, with the provider's finalizer and the record.
    Create {
        record: EngineRecord,
    },
    /// Write the record, with its requester, and the finalizer to the provider. Nothing is launched or woken before.
    Bind {
        record: EngineRecord,
    },
    /// Start a process in the launcher.
    Launch,
    /// Ask it for one token, now that it answers.
    SendCanary,
    /// Point the requester's stub at it, open the gate, and let the requester be ready.
    OpenGate {
        requester: RequesterId,
    },
    /// Close the gate of the stub and wait for what is under way until `deadline`, which then is cut.
    CloseGate {
        requester: RequesterId,
        deadline: Tick,
    },
    /// Through the stub of `via`, which closes its gate first if it was not told to; directly without one.
    Sleep {
        level: SleepLevel,
        via: Option<RequesterId>,
    },
    Wake {
        level: SleepLevel,
        via: RequesterId,
    },
    /// Write to the provider that the engine is no longer bound, and since when; with the last bound one its finalizer goes.
    /// `forget`: the whole record goes.
    Unbind {
        last_used: Tick,
        forget: bool,
    },
    /// End its process: delete its Pod, or the launcher's instance. Done means ordered of a Pod, and gone of an instance.
    Stop {
        reason: EngineStopReason,
    },
    /// How is it? The stub or launcher asked takes note of the epoch, so that nothing older is obeyed afterwards.
    Query,
}

/// Why an engine is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EngineStopReason {
    /// Its requester went, and it does not sleep.
    Unneeded,
    /// It has slept for as long as it may.
    Idle,
    /// To make room, as a sleeper.
    Evicted,
    /// As a sleeper of a launcher that may hold no more engines.
    Displaced,
    /// Its template is no longer there.
    Obsolete,
    /// It sleeps at level 2, from which an engine with LoRA adapters does not come back whole.
    LoraAdapters,
    StartFailed,
    WakeFailed,
    CanaryFailed,
    SleepFailed,
    /// It did not answer for as long as it was given, or its process is gone.
    Lost,
    /// Its requester may wait no longer.
    Overdue,
    /// Its node, Pod or accelerator goes away.
    Leaving,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RequesterStep {
    /// Which accelerators has it got? `close_gate`: and its gate is to be closed, since it has no engine.
    QueryAccelerators { close_gate: bool },
    /// Close the gate of its stub, and cut what is under way: a leader before may have opened it to an engine that it has no more.
    /// One that has no gate is told that it is not ready.
    CloseGate,
    /// Delete the Pod, if it is still this one.
    Delete { reason: RequesterDeleteReason },
    /// Put our finalizer on it, or take it off.
    SetFinalizer { present: bool },
    /// Let its stub, which was told to end and holds on, end now.
    Release,
}

/// Why a requester is deleted, so that another one comes in its place.
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
    /// Make a launcher, as this requester asks for it.
    Create { requester: Option<RequesterId> },
    /// Delete a launcher; `None`: whichever has the name.
    Delete { uid: Option<Uid>, reason: LauncherDeleteReason },
}

/// Why a launcher is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LauncherDeleteReason {
    /// It does not work, nobody needs it, or its node or accelerator goes away.
    Useless,
    /// It is of another build than launchers there are to be: nothing is wrong with it, and the next one is made at once.
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

/// In words, for stories.
impl fmt::Display for PairingAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine { engine, step, .. } => match step {
                EngineStep::Create { record } => {
                    write!(f, "create the provider of {engine} for {}", owner(record))
                }
                EngineStep::Bind { record } => write!(f, "bind {engine} to {}", owner(record)),
                EngineStep::Launch => write!(f, "launch {engine}"),
                EngineStep::SendCanary => write!(f, "ask {engine} for a token"),
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
                EngineStep::Stop { reason: why } => write!(f, "end {engine}: {why}"),
                EngineStep::Query => write!(f, "ask {engine} how it is"),
            },
            Self::Requester { requester, step } => match step {
                RequesterStep::QueryAccelerators { .. } => write!(f, "ask {requester} for its accelerators"),
                RequesterStep::CloseGate => write!(f, "close the gate of {requester}"),
                RequesterStep::Delete { reason: why } => write!(f, "delete {requester}: {why}"),
                RequesterStep::SetFinalizer { present: true } => {
                    write!(f, "put the finalizer on {requester}")
                }
                RequesterStep::SetFinalizer { .. } => write!(f, "take the finalizer off {requester}"),
                RequesterStep::Release => write!(f, "let the stub of {requester} end"),
            },
            Self::Provider { provider, step: ProviderStep::Create { .. } } => write!(f, "create {provider}"),
            Self::Provider { provider, step: ProviderStep::Delete { reason: why, .. } } => {
                write!(f, "delete {provider}: {why}")
            }
        }
    }
}

fn owner(record: &EngineRecord) -> &str {
    record.requester.as_ref().map_or("nobody", RequesterId::as_str)
}

impl fmt::Display for EngineStopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unneeded => "its requester is gone",
            Self::Idle => "it has slept for as long as it may (stopAfter)",
            Self::Evicted => "room is needed",
            Self::Displaced => "its launcher is full",
            Self::Obsolete => "its template is gone",
            Self::LoraAdapters => "it sleeps at level 2, where its LoRA adapters are lost",
            Self::StartFailed => "it did not start",
            Self::WakeFailed => "it did not wake",
            Self::CanaryFailed => "it answered and could not serve",
            Self::SleepFailed => "it did not fall asleep",
            Self::Lost => "it is gone or cannot be reached",
            Self::Overdue => "its requester may wait no longer",
            Self::Leaving => "its node, Pod or accelerator goes away",
        })
    }
}

impl fmt::Display for LauncherDeleteReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Useless => "it is of no use",
            Self::Replaced => "it is not what launchers are made from now",
        })
    }
}

impl fmt::Display for RequesterDeleteReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EngineGone => "its engine is gone",
            Self::ProviderDeleted => "its provider is being deleted",
            Self::Cordoned => "its node is cordoned",
            Self::NodeGone => "its node is gone",
            Self::AcceleratorFaulty => "its accelerator is faulty",
        })
    }
}
