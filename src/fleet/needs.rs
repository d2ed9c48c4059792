//! Which models need which, and what follows for each of their engines.
//!
//! A model with `dependencies` is launched or woken only when all that it needs serve, and what they need as well: its
//! *closure*. Demand for it is demand for all of them. While it has an engine that is more than asleep, of each of them
//! one engine that serves stays: no other model and no idleness puts it away. How a model and its closure come to be
//! reserved together is told in [`super::together`].
//!
//! Most models need nobody and nobody needs them: then everything here is one look into an empty map.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::plan::{Draft, Model, Planner};
use crate::{
    engine::{Engine, Placing, state::State},
    model::{AcceleratorId, EngineId, ModelName},
};

type Models = BTreeMap<ModelName, Model>;

/// Who needs more than this is not served: every one of them is looked at whenever something is decided about it.
const MOST: usize = 256;

/// Made from the models' specs, so it makes no difference between two states.
#[derive(Clone, Debug, Default)]
pub(super) struct Needs {
    /// Of every model that needs others.
    closures: Arc<BTreeMap<ModelName, Closure>>,
    /// Of every model that is needed: who needs it, be it by way of others.
    dependents: Arc<BTreeMap<ModelName, BTreeSet<ModelName>>>,
}

/// All that one model needs.
#[derive(Clone, Debug, Default)]
struct Closure {
    /// Each behind those that it needs itself.
    all: Vec<ModelName>,
    /// Why it can never have them all.
    broken: Option<String>,
}

impl PartialEq for Needs {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Needs {
    pub(super) fn of(models: &Models) -> Self {
        let specs = models.values().filter_map(|model| model.spec.as_deref());
        let closures: BTreeMap<ModelName, Closure> = specs
            .filter(|spec| !spec.dependencies.is_empty())
            .map(|spec| (spec.name.clone(), Closure::of(&spec.name, models)))
            .collect();
        let mut dependents: BTreeMap<ModelName, BTreeSet<ModelName>> = BTreeMap::new();
        for (name, closure) in &closures {
            for needed in &closure.all {
                dependents.entry(needed.clone()).or_default().insert(name.clone());
            }
        }
        Self { closures: Arc::new(closures), dependents: Arc::new(dependents) }
    }

    /// No model needs another.
    pub(super) fn is_empty(&self) -> bool {
        self.closures.is_empty()
    }

    /// All that this model needs, each behind those that it needs itself.
    pub(super) fn closure(&self, model: &ModelName) -> &[ModelName] {
        self.closures.get(model).map_or(&[], |closure| &closure.all)
    }

    /// Why this model can never have all that it needs, if so.
    pub(super) fn broken(&self, model: &ModelName) -> Option<&str> {
        self.closures.get(model)?.broken.as_deref()
    }

    /// Every model that needs others.
    pub(super) fn dependent(&self) -> impl Iterator<Item = &ModelName> {
        self.closures.keys()
    }

    /// Who needs this model.
    pub(super) fn dependents(&self, model: &ModelName) -> impl Iterator<Item = &ModelName> {
        self.dependents.get(model).into_iter().flatten()
    }

    /// It needs others, or they need it: it may be reserved long before it can start.
    pub(super) fn concern(&self, model: &ModelName) -> bool {
        !self.is_empty() && (self.closures.contains_key(model) || self.dependents.contains_key(model))
    }
}

impl Closure {
    /// Depth first. What is in a circle needs itself: it is never started, and nobody waits for its sake.
    fn of(name: &ModelName, models: &Models) -> Self {
        let direct = |of: &ModelName| {
            let spec = models.get(of).and_then(|model| model.spec.as_deref());
            spec.map_or(&[][..], |spec| &spec.dependencies).iter()
        };
        let mut closure = Self::default();
        let mut seen = BTreeSet::new();
        let mut path = vec![(name, direct(name))];
        while let Some((of, rest)) = path.last_mut() {
            let Some(next) = rest.next() else {
                if *of != name {
                    closure.all.push((*of).clone());
                }
                path.pop();
                continue;
            };
            if next == name {
                let broken = Some(format!("it needs itself: '{of}' needs '{name}'"));
                return Self { all: Vec::new(), broken };
            } else if models.get(next).is_none_or(|model| model.spec.is_none()) {
                closure.broken = Some(format!("it needs '{next}', which is not configured"));
            } else if seen.len() == MOST && !seen.contains(next) {
                let broken = Some(format!("it needs more than {MOST} other models"));
                return Self { all: Vec::new(), broken };
            } else if seen.insert(next) {
                path.push((next, direct(next)));
            }
        }
        closure
    }
}

impl Planner {
    /// An engine of this model takes requests.
    pub(super) fn serves(&self, model: &ModelName) -> bool {
        self.engines.of(model).any(Engine::serves)
    }

    /// An engine of this model serves, or will without any further decision.
    pub(super) fn is_coming(&self, model: &ModelName) -> bool {
        let comes = |e: &Engine| {
            e.placing.is_some() || e.state.is_starting() || (e.state == State::Awake && !e.gated)
        };
        self.engines.of(model).any(comes)
    }

    /// An engine of this model is reserved for, or has a process that does not sleep.
    pub(super) fn is_active(&self, model: &ModelName) -> bool {
        let active = |e: &Engine| {
            e.placing.is_some() || (e.state.has_process() && !matches!(e.state, State::Asleep { .. }))
        };
        self.engines.of(model).any(active)
    }

    /// An engine of this model is reserved for, starts, is awake or drains.
    pub(super) fn is_up(&self, model: &ModelName) -> bool {
        let up = |e: &Engine| {
            e.placing.is_some()
                || e.state.is_starting()
                || matches!(e.state, State::Awake | State::Draining { .. })
        };
        self.engines.of(model).any(up)
    }

    /// Of all that this model needs and that does not serve, the engines that would.
    pub(super) fn lacking(&self, model: &ModelName) -> impl Iterator<Item = EngineId> {
        let lacking = self.needs.closure(model).iter().filter(|needed| !self.serves(needed));
        lacking.filter_map(|needed| self.leader(needed)).map(|e| e.id.clone())
    }

    /// The first of all that this model needs that does not serve.
    pub(super) fn lacks(&self, model: &ModelName) -> Option<&ModelName> {
        self.needs.closure(model).iter().find(|needed| !self.serves(needed))
    }

    /// All that this model needs serve, or will without any further decision.
    pub(super) fn may_hope(&self, model: &ModelName) -> bool {
        self.needs.broken(model).is_none() && self.needs.closure(model).iter().all(|m| self.is_coming(m))
    }

    /// A model that needs this one, and is more than asleep.
    pub(super) fn needed_by(&self, model: &ModelName) -> Option<&ModelName> {
        self.needs.dependents(model).find(|dependent| self.is_active(dependent))
    }

    /// Of its model this is the engine that those who need it rely on: one that serves, else one whose stub lets nobody
    /// in.
    pub(super) fn is_relied_on(&self, e: &Engine) -> bool {
        let rank = |e: &Engine| (!e.serves(), e.failing_since.is_some(), e.id.replica);
        let others = self.engines.of(&e.id.model).filter(|other| other.serves() || other.is_held());
        others.min_by_key(|other| rank(other)).is_some_and(|first| first.id == e.id)
    }

    /// Who keeps this engine from being put away, because it needs it.
    pub(super) fn keeper(&self, e: &Engine) -> Option<&ModelName> {
        if self.needs.is_empty() {
            return None;
        }
        self.needed_by(&e.id.model).filter(|_| self.is_relied_on(e))
    }
}

impl Draft<'_> {
    /// Somebody asks for this model itself, or it is to run in any case.
    pub(super) fn is_wanted(&self, model: &ModelName) -> bool {
        self.waiting(model) > 0
            || self.planner.models.get(model).is_some_and(|m| m.keeps(0))
            || self.ordered_awake(model)
    }

    /// A model that needs this one, and is more than asleep or is to be.
    pub(super) fn wanted_by(&self, model: &ModelName) -> Option<&ModelName> {
        let wants = |m: &&ModelName| self.planner.is_active(m) || self.is_wanted(m);
        self.planner.needs.dependents(model).find(wants)
    }

    /// A model that needs this one keeps this engine of it from being idle.
    pub(super) fn is_wanted_for_others(&self, id: &EngineId) -> bool {
        if self.planner.needs.is_empty() || self.wanted_by(&id.model).is_none() {
            return false;
        }
        match self.engine(id) {
            Some(e) if e.serves() || e.is_held() => self.planner.is_relied_on(e),
            _ => !self.planner.serves(&id.model),
        }
    }

    fn is_patient(&self, id: &EngineId, placing: &Placing) -> bool {
        placing.patient || self.planner.needs.concern(&id.model)
    }

    /// What is reserved for this engine is of no use to it: something that it needs will not serve by itself, or it could not
    /// start there as it is now.
    pub(super) fn is_in_vain(&self, id: &EngineId, placing: &Placing) -> bool {
        let planner = &self.planner;
        if !self.is_patient(id, placing) {
            return false;
        }
        let lacks = planner.lacks(&id.model).is_some();
        let broken = planner.needs.broken(&id.model).is_some();
        let hopeless = broken || (lacks && (!planner.may_hope(&id.model) || self.ordered_stop(id)));
        let well = |a: &AcceleratorId| planner.ledger.accelerators.get(a).is_some_and(|a| a.healthy);
        hopeless || self.is_outgrown(id, placing) || !placing.accelerators.iter().all(well)
    }

    /// It was reserved for as it is no longer configured.
    fn is_outgrown(&self, id: &EngineId, placing: &Placing) -> bool {
        let (Some(e), Some(spec)) = (self.engine(id), self.planner.spec(&id.model)) else { return true };
        e.fingerprint != spec.fingerprint
            || placing.bytes < spec.accelerators.in_one_place(spec.memory.awake)
            || (!e.state.has_process()
                && self.planner.ledger.part(id).units < spec.accelerators.units().unwrap_or(0))
    }

    /// Something that this engine needs does not serve yet, or another one on its accelerators moves memory.
    pub(super) fn is_too_early(&self, id: &EngineId, placing: &Placing) -> bool {
        self.is_patient(id, placing)
            && (self.planner.lacks(&id.model).is_some() || self.is_disturbed(id, &placing.accelerators))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fleet::event::Learned,
        model::{Accelerators, Idle, LevelPolicy, Memory, ModelSpec, OwnQueue},
        units::{Bytes, Millis, Tick},
    };

    fn models(graph: &[(&str, &[&str])]) -> Models {
        let model = |(name, dependencies): &(&str, &[&str])| {
            let nothing = Memory { awake: Bytes::ZERO, asleep: Bytes::ZERO, host: Bytes::ZERO };
            let spec = ModelSpec {
                name: (*name).into(),
                aliases: Vec::new(),
                accelerators: Accelerators::Count(0),
                memory: nothing,
                idle: Idle { sleep_after: None, stop_after: None, level: LevelPolicy::Never },
                replicas: 1,
                pinned: false,
                min_replicas: 0,
                dependencies: dependencies.iter().map(|name| (*name).into()).collect(),
                priority: 0,
                max_concurrency: None,
                start_timeout: Millis::secs(1),
                explicit_memory: true,
                can_sleep: false,
                fingerprint: 0,
                eviction: None,
                queue: OwnQueue::default(),
            };
            let spec = Some(Arc::new(spec));
            let model = Model { spec, pin: None, learned: Learned::default(), gap: None, since: Tick(0) };
            (ModelName::from(*name), model)
        };
        graph.iter().map(model).collect()
    }

    fn closure<'a>(needs: &'a Needs, name: &str) -> Vec<&'a str> {
        needs.closure(&name.into()).iter().map(ModelName::as_str).collect()
    }

    #[test]
    fn what_is_needed_comes_in_the_order_in_which_it_can_start() {
        let needs = Needs::of(&models(&[
            ("top", &["left", "right"]),
            ("left", &["base"]),
            ("right", &["base", "left"]),
            ("base", &[]),
        ]));
        assert_eq!(closure(&needs, "top"), ["base", "left", "right"]);
        assert_eq!(closure(&needs, "right"), ["base", "left"]);
        assert!(closure(&needs, "base").is_empty());
        let dependents: Vec<&str> = needs.dependents(&"base".into()).map(ModelName::as_str).collect();
        assert_eq!(dependents, ["left", "right", "top"]);
    }

    #[test]
    fn what_can_never_be_had_is_named() {
        let needs = Needs::of(&models(&[
            ("a", &["b"]),
            ("b", &["a"]),
            ("over", &["a"]),
            ("self", &["self"]),
            ("lost", &["gone"]),
        ]));
        assert_eq!(needs.broken(&"a".into()), Some("it needs itself: 'b' needs 'a'"));
        assert_eq!(needs.broken(&"self".into()), Some("it needs itself: 'self' needs 'self'"));
        assert_eq!(needs.broken(&"lost".into()), Some("it needs 'gone', which is not configured"));
        assert_eq!((needs.broken(&"over".into()), closure(&needs, "over")), (None, vec!["b", "a"]));
        let names: Vec<String> = (0..=MOST + 1).map(|n| format!("m{n}")).collect();
        let next = |n: usize| names.get(n + 1).map(|name| vec![name.as_str()]).unwrap_or_default();
        let chain: Vec<Vec<&str>> = (0..names.len()).map(next).collect();
        let chain: Vec<(&str, &[&str])> =
            names.iter().map(String::as_str).zip(chain.iter().map(Vec::as_slice)).collect();
        let needs = Needs::of(&models(&chain));
        assert!(needs.broken(&"m0".into()).is_some_and(|why| why.contains("more than 256")));
        assert_eq!((needs.broken(&"m1".into()), closure(&needs, "m1").len()), (None, MOST));
    }
}
