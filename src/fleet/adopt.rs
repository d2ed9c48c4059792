//! Taking over engines that already run, and orders by people: what enters the state from outside a plan.

use std::sync::Arc;

use super::{
    event::{Found, Order},
    plan::Planner,
    report::{AcceleratorView, EngineView, HostView, ModelState, ModelView, Report, View},
    role::{ANOTHER_LEADS, Role},
};
use crate::{
    engine::{Engine, Proof, state::State},
    fault::Cause,
    model::{EngineId, Level, LevelPolicy, ModelName, ModelSpec},
    units::{Bytes, Generation, Tick},
};

impl Planner {
    /// An engine enters as it is, also when that exceeds what may be granted: nothing new is granted there until it
    /// fits again.
    pub(super) fn adopt(&mut self, id: &EngineId, generation: Generation, found: &Found, now: Tick) {
        let followed = self.role == Role::TakesOver;
        if self.role == Role::Follows
            || (followed && self.engines.get(id).is_some_and(|e| e.generation > generation))
        {
            return;
        }
        self.unfound.remove(id);
        if followed && self.keeps(id, generation, found, now) {
            return;
        }
        let spec = self.spec(&id.model);
        let awake = spec.map_or(Bytes::ZERO, |s| s.accelerators.in_one_place(s.memory.awake));
        let units = spec.and_then(|s| s.accelerators.units());
        let residue = self.residue_of(id);
        let mut engine = Engine::new(id.clone(), now);
        engine.generation = generation;
        engine.fingerprint = found.fingerprint;
        engine.accelerators.clone_from(&found.accelerators);
        engine.address = Some(found.address);
        engine.last_end = found.last_end;
        engine.last_progress = now;
        // Found in the middle of its start, it may be measuring at this moment.
        let measures = self.spec(&id.model).is_none_or(ModelSpec::measures);
        engine.profiled = found.ready || found.asleep.is_some() || !measures;
        let (state, bytes) = match (found.asleep, found.ready) {
            (Some(level), true) => (State::Asleep { level }, residue),
            (Some(level), false) => (State::FallingAsleep { level }, awake),
            (None, true) => (State::Awake, awake),
            (None, false) => (State::Loading, awake),
        };
        // One that does not answer may be busy, however long it has been running: it gets the time of a start.
        engine.began = if state == State::Loading { now } else { found.started };
        // Its turn began when it did, as far as anybody remembers; its idle clock goes on.
        engine.turn = found.last_end.max(found.started).min(now);
        engine.proof = Proof::NotReady;
        // A sleeper is stopped so long after it fell asleep, which was not later than now and not before it was used.
        engine.since = if matches!(state, State::Asleep { .. }) { engine.turn } else { now };
        engine.state = state;
        if followed {
            self.hand_over(&mut engine, now);
        }
        self.engines.insert(engine);
        if found.asleep == Some(Level::One) {
            let host = self.host_need(id);
            self.ledger.host.booked.book(id, host);
        }
        self.ledger.book(id, &found.accelerators, bytes, units);
        self.remember(&id.model, now);
    }

    /// An engine may be there of a model that is not configured.
    pub(super) fn remember(&mut self, model: &ModelName, now: Tick) {
        if self.models.contains_key(model) {
            return;
        }
        Arc::make_mut(&mut self.models).entry(model.clone()).or_insert_with(|| super::plan::Model {
            spec: None,
            pin: None,
            learned: super::event::Learned::default(),
            gap: None,
            since: now,
        });
    }

    /// For texts: how much there is of what.
    pub(super) fn summary(&self) -> String {
        let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let running = self.engines.values().filter(|e| e.state.has_process()).count();
        let models = count(self.models.values().filter(|m| m.spec.is_some()).count(), "model");
        let gpus = count(self.ledger.accelerators.len(), "accelerator");
        format!("{models}, {gpus}, {} running", count(running, "engine"))
    }

    /// What an engine of this model keeps on each accelerator, or of its pool, while it sleeps.
    pub(super) fn residue_of(&self, id: &EngineId) -> Bytes {
        let model = self.models.get(&id.model);
        let residue =
            model.and_then(|m| m.spec.as_deref().map(|s| s.accelerators.in_one_place(m.residue(s))));
        residue.unwrap_or_default()
    }

    /// Host RAM a level-1 sleeper takes, over all its accelerators.
    pub(super) fn host_need(&self, id: &EngineId) -> Bytes {
        let Some(spec) = self.spec(&id.model) else { return Bytes::ZERO };
        let places = self.engines.get(id).map_or(1, |e| e.accelerators.len().max(1)) as u64;
        Bytes(spec.accelerators.in_one_place(spec.memory.host).0.saturating_mul(places))
    }

    pub(super) fn forbids(&self, model: &ModelName, order: Order) -> Result<(), String> {
        let known = self.models.get(model).and_then(|m| m.spec.as_deref().map(|s| (m, s)));
        let Some((state, spec)) = known else {
            return Err(format!("Model '{model}' not found"));
        };
        if self.shutdown.is_some() {
            return Err("the gateway is shutting down".to_owned());
        }
        if self.role == Role::Follows {
            return Err(ANOTHER_LEADS.to_owned());
        }
        match order {
            Order::Sleep { .. } if !spec.can_sleep || spec.idle.level == LevelPolicy::Never => Err(format!(
                "'{model}' cannot sleep: its engine or its idle.level does not allow it; stop it instead"
            )),
            Order::Sleep { level: Some(Level::Two) } if spec.idle.level == LevelPolicy::OnlyOne => {
                Err(format!(
                    "'{model}' would lose its LoRA adapters at level 2: put it to sleep at level 1, or stop it"
                ))
            }
            Order::Sleep { .. } | Order::Stop if state.pinned() => {
                Err(format!("'{model}' is pinned: it would be woken again at once; unpin it first"))
            }
            Order::Sleep { .. } | Order::Stop if state.least() > 0 => Err(format!(
                "'{model}' has minReplicas {}: it would be woken again at once; unpin it first",
                state.least()
            )),
            Order::Sleep { .. }
                if self.engines_of(model).all(|e| {
                    !matches!(e.state, State::Awake | State::Asleep { .. } | State::Draining { .. })
                }) =>
            {
                Err(format!(
                    "'{model}' is {}: only an awake engine can be put to sleep",
                    self.model_state(model).as_str()
                ))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn engines_of<'a>(&'a self, model: &ModelName) -> impl Iterator<Item = &'a Engine> + use<'a> {
        self.engines.of(model)
    }

    /// The best of its engines' states, as people see it.
    pub(super) fn model_state(&self, model: &ModelName) -> ModelState {
        let rank = |e: &Engine| match &e.state {
            State::Awake | State::Draining { .. } => ModelState::Awake,
            State::Launching | State::Loading | State::Waking { .. } => ModelState::Launching,
            State::Asleep { .. } | State::FallingAsleep { .. } => ModelState::Asleep,
            State::Cold if e.failed_to_start() => ModelState::Failed,
            State::Cold | State::Stopping { cause: Cause::Stopped } => ModelState::Cold,
            State::Failing { .. } | State::Stopping { .. } | State::Backoff { .. } => ModelState::Failed,
        };
        let order = [
            ModelState::Awake,
            ModelState::Launching,
            ModelState::Asleep,
            ModelState::Failed,
            ModelState::Cold,
        ];
        let best = |state: &ModelState| self.engines_of(model).any(|e| rank(e) == *state);
        let state = order.into_iter().find(best).unwrap_or_default();
        let rests = matches!(state, ModelState::Failed | ModelState::Cold | ModelState::Asleep);
        if rests && self.unplaceable(model).is_some() { ModelState::Unplaceable } else { state }
    }

    pub(super) fn view(&self, report: &Report) -> View {
        let accelerators = self.ledger.accelerators.iter().map(|(id, a)| AcceleratorView {
            id: id.clone(),
            capacity: a.capacity,
            reserved: a.reserved(),
            units: a.units,
            units_taken: a.units.map(|_| a.taken.sum()),
            observed: a.reading.as_ref().map(|r| r.used),
            healthy: a.healthy,
        });
        let engines = self.engines.values().map(|e| EngineView {
            engine: e.id.clone(),
            generation: e.generation,
            state: e.state.to_string(),
            since: e.since,
            leases: e.leases,
            accelerators: e.accelerators.clone(),
            reserved: self.ledger.held(&e.id),
            host: self.ledger.host.booked.of(&e.id).unwrap_or_default(),
        });
        let models = self.models.iter().map(|(name, model)| ModelView {
            name: name.clone(),
            state: self.model_state(name),
            waiting: report.models.get(name).map_or(0, |l| l.waiting),
            leases: self.leases_of(name),
            pinned: model.pinned(),
            reason: report.models.get(name).map(|l| l.reason.clone()).unwrap_or_default(),
            last: self.past_of(name).cloned(),
            declared: model.spec.as_ref().map_or(Bytes::ZERO, |s| s.memory.awake),
            learned: model.learned,
        });
        View {
            accelerators: accelerators.collect(),
            host: HostView { capacity: self.ledger.host.capacity, reserved: self.ledger.host.reserved() },
            models: models.collect(),
            engines: engines.collect(),
        }
    }
}
