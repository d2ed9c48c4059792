//! The moments until which an engine's state may last, and from which its failures no longer count.

use super::{Engine, ProbeState, state::LifecycleState};
use crate::{
    model::{EngineTimeouts, IdlePolicy, ModelSpec},
    units::{Bytes, Millis, Tick},
};

/// An engine that stays awake for this long has its failures reset.
const FAILURE_RESET_AFTER: Millis = Millis::secs(60);
/// A canary or probe without any byte fails this long after its exchange should have timed out.
const PROBE_SLACK: Millis = Millis::secs(10);
/// After this many failed starts in a row, a spare engine starts only every [`SPARE_RETRY_INTERVAL`].
const MAX_FREQUENT_SPARE_STARTS: u32 = 5;
const SPARE_RETRY_INTERVAL: Millis = Millis::secs(600);
/// How long a failure counts against the next start of an engine that has not served since.
const FAILURE_MEMORY: Millis = Millis::secs(600);

impl Engine {
    /// When the present state must have ended. `reserved`: bytes reserved on one accelerator, or in the pool.
    #[must_use]
    pub fn deadline(
        &self,
        spec: Option<&ModelSpec>,
        reserved: Bytes,
        timeouts: &EngineTimeouts,
    ) -> Option<Tick> {
        // Moving memory takes time in proportion to its size; a second per GiB is several times what slow hosts need.
        let moving = Millis::secs(reserved.0 >> 30);
        let by = match &self.state {
            LifecycleState::Launching | LifecycleState::Loading => {
                self.startup_began + spec.map_or(Millis::secs(480), |s| s.start_timeout)
            }
            LifecycleState::Waking { .. } => self.since + timeouts.wake + moving,
            LifecycleState::FallingAsleep { .. } => self.since + timeouts.sleep + moving,
            _ => return None,
        };
        match self.probe_state {
            ProbeState::InFlight(sent) if self.state.is_starting() => {
                Some(sent + timeouts.first_byte + PROBE_SLACK)
            }
            // The engine answers in time; a missing or disconnected first client is not its fault. Behind a closed stub
            // gate it is as good as not started.
            ProbeState::Due if self.state.is_starting() && !self.stub_gate_closed => None,
            _ => Some(by),
        }
    }

    /// When earlier failures of an awake engine no longer count; `None` if there are none.
    #[must_use]
    pub fn recovers_at(&self) -> Option<Tick> {
        let recovers = self.failures > 0 && self.state == LifecycleState::Awake;
        recovers.then(|| self.turn_start + FAILURE_RESET_AFTER)
    }

    /// When the engine may start as a spare, without waiters of its own.
    #[must_use]
    pub fn spare_start_at(&self) -> Tick {
        let throttled = self.failures_since_serving >= MAX_FREQUENT_SPARE_STARTS && !self.state.has_process();
        if throttled { self.since + SPARE_RETRY_INTERVAL } else { Tick(0) }
    }

    /// Whether the engine has failed since it last served, and that still counts against its next start.
    #[must_use]
    pub fn has_failed_recently(&self, now: Tick) -> bool {
        let is_recent = self.last_outcome.as_ref().is_some_and(|last| now < last.at + FAILURE_MEMORY);
        matches!(self.state, LifecycleState::Backoff { .. })
            || (self.failures_since_serving > 0 && is_recent)
            || self.spare_start_at() > now
    }

    /// When the engine counts as hung: health has failed for half the progress timeout, and nothing moved for all of
    /// it.
    #[must_use]
    pub fn hung_at(&self, timeouts: &EngineTimeouts) -> Option<Tick> {
        let failing = self.failing_since? + Millis(timeouts.progress.0 / 2);
        Some(failing.max(self.last_progress.max(self.turn_start) + timeouts.progress))
    }

    /// When the engine is stopped if it sleeps until then: that long after its last use, however long it has slept.
    #[must_use]
    pub fn sleeper_stops_at(&self, idle: &IdlePolicy) -> Option<Tick> {
        idle.stop_after.map(|after| self.idle_since() + after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{EngineId, FleetSettings};

    #[test]
    fn a_canary_has_as_long_as_its_exchange_and_waiting_for_one_has_no_end() {
        let timeouts = FleetSettings::default().timeouts;
        let mut engine = Engine::new(EngineId::new("m".into(), 0), Tick(0));
        engine.state = LifecycleState::Loading;
        let due = |engine: &Engine| engine.deadline(None, Bytes::ZERO, &timeouts);
        assert!(due(&engine).is_some());
        engine.probe_state = ProbeState::Due;
        assert_eq!(due(&engine), None);
        engine.probe_state = ProbeState::InFlight(Tick(5));
        assert!(due(&engine).is_some_and(|at| at > Tick(5) + timeouts.first_byte));
    }
}
