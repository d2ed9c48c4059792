//! The plan's verdicts on waiters: which are refused, and with which fault.
//!
//! Apart from the plan, because every gateway's dispatch reads the verdicts, also where another gateway leads.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    fault::{FailureCause, Fault, WaitDetails, WaitLimit},
    fleet::{
        event::Waiter,
        explain::ModelReason,
        plan::{ModelRecord, PlanBuilder},
    },
    model::ModelName,
    units::{Millis, Tick},
};

/// The plan's verdicts on waiters.
pub struct WaiterVerdicts {
    reasons: Arc<BTreeMap<ModelName, ModelReason>>,
    models: Arc<BTreeMap<ModelName, ModelRecord>>,
    /// Requested models whose engines all have as many requests as their saturation allows, with the reason.
    saturated: BTreeMap<ModelName, String>,
    max_wait: Millis,
    can_explain: bool,
    shutdown: bool,
    now: Tick,
}

impl PlanBuilder<'_> {
    pub(in crate::fleet) fn verdicts(&self) -> WaiterVerdicts {
        let requested = self.demand.keys();
        let saturated =
            requested.filter_map(|model| Some((model.clone(), self.planner.saturation_text(model)?)));
        WaiterVerdicts {
            reasons: Arc::clone(&self.reasons),
            models: Arc::clone(&self.planner.models),
            saturated: saturated.collect(),
            max_wait: self.planner.settings.queue.max_wait,
            can_explain: self.planner.can_explain(),
            shutdown: self.planner.shutdown.is_some(),
            now: self.now,
        }
    }
}

impl WaiterVerdicts {
    /// Wait details of a model, without each waiter's own values.
    pub(in crate::fleet) fn wait_details(&self, model: &ModelName) -> WaitDetails {
        let full = || match self.saturated.get(model) {
            Some(saturated) => ModelReason::saturated(saturated),
            None => ModelReason::at_capacity(),
        };
        self.reasons.get(model).map_or_else(|| full().wait_details(self.now), |r| r.wait_details(self.now))
    }

    /// Which limit set this waiter's deadline.
    pub(in crate::fleet) fn wait_limit(&self, waiter: &Waiter) -> WaitLimit {
        let spec = self.models.get(&waiter.model).and_then(|model| model.spec.as_ref());
        let longest = spec.and_then(|spec| spec.queue.max_wait).unwrap_or(self.max_wait);
        let shorter = waiter.deadline.since(waiter.arrived) < longest;
        if shorter { WaitLimit::Request } else { WaitLimit::Queue }
    }

    fn is_configured(&self, model: &ModelName) -> bool {
        self.models.get(model).is_some_and(|model| model.spec.is_some())
    }

    /// Whether all waiters of this model are refused.
    pub(in crate::fleet) fn refuses(&self, model: &ModelName) -> bool {
        let refused = |reason: &ModelReason| reason.is_final();
        self.shutdown || !self.is_configured(model) || self.reasons.get(model).is_some_and(refused)
    }

    /// The fault for all waiters of this model, if they are refused.
    pub(in crate::fleet) fn refusal(&self, model: &ModelName, wait: &WaitDetails) -> Option<Fault> {
        if self.shutdown {
            return Some(Fault::ShuttingDown);
        }
        if !self.is_configured(model) {
            return Some(Fault::ModelNotFound { model: model.to_string(), suggestions: Vec::new() });
        }
        self.reasons.get(model)?.refusal(model, wait)
    }

    /// The fault of a waiter whose deadline has passed.
    pub(in crate::fleet) fn deadline_fault(&self, model: &ModelName, wait: WaitDetails) -> Fault {
        match self.reasons.get(model) {
            Some(reason) => reason.deadline_fault(model, wait),
            None if !self.can_explain => {
                Fault::ModelNotReady { model: model.clone(), cause: FailureCause::Deadline, wait }
            }
            None if self.saturated.contains_key(model) => {
                Fault::QueueFull { message: format!("every awake engine of '{model}' is saturated"), wait }
            }
            None => Fault::QueueFull { message: format!("'{model}' is at its maxConcurrency"), wait },
        }
    }
}
