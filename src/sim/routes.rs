//! The simulated routes: the engines that arriving requests find, as the last turn published them.

use std::collections::BTreeMap;

use super::world::SimulatedWorld;
use crate::{
    engine::Admission,
    fleet::{Fleet, RoutingChanges},
    model::{EngineId, ModelName},
    units::Generation,
};

/// The engines that serve every request, each with the generation that does.
pub(super) type SimulatedRoutes = BTreeMap<EngineId, Generation>;

impl SimulatedWorld {
    /// Publishes the routes of these models to the fleet's public engines. Gates close before their routes go.
    pub(super) fn publish_routes(&mut self, fleet: &Fleet, changes: &RoutingChanges) {
        let is_changed = |engine: &EngineId| changes.may_reroute(&engine.model);
        let mut routes = self.routes.clone();
        routes.retain(|engine, _| !is_changed(engine));
        let public =
            fleet.engines().filter(|engine| engine.admission == Admission::Public && is_changed(&engine.id));
        routes.extend(public.map(|engine| (engine.id.clone(), engine.generation)));
        for (engine, generation) in &self.routes {
            let gate = self.gates.get(engine).filter(|gate| gate.generation == *generation);
            if gate.is_some_and(|gate| gate.open) && routes.get(engine) != Some(generation) {
                let message = format!("the route to {engine} {generation} goes while its gate is open");
                self.violations.push(message);
            }
        }
        self.routes = routes;
    }

    /// A gate opens for every request only once the routes lead to its generation. Until then, a request with the old
    /// routes must find the engine closed.
    pub(super) fn check_routed(&mut self, engine: &EngineId, generation: Generation) {
        if self.routes.get(engine) != Some(&generation) {
            let message = format!("the gate of {engine} {generation} opens before the routes lead to it");
            self.record_violation(message);
        }
    }

    /// The least loaded engine in the routes with an open gate and a free place. None while a request of its model is
    /// parked.
    pub(super) fn route(&self, model: &ModelName) -> Option<(EngineId, Generation)> {
        if self.parked.get(model).is_some_and(|n| *n > 0) {
            return None;
        }
        self.gates
            .iter()
            .filter(|(engine, gate)| engine.model == *model && gate.open && !gate.is_full())
            .filter(|(engine, gate)| self.routes.get(*engine) == Some(&gate.generation))
            .min_by_key(|(_, gate)| gate.leases.len())
            .map(|(engine, gate)| (engine.clone(), gate.generation))
    }
}
