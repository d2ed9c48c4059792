//! One node is looked at, and what is to be done there is ordered.
//!
//! The draft is a copy. Each order is recorded in it at once, by the same function that records it for good, so that what is
//! decided later in the same look sees it, and a second look orders nothing.

use std::collections::BTreeMap;

use super::{
    command::{EngineStep, PairingAction, PairingCommand, ProviderStep, RequesterStep},
    event::Epoch,
    fit::FitCheck,
    ids::{PairingEngineId, ProviderId, RequesterId},
    node::{PairingEngine, PairingNode},
    plan_context::PlanContext,
};
use crate::units::{Generation, Tick};

pub(super) struct NodePlanBuilder<'a> {
    pub(super) node: PairingNode,
    pub(super) context: PlanContext<'a>,
    pub(super) epoch: Epoch,
    /// Of the last command and the last life, over all nodes.
    pub(super) serial: u64,
    pub(super) generation: Generation,
    pub(super) commands: Vec<PairingCommand>,
    /// Why nothing else is done for each requester that has no engine that serves it.
    pub(super) reasons: BTreeMap<RequesterId, String>,
}

/// More looks than this at one moment would be decisions that contradict each other.
const MAX_REPLANS: usize = 8;

impl NodePlanBuilder<'_> {
    pub(super) const fn now(&self) -> Tick {
        self.context.now
    }

    pub(super) fn fit_check(&self) -> FitCheck<'_> {
        self.context.fit_check(&self.node)
    }

    /// Everything there is to do at this moment.
    pub(super) fn decide(&mut self) {
        for _ in 0..MAX_REPLANS {
            let before = self.commands.len();
            self.reasons.clear();
            self.replan();
            if self.commands.len() == before {
                break;
            }
        }
    }

    fn replan(&mut self) {
        let engines: Vec<PairingEngineId> = self.node.engines.keys().cloned().collect();
        for id in engines {
            if let Some(step) = self.node.engines.get(&id).and_then(|engine| self.next_engine_step(engine)) {
                self.push_engine_step(&id, step);
            }
        }
        self.plan_launchers();
        self.plan_requesters();
        self.assign_engines();
        for id in self.fit_check().budget_evictions() {
            self.push_engine_step(
                &id,
                EngineStep::Stop { reason: super::command::EngineStopReason::Evicted },
            );
        }
    }

    pub(super) fn push_engine_step(&mut self, id: &PairingEngineId, step: EngineStep) {
        let generation = match &step {
            EngineStep::Create { record } | EngineStep::Bind { record } => record.generation,
            _ => self.node.engines.get(id).map_or_else(Generation::default, |engine| engine.generation),
        };
        self.push(PairingAction::Engine { engine: id.clone(), generation, step });
    }

    pub(super) fn push_requester_step(&mut self, id: &RequesterId, step: RequesterStep) {
        self.push(PairingAction::Requester { requester: id.clone(), step });
    }

    pub(super) fn push_provider_step(&mut self, id: &ProviderId, step: ProviderStep) {
        self.push(PairingAction::Provider { provider: id.clone(), step });
    }

    fn push(&mut self, order: PairingAction) {
        self.serial += 1;
        let command = PairingCommand {
            node: self.node.name.clone(),
            epoch: self.epoch,
            serial: self.serial,
            action: order,
        };
        self.context.apply(&mut self.node, &command);
        self.commands.push(command);
    }

    /// A life that no leader before can have given to anything.
    pub(super) fn next_generation(&mut self) -> Generation {
        self.generation = Generation(self.generation.0.max(self.epoch.0 << 32)).next();
        self.generation
    }

    /// Its provider's container runs, so that there is something that the requester's accelerators are used by.
    pub(super) fn is_container_running(&self, engine: &PairingEngine) -> bool {
        let stage = self.node.providers.get(&engine.provider).map(|provider| provider.phase);
        !matches!(
            stage,
            None | Some(super::event::ProviderPhase::Pending | super::event::ProviderPhase::Terminated)
        )
    }
}
