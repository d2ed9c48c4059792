//! What models wait for, told until it may be otherwise.

use std::collections::BTreeMap;

use rouse::{
    fleet::{Changes, Fleet, Plan, Room},
    model::{Accelerators, Memory, ModelName},
};

use crate::controllers::status::Waiting;

/// What each model waits for. Whoever was refused for want of memory waits no longer, and would be refused again for as long as
/// nothing of what it needs is given back, and it needs the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Wants(BTreeMap<ModelName, Want>);

#[derive(Clone, Debug)]
struct Want {
    why: Waiting,
    /// Of who wants memory; `None`: nothing is known of its model.
    terms: Option<Terms>,
}

/// What a model needs, and what there is of that.
#[derive(Clone, Debug, PartialEq)]
struct Terms {
    accelerators: Accelerators,
    memory: Memory,
    room: Option<Room>,
}

impl Terms {
    fn of(fleet: &Fleet, model: &ModelName) -> Option<Self> {
        let spec = fleet.spec(model)?;
        let room = spec.accelerators.pool().and_then(|pool| fleet.room(pool));
        Some(Self { accelerators: spec.accelerators.clone(), memory: spec.memory, room })
    }
}

impl Want {
    fn of(fleet: &Fleet, model: &ModelName, why: Waiting) -> Self {
        let memory = matches!(why, Waiting::Memory(_));
        Self { why, terms: Terms::of(fleet, model).filter(|_| memory) }
    }
}

impl Wants {
    pub(super) fn get(&self, model: &ModelName) -> Option<&Waiting> {
        self.0.get(model).map(|want| &want.why)
    }

    pub(super) fn refused(&mut self, fleet: &Fleet, model: &ModelName, why: Waiting) {
        self.0.insert(model.clone(), Want::of(fleet, model, why));
    }

    /// After a turn of the decisions.
    pub(super) fn after(&self, fleet: &Fleet, plan: &Plan, changes: &Changes) -> Self {
        let mut now: BTreeMap<ModelName, Want> = fleet
            .reasons(plan)
            .map(|(model, text, memory)| {
                let text = text.to_owned();
                let why = if memory { Waiting::Memory(text) } else { Waiting::Other(text) };
                (model.clone(), Want::of(fleet, model, why))
            })
            .collect();
        for (model, want) in &self.0 {
            let Some(terms) = want.terms.as_ref().filter(|_| !changes.models.contains(model)) else {
                continue;
            };
            let same = !changes.configured || Terms::of(fleet, model).as_ref() == Some(terms);
            if same && !is_given_back(fleet, changes, &terms.accelerators) {
                now.entry(model.clone()).or_insert_with(|| want.clone());
            }
        }
        Self(now)
    }

    /// For whom it says something else than this one.
    pub(super) fn differing(&self, before: &Self) -> Vec<ModelName> {
        let differs = |model: &&ModelName| self.get(model) != before.get(model);
        before.0.keys().chain(self.0.keys()).filter(differs).cloned().collect()
    }
}

/// Whether an engine has gone that may have had something of these.
fn is_given_back(fleet: &Fleet, changes: &Changes, accelerators: &Accelerators) -> bool {
    let shared = |model: &ModelName| {
        let other = fleet.spec(model).and_then(|spec| spec.accelerators.pool());
        other.is_none_or(|other| accelerators.pool() == Some(other))
    };
    let gone = |model: &ModelName| fleet.engines_of(model).any(|engine| !engine.state.has_process());
    changes.models.iter().any(|model| gone(model) && shared(model))
}

#[cfg(test)]
mod tests {
    use rouse::{
        fleet::event::Event,
        model::{Accelerator, Configuration, ModelSpec, Settings},
        units::{Bytes, Tick},
    };

    use super::*;
    use crate::config;

    fn spec(memory: Bytes) -> ModelSpec {
        let text = "accelerators: [{id: own, memory: 8Gi}]\nmodels:\n  - name: large\n    memory: {awake: 1Gi}\n    \
                    engine: {kind: custom, command: [e, '${PORT}']}";
        let mut spec =
            config::parse(text, "test").unwrap_or_else(|errors| panic!("{errors}")).core.models.remove(0);
        spec.accelerators = Accelerators::Of { pool: "own".into(), count: 1 };
        spec.memory.awake = memory;
        spec
    }

    fn configure(fleet: &mut Fleet, own: Bytes, other: Bytes, memory: Bytes) -> (Plan, Changes) {
        let pool = |(id, capacity): (&str, Bytes)| Accelerator {
            id: id.into(),
            capacity,
            metered: false,
            units: Some(2),
        };
        let configuration = Configuration {
            settings: Settings::default(),
            accelerators: [("own", own), ("other", other)].map(pool).into(),
            models: vec![spec(memory)],
        };
        fleet.on(&Event::Configured { configuration: Box::new(configuration) }, Tick(1));
        (fleet.plan(Tick(1)), fleet.take_changes())
    }

    #[test]
    fn who_was_refused_waits_until_its_own_pool_or_its_own_need_is_another() {
        let [small, large] = [Bytes::gib(16), Bytes::gib(64)];
        let mut fleet = Fleet::new();
        configure(&mut fleet, small, small, large);
        let model: ModelName = "large".into();
        let why = Waiting::Memory("64Gi wanted".to_owned());
        let mut wants = Wants::default();
        wants.refused(&fleet, &model, why.clone());
        let mut after = |own, other, need| {
            let (plan, changes) = configure(&mut fleet, own, other, need);
            assert!(changes.configured);
            wants.after(&fleet, &plan, &changes)
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
