//! Adoption of running engines, and what operators see and may order.

use std::sync::Arc;

use crate::{
    engine::{
        Engine, ProbeState,
        last_outcome::{FailureRecord, LastOutcome},
        state::LifecycleState,
    },
    fault::FailureCause,
    fleet::{
        event::{AdoptedEngine, OperatorAction},
        plan::{
            ModelRecord, Planner,
            leadership::{LeadershipRole, NOT_LEADER_MESSAGE},
        },
        report::{AcceleratorView, EngineView, FleetView, HostView, ModelState, ModelView, Report},
    },
    model::{
        AcceleratorId, AcceleratorRequirement, EngineId, ModelName, ModelSpec, SleepLevel, SleepLevelPolicy,
    },
    units::{Bytes, Generation, Tick},
};

impl Planner {
    /// Adds a running engine as it is, even beyond what may be granted.
    ///
    /// Its accelerators then grant nothing new until everything fits again.
    pub(in crate::fleet) fn adopt(
        &mut self,
        id: &EngineId,
        generation: Generation,
        found: &AdoptedEngine,
        now: Tick,
    ) {
        let followed = self.role == LeadershipRole::TakingOver;
        if self.role == LeadershipRole::Follower
            || (followed && self.engines.get(id).is_some_and(|e| e.generation > generation))
        {
            return;
        }
        self.unconfirmed_engines.remove(id);
        if followed && self.adopt_in_place(id, generation, found, now) {
            return;
        }
        let mut engine = Engine::new(id.clone(), now);
        engine.generation = generation;
        engine.fingerprint = found.fingerprint;
        engine.accelerators.clone_from(&found.accelerators);
        engine.address = Some(found.address);
        engine.last_lease_end = found.last_lease_end;
        engine.last_progress = now;
        // An engine found during its start may be measuring memory right now.
        let measures = self.engine_spec(id).is_none_or(ModelSpec::profiles_memory);
        engine.profiled = found.ready || found.asleep.is_some() || !measures;
        let state = match (found.asleep, found.ready) {
            (Some(level), true) => LifecycleState::Asleep { level },
            (Some(level), false) => LifecycleState::FallingAsleep { level },
            (None, true) => LifecycleState::Awake,
            (None, false) => LifecycleState::Loading,
        };
        // An engine that does not answer may be busy, however long it has run: it gets the time of a start.
        engine.startup_began = if state == LifecycleState::Loading { now } else { found.started };
        // The turn starts at the last known use, and the idle clock continues.
        engine.turn_start = found.last_lease_end.max(found.started).min(now);
        engine.probe_state = ProbeState::NotReady;
        // A sleeper fell asleep at an unknown moment after its last use.
        engine.since = if matches!(state, LifecycleState::Asleep { .. }) { engine.turn_start } else { now };
        engine.state = state;
        let bytes = self.observed_need(&engine);
        if followed {
            self.carry_over(&mut engine, now);
        }
        self.engines.insert(engine);
        if found.asleep == Some(SleepLevel::One) {
            let host = self.host_need(id);
            self.ledger.host.booked.book(id, host);
        }
        self.book_found(id, &found.accelerators, bytes);
        self.ensure_model(&id.model, now);
    }

    /// Memory that the engine may use on each of its accelerators, by its state.
    pub(in crate::fleet) fn observed_need(&self, e: &Engine) -> Bytes {
        let spec = self.engine_spec(&e.id);
        match &e.state {
            state if !state.has_process() => Bytes::ZERO,
            // Another gateway leads, and decides what to do about it.
            _ if spec.is_none() && self.role == LeadershipRole::Follower => Bytes::ZERO,
            LifecycleState::Asleep { .. } if spec.is_some() => self.residue_of(&e.id),
            _ => spec.map_or_else(
                || self.whole_accelerators(&e.accelerators),
                |spec| spec.accelerators.bytes_per_account(spec.memory.awake),
            ),
        }
    }

    /// What an engine of a model that is not configured may use on each of these accelerators: all there is.
    ///
    /// Nothing says how much it really uses, and it is stopped at once. In a pool that counts accelerators, one counts
    /// instead.
    fn whole_accelerators(&self, accelerators: &[AcceleratorId]) -> Bytes {
        let accounts = accelerators.iter().filter_map(|id| self.ledger.accelerators.get(id));
        let single = accounts.filter(|account| account.pool.is_some() || account.units.is_none());
        single.map(|account| account.capacity).max().unwrap_or_default()
    }

    /// Sets the reservation of an engine that was found running, whether or not there is room.
    ///
    /// An accelerator with slots may be missing from its node's list just now. What is on it counts once it is back.
    pub(in crate::fleet) fn book_found(
        &mut self,
        id: &EngineId,
        accelerators: &[AcceleratorId],
        bytes: Bytes,
    ) {
        let requirement = self.engine_spec(id).map(|spec| spec.accelerators.clone());
        if let Some(AcceleratorRequirement::Slots { pool, .. }) = &requirement {
            self.ledger.add_unconfigured(accelerators, pool);
        }
        let units = requirement.and_then(|requirement| requirement.units());
        self.ledger.book(id, accelerators, bytes, units);
    }

    /// Restores the last failure of an engine from an earlier run of the gateway.
    ///
    /// The next failure counts on from it. The back-off begins anew: with a restart, people may have mended the cause.
    pub(in crate::fleet) fn restore_failure(
        &mut self,
        id: &EngineId,
        fingerprint: u64,
        at: Tick,
        failure: &FailureRecord,
    ) {
        let same_command = self.engine_spec(id).is_some_and(|spec| spec.fingerprint == fingerprint);
        let applies = |e: &Engine| {
            e.last_outcome.is_none() && matches!(e.state, LifecycleState::Cold | LifecycleState::Loading)
        };
        if same_command && self.engines.get(id).is_some_and(applies) {
            let restored = LastOutcome::restored_failure(at, failure.clone());
            self.engines.change(id, |e| e.last_outcome = Some(restored));
            self.engines.mark_rerouted(&id.model);
        }
    }

    /// Adds the model of a running engine if it is not configured.
    pub(in crate::fleet) fn ensure_model(&mut self, model: &ModelName, now: Tick) {
        if self.models.contains_key(model) {
            return;
        }
        Arc::make_mut(&mut self.models).entry(model.clone()).or_insert_with(|| ModelRecord::new(now));
    }

    /// Counts of models, accelerators and running engines, for texts.
    pub(in crate::fleet) fn summary(&self) -> String {
        let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let running = self.engines.values().filter(|e| e.state.has_process()).count();
        let models = count(self.models.values().filter(|m| m.spec.is_some()).count(), "model");
        let gpus = count(self.ledger.accelerators.len(), "accelerator");
        format!("{models}, {gpus}, {} running", count(running, "engine"))
    }

    /// Memory that an engine of this model keeps on each accelerator, or in its pool, while it sleeps.
    pub(in crate::fleet) fn residue_of(&self, id: &EngineId) -> Bytes {
        let (Some(model), Some(spec)) = (self.models.get(&id.model), self.engine_spec(id)) else {
            return Bytes::ZERO;
        };
        spec.accelerators.bytes_per_account(model.residue(&id.variant, spec))
    }

    /// Host RAM that a level-1 sleeper uses, over all its accelerators.
    pub(in crate::fleet) fn host_need(&self, id: &EngineId) -> Bytes {
        let Some(spec) = self.engine_spec(id) else { return Bytes::ZERO };
        let places = self.engines.get(id).map_or(1, |e| e.accelerators.len().max(1)) as u64;
        Bytes(spec.accelerators.bytes_per_account(spec.memory.host).0.saturating_mul(places))
    }

    /// Host RAM that is not reserved: in all, and on the engine's node if that has a limit of its own.
    pub(in crate::fleet) fn host_free_for(&self, id: &EngineId) -> Bytes {
        let free = self.ledger.host.free();
        self.host_free_on_node(id).map_or(free, |on_node| free.min(on_node))
    }

    fn host_free_on_node(&self, id: &EngineId) -> Option<Bytes> {
        let accounts = &self.ledger.accelerators;
        let account = accounts.get(self.engines.get(id)?.accelerators.first()?)?;
        let limit = account.host_memory?;
        let of_node = accounts.pool(account.pool.as_ref()?)?.of_node(account.node.as_deref()?);
        let neighbours = self.engines.on_accelerators(of_node).into_iter();
        let reserved: Bytes = neighbours.filter_map(|e| self.ledger.host.booked.of(&e.id)).sum();
        Some(limit.saturating_sub(reserved))
    }

    pub(in crate::fleet) fn validate_action(
        &self,
        model: &ModelName,
        order: OperatorAction,
    ) -> Result<(), String> {
        let known = self.models.get(model).and_then(|m| m.spec.as_deref().map(|s| (m, s)));
        let Some((state, spec)) = known else {
            return Err(format!("Model '{model}' not found"));
        };
        if self.shutdown.is_some() {
            return Err("the gateway is shutting down".to_owned());
        }
        if self.role == LeadershipRole::Follower {
            return Err(NOT_LEADER_MESSAGE.to_owned());
        }
        match order {
            OperatorAction::Sleep { .. } if !spec.can_sleep || spec.idle.level == SleepLevelPolicy::Never => {
                Err(format!(
                    "'{model}' cannot sleep: its engine or its idle.level does not allow sleep; stop it instead"
                ))
            }
            OperatorAction::Sleep { level: Some(SleepLevel::Two) }
                if spec.idle.level == SleepLevelPolicy::OneOrStop =>
            {
                Err(format!(
                    "'{model}' would lose its LoRA adapters at level 2: put it to sleep at level 1, or stop it"
                ))
            }
            OperatorAction::Sleep { .. } | OperatorAction::Stop if state.pinned() => {
                Err(format!("'{model}' is pinned: it would be woken again at once; unpin it first"))
            }
            OperatorAction::Sleep { .. } | OperatorAction::Stop if state.min_running() > 0 => Err(format!(
                "'{model}' has minReplicas {}: it would be woken again at once; unpin it first",
                state.min_running()
            )),
            OperatorAction::Sleep { .. }
                if self.engines_of(model).all(|e| {
                    !matches!(
                        e.state,
                        LifecycleState::Awake
                            | LifecycleState::Asleep { .. }
                            | LifecycleState::Draining { .. }
                    )
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

    pub(in crate::fleet) fn engines_of<'a>(
        &'a self,
        model: &ModelName,
    ) -> impl Iterator<Item = &'a Engine> + use<'a> {
        self.engines.of_model(model)
    }

    /// The best state of the model's engines, as people see it.
    pub(in crate::fleet) fn model_state(&self, model: &ModelName) -> ModelState {
        let rank = |e: &Engine| match &e.state {
            // The engine serves in a moment, without a decision.
            _ if e.is_rehearsing() => ModelState::Launching,
            LifecycleState::Awake | LifecycleState::Draining { .. } => ModelState::Awake,
            LifecycleState::Launching | LifecycleState::Loading | LifecycleState::Waking { .. } => {
                ModelState::Launching
            }
            LifecycleState::Asleep { .. } | LifecycleState::FallingAsleep { .. } => ModelState::Asleep,
            LifecycleState::Cold if e.failed_to_start() => ModelState::Failed,
            LifecycleState::Cold | LifecycleState::Stopping { cause: FailureCause::Stopped } => {
                ModelState::Cold
            }
            LifecycleState::Failing { .. }
            | LifecycleState::Stopping { .. }
            | LifecycleState::Backoff { .. } => ModelState::Failed,
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
        let is_inactive = matches!(state, ModelState::Failed | ModelState::Cold | ModelState::Asleep);
        if is_inactive && self.unplaceable_reason(model).is_some() { ModelState::Unplaceable } else { state }
    }

    pub(in crate::fleet) fn view(&self, report: &Report) -> FleetView {
        let accelerators = self.ledger.accelerators.iter().map(|(id, a)| AcceleratorView {
            id: id.clone(),
            capacity: a.capacity,
            reserved: a.reserved(),
            units: a.units,
            units_taken: a.units.map(|_| a.units_taken.sum()),
            pool: a.pool.clone(),
            node: a.node.clone(),
            observed: a.reading.as_ref().map(|r| r.used),
            healthy: a.healthy,
        });
        let engines = self.engines.values().map(|e| EngineView {
            engine: e.id.clone(),
            generation: e.generation,
            state: e.state.to_string(),
            since: e.since,
            leases: e.leases,
            saturation: e.saturation_at(self.last_planned),
            accelerators: e.accelerators.clone(),
            reserved: self.ledger.booked_bytes(&e.id),
            host: self.ledger.host.booked.of(&e.id).unwrap_or_default(),
        });
        let models = self.models.iter().map(|(name, model)| ModelView {
            name: name.clone(),
            state: self.model_state(name),
            waiting: report.models.get(name).map_or(0, |l| l.waiting),
            leases: self.leases_of(name),
            pinned: model.pinned(),
            expected_wait: report.models.get(name).and_then(|l| l.wait.expected_wait.as_deref().copied()),
            reason: report.models.get(name).map(|l| l.reason.clone()).unwrap_or_default(),
            last_outcome: self.last_outcome_of(name).cloned(),
            declared: model.spec.as_ref().map_or(Bytes::ZERO, |s| s.memory.awake),
            learned: model.learned,
        });
        FleetView {
            accelerators: accelerators.collect(),
            host: HostView { capacity: self.ledger.host.capacity, reserved: self.ledger.host.reserved() },
            models: models.collect(),
            engines: engines.collect(),
        }
    }
}
