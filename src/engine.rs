//! One engine's state as data: lifecycle, memory, leases and deadlines.
//!
//! The engine does not act. [`crate::fleet`] reads it, decides, and records its decisions here; observations change it
//! in [`crate::fleet`]'s `observe`. Timers are moments computed from `since`, never callbacks: a deadline that an event
//! has overtaken no longer exists.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{
    fault::FailureCause,
    fleet::{command::CloseReason, quote::TimeEstimate},
    model::{AcceleratorId, EngineId},
    units::{Bytes, Generation, Millis, Tick},
};

pub mod backoff;
mod deadlines;
pub mod idle_gaps;
pub mod last_outcome;
pub mod rehearsal;
pub mod saturation_limit;
pub mod state;
pub mod turn_clients;

use idle_gaps::IdleGaps;
use last_outcome::{EngineDiagnostics, LastOutcome};
use rehearsal::SleepRehearsal;
use saturation_limit::SaturationLimit;
use state::LifecycleState;
use turn_clients::TurnClients;

/// Which requests an engine's gate admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admission {
    Closed,
    /// No request, while the gate of the engine's stub is closed; running requests continue.
    AwaitingStub,
    /// Granted waiters only: the engine has not proved itself yet.
    WaitersOnly,
    Public,
}

/// Progress of an engine's first request or probe after a start or a wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProbeState {
    /// The health check has not answered yet.
    NotReady,
    /// The health check answers; no request was sent yet.
    Due,
    /// The canary or the probe is in flight since this moment.
    InFlight(Tick),
}

/// A reservation that was requested, before the launch or wake that it permits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingReservation {
    pub accelerators: Vec<AcceleratorId>,
    pub bytes: Bytes,
    /// What the engine had booked on each accelerator before: the residue of a sleeper.
    #[serde(default)]
    pub booked_before: Bytes,
    /// The `Placed` event has arrived.
    pub confirmed: bool,
    /// The model has dependencies or dependents. The start may wait long, and then first checks its neighbours.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_dependency_group: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    pub id: EngineId,
    pub generation: Generation,
    pub state: LifecycleState,
    /// When the engine entered the state.
    pub since: Tick,
    pub fingerprint: u64,
    pub accelerators: Vec<AcceleratorId>,
    pub address: Option<SocketAddr>,
    pub pending_reservation: Option<PendingReservation>,
    pub admission: Admission,
    pub probe_state: ProbeState,
    /// The engine has allocated its memory; others may start beside it.
    pub profiled: bool,
    pub leases: u32,
    /// When the last lease ended; `last_progress`: when the engine last made progress.
    pub last_lease_end: Tick,
    pub last_progress: Tick,
    /// When the engine's turn began: when it last became awake.
    pub turn_start: Tick,
    /// The clients that have used the engine in this turn.
    #[serde(default, skip_serializing_if = "TurnClients::is_empty")]
    pub clients: TurnClients,
    /// When another gateway last used the engine. Gateways do not report for which client.
    #[serde(default, skip_serializing_if = "is_unset")]
    pub last_remote_use: Tick,
    /// Pauses between one use of the engine and the next.
    #[serde(default, skip_serializing_if = "IdleGaps::is_empty")]
    pub idle_gaps: IdleGaps,
    /// When the engine was last used or requested after a pause.
    #[serde(default, skip_serializing_if = "is_unset")]
    pub last_requested: Tick,
    /// How long the engine stays in use once it is used. For quotes; no decision reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_time: Option<TimeEstimate>,
    /// When the gate last closed for another engine, and that engine until it has had its turn.
    pub yielded_at: Tick,
    pub yielded_to: Option<EngineId>,
    pub failing_since: Option<Tick>,
    /// Requests to this engine fail at the data path: it gets none before this moment, and then one.
    pub ejected_until: Option<Tick>,
    /// The engine is saturated: this gateway sends it requests last, and no more than the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saturation: Option<SaturationLimit>,
    /// The stub's gate was closed in its last report.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stub_gate_closed: bool,
    /// The platform watches for the stub's gate to open.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stub_gate_watched: bool,
    /// Failures in a row, which set the length of the back-off.
    pub failures: u32,
    /// Failures in a row since the engine last proved that it serves.
    ///
    /// They decide whether waiters are refused.
    pub failures_since_serving: u32,
    /// Reservations refused in a row, for reasons that the decisions do not know.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub conflicts: u32,
    /// Accelerators that starts did not get from the cluster since the engine last served, the last ones at the end.
    ///
    /// The next start prefers others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub denied_accelerators: Vec<AcceleratorId>,
    /// When sleep was confirmed, while the meter does not show the released memory as free yet.
    pub releasing_since: Option<Tick>,
    /// Deadline of a stop; after it the stop is repeated without grace.
    pub stop_retry_at: Tick,
    /// When the start began: at the reservation, or in a dependency group at the launch or wake.
    ///
    /// Basis of the start deadline, of `wake` in server timing and of the learned times.
    pub startup_began: Tick,
    /// The engine was started from nothing, not woken.
    pub cold_start: bool,
    /// Memory in use on each accelerator when the engine was launched.
    ///
    /// Only if the meter names no processes and the engine was alone there. The growth until the engine serves is its
    /// peak.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_baseline: Vec<(AcceleratorId, Bytes)>,
    /// The process of this generation ended while its gate was open: the gate must still be closed.
    pub unclosed_gate: Option<(Generation, FailureCause)>,
    /// The engine was adopted asleep while requests of this gateway still held leases. Their exchanges end, and their
    /// leases no longer count.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_stranded_leases: bool,
    /// The last outcome, until the engine serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_outcome: Option<LastOutcome>,
    /// Diagnostics of this generation while the engine does not serve.
    #[serde(default, skip_serializing_if = "EngineDiagnostics::is_empty")]
    pub diagnostics: EngineDiagnostics,
    /// Whether the process has slept once, or is to rehearse that.
    #[serde(default, skip_serializing_if = "rehearsal::is_not_due")]
    pub rehearsal: SleepRehearsal,
}

/// How long an engine may report that it is awake after it accepted the sleep order.
///
/// Then it counts as not falling asleep. vLLM answers the order once it sleeps, and reports so from then on. An engine
/// that answers earlier gets this much time.
pub const SLEEP_DENIAL_TIMEOUT: Millis = Millis::secs(2);
/// An ejected engine is tried with one request; it gets no other before that request's outcome.
pub const TRIAL_IN_FLIGHT: Tick = Tick(u64::MAX);
/// A stop without effect is repeated this long after its grace.
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
            busy_time: None,
            yielded_at: Tick(0),
            yielded_to: None,
            failing_since: None,
            ejected_until: None,
            saturation: None,
            stub_gate_closed: false,
            stub_gate_watched: false,
            failures: 0,
            failures_since_serving: 0,
            conflicts: 0,
            denied_accelerators: Vec::new(),
            releasing_since: None,
            stop_retry_at: Tick(0),
            startup_began: now,
            cold_start: true,
            memory_baseline: Vec::new(),
            unclosed_gate: None,
            has_stranded_leases: false,
            last_outcome: None,
            diagnostics: EngineDiagnostics { last_line: None, probe: None, system: None },
            rehearsal: SleepRehearsal::NotDue,
        }
    }

    /// Enters a state. A forbidden transition is a bug in the decisions.
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
        self.rehearsal = self.rehearsal.at_transition(&self.state, &next);
        self.state = next;
        self.since = now;
        // A report of the stub does not outlast a sleep; the next request finds out anew.
        self.stub_gate_closed &= self.state == LifecycleState::Awake;
    }

    /// When the engine became idle: at its last lease end, or at its wake if that is later.
    #[must_use]
    pub fn idle_since(&self) -> Tick {
        self.last_lease_end.max(self.turn_start)
    }

    /// Records a use of the engine, or a request for it.
    ///
    /// If the engine was idle, the time before was a pause. `pause`: the latest pause if the gate measured it, because
    /// several uses may lie between two samples of a gate.
    pub fn record_request(&mut self, now: Tick, pause: Option<Millis>) {
        if self.is_idle() {
            let gap = pause.unwrap_or_else(|| now.since(self.last_lease_end));
            self.idle_gaps.record(gap);
            self.last_requested = now;
        }
    }

    /// When the engine's present or latest time in use began.
    #[must_use]
    pub fn busy_since(&self) -> Tick {
        self.last_requested.max(self.turn_start)
    }

    /// Learns from a time in use that has ended.
    ///
    /// A use between two samples of the gate has no known beginning, and counts for nothing.
    pub fn record_busy_end(&mut self, last_lease_end: Tick) {
        let span = last_lease_end.since(self.busy_since());
        if self.leases > 0 && span > Millis::ZERO {
            TimeEstimate::learn(&mut self.busy_time, span);
        }
    }

    /// Whether the engine was used before, and no request has used it or asked for it since.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.leases == 0 && self.last_lease_end > Tick(0) && self.last_requested <= self.last_lease_end
    }

    /// Whether waiters can get the engine: it is proven and its gate is open.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.state == LifecycleState::Awake && self.admission == Admission::Public
    }

    /// The report of a saturated engine, while it counts.
    #[must_use]
    pub fn saturation_at(&self, now: Tick) -> Option<SaturationLimit> {
        self.saturation.filter(|limit| limit.is_active(now))
    }

    /// The most leases that the engine may have at `now`. `max_concurrency`: the configured number.
    #[must_use]
    pub fn max_leases(&self, max_concurrency: u32, now: Tick) -> u32 {
        let limit = self.saturation_at(now).and_then(|limit| limit.leases);
        limit.map_or(max_concurrency, |leases| leases.min(max_concurrency))
    }

    /// Whether the engine is awake and proven, and its stub's gate is closed.
    #[must_use]
    pub fn is_blocked_by_stub(&self) -> bool {
        self.state == LifecycleState::Awake && self.stub_gate_closed
    }

    /// Whether the stub's gate is closed, and driver and platform do not both know yet.
    #[must_use]
    pub fn must_await_stub(&self) -> bool {
        self.stub_gate_closed && !(self.admission == Admission::AwaitingStub && self.stub_gate_watched)
    }

    /// Whether the engine is ready for its first request and has none yet.
    #[must_use]
    pub fn needs_probe(&self) -> bool {
        let ready = matches!(self.state, LifecycleState::Loading | LifecycleState::Waking { .. })
            && self.probe_state == ProbeState::Due;
        ready && !self.stub_gate_closed
    }

    /// Records a request to the engine. On an ejected engine whose pause is over, that request is the trial.
    pub fn record_grant(&mut self, now: Tick) {
        self.leases += 1;
        self.ejected_until =
            self.ejected_until.map(|until| if until <= now { TRIAL_IN_FLIGHT } else { until });
    }

    /// Reopens the gate before the engine was put to sleep or stopped.
    ///
    /// An engine that was ordered to sleep and stays awake serves as after a wake: its turn begins anew, and no earlier
    /// order puts it to sleep again.
    pub fn resume_serving(&mut self, now: Tick) {
        if self.denied_sleep() {
            (self.turn_start, self.clients, self.last_outcome) = (now, TurnClients::default(), None);
        }
        self.transition_to(LifecycleState::Awake, now);
    }

    /// Whether the engine was ordered to sleep and reports that it is awake.
    #[must_use]
    pub const fn denied_sleep(&self) -> bool {
        matches!(self.state, LifecycleState::Draining { reason: CloseReason::SleepDenied, .. })
    }

    /// Whether this launch still measures memory, so others must keep off its accelerators.
    #[must_use]
    pub const fn is_profiling(&self) -> bool {
        matches!(self.state, LifecycleState::Launching | LifecycleState::Loading) && !self.profiled
    }

    /// Marks the engine as unusable: its leases are revoked, then it is stopped.
    pub fn fail(&mut self, cause: FailureCause, now: Tick) {
        let drained = self.admission == Admission::Closed && self.leases == 0;
        self.transition_to(LifecycleState::Failing { cause, drained }, now);
    }

    /// Records the stub's report that its gate is closed. A canary or probe may have passed the gate before.
    pub fn record_stub_gate_closed(&mut self) {
        let applies = self.state == LifecycleState::Awake
            || matches!(self.state, LifecycleState::Loading | LifecycleState::Waking { .. })
                && self.probe_state != ProbeState::NotReady;
        self.stub_gate_closed |= applies;
    }

    /// Clears everything that belonged to the ended process.
    pub fn forget_process(&mut self) {
        self.accelerators.clear();
        self.address = None;
        self.pending_reservation = None;
        self.probe_state = ProbeState::NotReady;
        self.profiled = false;
        self.leases = 0;
        self.failing_since = None;
        self.ejected_until = None;
        self.saturation = None;
        self.releasing_since = None;
        self.diagnostics = EngineDiagnostics::default();
        self.rehearsal = self.rehearsal.at_exit();
    }

    /// Records accelerators that a start did not get, as the last ones.
    pub fn deny_accelerators(&mut self, accelerators: &[AcceleratorId]) {
        self.denied_accelerators.retain(|known| !accelerators.contains(known));
        self.denied_accelerators.extend_from_slice(accelerators);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The stub turned away two requests and opened after the first, with no plan in between.
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
}
