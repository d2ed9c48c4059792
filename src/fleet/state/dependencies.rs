//! Dependencies between models, and what follows for each of their engines.
//!
//! A model with `dependencies` is launched or woken only when all its dependencies serve, and their dependencies too:
//! its *closure*. Demand for the model is demand for all of them. While the model has an engine that is more than
//! asleep, one serving engine of each dependency stays: neither another model nor idleness evicts it.
//! [`crate::fleet::plan::admit::closure`] describes how a model and its closure are reserved together.
//!
//! Most models have neither dependencies nor dependents; then everything here is one lookup in an empty map.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    engine::{Engine, PendingReservation, state::LifecycleState},
    fleet::plan::{ModelRecord, PlanBuilder, Planner},
    model::{AcceleratorId, EngineId, ModelName},
};

type ModelRecordMap = BTreeMap<ModelName, ModelRecord>;

/// A model with more dependencies is not served: every decision about the model checks each of them.
const MAX_CLOSURE_MODELS: usize = 256;

/// Derived from the models' specs, so two states never differ by it.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct DependencyGraph {
    /// The closure of every model that has dependencies.
    closures: Arc<BTreeMap<ModelName, DependencyClosure>>,
    /// The direct and indirect dependents of every model that has any.
    dependents: Arc<BTreeMap<ModelName, BTreeSet<ModelName>>>,
}

/// All that one model needs.
#[derive(Clone, Debug, Default)]
struct DependencyClosure {
    /// Each model comes after its own dependencies.
    models: Vec<ModelName>,
    /// Why the model can never have all its dependencies.
    error: Option<String>,
}

impl PartialEq for DependencyGraph {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl DependencyGraph {
    pub(in crate::fleet) fn from_models(models: &ModelRecordMap) -> Self {
        let specs = models.values().filter_map(|model| model.spec.as_deref());
        let closures: BTreeMap<ModelName, DependencyClosure> = specs
            .filter(|spec| !spec.dependencies.is_empty())
            .map(|spec| (spec.name.clone(), DependencyClosure::of(&spec.name, models)))
            .collect();
        let mut dependents: BTreeMap<ModelName, BTreeSet<ModelName>> = BTreeMap::new();
        for (name, closure) in &closures {
            for needed in &closure.models {
                dependents.entry(needed.clone()).or_default().insert(name.clone());
            }
        }
        Self { closures: Arc::new(closures), dependents: Arc::new(dependents) }
    }

    /// Whether no model has dependencies.
    pub(in crate::fleet) fn is_empty(&self) -> bool {
        self.closures.is_empty()
    }

    /// Returns all that this model needs, each after its own dependencies.
    pub(in crate::fleet) fn closure(&self, model: &ModelName) -> &[ModelName] {
        self.closures.get(model).map_or(&[], |closure| &closure.models)
    }

    /// Returns why this model can never have all its dependencies, if so.
    pub(in crate::fleet) fn closure_error(&self, model: &ModelName) -> Option<&str> {
        self.closures.get(model)?.error.as_deref()
    }

    /// Returns every model that has dependencies.
    pub(in crate::fleet) fn models_with_dependencies(&self) -> impl Iterator<Item = &ModelName> {
        self.closures.keys()
    }

    /// Returns the models that need this model.
    pub(in crate::fleet) fn dependents(&self, model: &ModelName) -> impl Iterator<Item = &ModelName> {
        self.dependents.get(model).into_iter().flatten()
    }

    /// Whether the model has dependencies or dependents, so its reservation may wait long before the start.
    pub(in crate::fleet) fn involves(&self, model: &ModelName) -> bool {
        !self.is_empty() && (self.closures.contains_key(model) || self.dependents.contains_key(model))
    }
}

impl DependencyClosure {
    /// Computes the closure depth first. A model on a cycle needs itself: it never starts, nor does it make others
    /// wait.
    fn of(name: &ModelName, models: &ModelRecordMap) -> Self {
        let direct = |of: &ModelName| {
            let spec = models.get(of).and_then(|model| model.spec.as_deref());
            spec.map_or(&[][..], |spec| &spec.dependencies).iter()
        };
        let mut closure = Self::default();
        let mut visited = BTreeSet::new();
        let mut path = vec![(name, direct(name))];
        while let Some((of, rest)) = path.last_mut() {
            let Some(next) = rest.next() else {
                if *of != name {
                    closure.models.push((*of).clone());
                }
                path.pop();
                continue;
            };
            if next == name {
                let broken = Some(format!("the model needs itself: '{of}' needs '{name}'"));
                return Self { models: Vec::new(), error: broken };
            } else if models.get(next).is_none_or(|model| model.spec.is_none()) {
                closure.error = Some(format!("the model needs '{next}', which is not configured"));
            } else if visited.len() == MAX_CLOSURE_MODELS && !visited.contains(next) {
                let broken = Some(format!("the model needs more than {MAX_CLOSURE_MODELS} other models"));
                return Self { models: Vec::new(), error: broken };
            } else if visited.insert(next) {
                path.push((next, direct(next)));
            }
        }
        closure
    }
}

impl Planner {
    /// Whether an engine of this model takes requests.
    pub(in crate::fleet) fn serves(&self, model: &ModelName) -> bool {
        self.engines.of_model(model).any(Engine::serves)
    }

    /// Whether an engine of this model serves, or will without any further decision.
    pub(in crate::fleet) fn is_coming_up(&self, model: &ModelName) -> bool {
        let comes = |e: &Engine| {
            e.pending_reservation.is_some()
                || e.state.is_starting()
                || e.is_rehearsing()
                || (e.state == LifecycleState::Awake && !e.stub_gate_closed)
        };
        self.engines.of_model(model).any(comes)
    }

    /// Whether an engine of this model has a reservation, or a process that does not sleep.
    pub(in crate::fleet) fn is_active(&self, model: &ModelName) -> bool {
        let active = |e: &Engine| {
            e.pending_reservation.is_some()
                || e.is_rehearsing()
                || (e.state.has_process() && !matches!(e.state, LifecycleState::Asleep { .. }))
        };
        self.engines.of_model(model).any(active)
    }

    /// Whether an engine of this model has a reservation, starts, is awake or drains.
    pub(in crate::fleet) fn is_up(&self, model: &ModelName) -> bool {
        let up = |e: &Engine| {
            e.pending_reservation.is_some()
                || e.state.is_starting()
                || matches!(e.state, LifecycleState::Awake | LifecycleState::Draining { .. })
        };
        self.engines.of_model(model).any(up)
    }

    /// Returns the primary engines of the dependencies that do not serve.
    pub(in crate::fleet) fn missing_engines(&self, model: &ModelName) -> impl Iterator<Item = EngineId> {
        let lacking = self.dependencies.closure(model).iter().filter(|needed| !self.serves(needed));
        lacking.filter_map(|needed| self.primary_engine(needed)).map(|e| e.id.clone())
    }

    /// Returns the first dependency that is configured and does not serve.
    pub(in crate::fleet) fn first_missing(&self, model: &ModelName) -> Option<&ModelName> {
        self.dependencies.closure(model).iter().find(|needed| !self.serves(needed))
    }

    /// Whether all dependencies serve. A model that can never have all of them lacks one.
    pub(in crate::fleet) fn dependencies_serve(&self, model: &ModelName) -> bool {
        self.dependencies.closure_error(model).is_none() && self.first_missing(model).is_none()
    }

    /// Whether all dependencies serve, or will without any further decision.
    pub(in crate::fleet) fn can_be_satisfied(&self, model: &ModelName) -> bool {
        self.dependencies.closure_error(model).is_none()
            && self.dependencies.closure(model).iter().all(|m| self.is_coming_up(m))
    }

    /// Returns a dependent of this model that is more than asleep.
    pub(in crate::fleet) fn active_dependent(&self, model: &ModelName) -> Option<&ModelName> {
        self.dependencies.dependents(model).find(|dependent| self.is_active(dependent))
    }

    /// Whether the dependents rely on this engine of its model.
    ///
    /// They rely on a serving engine, else on an awake one whose stub's gate is closed.
    pub(in crate::fleet) fn is_relied_on(&self, e: &Engine) -> bool {
        let rank = |e: &Engine| (!e.serves(), e.failing_since.is_some(), e.id.replica);
        let available =
            self.engines.of_model(&e.id.model).filter(|other| other.serves() || other.is_blocked_by_stub());
        available.min_by_key(|other| rank(other)).is_some_and(|first| first.id == e.id)
    }

    /// Returns the dependent that keeps this engine from being evicted.
    pub(in crate::fleet) fn keeping_dependent(&self, e: &Engine) -> Option<&ModelName> {
        if self.dependencies.is_empty() {
            return None;
        }
        self.active_dependent(&e.id.model).filter(|_| self.is_relied_on(e))
    }
}

impl PlanBuilder<'_> {
    /// Whether the model has waiters or a wake order, or is kept awake.
    pub(in crate::fleet) fn is_wanted(&self, model: &ModelName) -> bool {
        self.waiting(model) > 0
            || self.planner.models.get(model).is_some_and(|m| m.keeps_any_awake())
            || self.ordered_awake(model)
    }

    /// Returns a dependent of this model that is more than asleep or wanted.
    pub(in crate::fleet) fn wanting_dependent(&self, model: &ModelName) -> Option<&ModelName> {
        let wants = |m: &&ModelName| self.planner.is_active(m) || self.is_wanted(m);
        self.planner.dependencies.dependents(model).find(wants)
    }

    /// Whether a dependent keeps this engine from being idle.
    pub(in crate::fleet) fn is_wanted_by_dependents(&self, id: &EngineId) -> bool {
        if self.planner.dependencies.is_empty() || self.wanting_dependent(&id.model).is_none() {
            return false;
        }
        match self.engine(id) {
            Some(e) if e.serves() || e.is_blocked_by_stub() => self.planner.is_relied_on(e),
            _ => !self.planner.serves(&id.model),
        }
    }

    /// Whether the engine has its reservation together with its dependencies or its dependents.
    ///
    /// It may have been reserved alone, before a reload gave its model any.
    pub(in crate::fleet) fn is_in_dependency_group(
        &self,
        id: &EngineId,
        placing: &PendingReservation,
    ) -> bool {
        placing.in_dependency_group || self.planner.dependencies.involves(&id.model)
    }

    /// Whether this engine cannot use its reservation.
    ///
    /// A dependency will not serve without a decision, or the engine could not start there as it is configured now.
    pub(in crate::fleet) fn is_reservation_useless(
        &self,
        id: &EngineId,
        placing: &PendingReservation,
    ) -> bool {
        let planner = &self.planner;
        if !self.is_in_dependency_group(id, placing) {
            return false;
        }
        let has_missing = planner.first_missing(&id.model).is_some();
        let broken = planner.dependencies.closure_error(&id.model).is_some();
        let hopeless =
            broken || (has_missing && (!planner.can_be_satisfied(&id.model) || self.ordered_stop(id)));
        let is_healthy = |a: &AcceleratorId| planner.ledger.accelerators.get(a).is_some_and(|a| a.healthy);
        hopeless || self.is_reservation_outdated(id, placing) || !placing.accelerators.iter().all(is_healthy)
    }

    /// Whether the reservation was made for an older configuration.
    fn is_reservation_outdated(&self, id: &EngineId, placing: &PendingReservation) -> bool {
        let (Some(e), Some(spec)) = (self.engine(id), self.planner.engine_spec(id)) else { return true };
        e.fingerprint != spec.fingerprint
            || placing.bytes < spec.accelerators.bytes_per_account(spec.memory.awake)
            || (!e.state.has_process()
                && self.planner.ledger.booked_amount(id).units < spec.accelerators.units().unwrap_or(0))
    }

    /// Whether a dependency does not serve yet, or another engine on the accelerators moves memory.
    pub(in crate::fleet) fn must_wait_to_start(&self, id: &EngineId, placing: &PendingReservation) -> bool {
        self.is_in_dependency_group(id, placing)
            && (self.planner.first_missing(&id.model).is_some()
                || self.has_interference(id, &placing.accelerators))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::{
            AcceleratorRequirement, EngineMemory, IdlePolicy, ModelSpec, RehearsalPolicy, SleepLevelPolicy,
        },
        sim::simulated_model,
        units::{Bytes, Millis, Tick},
    };

    fn models(graph: &[(&str, &[&str])]) -> ModelRecordMap {
        let model = |(name, dependencies): &(&str, &[&str])| {
            let nothing = EngineMemory { awake: Bytes::ZERO, asleep: Bytes::ZERO, host: Bytes::ZERO };
            let spec = ModelSpec {
                accelerators: AcceleratorRequirement::Count(0),
                idle: IdlePolicy {
                    sleep_after: None,
                    stop_after: None,
                    level: SleepLevelPolicy::Never,
                    rehearse: RehearsalPolicy::Never,
                },
                dependencies: dependencies.iter().map(|name| (*name).into()).collect(),
                start_timeout: Millis::secs(1),
                explicit_memory: true,
                can_sleep: false,
                fingerprint: 0,
                ..simulated_model(*name, nothing)
            };
            let spec = Some(Arc::new(spec));
            (ModelName::from(*name), ModelRecord { spec, ..ModelRecord::new(Tick(0)) })
        };
        graph.iter().map(model).collect()
    }

    fn closure<'a>(graph: &'a DependencyGraph, name: &str) -> Vec<&'a str> {
        graph.closure(&name.into()).iter().map(ModelName::as_str).collect()
    }

    #[test]
    fn what_is_needed_comes_in_the_order_in_which_it_can_start() {
        let graph = DependencyGraph::from_models(&models(&[
            ("top", &["left", "right"]),
            ("left", &["base"]),
            ("right", &["base", "left"]),
            ("base", &[]),
        ]));
        assert_eq!(closure(&graph, "top"), ["base", "left", "right"]);
        assert_eq!(closure(&graph, "right"), ["base", "left"]);
        assert!(closure(&graph, "base").is_empty());
        let dependents: Vec<&str> = graph.dependents(&"base".into()).map(ModelName::as_str).collect();
        assert_eq!(dependents, ["left", "right", "top"]);
    }

    #[test]
    fn what_can_never_be_had_is_named() {
        let graph = DependencyGraph::from_models(&models(&[
            ("a", &["b"]),
            ("b", &["a"]),
            ("over", &["a"]),
            ("self", &["self"]),
            ("lost", &["gone"]),
        ]));
        assert_eq!(graph.closure_error(&"a".into()), Some("the model needs itself: 'b' needs 'a'"));
        assert_eq!(graph.closure_error(&"self".into()), Some("the model needs itself: 'self' needs 'self'"));
        assert_eq!(
            graph.closure_error(&"lost".into()),
            Some("the model needs 'gone', which is not configured")
        );
        assert_eq!((graph.closure_error(&"over".into()), closure(&graph, "over")), (None, vec!["b", "a"]));
        let names: Vec<String> = (0..=MAX_CLOSURE_MODELS + 1).map(|n| format!("m{n}")).collect();
        let next = |n: usize| names.get(n + 1).map(|name| vec![name.as_str()]).unwrap_or_default();
        let chain: Vec<Vec<&str>> = (0..names.len()).map(next).collect();
        let chain: Vec<(&str, &[&str])> =
            names.iter().map(String::as_str).zip(chain.iter().map(Vec::as_slice)).collect();
        let graph = DependencyGraph::from_models(&models(&chain));
        assert!(graph.closure_error(&"m0".into()).is_some_and(|error| error.contains("more than 256")));
        assert_eq!(
            (graph.closure_error(&"m1".into()), closure(&graph, "m1").len()),
            (None, MAX_CLOSURE_MODELS)
        );
    }
}
