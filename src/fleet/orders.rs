//! Operators' orders: what they ask of each engine, when they are done, and when they have failed.
//!
//! An order means the engines as they were when it was given. One that was awake is put to sleep once; if somebody
//! wants the model again, it may wake, and the order does not put it to sleep a second time. The latest of the orders
//! that contradict each other counts, and none stays open for ever.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{
    command::Command,
    event::{OperationId, Order},
    plan::{Draft, Planner},
};
use crate::{
    engine::{Engine, state::State},
    model::{EngineId, Level, ModelName},
    units::Tick,
};

/// An order that is being carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Operation {
    pub(super) model: ModelName,
    pub(super) order: Order,
    pub(super) given: Tick,
}

impl Draft<'_> {
    pub(super) fn ordered_awake(&self, model: &ModelName) -> bool {
        self.planner.operations.values().any(|op| op.model == *model && op.order == Order::Wake)
    }

    /// An operator wants this life of the engine ended.
    pub(super) fn ordered_stop(&self, id: &EngineId) -> bool {
        self.planner.ordered_stop(id)
    }

    /// The level at which an operator wants this engine asleep, if one does.
    pub(super) fn ordered_sleep(&self, id: &EngineId) -> Option<Option<Level>> {
        let turn = self.engine(id)?.turn;
        self.planner.operations.values().find_map(|op| match op.order {
            Order::Sleep { level } if op.model == id.model && turn <= op.given => Some(level),
            _ => None,
        })
    }

    /// Orders that a later one contradicts are given up before anything is decided by them.
    pub(super) fn supersede(&mut self) {
        let orders = &self.planner.operations;
        let overtaken = orders.iter().filter(|(id, op)| {
            orders.iter().any(|(later, other)| {
                later > *id && other.model == op.model && op.order.contradicts(other.order)
            })
        });
        let overtaken: Vec<OperationId> = overtaken.map(|(id, _)| *id).collect();
        for operation in overtaken {
            let outcome = Err("a later order says otherwise".to_owned());
            self.emit(Command::Finish { operation, outcome });
        }
    }

    pub(super) fn finish_operations(&mut self) {
        for (operation, op) in self.planner.operations.clone() {
            if let Some(outcome) = self.outcome(&op) {
                self.emit(Command::Finish { operation, outcome });
            }
        }
    }

    /// How an order stands: `None` while it is being carried out.
    fn outcome(&self, op: &Operation) -> Option<Result<(), String>> {
        let mut engines = self.planner.engines_of(&op.model);
        if self.planner.spec(&op.model).is_none() && !matches!(op.order, Order::Stop) {
            return Some(Err(format!("'{}' was removed from the configuration", op.model)));
        }
        if self.planner.shutdown.is_some() {
            return Some(Err("the gateway is shutting down".to_owned()));
        }
        match op.order {
            Order::Pin | Order::Unpin => Some(Ok(())),
            Order::Stop => {
                let ended = |e: &Engine| !e.state.has_process() || e.began > op.given;
                engines.all(ended).then_some(Ok(()))
            }
            Order::Sleep { .. } => {
                let down = |e: &Engine| {
                    !e.state.has_process() || matches!(e.state, State::Asleep { .. }) || e.turn > op.given
                };
                engines.all(down).then_some(Ok(()))
            }
            Order::Wake => {
                if engines.any(Engine::serves) {
                    return Some(Ok(()));
                }
                let starting = self.planner.engines_of(&op.model).any(|e| e.state.is_starting());
                let reason = self.reasons.get(&op.model)?;
                // It waits as long as a request would.
                let late = op.given + self.planner.max_wait_of(&op.model) <= self.now && !starting;
                (reason.is_final() || late).then(|| Err(reason.text.clone()))
            }
        }
    }
}

impl Planner {
    pub(super) fn ordered_stop(&self, id: &EngineId) -> bool {
        let Some(e) = self.engines.get(id) else { return false };
        let mut orders = self.operations.values();
        orders.any(|op| op.model == id.model && op.order == Order::Stop && e.began <= op.given)
    }
}

/// Orders as a list: a tagged form cannot read numbers back that are keys of a map.
pub(super) mod listed {
    use super::{BTreeMap, Deserialize, Deserializer, Operation, OperationId, Serialize, Serializer};

    type Operations = BTreeMap<OperationId, Operation>;

    pub(in super::super) fn serialize<S: Serializer>(map: &Operations, to: S) -> Result<S::Ok, S::Error> {
        map.iter().collect::<Vec<_>>().serialize(to)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Operations, D::Error> {
        Ok(Vec::deserialize(from)?.into_iter().collect())
    }
}

impl Order {
    /// Not both can be carried out.
    const fn contradicts(self, other: Self) -> bool {
        use Order::{Sleep, Stop, Wake};
        matches!(
            (self, other),
            (Wake, Sleep { .. } | Stop) | (Sleep { .. }, Wake | Stop) | (Stop, Wake | Sleep { .. })
        )
    }
}
