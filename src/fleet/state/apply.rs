//! Records a command: what holds from the moment it is issued, whatever its outcome will be.
//!
//! Only this module changes the state by a decision; both planning and [`crate::fleet::Fleet::issued`] use it.

use std::sync::Arc;

use crate::{
    engine::{
        Admission, Engine, PendingReservation, ProbeState, STOP_RETRY_AFTER, rehearsal::SleepRehearsal,
        state::LifecycleState,
    },
    fault::FailureCause,
    fleet::{
        command::{AfterDrain, CloseReason, Command},
        event::LearnedMeasurements,
        plan::{Planner, advance::residue::ResidueReading},
        state::ledger::AcceleratorAccount,
    },
    model::{AcceleratorId, EngineId, SleepLevel},
    units::{Bytes, Generation, Tick},
};

impl Planner {
    pub(in crate::fleet) fn apply(&mut self, command: &Command, now: Tick) {
        match command {
            Command::Reserve { engine, generation, accelerators, bytes, host: _ } => {
                let patient = self.dependencies.involves(&engine.model);
                let accelerators = accelerators.clone();
                let placing = PendingReservation {
                    accelerators,
                    bytes: *bytes,
                    booked_before: self.ledger.booked_bytes(engine),
                    confirmed: false,
                    in_dependency_group: patient,
                };
                let spec = self.engine_spec(engine);
                let units = spec.and_then(|spec| spec.accelerators.units());
                let fingerprint = spec.map(|spec| spec.fingerprint).filter(|_| patient);
                self.ledger.book(engine, &placing.accelerators, *bytes, units);
                self.update_engine(engine, |e| {
                    // A reservation that may wait long starts with the configuration it was made for, or not at all.
                    if let Some(fingerprint) = fingerprint.filter(|_| !e.state.has_process()) {
                        e.fingerprint = fingerprint;
                    }
                    e.generation = *generation;
                    e.pending_reservation = Some(placing);
                    e.startup_began = now;
                });
            }
            Command::Shrink { engine, bytes, host, .. } => self.shrink(engine, *bytes, *host, now),
            Command::Launch { engine, accelerators, .. } => {
                self.record_launch(engine, accelerators.clone(), now)
            }
            Command::Wake { engine, level, .. } => {
                self.restart_startup_clock(engine, now);
                self.learn_rehearsed_residue(engine, now);
                self.update_engine(engine, |e| {
                    if e.rehearsal == SleepRehearsal::Underway {
                        // The wake had no reservation to begin with.
                        e.startup_began = now;
                    }
                    (e.pending_reservation, e.releasing_since) = (None, None);
                    e.probe_state = ProbeState::NotReady;
                    e.cold_start = false;
                    e.memory_baseline.clear();
                    e.transition_to(LifecycleState::Waking { level: *level }, now);
                })
            }
            Command::Sleep { engine, level, .. } => self.record_sleep(engine, *level, now),
            Command::Stop { engine, grace, successor, .. } => {
                let (cause, reason) = (self.stop_cause(engine, now), self.asleep_stop_reason(engine));
                self.update_engine(engine, |e| {
                    e.stop_retry_at = now + *grace + STOP_RETRY_AFTER;
                    if !matches!(e.state, LifecycleState::Stopping { .. }) {
                        e.transition_to(LifecycleState::Stopping { cause }, now);
                        reason.into_iter().for_each(|reason| e.set_stop_reason(reason));
                        successor.iter().for_each(|successor| e.set_successor(&successor.model));
                    }
                    e.pending_reservation = None;
                    e.releasing_since = None;
                });
            }
            Command::ReadMeter { accelerator, .. } => {
                let mark_requested = |account: &mut AcceleratorAccount| {
                    (account.reading_requested, account.last_attempt) = (Some(now), now)
                };
                self.ledger.accelerators.change(accelerator, mark_requested);
            }
            Command::Probe { engine, .. } => {
                self.update_engine(engine, |e| e.probe_state = ProbeState::InFlight(now))
            }
            Command::OpenGate { engine, public, .. } => self.record_gate_open(engine, *public, now),
            Command::CloseGate { engine, generation, reason, after_drain, successor } => {
                self.record_gate_close(engine, *generation, *reason, *after_drain, now);
                if *reason == CloseReason::Idle {
                    self.lower_target_of_idle(engine);
                }
                if let Some(successor) = successor {
                    self.update_engine(engine, |e| {
                        (e.yielded_at, e.yielded_to) = (now, Some(successor.clone()))
                    });
                }
            }
            Command::RevokeLeases { engine, generation, .. } => self.update_engine(engine, |e| {
                if let (LifecycleState::Draining { revoked, .. }, true) =
                    (&mut e.state, e.generation == *generation)
                {
                    *revoked = true;
                }
            }),
            Command::AwaitStub { engine, .. } => self.update_engine(engine, |e| {
                e.admission = Admission::AwaitingStub;
                e.stub_gate_watched = true;
            }),
            Command::Grant { engine, canary, .. } => self.update_engine(engine, |e| {
                e.record_grant(now);
                if *canary {
                    e.probe_state = ProbeState::InFlight(now);
                }
            }),
            Command::Refuse { .. } => {}
            Command::FinishOperation { operation, .. } => {
                if let Some(operation) = self.operations.remove(operation) {
                    self.engines.mark_model_dirty(&operation.model);
                }
            }
        }
    }

    fn update_engine(&mut self, engine: &EngineId, change: impl FnOnce(&mut Engine)) {
        self.engines.change(engine, change);
    }

    /// Changes the measurements of the engine's variant, and returns whether they differ. Copies nothing if not.
    pub(in crate::fleet) fn update_learned(
        &mut self,
        engine: &EngineId,
        change: impl FnOnce(&mut LearnedMeasurements),
    ) -> bool {
        let Some(before) = self.models.get(&engine.model).map(|model| model.learned_of(&engine.variant))
        else {
            return false;
        };
        let mut learned = before;
        change(&mut learned);
        let differs = learned != before;
        if differs && let Some(record) = Arc::make_mut(&mut self.models).get_mut(&engine.model) {
            record.set_learned(&engine.variant, learned);
            // Learned times set the end of an engine's protection.
            self.engines.mark_model_dirty(&engine.model);
        }
        differs
    }

    fn shrink(&mut self, engine: &EngineId, bytes: Bytes, host: Bytes, now: Tick) {
        let has_process = self.engines.get(engine).is_some_and(|e| e.state.has_process());
        self.ledger.shrink(engine, bytes, has_process, now);
        if host == Bytes::ZERO {
            self.ledger.host.booked.remove(engine);
        } else if let Some(booked) = self.ledger.host.booked.of(engine) {
            self.ledger.host.booked.book(engine, host.min(booked));
        }
        // A sleeper that gives up a reservation keeps what it had booked, which says nothing new.
        let shows_residue =
            |e: &Engine| matches!(e.state, LifecycleState::Asleep { .. }) && e.pending_reservation.is_none();
        if self.engines.get(engine).is_some_and(shows_residue) {
            self.learn_residue(engine, bytes);
        }
        self.update_engine(engine, |e| {
            e.releasing_since = None;
            e.pending_reservation = None;
            if e.rehearsal == SleepRehearsal::Underway {
                // The engine stays asleep: from here on it sleeps like any other.
                e.rehearsal = SleepRehearsal::NotDue;
            }
        });
    }

    /// Learns what a sleeping engine keeps of its reservation. `bytes`: on one account.
    fn learn_residue(&mut self, engine: &EngineId, bytes: Bytes) {
        let Some(spec) = self.engine_spec(engine) else { return };
        let (keeps, declared) = (spec.accelerators.bytes_per_accelerator(bytes), spec.memory.asleep);
        let residue = (keeps > declared).then_some(keeps);
        self.update_learned(engine, |learned| learned.residue = residue);
    }

    /// Learns the residue of an engine that wakes from its rehearsal, if the meters have shown it.
    fn learn_rehearsed_residue(&mut self, engine: &EngineId, now: Tick) {
        let rehearsed = self.engines.get(engine).filter(|e| e.rehearsal == SleepRehearsal::Underway);
        if let Some(ResidueReading::Complete(bytes)) = rehearsed.map(|e| self.residue_reading(e, now)) {
            self.learn_residue(engine, bytes);
        }
    }

    /// Restarts the startup clock of an engine whose reservation waited for dependencies.
    ///
    /// The time of that wait does not count as startup.
    fn restart_startup_clock(&mut self, engine: &EngineId, now: Tick) {
        let patient =
            |e: &Engine| e.pending_reservation.as_ref().is_some_and(|placing| placing.in_dependency_group);
        if self.engines.get(engine).is_some_and(patient) {
            self.update_engine(engine, |e| e.startup_began = now);
        }
    }

    fn record_launch(&mut self, engine: &EngineId, accelerators: Vec<AcceleratorId>, now: Tick) {
        self.restart_startup_clock(engine, now);
        let spec = self.engine_spec(engine);
        let (measures, fingerprint) = spec.map_or((true, 0), |s| (s.profiles_memory(), s.fingerprint));
        let used = |on: &AcceleratorId| self.ledger.accelerators.get(on)?.used_if_alone(engine, now);
        let before = accelerators.iter().filter_map(|on| Some((on.clone(), used(on)?))).collect();
        self.update_engine(engine, |e| {
            e.pending_reservation = None;
            e.memory_baseline = before;
            e.accelerators = accelerators;
            e.fingerprint = fingerprint;
            e.profiled = !measures;
            e.probe_state = ProbeState::NotReady;
            e.cold_start = true;
            e.last_lease_end = Tick(0);
            e.rehearsal = e.rehearsal.at_launch();
            e.transition_to(LifecycleState::Launching, now);
        });
    }

    /// Reserves host RAM here, before the call that makes the engine use it.
    fn record_sleep(&mut self, engine: &EngineId, level: SleepLevel, now: Tick) {
        if level == SleepLevel::One {
            let host = self.host_need(engine);
            self.ledger.host.booked.book(engine, host);
        }
        self.update_engine(engine, |e| {
            e.rehearsal = e.rehearsal.at_sleep(level, e.is_rehearsing());
            e.transition_to(LifecycleState::FallingAsleep { level }, now);
        });
    }

    fn record_gate_open(&mut self, engine: &EngineId, public: bool, now: Tick) {
        if self.engines.get(engine).is_some_and(Engine::denied_sleep) {
            // An awake engine holds no host RAM, as after a wake.
            self.ledger.host.booked.remove(engine);
        }
        self.update_engine(engine, |e| {
            e.admission = if public { Admission::Public } else { Admission::WaitersOnly };
            e.rehearsal = e.rehearsal.at_open();
            e.has_stranded_leases = false;
            if matches!(e.state, LifecycleState::Draining { .. }) {
                e.resume_serving(now);
            }
        });
    }

    fn record_gate_close(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        reason: CloseReason,
        after_drain: AfterDrain,
        now: Tick,
    ) {
        let cause = self.stop_cause(engine, now);
        let decides = self.role.decides();
        self.update_engine(engine, |e| {
            if e.unclosed_gate.as_ref().is_some_and(|(orphan, _)| *orphan == generation) {
                e.unclosed_gate = None;
                return;
            }
            e.admission = Admission::Closed;
            if !decides {
                // Another gateway decides the engine's state.
                return;
            }
            match (&mut e.state, reason) {
                (LifecycleState::Failing { .. }, _) => {}
                (state, CloseReason::Shutdown) if state.is_starting() => {}
                (_, CloseReason::Fault) => {
                    // A draining engine reaches this with cause `Stopped` only if it hangs.
                    let drains =
                        matches!(e.state, LifecycleState::Draining { .. }) && cause == FailureCause::Stopped;
                    let cause = if drains { FailureCause::Hung } else { cause };
                    e.transition_to(LifecycleState::Failing { cause, drained: false }, now);
                }
                (LifecycleState::Draining { reason: old, after_drain: old_then, .. }, _) => {
                    // An idle drain that another model now relies on, or an order on top of a turn: the drain deadline
                    // keeps running.
                    *old = reason;
                    *old_then = after_drain;
                }
                _ => {
                    let state =
                        LifecycleState::Draining { reason, after_drain, revoked: false, drained: false };
                    e.transition_to(state, now);
                }
            }
        });
    }
}

impl Planner {
    /// Why a sleeping engine is stopped now.
    ///
    /// `None` for any other engine, and for a lost accelerator, which is no decision of ours.
    fn asleep_stop_reason(&self, id: &EngineId) -> Option<CloseReason> {
        let is_asleep =
            self.engines.get(id).is_some_and(|e| matches!(e.state, LifecycleState::Asleep { .. }));
        if !is_asleep || self.lost_accelerator(id).is_some() {
            return None;
        }
        Some(if self.shutdown.is_some() {
            CloseReason::Shutdown
        } else if self.is_unwanted(id) {
            CloseReason::Outdated
        } else if self.ordered_stop(id) {
            CloseReason::Operator
        } else {
            CloseReason::Idle
        })
    }

    /// Why an engine ends, derived from its state.
    ///
    /// An engine that is no longer wanted, makes room for another, or does not fall asleep has served, so its cause is
    /// [`FailureCause::Stopped`]. A start past its deadline is [`FailureCause::Timeout`].
    pub(in crate::fleet) fn stop_cause(&self, id: &EngineId, now: Tick) -> FailureCause {
        let Some(e) = self.engines.get(id) else { return FailureCause::Stopped };
        match &e.state {
            LifecycleState::Failing { cause, .. } | LifecycleState::Stopping { cause } => cause.clone(),
            state if state.is_starting() && (self.is_unwanted(id) || self.ordered_stop(id)) => {
                FailureCause::Stopped
            }
            LifecycleState::Asleep { .. } | LifecycleState::FallingAsleep { .. } => FailureCause::Stopped,
            _ if self.lost_accelerator(id).is_some() => FailureCause::AcceleratorLost,
            LifecycleState::Draining { .. } => FailureCause::Stopped,
            LifecycleState::Awake => FailureCause::Hung,
            state if state.is_starting() && !self.is_overdue(id, now) => FailureCause::Stopped,
            _ => FailureCause::Timeout,
        }
    }
}
