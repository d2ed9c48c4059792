//! Engines as somebody else knows them: published by the gateway that leads, or found by the one that takes over.
//!
//! What is told replaces what was known of an engine's life, whatever lies between: states in between may never be
//! heard of. What is this gateway's own stays: its leases, its gate, and when it last used the engine.

use super::{
    event::{Failure, Found, Published, PublishedState},
    plan::Planner,
    role::Role,
};
use crate::{
    engine::{Door, Engine, Proof, backoff, past::Past, state::State},
    fault::Cause,
    fleet::command::{Then, Why},
    model::{EngineId, Level},
    units::{Bytes, Generation, Tick},
};

impl Planner {
    pub(super) fn published(
        &mut self,
        id: &EngineId,
        generation: Generation,
        told: Option<&Published>,
        now: Tick,
    ) {
        let known = self.engines.get(id).map(|e| e.generation);
        if self.role != Role::Follows || known.is_some_and(|known| generation < known) {
            return;
        }
        let Some(told) = told else {
            self.vanish(id, now);
            self.engines.change(id, |e| e.generation = generation);
            return;
        };
        if known.is_none() {
            self.engines.insert(Engine { generation, ..Engine::new(id.clone(), now) });
            self.remember(&id.model, now);
        }
        let explicit = self.spec(&id.model).is_some_and(|spec| !spec.measures());
        self.engines.change(id, |e| e.mirror(generation, told, explicit, now));
        self.book_as_seen(id, now);
    }

    /// Nothing is left of it.
    pub(super) fn vanish(&mut self, id: &EngineId, now: Tick) {
        let runs = self.engines.get(id).is_some_and(|e| e.state != State::Cold);
        if runs {
            self.engines.change(id, |e| e.end(State::Cold, now));
            self.book_as_seen(id, now);
        }
    }

    /// Its memory is booked as what it does needs it, whether or not there is room.
    pub(super) fn book_as_seen(&mut self, id: &EngineId, now: Tick) {
        let Some(e) = self.engines.get(id) else { return };
        let spec = self.spec(&id.model);
        let awake = spec.map_or(Bytes::ZERO, |spec| spec.accelerators.in_one_place(spec.memory.awake));
        let units = spec.and_then(|spec| spec.accelerators.units());
        let bytes = match &e.state {
            State::Asleep { .. } => self.residue_of(id),
            state if state.has_process() => awake,
            _ => Bytes::ZERO,
        };
        let in_host = matches!(
            e.state,
            State::Asleep { level: Level::One } | State::FallingAsleep { level: Level::One }
        );
        let places = e.accelerators.clone();
        let pooled = e.state.has_process() && units.is_some();
        self.ledger.shrink(id, Bytes::ZERO, false, now);
        self.ledger.host.booked.remove(id);
        if bytes > Bytes::ZERO || pooled {
            self.ledger.book(id, &places, bytes, units);
        }
        if in_host {
            let host = self.host_need(id);
            self.ledger.host.booked.book(id, host);
        }
    }

    /// An engine that this gateway saw awake while it followed, and that is found running, goes on as it is: its gate
    /// stays open, and nobody who uses it notices. True when that is so.
    pub(super) fn keeps(&mut self, id: &EngineId, generation: Generation, found: &Found, now: Tick) -> bool {
        let same = |e: &&Engine| {
            e.generation == generation && matches!(e.state, State::Awake | State::Draining { .. })
        };
        if found.asleep.is_some() || self.engines.get(id).filter(same).is_none() {
            return false;
        }
        self.engines.change(id, |e| {
            if e.state != State::Awake {
                (e.state, e.since) = (State::Awake, now);
            }
            e.fingerprint = found.fingerprint;
            e.accelerators.clone_from(&found.accelerators);
            e.address = Some(found.address);
            e.last_end = e.last_end.max(found.last_end);
            e.last_progress = now;
            // One that does not answer is watched like any other that was awake and does not.
            e.failing_since = (!found.ready).then_some(now);
        });
        self.book_as_seen(id, now);
        true
    }

    /// What stays of an engine that this gateway followed and that is found otherwise than it was known.
    pub(super) fn hand_over(&mut self, engine: &mut Engine, now: Tick) {
        let id = engine.id.clone();
        self.ledger.shrink(&id, Bytes::ZERO, false, now);
        self.ledger.host.booked.remove(&id);
        let Some(before) = self.engines.get(&id) else { return };
        let mut before = before.clone();
        let leases = before.leases;
        before.shut(Cause::Stopped);
        engine.orphan = before.orphan;
        if before.generation == engine.generation {
            engine.last_end = engine.last_end.max(before.last_end);
            // Whoever is still inside an engine that sleeps has nobody there to be answered by.
            let asleep = matches!(engine.state, State::Asleep { .. } | State::FallingAsleep { .. });
            engine.forsaken = asleep && leases > 0;
            engine.leases = if asleep { 0 } else { leases };
        }
    }
}

impl Engine {
    /// Becomes what was published of it.
    fn mirror(&mut self, generation: Generation, told: &Published, explicit: bool, now: Tick) {
        let since = told.since.min(now);
        if generation != self.generation {
            self.end(State::Cold, now);
            self.generation = generation;
        }
        let served = matches!(self.state, State::Awake | State::Draining { .. });
        let state = match &told.failure {
            Some(failure) if told.state == PublishedState::Backoff => {
                self.left_alone(failure, told.since, now)
            }
            _ => told.state.as_seen(&self.state, since),
        };
        if !state.has_process() {
            return self.end(state, since);
        }
        if state == State::Awake && !served {
            (self.turn, self.fruitless, self.past) = (since, 0, None);
        }
        if state.is_starting() {
            self.began = since;
            self.cold = !matches!(state, State::Waking { .. });
        }
        self.profiled = explicit || !matches!(state, State::Launching | State::Loading);
        (self.state, self.since) = (state, since);
        self.fingerprint = told.fingerprint;
        self.accelerators.clone_from(&told.accelerators);
        self.address = told.address.or(self.address);
        self.proof = Proof::NotReady;
        (self.placing, self.shrinking, self.failing_since) = (None, None, None);
        self.gated &= self.state == State::Awake;
    }

    /// As the leader leaves it alone. Clocks differ, and objects keep moments to the second: here that lasts no longer than
    /// the leader's own pause, and long enough for those who wait to be told.
    fn left_alone(&mut self, failure: &Failure, since: Tick, now: Tick) -> State {
        (self.failures, self.fruitless) = (failure.failures, failure.fruitless);
        self.past =
            Some(Past::of_start(since.min(now), self.generation, failure.cause.clone(), failure.failures));
        let pause = failure.until.since(since).max(backoff::FIRST);
        let until = failure.until.clamp(now + backoff::FIRST, now + pause);
        State::Backoff { until, cause: failure.cause.clone() }
    }

    /// Its process is no more, by somebody else's word.
    fn end(&mut self, state: State, now: Tick) {
        let cause = if let State::Backoff { cause, .. } = &state { cause.clone() } else { Cause::Stopped };
        self.shut(cause);
        (self.state, self.since) = (state, now);
        self.forget_process();
        (self.gated, self.stub_watched) = (false, false);
    }

    /// An open gate is to be shut, and whoever is inside told, though this life is over.
    fn shut(&mut self, cause: Cause) {
        if self.door != Door::Closed {
            self.orphan = Some((self.generation, cause));
            self.door = Door::Closed;
        }
    }
}

impl PublishedState {
    /// As a state of the engine; what is not published of it makes no difference to who only follows.
    fn as_seen(self, before: &State, since: Tick) -> State {
        match self {
            Self::Launching => State::Launching,
            Self::Loading => State::Loading,
            Self::Awake => State::Awake,
            Self::Draining => match before {
                State::Draining { .. } => before.clone(),
                _ => {
                    State::Draining { why: Why::Published, then: Then::Stop, revoked: false, drained: false }
                }
            },
            Self::FallingAsleep => State::FallingAsleep { level: level_of(before) },
            Self::Asleep(level) => State::Asleep { level },
            Self::Waking => State::Waking { level: level_of(before) },
            Self::Failing => match before {
                State::Failing { .. } => before.clone(),
                _ => State::Failing { cause: Cause::Unhealthy, drained: false },
            },
            Self::Stopping => match before {
                State::Stopping { .. } => before.clone(),
                _ => State::Stopping { cause: Cause::Stopped },
            },
            // It was not said until when, and why.
            Self::Backoff => State::Backoff { until: since, cause: Cause::Unhealthy },
        }
    }
}

/// The level is published only of one that sleeps.
const fn level_of(state: &State) -> Level {
    match state {
        State::Asleep { level } | State::FallingAsleep { level } | State::Waking { level } => *level,
        _ => Level::One,
    }
}
