//! Taking note of what happened. No decision is made here: an observation changes the state, the next plan draws the
//! conclusions.

use std::collections::BTreeMap;

use super::{
    budget::Reading,
    event::{Event, Learned, Order, Verdict},
    orders::Operation,
    plan::{Model, Planner},
};
use crate::{
    engine::{Door, Engine, Proof, backoff, state::State},
    fault::Cause,
    model::{Configuration, EngineId, Level, ModelName},
    units::{Bytes, Generation, Millis, Tick},
};

impl Planner {
    pub(super) fn observe(&mut self, event: &Event, now: Tick) {
        if let Event::Resumed { state } = event {
            self.clone_from(state);
            return;
        }
        self.settle(now);
        match event {
            Event::Configured { configuration } => self.configure(configuration, now),
            Event::Recalled { model, learned } => {
                if let Some(model) = self.models.get_mut(model) {
                    model.learned = *learned;
                }
            }
            Event::AdoptionDone => self.adopted = true,
            Event::Arrived { waiter } => self.wanted(&waiter.model, now),
            Event::Left { .. } | Event::Served { .. } | Event::Shares { .. } | Event::Resumed { .. } => {}
            Event::Memory { accelerator, used, by_engine } => {
                let reading = Reading { used: *used, by_engine: by_engine.clone(), at: now };
                self.metered(accelerator, reading);
            }
            Event::AcceleratorLost { accelerator } => self.set_health(accelerator, false, now),
            Event::AcceleratorBack { accelerator } => self.set_health(accelerator, true, now),
            Event::Adopted { engine, generation, found } => self.adopt(engine, *generation, found, now),
            Event::Operator { operation, model, order } => self.ordered(*operation, model, *order, now),
            Event::Shutdown { stop_engines } => self.shutdown = Some(*stop_engines),
            Event::Used { engine, generation, .. }
            | Event::LeftOut { engine, generation, .. }
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
            | Event::Health { engine, generation, .. } => self.of_engine(engine, *generation, event, now),
        }
    }

    /// An outcome or observation of one engine; of an older life it is ignored.
    fn of_engine(&mut self, id: &EngineId, generation: Generation, event: &Event, now: Tick) {
        let Some(engine) = self.engines.get_mut(id).filter(|e| e.generation == generation) else {
            return;
        };
        match event {
            Event::Used { leases, last_end, last_byte, .. } => {
                // Those who still hold a lease on a process that is gone count for no later one.
                engine.leases = if engine.state.has_process() { *leases } else { 0 };
                engine.last_end = engine.last_end.max(*last_end);
                engine.last_progress = engine.last_progress.max(*last_byte);
            }
            Event::LeftOut { until, .. } => engine.left_out = *until,
            Event::Drained { .. } => engine.drained(),
            Event::Canary { verdict, .. } => self.proved(id, verdict, now),
            Event::Placed { accelerators, .. } => {
                if let Some(placing) = &mut engine.placing {
                    placing.accelerators.clone_from(accelerators);
                    placing.confirmed = true;
                }
            }
            Event::Conflict { .. } => self.conflict(id, now),
            Event::Started { address, .. } if engine.state == State::Launching => {
                engine.address = Some(*address);
                engine.become_state(State::Loading, now);
            }
            Event::Profiled { .. } => engine.profiled = true,
            Event::Ready { .. } if engine.state.is_starting() && engine.proof == Proof::NotReady => {
                engine.profiled = true;
                engine.proof = Proof::Wanted;
            }
            Event::Slept { level, .. } => self.slept(id, *level, now),
            Event::SleepFailed { cause, .. }
            | Event::WakeFailed { cause, .. }
            | Event::StartFailed { cause, .. }
                if engine.state.is_starting() || matches!(engine.state, State::FallingAsleep { .. }) =>
            {
                engine.fail(cause.clone(), now);
            }
            Event::Gone { cause, .. } => self.gone(id, cause, now),
            Event::Health { ok, progressed, .. } => {
                engine.failing_since = if *ok { None } else { engine.failing_since.or(Some(now)) };
                if *progressed {
                    engine.last_progress = now;
                }
            }
            _ => {}
        }
    }

    fn configure(&mut self, configuration: &Configuration, now: Tick) {
        self.settings = configuration.settings.clone();
        self.ledger.configure(&configuration.accelerators, self.settings.host_memory);
        let before: BTreeMap<ModelName, u64> = self
            .models
            .iter_mut()
            .filter_map(|(name, model)| Some((name.clone(), model.spec.take()?.fingerprint)))
            .collect();
        for spec in &configuration.models {
            let model = self.models.entry(spec.name.clone()).or_insert_with(|| Model {
                spec: None,
                pin: None,
                learned: Learned::default(),
                gap: None,
                since: now,
            });
            model.spec = Some(spec.clone());
            // What failed was another command.
            if before.get(&spec.name).is_some_and(|fingerprint| *fingerprint != spec.fingerprint) {
                self.forgive(&spec.name, now);
            }
            for replica in 0..spec.replicas {
                let id = EngineId::new(spec.name.clone(), replica);
                let generation = self.last_life;
                let new = || Engine { generation, ..Engine::new(id.clone(), now) };
                self.engines.entry(id.clone()).or_insert_with(new);
            }
        }
        self.settle(now);
    }

    fn forgive(&mut self, model: &ModelName, now: Tick) {
        for engine in self.engines.values_mut().filter(|e| e.id.model == *model) {
            engine.failures = 0;
            engine.fruitless = 0;
            if matches!(engine.state, State::Backoff { .. }) {
                engine.become_state(State::Cold, now);
            }
        }
    }

    /// A request came that had to wait: how long had nobody asked?
    fn wanted(&mut self, model: &ModelName, now: Tick) {
        let awake = self.engines.values().any(|e| e.id.model == *model && e.serves());
        let last = self.engines.values().filter(|e| e.id.model == *model).map(|e| e.last_end).max();
        if let (Some(model), Some(last), false) = (self.models.get_mut(model), last, awake)
            && last > Tick(0)
        {
            let seen = now.since(last);
            model.gap = Some(model.gap.map_or(seen, |gap| Millis((gap.0 * 3 + seen.0) / 4)));
        }
    }

    fn metered(&mut self, accelerator: &crate::model::AcceleratorId, reading: Reading) {
        let Some(account) = self.ledger.accelerators.get_mut(accelerator) else {
            return;
        };
        for (id, bytes) in reading.by_engine.iter().flatten() {
            let settled = self.engines.get(id).is_some_and(|e| e.state == State::Awake);
            if let (Some(model), true) = (self.models.get_mut(&id.model), settled) {
                model.learned.peak = Some(model.learned.peak.unwrap_or_default().max(*bytes));
            }
        }
        account.read(reading);
    }

    fn set_health(&mut self, accelerator: &crate::model::AcceleratorId, healthy: bool, now: Tick) {
        if let Some(account) = self.ledger.accelerators.get_mut(accelerator) {
            account.healthy = healthy;
            (account.asked, account.tried) = (None, now);
        }
    }

    fn proved(&mut self, id: &EngineId, verdict: &Verdict, now: Tick) {
        let Some(engine) = self.engines.get_mut(id) else {
            return;
        };
        if !matches!(engine.proof, Proof::Out(_)) || !engine.state.is_starting() {
            return;
        }
        match verdict {
            Verdict::Passed => {
                let (took, cold) = (now.since(engine.began), engine.cold);
                engine.turn = now;
                engine.last_progress = now;
                engine.failing_since = None;
                engine.fruitless = 0;
                engine.become_state(State::Awake, now);
                for other in self.engines.values_mut().filter(|e| e.yielded_to.as_ref() == Some(id)) {
                    other.yielded_to = None;
                }
                self.ledger.host.booked.remove(id);
                if let Some(model) = self.models.get_mut(&id.model) {
                    let learned = if cold { &mut model.learned.start } else { &mut model.learned.wake };
                    *learned = Some(learned.map_or(took, |old| Millis((old.0 * 3 + took.0) / 4)));
                }
            }
            Verdict::Failed(cause) => {
                engine.fail(cause.clone(), now);
            }
            Verdict::Inconclusive => engine.proof = Proof::Wanted,
        }
    }

    fn conflict(&mut self, id: &EngineId, now: Tick) {
        let Some(engine) = self.engines.get_mut(id) else {
            return;
        };
        if engine.placing.take().is_none() {
            return;
        }
        let asleep = matches!(engine.state, State::Asleep { .. });
        if !asleep {
            let until = now + Millis(250);
            engine.become_state(State::Backoff { until, cause: Cause::Refused }, now);
        }
        let keeps = if asleep { self.residue_of(id) } else { Bytes::ZERO };
        self.ledger.shrink(id, keeps, now);
    }

    fn slept(&mut self, id: &EngineId, level: Level, now: Tick) {
        let Some(engine) = self.engines.get_mut(id) else {
            return;
        };
        if !matches!(engine.state, State::FallingAsleep { .. }) {
            return;
        }
        let took = now.since(engine.since);
        engine.become_state(State::Asleep { level }, now);
        engine.shrinking = Some(now);
        for account in self.ledger.accelerators.values_mut().filter(|a| a.booked.contains_key(id)) {
            account.changed = now;
            account.begin_anew();
        }
        if let Some(model) = self.models.get_mut(&id.model) {
            model.learned.sleep =
                Some(model.learned.sleep.map_or(took, |old| Millis((old.0 * 3 + took.0) / 4)));
        }
    }

    /// The process is seen gone: what it held is free by definition, though the meter may lag.
    fn gone(&mut self, id: &EngineId, cause: &Cause, now: Tick) {
        let Some(engine) = self.engines.get_mut(id) else {
            return;
        };
        if !engine.state.has_process() {
            return;
        }
        if engine.door != Door::Closed {
            engine.orphan = Some((engine.generation, cause.clone()));
            engine.door = Door::Closed;
        }
        if matches!(&engine.state, State::Stopping { cause: Cause::Stopped }) {
            engine.become_state(State::Cold, now);
        } else {
            engine.failures += 1;
            engine.fruitless += 1;
            let until = now + backoff::pause(id, engine.failures);
            let cause = match &engine.state {
                State::Stopping { cause } | State::Failing { cause, .. } => cause.clone(),
                _ => cause.clone(),
            };
            engine.become_state(State::Backoff { until, cause }, now);
        }
        engine.forget_process();
        for account in self.ledger.accelerators.values_mut().filter(|a| a.booked.contains_key(id)) {
            account.begin_anew();
        }
        self.ledger.shrink(id, Bytes::ZERO, now);
        self.ledger.host.booked.remove(id);
    }

    fn ordered(&mut self, operation: super::event::OperationId, model: &ModelName, order: Order, now: Tick) {
        if let Some(model) = self.models.get_mut(model) {
            match order {
                Order::Pin => (model.pin, model.since) = (Some(true), now),
                Order::Unpin => model.pin = Some(false),
                _ => {}
            }
        }
        self.operations.insert(operation, Operation { model: model.clone(), order, given: now });
    }
}

impl Engine {
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
