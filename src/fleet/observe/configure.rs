//! Takes in the configuration, at the start and with every reload.
//!
//! A configuration names all models, and most reloads change one of them: in a cluster, each change of a model's object
//! is a reload at every gateway. So the models are compared, and a reload visits only the engines of those that differ,
//! unless settings or accelerators changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    engine::{Engine, rehearsal::SleepRehearsal, state::LifecycleState},
    fleet::{
        plan::{KeptAwakeModels, ModelRecord, Planner, leadership::LeadershipRole},
        state::dependencies::DependencyGraph,
    },
    model::{AcceleratorId, EngineId, FleetConfig, ModelName, ModelSpec},
    units::{Bytes, Tick},
};

/// What configurations changed.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct ConfigurationChanges {
    /// Settings, accelerators or the whole state: any configured value may differ.
    pub(in crate::fleet) everything: bool,
    /// Models whose own configuration was added, changed or removed, and the models that depend on those.
    pub(in crate::fleet) specs: BTreeSet<ModelName>,
}

impl ConfigurationChanges {
    pub(in crate::fleet) fn extend(&mut self, later: Self) {
        self.everything |= later.everything;
        self.specs.extend(later.specs);
    }
}

/// The former configuration of each model whose configuration has changed; `None`: it had none.
type FormerSpecs = BTreeMap<ModelName, Option<Arc<ModelSpec>>>;

impl Planner {
    /// Replaces the configuration. Returns what differs from the former one.
    pub(in crate::fleet) fn configure(
        &mut self,
        configuration: &FleetConfig,
        now: Tick,
    ) -> ConfigurationChanges {
        let FleetConfig { settings, accelerators, models } = configuration;
        let has_new_settings = self.settings != *settings;
        self.settings.clone_from(settings);
        let has_new_accelerators = self.ledger.configure(accelerators, settings.host_memory);
        let everything = has_new_settings || has_new_accelerators;
        let former = self.replace_specs(models, now);
        let mut specs: BTreeSet<ModelName> = former.keys().cloned().collect();
        if !former.is_empty() {
            let dependencies = DependencyGraph::from_models(&self.models);
            let dependencies =
                [std::mem::replace(&mut self.dependencies, dependencies), self.dependencies.clone()];
            let dependents = |model| dependencies.iter().flat_map(move |graph| graph.dependents(model));
            specs.extend(former.keys().flat_map(dependents).cloned());
            self.kept_awake = KeptAwakeModels::from_models(&self.models);
        }
        for model in former.keys() {
            self.refresh_variant_specs(model);
            self.refresh_scaled(model);
            self.engines.mark_reconfigured(model);
        }
        if everything {
            self.due_index.invalidate();
        }
        self.advance_time(now);
        // A model may have been configured without replicas, so no engine's removal removes it.
        let unconfigured = self.models.iter().filter(|(_, model)| model.spec.is_none());
        for name in unconfigured.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.remove_model_if_unused(&name);
        }
        self.book_again(&former, everything, now);
        ConfigurationChanges { everything, specs }
    }

    /// Makes these the configured models. Returns those that differ from what they were.
    fn replace_specs(&mut self, specs: &[ModelSpec], now: Tick) -> FormerSpecs {
        let configured: BTreeSet<&ModelName> = specs.iter().map(|spec| &spec.name).collect();
        let is_removed =
            |(name, model): &(&ModelName, &ModelRecord)| model.spec.is_some() && !configured.contains(name);
        let removed: Vec<ModelName> =
            self.models.iter().filter(is_removed).map(|(name, _)| name.clone()).collect();
        let changed: Vec<&ModelSpec> =
            specs.iter().filter(|spec| self.spec(&spec.name) != Some(*spec)).collect();
        let mut former = FormerSpecs::new();
        for name in removed {
            if let Some(model) = Arc::make_mut(&mut self.models).get_mut(&name) {
                model.targets.clear();
                former.insert(name, model.spec.take());
            }
        }
        for spec in changed {
            former.insert(spec.name.clone(), self.replace_spec(spec, now));
        }
        former
    }

    /// Configures one model, and adds its engines. Returns its former configuration.
    fn replace_spec(&mut self, spec: &ModelSpec, now: Tick) -> Option<Arc<ModelSpec>> {
        let models = Arc::make_mut(&mut self.models);
        let model = models.entry(spec.name.clone()).or_insert_with(|| ModelRecord::new(now));
        let former = model.spec.replace(Arc::new(spec.clone()));
        model.targets.retain(|variant, _| spec.scaled && spec.fingerprint_of(variant).is_some());
        if let Some(former) = former.as_ref().filter(|_| self.role.decides()) {
            self.reset_outdated_failures(former, spec, now);
        }
        for id in spec.engine_ids() {
            let generation = self.last_generation;
            if !self.engines.contains_key(&id) {
                self.engines.insert(Engine { generation, ..Engine::new(id, now) });
            }
        }
        former
    }

    /// Books engines anew that were observed before the present configuration of their models or accelerators arrived.
    ///
    /// A follower books all of them as the leader does, which may have reloaded earlier. An engine that this gateway
    /// has adopted keeps what it was started with, if that is known, and gets the same on accelerators that were unknown.
    fn book_again(&mut self, former: &FormerSpecs, everything: bool, now: Tick) {
        if self.role.decides() && self.adopted {
            return;
        }
        let follows = self.role == LeadershipRole::Follower;
        let was_unknown = |e: &Engine| {
            let is_known = |spec: &Arc<ModelSpec>| spec.fingerprint_of(&e.id.variant).is_some();
            former.get(&e.id.model).is_some_and(|spec| !spec.as_ref().is_some_and(is_known))
                && self.engine_spec(&e.id).is_some()
        };
        let is_outdated = |e: &&Engine| follows || self.unconfirmed_engines.contains(&e.id) || was_unknown(e);
        let outdated: Vec<EngineId> =
            self.concerned_engines(former, everything).filter(is_outdated).map(|e| e.id.clone()).collect();
        outdated.iter().for_each(|id| self.book_as_observed(id, now));
        let unbooked_on = |e: &Engine| -> Vec<AcceleratorId> {
            let is_unbooked = |id: &&AcceleratorId| {
                let account = self.ledger.accelerators.get(id);
                account.is_some_and(|account| account.booked.of(&e.id).is_none())
            };
            e.accelerators.iter().filter(is_unbooked).cloned().collect()
        };
        let running = self.concerned_engines(former, everything).filter(|e| e.state.has_process());
        let unbooked: Vec<(EngineId, Vec<AcceleratorId>, Bytes)> = running
            .map(|e| (e.id.clone(), unbooked_on(e), self.observed_need(e)))
            .filter(|(_, accelerators, bytes)| !accelerators.is_empty() && *bytes > Bytes::ZERO)
            .collect();
        unbooked.iter().for_each(|(id, accelerators, bytes)| self.book_found(id, accelerators, *bytes));
    }

    /// The engines of these models; of all if `everything` changed.
    fn concerned_engines<'a>(
        &'a self,
        former: &'a FormerSpecs,
        everything: bool,
    ) -> Box<dyn Iterator<Item = &'a Engine> + 'a> {
        if everything {
            Box::new(self.engines.values())
        } else {
            Box::new(former.keys().flat_map(|model| self.engines.of_model(model)))
        }
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
}
