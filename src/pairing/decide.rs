//! One node is looked at, and what is to be done there is ordered.
//!
//! The draft is a copy. Each order is recorded in it at once, by the same function that records it for good, so that what is
//! decided later in the same look sees it, and a second look orders nothing.

use std::collections::BTreeMap;

use super::{
    apply::Rules,
    command::{Command, OfProvider, OfRequester, Order, Step},
    event::Epoch,
    ids::{EngineId, ProviderId, RequesterId},
    node::{Engine, Node},
    room::Rooms,
};
use crate::units::{Generation, Tick};

pub(super) struct Draft<'a> {
    pub(super) node: Node,
    pub(super) rules: Rules<'a>,
    pub(super) epoch: Epoch,
    /// Of the last command and the last life, over all nodes.
    pub(super) serial: u64,
    pub(super) generation: Generation,
    pub(super) commands: Vec<Command>,
    /// Why nothing else is done for each requester that has no engine that serves it.
    pub(super) reasons: BTreeMap<RequesterId, String>,
}

/// More looks than this at one moment would be decisions that contradict each other.
const LOOKS: usize = 8;

impl Draft<'_> {
    pub(super) const fn now(&self) -> Tick {
        self.rules.now
    }

    pub(super) fn rooms(&self) -> Rooms<'_> {
        self.rules.rooms(&self.node)
    }

    /// Everything there is to do at this moment.
    pub(super) fn decide(&mut self) {
        for _ in 0..LOOKS {
            let before = self.commands.len();
            self.reasons.clear();
            self.look();
            if self.commands.len() == before {
                break;
            }
        }
    }

    fn look(&mut self) {
        let engines: Vec<EngineId> = self.node.engines.keys().cloned().collect();
        for id in engines {
            if let Some(step) = self.node.engines.get(&id).and_then(|engine| self.next_step(engine)) {
                self.step(&id, step);
            }
        }
        self.launchers();
        self.requesters();
        self.serve();
        for id in self.rooms().upkeep() {
            self.step(&id, Step::End { why: super::command::Why::Evicted });
        }
    }

    pub(super) fn step(&mut self, id: &EngineId, step: Step) {
        let generation = match &step {
            Step::Create { record } | Step::Bind { record } => record.generation,
            _ => self.node.engines.get(id).map_or_else(Generation::default, |engine| engine.generation),
        };
        self.order(Order::Engine { engine: id.clone(), generation, step });
    }

    pub(super) fn of_requester(&mut self, id: &RequesterId, step: OfRequester) {
        self.order(Order::Requester { requester: id.clone(), step });
    }

    pub(super) fn of_provider(&mut self, id: &ProviderId, step: OfProvider) {
        self.order(Order::Provider { provider: id.clone(), step });
    }

    fn order(&mut self, order: Order) {
        self.serial += 1;
        let command = Command { node: self.node.name.clone(), epoch: self.epoch, serial: self.serial, order };
        self.rules.apply(&mut self.node, &command);
        self.commands.push(command);
    }

    /// A life that no leader before can have given to anything.
    pub(super) fn next_generation(&mut self) -> Generation {
        self.generation = Generation(self.generation.0.max(self.epoch.0 << 32)).next();
        self.generation
    }

    /// Its provider's container runs, so that there is something that the requester's accelerators are used by.
    pub(super) fn is_in_use(&self, engine: &Engine) -> bool {
        let stage = self.node.providers.get(&engine.provider).map(|provider| provider.stage);
        !matches!(stage, None | Some(super::event::Stage::Pending | super::event::Stage::Ended))
    }
}
