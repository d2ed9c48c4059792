//! The routes, made anew where the fleet has changed and nowhere else: most turns are about a request that waits, and
//! tell those that do not wait nothing.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    fleet::{Changes, Fleet},
    model::{ModelName, ModelSpec, Registry},
};

use super::gates::Gates;
use crate::routes::{Route, Routes};

/// What is to be read from now on; `None`: what was before.
pub(super) fn routes(before: &Routes, fleet: &Fleet, changes: &Changes, gates: &Gates) -> Option<Routes> {
    let route = |spec: &ModelSpec| {
        let before = before.models.get(&spec.name);
        let endpoints = gates.endpoints(&spec.name);
        let (state, failure) = (fleet.state(&spec.name), fleet.last_failure(&spec.name));
        let before_it = before.map(|route| &**route);
        let max_wait = spec.queue.max_wait;
        let route = Route::new(spec.priority, state, failure, spec.replicas, max_wait, endpoints, before_it);
        match before {
            Some(before) if before.is_like(&route) => Arc::clone(before),
            _ => Arc::new(route),
        }
    };
    let registry = changes.configured.then(|| Registry::new(fleet.specs()));
    let registry = registry.filter(|registry| *registry != *before.registry);
    let mut models: Option<BTreeMap<ModelName, Arc<Route>>> = None;
    let is_old = |(model, route): (&ModelName, &Arc<Route>)| {
        before.models.get(model).is_some_and(|before| Arc::ptr_eq(before, route))
    };
    if changes.configured {
        let all: BTreeMap<_, _> = fleet.specs().map(|spec| (spec.name.clone(), route(spec))).collect();
        let same = all.len() == before.models.len() && all.iter().all(is_old);
        models = (!same).then_some(all);
    } else {
        for spec in changes.models.iter().filter_map(|model| fleet.spec(model)) {
            let route = route(spec);
            if !is_old((&spec.name, &route)) {
                models.get_or_insert_with(|| before.models.clone()).insert(spec.name.clone(), route);
            }
        }
    }
    let ready = fleet.is_ready();
    (registry.is_some() || models.is_some() || ready != before.ready).then(|| Routes {
        registry: registry.map_or_else(|| Arc::clone(&before.registry), Arc::new),
        models: models.unwrap_or_else(|| before.models.clone()),
        ready,
    })
}
