//! Tracks which engines are on which accelerators, as far as known.
//!
//! A reading covers an accelerator, and counts as one engine's only if that engine is alone there. Except in pools of
//! slots, the gateway does not pick accelerators: the kubelet does, and stubs or DCGM's exporter report them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rouse::model::{AcceleratorId, EngineId};

/// All engines that have a Pod.
#[derive(Debug, Default)]
pub(super) struct OccupancyMap(Mutex<Occupants>);

#[derive(Debug, Default)]
struct Occupants {
    engines: BTreeMap<EngineId, Occupant>,
    /// Engines on each accelerator, as far as known.
    known: BTreeMap<AcceleratorId, BTreeSet<EngineId>>,
    /// Engines whose accelerators are not known, by node.
    unknown: BTreeMap<Option<String>, BTreeSet<EngineId>>,
}

#[derive(Debug)]
struct Occupant {
    node: Option<String>,
    /// `None` if not reported yet.
    accelerators: Option<BTreeSet<AcceleratorId>>,
}

/// One engine's entry in the map; dropping it removes the entry.
#[derive(Debug)]
pub(super) struct AcceleratorOccupancy {
    occupancy: Arc<OccupancyMap>,
    engine: EngineId,
    node: Option<String>,
}

impl OccupancyMap {
    /// Adds an engine. `accelerators`: those that the leader chose; `None` if they are reported later.
    pub(super) fn occupy(
        self: &Arc<Self>,
        engine: EngineId,
        node: Option<String>,
        accelerators: Option<BTreeSet<AcceleratorId>>,
    ) -> AcceleratorOccupancy {
        self.all().insert(engine.clone(), Occupant { node: node.clone(), accelerators });
        AcceleratorOccupancy { occupancy: Arc::clone(self), engine, node }
    }

    fn all(&self) -> MutexGuard<'_, Occupants> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Occupants {
    /// Adds an engine, in place of its earlier entry.
    fn insert(&mut self, engine: EngineId, occupant: Occupant) {
        self.remove(&engine);
        match &occupant.accelerators {
            Some(accelerators) => {
                for accelerator in accelerators {
                    self.known.entry(accelerator.clone()).or_default().insert(engine.clone());
                }
            }
            None => {
                self.unknown.entry(occupant.node.clone()).or_default().insert(engine.clone());
            }
        }
        self.engines.insert(engine, occupant);
    }

    fn remove(&mut self, engine: &EngineId) -> Option<Occupant> {
        let occupant = self.engines.remove(engine)?;
        match &occupant.accelerators {
            Some(accelerators) => {
                accelerators.iter().for_each(|accelerator| take_out(&mut self.known, accelerator, engine));
            }
            None => take_out(&mut self.unknown, &occupant.node, engine),
        }
        Some(occupant)
    }

    /// Whether another engine is known to have one of the accelerators.
    fn has_other_on(&self, accelerators: &BTreeSet<AcceleratorId>, engine: &EngineId) -> bool {
        accelerators.iter().any(|accelerator| has_other(self.known.get(accelerator), engine))
    }

    /// Whether another engine whose accelerators are unknown may be on this node.
    fn may_have_other_at(&self, node: Option<&String>, engine: &EngineId) -> bool {
        if node.is_none() {
            return self.unknown.values().any(|engines| has_other(Some(engines), engine));
        }
        [node.cloned(), None].iter().any(|node| has_other(self.unknown.get(node), engine))
    }
}

fn has_other(engines: Option<&BTreeSet<EngineId>>, engine: &EngineId) -> bool {
    engines.into_iter().flatten().any(|other| other != engine)
}

/// Removes the engine from the set of this key.
fn take_out<K: Ord>(sets: &mut BTreeMap<K, BTreeSet<EngineId>>, key: &K, engine: &EngineId) {
    if let Some(engines) = sets.get_mut(key) {
        engines.remove(engine);
        if engines.is_empty() {
            sets.remove(key);
        }
    }
}

impl AcceleratorOccupancy {
    /// Records the engine's accelerators and returns whether no other engine has one of them.
    ///
    /// `shared`: other engines can get the same accelerators. Then any engine on the same node whose accelerators are
    /// unknown may have one of them.
    pub(super) fn is_exclusive(&self, accelerators: &BTreeSet<AcceleratorId>, shared: bool) -> bool {
        let mut all = self.occupancy.all();
        if let Some(occupant) = all.remove(&self.engine) {
            let accelerators = Some(accelerators.clone());
            all.insert(self.engine.clone(), Occupant { accelerators, ..occupant });
        }
        let is_shared = all.has_other_on(accelerators, &self.engine)
            || shared && all.may_have_other_at(self.node.as_ref(), &self.engine);
        !is_shared
    }
}

impl Drop for AcceleratorOccupancy {
    fn drop(&mut self) {
        self.occupancy.all().remove(&self.engine);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids(names: &[&str]) -> BTreeSet<AcceleratorId> {
        names.iter().map(|name| AcceleratorId::from(*name)).collect()
    }

    fn enter(occupancy_map: &Arc<OccupancyMap>, model: &str, node: &str) -> AcceleratorOccupancy {
        occupancy_map.occupy(EngineId::new(model.into(), 0), Some(node.to_owned()), None)
    }

    #[test]
    fn who_has_an_accelerator_that_another_has_as_well_is_not_alone() {
        let tenants = Arc::default();
        let (a, b) = (enter(&tenants, "a", "n"), enter(&tenants, "b", "n"));
        assert!(a.is_exclusive(&ids(&["1", "2"]), false));
        assert!(b.is_exclusive(&ids(&["3"]), false));
        assert!(!b.is_exclusive(&ids(&["2", "3"]), false));
        assert!(!a.is_exclusive(&ids(&["1", "2"]), false), "it has heard of the other");
        drop(b);
        assert!(a.is_exclusive(&ids(&["1", "2"]), false), "the other is gone");
    }

    #[test]
    fn where_accelerators_are_shared_whoever_was_not_heard_of_may_be_there() {
        let tenants = Arc::default();
        let (a, b) = (enter(&tenants, "a", "n"), enter(&tenants, "b", "n"));
        assert!(!a.is_exclusive(&ids(&["1"]), true));
        assert!(a.is_exclusive(&ids(&["1"]), false), "each has its own");
        assert!(b.is_exclusive(&ids(&["2"]), true));
        assert!(a.is_exclusive(&ids(&["1"]), true));
        let _elsewhere = enter(&tenants, "c", "m");
        assert!(a.is_exclusive(&ids(&["1"]), true), "it is at another node");
        let _anywhere = tenants.occupy(EngineId::new("d".into(), 0), None, None);
        assert!(!a.is_exclusive(&ids(&["1"]), true));
    }

    #[test]
    fn an_engine_whose_accelerators_the_leader_chose_is_there_before_any_report() {
        let tenants: Arc<OccupancyMap> = Arc::default();
        let a = enter(&tenants, "a", "n");
        let chosen = Some(ids(&["1"]));
        let b = tenants.occupy(EngineId::new("b".into(), 0), Some("n".to_owned()), chosen);
        assert!(!a.is_exclusive(&ids(&["1"]), false));
        assert!(a.is_exclusive(&ids(&["2"]), true), "the other is known to be elsewhere");
        drop(b);
        assert!(a.is_exclusive(&ids(&["1"]), false));
    }

    /// The answer of [`AcceleratorOccupancy::is_exclusive`] by a walk over all engines.
    fn scanned(
        map: &OccupancyMap,
        own: &AcceleratorOccupancy,
        on: &BTreeSet<AcceleratorId>,
        shared: bool,
    ) -> bool {
        let all = map.all();
        all.engines.iter().filter(|(engine, _)| **engine != own.engine).all(|(_, other)| {
            match &other.accelerators {
                Some(others) => others.is_disjoint(on),
                None => !shared || (other.node.is_some() && own.node.is_some() && other.node != own.node),
            }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn an_engine_is_alone_where_a_scan_finds_no_other(
            steps in prop::collection::vec((0..4_usize, 0..3_u32, prop::option::of(0..4_u32), any::<bool>()), 1..30),
        ) {
            let map: Arc<OccupancyMap> = Arc::default();
            let mut engines: Vec<Option<AcceleratorOccupancy>> = (0..4).map(|_| None).collect();
            for (engine, node, accelerator, shared) in steps {
                let own = &mut engines[engine];
                match (own.as_ref(), accelerator) {
                    (None, _) => {
                        let id = EngineId::new("m".into(), u32::try_from(engine).unwrap());
                        *own = Some(map.occupy(id, (node > 0).then(|| node.to_string()), None));
                    }
                    (Some(_), None) => *own = None,
                    (Some(own), Some(accelerator)) => {
                        let (name, count) = (accelerator.to_string(), 1 + usize::from(shared));
                        let on = ids(&[name.as_str(), "shared"][..count]);
                        let alone = own.is_exclusive(&on, shared);
                        prop_assert_eq!(alone, scanned(&map, own, &on, shared));
                    }
                }
            }
            drop(engines);
            let all = map.all();
            prop_assert!(all.engines.is_empty() && all.known.is_empty() && all.unknown.is_empty());
        }
    }
}
