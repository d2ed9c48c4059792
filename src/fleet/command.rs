//! What the decisions order. A command returns nothing; its outcome is an [`super::event::Event`].

use serde::{Deserialize, Serialize};

use super::event::{OperationId, WaiterId};
use crate::{
    fault::Fault,
    model::{AcceleratorId, EngineId, Level},
    units::{Bytes, Generation, Millis},
};

/// Why an engine's gate closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Why {
    /// Nobody used it; a new request cancels this one.
    Idle,
    /// Another model's turn.
    Turn,
    /// An operator's order.
    Order,
    /// The configuration no longer has it, or has it otherwise.
    Outdated,
    /// It is hung, failed or gone.
    Fault,
    Shutdown,
}

/// What follows once the gate is drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Then {
    /// At this level; `None`: as its policy says.
    Sleep(Option<Level>),
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
        level: Level,
    },
    /// Outcome: `Ready` or `WakeFailed`.
    Wake {
        engine: EngineId,
        generation: Generation,
        level: Level,
    },
    /// End the process or Pod: politely, and after `grace` not. Outcome: `Gone`.
    Stop {
        engine: EngineId,
        generation: Generation,
        grace: Millis,
    },
    /// Read the meter once, after this pause. Outcome: `Memory`.
    Meter {
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
        why: Why,
        then: Then,
    },
    /// End every exchange on this engine with this fault. Outcome: `Drained`.
    Revoke {
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
    Finish {
        operation: OperationId,
        outcome: Result<(), String>,
    },
}
