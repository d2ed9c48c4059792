//! Rebuilds the routes of what changed in the fleet, and nothing else.
//!
//! Most turns are about a request that waits, and change no route.

use std::sync::Arc;

use rouse::{
    fleet::{Fleet, RoutingChanges},
    model::{ModelName, ModelNameIndex, ModelSpec},
    shared_map::SharedMap,
};

use super::gates::EngineGates;
use crate::routing::{ModelRoute, RouteTable};

/// Returns the new routes; `None` if they are unchanged.
pub(super) fn updated_routes(
    before: &RouteTable,
    fleet: &Fleet,
    changes: &RoutingChanges,
    gates: &EngineGates,
) -> Option<RouteTable> {
    let route = |spec: &ModelSpec| {
        let before = before.models.get(&spec.name);
        let endpoints = gates.endpoints(&spec.name);
        let (state, failure) = (fleet.state(&spec.name), fleet.last_failure(&spec.name));
        let before_it = before.map(|route| &**route);
        let max_wait = spec.queue.max_wait;
        let route =
            ModelRoute::new(spec.priority, state, failure, spec.replicas, max_wait, endpoints, before_it);
        match before {
            Some(before) if before.is_equivalent(&route) => Arc::clone(before),
            _ => Arc::new(route),
        }
    };
    let registry = changes.may_reconfigure_any().then(|| ModelNameIndex::new(fleet.specs()));
    let registry = registry.filter(|registry| *registry != *before.registry);
    let mut models: Option<SharedMap<ModelName, Arc<ModelRoute>>> = None;
    let is_old = |(model, route): (&ModelName, &Arc<ModelRoute>)| {
        before.models.get(model).is_some_and(|before| Arc::ptr_eq(before, route))
    };
    if changes.reconfigured {
        let all: SharedMap<ModelName, Arc<ModelRoute>> =
            fleet.specs().map(|spec| (spec.name.clone(), route(spec))).collect();
        let same = all.len() == before.models.len() && all.iter().all(is_old);
        models = (!same).then_some(all);
    } else {
        for model in changes.rerouted() {
            let route = fleet.spec(model).map(route);
            let is_same = match &route {
                Some(route) => is_old((model, route)),
                None => !before.models.contains_key(model),
            };
            if is_same {
                continue;
            }
            let after = models.get_or_insert_with(|| before.models.clone());
            match route {
                Some(route) => drop(after.insert(model.clone(), route)),
                None => drop(after.remove(model)),
            }
        }
    }
    let ready = fleet.is_ready();
    (registry.is_some() || models.is_some() || ready != before.ready).then(|| RouteTable {
        registry: registry.map_or_else(|| Arc::clone(&before.registry), Arc::new),
        models: models.unwrap_or_else(|| before.models.clone()),
        ready,
    })
}
