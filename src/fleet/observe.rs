//! Taking note of what happened. No decision is made here: an observation changes the state, the next plan draws the
//! conclusions.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    budget::{Account, Reading},
    command::{Then, Why},
    event::{Event, Learned, Order, Verdict},
    needs::Needs,
    orders::Operation,
    plan::{Model, Planner},
    role::Role,
};
use crate::{
    engine::{Door, Engine, Proof, backoff, clients::Clients, past::Symptoms, state::State},
    fault::Cause,
    model::{Configuration, EngineId, Level, ModelName},
    units::{Bytes, Generation, Millis, Tick},
};

impl Planner {
    pub(super) fn observe(&mut self, event: &Event, now: Tick) {
        if let Event::Resumed { state } = event {
            self.clone_from(state);
            self.needs = Needs::of(&self.models);
            return self.glance();
        }
        self.settle(now);
        self.note(event, now);
        self.glance();
    }

    fn note(&mut self, event: &Event, now: Tick) {
        match event {
            Event::Configured { configuration } => self.configure(configuration, now),
            Event::Recalled { model, learned } => {
                self.learn(model, |known| *known = *learned);
            }
            Event::AdoptionDone => self.adoption_done(now),
            Event::Led { leads } => self.led(*leads, now),
            Event::Cluster { answers } => self.answers(*answers, now),
            Event::Gateways { others } => {
                self.alone = !others;
                self.calm.forget();
            }
            Event::LivesFrom { generation } => self.lives_from(*generation),
            Event::Published { engine, generation, published } => {
                self.published(engine, *generation, published.as_ref(), now);
            }
            Event::Arrived { waiter } => self.wanted(&waiter.model, now),
            Event::Left { .. } | Event::Served { .. } | Event::Shares { .. } | Event::Resumed { .. } => {}
            Event::Elsewhere { gateway, demand } => self.heard(gateway, demand.as_ref(), now),
            Event::Memory { accelerator, used, by_engine } => {
                let reading = Reading { used: *used, by_engine: by_engine.clone(), at: now };
                self.metered(accelerator, reading, now);
            }
            Event::AcceleratorLost { accelerator } => self.set_health(accelerator, false, now),
            Event::AcceleratorBack { accelerator } => self.set_health(accelerator, true, now),
            Event::Adopted { engine, generation, found } => self.adopt(engine, *generation, found, now),
            Event::Operator { operation, model, order } => self.ordered(*operation, model, *order, now),
            Event::Shutdown { stop_engines } => self.shutdown = Some(*stop_engines),
            Event::Used { engine, generation, .. }
            | Event::LeftOut { engine, generation, .. }
            | Event::Gated { engine, generation }
            | Event::Ungated { engine, generation }
            | Event::Drained { engine, generation }
            | Event::Canary { engine, generation, .. }
            | Event::Placed { engine, generation, .. }
            | Event::Conflict { engine, generation }
            | Event::Started { engine, generation, .. }
            | Event::Profiled { engine, generation }
            | Event::Ready { engine, generation }
            | Event::Slept { engine, generation, .. }
            | Event::SleepFailed { engine, generation, .. }
            | Event::WakeFailed { engine, generation, .. }
            | Event::StartFailed { engine, generation, .. }
            | Event::Gone { engine, generation, .. }
            | Event::Shows { engine, generation, .. }
            | Event::Observed { engine, generation, .. }
            | Event::Health { engine, generation, .. } => self.of_engine(engine, *generation, event, now),
        }
    }

    /// An outcome or observation of one engine; of an older life it is ignored.
    fn of_engine(&mut self, id: &EngineId, generation: Generation, event: &Event, now: Tick) {
        match self.engines.get(id) {
            Some(engine) if engine.generation == generation => {}
            _ => return,
        }
        let own = matches!(
            event,
            Event::Used { .. } | Event::LeftOut { .. } | Event::Gated { .. } | Event::Ungated { .. }
        );
        if self.role == Role::Follows && !own {
            // Of its life the leader tells; an outcome of what was ordered before may contradict that.
            return;
        }
        match event {
            Event::Canary { verdict, .. } => self.proved(id, verdict, now),
            Event::Conflict { .. } => self.conflict(id, now),
            Event::Slept { level, .. } => self.slept(id, *level, now),
            Event::Gone { cause, .. } => self.gone(id, cause, now),
            Event::Observed { used, .. } => self.observed(id, *used),
            _ => {
                self.engines.change(id, |engine| engine.hears(event, now));
            }
        }
    }

    fn configure(&mut self, configuration: &Configuration, now: Tick) {
        self.settings = configuration.settings.clone();
        self.ledger.configure(&configuration.accelerators, self.settings.host_memory);
        let models = Arc::make_mut(&mut self.models);
        let before: BTreeMap<ModelName, u64> = models
            .iter_mut()
            .filter_map(|(name, model)| Some((name.clone(), model.spec.take()?.fingerprint)))
            .collect();
        for spec in &configuration.models {
            let model = Arc::make_mut(&mut self.models).entry(spec.name.clone()).or_insert_with(|| Model {
                spec: None,
                pin: None,
                learned: Learned::default(),
                gap: None,
                since: now,
            });
            model.spec = Some(Arc::new(spec.clone()));
            // What failed was another command.
            let other = before.get(&spec.name).is_some_and(|fingerprint| *fingerprint != spec.fingerprint);
            if other && self.role.decides() {
                self.forgive(&spec.name, now);
            }
            for replica in 0..spec.replicas {
                let id = EngineId::new(spec.name.clone(), replica);
                let generation = self.last_life;
                if !self.engines.contains_key(&id) {
                    self.engines.insert(Engine { generation, ..Engine::new(id, now) });
                }
            }
        }
        self.needs = Needs::of(&self.models);
        self.engines.loosen();
        self.calm.forget();
        self.settle(now);
        // A model can have been configured without a replica: no engine leaves with it.
        for name in before.keys() {
            self.forget(name);
        }
        if !self.role.decides() {
            // The leader may have been told earlier, and published engines of what was not configured here.
            let all: Vec<EngineId> = self.engines.values().map(|e| e.id.clone()).collect();
            all.iter().for_each(|id| self.book_as_seen(id, now));
        }
    }

    fn forgive(&mut self, model: &ModelName, now: Tick) {
        let ids: Vec<EngineId> = self.engines.of(model).map(|e| e.id.clone()).collect();
        for id in &ids {
            self.engines.change(id, |engine| {
                engine.failures = 0;
                engine.fruitless = 0;
                if engine.failure().is_some() {
                    engine.past = None;
                }
                if matches!(engine.state, State::Backoff { .. }) {
                    engine.become_state(State::Cold, now);
                }
            });
        }
    }

    /// A request came that had to wait: how long had nobody asked?
    pub(super) fn wanted(&mut self, model: &ModelName, now: Tick) {
        // Looked at first: a change copies what others still read.
        let resting: Vec<EngineId> =
            self.engines.of(model).filter(|e| e.rests()).map(|e| e.id.clone()).collect();
        for id in &resting {
            self.engines.change(id, |e| e.is_asked_for(now, None));
        }
        let awake = self.engines.of(model).any(|e| e.serves() || e.is_held());
        let last = self.engines.of(model).map(|e| e.last_end).max();
        if let (Some(last), false) = (last, awake)
            && last > Tick(0)
            && let Some(model) = Arc::make_mut(&mut self.models).get_mut(model)
        {
            let seen = now.since(last);
            model.gap = Some(model.gap.map_or(seen, |gap| Millis((gap.0 * 3 + seen.0) / 4)));
        }
    }

    fn metered(&mut self, accelerator: &crate::model::AcceleratorId, reading: Reading, now: Tick) {
        if self.ledger.accelerators.get(accelerator).is_none() {
            return;
        }
        for (id, bytes) in reading.by_engine.iter().flatten() {
            let settled = self.engines.get(id).is_some_and(|e| e.state == State::Awake);
            let each = self.spec(&id.model).map_or(*bytes, |spec| spec.accelerators.on_each(*bytes));
            if settled {
                self.learn(&id.model, |learned| {
                    learned.peak = Some(learned.peak.unwrap_or_default().max(each));
                });
            }
        }
        self.ledger.accelerators.change(accelerator, |account| account.read(reading));
        self.grown(accelerator, now);
    }

    /// Learns the peak of an engine that started alone, from the first reading after it serves. Later readings may include memory that
    /// another program has taken since.
    fn grown(&mut self, accelerator: &crate::model::AcceleratorId, now: Tick) {
        let Some(account) = self.ledger.accelerators.get(accelerator) else { return };
        let found = account.booked.iter().find_map(|(id, _)| {
            let e = self.engines.get(id).filter(|e| e.state == State::Awake && e.turn <= now)?;
            let (_, before) = e.before.iter().find(|(on, _)| on == accelerator)?;
            Some((id.clone(), *before))
        });
        let Some((id, before)) = found else { return };
        let used = account.used_by_one(&id, now);
        self.engines.change(&id, |e| e.before.retain(|(on, _)| on != accelerator));
        let Some(own) = used.map(|used| used.saturating_sub(before)) else { return };
        let each = self.spec(&id.model).map_or(own, |spec| spec.accelerators.on_each(own));
        self.learn(&id.model, |learned| {
            learned.peak = Some(learned.peak.unwrap_or_default().max(each));
        });
    }

    fn observed(&mut self, id: &EngineId, used: Bytes) {
        let asleep = |e: &Engine| matches!(e.state, State::FallingAsleep { .. } | State::Asleep { .. });
        if self.engines.get(id).is_some_and(|e| e.state.has_process() && !asleep(e)) {
            self.learn(&id.model, |known| known.observed = known.observed.max(Some(used)));
        }
    }

    fn set_health(&mut self, accelerator: &crate::model::AcceleratorId, healthy: bool, now: Tick) {
        self.ledger.accelerators.change(accelerator, |account| {
            account.healthy = healthy;
            (account.asked, account.tried) = (None, now);
        });
    }

    fn proved(&mut self, id: &EngineId, verdict: &Verdict, now: Tick) {
        let Some(engine) = self.engines.get(id) else { return };
        if !matches!(engine.proof, Proof::Out(_)) || !engine.state.is_starting() {
            return;
        }
        let (took, cold) = (now.since(engine.began), engine.cold);
        self.engines.change(id, |engine| match verdict {
            Verdict::Passed => {
                engine.turn = now;
                engine.clients = Clients::default();
                engine.last_progress = now;
                engine.failing_since = None;
                engine.fruitless = 0;
                engine.become_state(State::Awake, now);
            }
            Verdict::Failed(cause) => engine.fail(cause.clone(), now),
            Verdict::Inconclusive => engine.proof = Proof::Wanted,
        });
        if *verdict == Verdict::Passed {
            self.had_its_turn(id);
            self.ledger.host.booked.remove(id);
            self.learn(&id.model, |learned| {
                let learned = if cold { &mut learned.start } else { &mut learned.wake };
                *learned = Some(learned.map_or(took, |old| Millis((old.0 * 3 + took.0) / 4)));
            });
        }
    }

    /// Those who went for it have their old place again.
    fn had_its_turn(&mut self, id: &EngineId) {
        let others = self.engines.values().filter(|e| e.yielded_to.as_ref() == Some(id));
        let others: Vec<EngineId> = others.map(|e| e.id.clone()).collect();
        for other in &others {
            self.engines.change(other, |e| e.yielded_to = None);
        }
    }

    fn conflict(&mut self, id: &EngineId, now: Tick) {
        let asleep = self.engines.change(id, |engine| {
            engine.placing.take()?;
            let asleep = matches!(engine.state, State::Asleep { .. });
            if !asleep {
                // Somebody else's booking comes and goes; what the ledger knows and the decisions do not (a quota) stays.
                let until = now + Millis(250 << engine.conflicts.min(6));
                engine.conflicts += 1;
                engine.become_state(State::Backoff { until, cause: Cause::Refused }, now);
            }
            Some(asleep)
        });
        let Some(asleep) = asleep.flatten() else { return };
        let keeps = if asleep { self.residue_of(id) } else { Bytes::ZERO };
        self.ledger.shrink(id, keeps, asleep, now);
    }

    fn slept(&mut self, id: &EngineId, level: Level, now: Tick) {
        let Some(engine) = self.engines.get(id).filter(|e| matches!(e.state, State::FallingAsleep { .. }))
        else {
            return;
        };
        let took = now.since(engine.since);
        self.engines.change(id, |engine| {
            engine.become_state(State::Asleep { level }, now);
            engine.shrinking = Some(now);
        });
        for place in self.ledger.accelerators.place_ids(id) {
            self.ledger.accelerators.change(&place, |account| {
                account.changed = now;
                account.begin_anew();
            });
        }
        self.learn(&id.model, |learned| {
            learned.sleep = Some(learned.sleep.map_or(took, |old| Millis((old.0 * 3 + took.0) / 4)));
        });
    }

    /// The process is seen gone: what it held is free by definition, though the meter may lag.
    fn gone(&mut self, id: &EngineId, cause: &Cause, now: Tick) {
        let gone = self.engines.change(id, |engine| engine.has_gone(cause, now));
        if gone != Some(true) {
            return;
        }
        for place in self.ledger.accelerators.place_ids(id) {
            self.ledger.accelerators.change(&place, Account::begin_anew);
        }
        self.ledger.shrink(id, Bytes::ZERO, false, now);
        self.ledger.host.booked.remove(id);
    }

    fn ordered(&mut self, operation: super::event::OperationId, model: &ModelName, order: Order, now: Tick) {
        if self.role != Role::Follows
            && let Some(model) = Arc::make_mut(&mut self.models).get_mut(model)
        {
            match order {
                Order::Pin => (model.pin, model.since) = (Some(true), now),
                Order::Unpin => model.pin = Some(false),
                _ => {}
            }
        }
        self.engines.touch(model);
        self.operations.insert(operation, Operation { model: model.clone(), order, given: now });
    }
}

impl Engine {
    /// What concerns nothing but the engine itself.
    fn hears(&mut self, event: &Event, now: Tick) {
        match event {
            Event::Used { leases, last_end, last_byte, clients, pause, .. } => {
                if *last_end > self.last_end {
                    self.is_asked_for(*last_end, *pause);
                } else if *leases > 0 {
                    self.is_asked_for(now, *pause);
                }
                self.clients = *clients;
                // Those who still hold a lease on a process that is gone count for no later one.
                let counts = self.state.has_process() && !self.forsaken;
                self.leases = if counts { *leases } else { 0 };
                self.forsaken &= *leases > 0;
                self.last_end = self.last_end.max(*last_end);
                self.last_progress = self.last_progress.max(*last_byte);
            }
            Event::LeftOut { until, .. } => self.left_out = *until,
            Event::Gated { .. } => self.is_turned_away(),
            // Nobody watches for its opening any more: should it be closed by now, that is to be ordered anew.
            Event::Ungated { .. } => (self.gated, self.stub_watched) = (false, false),
            Event::Drained { .. } => self.drained(),
            Event::Placed { accelerators, .. } => {
                self.conflicts = 0;
                if let Some(placing) = &mut self.placing {
                    placing.accelerators.clone_from(accelerators);
                    placing.confirmed = true;
                }
            }
            Event::Started { address, .. } if self.state == State::Launching => {
                self.address = Some(*address);
                self.become_state(State::Loading, now);
            }
            Event::Profiled { .. } => self.profiled = true,
            Event::Ready { .. } if self.state.is_starting() && self.proof == Proof::NotReady => {
                self.profiled = true;
                self.proof = Proof::Wanted;
                self.symptoms = Symptoms::default();
            }
            // The engine's gate is closed and drained already: the engine is stopped. One that says it is awake may serve those who
            // wait for it, unless it was put away for another model. A new leader does not know for which model that was.
            Event::SleepFailed { cause, .. } if matches!(self.state, State::FallingAsleep { .. }) => {
                let awake = *cause == Cause::StaysAwake && !self.is_evicted();
                let (why, then) = (if awake { Why::StaysAwake } else { Why::Fault }, Then::Stop);
                self.become_state(State::Draining { why, then, revoked: false, drained: true }, now);
            }
            Event::WakeFailed { cause, .. } | Event::StartFailed { cause, .. }
                if self.state.is_starting() || matches!(self.state, State::FallingAsleep { .. }) =>
            {
                self.fail(cause.clone(), now);
            }
            Event::Shows { symptoms, .. } => self.shows(symptoms),
            Event::Health { ok, progressed, .. } => {
                self.failing_since = if *ok { None } else { self.failing_since.or(Some(now)) };
                if *progressed {
                    self.last_progress = now;
                }
            }
            _ => {}
        }
    }

    /// Its process is; false when it had none.
    fn has_gone(&mut self, cause: &Cause, now: Tick) -> bool {
        if !self.state.has_process() {
            return false;
        }
        if self.door != Door::Closed {
            self.orphan = Some((self.generation, cause.clone()));
            self.door = Door::Closed;
        }
        if matches!(&self.state, State::Stopping { cause: Cause::Stopped }) {
            self.become_state(State::Cold, now);
        } else {
            let until = if self.ends_between_uses() {
                now
            } else {
                self.failures += 1;
                self.fruitless += 1;
                now + backoff::pause(&self.id, self.failures)
            };
            let cause = match &self.state {
                State::Stopping { cause } | State::Failing { cause, .. } => cause.clone(),
                _ => cause.clone(),
            };
            self.become_state(State::Backoff { until, cause }, now);
        }
        self.forget_process();
        true
    }

    /// Its process served, and ends as it falls asleep, sleeps or wakes: its start was good, so the next one need not wait.
    fn ends_between_uses(&self) -> bool {
        let wakes = !self.cold && self.turn < self.began;
        wakes || matches!(self.state, State::FallingAsleep { .. } | State::Asleep { .. })
    }

    /// The gate is closed and the last lease is gone.
    fn drained(&mut self) {
        match &mut self.state {
            State::Draining { drained, .. } | State::Failing { drained, .. } if self.door == Door::Closed => {
                *drained = true;
                self.leases = 0;
            }
            _ => {}
        }
    }
}
