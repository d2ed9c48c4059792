//! All engines, with indexes of those that share an accelerator, are in use, or change with time.
//!
//! Planning works on a copy of the state, and most decisions change nothing. So copies share the engines until a write,
//! which copies engine by engine ([`SharedMap`]). Only this module maintains the indexes, since an engine changes only
//! through [`EngineTable::change`]. A turn must not visit every engine: it reads an index instead.

mod index;
#[cfg(test)]
pub(in crate::fleet) mod visits;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

pub(in crate::fleet) use self::index::take_models;
use self::index::{
    EnginesByAccelerator, EnginesByTime, IndexKeys, due_by, move_in_index, move_in_time, set_in_index,
};
use crate::{
    engine::Engine,
    model::{AcceleratorId, EngineId, ModelName},
    shared_map::{SharedMap, SharedSet},
    units::Tick,
};

/// The engines as a journal stores them.
type EngineMap = BTreeMap<EngineId, Arc<Engine>>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "EngineMap", into = "EngineMap")]
pub(in crate::fleet) struct EngineTable {
    engines: SharedMap<EngineId, Arc<Engine>>,
    /// Engines on each accelerator, including pending reservations.
    by_accelerator: EnginesByAccelerator,
    /// Engines that will release memory on each accelerator without any further decision.
    winding_down: EnginesByAccelerator,
    /// Engines on each accelerator that move memory there, are about to, or fail.
    moving: EnginesByAccelerator,
    /// Engines that are ready for their first request and have none yet.
    awaiting_probe: SharedSet<EngineId>,
    /// Engines in back-off, by its end.
    backoffs: EnginesByTime,
    /// Awake engines with earlier failures, by the moment from which those no longer count.
    recoveries: EnginesByTime,
    /// Engines with leases, of models with more than one engine.
    leased_replicas: SharedSet<EngineId>,
    /// Engines with leases.
    leased: SharedSet<EngineId>,
    /// Engines that have yielded to another engine that has not had its turn yet.
    yielded: SharedSet<EngineId>,
    /// Engines changed since the last [`EngineTable::take_dirty`].
    dirty: Vec<EngineId>,
    /// Models with more than one engine.
    multi_engine_models: SharedSet<ModelName>,
    /// Engines that are new or hold nothing any more: [`EngineTable::retain`] may remove them.
    removal_candidates: BTreeSet<EngineId>,
    /// Models with an engine whose routing changed since the last [`EngineTable::take_rerouted`].
    rerouted_models: Arc<BTreeSet<ModelName>>,
    /// Models with an engine that got its first lease or lost its last, or was used elsewhere, since the last
    /// [`EngineTable::take_use_changed`].
    use_changed_models: Arc<BTreeSet<ModelName>>,
}

impl EngineTable {
    pub(in crate::fleet) fn get(&self, id: &EngineId) -> Option<&Engine> {
        self.engines.get(id).map(|e| visited(e))
    }

    pub(in crate::fleet) fn contains_key(&self, id: &EngineId) -> bool {
        self.engines.contains_key(id)
    }

    pub(in crate::fleet) fn ids(&self) -> Vec<EngineId> {
        self.engines.keys().cloned().collect()
    }

    pub(in crate::fleet) fn values(&self) -> impl Iterator<Item = &Engine> {
        self.engines.values().map(|e| visited(e))
    }

    pub(in crate::fleet) fn of_model(&self, model: &ModelName) -> impl Iterator<Item = &Engine> + use<'_> {
        let first = EngineId::first_key_of(model.clone());
        let from_first = self.engines.iter_from(&first);
        from_first.take_while(move |(id, _)| id.model == first.model).map(|(_, e)| visited(e))
    }

    /// Returns the engines on any of these accelerators, including pending reservations, ordered by name.
    pub(in crate::fleet) fn on_accelerators(&self, accelerators: &[AcceleratorId]) -> Vec<&Engine> {
        self.indexed(&self.by_accelerator, accelerators)
    }

    /// Returns those on any of these accelerators that start, fall asleep, stop, fail or release memory, or have a
    /// reservation to start with, ordered by name.
    ///
    /// A start looks at its neighbours for nothing else, and a pool may have thousands that do none of this.
    pub(in crate::fleet) fn moving_on(&self, accelerators: &[AcceleratorId]) -> Vec<&Engine> {
        self.indexed(&self.moving, accelerators)
    }

    /// Returns the engines that will release memory on any of these accelerators without any further decision.
    pub(in crate::fleet) fn winding_down_on_any(&self, accelerators: &[AcceleratorId]) -> Vec<&Engine> {
        self.indexed(&self.winding_down, accelerators)
    }

    fn indexed(&self, index: &EnginesByAccelerator, accelerators: &[AcceleratorId]) -> Vec<&Engine> {
        let mut ids: Vec<&EngineId> =
            accelerators.iter().filter_map(|a| index.get(a)).flat_map(SharedSet::iter).collect();
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
        let ids = self.winding_down.get(accelerator).into_iter().flat_map(SharedSet::iter);
        ids.filter_map(|id| self.get(id))
    }

    pub(in crate::fleet) fn awaiting_probe(&self) -> Vec<EngineId> {
        self.awaiting_probe.iter().cloned().collect()
    }

    /// Whether the indexes equal newly built ones.
    pub(in crate::fleet) fn has_consistent_indexes(&self) -> bool {
        let anew = Self::from(self.to_map());
        let is_same = |one: &EnginesByAccelerator, other: &EnginesByAccelerator| {
            let held = |(_, ids): &(&AcceleratorId, &SharedSet<EngineId>)| !ids.is_empty();
            one.iter().filter(held).eq(other.iter().filter(held))
        };
        is_same(&self.by_accelerator, &anew.by_accelerator)
            && is_same(&self.winding_down, &anew.winding_down)
            && is_same(&self.moving, &anew.moving)
            && self.multi_engine_models == anew.multi_engine_models
            && self.awaiting_probe == anew.awaiting_probe
            && self.backoffs == anew.backoffs
            && self.recoveries == anew.recoveries
            && self.leased_replicas == anew.leased_replicas
            && self.leased == anew.leased
            && self.yielded == anew.yielded
    }

    fn to_map(&self) -> EngineMap {
        self.engines.iter().map(|(id, engine)| (id.clone(), Arc::clone(engine))).collect()
    }

    /// Engines whose back-off has ended by now.
    pub(in crate::fleet) fn with_ended_backoff(&self, now: Tick) -> Vec<EngineId> {
        due_by(&self.backoffs, now)
    }

    /// Engines whose earlier failures no longer count.
    pub(in crate::fleet) fn recovered(&self, now: Tick) -> Vec<EngineId> {
        due_by(&self.recoveries, now)
    }

    /// Engines with leases, of models with more than one engine.
    pub(in crate::fleet) fn leased_replicas(&self) -> impl Iterator<Item = &EngineId> {
        self.leased_replicas.iter()
    }

    /// Engines with leases.
    pub(in crate::fleet) fn leased(&self) -> impl Iterator<Item = &EngineId> {
        self.leased.iter()
    }

    /// Engines that have yielded to this one.
    pub(in crate::fleet) fn yielded_to(&self, other: &EngineId) -> Vec<EngineId> {
        let yielded = self.yielded.iter().filter_map(|id| self.get(id));
        yielded.filter(|e| e.yielded_to.as_ref() == Some(other)).map(|e| e.id.clone()).collect()
    }

    pub(in crate::fleet) fn change<R>(
        &mut self,
        id: &EngineId,
        change: impl FnOnce(&mut Engine) -> R,
    ) -> Option<R> {
        #[cfg(test)]
        visits::record();
        let engine = Arc::make_mut(self.engines.get_mut(id)?);
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
        let before = self.engines.insert(id.clone(), Arc::new(engine));
        self.reindex(&id, &before.map(|e| IndexKeys::of(&e)).unwrap_or_default(), &after);
        self.removal_candidates.insert(id.clone());
        self.dirty.push(id.clone());
        self.update_multi_engine(&id.model);
    }

    /// Returns the engines changed since the last call.
    pub(in crate::fleet) fn take_dirty(&mut self) -> Vec<EngineId> {
        std::mem::take(&mut self.dirty)
    }

    /// Marks all engines of a model as changed, because its operations, remote demand or learned times changed.
    pub(in crate::fleet) fn mark_model_dirty(&mut self, model: &ModelName) {
        let ids: Vec<EngineId> = self.of_model(model).map(|e| e.id.clone()).collect();
        self.dirty.extend(ids);
    }

    pub(in crate::fleet) fn has_several_engines(&self, model: &ModelName) -> bool {
        self.multi_engine_models.contains(model)
    }

    fn update_multi_engine(&mut self, model: &ModelName) {
        let plural = self.of_model(model).nth(1).is_some();
        let before = self.multi_engine_models.contains(model);
        if plural == before {
            return;
        }
        set_in_index(&mut self.multi_engine_models, model, before, plural);
        let leased: Vec<EngineId> =
            self.of_model(model).filter(|e| e.leases > 0).map(|e| e.id.clone()).collect();
        for id in &leased {
            set_in_index(&mut self.leased_replicas, id, before, plural);
        }
    }

    /// Removes and returns the engines for which `keep` is false.
    ///
    /// Checks only the removal candidates: a fleet adopts its engines one event at a time, and checking all engines
    /// each time would be quadratic.
    pub(in crate::fleet) fn retain(&mut self, keep: impl Fn(&Engine) -> bool) -> Vec<Arc<Engine>> {
        if self.removal_candidates.is_empty() {
            return Vec::new();
        }
        let loose = std::mem::take(&mut self.removal_candidates);
        let leave = |e: &&Arc<Engine>| !keep(e);
        let removed: Vec<Arc<Engine>> =
            loose.iter().filter_map(|id| self.engines.get(id)).filter(leave).cloned().collect();
        for engine in &removed {
            self.engines.remove(&engine.id);
            self.reindex(&engine.id, &IndexKeys::of(engine), &IndexKeys::default());
            self.dirty.push(engine.id.clone());
            self.update_multi_engine(&engine.id.model);
        }
        removed
    }

    /// Marks all engines of a model as changed and as removal candidates, because its configuration changed.
    pub(in crate::fleet) fn mark_reconfigured(&mut self, model: &ModelName) {
        let ids: Vec<EngineId> = self.of_model(model).map(|e| e.id.clone()).collect();
        self.dirty.extend_from_slice(&ids);
        self.removal_candidates.extend(ids);
    }

    /// Marks the model as used by another gateway.
    pub(in crate::fleet) fn mark_use_changed(&mut self, model: &ModelName) {
        if !self.use_changed_models.contains(model) {
            Arc::make_mut(&mut self.use_changed_models).insert(model.clone());
        }
    }

    /// Marks the model's routes as changed for a reason that no [`index::RoutingKey`] shows.
    pub(in crate::fleet) fn mark_rerouted(&mut self, model: &ModelName) {
        Arc::make_mut(&mut self.rerouted_models).insert(model.clone());
    }

    pub(in crate::fleet) fn take_rerouted(&mut self) -> BTreeSet<ModelName> {
        take_models(&mut self.rerouted_models)
    }

    pub(in crate::fleet) fn take_use_changed(&mut self) -> BTreeSet<ModelName> {
        take_models(&mut self.use_changed_models)
    }

    fn reindex(&mut self, id: &EngineId, before: &IndexKeys, after: &IndexKeys) {
        if before.leased != after.leased {
            self.mark_use_changed(&id.model);
        }
        if before.routing != after.routing && !self.rerouted_models.contains(&id.model) {
            Arc::make_mut(&mut self.rerouted_models).insert(id.model.clone());
        }
        move_in_index(&mut self.by_accelerator, id, before.accelerators(), after.accelerators());
        move_in_index(&mut self.winding_down, id, before.winding_down(), after.winding_down());
        move_in_index(&mut self.moving, id, before.moving(), after.moving());
        set_in_index(&mut self.awaiting_probe, id, before.awaiting_probe, after.awaiting_probe);
        if self.multi_engine_models.contains(&id.model) {
            set_in_index(&mut self.leased_replicas, id, before.leased, after.leased);
        }
        set_in_index(&mut self.leased, id, before.leased, after.leased);
        set_in_index(&mut self.yielded, id, before.yielded, after.yielded);
        move_in_time(&mut self.backoffs, id, before.backoff_until, after.backoff_until);
        move_in_time(&mut self.recoveries, id, before.recovers_at, after.recovers_at);
    }
}

/// Returns the engine, and counts the visit in tests.
fn visited(engine: &Engine) -> &Engine {
    #[cfg(test)]
    visits::record();
    engine
}

impl PartialEq for EngineTable {
    fn eq(&self, other: &Self) -> bool {
        self.engines == other.engines
    }
}

impl From<EngineMap> for EngineTable {
    fn from(map: EngineMap) -> Self {
        let mut engines = Self { removal_candidates: map.keys().cloned().collect(), ..Self::default() };
        let ids: Vec<&EngineId> = map.keys().collect();
        let plural = ids.windows(2).filter_map(|pair| match pair {
            [a, b] if a.model == b.model => Some(a.model.clone()),
            _ => None,
        });
        engines.multi_engine_models = plural.collect();
        for (id, engine) in &map {
            engines.reindex(id, &IndexKeys::default(), &IndexKeys::of(engine));
        }
        Self { engines: map.into(), ..engines }
    }
}

impl From<EngineTable> for EngineMap {
    fn from(engines: EngineTable) -> Self {
        engines.to_map()
    }
}
