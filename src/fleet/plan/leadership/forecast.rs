//! Forecasts at a follower what models wait for.
//!
//! A forecast is a whole decision, which is discarded. So a plan makes one only if requests wait at this gateway: those
//! that wait elsewhere are answered there. A report, which people ask for, explains those too.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use super::LeadershipRole;
use crate::{
    fleet::{
        command::Command,
        plan::{PlanBuilder, Planner, QueueDemand, ReportInputs},
    },
    model::ModelName,
};

/// Whether any request waits at this gateway.
pub(super) fn waits_here(demand: &BTreeMap<ModelName, QueueDemand>) -> bool {
    demand.values().any(|demand| demand.waiting > demand.remote)
}

impl Planner {
    /// Adds the reasons of models that requests wait for at other gateways only, if another gateway leads.
    ///
    /// A plan does without them, because no waiter of this gateway needs them.
    pub(in crate::fleet) fn complete_report_inputs<'i>(
        &self,
        inputs: &'i ReportInputs,
        clients: &BTreeMap<u64, u32>,
    ) -> Cow<'i, ReportInputs> {
        let is_complete =
            self.role != LeadershipRole::Follower || self.shutdown.is_some() || inputs.demand.is_empty();
        if is_complete || waits_here(&inputs.demand) {
            return Cow::Borrowed(inputs);
        }
        let mut builder = PlanBuilder::new(self.clone(), &inputs.demand, clients, inputs.now);
        builder.forecast_reasons();
        builder.explain_api_unreachable();
        let (_, forecast) = builder.into_parts();
        Cow::Owned(ReportInputs { demand: inputs.demand.clone(), ..forecast })
    }
}

impl PlanBuilder<'_> {
    /// Computes what the leader would answer to this gateway's waiters if it knew no more.
    pub(super) fn forecast_reasons(&mut self) {
        let mut forecast =
            PlanBuilder::new(self.planner.clone(), self.demand, self.waiting_clients, self.now);
        forecast.planner.role = LeadershipRole::Leader;
        forecast.admit();
        // If the plan has any decision, the leader may have decided otherwise without this gateway knowing yet.
        let reads = |command: &Command| matches!(command, Command::ReadMeter { .. });
        let decided = forecast.claims.is_empty() && forecast.take_commands().iter().all(reads);
        let (_, report_inputs) = forecast.into_parts();
        self.turn_order = report_inputs.turn_order;
        let mut reasons = report_inputs.reasons;
        for (model, reason) in Arc::make_mut(&mut reasons) {
            let runs = self.planner.engines_of(model).any(|e| e.state.has_process());
            *reason = std::mem::take(reason).into_follower_forecast(decided, runs, self.now);
        }
        self.reasons = reasons;
    }
}
