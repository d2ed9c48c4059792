//! Checks the dependencies between models.

use super::super::{gate::SimulatedGate, process::SimulatedProcessPhase, world::SimulatedWorld};
use crate::{
    fleet::command::CloseReason,
    model::{EngineId, ModelName, ModelSpec},
};

impl SimulatedWorld {
    /// All models that `model` depends on, directly or indirectly.
    fn dependency_closure(&self, model: &ModelName) -> Vec<ModelName> {
        let models = &self.scenario.configuration.models;
        let spec = |name: &ModelName| models.iter().find(|spec: &&ModelSpec| spec.name == *name);
        let mut all: Vec<ModelName> = spec(model).map_or_else(Vec::new, |spec| spec.dependencies.clone());
        let mut at = 0;
        while let Some(next) = all.get(at).cloned() {
            let more = spec(&next).into_iter().flat_map(|spec| &spec.dependencies);
            let more: Vec<ModelName> = more.filter(|name| !all.contains(name)).cloned().collect();
            all.extend(more);
            at += 1;
        }
        all
    }

    fn is_served(&self, model: &ModelName) -> bool {
        self.gates
            .iter()
            .any(|(id, gate): (&EngineId, &SimulatedGate)| id.model == *model && gate.open && gate.public)
    }

    fn is_served_by_another(&self, engine: &EngineId) -> bool {
        let serves = |(id, gate): (&EngineId, &SimulatedGate)| {
            id.model == engine.model && id != engine && gate.open && gate.public
        };
        self.gates.iter().any(serves)
    }

    /// An engine may launch or wake only when its model's whole closure serves.
    pub(in crate::sim) fn check_dependencies(&mut self, engine: &EngineId, action: &str) {
        let needed = self.dependency_closure(&engine.model);
        if needed.is_empty() {
            return;
        }
        self.tally.add("starts of what needs others");
        if let Some(missing) = needed.into_iter().find(|model| !self.is_served(model)) {
            self.record_violation(format!(
                "{engine} is {action} while its dependency {missing} does not serve"
            ));
        }
    }

    /// An engine that is not asleep, of a model that depends on this engine's model.
    fn active_dependent(&self, engine: &EngineId) -> Option<EngineId> {
        let awake =
            self.machine.processes.values().filter(|p| !matches!(p.phase, SimulatedProcessPhase::Asleep(_)));
        let mut needing = awake.filter(|p| self.dependency_closure(&p.engine.model).contains(&engine.model));
        needing.next().map(|p| p.engine.clone())
    }

    /// The last engine that serves a dependency must not close for another model's turn, for idleness or for a lower
    /// target.
    ///
    /// A turn closes gates before it opens others, and may replace one engine by another. So this only remembers the
    /// engine, and [`Self::check_replacements`] looks for the other one once the turn has ended.
    pub(in crate::sim) fn note_optional_close(&mut self, engine: &EngineId, reason: CloseReason) {
        let open = self.gates.get(engine).is_some_and(|gate| gate.open && gate.public);
        let is_optional = matches!(
            reason,
            CloseReason::Turn | CloseReason::Idle | CloseReason::ScaledDown | CloseReason::Rehearsal
        );
        if !open || !is_optional || self.is_served_by_another(engine) {
            return;
        }
        if let Some(needing) = self.active_dependent(engine) {
            self.unreplaced.push((engine.clone(), reason, needing));
        }
    }

    /// Each engine that the turn has closed, and that dependents need, is replaced at the end of the turn.
    ///
    /// A request that arrives between the close and the opening waits, and the next turn finds the open gate for it.
    pub(in crate::sim) fn check_replacements(&mut self) {
        for (engine, reason, needing) in std::mem::take(&mut self.unreplaced) {
            if !self.is_served(&engine.model) {
                self.record_violation(format!(
                    "{engine} is deactivated ({reason:?}) while its dependent {needing} is not asleep"
                ));
            }
        }
    }

    /// Whether dependents need this engine because no other engine of its model serves.
    pub(super) fn is_needed_by_dependents(&self, engine: &EngineId) -> bool {
        let mut models = self.scenario.configuration.models.iter();
        let kept_awake = models.any(|spec| {
            self.is_kept_awake(&EngineId::new(spec.name.clone(), 0))
                && self.dependency_closure(&spec.name).contains(&engine.model)
        });
        (kept_awake || self.active_dependent(engine).is_some()) && !self.is_served_by_another(engine)
    }
}
