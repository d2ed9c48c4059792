//! Operators' orders: what they change on each engine, and when they are done or failed.
//!
//! An order refers to the engines as they were when it was given. A `sleep` order puts an awake engine to sleep once;
//! if requests want the model again, it may wake, and the order does not put it to sleep a second time. Of orders that
//! contradict each other the latest counts, and none stays open forever.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::{
        command::Command,
        event::{OperationId, OperatorAction},
        plan::{PlanBuilder, Planner},
    },
    model::{EngineId, ModelName, SleepLevel},
    units::Tick,
};

/// An order in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::fleet) struct OperatorOperation {
    pub(in crate::fleet) model: ModelName,
    pub(in crate::fleet) action: OperatorAction,
    pub(in crate::fleet) issued_at: Tick,
}

impl PlanBuilder<'_> {
    pub(in crate::fleet) fn ordered_awake(&self, model: &ModelName) -> bool {
        self.planner.operations.values().any(|op| op.model == *model && op.action == OperatorAction::Wake)
    }

    /// Whether an operator ordered this generation of the engine to stop.
    pub(in crate::fleet) fn ordered_stop(&self, id: &EngineId) -> bool {
        self.planner.ordered_stop(id)
    }

    /// The level at which an operator ordered this engine to sleep, if any.
    pub(in crate::fleet) fn ordered_sleep(&self, id: &EngineId) -> Option<Option<SleepLevel>> {
        let turn = self.engine(id)?.turn_start;
        self.planner.operations.values().find_map(|op| match op.action {
            OperatorAction::Sleep { level } if op.model == id.model && turn <= op.issued_at => Some(level),
            _ => None,
        })
    }

    /// Fails orders that a later one contradicts, before any decision follows them.
    pub(in crate::fleet) fn finish_superseded(&mut self) {
        let orders = &self.planner.operations;
        let overtaken = orders.iter().filter(|(id, op)| {
            orders.iter().any(|(later, other)| {
                later > *id && other.model == op.model && op.action.contradicts(other.action)
            })
        });
        let overtaken: Vec<OperationId> = overtaken.map(|(id, _)| *id).collect();
        for operation in overtaken {
            let outcome = Err("superseded by a later order".to_owned());
            self.emit(Command::FinishOperation { operation, outcome });
        }
    }

    pub(in crate::fleet) fn finish_operations(&mut self) {
        for (operation, op) in self.planner.operations.clone() {
            if let Some(outcome) = self.operation_outcome(&op) {
                self.emit(Command::FinishOperation { operation, outcome });
            }
        }
    }

    /// Returns the outcome of an order; `None` while it is in progress.
    fn operation_outcome(&self, op: &OperatorOperation) -> Option<Result<(), String>> {
        let mut engines = self.planner.engines_of(&op.model);
        if self.planner.spec(&op.model).is_none() && !matches!(op.action, OperatorAction::Stop) {
            return Some(Err(format!("'{}' was removed from the configuration", op.model)));
        }
        if self.planner.shutdown.is_some() {
            return Some(Err("the gateway is shutting down".to_owned()));
        }
        match op.action {
            OperatorAction::Pin | OperatorAction::Unpin => Some(Ok(())),
            OperatorAction::Stop => {
                let is_stopped = |e: &Engine| !e.state.has_process() || e.startup_began > op.issued_at;
                engines.all(is_stopped).then_some(Ok(()))
            }
            OperatorAction::Sleep { .. } => {
                let down = |e: &Engine| {
                    !e.state.has_process()
                        || matches!(e.state, LifecycleState::Asleep { .. })
                        || e.turn_start > op.issued_at
                };
                engines.all(down).then_some(Ok(()))
            }
            OperatorAction::Wake => {
                if engines.any(Engine::serves) {
                    return Some(Ok(()));
                }
                let starting = self.planner.engines_of(&op.model).any(|e| e.state.is_starting());
                let reason = self.reasons.get(&op.model)?;
                // The order waits as long as a request would.
                let expired = op.issued_at + self.planner.max_wait_of(&op.model) <= self.now && !starting;
                (reason.is_final() || expired).then(|| Err(reason.text.clone()))
            }
        }
    }
}

impl Planner {
    pub(in crate::fleet) fn ordered_stop(&self, id: &EngineId) -> bool {
        let Some(e) = self.engines.get(id) else { return false };
        let mut orders = self.operations.values();
        orders.any(|op| {
            op.model == id.model && op.action == OperatorAction::Stop && e.startup_began <= op.issued_at
        })
    }
}

/// Serializes operations as a list: a tagged enum cannot read back numbers that are keys of a map.
pub(in crate::fleet) mod as_list {
    use super::{BTreeMap, Deserialize, Deserializer, OperationId, OperatorOperation, Serialize, Serializer};

    type OperationMap = BTreeMap<OperationId, OperatorOperation>;

    pub(in crate::fleet) fn serialize<S: Serializer>(map: &OperationMap, to: S) -> Result<S::Ok, S::Error> {
        map.iter().collect::<Vec<_>>().serialize(to)
    }

    pub(in crate::fleet) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<OperationMap, D::Error> {
        Ok(Vec::deserialize(from)?.into_iter().collect())
    }
}

impl OperatorAction {
    /// Whether the two orders exclude each other.
    const fn contradicts(self, other: Self) -> bool {
        use OperatorAction::{Sleep, Stop, Wake};
        matches!(
            (self, other),
            (Wake, Sleep { .. } | Stop) | (Sleep { .. }, Wake | Stop) | (Stop, Wake | Sleep { .. })
        )
    }
}
