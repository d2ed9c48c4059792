//! What each engine's own life demands, whoever else waits: launches that may proceed, gates that close, drains that
//! end, deadlines that passed, sleep and stop by idleness.

use super::{
    command::{Command, Then, Why},
    plan::Draft,
};
use crate::{
    engine::{Door, Engine, state::State},
    fault::{Cause, Fault},
    model::{AcceleratorId, EngineId, Level, LevelPolicy, OnDeadline},
    units::{Bytes, Generation, Millis},
};

impl Draft<'_> {
    pub(super) fn advance(&mut self) {
        self.attend();
        self.seek_lost();
    }

    /// Looks at every engine that may demand something.
    pub(super) fn attend(&mut self) {
        let astir = self.planner.astir(self.now);
        if cfg!(debug_assertions) {
            self.advance_all(&astir);
        } else {
            astir.iter().for_each(|id| self.live(id));
        }
    }

    fn live(&mut self, id: &EngineId) {
        self.bury(id);
        if !self.planner.role.decides() {
            return self.follow_gate(id);
        }
        self.step(id);
        self.settle_residue(id);
    }

    /// Looks at every engine, and finds that those who were passed by demand nothing indeed.
    fn advance_all(&mut self, astir: &[EngineId]) {
        let all: Vec<EngineId> = self.planner.engines.values().map(|e| e.id.clone()).collect();
        for id in &all {
            let before = self.decided();
            self.live(id);
            let calm = self.decided() == before;
            debug_assert!(calm || astir.binary_search(id).is_ok(), "{id} was passed by and is not calm");
        }
    }

    fn seek_lost(&mut self) {
        let accounts = self.planner.ledger.accelerators.awaited();
        let due = accounts.filter(|(_, a)| a.sought_at().is_some_and(|at| at <= self.now));
        for accelerator in due.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            self.meter(&accelerator, Millis::ZERO);
        }
    }

    pub(super) fn engine(&self, id: &EngineId) -> Option<&Engine> {
        self.planner.engines.get(id)
    }

    /// The gate of a process that ended by itself: shut, and its holders told.
    fn bury(&mut self, id: &EngineId) {
        let Some((generation, cause)) = self.engine(id).and_then(|e| e.orphan.clone()) else {
            return;
        };
        let engine = id.clone();
        self.emit(Command::CloseGate { engine, generation, why: Why::Fault, then: Then::Stop, to: None });
        let fault = Fault::EngineFailed { model: id.model.clone(), cause, wait: None };
        self.emit(Command::Revoke { engine: id.clone(), generation, fault });
    }

    fn step(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        let generation = e.generation;
        if self.overdue(id) {
            return if e.door == Door::Closed { self.stop(id) } else { self.fault(id, Cause::Timeout) };
        }
        match e.state.clone() {
            State::Cold | State::Backoff { .. } => self.launch(id),
            State::Launching | State::Loading | State::Waking { .. } => {
                if self.unwanted(id) || self.ordered_stop(id) || self.planner.lost_accelerator(id).is_some() {
                    self.abandon(id);
                } else if self.planner.shutdown.is_some() && e.door != Door::Closed {
                    // It goes on starting; only its first exchange ends.
                    self.close(id, Why::Shutdown, Then::Stop);
                    self.revoke(id, Fault::ShuttingDown);
                } else if e.is_to_be_held() && self.planner.shutdown.is_none() {
                    // Once everything ends nobody is let in anyhow, and a closed gate stays so.
                    self.emit(Command::Hold { engine: id.clone(), generation });
                }
            }
            State::Awake => self.awake(id),
            State::Draining { why, then, revoked, drained } => self.draining(id, why, then, revoked, drained),
            State::FallingAsleep { .. } => {
                if self.planner.shutdown == Some(true) {
                    self.stop(id);
                }
            }
            State::Asleep { level } => self.asleep(id, level),
            State::Failing { drained: true, .. } => self.stop(id),
            State::Failing { cause, .. } => {
                if e.door != Door::Closed {
                    self.fault(id, cause);
                }
            }
            State::Stopping { .. } => {
                if e.stop_by <= self.now {
                    let (engine, grace) = (id.clone(), Millis::ZERO);
                    self.emit(Command::Stop { engine, generation, grace, to: None });
                }
            }
        }
    }

    /// A reservation that was confirmed is used; one whose model went away in between is given back.
    fn launch(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        let Some(placing) = e.placing.clone().filter(|p| p.confirmed) else {
            return;
        };
        let (engine, generation) = (id.clone(), e.generation);
        if self.unwanted(id) || self.planner.shutdown.is_some() || self.is_in_vain(id, &placing) {
            return self.emit(Command::Shrink { engine, generation, bytes: Bytes::ZERO, host: Bytes::ZERO });
        }
        if self.is_too_early(id, &placing) {
            return;
        }
        let accelerators = placing.accelerators;
        self.emit(Command::Launch { engine, generation, accelerators, bytes: placing.bytes });
    }

    fn asleep(&mut self, id: &EngineId, level: Level) {
        let Some(e) = self.engine(id) else { return };
        let (engine, generation) = (id.clone(), e.generation);
        let unused = e.idle_since().max(e.since);
        if self.unwanted(id) || self.planner.lost_accelerator(id).is_some() || self.ordered_stop(id) {
            return self.stop(id);
        }
        if let Some(placing) = e.placing.as_ref().filter(|p| p.confirmed).cloned() {
            if self.planner.shutdown.is_some() || self.is_in_vain(id, &placing) {
                let host = self.planner.ledger.host.booked.of(id).unwrap_or_default();
                let bytes = self.planner.residue_of(id);
                return self.emit(Command::Shrink { engine, generation, bytes, host });
            }
            if self.is_too_early(id, &placing) {
                return;
            }
            return self.emit(Command::Wake { engine, generation, level });
        }
        let stop_after = self.planner.spec(&id.model).and_then(|s| s.idle.stop_after);
        let wanted = self.waiting(&id.model) > 0 || e.placing.is_some() || self.planner.is_kept(id);
        let due = stop_after.is_some_and(|after| unused + after <= self.now);
        if due && !wanted && !self.is_wanted_for_others(id) {
            self.stop(id);
        }
    }

    fn awake(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        let hung = e.hung_at(&self.planner.settings.timeouts).is_some_and(|at| at <= self.now);
        let generation = e.generation;
        if hung {
            self.fault(id, Cause::Hung);
        } else if self.planner.lost_accelerator(id).is_some() {
            self.fault(id, Cause::AcceleratorLost);
        } else if self.planner.shutdown == Some(true)
            || (self.planner.shutdown.is_some() && e.door != Door::Closed)
        {
            self.close(id, Why::Shutdown, Then::Stop);
            self.revoke(id, Fault::ShuttingDown);
        } else if self.planner.shutdown.is_some() {
            // Engines live on; their gate stays shut.
        } else if self.unwanted(id) {
            self.close(id, Why::Outdated, Then::Stop);
        } else if self.ordered_stop(id) {
            self.close(id, Why::Order, Then::Stop);
            self.revoke(id, self.failed(id, Cause::Stopped));
        } else if let Some(level) = self.ordered_sleep(id) {
            self.close(id, Why::Order, Then::Sleep(level));
        } else if let Some(then) = self.idle(id) {
            self.close(id, Why::Idle, then);
        } else if e.is_to_be_held() {
            self.emit(Command::Hold { engine: id.clone(), generation });
        } else if e.gated {
            // Until its stub says otherwise.
        } else if e.door != Door::Public {
            self.emit(Command::OpenGate { engine: id.clone(), generation, public: true });
        } else {
            self.weigh(id);
        }
    }

    /// One reading once it is awake, for what it really takes: its next reservation goes by that.
    fn weigh(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        let unread = |a: &&AcceleratorId| {
            self.planner.ledger.accelerators.get(a).is_some_and(|account| account.is_unread_since(e.turn))
        };
        for accelerator in e.accelerators.iter().filter(unread).cloned().collect::<Vec<_>>() {
            self.emit(Command::Meter { accelerator, after: Millis::ZERO });
        }
    }

    fn draining(&mut self, id: &EngineId, why: Why, then: Then, revoked: bool, drained: bool) {
        let Some(e) = self.engine(id) else { return };
        let (generation, since) = (e.generation, e.since);
        let turns = &self.planner.settings.turns;
        let hung = e.hung_at(&self.planner.settings.timeouts).is_some_and(|at| at <= self.now);
        let cut = turns.on_deadline == OnDeadline::Cut
            && matches!(why, Why::Turn | Why::Outdated | Why::Order)
            && since + turns.drain_deadline <= self.now;
        if self.planner.shutdown.is_some() && why != Why::Shutdown {
            self.close(id, Why::Shutdown, Then::Stop);
            return self.revoke(id, Fault::ShuttingDown);
        }
        if why == Why::Shutdown && self.planner.shutdown == Some(false) {
            return;
        }
        if self.ordered_stop(id) && (why, then) != (Why::Order, Then::Stop) && !drained {
            self.close(id, Why::Order, Then::Stop);
            return self.revoke(id, self.failed(id, Cause::Stopped));
        }
        // Also when it is drained already and only waits for a neighbour.
        let kept = why == Why::StaysAwake && (self.planner.is_kept(id) || self.ordered_awake(&id.model));
        let wanted = kept || self.waiting(&id.model) > 0 || self.is_wanted_for_others(id);
        let stays = why == Why::Idle || why == Why::StaysAwake && self.may_stay(id);
        if stays && wanted && !hung {
            return self.emit(Command::OpenGate { engine: id.clone(), generation, public: true });
        }
        if drained {
            // While another engine measures free memory on the same accelerator, nothing may give any back.
            if !self.profiled_beside(id) {
                self.put_away(id, then);
            }
        } else if hung {
            self.fault(id, Cause::Hung);
        } else if cut && !revoked {
            self.revoke(id, Fault::TurnOver { model: id.model.clone() });
        }
    }

    /// Nothing but its idleness speaks against its serving on.
    fn may_stay(&self, id: &EngineId) -> bool {
        !self.unwanted(id) && !self.ordered_stop(id) && self.planner.lost_accelerator(id).is_none()
    }

    /// The gate is drained: asleep if it can, else stopped.
    fn put_away(&mut self, id: &EngineId, then: Then) {
        let generation = self.generation(id);
        match then {
            Then::Sleep(wish) => match self.sleep_level(id, wish) {
                Some(level) => self.emit(Command::Sleep { engine: id.clone(), generation, level }),
                None => self.stop(id),
            },
            Then::Stop => self.stop(id),
        }
    }

    /// How deep it may sleep; `None`: not at all. Level 1 only while the host's RAM has room, and in `auto` only for
    /// a model that usually comes back before it would be stopped.
    pub(super) fn sleep_level(&self, id: &EngineId, wish: Option<Level>) -> Option<Level> {
        let model = self.planner.models.get(&id.model)?;
        let spec = model.spec.as_deref().filter(|s| s.can_sleep)?;
        if model.residue(spec) >= spec.memory.awake {
            return None;
        }
        let room = self.planner.ledger.host.free() >= self.planner.host_need(id);
        let soon = match (model.gap, spec.idle.stop_after) {
            (Some(gap), Some(after)) => gap < after,
            _ => true,
        };
        match (wish, spec.idle.level) {
            (_, LevelPolicy::Never) => None,
            (_, LevelPolicy::OnlyOne) => room.then_some(Level::One),
            (Some(Level::Two), _) | (None, LevelPolicy::Two) => Some(Level::Two),
            (Some(Level::One), _) | (None, LevelPolicy::One) => {
                Some(if room { Level::One } else { Level::Two })
            }
            (None, LevelPolicy::Auto) => Some(if room && soon { Level::One } else { Level::Two }),
        }
    }

    /// Unused for long enough: what to do with it.
    fn idle(&self, id: &EngineId) -> Option<Then> {
        let e = self.engine(id)?;
        let spec = self.planner.spec(&id.model)?;
        let used = self.planner.uses(e) > 0 || self.waiting(&id.model) > 0;
        if used || self.planner.is_kept(id) || self.ordered_awake(&id.model) {
            return None;
        }
        let past = |after: Option<Millis>| {
            after.and_then(|after| self.planner.idle_at(e, after)).is_some_and(|at| at <= self.now)
        };
        let then = if past(spec.idle.stop_after) {
            Then::Stop
        } else if past(spec.idle.sleep_after) {
            Then::Sleep(None)
        } else {
            return None;
        };
        (!self.is_wanted_for_others(id)).then_some(then)
    }

    /// Asks for a reading, unless one is under way.
    pub(super) fn meter(&mut self, accelerator: &AcceleratorId, after: Millis) {
        let account = self.planner.ledger.accelerators.get(accelerator);
        if account.is_some_and(|a| a.metered && a.may_ask(self.now)) {
            self.emit(Command::Meter { accelerator: accelerator.clone(), after });
        }
    }

    fn overdue(&self, id: &EngineId) -> bool {
        self.planner.overdue(id, self.now)
    }

    fn unwanted(&self, id: &EngineId) -> bool {
        self.planner.unwanted(id)
    }

    /// Some other engine measures free memory on one of its accelerators.
    pub(super) fn profiled_beside(&self, id: &EngineId) -> bool {
        let Some(e) = self.engine(id) else { return false };
        self.planner.engines.near(&e.accelerators).into_iter().any(|other| {
            other.id != *id
                && other.is_profiling()
                && other.accelerators.iter().any(|a| e.accelerators.contains(a))
        })
    }

    /// Ends a start whose model is not wanted any more; a canary that is out is told first.
    fn abandon(&mut self, id: &EngineId) {
        if self.door(id) == Door::Closed {
            self.stop(id);
        } else {
            self.fault(id, self.planner.cause_of_end(id, self.now));
        }
    }

    pub(super) fn stop(&mut self, id: &EngineId) {
        self.end(id, None);
    }

    /// Ends a sleeper, or a start that nobody waits for, so that this engine has the memory.
    pub(super) fn stop_for(&mut self, id: &EngineId, to: &EngineId) {
        self.end(id, Some(to.clone()));
    }

    fn end(&mut self, id: &EngineId, to: Option<EngineId>) {
        let (engine, generation) = (id.clone(), self.generation(id));
        let grace = self.planner.settings.timeouts.stop_grace;
        self.emit(Command::Stop { engine, generation, grace, to });
    }

    pub(super) fn close(&mut self, id: &EngineId, why: Why, then: Then) {
        let generation = self.generation(id);
        self.emit(Command::CloseGate { engine: id.clone(), generation, why, then, to: None });
    }

    /// Ends a turn for another model, which is to have the next one.
    pub(super) fn close_for(&mut self, id: &EngineId, then: Then, to: &EngineId) {
        let (engine, generation) = (id.clone(), self.generation(id));
        self.emit(Command::CloseGate { engine, generation, why: Why::Turn, then, to: Some(to.clone()) });
    }

    fn revoke(&mut self, id: &EngineId, fault: Fault) {
        let generation: Generation = self.generation(id);
        self.emit(Command::Revoke { engine: id.clone(), generation, fault });
    }

    /// Gate, tell the holders, and stop once they are gone.
    fn fault(&mut self, id: &EngineId, cause: Cause) {
        self.close(id, Why::Fault, Then::Stop);
        let fault = self.failed(id, cause);
        self.revoke(id, fault);
    }

    fn failed(&self, id: &EngineId, cause: Cause) -> Fault {
        Fault::EngineFailed { model: id.model.clone(), cause, wait: None }
    }
}
