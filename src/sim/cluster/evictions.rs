//! Checks which sleepers were deleted: none too early, and none in place of an outdated one.

use super::SimulatedCluster;
use crate::{
    model::AcceleratorId,
    pairing::{
        PairingPlan,
        command::{EngineStep, EngineStopReason, PairingAction},
        event::TemplateStatus,
        ids::PairingEngineId,
        node::{PairingEngine, PairingNode},
    },
    units::Bytes,
};

impl SimulatedCluster {
    /// Call after the plan has been recorded. The engines that it deletes still hold their memory.
    pub(super) fn check_evictions(&mut self, plan: &PairingPlan) {
        let stopped = plan.commands.iter().filter_map(|command| match &command.action {
            PairingAction::Engine { engine, step: EngineStep::Stop { reason }, .. } => {
                Some((&command.node, engine, *reason))
            }
            _ => None,
        });
        for (node, id, reason) in stopped
            .filter(|(.., reason)| matches!(reason, EngineStopReason::Evicted | EngineStopReason::Displaced))
        {
            let Some(pairing_node) = self.pairing.node(node) else { continue };
            // Skips repeated stops of engines that did not obey.
            let Some(engine) = pairing_node.engines.get(id).filter(|engine| engine.since == self.now) else {
                continue;
            };
            let early = reason == EngineStopReason::Evicted && self.is_too_early(pairing_node, engine);
            let instead =
                self.outdated_alternative(pairing_node, engine, reason).map(|other| other.id.to_string());
            if early {
                self.record_violation(format!(
                    "{id} is deleted on {node} for the budget, soon after a sleep there"
                ));
            }
            if self.is_outdated(id) {
                self.count("outdated engines evicted");
            }
            if let Some(other) = instead {
                self.record_violation(format!(
                    "{id} is deleted on {node} although the outdated {other} stays"
                ));
            }
        }
    }

    /// Whether an eviction for the budget came before the last sleep had settled.
    fn is_too_early(&self, node: &PairingNode, engine: &PairingEngine) -> bool {
        let meter_lag = self.scenario.settings.meter_lag;
        let recent = |a: &AcceleratorId| {
            let slept = node.accelerators.get(a).and_then(|accelerator| accelerator.last_sleep);
            slept.is_some_and(|slept| slept + meter_lag > self.now)
        };
        engine.id.accelerators.iter().all(recent) && !Self::is_needed_for_memory(node, engine)
    }

    /// Whether a requester needs the memory that this engine keeps.
    fn is_needed_for_memory(node: &PairingNode, engine: &PairingEngine) -> bool {
        node.requesters.values().filter(|r| r.stays()).any(|requester| {
            let requested = &requester.observed.requested;
            let requested_id = node.requested_engine_id(requester);
            let awake = node.engines.get(&requested_id).map_or(requested.sizes.awake, |e| e.sizes.awake);
            let full = |a: &&AcceleratorId| {
                let capacity =
                    node.accelerators.get(*a).map_or(Bytes::ZERO, |accelerator| accelerator.facts.capacity);
                engine.uses(a) && node.reserved(a) + awake > capacity
            };
            requester.accelerators.iter().any(|a| full(&a))
        })
    }

    fn is_outdated(&self, id: &PairingEngineId) -> bool {
        self.pairing.template_status(id.fingerprint) != TemplateStatus::Current
    }

    /// An outdated, unwanted sleeper that would have freed the same as `evicted`, but stays.
    fn outdated_alternative<'a>(
        &self,
        node: &'a PairingNode,
        evicted: &PairingEngine,
        reason: EngineStopReason,
    ) -> Option<&'a PairingEngine> {
        if self.is_outdated(&evicted.id) {
            return None;
        }
        let is_wanted = |e: &PairingEngine| {
            node.requesters.values().any(|r| r.stays() && node.requested_engine_id(r) == e.id)
        };
        let frees_the_same = |e: &PairingEngine| match reason {
            EngineStopReason::Displaced => e.provider == evicted.provider,
            _ => {
                let keeps = |e: &PairingEngine| (e.id.accelerators.clone(), e.reserved, e.reserved_host);
                keeps(e) == keeps(evicted)
            }
        };
        node.engines
            .values()
            .find(|e| e.is_evictable() && self.is_outdated(&e.id) && !is_wanted(e) && frees_the_same(e))
    }
}
