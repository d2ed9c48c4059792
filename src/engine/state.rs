//! The states of an engine's life, and which may follow which.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    fault::FailureCause,
    fleet::command::{AfterDrain, CloseReason},
    model::SleepLevel,
    units::Tick,
};

/// Where an engine is in its life. What it holds and who uses it stands beside it, in [`super::Engine`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LifecycleState {
    /// Nothing runs, nothing is held.
    Cold,
    /// The process or Pod is asked for.
    Launching,
    /// It runs and does not answer yet, or its first exchange is still out.
    Loading,
    /// It answers and has proved that it can serve.
    Awake,
    /// The gate is closed; leases run out. `revoked`: they were told to end.
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
    /// Told to wake, or awake and its first exchange is still out.
    Waking {
        level: SleepLevel,
    },
    /// Judged unusable: leases are revoked, and it is stopped once they are gone.
    Failing {
        cause: FailureCause,
        drained: bool,
    },
    /// Told to end; its memory is its own until the process is seen gone.
    Stopping {
        cause: FailureCause,
    },
    /// Gone by a failure, and not tried again before `until`.
    Backoff {
        until: Tick,
        cause: FailureCause,
    },
}

impl LifecycleState {
    /// There may be a process.
    #[must_use]
    pub const fn has_process(&self) -> bool {
        !matches!(self, Self::Cold | Self::Backoff { .. })
    }

    /// On its way to being awake.
    #[must_use]
    pub const fn is_starting(&self) -> bool {
        matches!(self, Self::Launching | Self::Loading | Self::Waking { .. })
    }

    /// It lasts in proportion to the memory that it moves.
    #[must_use]
    pub const fn moves_memory(&self) -> bool {
        matches!(self, Self::Waking { .. } | Self::FallingAsleep { .. })
    }

    /// Its memory will shrink without any further decision.
    #[must_use]
    pub const fn is_winding_down(&self) -> bool {
        matches!(
            self,
            Self::Draining { .. } | Self::FallingAsleep { .. } | Self::Failing { .. } | Self::Stopping { .. }
        )
    }

    /// Whether `next` may follow. `Failing` and the end of the process may follow wherever there is one.
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
            // One that does not fall asleep is stopped.
            | (Self::FallingAsleep { .. }, Self::Asleep { .. } | Self::Draining { .. })
            | (Self::Asleep { .. }, Self::Waking { .. })
            | (Self::Stopping { .. } | Self::Backoff { .. }, Self::Cold) => true,
            // A conflict or a lost accelerator may make it wait before it is tried at all.
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
