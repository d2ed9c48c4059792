//! All engines, with indexes of which engines share an accelerator.
//!
//! Planning works on a copy of the state, and most decisions change nothing. So copies share the engines until a write,
//! which copies engine by engine. Only this module maintains the indexes, since an engine changes only through
//! [`EngineTable::change`].

use std::{
    collections::{BTreeMap, BTreeSet},
    mem::Discriminant,
    net::SocketAddr,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{
    engine::{Admission, Engine, state::LifecycleState},
    model::{AcceleratorId, EngineId, ModelName},
    units::Generation,
};

type EngineMap = BTreeMap<EngineId, Arc<Engine>>;
type EnginesByAccelerator = BTreeMap<AcceleratorId, BTreeSet<EngineId>>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "EngineMap", into = "EngineMap")]
pub(in crate::fleet) struct EngineTable {
    engines: Arc<EngineMap>,
    /// Engines on each accelerator, including pending reservations.
    by_accelerator: Arc<EnginesByAccelerator>,
    /// Engines that will release memory on each accelerator without any further decision.
    winding_down: Arc<EnginesByAccelerator>,
    /// Engines that are ready for their first request and have none yet.
    awaiting_probe: Arc<BTreeSet<EngineId>>,
    /// Engines that the passing of time alone may change.
    time_driven: Arc<BTreeSet<EngineId>>,
    /// Engines changed since the last [`EngineTable::take_dirty`].
    dirty: Vec<EngineId>,
    /// Models with more than one engine.
    multi_engine_models: Arc<BTreeSet<ModelName>>,
    /// Engines that are new or hold nothing any more: [`EngineTable::retain`] may remove them.
    removal_candidates: BTreeSet<EngineId>,
    /// Models with an engine whose routing changed since the last [`EngineTable::take_rerouted`].
    rerouted_models: Arc<BTreeSet<ModelName>>,
}

impl EngineTable {
    pub(in crate::fleet) fn get(&self, id: &EngineId) -> Option<&Engine> {
        self.engines.get(id).map(|e| &**e)
    }

    pub(in crate::fleet) fn contains_key(&self, id: &EngineId) -> bool {
        self.engines.contains_key(id)
    }

    pub(in crate::fleet) fn values(&self) -> impl Iterator<Item = &Engine> {
        self.engines.values().map(|e| &**e)
    }

    pub(in crate::fleet) fn of_model(&self, model: &ModelName) -> impl Iterator<Item = &Engine> + use<'_> {
        let id = |replica| EngineId::new(model.clone(), replica);
        self.engines.range(id(0)..=id(u32::MAX)).map(|(_, e)| &**e)
    }

    /// Returns the engines on any of these accelerators, including pending reservations, ordered by name.
    pub(in crate::fleet) fn on_accelerators(&self, accelerators: &[AcceleratorId]) -> Vec<&Engine> {
        let mut ids: Vec<&EngineId> =
            accelerators.iter().filter_map(|a| self.by_accelerator.get(a)).flatten().collect();
        if accelerators.len() > 1 {
            ids.sort_unstable();
            ids.dedup();
        }
        ids.into_iter().filter_map(|id| self.get(id)).collect()
    }

    /// Returns the engines that will release memory on this accelerator without any further decision.
    pub(in crate::fleet) fn winding_down_on(
        &self,
        accelerator: &AcceleratorId,
    ) -> impl Iterator<Item = &Engine> {
        self.winding_down.get(accelerator).into_iter().flatten().filter_map(|id| self.get(id))
    }

    pub(in crate::fleet) fn awaiting_probe(&self) -> Vec<EngineId> {
        self.awaiting_probe.iter().cloned().collect()
    }

    /// Whether the indexes equal newly built ones.
    pub(in crate::fleet) fn has_consistent_indexes(&self) -> bool {
        let anew = Self::from(EngineMap::clone(&self.engines));
        let holds = |index: &EnginesByAccelerator| -> EnginesByAccelerator {
            index.iter().filter(|(_, ids)| !ids.is_empty()).map(|(a, ids)| (a.clone(), ids.clone())).collect()
        };
        holds(&self.by_accelerator) == holds(&anew.by_accelerator)
            && holds(&self.winding_down) == holds(&anew.winding_down)
            && self.multi_engine_models == anew.multi_engine_models
            && self.awaiting_probe == anew.awaiting_probe
            && self.time_driven == anew.time_driven
    }

    pub(in crate::fleet) fn time_driven(&self) -> Vec<EngineId> {
        self.time_driven.iter().cloned().collect()
    }

    pub(in crate::fleet) fn change<R>(
        &mut self,
        id: &EngineId,
        change: impl FnOnce(&mut Engine) -> R,
    ) -> Option<R> {
        if !self.engines.contains_key(id) {
            return None;
        }
        let engine = Arc::make_mut(Arc::make_mut(&mut self.engines).get_mut(id)?);
        let before = IndexKeys::of(engine);
        let result = change(engine);
        let after = IndexKeys::of(engine);
        self.dirty.push(id.clone());
        if before != after {
            self.reindex(id, &before, &after);
            if before.occupied && !after.occupied {
                self.removal_candidates.insert(id.clone());
            }
        }
        Some(result)
    }

    pub(in crate::fleet) fn insert(&mut self, engine: Engine) {
        let after = IndexKeys::of(&engine);
        let id = engine.id.clone();
        let before = Arc::make_mut(&mut self.engines).insert(id.clone(), Arc::new(engine));
        self.reindex(&id, &before.map(|e| IndexKeys::of(&e)).unwrap_or_default(), &after);
        self.removal_candidates.insert(id.clone());
        self.dirty.push(id.clone());
        self.update_multi_engine(&id.model);
    }

    /// Returns the engines changed since the last call.
    pub(in crate::fleet) fn take_dirty(&mut self) -> Vec<EngineId> {
        std::mem::take(&mut self.dirty)
    }

    /// Marks all engines of a model as changed, because its operations or remote demand changed.
    pub(in crate::fleet) fn mark_model_dirty(&mut self, model: &ModelName) {
        let ids: Vec<EngineId> = self.of_model(model).map(|e| e.id.clone()).collect();
        self.dirty.extend(ids);
    }

    /// Models with more than one engine.
    pub(in crate::fleet) fn multi_engine_models(&self) -> impl Iterator<Item = &ModelName> {
        self.multi_engine_models.iter()
    }

    fn update_multi_engine(&mut self, model: &ModelName) {
        let plural = self.of_model(model).nth(1).is_some();
        if plural != self.multi_engine_models.contains(model) {
            let all = Arc::make_mut(&mut self.multi_engine_models);
            if plural {
                all.insert(model.clone())
            } else {
                all.remove(model)
            };
        }
    }

    /// Removes and returns the engines for which `keep` is false.
    ///
    /// Checks only the removal candidates: a fleet adopts its engines one event at a time, and checking all engines
    /// each time would be quadratic.
    pub(in crate::fleet) fn retain(&mut self, keep: impl Fn(&Engine) -> bool) -> Vec<Arc<Engine>> {
        let loose = std::mem::take(&mut self.removal_candidates);
        let leave = |e: &&Arc<Engine>| !keep(e);
        let removed: Vec<Arc<Engine>> =
            loose.iter().filter_map(|id| self.engines.get(id)).filter(leave).cloned().collect();
        for engine in &removed {
            Arc::make_mut(&mut self.engines).remove(&engine.id);
            self.reindex(&engine.id, &IndexKeys::of(engine), &IndexKeys::default());
            self.dirty.push(engine.id.clone());
            self.update_multi_engine(&engine.id.model);
        }
        removed
    }

    /// Makes every engine a removal candidate, because the configuration changed.
    pub(in crate::fleet) fn mark_all_removable(&mut self) {
        self.removal_candidates = self.engines.keys().cloned().collect();
    }

    /// Marks the model's routes as changed for a reason that no [`RoutingKey`] shows.
    pub(in crate::fleet) fn mark_rerouted(&mut self, model: &ModelName) {
        Arc::make_mut(&mut self.rerouted_models).insert(model.clone());
    }

    pub(in crate::fleet) fn take_rerouted(&mut self) -> Arc<BTreeSet<ModelName>> {
        std::mem::take(&mut self.rerouted_models)
    }

    fn reindex(&mut self, id: &EngineId, before: &IndexKeys, after: &IndexKeys) {
        if before.routing != after.routing && !self.rerouted_models.contains(&id.model) {
            Arc::make_mut(&mut self.rerouted_models).insert(id.model.clone());
        }
        move_in_index(&mut self.by_accelerator, id, &before.accelerators, &after.accelerators);
        move_in_index(&mut self.winding_down, id, &before.winding_down, &after.winding_down);
        set_in_index(&mut self.awaiting_probe, id, before.awaiting_probe, after.awaiting_probe);
        set_in_index(&mut self.time_driven, id, before.time_driven, after.time_driven);
    }
}

fn move_in_index(
    index: &mut Arc<EnginesByAccelerator>,
    id: &EngineId,
    before: &[AcceleratorId],
    after: &[AcceleratorId],
) {
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

fn set_in_index(index: &mut Arc<BTreeSet<EngineId>>, id: &EngineId, before: bool, after: bool) {
    if before == after {
        return;
    }
    if after {
        Arc::make_mut(index).insert(id.clone());
    } else {
        Arc::make_mut(index).remove(id);
    }
}

/// The values of an engine that the indexes depend on.
#[derive(Default, PartialEq, Eq)]
struct IndexKeys {
    accelerators: Vec<AcceleratorId>,
    winding_down: Vec<AcceleratorId>,
    awaiting_probe: bool,
    time_driven: bool,
    occupied: bool,
    routing: Option<RoutingKey>,
}

/// The values of an engine that affect request routing.
type RoutingKey = (Generation, Discriminant<LifecycleState>, Admission, Option<SocketAddr>, u64);

impl IndexKeys {
    fn of(engine: &Engine) -> Self {
        let to_be = engine.pending_reservation.iter().flat_map(|placing| &placing.accelerators);
        let leaves = engine.state.is_winding_down()
            || (matches!(engine.state, LifecycleState::Asleep { .. }) && engine.releasing_since.is_some());
        Self {
            winding_down: if leaves { engine.accelerators.clone() } else { Vec::new() },
            awaiting_probe: engine.needs_probe(),
            accelerators: engine.accelerators.iter().chain(to_be).cloned().collect(),
            time_driven: engine.failures > 0 || matches!(engine.state, LifecycleState::Backoff { .. }),
            occupied: engine.state.has_process()
                || engine.unclosed_gate.is_some()
                || engine.pending_reservation.is_some(),
            routing: Some((
                engine.generation,
                std::mem::discriminant(&engine.state),
                engine.admission,
                engine.address,
                engine.fingerprint,
            )),
        }
    }
}

impl PartialEq for EngineTable {
    fn eq(&self, other: &Self) -> bool {
        self.engines == other.engines
    }
}

impl From<EngineMap> for EngineTable {
    fn from(map: EngineMap) -> Self {
        let mut engines = Self { removal_candidates: map.keys().cloned().collect(), ..Self::default() };
        for (id, engine) in &map {
            engines.reindex(id, &IndexKeys::default(), &IndexKeys::of(engine));
        }
        let ids: Vec<&EngineId> = map.keys().collect();
        let plural = ids.windows(2).filter_map(|pair| match pair {
            [a, b] if a.model == b.model => Some(a.model.clone()),
            _ => None,
        });
        engines.multi_engine_models = Arc::new(plural.collect());
        Self { engines: Arc::new(map), ..engines }
    }
}

impl From<EngineTable> for EngineMap {
    fn from(engines: EngineTable) -> Self {
        Self::clone(&engines.engines)
    }
}
