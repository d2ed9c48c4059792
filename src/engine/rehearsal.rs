//! Rehearsed sleep: a process sleeps and wakes once before its first sleep in use.
//!
//! The first level-1 sleep of a process is slow, because it pins the host memory that later sleeps reuse. A new process
//! has pinned nothing. [`crate::fleet::plan`] decides when a rehearsal begins and when the engine wakes. This module
//! records where a process stands.

use serde::{Deserialize, Serialize};

use super::{Engine, state::LifecycleState};
use crate::{fault::FailureCause, fleet::command::CloseReason, model::SleepLevel};

/// Where an engine's process stands with its rehearsal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SleepRehearsal {
    /// No process runs, or it has slept at level 1, or another gateway started it and may have put it to sleep.
    #[default]
    NotDue,
    /// The process has not slept at level 1, and has not been open to any request.
    Due,
    /// The process has been open to requests without having slept at level 1. It rehearses once it is idle.
    DueWhenIdle,
    /// The process sleeps for its rehearsal, or is on its way there or back. Its memory stays reserved.
    Underway,
    /// A rehearsal with this command failed, so that no process with it is rehearsed again.
    Failed,
}

impl SleepRehearsal {
    /// The value for a new process.
    #[must_use]
    pub(crate) const fn at_launch(self) -> Self {
        match self {
            Self::Failed => Self::Failed,
            Self::NotDue | Self::Due | Self::DueWhenIdle | Self::Underway => Self::Due,
        }
    }

    /// The value once the engine's gate opens.
    #[must_use]
    pub(crate) const fn at_open(self) -> Self {
        match self {
            Self::Due => Self::DueWhenIdle,
            Self::NotDue | Self::DueWhenIdle | Self::Underway | Self::Failed => self,
        }
    }

    /// The value once the process is ordered to sleep. Level 2 pins no host memory.
    #[must_use]
    pub(crate) const fn at_sleep(self, level: SleepLevel, rehearses: bool) -> Self {
        match (self, level) {
            (Self::Failed, _) | (_, SleepLevel::Two) => self,
            (_, SleepLevel::One) if rehearses => Self::Underway,
            (_, SleepLevel::One) => Self::NotDue,
        }
    }

    /// The value once the process has ended.
    #[must_use]
    pub(crate) const fn at_exit(self) -> Self {
        match self {
            Self::Failed => Self::Failed,
            Self::NotDue | Self::Due | Self::DueWhenIdle | Self::Underway => Self::NotDue,
        }
    }

    /// The value after this transition.
    ///
    /// A rehearsal fails if the engine does not fall asleep, dies, or does not wake. An operator's stop, a new
    /// configuration and a shutdown end it without a verdict, except while the engine falls asleep: an engine that
    /// exceeds its time there is stopped with the same cause.
    #[must_use]
    pub(super) fn at_transition(self, from: &LifecycleState, to: &LifecycleState) -> Self {
        if self != Self::Underway {
            return self;
        }
        let ends_by_order = matches!(
            to,
            LifecycleState::Stopping { cause: FailureCause::Stopped }
                | LifecycleState::Failing { cause: FailureCause::Stopped, .. }
        );
        match to {
            LifecycleState::FallingAsleep { .. }
            | LifecycleState::Asleep { .. }
            | LifecycleState::Waking { .. } => Self::Underway,
            LifecycleState::Awake => Self::NotDue,
            _ if ends_by_order && !matches!(from, LifecycleState::FallingAsleep { .. }) => Self::NotDue,
            _ => Self::Failed,
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's form")]
pub(super) const fn is_not_due(rehearsal: &SleepRehearsal) -> bool {
    matches!(rehearsal, SleepRehearsal::NotDue)
}

impl Engine {
    /// Whether the engine is about to sleep for its rehearsal, or has not come back from it.
    #[must_use]
    pub fn is_rehearsing(&self) -> bool {
        self.rehearsal == SleepRehearsal::Underway
            || matches!(self.state, LifecycleState::Draining { reason: CloseReason::Rehearsal, .. })
    }

    /// Whether the process is to rehearse its sleep: before its first request, or once it is idle.
    #[must_use]
    pub(crate) const fn is_rehearsal_due(&self) -> bool {
        matches!(self.rehearsal, SleepRehearsal::Due | SleepRehearsal::DueWhenIdle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fleet::command::AfterDrain,
        model::EngineId,
        units::{Generation, Tick},
    };

    const ASLEEP: LifecycleState = LifecycleState::Asleep { level: SleepLevel::One };
    const FALLING_ASLEEP: LifecycleState = LifecycleState::FallingAsleep { level: SleepLevel::One };
    const WAKING: LifecycleState = LifecycleState::Waking { level: SleepLevel::One };

    fn rehearsing(state: LifecycleState) -> Engine {
        let new = Engine::new(EngineId::new("m".into(), 0), Tick(0));
        Engine { state, rehearsal: SleepRehearsal::Underway, generation: Generation(1), ..new }
    }

    fn after(from: LifecycleState, to: LifecycleState) -> SleepRehearsal {
        let mut engine = rehearsing(from);
        engine.transition_to(to, Tick(5));
        engine.rehearsal
    }

    #[test]
    fn a_process_is_rehearsed_once() {
        let due = SleepRehearsal::NotDue.at_launch();
        assert_eq!(due, SleepRehearsal::Due);
        assert_eq!(due.at_sleep(SleepLevel::One, true), SleepRehearsal::Underway);
        assert_eq!(after(FALLING_ASLEEP, ASLEEP), SleepRehearsal::Underway);
        assert_eq!(after(ASLEEP, WAKING), SleepRehearsal::Underway);
        assert_eq!(after(WAKING, LifecycleState::Awake), SleepRehearsal::NotDue);
        assert_eq!(due.at_sleep(SleepLevel::One, false), SleepRehearsal::NotDue, "it has slept in use");
        assert_eq!(due.at_sleep(SleepLevel::Two, false), SleepRehearsal::Due, "level 2 pins nothing");
        let open = due.at_open();
        assert_eq!(open, SleepRehearsal::DueWhenIdle, "from now on requests go first");
        assert_eq!(open.at_sleep(SleepLevel::One, true), SleepRehearsal::Underway);
        assert_eq!(open.at_exit().at_launch(), SleepRehearsal::Due);
        assert_eq!(SleepRehearsal::NotDue.at_open(), SleepRehearsal::NotDue);
    }

    #[test]
    fn a_failed_rehearsal_is_remembered_over_processes() {
        let died = LifecycleState::Backoff { until: Tick(0), cause: FailureCause::Killed(9) };
        let refused = LifecycleState::Failing { cause: FailureCause::Refused, drained: true };
        let denied = LifecycleState::Draining {
            reason: CloseReason::SleepDenied,
            after_drain: AfterDrain::Stop,
            revoked: false,
            drained: true,
        };
        let too_slow = LifecycleState::Stopping { cause: FailureCause::Stopped };
        for (from, to) in
            [(ASLEEP, died), (WAKING, refused), (FALLING_ASLEEP, denied), (FALLING_ASLEEP, too_slow)]
        {
            let failed = after(from, to.clone());
            assert_eq!(failed, SleepRehearsal::Failed, "{to}");
            assert_eq!(failed.at_exit().at_launch(), SleepRehearsal::Failed);
        }
    }

    #[test]
    fn a_rehearsal_that_an_order_ends_is_no_failure() {
        let stopped = LifecycleState::Stopping { cause: FailureCause::Stopped };
        for from in [ASLEEP, WAKING] {
            let ended = after(from, stopped.clone());
            assert_eq!(ended.at_exit().at_launch(), SleepRehearsal::Due);
        }
    }
}
