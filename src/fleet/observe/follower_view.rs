//! Engines as another gateway knows them: published by the leader, or found by a gateway that takes over.
//!
//! Published values replace what was known of an engine's lifecycle, whatever lies between: intermediate states may
//! never arrive. This gateway's own values stay: its leases, its gate, and when it last used the engine.

use crate::{
    engine::{
        Admission, Engine, ProbeState, backoff, last_outcome::LastOutcome, rehearsal::SleepRehearsal,
        state::LifecycleState,
    },
    fault::FailureCause,
    fleet::command::{AfterDrain, CloseReason},
    fleet::{
        event::{AdoptedEngine, PublishedEngine, PublishedEngineState, PublishedFailure},
        plan::{Planner, leadership::LeadershipRole},
    },
    model::{EngineId, ModelName, SleepLevel},
    units::{Bytes, Generation, Tick},
};

impl Planner {
    pub(in crate::fleet) fn apply_published(
        &mut self,
        id: &EngineId,
        generation: Generation,
        published: Option<&PublishedEngine>,
        now: Tick,
    ) {
        let known_generation = self.engines.get(id).map(|e| e.generation);
        if self.role != LeadershipRole::Follower
            || known_generation.is_some_and(|known_generation| generation < known_generation)
        {
            return;
        }
        let Some(published) = published else {
            self.record_vanished(id, now);
            self.engines.change(id, |e| e.generation = generation);
            return;
        };
        if known_generation.is_none() {
            self.engines.insert(Engine { generation, ..Engine::new(id.clone(), now) });
            self.ensure_model(&id.model, now);
        }
        let explicit = self.engine_spec(id).is_some_and(|spec| !spec.profiles_memory());
        self.engines.change(id, |e| e.apply_published(generation, published, explicit, now));
        self.book_as_observed(id, now);
    }

    /// Adds a model that the first configuration may have.
    ///
    /// A gateway that starts reads what the leader published of its models while it composes that configuration.
    pub(in crate::fleet) fn expect_model(&mut self, model: &ModelName, now: Tick) {
        // Accelerators come with the first configuration.
        if self.ledger.accelerators.iter().next().is_none() {
            self.ensure_model(model, now);
        }
    }

    /// Ends an engine of which nothing is left.
    pub(in crate::fleet) fn record_vanished(&mut self, id: &EngineId, now: Tick) {
        let runs = self.engines.get(id).is_some_and(|e| e.state != LifecycleState::Cold);
        if runs {
            self.engines.change(id, |e| e.end_process(LifecycleState::Cold, now));
            self.book_as_observed(id, now);
        }
    }

    /// Sets the engine's reservation to what its state needs, whether or not there is room.
    pub(in crate::fleet) fn book_as_observed(&mut self, id: &EngineId, now: Tick) {
        let Some(e) = self.engines.get(id) else { return };
        let spec = self.engine_spec(id);
        // In a pool that counts accelerators, an engine whose model is not configured takes one. A follower leaves it to
        // the leader.
        let takes_units = match spec {
            Some(spec) => spec.accelerators.units().is_some(),
            None => self.role != LeadershipRole::Follower,
        };
        let bytes = self.observed_need(e);
        let in_host = matches!(
            e.state,
            LifecycleState::Asleep { level: SleepLevel::One }
                | LifecycleState::FallingAsleep { level: SleepLevel::One }
        );
        let accelerators = e.accelerators.clone();
        let pooled = e.state.has_process() && takes_units;
        self.ledger.shrink(id, Bytes::ZERO, false, now);
        self.ledger.host.booked.remove(id);
        if bytes > Bytes::ZERO || pooled {
            self.book_found(id, &accelerators, bytes);
        }
        if in_host {
            let host = self.host_need(id);
            self.ledger.host.booked.book(id, host);
        }
    }

    /// Sets the reservations of the model's sleepers to what the leader has learned that they keep.
    pub(in crate::fleet) fn book_sleepers_as_observed(&mut self, model: &ModelName, now: Tick) {
        let sleepers = self.engines.of_model(model);
        let sleepers = sleepers.filter(|e| matches!(e.state, LifecycleState::Asleep { .. }));
        let sleepers: Vec<EngineId> = sleepers.map(|e| e.id.clone()).collect();
        sleepers.iter().for_each(|id| self.book_as_observed(id, now));
    }

    /// Keeps an engine running that this gateway saw awake while it followed; returns whether it did.
    ///
    /// The engine's gate stays open, and its requests notice nothing.
    pub(in crate::fleet) fn adopt_in_place(
        &mut self,
        id: &EngineId,
        generation: Generation,
        found: &AdoptedEngine,
        now: Tick,
    ) -> bool {
        let same = |e: &&Engine| {
            e.generation == generation
                && matches!(e.state, LifecycleState::Awake | LifecycleState::Draining { .. })
        };
        if found.asleep.is_some() || self.engines.get(id).filter(same).is_none() {
            return false;
        }
        self.engines.change(id, |e| {
            if e.state != LifecycleState::Awake {
                (e.state, e.since) = (LifecycleState::Awake, now);
            }
            e.fingerprint = found.fingerprint;
            e.accelerators.clone_from(&found.accelerators);
            e.address = Some(found.address);
            e.last_lease_end = e.last_lease_end.max(found.last_lease_end);
            e.last_progress = now;
            // An unresponsive engine is watched like any other awake engine that stops responding.
            e.failing_since = (!found.ready).then_some(now);
            // The former leader may have put it to sleep.
            e.rehearsal = SleepRehearsal::NotDue;
        });
        self.book_as_observed(id, now);
        true
    }

    /// Carries over values of a followed engine that was found in another state.
    pub(in crate::fleet) fn carry_over(&mut self, engine: &mut Engine, now: Tick) {
        let id = engine.id.clone();
        self.ledger.shrink(&id, Bytes::ZERO, false, now);
        self.ledger.host.booked.remove(&id);
        let Some(before) = self.engines.get(&id) else { return };
        let mut before = before.clone();
        let leases = before.leases;
        before.mark_gate_unclosed(FailureCause::Stopped);
        engine.unclosed_gate = before.unclosed_gate;
        if before.generation == engine.generation {
            engine.last_lease_end = engine.last_lease_end.max(before.last_lease_end);
            // A sleeping engine cannot answer the requests that still hold leases on it.
            let asleep =
                matches!(engine.state, LifecycleState::Asleep { .. } | LifecycleState::FallingAsleep { .. });
            engine.has_stranded_leases = asleep && leases > 0;
            engine.leases = if asleep { 0 } else { leases };
        }
    }
}

impl Engine {
    /// Takes over the published state.
    fn apply_published(
        &mut self,
        generation: Generation,
        published: &PublishedEngine,
        explicit: bool,
        now: Tick,
    ) {
        let since = published.since.min(now);
        if generation != self.generation {
            self.end_process(LifecycleState::Cold, now);
            self.generation = generation;
        }
        let served = matches!(self.state, LifecycleState::Awake | LifecycleState::Draining { .. });
        let state = match &published.failure {
            Some(failure) if published.state == PublishedEngineState::Backoff => {
                self.enter_published_backoff(failure, published.since, now)
            }
            _ => published.state.to_engine_state(&self.state, since),
        };
        if !state.has_process() {
            return self.end_process(state, since);
        }
        if state == LifecycleState::Awake && !served {
            (self.turn_start, self.failures_since_serving, self.last_outcome) = (since, 0, None);
        }
        if state.is_starting() {
            self.startup_began = since;
            self.cold_start = !matches!(state, LifecycleState::Waking { .. });
        }
        self.profiled = explicit || !matches!(state, LifecycleState::Launching | LifecycleState::Loading);
        (self.state, self.since) = (state, since);
        self.fingerprint = published.fingerprint;
        self.accelerators.clone_from(&published.accelerators);
        self.address = published.address.or(self.address);
        self.probe_state = ProbeState::NotReady;
        (self.pending_reservation, self.releasing_since, self.failing_since) = (None, None, None);
        self.stub_gate_closed &= self.state == LifecycleState::Awake;
        self.rehearsal = SleepRehearsal::NotDue;
    }

    /// Enters the leader's back-off.
    ///
    /// Clocks differ, and Kubernetes objects keep moments to the second. So the back-off here lasts no longer than the
    /// leader's pause, and long enough to refuse the waiters.
    fn enter_published_backoff(
        &mut self,
        failure: &PublishedFailure,
        since: Tick,
        now: Tick,
    ) -> LifecycleState {
        (self.failures, self.failures_since_serving) = (failure.failures, failure.failures_since_serving);
        self.last_outcome = Some(LastOutcome::failed_start(
            since.min(now),
            self.generation,
            failure.cause.clone(),
            failure.failures,
        ));
        let pause = failure.until.since(since).max(backoff::MIN_DELAY);
        let until = failure.until.clamp(now + backoff::MIN_DELAY, now + pause);
        LifecycleState::Backoff { until, cause: failure.cause.clone() }
    }

    /// Ends the process as published or found by others.
    fn end_process(&mut self, state: LifecycleState, now: Tick) {
        let cause = if let LifecycleState::Backoff { cause, .. } = &state {
            cause.clone()
        } else {
            FailureCause::Stopped
        };
        self.mark_gate_unclosed(cause);
        (self.state, self.since) = (state, now);
        self.forget_process();
        (self.stub_gate_closed, self.stub_gate_watched) = (false, false);
    }

    /// Marks an open gate of an ended generation: close it and revoke its leases.
    fn mark_gate_unclosed(&mut self, cause: FailureCause) {
        if self.admission != Admission::Closed {
            self.unclosed_gate = Some((self.generation, cause));
            self.admission = Admission::Closed;
        }
    }
}

impl PublishedEngineState {
    /// Converts to an engine state. Unpublished details make no difference to a follower.
    fn to_engine_state(self, before: &LifecycleState, since: Tick) -> LifecycleState {
        match self {
            Self::Launching => LifecycleState::Launching,
            Self::Loading => LifecycleState::Loading,
            Self::Awake => LifecycleState::Awake,
            Self::Draining => match before {
                LifecycleState::Draining { .. } => before.clone(),
                _ => LifecycleState::Draining {
                    reason: CloseReason::PublishedNotAwake,
                    after_drain: AfterDrain::Stop,
                    revoked: false,
                    drained: false,
                },
            },
            Self::FallingAsleep => LifecycleState::FallingAsleep { level: sleep_level_of(before) },
            Self::Asleep(level) => LifecycleState::Asleep { level },
            Self::Waking => LifecycleState::Waking { level: sleep_level_of(before) },
            Self::Failing => match before {
                LifecycleState::Failing { .. } => before.clone(),
                _ => LifecycleState::Failing { cause: FailureCause::Unhealthy, drained: false },
            },
            Self::Stopping => match before {
                LifecycleState::Stopping { .. } => before.clone(),
                _ => LifecycleState::Stopping { cause: FailureCause::Stopped },
            },
            // The publication lacks the end and the cause of the back-off.
            Self::Backoff => LifecycleState::Backoff { until: since, cause: FailureCause::Unhealthy },
        }
    }
}

/// Level of a transition; the leader publishes the level only of a sleeping engine.
const fn sleep_level_of(state: &LifecycleState) -> SleepLevel {
    match state {
        LifecycleState::Asleep { level }
        | LifecycleState::FallingAsleep { level }
        | LifecycleState::Waking { level } => *level,
        _ => SleepLevel::One,
    }
}
