//! Commands that the decisions emit. A command returns nothing; its outcome is an [`crate::fleet::event::Event`].

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
    /// The engine was unused; a new request cancels this drain.
    Idle,
    /// The turn passes to another model.
    Turn,
    /// The model's target has fewer engines; a higher target cancels this drain.
    ScaledDown,
    /// An operator ordered it.
    Operator,
    /// The configuration no longer has the engine, or has changed for it.
    Outdated,
    /// The engine is hung, failed or gone.
    Fault,
    /// The engine accepted the sleep order and reports that it is awake; a new request cancels this drain too.
    SleepDenied,
    /// The engine sleeps and wakes once without need; a new request cancels this drain, unless the engine is new.
    Rehearsal,
    Shutdown,
    /// The leader publishes that the engine is not awake.
    PublishedNotAwake,
}

/// Next step for the engine once its gate is drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AfterDrain {
    /// Sleep at this level; `None` uses the level of the model's policy.
    Sleep(Option<SleepLevel>),
    Stop,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "command")]
pub enum Command {
    // To the platform
    /// Reserve `bytes` on each of `accelerators`, and `host` RAM. Outcome: `Placed` or `Conflict`.
    Reserve {
        engine: EngineId,
        generation: Generation,
        accelerators: Vec<AcceleratorId>,
        bytes: Bytes,
        host: Bytes,
    },
    /// Reduce the engine's reservation to these amounts; zero ends it. No outcome.
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
    /// Request one token. Outcome: `Canary`.
    Probe {
        engine: EngineId,
        generation: Generation,
    },
    /// Put the engine to sleep; its gate is closed and drained. Outcome: `Slept` or `SleepFailed`.
    Sleep {
        engine: EngineId,
        generation: Generation,
        level: SleepLevel,
    },
    /// Wake the engine. Outcome: `Ready` or `WakeFailed`.
    Wake {
        engine: EngineId,
        generation: Generation,
        level: SleepLevel,
    },
    /// End the process or Pod, by force after `grace`. Outcome: `Gone`.
    Stop {
        engine: EngineId,
        generation: Generation,
        grace: Millis,
        /// The engine that gets the memory of this one, which was asleep or still starting.
        successor: Option<EngineId>,
    },
    /// The engine's stub has closed its gate: admit no request until it opens, which the platform watches for. Existing
    /// leases stay. Outcome: `StubGateOpened`.
    AwaitStub {
        engine: EngineId,
        generation: Generation,
    },
    /// Read the meter once, after this delay. Outcome: `MeterRead`.
    ReadMeter {
        accelerator: AcceleratorId,
        after: Millis,
    },

    // To the driver itself
    /// Allow leases: for waiters only, or (`public`) for every request that finds the engine in the routes.
    OpenGate {
        engine: EngineId,
        generation: Generation,
        public: bool,
    },
    /// Allow no new lease. Outcome: `Drained`, once the last lease ends.
    CloseGate {
        engine: EngineId,
        generation: Generation,
        reason: CloseReason,
        after_drain: AfterDrain,
        /// The engine that gets the memory, when the turn passes to it.
        successor: Option<EngineId>,
    },
    /// End every exchange on this engine with this fault. Outcome: `Drained`.
    RevokeLeases {
        engine: EngineId,
        generation: Generation,
        fault: Fault,
    },
    /// Give the waiter a lease. `canary`: report how this request went as `Canary`.
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
    /// Complete the operator's order, with the reason if it failed.
    FinishOperation {
        operation: OperationId,
        outcome: Result<(), String>,
    },
}

/// Text for reports and golden scenarios. The generation is left out: an engine has one at a time.
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
            Self::Stop { engine, grace, .. } => write!(f, "stop {engine}, forcibly after {grace}"),
            Self::AwaitStub { engine, .. } => {
                write!(f, "hold requests to {engine} until its stub opens the gate")
            }
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
                let first = if *canary { " as the canary" } else { "" };
                write!(f, "grant waiter {} a lease on {engine}{first}", waiter.0)
            }
            Self::Refuse { waiter, fault } => write!(f, "refuse waiter {}: {fault}", waiter.0),
            Self::FinishOperation { operation, outcome } => match outcome {
                Ok(()) => write!(f, "order {} is done", operation.0),
                Err(error) => write!(f, "order {} failed: {error}", operation.0),
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
