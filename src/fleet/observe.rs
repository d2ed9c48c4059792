//! Records what happened. An observation changes the state and decides nothing; the next plan decides.
//!
//! This file distributes the events and takes in the configuration, demand and operators' orders. `engine_event` takes
//! in the events of one engine, and `memory` the meters' readings.

pub(in crate::fleet) mod adopt;
pub(in crate::fleet) mod follower_view;

mod engine_event;
mod memory;

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    engine::{Engine, rehearsal::SleepRehearsal, state::LifecycleState},
    fleet::{
        event::{Event, OperatorAction},
        plan::{
            KeptAwakeModels, ModelRecord, Planner, desired::ScalingIndex, leadership::LeadershipRole,
            operations::OperatorOperation,
        },
        state::{dependencies::DependencyGraph, ledger::MeterReading, variant_specs::VariantSpecs},
    },
    model::{AcceleratorId, EngineId, FleetConfig, ModelName, ModelSpec},
    units::{Bytes, Generation, Millis, Tick},
};

impl Planner {
    pub(in crate::fleet) fn observe(&mut self, event: &Event, now: Tick) {
        if let Event::StateRestored { state } = event {
            self.clone_from(state);
            self.dependencies = DependencyGraph::from_models(&self.models);
            self.kept_awake = KeptAwakeModels::from_models(&self.models);
            self.variant_specs = VariantSpecs::from_models(&self.models);
            self.scaling = ScalingIndex::from_planner(self);
            return self.refresh_due_index();
        }
        self.advance_time(now);
        self.apply_event(event, now);
        self.refresh_due_index();
    }

    fn apply_event(&mut self, event: &Event, now: Tick) {
        match event {
            Event::Configured { configuration } => self.configure(configuration, now),
            Event::MeasurementsRestored { model, variant, learned } => {
                if self.role == LeadershipRole::Follower {
                    self.expect_model(model, now);
                }
                let engine = EngineId::of_variant(model.clone(), variant.clone(), 0);
                self.update_learned(&engine, |measurements| *measurements = *learned);
            }
            Event::FailureRestored { engine, fingerprint, at, failure } => {
                self.restore_failure(engine, *fingerprint, *at, failure);
            }
            Event::AdoptionDone => self.adoption_done(now),
            Event::LeadershipChanged { leads } => self.set_leadership(*leads, now),
            Event::ApiServerChanged { answers } => self.set_api_answers(*answers, now),
            Event::PeersChanged { exist: others } => {
                self.has_no_peers = !others;
                self.due_index.invalidate();
            }
            Event::GenerationFloor { generation } => self.raise_generation_floor(*generation),
            Event::Published { engine, generation, published } => {
                self.apply_published(engine, *generation, published.as_ref(), now);
            }
            Event::Arrived { waiter } => self.record_demand(&waiter.model, now),
            Event::Left { .. }
            | Event::Served { .. }
            | Event::FairnessRestored { .. }
            | Event::StateRestored { .. } => {}
            Event::RemoteDemand { gateway, demand } => {
                self.apply_remote_demand(gateway, demand.as_ref(), now)
            }
            Event::MeterRead { accelerator, used, by_engine } => {
                let reading = MeterReading { used: *used, by_engine: by_engine.clone(), at: now };
                self.record_reading(accelerator, reading, now);
            }
            Event::AcceleratorLost { accelerator } => self.set_accelerator_health(accelerator, false, now),
            Event::AcceleratorRecovered { accelerator } => {
                self.set_accelerator_health(accelerator, true, now)
            }
            Event::Adopted { engine, generation, found } => self.adopt(engine, *generation, found, now),
            Event::OperatorRequest { operation, model, action: order } => {
                self.add_operation(*operation, model, *order, now)
            }
            Event::Desired { model, variant, replicas, reason } => {
                self.set_target(model, variant, *replicas, reason);
            }
            Event::Shutdown { stop_engines } => self.shutdown = Some(*stop_engines),
            Event::GateSampled { engine, generation, .. }
            | Event::EjectionChanged { engine, generation, .. }
            | Event::SaturationChanged { engine, generation, .. }
            | Event::StubGateClosed { engine, generation }
            | Event::StubGateOpened { engine, generation }
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
            | Event::Diagnostics { engine, generation, .. }
            | Event::UsageObserved { engine, generation, .. }
            | Event::ResidueMeasured { engine, generation, .. }
            | Event::UsageAfterSleep { engine, generation, .. }
            | Event::Health { engine, generation, .. } => {
                self.apply_engine_event(engine, *generation, event, now)
            }
        }
    }

    /// Applies an outcome or observation of one engine; ignores one of an older generation.
    fn apply_engine_event(&mut self, id: &EngineId, generation: Generation, event: &Event, now: Tick) {
        match self.engines.get(id) {
            Some(engine) if engine.generation == generation => {}
            _ => return,
        }
        let is_local = matches!(
            event,
            Event::GateSampled { .. }
                | Event::EjectionChanged { .. }
                | Event::SaturationChanged { .. }
                | Event::StubGateClosed { .. }
                | Event::StubGateOpened { .. }
        );
        if self.role == LeadershipRole::Follower && !is_local {
            // A follower learns the lifecycle from the leader; an outcome of an earlier command may contradict that.
            return;
        }
        match event {
            Event::Canary { verdict, .. } => self.record_canary(id, verdict, now),
            Event::Conflict { .. } => self.record_conflict(id, now),
            Event::Slept { level, .. } => self.record_slept(id, *level, now),
            Event::Gone { cause, .. } => self.record_gone(id, cause, now),
            Event::UsageObserved { used, .. } => self.record_usage(id, *used),
            Event::ResidueMeasured { bytes, .. } => self.record_residue(id, *bytes),
            Event::UsageAfterSleep { used, .. } => self.record_usage_after_sleep(id, used, now),
            _ => {
                self.engines.change(id, |engine| engine.apply_event(event, now));
            }
        }
    }

    fn configure(&mut self, configuration: &FleetConfig, now: Tick) {
        self.settings = configuration.settings.clone();
        self.ledger.configure(&configuration.accelerators, self.settings.host_memory);
        let models = Arc::make_mut(&mut self.models);
        let before: BTreeMap<ModelName, Arc<ModelSpec>> =
            models.iter_mut().filter_map(|(name, model)| Some((name.clone(), model.spec.take()?))).collect();
        let is_scaled =
            |name: &ModelName| configuration.models.iter().any(|spec| spec.name == *name && spec.scaled);
        for (_, model) in
            models.iter_mut().filter(|(name, model)| !model.targets.is_empty() && !is_scaled(name))
        {
            model.targets.clear();
        }
        for spec in &configuration.models {
            let models = Arc::make_mut(&mut self.models);
            let model = models.entry(spec.name.clone()).or_insert_with(|| ModelRecord::new(now));
            model.spec = Some(Arc::new(spec.clone()));
            model.targets.retain(|variant, _| spec.fingerprint_of(variant).is_some());
            if let Some(old) = before.get(&spec.name).filter(|_| self.role.decides()) {
                self.reset_outdated_failures(old, spec, now);
            }
            for id in spec.engine_ids() {
                let generation = self.last_generation;
                if !self.engines.contains_key(&id) {
                    self.engines.insert(Engine { generation, ..Engine::new(id, now) });
                }
            }
        }
        self.dependencies = DependencyGraph::from_models(&self.models);
        self.kept_awake = KeptAwakeModels::from_models(&self.models);
        self.variant_specs = VariantSpecs::from_models(&self.models);
        self.engines.mark_all_removable();
        self.due_index.invalidate();
        self.advance_time(now);
        self.scaling = ScalingIndex::from_planner(self);
        // A model may have been configured without replicas, so no engine's removal removes it.
        let unconfigured = self.models.iter().filter(|(_, model)| model.spec.is_none());
        for name in unconfigured.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.remove_model_if_unused(&name);
        }
        self.book_again(&before, now);
    }

    /// Books engines anew that were observed before their models were configured here.
    ///
    /// A follower books all of them as the leader does, which may have reloaded earlier. An engine that this gateway has
    /// adopted keeps what it was started with, if that is known, and gets the same on accelerators that were unknown.
    fn book_again(&mut self, before: &BTreeMap<ModelName, Arc<ModelSpec>>, now: Tick) {
        if self.role.decides() && self.adopted {
            return;
        }
        let follows = self.role == LeadershipRole::Follower;
        let was_unknown = |e: &Engine| {
            let old = before.get(&e.id.model).and_then(|spec| spec.fingerprint_of(&e.id.variant));
            old.is_none() && self.engine_spec(&e.id).is_some()
        };
        let is_outdated = |e: &&Engine| follows || self.unconfirmed_engines.contains(&e.id) || was_unknown(e);
        let outdated: Vec<EngineId> =
            self.engines.values().filter(is_outdated).map(|e| e.id.clone()).collect();
        outdated.iter().for_each(|id| self.book_as_observed(id, now));
        let unbooked_on = |e: &Engine| -> Vec<AcceleratorId> {
            let is_unbooked = |id: &&AcceleratorId| {
                let account = self.ledger.accelerators.get(id);
                account.is_some_and(|account| account.booked.of(&e.id).is_none())
            };
            e.accelerators.iter().filter(is_unbooked).cloned().collect()
        };
        let running = self.engines.values().filter(|e| e.state.has_process());
        let unbooked: Vec<(EngineId, Vec<AcceleratorId>, Bytes)> = running
            .map(|e| (e.id.clone(), unbooked_on(e), self.observed_need(e)))
            .filter(|(_, accelerators, bytes)| !accelerators.is_empty() && *bytes > Bytes::ZERO)
            .collect();
        unbooked.iter().for_each(|(id, accelerators, bytes)| self.book_found(id, accelerators, *bytes));
    }

    /// Forgets the failures of engines whose command has changed: they belong to another command.
    fn reset_outdated_failures(&mut self, old: &ModelSpec, new: &ModelSpec, now: Tick) {
        let differs = |e: &&Engine| {
            let (before, after) = (old.fingerprint_of(&e.id.variant), new.fingerprint_of(&e.id.variant));
            before.is_some() && after.is_some() && before != after
        };
        let ids: Vec<EngineId> =
            self.engines.of_model(&new.name).filter(differs).map(|e| e.id.clone()).collect();
        for id in &ids {
            self.engines.change(id, |engine| {
                engine.failures = 0;
                engine.failures_since_serving = 0;
                if engine.rehearsal == SleepRehearsal::Failed {
                    engine.rehearsal = SleepRehearsal::NotDue;
                }
                if engine.failure().is_some() {
                    engine.last_outcome = None;
                }
                if matches!(engine.state, LifecycleState::Backoff { .. }) {
                    engine.transition_to(LifecycleState::Cold, now);
                }
            });
        }
    }

    /// Records a request that had to wait, and learns from the pause before it.
    pub(in crate::fleet) fn record_demand(&mut self, model: &ModelName, now: Tick) {
        // Checked first, because a change copies what other copies still share.
        let resting: Vec<EngineId> =
            self.engines.of_model(model).filter(|e| e.is_idle()).map(|e| e.id.clone()).collect();
        for id in &resting {
            self.engines.change(id, |e| e.record_request(now, None));
        }
        let awake = self.engines.of_model(model).any(|e| e.serves() || e.is_blocked_by_stub());
        let last = self.engines.of_model(model).map(|e| e.last_lease_end).max();
        if let (Some(last), false) = (last, awake)
            && last > Tick(0)
            && let Some(model) = Arc::make_mut(&mut self.models).get_mut(model)
        {
            let latest_gap = now.since(last);
            model.usual_gap =
                Some(model.usual_gap.map_or(latest_gap, |gap| Millis((gap.0 * 3 + latest_gap.0) / 4)));
        }
    }

    fn add_operation(
        &mut self,
        operation: crate::fleet::event::OperationId,
        model: &ModelName,
        order: OperatorAction,
        now: Tick,
    ) {
        if self.role != LeadershipRole::Follower
            && let Some(model) = Arc::make_mut(&mut self.models).get_mut(model)
        {
            match order {
                OperatorAction::Pin => (model.pin_override, model.wanted_since) = (Some(true), now),
                OperatorAction::Unpin => model.pin_override = Some(false),
                _ => {}
            }
            if matches!(order, OperatorAction::Pin | OperatorAction::Unpin) {
                self.kept_awake = KeptAwakeModels::from_models(&self.models);
            }
        }
        self.engines.mark_model_dirty(model);
        self.operations
            .insert(operation, OperatorOperation { model: model.clone(), action: order, issued_at: now });
    }
}
