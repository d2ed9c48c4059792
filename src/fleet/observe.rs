//! Records what happened. An observation changes the state and decides nothing; the next plan decides.
//!
//! This file distributes the events and takes in demand and operators' orders. `configure` takes in the configuration,
//! `engine_event` the events of one engine, and `memory` the meters' readings.

pub(in crate::fleet) mod adopt;
pub(in crate::fleet) mod configure;
pub(in crate::fleet) mod follower_view;

mod engine_event;
mod memory;

use std::sync::Arc;

use self::configure::ConfigurationChanges;
use crate::{
    fleet::{
        event::{Event, OperatorAction},
        plan::{
            KeptAwakeModels, Planner, desired::ScalingIndex, leadership::LeadershipRole,
            operations::OperatorOperation,
        },
        state::{dependencies::DependencyGraph, ledger::MeterReading, variant_specs::VariantSpecs},
    },
    model::{EngineId, ModelName},
    units::{Generation, Millis, Tick},
};

impl Planner {
    /// Records the event. Returns what it changed of the configuration.
    pub(in crate::fleet) fn observe(&mut self, event: &Event, now: Tick) -> ConfigurationChanges {
        if let Event::StateRestored { state } = event {
            self.clone_from(state);
            self.dependencies = DependencyGraph::from_models(&self.models);
            self.kept_awake = KeptAwakeModels::from_models(&self.models);
            self.variant_specs = VariantSpecs::from_models(&self.models);
            self.scaling = ScalingIndex::from_planner(self);
            self.refresh_due_index();
            return ConfigurationChanges { everything: true, ..ConfigurationChanges::default() };
        }
        self.advance_time(now);
        let changes = if let Event::Configured { configuration } = event {
            self.configure(configuration, now)
        } else {
            self.apply_event(event, now);
            ConfigurationChanges::default()
        };
        self.refresh_due_index();
        changes
    }

    fn apply_event(&mut self, event: &Event, now: Tick) {
        match event {
            Event::MeasurementsRestored { model, variant, learned } => {
                if self.role == LeadershipRole::Follower {
                    self.expect_model(model, now);
                }
                let engine = EngineId::of_variant(model.clone(), variant.clone(), 0);
                let is_new = self.update_learned(&engine, |measurements| *measurements = *learned);
                if is_new && self.role == LeadershipRole::Follower {
                    self.book_sleepers_as_observed(model, now);
                }
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
            Event::Configured { .. }
            | Event::Left { .. }
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
