//! What the decisions order. A command returns nothing; its outcome is an [`crate::fleet::event::Event`].

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    fault::Fault,
    fleet::event::{OperationId, WaiterId},
    model::{AcceleratorId, EngineId, SleepLevel},
    units::{Bytes, Generation, Millis},
};

/// Why an engine's gate closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CloseReason {
    /// Nobody used it; a new request cancels this one.
    Idle,
    /// Another model's turn.
    Turn,
    /// An operator's order.
    Operator,
    /// The configuration no longer has it, or has it otherwise.
    Outdated,
    /// It is hung, failed or gone.
    Fault,
    /// It was told to sleep and says that it is awake; a new request cancels this one too.
    SleepDenied,
    Shutdown,
    /// The gateway that leads says that it is not awake.
    PublishedNotAwake,
}

/// What follows once the gate is drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AfterDrain {
    /// At this level; `None`: as its policy says.
    Sleep(Option<SleepLevel>),
    Stop,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "command")]
pub enum Command {
    // To the platform
    /// Book `bytes` on each of `accelerators`, and `host` RAM. Outcome: `Placed` or `Conflict`.
    Reserve {
        engine: EngineId,
        generation: Generation,
        accelerators: Vec<AcceleratorId>,
        bytes: Bytes,
        host: Bytes,
    },
    /// The engine's booking is now this small; zero ends it. No outcome.
    Shrink {
        engine: EngineId,
        generation: Generation,
        bytes: Bytes,
        host: Bytes,
    },
    /// Start a process or Pod. Outcomes: `Started`, `Profiled`, `Ready`; or `StartFailed`, `Gone`.
    Launch {
        engine: EngineId,
        generation: Generation,
        accelerators: Vec<AcceleratorId>,
        bytes: Bytes,
    },
    /// Ask for one token. Outcome: `Canary`.
    Probe {
        engine: EngineId,
        generation: Generation,
    },
    /// Put to sleep; the gate is closed and drained. Outcome: `Slept` or `SleepFailed`.
    Sleep {
        engine: EngineId,
        generation: Generation,
        level: SleepLevel,
    },
    /// Outcome: `Ready` or `WakeFailed`.
    Wake {
        engine: EngineId,
        generation: Generation,
        level: SleepLevel,
    },
    /// End the process or Pod: politely, and after `grace` not. Outcome: `Gone`.
    Stop {
        engine: EngineId,
        generation: Generation,
        grace: Millis,
        /// The engine that is to have the memory of this one, which slept or was not there yet.
        successor: Option<EngineId>,
    },
    /// The stub in front of the engine lets nobody in: neither does the driver until it does, and the platform watches for
    /// that. Leases that are out stay out. Outcome: `StubGateOpened`.
    AwaitStub {
        engine: EngineId,
        generation: Generation,
    },
    /// Read the meter once, after this pause. Outcome: `MeterRead`.
    ReadMeter {
        accelerator: AcceleratorId,
        after: Millis,
    },

    // To the driver itself
    /// Leases may be taken: by waiters only, or (`public`) by every request that finds the engine in the routes.
    OpenGate {
        engine: EngineId,
        generation: Generation,
        public: bool,
    },
    /// No lease any more. Outcome: `Drained`, once the last one is gone.
    CloseGate {
        engine: EngineId,
        generation: Generation,
        reason: CloseReason,
        after_drain: AfterDrain,
        /// The engine that is to have the memory, when a turn ends for it.
        successor: Option<EngineId>,
    },
    /// End every exchange on this engine with this fault. Outcome: `Drained`.
    RevokeLeases {
        engine: EngineId,
        generation: Generation,
        fault: Fault,
    },
    /// Give the waiter a lease. `canary`: its verdict is wanted as `Canary`.
    Grant {
        waiter: WaiterId,
        engine: EngineId,
        generation: Generation,
        canary: bool,
    },
    Refuse {
        waiter: WaiterId,
        fault: Fault,
    },
    /// The operator's order is done, or why it is not.
    FinishOperation {
        operation: OperationId,
        outcome: Result<(), String>,
    },
}

/// In words, for reports and golden scenarios. The generation is left out: an engine has one at a time.
impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reserve { engine, accelerators, bytes, host, .. } => {
                write!(f, "reserve {bytes} on {} for {engine}", accelerator_list(accelerators))?;
                write_host_bytes(f, *host)
            }
            Self::Shrink { engine, bytes, host, .. } => {
                write!(f, "shrink the reservation of {engine} to {bytes}")?;
                write_host_bytes(f, *host)
            }
            Self::Launch { engine, accelerators, bytes, .. } => {
                write!(f, "launch {engine} on {} with {bytes}", accelerator_list(accelerators))
            }
            Self::Probe { engine, .. } => write!(f, "probe {engine}"),
            Self::Sleep { engine, level, .. } => {
                write!(f, "put {engine} to sleep at level {}", level.number())
            }
            Self::Wake { engine, level, .. } => write!(f, "wake {engine} from level {}", level.number()),
            Self::Stop { engine, grace, .. } => write!(f, "stop {engine}, by force after {grace}"),
            Self::AwaitStub { engine, .. } => write!(f, "let nobody in to {engine} until its stub does"),
            Self::ReadMeter { accelerator, after } if after.0 == 0 => {
                write!(f, "read the meter of {accelerator}")
            }
            Self::ReadMeter { accelerator, after } => write!(f, "read the meter of {accelerator} in {after}"),
            Self::OpenGate { engine, public, .. } => {
                let to = if *public { "to all" } else { "to waiters" };
                write!(f, "open the gate of {engine} {to}")
            }
            Self::CloseGate { engine, .. } => write!(f, "close the gate of {engine}"),
            Self::RevokeLeases { engine, fault, .. } => write!(f, "revoke the leases of {engine}: {fault}"),
            Self::Grant { waiter, engine, canary, .. } => {
                let first = if *canary { " as its first" } else { "" };
                write!(f, "grant waiter {} a lease on {engine}{first}", waiter.0)
            }
            Self::Refuse { waiter, fault } => write!(f, "refuse waiter {}: {fault}", waiter.0),
            Self::FinishOperation { operation, outcome } => match outcome {
                Ok(()) => write!(f, "order {} is done", operation.0),
                Err(why) => write!(f, "order {} failed: {why}", operation.0),
            },
        }
    }
}

fn accelerator_list(accelerators: &[AcceleratorId]) -> String {
    let names: Vec<_> = accelerators.iter().map(AcceleratorId::as_str).collect();
    names.join(" and ")
}

fn write_host_bytes(f: &mut fmt::Formatter<'_>, host: Bytes) -> fmt::Result {
    if host == Bytes::ZERO {
        return Ok(());
    }
    write!(f, ", {host} of host memory")
}
