//! Tracks why models wait, until the reason may no longer hold.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    fleet::{AcceleratorCapacity, Fleet, Plan, RoutingChanges},
    model::{AcceleratorRequirement, EngineMemory, ModelName, ModelSpec},
};

use crate::status::ModelWaitReason;

/// Why each model waits.
///
/// A request refused for lack of memory waits no longer, but the next one would be refused too while the model's demand
/// stays the same and none of the memory it needs is released. So the reason stays until then.
#[derive(Clone, Debug, Default)]
pub(super) struct WaitReasons(BTreeMap<ModelName, Arc<TrackedWait>>);

#[derive(Clone, Debug)]
struct TrackedWait {
    reason: ModelWaitReason,
    /// The demand of each variant of a model that lacks memory; `None` for other reasons and for unknown models.
    demand: Option<Vec<DemandSnapshot>>,
}

/// A variant's demand, and the capacity available for it.
#[derive(Clone, Debug, PartialEq)]
struct DemandSnapshot {
    accelerators: AcceleratorRequirement,
    memory: EngineMemory,
    available: Option<AcceleratorCapacity>,
}

impl DemandSnapshot {
    /// Returns the demand of each variant of the model.
    fn of_model(fleet: &Fleet, model: &ModelName) -> Option<Vec<Self>> {
        let demand = |(accelerators, memory): (&AcceleratorRequirement, EngineMemory)| {
            let available = accelerators.pool().and_then(|pool| fleet.accelerator_capacity(pool));
            Self { accelerators: accelerators.clone(), memory, available }
        };
        Some(requirements(fleet.spec(model)?).into_iter().map(demand).collect())
    }
}

/// Returns what an engine of each variant requires.
fn requirements(spec: &ModelSpec) -> Vec<(&AcceleratorRequirement, EngineMemory)> {
    if spec.variants.is_empty() {
        return vec![(&spec.accelerators, spec.memory)];
    }
    spec.variants.iter().map(|variant| (&variant.accelerators, variant.memory)).collect()
}

impl TrackedWait {
    fn of(fleet: &Fleet, model: &ModelName, reason: ModelWaitReason) -> Self {
        let demand = match reason {
            ModelWaitReason::Memory(_) => DemandSnapshot::of_model(fleet, model),
            ModelWaitReason::Other(_) => None,
        };
        Self { reason, demand }
    }

    fn has_reason(&self, text: &str, is_memory_shortage: bool) -> bool {
        match &self.reason {
            ModelWaitReason::Memory(known) => is_memory_shortage && known == text,
            ModelWaitReason::Other(known) => !is_memory_shortage && known == text,
        }
    }
}

impl WaitReasons {
    pub(super) fn get(&self, model: &ModelName) -> Option<&ModelWaitReason> {
        self.0.get(model).map(|want| &want.reason)
    }

    pub(super) fn record_refusal(&mut self, fleet: &Fleet, model: &ModelName, reason: ModelWaitReason) {
        self.0.insert(model.clone(), Arc::new(TrackedWait::of(fleet, model, reason)));
    }

    /// Returns the reasons after a turn: the current ones, and earlier refusals that still hold.
    ///
    /// A reason that stays is shared, not made anew: most turns change none, and a model's demand changes only with the
    /// configuration.
    pub(super) fn updated(&self, fleet: &Fleet, plan: &Plan, changes: &RoutingChanges) -> Self {
        let wait_of = |model: &ModelName, text: &str, memory: bool| {
            let known = self.0.get(model).filter(|known| known.has_reason(text, memory));
            if let Some(known) = known.filter(|_| !changes.may_reconfigure(model)) {
                return Arc::clone(known);
            }
            let text = text.to_owned();
            let reason = if memory { ModelWaitReason::Memory(text) } else { ModelWaitReason::Other(text) };
            Arc::new(TrackedWait::of(fleet, model, reason))
        };
        let mut now: BTreeMap<ModelName, Arc<TrackedWait>> = fleet
            .reasons(plan)
            .map(|(model, text, memory)| (model.clone(), wait_of(model, text, memory)))
            .collect();
        for (model, want) in &self.0 {
            let Some(terms) = want.demand.as_ref().filter(|_| !changes.models.contains(model)) else {
                continue;
            };
            let same = !changes.may_reconfigure(model)
                || DemandSnapshot::of_model(fleet, model).as_ref() == Some(terms);
            if same && !terms.iter().any(|terms| is_released(fleet, changes, &terms.accelerators)) {
                now.entry(model.clone()).or_insert_with(|| Arc::clone(want));
            }
        }
        Self(now)
    }

    /// Returns the models whose reason differs from `before`.
    pub(super) fn differing(&self, before: &Self) -> Vec<ModelName> {
        let is_same = |model: &ModelName, wait: &Arc<TrackedWait>| {
            let other = before.0.get(model);
            other.is_some_and(|other| Arc::ptr_eq(other, wait) || other.reason == wait.reason)
        };
        let gone = before.0.keys().filter(|model| !self.0.contains_key(*model));
        let differing = self.0.iter().filter(|(model, wait)| !is_same(model, wait)).map(|(model, _)| model);
        gone.chain(differing).cloned().collect()
    }
}

/// Whether an engine has ended that may have held some of these accelerators.
fn is_released(fleet: &Fleet, changes: &RoutingChanges, accelerators: &AcceleratorRequirement) -> bool {
    let shared = |model: &ModelName| {
        let is_shared = |(other, _): (&AcceleratorRequirement, EngineMemory)| {
            other.pool().is_none_or(|other| accelerators.pool() == Some(other))
        };
        fleet.spec(model).is_none_or(|spec| requirements(spec).into_iter().any(is_shared))
    };
    let is_gone = |model: &ModelName| fleet.engines_of(model).any(|engine| !engine.state.has_process());
    changes.models.iter().any(|model| is_gone(model) && shared(model))
}

#[cfg(test)]
mod tests {
    use rouse::{
        fleet::event::Event,
        model::{Accelerator, FleetConfig, FleetSettings, ModelSpec},
        units::{Bytes, Tick},
    };

    use super::*;

    fn spec(memory: Bytes) -> ModelSpec {
        let text = "accelerators: [{id: own, memory: 8Gi}]\nmodels:\n  - name: large\n    memory: {awake: 1Gi}\n    \
                    engine: {kind: custom, command: [e, '${PORT}']}";
        let mut spec = rouse_config::parse(text, "test")
            .unwrap_or_else(|errors| panic!("{errors}"))
            .core
            .models
            .remove(0);
        spec.accelerators = AcceleratorRequirement::InPool { pool: "own".into(), count: 1 };
        spec.memory.awake = memory;
        spec
    }

    fn configure(fleet: &mut Fleet, own: Bytes, other: Bytes, memory: Bytes) -> (Plan, RoutingChanges) {
        let pool = |(id, capacity): (&str, Bytes)| Accelerator {
            units: Some(2),
            ..Accelerator::new(id.into(), capacity)
        };
        let configuration = FleetConfig {
            settings: FleetSettings::default(),
            accelerators: [("own", own), ("other", other)].map(pool).into(),
            models: vec![spec(memory)],
        };
        fleet.on(&Event::Configured { configuration: Box::new(configuration) }, Tick(1));
        (fleet.plan(Tick(1)), fleet.take_routing_changes())
    }

    #[test]
    fn who_was_refused_waits_until_its_own_pool_or_its_own_need_is_another() {
        let [small, large] = [Bytes::gib(16), Bytes::gib(64)];
        let mut fleet = Fleet::new();
        configure(&mut fleet, small, small, large);
        let model: ModelName = "large".into();
        let why = ModelWaitReason::Memory("64Gi wanted".to_owned());
        let mut wants = WaitReasons::default();
        wants.record_refusal(&fleet, &model, why.clone());
        let mut after = |own, other, need| {
            let (plan, changes) = configure(&mut fleet, own, other, need);
            assert!(changes.may_reconfigure(&"large".into()));
            wants.updated(&fleet, &plan, &changes)
        };
        let unmoved = after(small, large, large);
        assert_eq!(unmoved.get(&model), Some(&why), "another pool has grown");
        assert!(unmoved.differing(&wants).is_empty());
        assert_eq!(after(small, large, small).get(&model), None, "it needs less");
        let grown = after(large, large, large);
        assert_eq!(grown.get(&model), None);
        assert_eq!(grown.differing(&wants), [model]);
    }
}
