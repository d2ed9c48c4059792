//! The fleet's state for its readers: configuration, engines, failures, measurements and leadership.

use std::collections::BTreeMap;

use super::{Fleet, event::LearnedMeasurements, plan::leadership::LeadershipRole, report::ModelState};
use crate::{
    engine::{
        Engine,
        last_outcome::{LastFailure, LastOutcome},
    },
    model::{EngineId, ModelName, ModelSpec, VariantName},
    units::Generation,
};

impl Fleet {
    /// Whether targets set how many engines of this model run, even if there are none yet.
    #[must_use]
    pub fn is_scaled(&self, model: &ModelName) -> bool {
        self.planner.is_scaled(model)
    }

    /// Returns the configuration of an engine: that of its variant. `None` if it is not, or no longer, configured.
    #[must_use]
    pub fn engine_spec(&self, engine: &EngineId) -> Option<&ModelSpec> {
        self.planner.engine_spec(engine)
    }

    /// Returns the model's configuration; `None` if the model is not, or no longer, configured.
    #[must_use]
    pub fn spec(&self, model: &ModelName) -> Option<&ModelSpec> {
        self.planner.spec(model)
    }

    /// Returns every configured model.
    pub fn specs(&self) -> impl Iterator<Item = &ModelSpec> {
        self.planner.models.values().filter_map(|m| m.spec.as_deref())
    }

    pub fn engines(&self) -> impl Iterator<Item = &Engine> {
        self.planner.engines.values()
    }

    pub fn engines_of(&self, model: &ModelName) -> impl Iterator<Item = &Engine> {
        self.planner.engines.of_model(model)
    }

    #[must_use]
    pub fn engine(&self, id: &EngineId) -> Option<&Engine> {
        self.planner.engines.get(id)
    }

    /// The best state of the model's engines.
    #[must_use]
    pub fn state(&self, model: &ModelName) -> ModelState {
        self.planner.model_state(model)
    }

    /// The latest failure among the model's engines that have not served since.
    #[must_use]
    pub fn last_failure(&self, model: &ModelName) -> Option<LastFailure> {
        self.engines_of(model).filter_map(Engine::last_failure).max_by_key(|failure| failure.at)
    }

    /// The latest outcome among the model's engines that have not served since.
    #[must_use]
    pub fn last_outcome(&self, model: &ModelName) -> Option<&LastOutcome> {
        self.planner.last_outcome_of(model)
    }

    /// Why this model, alone or with its dependencies, fits nowhere even if every other model is evicted.
    #[must_use]
    pub fn unplaceable_reason(&self, model: &ModelName) -> Option<String> {
        self.planner.unplaceable_reason(model)
    }

    /// Returns the measurements of every model's variant `default`, which persist over restarts.
    ///
    /// On one machine, models have no other.
    #[must_use]
    pub fn learned(&self) -> BTreeMap<ModelName, LearnedMeasurements> {
        self.planner.models.iter().map(|(name, model)| (name.clone(), model.learned)).collect()
    }

    /// Returns the measurements of every other variant, if it has any.
    #[must_use]
    pub fn learned_of_variants(&self) -> BTreeMap<(ModelName, VariantName), LearnedMeasurements> {
        let mut all = BTreeMap::new();
        for (name, model) in self.planner.models.iter() {
            for (variant, learned) in &model.learned_of_variants {
                all.insert((name.clone(), variant.clone()), *learned);
            }
        }
        all
    }

    /// Returns the measurements of one variant; `None` if the model is unknown.
    #[must_use]
    pub fn learned_of(&self, model: &ModelName, variant: &VariantName) -> Option<LearnedMeasurements> {
        self.planner.models.get(model).map(|model| model.learned_of(variant))
    }

    /// Whether shutdown is not ordered and all engines that already ran are known.
    ///
    /// A gateway that is not the leader knows them from the leader.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        (self.planner.adopted || !self.planner.role.decides()) && self.planner.shutdown.is_none()
    }

    /// Whether this gateway commands engines, or will once it has adopted the running ones.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.planner.role != LeadershipRole::Follower
    }

    /// Whether this gateway leads and has adopted all engines that already ran.
    #[must_use]
    pub fn is_active_leader(&self) -> bool {
        self.planner.role == LeadershipRole::Leader && self.planner.adopted
    }

    /// The latest [`GenerationFloor`](super::event::Event::GenerationFloor). Each term of this gateway's leadership
    /// begins with one of its own.
    #[must_use]
    pub const fn generation_floor(&self) -> Generation {
        self.generation_floor
    }

    /// Whether shutdown was ordered. Gates then close at this gateway alone.
    #[must_use]
    pub fn is_shutting_down(&self) -> bool {
        self.planner.shutdown.is_some()
    }

    /// Whether shutdown was ordered and nothing is left to wait for.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.planner.is_finished()
    }
}
