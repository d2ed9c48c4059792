//! The states of an engine, and the transitions between them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    fault::FailureCause,
    fleet::command::{AfterDrain, CloseReason},
    model::SleepLevel,
    units::Tick,
};

/// Lifecycle state of an engine. Its memory and its leases are in [`super::Engine`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LifecycleState {
    /// No process runs, no memory is held.
    Cold,
    /// The process or Pod is requested.
    Launching,
    /// The process runs and does not answer yet, or its first exchange is in flight.
    Loading,
    /// The engine answers and has proved that it can serve.
    Awake,
    /// The gate is closed; leases run out. `revoked`: the leases were ordered to end.
    Draining {
        reason: CloseReason,
        after_drain: AfterDrain,
        revoked: bool,
        drained: bool,
    },
    FallingAsleep {
        level: SleepLevel,
    },
    Asleep {
        level: SleepLevel,
    },
    /// The engine was ordered to wake, or is awake with its first exchange in flight.
    Waking {
        level: SleepLevel,
    },
    /// The engine is unusable: its leases are revoked, and it is stopped once they end.
    Failing {
        cause: FailureCause,
        drained: bool,
    },
    /// The engine was ordered to stop; it keeps its memory until its process has ended.
    Stopping {
        cause: FailureCause,
    },
    /// The process ended by a failure; no retry before `until`.
    Backoff {
        until: Tick,
        cause: FailureCause,
    },
}

impl LifecycleState {
    /// Whether the engine may have a process.
    #[must_use]
    pub const fn has_process(&self) -> bool {
        !matches!(self, Self::Cold | Self::Backoff { .. })
    }

    /// Whether the engine is on its way to being awake.
    #[must_use]
    pub const fn is_starting(&self) -> bool {
        matches!(self, Self::Launching | Self::Loading | Self::Waking { .. })
    }

    /// Whether the state lasts in proportion to the memory that it moves.
    #[must_use]
    pub const fn moves_memory(&self) -> bool {
        matches!(self, Self::Waking { .. } | Self::FallingAsleep { .. })
    }

    /// Whether the engine's memory will shrink without any further decision.
    #[must_use]
    pub const fn is_winding_down(&self) -> bool {
        matches!(
            self,
            Self::Draining { .. } | Self::FallingAsleep { .. } | Self::Failing { .. } | Self::Stopping { .. }
        )
    }

    /// Whether `next` may follow. `Failing`, `Stopping` and `Backoff` may follow any state with a process.
    #[must_use]
    pub const fn can_transition_to(&self, next: &Self) -> bool {
        match (self, next) {
            (from, Self::Failing { .. } | Self::Stopping { .. } | Self::Backoff { .. })
                if from.has_process() =>
            {
                true
            }
            (Self::Cold, Self::Launching)
            | (Self::Launching, Self::Loading)
            | (Self::Loading | Self::Waking { .. }, Self::Awake)
            | (Self::Awake, Self::Draining { .. })
            | (Self::Draining { .. }, Self::Awake | Self::FallingAsleep { .. } | Self::Draining { .. })
            // An engine that does not fall asleep drains again, to be stopped or to serve.
            | (Self::FallingAsleep { .. }, Self::Asleep { .. } | Self::Draining { .. })
            | (Self::Asleep { .. }, Self::Waking { .. })
            | (Self::Stopping { .. } | Self::Backoff { .. }, Self::Cold) => true,
            // A conflict may put an engine into back-off before its first try.
            (Self::Cold, Self::Backoff { .. }) => true,
            _ => false,
        }
    }
}

impl fmt::Display for LifecycleState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cold => f.write_str("Cold"),
            Self::Launching => f.write_str("Launching"),
            Self::Loading => f.write_str("Loading"),
            Self::Awake => f.write_str("Awake"),
            Self::Draining { .. } => f.write_str("Draining"),
            Self::FallingAsleep { level } => write!(f, "FallingAsleep({})", level.number()),
            Self::Asleep { level } => write!(f, "Asleep({})", level.number()),
            Self::Waking { level } => write!(f, "Waking({})", level.number()),
            Self::Failing { cause, .. } => write!(f, "Failing({cause})"),
            Self::Stopping { .. } => f.write_str("Stopping"),
            Self::Backoff { cause, .. } => write!(f, "Backoff({cause})"),
        }
    }
}
