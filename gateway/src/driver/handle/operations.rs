//! Orders of operators, and their outcomes.

use std::{
    collections::BTreeMap,
    sync::{MutexGuard, PoisonError, atomic::Ordering},
};

use rouse::{
    fleet::event::{OperationId, OperatorAction},
    model::ModelName,
    units::{Millis, Tick},
};
use tokio::sync::oneshot;

use super::{DriverHandle, DriverRequest, DriverState};

/// How long outcomes of orders are kept.
const OPERATION_RETENTION: Millis = Millis::secs(3600);

/// An operator's order and its outcome.
#[derive(Clone, Debug)]
pub struct OperationStatus {
    pub model: ModelName,
    pub order: OperatorAction,
    pub issued_at: Tick,
    /// `None` while it runs.
    pub outcome: Option<Result<(), String>>,
}

impl DriverHandle {
    /// Returns an order's status; `None` when it is unknown or older than an hour.
    pub fn operation(&self, id: OperationId) -> Option<OperationStatus> {
        self.0.operations().get(&id).cloned()
    }

    /// Submits an order. [`Self::operation`] has its outcome for an hour. `Err` names the invariant that forbids it.
    pub async fn submit_order(
        &self,
        model: ModelName,
        action: OperatorAction,
    ) -> Result<OperationId, String> {
        let shutting_down = || "the gateway is shutting down".to_owned();
        let (reply, answer) = oneshot::channel();
        self.0
            .requests
            .send(DriverRequest::SubmitOrder { model, order: action, reply })
            .await
            .map_err(|_| shutting_down())?;
        answer.await.unwrap_or_else(|_| Err(shutting_down()))
    }
}

impl DriverState {
    fn operations(&self) -> MutexGuard<'_, BTreeMap<OperationId, OperationStatus>> {
        self.operations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::driver) fn begin(&self, model: ModelName, action: OperatorAction) -> OperationId {
        let id = OperationId(self.ids.fetch_add(1, Ordering::Relaxed));
        let given = self.clock.now();
        let mut operations = self.operations();
        operations.retain(|_, o| o.issued_at + OPERATION_RETENTION > given);
        operations.insert(id, OperationStatus { model, order: action, issued_at: given, outcome: None });
        id
    }

    pub(in crate::driver) fn finish(&self, id: OperationId, outcome: Result<(), String>) {
        if let Err(error) = &outcome {
            tracing::warn!(operation = id.0, reason = error, "operator order failed");
        }
        if let Some(operation) = self.operations().get_mut(&id) {
            operation.outcome = Some(outcome);
        }
    }
}
