//! Decisions about a fleet of engines.
//!
//! A cluster needs two kinds of decisions, because every gateway has requests and only one may command engines:
//!
//! * [`dispatch`]: waiters and awake engines → leases and refusals. Each gateway decides this.
//! * [`plan`]: demand and reservations → commands to engines. The leader decides this.
//!
//! A single machine makes both kinds, and [`Fleet`] combines them. See [`event`] for the inputs and [`command`] for the
//! outputs. The modules `demand`, `memory` and `queries` have what callers read from the state.
//!
//! Planning works on a copy. The planner records every decision in the copy at once ([`plan::Planner`]'s `apply`, the
//! function that [`Fleet::issued`] also uses). So a later decision of the same plan sees the earlier ones, and the plan
//! and the recorded state cannot differ.

pub mod command;
pub mod dispatch;
pub mod event;
pub mod plan;
pub mod quote;
pub mod report;

mod demand;
mod explain;
mod memory;
mod observe;
mod queries;
mod routing_changes;
mod state;

use std::{borrow::Cow, collections::BTreeMap};

pub use memory::AcceleratorCapacity;
pub use routing_changes::RoutingChanges;

use command::Command;
use dispatch::Dispatch;
use event::{Event, OperatorAction, WaiterId};
use observe::configure::ConfigurationChanges;
use plan::{Planner, ReportInputs};
use quote::book::QuoteBook;
use report::{FleetView, Report, VariantReport};

use crate::{
    model::{ModelName, VariantName},
    units::{Generation, Tick},
};

/// The complete decision state for engines and requests.
///
/// Pure: the same events at the same moments give the same commands.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    planner: Planner,
    dispatch: Dispatch,
    /// What configurations changed since the last [`Self::take_routing_changes`].
    reconfigured: ConfigurationChanges,
    /// The latest floor of generations. No decision reads it.
    generation_floor: Generation,
    /// What became of earlier quotes. No decision reads it.
    quotes: QuoteBook,
}

/// Limit on replanning passes at one moment. More passes would mean decisions that contradict each other.
pub(crate) const MAX_REPLANS: usize = 8;

/// The commands to submit now, with a reason for every model. [`Fleet::report`] renders the reasons as text.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub commands: Vec<Command>,
    report_inputs: ReportInputs,
    /// The last of [`MAX_REPLANS`] passes still added a command.
    gave_up: bool,
}

impl Plan {
    /// Whether planning ended at its limit of passes, and not because a pass added no command: a defect.
    #[must_use]
    pub(crate) const fn gave_up(&self) -> bool {
        self.gave_up
    }
}

impl Fleet {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Records an observation. Decides nothing.
    pub fn on(&mut self, event: &Event, now: Tick) {
        match event {
            Event::Arrived { waiter } => self.dispatch.add_waiter(waiter.clone()),
            Event::Left { waiter } => self.remove_waiter(*waiter, now),
            Event::Canary { engine, verdict, .. } => self.record_canary(engine, verdict, now),
            Event::Served { model, key, tokens } => {
                self.dispatch.record_served(model, key, *tokens, self.planner.leases_of(model));
            }
            Event::FairnessRestored { model, band, counters: shares } => {
                self.dispatch.set_counters(model, *band, shares)
            }
            Event::GenerationFloor { generation } => self.generation_floor = *generation,
            _ => {}
        }
        let changes = self.planner.observe(event, now);
        self.reconfigured.extend(changes);
        if matches!(event, Event::Configured { .. }) {
            let planner = &self.planner;
            self.quotes.retain(|model| planner.models.contains_key(model));
        }
        if let Event::GateSampled { engine, .. } = event {
            let leases = self.planner.leases_of(&engine.model);
            self.dispatch.limit_in_flight(&engine.model, leases);
            if leases == 0 {
                self.dispatch.drop_queue_if_empty(&engine.model);
            }
        }
    }

    /// Removes a waiter, and its model's queue if the model has no waiters and no leases left.
    ///
    /// A model may never have had a lease, so no gate sample would drop the queue.
    fn remove_waiter(&mut self, waiter: WaiterId, now: Tick) {
        let Some(model) = self.dispatch.remove_waiter(waiter) else { return };
        if self.planner.leases_of(&model) == 0 {
            self.dispatch.drop_queue_if_empty(&model);
        }
        // Checked first, because a change copies what other copies still share.
        if self.quotes.follows(&model, waiter) {
            self.quotes.record_departure(&model, now);
        }
    }

    /// Decides which commands to submit now. Changes nothing: pass the submitted commands to [`Self::issued`].
    ///
    /// One pass decides engine by engine, and a late decision can affect an engine that the pass checked before. For
    /// example, a refused waiter passes its model's turn to the next model, or a drained engine waited for a start that
    /// was just given up. So planning repeats on the resulting state until a pass adds no command.
    #[must_use]
    pub fn plan(&self, now: Tick) -> Plan {
        let (mut plan, planner) = self.plan_once(now);
        if plan.commands.is_empty() {
            return plan;
        }
        let (dispatch, quotes) = (self.dispatch.clone(), self.quotes.clone());
        let reconfigured = ConfigurationChanges::default();
        let mut after =
            Self { planner, dispatch, quotes, reconfigured, generation_floor: self.generation_floor };
        let mut recorded = 0;
        plan.gave_up = true;
        for _ in 0..MAX_REPLANS {
            // Each pass has recorded its commands in its planner. Only the waiters still have to be removed.
            plan.commands.iter().skip(recorded).for_each(|command| after.record_answer(command, now));
            after.planner.refresh_due_index();
            recorded = plan.commands.len();
            let (next, planner) = after.plan_once(now);
            after.planner = planner;
            plan.report_inputs = next.report_inputs;
            plan.commands.extend(next.commands);
            if plan.commands.len() == recorded {
                plan.gave_up = false;
                break;
            }
        }
        plan
    }

    /// Makes one pass over a copy. Returns its commands, and the copy, in which they are recorded.
    fn plan_once(&self, now: Tick) -> (Plan, Planner) {
        let demand = self.planner.with_remote_demand(self.dispatch.demand());
        let mut builder = plan::PlanBuilder::new(self.planner.clone(), &demand, self.dispatch.clients(), now);
        builder.decide();
        let verdicts = builder.verdicts();
        let granted = self.dispatch.decide(&mut builder, &verdicts, &self.quotes, now);
        let mut commands = builder.take_commands();
        if commands.is_empty() {
            commands = granted;
        } else {
            commands.extend(granted);
        }
        let (planner, report_inputs) = builder.into_parts();
        let report_inputs = ReportInputs { demand, ..report_inputs };
        (Plan { commands, report_inputs, gave_up: false }, planner)
    }

    /// Records commands before they are submitted. Planning again at the same moment yields none.
    pub fn issued(&mut self, commands: &[Command], now: Tick) {
        self.planner.advance_time(now);
        for command in commands {
            self.record_answer(command, now);
            self.planner.apply(command, now);
        }
        self.planner.refresh_due_index();
    }

    /// Removes the waiter that this command grants or refuses.
    fn record_answer(&mut self, command: &Command, now: Tick) {
        match command {
            Command::Grant { waiter, engine, canary, .. } => {
                self.dispatch.record_grant(*waiter, *canary);
                if self.quotes.follows(&engine.model, *waiter) {
                    self.quotes.record_grant(engine, *canary, now);
                }
            }
            Command::Refuse { waiter, .. } => self.remove_waiter(*waiter, now),
            _ => {}
        }
    }

    /// Returns the next moment at which planning may yield commands without an event in between.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Tick> {
        let queued = self.dispatch.deadlines_after(self.planner.last_planned);
        self.planner.next_deadline().into_iter().chain(queued).min()
    }

    /// Returns, as this plan found them, the models that have a reason beyond their state: the reason, and whether it
    /// is a memory shortage.
    pub fn reasons<'a>(&self, plan: &'a Plan) -> impl Iterator<Item = (&'a ModelName, &'a str, bool)> {
        plan.report_inputs
            .reasons
            .iter()
            .map(|(model, reason)| (model, reason.text.as_str(), reason.is_memory_shortage()))
    }

    /// Renders the plan's reasons as text. Call it after [`Self::issued`] and before any other change.
    ///
    /// Separate from [`Self::plan`] because most turns need no report. [`Self::report_with_waits`] adds the expected
    /// waits.
    #[must_use]
    pub fn report(&self, plan: &Plan) -> Report {
        self.planner.report(&self.complete_report_inputs(plan))
    }

    /// Returns the plan's report inputs, with the reasons that a follower's plan leaves out.
    fn complete_report_inputs<'p>(&self, plan: &'p Plan) -> Cow<'p, ReportInputs> {
        self.planner.complete_report_inputs(&plan.report_inputs, self.dispatch.clients())
    }

    /// Returns how many engines each variant of the model has and should have, as this plan found it.
    ///
    /// Call it after [`Self::issued`] and before any other change.
    #[must_use]
    pub fn variants(&self, plan: &Plan, model: &ModelName) -> BTreeMap<VariantName, VariantReport> {
        self.planner.variant_reports(model, &plan.report_inputs.replica_reasons)
    }

    /// Returns the routing changes since the last call.
    pub fn take_routing_changes(&mut self) -> RoutingChanges {
        let models = self.planner.engines.take_rerouted();
        let mut demand = self.planner.engines.take_use_changed();
        demand.extend(self.dispatch.take_changed());
        let ConfigurationChanges { everything, specs } = std::mem::take(&mut self.reconfigured);
        RoutingChanges { reconfigured: everything, specs, models, demand }
    }

    /// Returns the whole state for display.
    #[must_use]
    pub fn view(&self, report: &Report) -> FleetView {
        self.planner.view(report)
    }

    /// Lists every broken invariant as text; empty if all hold.
    #[must_use]
    pub fn broken_invariants(&self) -> Vec<String> {
        self.planner.broken_invariants()
    }

    /// Checks whether an operator's order can be accepted.
    ///
    /// # Errors
    /// The reason why it cannot.
    pub fn validate_action(&self, model: &ModelName, order: OperatorAction) -> Result<(), String> {
        self.planner.validate_action(model, order)
    }

    /// Returns the state as events that rebuild it in a new fleet. A journal starts over with them when its file is
    /// full.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Event> {
        // Waiters come first: replayed after the state, each would count as new demand in the learned pauses of its
        // model.
        let state = Box::new(self.planner.clone());
        self.dispatch.snapshot().chain([Event::StateRestored { state }]).collect()
    }
}

#[cfg(test)]
mod tests;
