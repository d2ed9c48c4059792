//! Plans the commands for one node.
//!
//! The builder copies the node at its first command. It applies each command to the copy at once, with the same function
//! that [`Pairing::issued`] uses. So later decisions of the same pass see the command, and a second pass orders nothing.
//!
//! [`Pairing::issued`]: super::Pairing::issued

use std::{borrow::Cow, collections::BTreeMap};

use super::{
    command::{EngineStep, PairingAction, PairingCommand, ProviderStep, RequesterStep},
    event::LeaderEpoch,
    fit::FitCheck,
    ids::{PairingEngineId, ProviderId, RequesterId},
    node::{PairingEngine, PairingNode},
    plan_context::PlanContext,
};
use crate::units::{Generation, Tick};

pub(super) struct NodePlanBuilder<'a> {
    pub(super) node: Cow<'a, PairingNode>,
    pub(super) context: PlanContext<'a>,
    pub(super) epoch: LeaderEpoch,
    /// Last command serial and last engine generation, over all nodes.
    pub(super) serial: u64,
    pub(super) generation: Generation,
    pub(super) commands: Vec<PairingCommand>,
    /// Why each requester without a serving engine gets no further command.
    pub(super) reasons: BTreeMap<RequesterId, String>,
}

/// Limit on passes per plan. Reaching it means that decisions contradict each other.
const MAX_REPLANS: usize = 8;

impl NodePlanBuilder<'_> {
    pub(super) const fn now(&self) -> Tick {
        self.context.now
    }

    pub(super) fn fit_check(&self) -> FitCheck<'_> {
        self.context.fit_check(&self.node)
    }

    /// Repeats the pass until it yields no more commands.
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
        self.context.apply(self.node.to_mut(), &command);
        self.commands.push(command);
    }

    /// A generation number that no earlier leader can have used.
    pub(super) fn next_generation(&mut self) -> Generation {
        self.generation = Generation(self.generation.0.max(self.epoch.0 << 32)).next();
        self.generation
    }

    /// Whether its provider's container runs and so uses the requester's accelerators.
    pub(super) fn is_container_running(&self, engine: &PairingEngine) -> bool {
        let stage = self.node.providers.get(&engine.provider).map(|provider| provider.phase);
        !matches!(
            stage,
            None | Some(super::event::ProviderPhase::Pending | super::event::ProviderPhase::Terminated)
        )
    }
}
