//! Advances each engine as its own state demands, whatever other models wait for.
//!
//! This covers confirmed launches, closing gates, finished drains, passed deadlines, and sleep or stop by idleness.

pub(in crate::fleet) mod residue;

use crate::{
    engine::{Admission, Engine, state::LifecycleState},
    fault::{FailureCause, Fault},
    fleet::{
        command::{AfterDrain, CloseReason, Command},
        plan::PlanBuilder,
    },
    model::{AcceleratorId, DrainDeadlinePolicy, EngineId, SleepLevel, SleepLevelPolicy},
    units::{Bytes, Generation, Millis},
};

impl PlanBuilder<'_> {
    pub(in crate::fleet) fn advance(&mut self) {
        self.advance_due();
        self.check_lost_accelerators();
    }

    /// Advances every engine that may need a command.
    pub(in crate::fleet) fn advance_due(&mut self) {
        let due_engines = self.planner.due_engines(self.now);
        if cfg!(debug_assertions) {
            self.advance_all(&due_engines);
        } else {
            due_engines.iter().for_each(|id| self.advance_engine(id));
        }
    }

    fn advance_engine(&mut self, id: &EngineId) {
        self.close_orphaned_gate(id);
        if !self.planner.role.decides() {
            return self.sync_gate(id);
        }
        self.advance_state(id);
        self.shrink_to_residue(id);
    }

    /// Advances every engine, and asserts that engines outside the due index need no command.
    fn advance_all(&mut self, due_engines: &[EngineId]) {
        for id in self.planner.engines.ids() {
            if due_engines.binary_search(&id).is_ok() {
                self.advance_engine(&id);
            } else {
                self.assert_needs_no_command(&id);
            }
        }
    }

    fn assert_needs_no_command(&mut self, id: &EngineId) {
        #[cfg(test)]
        let visited = crate::fleet::state::engines::visits::count();
        let before = self.command_count();
        self.advance_engine(id);
        debug_assert!(self.command_count() == before, "{id} needed a command but was not in the due index");
        #[cfg(test)]
        crate::fleet::state::engines::visits::reset_to(visited);
    }

    fn check_lost_accelerators(&mut self) {
        let accounts = self.planner.ledger.accelerators.awaiting_reading();
        let due = accounts.filter(|(_, a)| a.recovery_check_at().is_some_and(|at| at <= self.now));
        for accelerator in due.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            self.request_reading(&accelerator, Millis::ZERO);
        }
    }

    pub(in crate::fleet) fn engine(&self, id: &EngineId) -> Option<&Engine> {
        self.planner.engines.get(id)
    }

    /// Closes the gate of a process that ended on its own, and revokes its leases.
    fn close_orphaned_gate(&mut self, id: &EngineId) {
        let Some((generation, cause)) = self.engine(id).and_then(|e| e.unclosed_gate.clone()) else {
            return;
        };
        let engine = id.clone();
        self.emit(Command::CloseGate {
            engine,
            generation,
            reason: CloseReason::Fault,
            after_drain: AfterDrain::Stop,
            successor: None,
        });
        let fault = Fault::EngineFailed { model: id.model.clone(), cause, wait: None };
        self.emit(Command::RevokeLeases { engine: id.clone(), generation, fault });
    }

    fn advance_state(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        let generation = e.generation;
        if self.is_overdue(id) {
            return if e.admission == Admission::Closed {
                self.stop(id)
            } else {
                self.fail_engine(id, FailureCause::Timeout)
            };
        }
        match e.state.clone() {
            LifecycleState::Cold | LifecycleState::Backoff { .. } => self.launch_if_reserved(id),
            LifecycleState::Launching | LifecycleState::Loading | LifecycleState::Waking { .. } => {
                if self.is_unwanted(id)
                    || self.ordered_stop(id)
                    || self.planner.lost_accelerator(id).is_some()
                {
                    self.abandon_start(id);
                } else if self.planner.shutdown.is_some() && e.admission != Admission::Closed {
                    // The start continues; only its first exchange ends.
                    self.close_gate(id, CloseReason::Shutdown, AfterDrain::Stop);
                    self.revoke_leases(id, Fault::ShuttingDown);
                } else if e.must_await_stub() && self.planner.shutdown.is_none() {
                    // During shutdown no request is admitted anyway, and a closed gate stays closed.
                    self.emit(Command::AwaitStub { engine: id.clone(), generation });
                }
            }
            LifecycleState::Awake => self.advance_awake(id),
            LifecycleState::Draining { reason: why, after_drain: then, revoked, drained } => {
                self.advance_draining(id, why, then, revoked, drained)
            }
            LifecycleState::FallingAsleep { .. } => {
                if self.planner.shutdown == Some(true) {
                    self.stop(id);
                }
            }
            LifecycleState::Asleep { level } => self.advance_asleep(id, level),
            LifecycleState::Failing { drained: true, .. } => self.stop(id),
            LifecycleState::Failing { cause, .. } => {
                if e.admission != Admission::Closed {
                    self.fail_engine(id, cause);
                }
            }
            LifecycleState::Stopping { .. } => {
                if e.stop_retry_at <= self.now {
                    let (engine, grace) = (id.clone(), Millis::ZERO);
                    self.emit(Command::Stop { engine, generation, grace, successor: None });
                }
            }
        }
    }

    /// Launches a confirmed reservation, or releases it if it is no longer wanted.
    fn launch_if_reserved(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        let Some(placing) = e.pending_reservation.clone().filter(|p| p.confirmed) else {
            return;
        };
        let (engine, generation) = (id.clone(), e.generation);
        if self.is_unwanted(id)
            || self.planner.shutdown.is_some()
            || self.is_reservation_useless(id, &placing)
        {
            return self.emit(Command::Shrink { engine, generation, bytes: Bytes::ZERO, host: Bytes::ZERO });
        }
        if self.must_wait_to_start(id, &placing) {
            return;
        }
        let accelerators = placing.accelerators;
        self.emit(Command::Launch { engine, generation, accelerators, bytes: placing.bytes });
    }

    fn advance_asleep(&mut self, id: &EngineId, level: SleepLevel) {
        let Some(e) = self.engine(id) else { return };
        let (engine, generation) = (id.clone(), e.generation);
        if self.is_unwanted(id) || self.planner.lost_accelerator(id).is_some() || self.ordered_stop(id) {
            return self.stop(id);
        }
        if let Some(placing) = e.pending_reservation.as_ref().filter(|p| p.confirmed).cloned() {
            if self.planner.shutdown.is_some() || self.is_reservation_useless(id, &placing) {
                let host = self.planner.ledger.host.booked.of(id).unwrap_or_default();
                let bytes = placing.booked_before;
                return self.emit(Command::Shrink { engine, generation, bytes, host });
            }
            if self.must_wait_to_start(id, &placing) {
                return;
            }
            return self.emit(Command::Wake { engine, generation, level });
        }
        if self.wakes_from_rehearsal(e) {
            return self.end_rehearsal(id, level);
        }
        let stops_at = self.planner.engine_spec(id).and_then(|spec| e.sleeper_stops_at(&spec.idle));
        let wanted =
            self.waiting(&id.model) > 0 || e.pending_reservation.is_some() || self.planner.is_kept_awake(id);
        let due = stops_at.is_some_and(|at| at <= self.now);
        if due && !wanted && !self.is_wanted_by_dependents(id) {
            self.stop(id);
        }
    }

    fn advance_awake(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        let hung = e.hung_at(&self.planner.settings.timeouts).is_some_and(|at| at <= self.now);
        let (generation, admission) = (e.generation, e.admission);
        let (must_await_stub, stub_gate_closed) = (e.must_await_stub(), e.stub_gate_closed);
        if hung {
            self.fail_engine(id, FailureCause::Hung);
        } else if self.planner.lost_accelerator(id).is_some() {
            self.fail_engine(id, FailureCause::AcceleratorLost);
        } else if self.planner.shutdown == Some(true)
            || (self.planner.shutdown.is_some() && admission != Admission::Closed)
        {
            self.close_gate(id, CloseReason::Shutdown, AfterDrain::Stop);
            self.revoke_leases(id, Fault::ShuttingDown);
        } else if self.planner.shutdown.is_some() {
            // Engines keep running; their gates stay closed.
        } else if self.is_unwanted(id) {
            self.close_gate(id, CloseReason::Outdated, AfterDrain::Stop);
        } else if self.ordered_stop(id) {
            self.close_gate(id, CloseReason::Operator, AfterDrain::Stop);
            self.revoke_leases(id, self.engine_failed_fault(id, FailureCause::Stopped));
        } else if let Some(level) = self.ordered_sleep(id) {
            self.close_gate(id, CloseReason::Operator, AfterDrain::Sleep(level));
        } else if let Some(after_drain) = self.idle_action(id) {
            self.close_gate(id, CloseReason::Idle, after_drain);
        } else if self.begin_rehearsal(id) {
            // The engine drains.
        } else if must_await_stub {
            self.emit(Command::AwaitStub { engine: id.clone(), generation });
        } else if stub_gate_closed {
            // The engine stays held until its stub opens the gate.
        } else if admission != Admission::Public {
            self.emit(Command::OpenGate { engine: id.clone(), generation, public: true });
        } else {
            self.read_meters_once_awake(id);
        }
    }

    /// Reads each meter once after the engine became awake. Its next reservation uses that reading.
    pub(super) fn read_meters_once_awake(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        let unread = |a: &&AcceleratorId| {
            self.planner
                .ledger
                .accelerators
                .get(a)
                .is_some_and(|account| account.is_unread_since(e.turn_start))
        };
        for accelerator in e.accelerators.iter().filter(unread).cloned().collect::<Vec<_>>() {
            self.emit(Command::ReadMeter { accelerator, after: Millis::ZERO });
        }
    }

    fn advance_draining(
        &mut self,
        id: &EngineId,
        reason: CloseReason,
        after_drain: AfterDrain,
        revoked: bool,
        drained: bool,
    ) {
        let Some(e) = self.engine(id) else { return };
        let (generation, since) = (e.generation, e.since);
        let rehearsed = e.last_deactivation() == Some(CloseReason::Rehearsal);
        let turns = &self.planner.settings.turns;
        let hung = e.hung_at(&self.planner.settings.timeouts).is_some_and(|at| at <= self.now);
        let cut = turns.on_deadline == DrainDeadlinePolicy::Cut
            && matches!(reason, CloseReason::Turn | CloseReason::Outdated | CloseReason::Operator)
            && since + turns.drain_deadline <= self.now;
        if self.planner.shutdown.is_some() && reason != CloseReason::Shutdown {
            self.close_gate(id, CloseReason::Shutdown, AfterDrain::Stop);
            return self.revoke_leases(id, Fault::ShuttingDown);
        }
        if reason == CloseReason::Shutdown && self.planner.shutdown == Some(false) {
            return;
        }
        if self.ordered_stop(id)
            && (reason, after_drain) != (CloseReason::Operator, AfterDrain::Stop)
            && !drained
        {
            self.close_gate(id, CloseReason::Operator, AfterDrain::Stop);
            return self.revoke_leases(id, self.engine_failed_fault(id, FailureCause::Stopped));
        }
        if reason == CloseReason::Rehearsal {
            return self.advance_rehearsal_drain(id, drained);
        }
        // Also an engine that is drained and only waits for a neighbour. One that could not rehearse is not at fault
        // for a need: it goes on as it was.
        let must_stay_awake = reason == CloseReason::SleepDenied
            && (rehearsed || self.planner.is_kept_awake(id) || self.ordered_awake(&id.model));
        let wanted = must_stay_awake || self.waiting(&id.model) > 0 || self.is_wanted_by_dependents(id);
        let may_reopen =
            reason == CloseReason::Idle || reason == CloseReason::SleepDenied && self.may_keep_serving(id);
        let scaled_up =
            reason == CloseReason::ScaledDown && self.may_keep_serving(id) && self.is_wanted_again(id);
        if (may_reopen && wanted || scaled_up) && !hung {
            return self.emit(Command::OpenGate { engine: id.clone(), generation, public: true });
        }
        if drained {
            // While another engine measures free memory on the same accelerator, no engine may release any.
            if !self.has_profiling_neighbour(id) {
                self.sleep_or_stop(id, after_drain);
            }
        } else if hung {
            self.fail_engine(id, FailureCause::Hung);
        } else if cut && !revoked {
            self.revoke_leases(id, Fault::TurnEnded { model: id.model.clone() });
        }
    }

    /// Whether only idleness is a reason to stop the engine.
    fn may_keep_serving(&self, id: &EngineId) -> bool {
        !self.is_unwanted(id) && !self.ordered_stop(id) && self.planner.lost_accelerator(id).is_none()
    }

    /// Puts a drained engine to sleep if it can sleep, else stops it.
    fn sleep_or_stop(&mut self, id: &EngineId, after_drain: AfterDrain) {
        let generation = self.generation(id);
        match after_drain {
            AfterDrain::Sleep(requested) => match self.sleep_level(id, requested) {
                Some(level) => self.emit(Command::Sleep { engine: id.clone(), generation, level }),
                None => self.stop(id),
            },
            AfterDrain::Stop => self.stop(id),
        }
    }

    /// Level at which the engine may sleep; `None`: not at all.
    ///
    /// Level 1 needs room in host RAM, and in `auto` also a model that usually returns before it would be stopped.
    pub(in crate::fleet) fn sleep_level(
        &self,
        id: &EngineId,
        requested: Option<SleepLevel>,
    ) -> Option<SleepLevel> {
        let model = self.planner.models.get(&id.model)?;
        let spec = self.planner.engine_spec(id).filter(|s| s.can_sleep)?;
        if model.residue(&id.variant, spec) >= spec.memory.awake {
            return None;
        }
        let room = self.planner.host_free_for(id) >= self.planner.host_need(id);
        let soon = match (model.usual_gap, spec.idle.stop_after) {
            (Some(gap), Some(after)) => gap < after,
            _ => true,
        };
        match (requested, spec.idle.level) {
            (_, SleepLevelPolicy::Never) => None,
            (_, SleepLevelPolicy::OneOrStop) => room.then_some(SleepLevel::One),
            (Some(SleepLevel::Two), _) | (None, SleepLevelPolicy::Two) => Some(SleepLevel::Two),
            (Some(SleepLevel::One), _) | (None, SleepLevelPolicy::One) => {
                Some(if room { SleepLevel::One } else { SleepLevel::Two })
            }
            (None, SleepLevelPolicy::Auto) => {
                Some(if room && soon { SleepLevel::One } else { SleepLevel::Two })
            }
        }
    }

    /// Returns how to deactivate an engine that has been unused for long enough.
    fn idle_action(&self, id: &EngineId) -> Option<AfterDrain> {
        let e = self.engine(id)?;
        let spec = self.planner.engine_spec(id)?;
        let used = self.planner.in_use_count(e) > 0 || self.waiting(&id.model) > 0;
        if used || self.planner.is_kept_awake(id) || self.ordered_awake(&id.model) {
            return None;
        }
        let past = |after: Option<Millis>| {
            after.and_then(|after| self.planner.idle_replica_at(e, after)).is_some_and(|at| at <= self.now)
        };
        let after_drain = if past(spec.idle.stop_after) {
            AfterDrain::Stop
        } else if past(spec.idle.sleep_after) {
            AfterDrain::Sleep(None)
        } else {
            return None;
        };
        (!self.is_wanted_by_dependents(id)).then_some(after_drain)
    }

    /// Requests a reading, unless one is in progress.
    pub(in crate::fleet) fn request_reading(&mut self, accelerator: &AcceleratorId, after: Millis) {
        let account = self.planner.ledger.accelerators.get(accelerator);
        if account.is_some_and(|a| a.metered && a.may_read(self.now)) {
            self.emit(Command::ReadMeter { accelerator: accelerator.clone(), after });
        }
    }

    fn is_overdue(&self, id: &EngineId) -> bool {
        self.planner.is_overdue(id, self.now)
    }

    fn is_unwanted(&self, id: &EngineId) -> bool {
        self.planner.is_unwanted(id)
    }

    /// Whether another engine measures free memory on one of this engine's accelerators.
    pub(in crate::fleet) fn has_profiling_neighbour(&self, id: &EngineId) -> bool {
        let Some(e) = self.engine(id) else { return false };
        self.planner.engines.moving_on(&e.accelerators).into_iter().any(|other| {
            other.id != *id
                && other.is_profiling()
                && other.accelerators.iter().any(|a| e.accelerators.contains(a))
        })
    }

    /// Ends a start that is no longer wanted; a canary in flight fails first.
    fn abandon_start(&mut self, id: &EngineId) {
        if self.admission(id) == Admission::Closed {
            self.stop(id);
        } else {
            self.fail_engine(id, self.planner.stop_cause(id, self.now));
        }
    }

    pub(in crate::fleet) fn stop(&mut self, id: &EngineId) {
        self.emit_stop(id, None);
    }

    /// Stops a sleeper, or a start that no request waits for, so that `successor` gets the memory.
    pub(in crate::fleet) fn stop_for(&mut self, id: &EngineId, successor: &EngineId) {
        self.emit_stop(id, Some(successor.clone()));
    }

    fn emit_stop(&mut self, id: &EngineId, successor: Option<EngineId>) {
        let (engine, generation) = (id.clone(), self.generation(id));
        let grace = self.planner.settings.timeouts.stop_grace;
        self.emit(Command::Stop { engine, generation, grace, successor });
    }

    pub(in crate::fleet) fn close_gate(
        &mut self,
        id: &EngineId,
        reason: CloseReason,
        after_drain: AfterDrain,
    ) {
        let generation = self.generation(id);
        self.emit(Command::CloseGate {
            engine: id.clone(),
            generation,
            reason,
            after_drain,
            successor: None,
        });
    }

    /// Ends a turn for another engine, which gets the next one.
    pub(in crate::fleet) fn close_gate_for(
        &mut self,
        id: &EngineId,
        after_drain: AfterDrain,
        successor: &EngineId,
    ) {
        let (engine, generation) = (id.clone(), self.generation(id));
        self.emit(Command::CloseGate {
            engine,
            generation,
            reason: CloseReason::Turn,
            after_drain,
            successor: Some(successor.clone()),
        });
    }

    fn revoke_leases(&mut self, id: &EngineId, fault: Fault) {
        let generation: Generation = self.generation(id);
        self.emit(Command::RevokeLeases { engine: id.clone(), generation, fault });
    }

    /// Closes the gate and revokes the leases; the engine is stopped once they end.
    pub(super) fn fail_engine(&mut self, id: &EngineId, cause: FailureCause) {
        self.close_gate(id, CloseReason::Fault, AfterDrain::Stop);
        let fault = self.engine_failed_fault(id, cause);
        self.revoke_leases(id, fault);
    }

    fn engine_failed_fault(&self, id: &EngineId, cause: FailureCause) -> Fault {
        Fault::EngineFailed { model: id.model.clone(), cause, wait: None }
    }
}
