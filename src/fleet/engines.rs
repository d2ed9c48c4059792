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

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Map", into = "Map")]
pub(super) struct Engines {
    known: Arc<Map>,
    /// Who is on an accelerator, or is to be.
    near: Arc<BTreeMap<AcceleratorId, BTreeSet<EngineId>>>,
    /// To whom the passing of time alone does something, whatever they do.
    restless: Arc<BTreeSet<EngineId>>,
    /// One has come, or holds nothing any more: it may have to be forgotten.
    loose: bool,
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
        if before != after {
            self.loose |= before.holds && !after.holds;
            self.index(id, &before, &after);
        }
        Some(result)
    }

    pub(super) fn insert(&mut self, engine: Engine) {
        let after = Facts::of(&engine);
        let id = engine.id.clone();
        let before = Arc::make_mut(&mut self.known).insert(id.clone(), Arc::new(engine));
        self.index(&id, &before.map(|e| Facts::of(&e)).unwrap_or_default(), &after);
        self.loose = true;
    }

    /// Forgets those that do not stay, if there can be any; they are returned. `None`: nothing has changed in that.
    pub(super) fn retain(&mut self, stays: impl Fn(&Engine) -> bool) -> Option<Vec<Arc<Engine>>> {
        if !std::mem::take(&mut self.loose) {
            return None;
        }
        let leave = |e: &&Arc<Engine>| !stays(e);
        let left: Vec<Arc<Engine>> = self.known.values().filter(leave).cloned().collect();
        for engine in &left {
            Arc::make_mut(&mut self.known).remove(&engine.id);
            self.index(&engine.id, &Facts::of(engine), &Facts::default());
        }
        Some(left)
    }

    /// What is configured has changed.
    pub(super) const fn loosen(&mut self) {
        self.loose = true;
    }

    pub(super) fn take_moved(&mut self) -> Arc<BTreeSet<ModelName>> {
        std::mem::take(&mut self.moved)
    }

    fn index(&mut self, id: &EngineId, before: &Facts, after: &Facts) {
        if before.seen != after.seen && !self.moved.contains(&id.model) {
            Arc::make_mut(&mut self.moved).insert(id.model.clone());
        }
        if before.near != after.near {
            let near = Arc::make_mut(&mut self.near);
            for accelerator in &before.near {
                if let Some(engines) = near.get_mut(accelerator) {
                    engines.remove(id);
                }
            }
            for accelerator in &after.near {
                near.entry(accelerator.clone()).or_default().insert(id.clone());
            }
        }
        if before.restless != after.restless {
            let restless = Arc::make_mut(&mut self.restless);
            if after.restless {
                restless.insert(id.clone());
            } else {
                restless.remove(id);
            }
        }
    }
}

/// What the indexes go by.
#[derive(Default, PartialEq, Eq)]
struct Facts {
    near: Vec<AcceleratorId>,
    restless: bool,
    holds: bool,
    seen: Option<Seen>,
}

/// What those who send requests see of an engine.
type Seen = (Generation, Discriminant<State>, Door, Option<SocketAddr>, u64);

impl Facts {
    fn of(engine: &Engine) -> Self {
        let to_be = engine.placing.iter().flat_map(|placing| &placing.accelerators);
        Self {
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
        let mut engines = Self { loose: true, ..Self::default() };
        for (id, engine) in &known {
            engines.index(id, &Facts::default(), &Facts::of(engine));
        }
        Self { known: Arc::new(known), ..engines }
    }
}

impl From<Engines> for Map {
    fn from(engines: Engines) -> Self {
        Self::clone(&engines.known)
    }
}
