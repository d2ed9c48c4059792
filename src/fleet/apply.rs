//! Recording a command: what is true from the moment it is given, whatever its outcome will be.
//!
//! The one place where a decision changes the state; planning and `issued` both come through here.

use std::sync::Arc;

use super::{
    budget::Account,
    command::{Command, Then, Why},
    event::Learned,
    plan::Planner,
};
use crate::{
    engine::{Door, Engine, Placing, Proof, STOP_AGAIN, state::State},
    fault::Cause,
    model::{AcceleratorId, EngineId, Level, ModelName},
    units::{Bytes, Generation, Tick},
};

impl Planner {
    pub(super) fn apply(&mut self, command: &Command, now: Tick) {
        match command {
            Command::Reserve { engine, generation, accelerators, bytes, host: _ } => {
                let patient = self.needs.concern(&engine.model);
                let accelerators = accelerators.clone();
                let placing = Placing { accelerators, bytes: *bytes, confirmed: false, patient };
                let spec = self.spec(&engine.model);
                let units = spec.and_then(|spec| spec.accelerators.units());
                let fingerprint = spec.map(|spec| spec.fingerprint).filter(|_| patient);
                self.ledger.book(engine, &placing.accelerators, *bytes, units);
                self.with(engine, |e| {
                    // What waits for long is started as it was reserved for, or not at all.
                    if let Some(fingerprint) = fingerprint.filter(|_| !e.state.has_process()) {
                        e.fingerprint = fingerprint;
                    }
                    e.generation = *generation;
                    e.placing = Some(placing);
                    e.began = now;
                });
            }
            Command::Shrink { engine, bytes, host, .. } => self.shrink(engine, *bytes, *host, now),
            Command::Launch { engine, accelerators, .. } => self.launched(engine, accelerators.clone(), now),
            Command::Wake { engine, level, .. } => {
                self.begins(engine, now);
                self.with(engine, |e| {
                    e.placing = None;
                    e.proof = Proof::NotReady;
                    e.cold = false;
                    e.before.clear();
                    e.become_state(State::Waking { level: *level }, now);
                })
            }
            Command::Sleep { engine, level, .. } => self.put_to_sleep(engine, *level, now),
            Command::Stop { engine, grace, to, .. } => {
                let (cause, why) = (self.cause_of_end(engine, now), self.why_in_its_sleep(engine));
                self.with(engine, |e| {
                    e.stop_by = now + *grace + STOP_AGAIN;
                    if !matches!(e.state, State::Stopping { .. }) {
                        e.become_state(State::Stopping { cause }, now);
                        why.into_iter().for_each(|why| e.stops_for(why));
                        to.iter().for_each(|to| e.gives_way_to(&to.model));
                    }
                    e.placing = None;
                    e.shrinking = None;
                });
            }
            Command::Meter { accelerator, .. } => {
                let asked = |account: &mut Account| (account.asked, account.tried) = (Some(now), now);
                self.ledger.accelerators.change(accelerator, asked);
            }
            Command::Probe { engine, .. } => self.with(engine, |e| e.proof = Proof::Out(now)),
            Command::OpenGate { engine, public, .. } => self.open(engine, *public, now),
            Command::CloseGate { engine, generation, why, then, to } => {
                self.close(engine, *generation, *why, *then, now);
                if let Some(to) = to {
                    self.with(engine, |e| (e.yielded, e.yielded_to) = (now, Some(to.clone())));
                }
            }
            Command::Revoke { engine, generation, .. } => self.with(engine, |e| {
                if let (State::Draining { revoked, .. }, true) = (&mut e.state, e.generation == *generation) {
                    *revoked = true;
                }
            }),
            Command::Hold { engine, .. } => self.with(engine, |e| {
                e.door = Door::Held;
                e.stub_watched = true;
            }),
            Command::Grant { engine, canary, .. } => self.with(engine, |e| {
                e.granted(now);
                if *canary {
                    e.proof = Proof::Out(now);
                }
            }),
            Command::Refuse { .. } => {}
            Command::Finish { operation, .. } => {
                if let Some(operation) = self.operations.remove(operation) {
                    self.engines.touch(&operation.model);
                }
            }
        }
    }

    fn with(&mut self, engine: &EngineId, change: impl FnOnce(&mut Engine)) {
        self.engines.change(engine, change);
    }

    /// Copies nothing when that is known already.
    pub(super) fn learn(&mut self, model: &ModelName, change: impl FnOnce(&mut Learned)) {
        let Some(known) = self.models.get(model).map(|model| model.learned) else { return };
        let mut learned = known;
        change(&mut learned);
        if learned != known
            && let Some(model) = Arc::make_mut(&mut self.models).get_mut(model)
        {
            model.learned = learned;
        }
    }

    fn shrink(&mut self, engine: &EngineId, bytes: Bytes, host: Bytes, now: Tick) {
        let stays = self.engines.get(engine).is_some_and(|e| e.state.has_process());
        self.ledger.shrink(engine, bytes, stays, now);
        if host == Bytes::ZERO {
            self.ledger.host.booked.remove(engine);
        } else if let Some(booked) = self.ledger.host.booked.of(engine) {
            self.ledger.host.booked.book(engine, host.min(booked));
        }
        let asleep = self.engines.get(engine).is_some_and(|e| matches!(e.state, State::Asleep { .. }));
        if asleep && let Some(spec) = self.spec(&engine.model) {
            let (keeps, declared) = (spec.accelerators.on_each(bytes), spec.memory.asleep);
            let residue = (keeps > declared).then_some(keeps);
            self.learn(&engine.model, |learned| learned.residue = residue);
        }
        self.with(engine, |e| {
            e.shrinking = None;
            e.placing = None;
        });
    }

    /// What was reserved for long, until all that it needs served, takes no longer to start for that.
    fn begins(&mut self, engine: &EngineId, now: Tick) {
        let patient = |e: &Engine| e.placing.as_ref().is_some_and(|placing| placing.patient);
        if self.engines.get(engine).is_some_and(patient) {
            self.with(engine, |e| e.began = now);
        }
    }

    fn launched(&mut self, engine: &EngineId, accelerators: Vec<AcceleratorId>, now: Tick) {
        self.begins(engine, now);
        let spec = self.spec(&engine.model);
        let (measures, fingerprint) = spec.map_or((true, 0), |s| (s.measures(), s.fingerprint));
        let used = |on: &AcceleratorId| self.ledger.accelerators.get(on)?.used_by_one(engine, now);
        let before = accelerators.iter().filter_map(|on| Some((on.clone(), used(on)?))).collect();
        self.with(engine, |e| {
            e.placing = None;
            e.before = before;
            e.accelerators = accelerators;
            e.fingerprint = fingerprint;
            e.profiled = !measures;
            e.proof = Proof::NotReady;
            e.cold = true;
            e.last_end = Tick(0);
            e.become_state(State::Launching, now);
        });
    }

    /// Host RAM is booked here, before the call that makes the engine take it.
    fn put_to_sleep(&mut self, engine: &EngineId, level: Level, now: Tick) {
        if level == Level::One {
            let host = self.host_need(engine);
            self.ledger.host.booked.book(engine, host);
        }
        self.with(engine, |e| e.become_state(State::FallingAsleep { level }, now));
    }

    fn open(&mut self, engine: &EngineId, public: bool, now: Tick) {
        if self.engines.get(engine).is_some_and(Engine::stays_awake) {
            // It holds nothing there, as after a wake.
            self.ledger.host.booked.remove(engine);
        }
        self.with(engine, |e| {
            e.door = if public { Door::Public } else { Door::Waiters };
            e.forsaken = false;
            if matches!(e.state, State::Draining { .. }) {
                e.is_called_back(now);
            }
        });
    }

    fn close(&mut self, engine: &EngineId, generation: Generation, why: Why, then: Then, now: Tick) {
        let cause = self.cause_of_end(engine, now);
        let decides = self.role.decides();
        self.with(engine, |e| {
            if e.orphan.as_ref().is_some_and(|(orphan, _)| *orphan == generation) {
                e.orphan = None;
                return;
            }
            e.door = Door::Closed;
            if !decides {
                // Its state is somebody else's to say.
                return;
            }
            match (&mut e.state, why) {
                (State::Failing { .. }, _) => {}
                (state, Why::Shutdown) if state.is_starting() => {}
                (_, Why::Fault) => {
                    // One that drains is given up only when it hangs.
                    let drains = matches!(e.state, State::Draining { .. }) && cause == Cause::Stopped;
                    let cause = if drains { Cause::Hung } else { cause };
                    e.become_state(State::Failing { cause, drained: false }, now);
                }
                (State::Draining { why: old, then: old_then, .. }, _) => {
                    // An idle drain that somebody now counts on, or an order on top of a turn: the clock goes on.
                    *old = why;
                    *old_then = then;
                }
                _ => {
                    let state = State::Draining { why, then, revoked: false, drained: false };
                    e.become_state(state, now);
                }
            }
        });
    }
}

impl Planner {
    /// Why an engine that sleeps is stopped now; `None` of any other, and where it is no decision of ours.
    fn why_in_its_sleep(&self, id: &EngineId) -> Option<Why> {
        let is_asleep = self.engines.get(id).is_some_and(|e| matches!(e.state, State::Asleep { .. }));
        if !is_asleep || self.lost_accelerator(id).is_some() {
            return None;
        }
        Some(if self.shutdown.is_some() {
            Why::Shutdown
        } else if self.unwanted(id) {
            Why::Outdated
        } else if self.ordered_stop(id) {
            Why::Order
        } else {
            Why::Idle
        })
    }

    /// Why an engine is being ended, from what it was doing. What nobody wants any more, or what makes room, has not
    /// failed, nor has what does not fall asleep: it served. What should have been ready by now has.
    pub(super) fn cause_of_end(&self, id: &EngineId, now: Tick) -> Cause {
        let Some(e) = self.engines.get(id) else { return Cause::Stopped };
        match &e.state {
            State::Failing { cause, .. } | State::Stopping { cause } => cause.clone(),
            state if state.is_starting() && (self.unwanted(id) || self.ordered_stop(id)) => Cause::Stopped,
            State::Asleep { .. } | State::FallingAsleep { .. } => Cause::Stopped,
            _ if self.lost_accelerator(id).is_some() => Cause::AcceleratorLost,
            State::Draining { .. } => Cause::Stopped,
            State::Awake => Cause::Hung,
            state if state.is_starting() && !self.overdue(id, now) => Cause::Stopped,
            _ => Cause::Timeout,
        }
    }
}
