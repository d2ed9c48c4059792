//! The decisions about a fleet of engines.
//!
//! There are two, for the sake of a cluster, where every gateway has requests and only one may command engines:
//!
//! * [`dispatch`]: waiters and awake engines → who gets a lease, who is refused. Each gateway makes it.
//! * [`plan`]: demand and reservations → what engines are to do. The leader makes it.
//!
//! A single machine makes both, and [`Fleet`] is the two put together. See [`event`] for what comes in and [`command`] for
//! what goes out.
//!
//! Planning works on a copy: every decision is recorded in the copy at once ([`plan::Planner`]'s `apply`, the same
//! function that [`Fleet::issued`] uses), so that a later decision of the same plan sees the earlier ones, and so that
//! what was planned and what is recorded cannot differ.

pub mod command;
pub mod dispatch;
pub mod event;
pub mod plan;
pub mod report;

mod explain;
mod observe;
mod state;

use std::collections::{BTreeMap, BTreeSet};

use command::Command;
use dispatch::Dispatch;
use event::{Event, GatewayDemand, LearnedMeasurements, OperatorAction};
use plan::{Planner, ReportInputs, leadership::LeadershipRole};
use report::{FleetView, ModelState, Report};

use crate::{
    engine::{
        Engine,
        last_outcome::{LastFailure, LastOutcome},
    },
    model::{AcceleratorId, EngineId, ModelName, ModelSpec},
    units::{Bytes, Tick},
};

/// Everything that is decided about engines and requests. Pure: the same events at the same moments give the same
/// commands.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    planner: Planner,
    dispatch: Dispatch,
    /// A configuration has come since [`Self::take_routing_changes`].
    reconfigured: bool,
}

/// What became different for those who send requests: most events and decisions change nothing of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingChanges {
    /// Models may have come and gone, and anything of what is configured of them may be another.
    pub reconfigured: bool,
    /// Models of which an engine has come or gone, or another state, door, address or life.
    pub models: BTreeSet<ModelName>,
}

/// What an accelerator, or a pool of them, can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceleratorCapacity {
    pub capacity: Bytes,
    /// Of a pool: how many accelerators are in it, where that counts.
    pub units: Option<u32>,
}

/// More looks than this at one moment would be decisions that contradict each other.
const MAX_REPLANS: usize = 8;

/// What to do now. For every model it is known why, and [`Fleet::report`] puts that into words.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub commands: Vec<Command>,
    report_inputs: ReportInputs,
}

impl Fleet {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes note of an observation. Decides nothing.
    pub fn on(&mut self, event: &Event, now: Tick) {
        match event {
            Event::Arrived { waiter } => self.dispatch.add_waiter(waiter.clone()),
            Event::Left { waiter } => self.remove_waiter(*waiter),
            Event::Served { model, key, tokens } => {
                self.dispatch.record_served(model, key, *tokens, self.planner.leases_of(model));
            }
            Event::FairnessRestored { model, band, counters: shares } => {
                self.dispatch.set_counters(model, *band, shares)
            }
            Event::Configured { .. } | Event::StateRestored { .. } => self.reconfigured = true,
            _ => {}
        }
        self.planner.observe(event, now);
        if let Event::GateSampled { engine, .. } = event {
            let leases = self.planner.leases_of(&engine.model);
            self.dispatch.limit_in_flight(&engine.model, leases);
            if leases == 0 {
                self.dispatch.drop_queue_if_empty(&engine.model);
            }
        }
    }

    /// The last of those who waited may be the last of what the queue was for: no lease may ever have been there.
    fn remove_waiter(&mut self, waiter: event::WaiterId) {
        if let Some(model) = self.dispatch.remove_waiter(waiter)
            && self.planner.leases_of(&model) == 0
        {
            self.dispatch.drop_queue_if_empty(&model);
        }
    }

    /// What should be done at this moment. Changes nothing: call [`Self::issued`] with what will really be submitted.
    ///
    /// One look decides engine by engine, and a late decision can matter to an engine that was looked at before (a
    /// refused waiter gives its model's place in line to the next, a drained gate waited for a start that has just
    /// been given up). So it looks again at what would be true afterwards, until nothing is left to do.
    #[must_use]
    pub fn plan(&self, now: Tick) -> Plan {
        let mut plan = self.plan_once(now);
        if plan.commands.is_empty() {
            return plan;
        }
        let mut after = self.clone();
        let mut recorded = 0;
        for _ in 0..MAX_REPLANS {
            after.issued(plan.commands.get(recorded..).unwrap_or_default(), now);
            recorded = plan.commands.len();
            let next = after.plan_once(now);
            plan.report_inputs = next.report_inputs;
            plan.commands.extend(next.commands);
            if plan.commands.len() == recorded {
                break;
            }
        }
        plan
    }

    fn plan_once(&self, now: Tick) -> Plan {
        let demand = self.planner.with_remote_demand(self.dispatch.demand());
        let mut draft = plan::PlanBuilder::new(self.planner.clone(), &demand, self.dispatch.clients(), now);
        draft.decide();
        let mut commands = draft.take_commands();
        let verdicts = draft.verdicts();
        let granted = self.dispatch.decide(&mut draft, &verdicts, now);
        commands.extend(draft.take_commands());
        commands.extend(granted);
        let reasons = draft.into_reasons();
        Plan { commands, report_inputs: ReportInputs { reasons, demand, now } }
    }

    /// Records commands as given, before they are submitted. Planning again at the same moment yields none.
    pub fn issued(&mut self, commands: &[Command], now: Tick) {
        self.planner.advance_time(now);
        for command in commands {
            match command {
                Command::Grant { waiter, canary, .. } => self.dispatch.record_grant(*waiter, *canary),
                Command::Refuse { waiter, .. } => self.remove_waiter(*waiter),
                _ => {}
            }
            self.planner.apply(command, now);
        }
        self.planner.refresh_due_index();
    }

    /// The next moment at which planning may give something without an event in between.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Tick> {
        let planned = self.planner.last_planned;
        self.planner.deadline_after(planned).into_iter().chain(self.dispatch.deadlines_after(planned)).min()
    }

    /// Why nothing else is done about each model of which there is more to say than its state, and whether that is for want of
    /// memory: as this plan found it.
    pub fn reasons<'a>(&self, plan: &'a Plan) -> impl Iterator<Item = (&'a ModelName, &'a str, bool)> {
        plan.report_inputs
            .reasons
            .iter()
            .map(|(model, reason)| (model, reason.text.as_str(), reason.is_memory_shortage()))
    }

    /// The plan's reasons in words, once its commands are recorded and before anything else is. Most turns are decided
    /// without anybody asking.
    #[must_use]
    pub fn report(&self, plan: &Plan) -> Report {
        self.planner.report(&plan.report_inputs)
    }

    /// What has changed since this was last called.
    pub fn take_routing_changes(&mut self) -> RoutingChanges {
        let models = std::sync::Arc::unwrap_or_clone(self.planner.engines.take_rerouted());
        RoutingChanges { reconfigured: std::mem::take(&mut self.reconfigured), models }
    }

    /// The state, for people.
    #[must_use]
    pub fn view(&self, report: &Report) -> FleetView {
        self.planner.view(report)
    }

    /// Every broken invariant, in words; empty when all is well.
    #[must_use]
    pub fn broken_invariants(&self) -> Vec<String> {
        self.planner.broken_invariants()
    }

    /// Why an operator's order cannot be taken, if it cannot.
    pub fn validate_action(&self, model: &ModelName, order: OperatorAction) -> Result<(), String> {
        self.planner.validate_action(model, order)
    }

    /// What was learned so far, to be kept over restarts.
    #[must_use]
    pub fn learned(&self) -> BTreeMap<ModelName, LearnedMeasurements> {
        self.planner.models.iter().map(|(name, model)| (name.clone(), model.learned)).collect()
    }

    /// The same of one model.
    #[must_use]
    pub fn learned_of(&self, model: &ModelName) -> Option<LearnedMeasurements> {
        self.planner.models.get(model).map(|model| model.learned)
    }

    /// What is configured of this model; `None` when it is not, or no longer.
    #[must_use]
    pub fn spec(&self, model: &ModelName) -> Option<&ModelSpec> {
        self.planner.spec(model)
    }

    /// What an accelerator can hold whose account is kept.
    #[must_use]
    pub fn accelerator_capacity(&self, accelerator: &AcceleratorId) -> Option<AcceleratorCapacity> {
        let account = self.planner.ledger.accelerators.get(accelerator)?;
        Some(AcceleratorCapacity { capacity: account.capacity, units: account.units })
    }

    /// Every configured model.
    pub fn specs(&self) -> impl Iterator<Item = &ModelSpec> {
        self.planner.models.values().filter_map(|m| m.spec.as_deref())
    }

    /// The state as the events that would bring a new fleet to it: what a journal starts over with when its file is
    /// full.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Event> {
        // The waiters come first: each would count as one that has just come, for what is learned of its model.
        let state = Box::new(self.planner.clone());
        self.dispatch.snapshot().chain([Event::StateRestored { state }]).collect()
    }

    pub fn engines(&self) -> impl Iterator<Item = &Engine> {
        self.planner.engines.values()
    }

    pub fn engines_of(&self, model: &ModelName) -> impl Iterator<Item = &Engine> {
        self.planner.engines.of_model(model)
    }

    #[must_use]
    pub fn engine(&self, id: &EngineId) -> Option<&Engine> {
        self.planner.engines.get(id)
    }

    /// `queue.maxWaiting`.
    #[must_use]
    pub const fn max_waiting(&self) -> usize {
        self.planner.settings.queue.max_waiting as usize
    }

    /// How many requests for this model queue here.
    #[must_use]
    pub fn waiting(&self, model: &ModelName) -> usize {
        self.dispatch.waiting(model)
    }

    /// Models whose requests queue here.
    pub fn queued_models(&self) -> impl Iterator<Item = &ModelName> {
        self.dispatch.queued_models()
    }

    /// The best of the states of its engines.
    #[must_use]
    pub fn state(&self, model: &ModelName) -> ModelState {
        self.planner.model_state(model)
    }

    /// The last failure of any of its engines that has not served since.
    #[must_use]
    pub fn last_failure(&self, model: &ModelName) -> Option<LastFailure> {
        self.engines_of(model).filter_map(Engine::last_failure).max_by_key(|failure| failure.at)
    }

    /// What befell any of its engines last, where that has not served since.
    #[must_use]
    pub fn last_outcome(&self, model: &ModelName) -> Option<&LastOutcome> {
        self.planner.last_outcome_of(model)
    }

    /// Why there is no room for it, or for all that it needs beside it, whatever else is put away, if so.
    #[must_use]
    pub fn unplaceable_reason(&self, model: &ModelName) -> Option<String> {
        self.planner.unplaceable_reason(model)
    }

    /// What this key is served by this model counts, since its requests waited there and the model is busy still.
    #[must_use]
    pub fn tracks_key(&self, model: &ModelName, key: &str) -> bool {
        self.dispatch.tracks_key(model, key)
    }

    /// Every key that [`Self::tracks_key`], of models for which somebody waits: of what these are served an
    /// [`Event::Served`] should tell.
    pub fn tracked_keys(&self) -> impl Iterator<Item = (&ModelName, &str)> {
        self.dispatch.tracked_keys()
    }

    /// Configured, and everything that already ran is known, be it from the gateway that leads.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        (self.planner.adopted || !self.planner.role.decides()) && self.planner.shutdown.is_none()
    }

    /// This gateway orders engines about, or will as soon as it knows what runs.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.planner.role != LeadershipRole::Follower
    }

    /// What this gateway has itself of every model that is asked for or in use, as other gateways are to be told
    /// ([`Event::RemoteDemand`]).
    #[must_use]
    pub fn demand(&self) -> BTreeMap<ModelName, GatewayDemand> {
        let own = |name: &ModelName| GatewayDemand {
            waiting: u32::try_from(self.dispatch.waiting(name)).unwrap_or(u32::MAX),
            in_flight: self.planner.leases_of(name),
            last_request: self.planner.engines_of(name).map(|e| e.last_lease_end).max().unwrap_or_default(),
        };
        let all = self.planner.models.keys().map(|name| (name.clone(), own(name)));
        all.filter(|(_, own)| *own != GatewayDemand::default()).collect()
    }

    /// This gateway leads, and everything that already ran is known to it.
    #[must_use]
    pub fn is_active_leader(&self) -> bool {
        self.planner.role == LeadershipRole::Leader && self.planner.adopted
    }

    /// Shutdown was ordered: gates close for this gateway alone.
    #[must_use]
    pub fn is_shutting_down(&self) -> bool {
        self.planner.shutdown.is_some()
    }

    /// Shutdown was ordered, and nothing is left to wait for.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.planner.is_finished()
    }
}
