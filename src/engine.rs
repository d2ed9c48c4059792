//! One engine's life, as data: what it is doing, what it holds, who uses it, and when it must have moved on.
//!
//! The engine does not act. [`crate::fleet`] reads it, decides, and records its decisions here; observations change it
//! in [`crate::fleet`]'s `observe`. Timers are moments computed from `since`, never callbacks: a deadline that was
//! overtaken by an event has simply ceased to exist.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{
    fault::Cause,
    fleet::command::Why,
    model::{AcceleratorId, EngineId, ModelSpec, Timeouts},
    units::{Bytes, Generation, Millis, Tick},
};

pub mod backoff;
pub mod clients;
pub mod past;
pub mod pauses;
pub mod state;

use clients::Clients;
use past::{Past, Symptoms};
use pauses::Pauses;
use state::State;

/// Who gets through an engine's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Door {
    Closed,
    /// Nobody, for as long as the gate of the stub in front of it is closed; those who are in stay.
    Held,
    /// Granted waiters only: the engine has not proved itself yet.
    Waiters,
    Public,
}

/// How far an engine has come in proving that it serves, after a start or a wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Proof {
    /// Health has not answered yet.
    NotReady,
    /// Health answers; nobody was sent yet.
    Wanted,
    /// The canary or the probe is out, since then.
    Out(Tick),
}

/// A reservation asked for, before the launch or wake that it permits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placing {
    pub accelerators: Vec<AcceleratorId>,
    pub bytes: Bytes,
    /// The answer was `Placed`.
    pub confirmed: bool,
    /// Its model needs others, or others need it: it may be long until it can start, and then it looks who is beside it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub patient: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    pub id: EngineId,
    pub generation: Generation,
    pub state: State,
    /// When the state was entered.
    pub since: Tick,
    pub fingerprint: u64,
    pub accelerators: Vec<AcceleratorId>,
    pub address: Option<SocketAddr>,
    pub placing: Option<Placing>,
    pub door: Door,
    pub proof: Proof,
    /// It has taken its memory; others may start beside it.
    pub profiled: bool,
    pub leases: u32,
    /// When the last lease ended, and when anything last moved.
    pub last_end: Tick,
    pub last_progress: Tick,
    /// When its turn began: when it last became awake.
    pub turn: Tick,
    /// The clients that have used the engine in this turn.
    #[serde(default, skip_serializing_if = "Clients::is_empty")]
    pub clients: Clients,
    /// When another gateway last used the engine. Gateways do not tell each other for which client.
    #[serde(default, skip_serializing_if = "never")]
    pub used_elsewhere: Tick,
    /// How long after a use of the engine the next one begins.
    #[serde(default, skip_serializing_if = "Pauses::is_empty")]
    pub pauses: Pauses,
    /// When the engine was last used, or asked for, after a pause.
    #[serde(default, skip_serializing_if = "never")]
    pub asked: Tick,
    /// When its gate was last closed for another model, and for whom until that one has had its turn.
    pub yielded: Tick,
    pub yielded_to: Option<EngineId>,
    pub failing_since: Option<Tick>,
    /// Those who send requests to it say that they fail: it gets none before this moment, and then one.
    pub left_out: Option<Tick>,
    /// The stub in front of it lets nobody in, as it was last heard.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gated: bool,
    /// The platform watches for its stub's opening.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stub_watched: bool,
    /// Failures in a row: how long it is left alone.
    pub failures: u32,
    /// Those of them since it last proved that it serves: whether anything will come of waiting for it.
    pub fruitless: u32,
    /// Bookings in a row that were not granted, by what the decisions do not know.
    #[serde(default, skip_serializing_if = "none_yet")]
    pub conflicts: u32,
    /// Confirmed asleep at this moment, and the memory it gave back is not seen free yet.
    pub shrinking: Option<Tick>,
    /// A stop was given up to this moment; after it the order is repeated, without grace.
    pub stop_by: Tick,
    /// Left `Cold` or `Asleep` at this moment, for `wake` in server timing and for learning.
    pub began: Tick,
    /// Started from nothing, rather than woken.
    pub cold: bool,
    /// Memory in use on each accelerator when the engine was launched, if the meter names no processes and the engine was alone there.
    /// The growth until it serves is its peak.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<(AcceleratorId, Bytes)>,
    /// A process of this generation is gone while its gate was open: the gate is still to be shut.
    pub orphan: Option<(Generation, Cause)>,
    /// Taken over asleep while somebody here still held a lease: those are told, and count no more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub forsaken: bool,
    /// What befell it last, until it serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub past: Option<Past>,
    /// What it shows of why it does not serve, in this life.
    #[serde(default, skip_serializing_if = "Symptoms::is_empty")]
    pub symptoms: Symptoms,
}

/// An engine that took the order to sleep and says for so long that it is awake does not fall asleep. vLLM answers the order once
/// it sleeps, and says so from then on; what answers before gets this much.
pub const SLEEP_DENIAL: Millis = Millis::secs(2);
/// Awake for so long without a failure, and former failures are forgotten.
const FORGIVEN: Millis = Millis::secs(60);
/// A canary or probe without any byte has failed so long after its exchange should have timed out by itself.
const PROOF_SLACK: Millis = Millis::secs(10);
/// An engine that was left out is tried by one request: nobody else is sent before its outcome is told.
pub const NOT_DUE: Tick = Tick(u64::MAX);
/// Starts in a row of which nothing came, after which an engine that nobody waits for is tried only so often.
const FRUITLESS: u32 = 5;
const NOW_AND_THEN: Millis = Millis::secs(600);
/// A stop that nothing came of is repeated after so long beyond its grace.
pub const STOP_AGAIN: Millis = Millis::secs(20);

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's form")]
const fn never(at: &Tick) -> bool {
    at.0 == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's form")]
const fn none_yet(count: &u32) -> bool {
    *count == 0
}

impl Engine {
    #[must_use]
    pub const fn new(id: EngineId, now: Tick) -> Self {
        Self {
            id,
            generation: Generation(0),
            state: State::Cold,
            since: now,
            fingerprint: 0,
            accelerators: Vec::new(),
            address: None,
            placing: None,
            door: Door::Closed,
            proof: Proof::NotReady,
            profiled: false,
            leases: 0,
            last_end: Tick(0),
            last_progress: Tick(0),
            turn: Tick(0),
            clients: Clients([0; clients::TOLD_APART]),
            used_elsewhere: Tick(0),
            pauses: Pauses::NONE,
            asked: Tick(0),
            yielded: Tick(0),
            yielded_to: None,
            failing_since: None,
            left_out: None,
            gated: false,
            stub_watched: false,
            failures: 0,
            fruitless: 0,
            conflicts: 0,
            shrinking: None,
            stop_by: Tick(0),
            began: now,
            cold: true,
            before: Vec::new(),
            orphan: None,
            forsaken: false,
            past: None,
            symptoms: Symptoms { last_line: None, probe: None, system: None },
        }
    }

    /// Enters a state. A forbidden edge is a defect of the decisions.
    pub fn become_state(&mut self, next: State, now: Tick) {
        debug_assert!(self.state.may_become(&next), "{}: {} may not become {next}", self.id, self.state);
        self.remember(&next, now);
        if next == State::Awake && self.state.is_starting() {
            (self.past, self.symptoms) = (None, Symptoms::default());
        }
        self.state = next;
        self.since = now;
        // What a stub said says nothing of what comes after a sleep: whoever is sent to it then finds out.
        self.gated &= self.state == State::Awake;
    }

    /// Since when nobody has used it: never before it woke.
    #[must_use]
    pub fn idle_since(&self) -> Tick {
        self.last_end.max(self.turn)
    }

    /// A request uses the engine, or asks for it. If the engine rested, that was a pause.
    /// `pause`: the latest pause, where the gate measured it. Several uses may lie between two samples of a gate.
    pub fn is_asked_for(&mut self, now: Tick, pause: Option<Millis>) {
        if self.rests() {
            let seen = pause.unwrap_or_else(|| now.since(self.last_end));
            self.pauses.note(seen);
            self.asked = now;
        }
    }

    /// The engine was used once, and no request has used it or asked for it since.
    #[must_use]
    pub fn rests(&self) -> bool {
        self.leases == 0 && self.last_end > Tick(0) && self.asked <= self.last_end
    }

    /// It can be given to waiters: proven, with an open gate.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.state == State::Awake && self.door == Door::Public
    }

    /// Awake, and proven, and its stub lets nobody in.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.state == State::Awake && self.gated
    }

    /// Its stub lets nobody in, and neither the driver nor the platform were told so.
    #[must_use]
    pub fn is_to_be_held(&self) -> bool {
        self.gated && !(self.door == Door::Held && self.stub_watched)
    }

    /// It is about to prove itself, and nobody was sent to it yet.
    #[must_use]
    pub fn wants_proof(&self) -> bool {
        let ready =
            matches!(self.state, State::Loading | State::Waking { .. }) && self.proof == Proof::Wanted;
        ready && !self.gated
    }

    /// A request goes to it. When it was left out, that is the one that tries.
    pub fn granted(&mut self, now: Tick) {
        self.leases += 1;
        self.left_out = self.left_out.map(|until| if until <= now { NOT_DUE } else { until });
    }

    /// Its gate opens again before it was put away. One that was told to sleep, and is awake, serves as after a wake: its turn begins
    /// anew, and no order of before puts it to sleep again.
    pub fn is_called_back(&mut self, now: Tick) {
        if self.stays_awake() {
            (self.turn, self.clients, self.past) = (now, Clients::default(), None);
        }
        self.become_state(State::Awake, now);
    }

    /// It was told to sleep, and says that it is awake.
    #[must_use]
    pub const fn stays_awake(&self) -> bool {
        matches!(self.state, State::Draining { why: Why::StaysAwake, .. })
    }

    /// A launch that others must keep away from, on its accelerators.
    #[must_use]
    pub const fn is_profiling(&self) -> bool {
        matches!(self.state, State::Launching | State::Loading) && !self.profiled
    }

    /// The moment by which the present state must have ended. `held`: bytes booked per accelerator.
    #[must_use]
    pub fn deadline(&self, spec: Option<&ModelSpec>, held: Bytes, timeouts: &Timeouts) -> Option<Tick> {
        // Moving memory takes time in proportion to it; a second for each GiB is several times what slow hosts need.
        let moving = Millis::secs(held.0 >> 30);
        let by = match &self.state {
            State::Launching | State::Loading => {
                self.began + spec.map_or(Millis::secs(480), |s| s.start_timeout)
            }
            State::Waking { .. } => self.since + timeouts.wake + moving,
            State::FallingAsleep { .. } => self.since + timeouts.sleep + moving,
            _ => return None,
        };
        match self.proof {
            Proof::Out(sent) if self.state.is_starting() => Some(sent + timeouts.first_byte + PROOF_SLACK),
            // It answers in time; that nobody was there to prove it with, or left, is not its fault. Behind a closed gate it
            // is as good as not up.
            Proof::Wanted if self.state.is_starting() && !self.gated => None,
            _ => Some(by),
        }
    }

    /// It is awake and well for long enough that former failures no longer count.
    #[must_use]
    pub fn is_forgiven(&self, now: Tick) -> bool {
        self.state == State::Awake && self.turn + FORGIVEN <= now
    }

    /// When it may be started beside others of its model, though nobody waits for it.
    #[must_use]
    pub fn spare_from(&self) -> Tick {
        let rests = self.fruitless >= FRUITLESS && !self.state.has_process();
        if rests { self.since + NOW_AND_THEN } else { Tick(0) }
    }

    /// Hung: health has failed for half the progress timeout, and nothing has moved for all of it.
    #[must_use]
    pub fn hung_at(&self, timeouts: &Timeouts) -> Option<Tick> {
        let failing = self.failing_since? + Millis(timeouts.progress.0 / 2);
        Some(failing.max(self.last_progress.max(self.turn) + timeouts.progress))
    }

    /// It cannot be used any more; whoever still holds a lease is told so, then it is stopped.
    pub fn fail(&mut self, cause: Cause, now: Tick) {
        let drained = self.door == Door::Closed && self.leases == 0;
        self.become_state(State::Failing { cause, drained }, now);
    }

    /// A stub answered for it that its gate is closed. Whoever is out to prove it may have got in before.
    pub fn is_turned_away(&mut self) {
        let asked = self.state == State::Awake
            || matches!(self.state, State::Loading | State::Waking { .. }) && self.proof != Proof::NotReady;
        self.gated |= asked;
    }

    /// Forgets everything that belonged to the process that is gone.
    pub fn forget_process(&mut self) {
        self.accelerators.clear();
        self.address = None;
        self.placing = None;
        self.proof = Proof::NotReady;
        self.profiled = false;
        self.leases = 0;
        self.failing_since = None;
        self.left_out = None;
        self.shrinking = None;
        self.symptoms = Symptoms::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Settings;

    /// Two requests were turned away, the stub opened after the first, and nobody planned in between.
    #[test]
    fn a_stub_that_closes_again_before_anybody_planned_is_watched_anew() {
        let mut engine = Engine::new(EngineId::new("m".into(), 0), Tick(0));
        engine.state = State::Awake;
        engine.is_turned_away();
        assert!(engine.is_to_be_held());
        (engine.door, engine.stub_watched) = (Door::Held, true);
        assert!(!engine.is_to_be_held());
        (engine.gated, engine.stub_watched) = (false, false);
        engine.is_turned_away();
        assert!(engine.is_to_be_held());
    }

    #[test]
    fn a_canary_has_as_long_as_its_exchange_and_waiting_for_one_has_no_end() {
        let timeouts = Settings::default().timeouts;
        let mut engine = Engine::new(EngineId::new("m".into(), 0), Tick(0));
        engine.state = State::Loading;
        let due = |engine: &Engine| engine.deadline(None, Bytes::ZERO, &timeouts);
        assert!(due(&engine).is_some());
        engine.proof = Proof::Wanted;
        assert_eq!(due(&engine), None);
        engine.proof = Proof::Out(Tick(5));
        assert!(due(&engine).is_some_and(|at| at > Tick(5) + timeouts.first_byte));
    }
}
