//! Every engine, and who is near whom.
//!
//! A decision is made on a copy of the state, and most decisions change nothing: what is copied is shared until it is
//! written to, and then engine by engine. The indexes are kept here and nowhere else, since an engine can be changed
//! only through [`Engines::change`].

use std::{
    collections::{BTreeMap, BTreeSet},
    mem::Discriminant,
    net::SocketAddr,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{
    engine::{Door, Engine, state::State},
    model::{AcceleratorId, EngineId, ModelName},
    units::Generation,
};

type Map = BTreeMap<EngineId, Arc<Engine>>;
type Index = BTreeMap<AcceleratorId, BTreeSet<EngineId>>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Map", into = "Map")]
pub(super) struct Engines {
    known: Arc<Map>,
    /// Who is on an accelerator, or is to be.
    near: Arc<Index>,
    /// Who will give memory back on an accelerator without any further decision.
    leaving: Arc<Index>,
    /// Who must prove itself, and has nobody to do it with.
    unproven: Arc<BTreeSet<EngineId>>,
    /// To whom the passing of time alone does something, whatever they do.
    restless: Arc<BTreeSet<EngineId>>,
    /// Who has been changed since somebody took note of it.
    touched: Vec<EngineId>,
    /// More than one engine.
    plural: Arc<BTreeSet<ModelName>>,
    /// Who has come, or holds nothing any more: it may have to be forgotten.
    loose: BTreeSet<EngineId>,
    /// Models with an engine that requests see otherwise than when this was last taken.
    moved: Arc<BTreeSet<ModelName>>,
}

impl Engines {
    pub(super) fn get(&self, id: &EngineId) -> Option<&Engine> {
        self.known.get(id).map(|e| &**e)
    }

    pub(super) fn contains_key(&self, id: &EngineId) -> bool {
        self.known.contains_key(id)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Engine> {
        self.known.values().map(|e| &**e)
    }

    pub(super) fn of(&self, model: &ModelName) -> impl Iterator<Item = &Engine> + use<'_> {
        let id = |replica| EngineId::new(model.clone(), replica);
        self.known.range(id(0)..=id(u32::MAX)).map(|(_, e)| &**e)
    }

    /// Those on any of these accelerators, or to be there, in the order of names.
    pub(super) fn near(&self, accelerators: &[AcceleratorId]) -> Vec<&Engine> {
        let mut ids: Vec<&EngineId> =
            accelerators.iter().filter_map(|a| self.near.get(a)).flatten().collect();
        if accelerators.len() > 1 {
            ids.sort_unstable();
            ids.dedup();
        }
        ids.into_iter().filter_map(|id| self.get(id)).collect()
    }

    /// Those who will give memory back on this accelerator without any further decision.
    pub(super) fn leaving(&self, accelerator: &AcceleratorId) -> impl Iterator<Item = &Engine> {
        self.leaving.get(accelerator).into_iter().flatten().filter_map(|id| self.get(id))
    }

    pub(super) fn unproven(&self) -> Vec<EngineId> {
        self.unproven.iter().cloned().collect()
    }

    /// The indexes are what they would be, were they made anew.
    pub(super) fn is_indexed(&self) -> bool {
        let anew = Self::from(Map::clone(&self.known));
        let holds = |index: &Index| -> Index {
            index.iter().filter(|(_, ids)| !ids.is_empty()).map(|(a, ids)| (a.clone(), ids.clone())).collect()
        };
        holds(&self.near) == holds(&anew.near)
            && holds(&self.leaving) == holds(&anew.leaving)
            && self.plural == anew.plural
            && self.unproven == anew.unproven
            && self.restless == anew.restless
    }

    pub(super) fn restless(&self) -> Vec<EngineId> {
        self.restless.iter().cloned().collect()
    }

    pub(super) fn change<R>(&mut self, id: &EngineId, change: impl FnOnce(&mut Engine) -> R) -> Option<R> {
        if !self.known.contains_key(id) {
            return None;
        }
        let engine = Arc::make_mut(Arc::make_mut(&mut self.known).get_mut(id)?);
        let before = Facts::of(engine);
        let result = change(engine);
        let after = Facts::of(engine);
        self.touched.push(id.clone());
        if before != after {
            self.index(id, &before, &after);
            if before.holds && !after.holds {
                self.loose.insert(id.clone());
            }
        }
        Some(result)
    }

    pub(super) fn insert(&mut self, engine: Engine) {
        let after = Facts::of(&engine);
        let id = engine.id.clone();
        let before = Arc::make_mut(&mut self.known).insert(id.clone(), Arc::new(engine));
        self.index(&id, &before.map(|e| Facts::of(&e)).unwrap_or_default(), &after);
        self.loose.insert(id.clone());
        self.touched.push(id.clone());
        self.count(&id.model);
    }

    /// Who has been changed since this was last asked.
    pub(super) fn take_touched(&mut self) -> Vec<EngineId> {
        std::mem::take(&mut self.touched)
    }

    /// What is asked of them all has changed.
    pub(super) fn touch(&mut self, model: &ModelName) {
        let ids: Vec<EngineId> = self.of(model).map(|e| e.id.clone()).collect();
        self.touched.extend(ids);
    }

    /// Models with more than one engine.
    pub(super) fn plural(&self) -> impl Iterator<Item = &ModelName> {
        self.plural.iter()
    }

    fn count(&mut self, model: &ModelName) {
        let plural = self.of(model).nth(1).is_some();
        if plural != self.plural.contains(model) {
            let all = Arc::make_mut(&mut self.plural);
            if plural {
                all.insert(model.clone())
            } else {
                all.remove(model)
            };
        }
    }

    /// Forgets those that do not stay; they are returned. Only those that may have to go are asked about: a fleet adopts
    /// its engines one event after the other, and would look at each of them each time.
    pub(super) fn retain(&mut self, stays: impl Fn(&Engine) -> bool) -> Vec<Arc<Engine>> {
        let loose = std::mem::take(&mut self.loose);
        let leave = |e: &&Arc<Engine>| !stays(e);
        let left: Vec<Arc<Engine>> =
            loose.iter().filter_map(|id| self.known.get(id)).filter(leave).cloned().collect();
        for engine in &left {
            Arc::make_mut(&mut self.known).remove(&engine.id);
            self.index(&engine.id, &Facts::of(engine), &Facts::default());
            self.touched.push(engine.id.clone());
            self.count(&engine.id.model);
        }
        left
    }

    /// What is configured has changed: any of them may have to be forgotten.
    pub(super) fn loosen(&mut self) {
        self.loose = self.known.keys().cloned().collect();
    }

    pub(super) fn take_moved(&mut self) -> Arc<BTreeSet<ModelName>> {
        std::mem::take(&mut self.moved)
    }

    fn index(&mut self, id: &EngineId, before: &Facts, after: &Facts) {
        if before.seen != after.seen && !self.moved.contains(&id.model) {
            Arc::make_mut(&mut self.moved).insert(id.model.clone());
        }
        place(&mut self.near, id, &before.near, &after.near);
        place(&mut self.leaving, id, &before.leaving, &after.leaving);
        note(&mut self.unproven, id, before.unproven, after.unproven);
        note(&mut self.restless, id, before.restless, after.restless);
    }
}

fn place(index: &mut Arc<Index>, id: &EngineId, before: &[AcceleratorId], after: &[AcceleratorId]) {
    if before == after {
        return;
    }
    let index = Arc::make_mut(index);
    for accelerator in before {
        if let Some(engines) = index.get_mut(accelerator) {
            engines.remove(id);
        }
    }
    for accelerator in after {
        index.entry(accelerator.clone()).or_default().insert(id.clone());
    }
}

fn note(index: &mut Arc<BTreeSet<EngineId>>, id: &EngineId, before: bool, after: bool) {
    if before == after {
        return;
    }
    if after {
        Arc::make_mut(index).insert(id.clone());
    } else {
        Arc::make_mut(index).remove(id);
    }
}

/// What the indexes go by.
#[derive(Default, PartialEq, Eq)]
struct Facts {
    near: Vec<AcceleratorId>,
    leaving: Vec<AcceleratorId>,
    unproven: bool,
    restless: bool,
    holds: bool,
    seen: Option<Seen>,
}

/// What those who send requests see of an engine.
type Seen = (Generation, Discriminant<State>, Door, Option<SocketAddr>, u64);

impl Facts {
    fn of(engine: &Engine) -> Self {
        let to_be = engine.placing.iter().flat_map(|placing| &placing.accelerators);
        let leaves = engine.state.is_leaving()
            || (matches!(engine.state, State::Asleep { .. }) && engine.shrinking.is_some());
        Self {
            leaving: if leaves { engine.accelerators.clone() } else { Vec::new() },
            unproven: engine.wants_proof(),
            near: engine.accelerators.iter().chain(to_be).cloned().collect(),
            restless: engine.failures > 0 || matches!(engine.state, State::Backoff { .. }),
            holds: engine.state.has_process() || engine.orphan.is_some() || engine.placing.is_some(),
            seen: Some((
                engine.generation,
                std::mem::discriminant(&engine.state),
                engine.door,
                engine.address,
                engine.fingerprint,
            )),
        }
    }
}

impl PartialEq for Engines {
    fn eq(&self, other: &Self) -> bool {
        self.known == other.known
    }
}

impl From<Map> for Engines {
    fn from(known: Map) -> Self {
        let mut engines = Self { loose: known.keys().cloned().collect(), ..Self::default() };
        for (id, engine) in &known {
            engines.index(id, &Facts::default(), &Facts::of(engine));
        }
        let ids: Vec<&EngineId> = known.keys().collect();
        let plural = ids.windows(2).filter_map(|pair| match pair {
            [a, b] if a.model == b.model => Some(a.model.clone()),
            _ => None,
        });
        engines.plural = Arc::new(plural.collect());
        Self { known: Arc::new(known), ..engines }
    }
}

impl From<Engines> for Map {
    fn from(engines: Engines) -> Self {
        Self::clone(&engines.known)
    }
}
