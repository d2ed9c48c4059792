//! One engine's life, as data: what it is doing, what it holds, who uses it, and when it must have moved on.
//!
//! The engine does not act. [`crate::fleet`] reads it, decides, and records its decisions here; observations change it
//! in [`crate::fleet`]'s `observe`. Timers are moments computed from `since`, never callbacks: a deadline that was
//! overtaken by an event has simply ceased to exist.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{
    fault::FailureCause,
    fleet::command::CloseReason,
    model::{AcceleratorId, EngineId, EngineTimeouts, ModelSpec},
    units::{Bytes, Generation, Millis, Tick},
};

pub mod backoff;
pub mod idle_gaps;
pub mod last_outcome;
pub mod state;
pub mod turn_clients;

use idle_gaps::IdleGaps;
use last_outcome::{EngineDiagnostics, LastOutcome};
use state::LifecycleState;
use turn_clients::TurnClients;

/// Who gets through an engine's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admission {
    Closed,
    /// Nobody, for as long as the gate of the stub in front of it is closed; those who are in stay.
    AwaitingStub,
    /// Granted waiters only: the engine has not proved itself yet.
    WaitersOnly,
    Public,
}

/// How far an engine has come in proving that it serves, after a start or a wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProbeState {
    /// Health has not answered yet.
    NotReady,
    /// Health answers; nobody was sent yet.
    Due,
    /// The canary or the probe is out, since then.
    InFlight(Tick),
}

/// A reservation asked for, before the launch or wake that it permits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingReservation {
    pub accelerators: Vec<AcceleratorId>,
    pub bytes: Bytes,
    /// The answer was `Placed`.
    pub confirmed: bool,
    /// Its model needs others, or others need it: it may be long until it can start, and then it looks who is beside it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_dependency_group: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    pub id: EngineId,
    pub generation: Generation,
    pub state: LifecycleState,
    /// When the state was entered.
    pub since: Tick,
    pub fingerprint: u64,
    pub accelerators: Vec<AcceleratorId>,
    pub address: Option<SocketAddr>,
    pub pending_reservation: Option<PendingReservation>,
    pub admission: Admission,
    pub probe_state: ProbeState,
    /// It has taken its memory; others may start beside it.
    pub profiled: bool,
    pub leases: u32,
    /// When the last lease ended, and when anything last moved.
    pub last_lease_end: Tick,
    pub last_progress: Tick,
    /// When its turn began: when it last became awake.
    pub turn_start: Tick,
    /// The clients that have used the engine in this turn.
    #[serde(default, skip_serializing_if = "TurnClients::is_empty")]
    pub clients: TurnClients,
    /// When another gateway last used the engine. Gateways do not tell each other for which client.
    #[serde(default, skip_serializing_if = "is_unset")]
    pub last_remote_use: Tick,
    /// How long after a use of the engine the next one begins.
    #[serde(default, skip_serializing_if = "IdleGaps::is_empty")]
    pub idle_gaps: IdleGaps,
    /// When the engine was last used, or asked for, after a pause.
    #[serde(default, skip_serializing_if = "is_unset")]
    pub last_requested: Tick,
    /// When its gate was last closed for another model, and for whom until that one has had its turn.
    pub yielded_at: Tick,
    pub yielded_to: Option<EngineId>,
    pub failing_since: Option<Tick>,
    /// Those who send requests to it say that they fail: it gets none before this moment, and then one.
    pub ejected_until: Option<Tick>,
    /// The stub in front of it lets nobody in, as it was last heard.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stub_gate_closed: bool,
    /// The platform watches for its stub's opening.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stub_gate_watched: bool,
    /// Failures in a row: how long it is left alone.
    pub failures: u32,
    /// Those of them since it last proved that it serves: whether anything will come of waiting for it.
    pub failures_since_serving: u32,
    /// Bookings in a row that were not granted, by what the decisions do not know.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub conflicts: u32,
    /// Confirmed asleep at this moment, and the memory it gave back is not seen free yet.
    pub releasing_since: Option<Tick>,
    /// A stop was given up to this moment; after it the order is repeated, without grace.
    pub stop_retry_at: Tick,
    /// Left `Cold` or `Asleep` at this moment, for `wake` in server timing and for learning.
    pub startup_began: Tick,
    /// Started from nothing, rather than woken.
    pub cold_start: bool,
    /// Memory in use on each accelerator when the engine was launched, if the meter names no processes and the engine was alone there.
    /// The growth until it serves is its peak.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_baseline: Vec<(AcceleratorId, Bytes)>,
    /// A process of this generation is gone while its gate was open: the gate is still to be shut.
    pub unclosed_gate: Option<(Generation, FailureCause)>,
    /// Taken over asleep while somebody here still held a lease: those are told, and count no more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_stranded_leases: bool,
    /// What befell it last, until it serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_outcome: Option<LastOutcome>,
    /// What it shows of why it does not serve, in this life.
    #[serde(default, skip_serializing_if = "EngineDiagnostics::is_empty")]
    pub diagnostics: EngineDiagnostics,
}

/// An engine that took the order to sleep and says for so long that it is awake does not fall asleep. vLLM answers the order once
/// it sleeps, and says so from then on; what answers before gets this much.
pub const SLEEP_DENIAL_TIMEOUT: Millis = Millis::secs(2);
/// Awake for so long without a failure, and former failures are forgotten.
const FAILURE_RESET_AFTER: Millis = Millis::secs(60);
/// A canary or probe without any byte has failed so long after its exchange should have timed out by itself.
const PROBE_SLACK: Millis = Millis::secs(10);
/// An engine that was left out is tried by one request: nobody else is sent before its outcome is told.
pub const TRIAL_IN_FLIGHT: Tick = Tick(u64::MAX);
/// Starts in a row of which nothing came, after which an engine that nobody waits for is tried only so often.
const MAX_FREQUENT_SPARE_STARTS: u32 = 5;
const SPARE_RETRY_INTERVAL: Millis = Millis::secs(600);
/// A stop that nothing came of is repeated after so long beyond its grace.
pub const STOP_RETRY_AFTER: Millis = Millis::secs(20);

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's form")]
const fn is_unset(at: &Tick) -> bool {
    at.0 == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's form")]
const fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl Engine {
    #[must_use]
    pub const fn new(id: EngineId, now: Tick) -> Self {
        Self {
            id,
            generation: Generation(0),
            state: LifecycleState::Cold,
            since: now,
            fingerprint: 0,
            accelerators: Vec::new(),
            address: None,
            pending_reservation: None,
            admission: Admission::Closed,
            probe_state: ProbeState::NotReady,
            profiled: false,
            leases: 0,
            last_lease_end: Tick(0),
            last_progress: Tick(0),
            turn_start: Tick(0),
            clients: TurnClients([0; turn_clients::MAX_DISTINCT_CLIENTS]),
            last_remote_use: Tick(0),
            idle_gaps: IdleGaps::EMPTY,
            last_requested: Tick(0),
            yielded_at: Tick(0),
            yielded_to: None,
            failing_since: None,
            ejected_until: None,
            stub_gate_closed: false,
            stub_gate_watched: false,
            failures: 0,
            failures_since_serving: 0,
            conflicts: 0,
            releasing_since: None,
            stop_retry_at: Tick(0),
            startup_began: now,
            cold_start: true,
            memory_baseline: Vec::new(),
            unclosed_gate: None,
            has_stranded_leases: false,
            last_outcome: None,
            diagnostics: EngineDiagnostics { last_line: None, probe: None, system: None },
        }
    }

    /// Enters a state. A forbidden edge is a defect of the decisions.
    pub fn transition_to(&mut self, next: LifecycleState, now: Tick) {
        debug_assert!(
            self.state.can_transition_to(&next),
            "{}: {} may not become {next}",
            self.id,
            self.state
        );
        self.record_outcome(&next, now);
        if next == LifecycleState::Awake && self.state.is_starting() {
            (self.last_outcome, self.diagnostics) = (None, EngineDiagnostics::default());
        }
        self.state = next;
        self.since = now;
        // What a stub said says nothing of what comes after a sleep: whoever is sent to it then finds out.
        self.stub_gate_closed &= self.state == LifecycleState::Awake;
    }

    /// Since when nobody has used it: never before it woke.
    #[must_use]
    pub fn idle_since(&self) -> Tick {
        self.last_lease_end.max(self.turn_start)
    }

    /// A request uses the engine, or asks for it. If the engine rested, that was a pause.
    /// `pause`: the latest pause, where the gate measured it. Several uses may lie between two samples of a gate.
    pub fn record_request(&mut self, now: Tick, pause: Option<Millis>) {
        if self.is_idle() {
            let seen = pause.unwrap_or_else(|| now.since(self.last_lease_end));
            self.idle_gaps.record(seen);
            self.last_requested = now;
        }
    }

    /// The engine was used once, and no request has used it or asked for it since.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.leases == 0 && self.last_lease_end > Tick(0) && self.last_requested <= self.last_lease_end
    }

    /// It can be given to waiters: proven, with an open gate.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.state == LifecycleState::Awake && self.admission == Admission::Public
    }

    /// Awake, and proven, and its stub lets nobody in.
    #[must_use]
    pub fn is_blocked_by_stub(&self) -> bool {
        self.state == LifecycleState::Awake && self.stub_gate_closed
    }

    /// Its stub lets nobody in, and neither the driver nor the platform were told so.
    #[must_use]
    pub fn must_await_stub(&self) -> bool {
        self.stub_gate_closed && !(self.admission == Admission::AwaitingStub && self.stub_gate_watched)
    }

    /// It is about to prove itself, and nobody was sent to it yet.
    #[must_use]
    pub fn needs_probe(&self) -> bool {
        let ready = matches!(self.state, LifecycleState::Loading | LifecycleState::Waking { .. })
            && self.probe_state == ProbeState::Due;
        ready && !self.stub_gate_closed
    }

    /// A request goes to it. When it was left out, that is the one that tries.
    pub fn record_grant(&mut self, now: Tick) {
        self.leases += 1;
        self.ejected_until =
            self.ejected_until.map(|until| if until <= now { TRIAL_IN_FLIGHT } else { until });
    }

    /// Its gate opens again before it was put away. One that was told to sleep, and is awake, serves as after a wake: its turn begins
    /// anew, and no order of before puts it to sleep again.
    pub fn resume_serving(&mut self, now: Tick) {
        if self.denied_sleep() {
            (self.turn_start, self.clients, self.last_outcome) = (now, TurnClients::default(), None);
        }
        self.transition_to(LifecycleState::Awake, now);
    }

    /// It was told to sleep, and says that it is awake.
    #[must_use]
    pub const fn denied_sleep(&self) -> bool {
        matches!(self.state, LifecycleState::Draining { reason: CloseReason::SleepDenied, .. })
    }

    /// A launch that others must keep away from, on its accelerators.
    #[must_use]
    pub const fn is_profiling(&self) -> bool {
        matches!(self.state, LifecycleState::Launching | LifecycleState::Loading) && !self.profiled
    }

    /// The moment by which the present state must have ended. `held`: bytes booked per accelerator.
    #[must_use]
    pub fn deadline(&self, spec: Option<&ModelSpec>, held: Bytes, timeouts: &EngineTimeouts) -> Option<Tick> {
        // Moving memory takes time in proportion to it; a second for each GiB is several times what slow hosts need.
        let moving = Millis::secs(held.0 >> 30);
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
            // It answers in time; that nobody was there to prove it with, or left, is not its fault. Behind a closed gate it
            // is as good as not up.
            ProbeState::Due if self.state.is_starting() && !self.stub_gate_closed => None,
            _ => Some(by),
        }
    }

    /// It is awake and well for long enough that former failures no longer count.
    #[must_use]
    pub fn has_recovered(&self, now: Tick) -> bool {
        self.state == LifecycleState::Awake && self.turn_start + FAILURE_RESET_AFTER <= now
    }

    /// When it may be started beside others of its model, though nobody waits for it.
    #[must_use]
    pub fn spare_start_at(&self) -> Tick {
        let rests = self.failures_since_serving >= MAX_FREQUENT_SPARE_STARTS && !self.state.has_process();
        if rests { self.since + SPARE_RETRY_INTERVAL } else { Tick(0) }
    }

    /// Hung: health has failed for half the progress timeout, and nothing has moved for all of it.
    #[must_use]
    pub fn hung_at(&self, timeouts: &EngineTimeouts) -> Option<Tick> {
        let failing = self.failing_since? + Millis(timeouts.progress.0 / 2);
        Some(failing.max(self.last_progress.max(self.turn_start) + timeouts.progress))
    }

    /// It cannot be used any more; whoever still holds a lease is told so, then it is stopped.
    pub fn fail(&mut self, cause: FailureCause, now: Tick) {
        let drained = self.admission == Admission::Closed && self.leases == 0;
        self.transition_to(LifecycleState::Failing { cause, drained }, now);
    }

    /// A stub answered for it that its gate is closed. Whoever is out to prove it may have got in before.
    pub fn record_stub_gate_closed(&mut self) {
        let asked = self.state == LifecycleState::Awake
            || matches!(self.state, LifecycleState::Loading | LifecycleState::Waking { .. })
                && self.probe_state != ProbeState::NotReady;
        self.stub_gate_closed |= asked;
    }

    /// Forgets everything that belonged to the process that is gone.
    pub fn forget_process(&mut self) {
        self.accelerators.clear();
        self.address = None;
        self.pending_reservation = None;
        self.probe_state = ProbeState::NotReady;
        self.profiled = false;
        self.leases = 0;
        self.failing_since = None;
        self.ejected_until = None;
        self.releasing_since = None;
        self.diagnostics = EngineDiagnostics::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::FleetSettings;

    /// Two requests were turned away, the stub opened after the first, and nobody planned in between.
    #[test]
    fn a_stub_that_closes_again_before_anybody_planned_is_watched_anew() {
        let mut engine = Engine::new(EngineId::new("m".into(), 0), Tick(0));
        engine.state = LifecycleState::Awake;
        engine.record_stub_gate_closed();
        assert!(engine.must_await_stub());
        (engine.admission, engine.stub_gate_watched) = (Admission::AwaitingStub, true);
        assert!(!engine.must_await_stub());
        (engine.stub_gate_closed, engine.stub_gate_watched) = (false, false);
        engine.record_stub_gate_closed();
        assert!(engine.must_await_stub());
    }

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
