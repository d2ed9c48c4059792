//! Tracks which engines are on which accelerators, as far as known.
//!
//! A reading covers an accelerator, and counts as one engine's only if that engine is alone there. The gateway does not
//! pick accelerators: the kubelet does, and stubs or DCGM's exporter report them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rouse::model::{AcceleratorId, EngineId};

/// All engines that have a Pod.
#[derive(Debug, Default)]
pub(super) struct OccupancyMap(Mutex<BTreeMap<EngineId, Occupant>>);

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
    pub(super) fn occupy(self: &Arc<Self>, engine: EngineId, node: Option<String>) -> AcceleratorOccupancy {
        let occupant = Occupant { node: node.clone(), accelerators: None };
        self.all().insert(engine.clone(), occupant);
        AcceleratorOccupancy { occupancy: Arc::clone(self), engine, node }
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<EngineId, Occupant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AcceleratorOccupancy {
    /// Records the engine's accelerators and returns whether no other engine has one of them.
    ///
    /// `shared`: other engines can get the same accelerators. Then any engine on the same node whose accelerators are
    /// unknown may have one of them.
    pub(super) fn is_exclusive(&self, accelerators: &BTreeSet<AcceleratorId>, shared: bool) -> bool {
        let mut all = self.occupancy.all();
        if let Some(occupant) = all.get_mut(&self.engine) {
            occupant.accelerators = Some(accelerators.clone());
        }
        all.iter().filter(|(engine, _)| **engine != self.engine).all(|(_, other)| match &other.accelerators {
            Some(others) => others.is_disjoint(accelerators),
            None => !shared || (other.node.is_some() && self.node.is_some() && other.node != self.node),
        })
    }
}

impl Drop for AcceleratorOccupancy {
    fn drop(&mut self) {
        self.occupancy.all().remove(&self.engine);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(names: &[&str]) -> BTreeSet<AcceleratorId> {
        names.iter().map(|name| AcceleratorId::from(*name)).collect()
    }

    fn enter(occupancy_map: &Arc<OccupancyMap>, model: &str, node: &str) -> AcceleratorOccupancy {
        occupancy_map.occupy(EngineId::new(model.into(), 0), Some(node.to_owned()))
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
        let _anywhere = tenants.occupy(EngineId::new("d".into(), 0), None);
        assert!(!a.is_exclusive(&ids(&["1"]), true));
    }
}
