//! Decisions about a fleet of engines.
//!
//! A cluster needs two kinds of decisions, because every gateway has requests and only one may command engines:
//!
//! * [`dispatch`]: waiters and awake engines → leases and refusals. Each gateway decides this.
//! * [`plan`]: demand and reservations → commands to engines. The leader decides this.
//!
//! A single machine makes both kinds, and [`Fleet`] combines them. See [`event`] for the inputs and [`command`] for the
//! outputs.
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

mod explain;
mod observe;
mod state;

use std::collections::{BTreeMap, BTreeSet};

use command::Command;
use dispatch::Dispatch;
use event::{Event, GatewayDemand, LearnedMeasurements, OperatorAction, WaiterId};
use plan::{Planner, ReportInputs, leadership::LeadershipRole};
use quote::book::QuoteBook;
use report::{FleetView, ModelState, Report, VariantReport};
use state::ledger::pool_accelerators::PoolAccelerators;

use crate::{
    engine::{
        Engine,
        last_outcome::{LastFailure, LastOutcome},
    },
    model::{AcceleratorId, AcceleratorRequirement, EngineId, ModelName, ModelSpec, VariantName},
    units::{Bytes, Generation, Millis, Tick},
};

/// The complete decision state for engines and requests.
///
/// Pure: the same events at the same moments give the same commands.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    planner: Planner,
    dispatch: Dispatch,
    /// A configuration arrived since the last [`Self::take_routing_changes`].
    reconfigured: bool,
    /// The latest floor of generations. No decision reads it.
    generation_floor: Generation,
    /// What became of earlier quotes. No decision reads it.
    quotes: QuoteBook,
}

/// Changes since the last turn, by model. Most events and decisions change no routing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingChanges {
    /// Models may have been added or removed, and any configured value may differ.
    pub reconfigured: bool,
    /// Models with an engine that was added, removed or changed.
    ///
    /// A change is another state, admission, address, generation or fingerprint, or a restored failure.
    pub models: BTreeSet<ModelName>,
    /// Models whose waiters here changed in number, or with an engine that got its first lease or lost its last.
    ///
    /// Requests are not routed by it. It bounds the work of those who follow this gateway's demand.
    pub demand: BTreeSet<ModelName>,
}

/// Capacity of an accelerator, or of a pool of accelerators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceleratorCapacity {
    pub capacity: Bytes,
    /// Of a pool its accelerators or slots, of an accelerator in a pool its slots, if they are counted.
    pub units: Option<u32>,
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
            Event::Configured { .. } | Event::StateRestored { .. } => self.reconfigured = true,
            Event::GenerationFloor { generation } => self.generation_floor = *generation,
            _ => {}
        }
        self.planner.observe(event, now);
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
        let mut after = Self { planner, dispatch, quotes, ..*self };
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
        self.planner.report(&plan.report_inputs)
    }

    /// Returns how many engines each variant of the model has and should have, as this plan found it.
    ///
    /// Call it after [`Self::issued`] and before any other change.
    #[must_use]
    pub fn variants(&self, plan: &Plan, model: &ModelName) -> BTreeMap<VariantName, VariantReport> {
        self.planner.variant_reports(model, &plan.report_inputs.replica_reasons)
    }

    /// Whether targets say how many engines of this model run, even if there are none yet.
    #[must_use]
    pub fn is_scaled(&self, model: &ModelName) -> bool {
        self.planner.is_scaled(model)
    }

    /// Returns the configuration of an engine: that of its variant. `None` if it is not, or no longer, configured.
    #[must_use]
    pub fn engine_spec(&self, engine: &EngineId) -> Option<&ModelSpec> {
        self.planner.engine_spec(engine)
    }

    /// Returns the routing changes since the last call.
    pub fn take_routing_changes(&mut self) -> RoutingChanges {
        let models = self.planner.engines.take_rerouted();
        let mut demand = self.planner.engines.take_use_changed();
        demand.extend(self.dispatch.take_changed());
        RoutingChanges { reconfigured: std::mem::take(&mut self.reconfigured), models, demand }
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

    /// Returns the measurements of every model's variant `default`, which persist over restarts.
    ///
    /// On one machine, models have no other.
    #[must_use]
    pub fn learned(&self) -> BTreeMap<ModelName, LearnedMeasurements> {
        self.planner.models.iter().map(|(name, model)| (name.clone(), model.learned)).collect()
    }

    /// Returns the measurements of every other variant, if it has any.
    #[must_use]
    pub fn learned_of_variants(&self) -> BTreeMap<(ModelName, VariantName), LearnedMeasurements> {
        let mut all = BTreeMap::new();
        for (name, model) in self.planner.models.iter() {
            for (variant, learned) in &model.learned_of_variants {
                all.insert((name.clone(), variant.clone()), *learned);
            }
        }
        all
    }

    /// Returns the measurements of one variant; `None` if the model is unknown.
    #[must_use]
    pub fn learned_of(&self, model: &ModelName, variant: &VariantName) -> Option<LearnedMeasurements> {
        self.planner.models.get(model).map(|model| model.learned_of(variant))
    }

    /// Returns the model's configuration; `None` if the model is not, or no longer, configured.
    #[must_use]
    pub fn spec(&self, model: &ModelName) -> Option<&ModelSpec> {
        self.planner.spec(model)
    }

    /// Returns the capacity of an accelerator, or of a pool: of one whose accelerators have slots, that of all together.
    #[must_use]
    pub fn accelerator_capacity(&self, accelerator: &AcceleratorId) -> Option<AcceleratorCapacity> {
        let accounts = &self.planner.ledger.accelerators;
        if let Some(account) = accounts.get(accelerator) {
            return Some(AcceleratorCapacity { capacity: account.capacity, units: account.units });
        }
        let pool = accounts.pool(accelerator)?;
        Some(AcceleratorCapacity { capacity: pool.capacity(), units: Some(pool.units()) })
    }

    /// Memory that may still be reserved where engines with this requirement may run, over all these accelerators.
    #[must_use]
    pub fn free_memory(&self, requirement: &AcceleratorRequirement) -> Bytes {
        let accounts = &self.planner.ledger.accelerators;
        let free = |id: &AcceleratorId| accounts.get(id).map(|account| account.free()).unwrap_or_default();
        match requirement {
            AcceleratorRequirement::InPool { pool, .. } => free(pool),
            AcceleratorRequirement::Slots { pool, .. } => {
                accounts.pool(pool).map_or(Bytes::ZERO, PoolAccelerators::free)
            }
            AcceleratorRequirement::Ids(ids) => ids.iter().map(free).sum(),
            AcceleratorRequirement::Count(_) => accounts.iter().map(|(_, account)| account.free()).sum(),
        }
    }

    /// Returns since when no gateway uses or requests the model.
    ///
    /// `None` while one does, while no engine of the model has a process, and while the use by other gateways is
    /// unknown. It may be in the future: the others have until then to report that they use it.
    #[must_use]
    pub fn unused_since(&self, model: &ModelName) -> Option<Tick> {
        if self.waiting_everywhere(model) > 0 {
            return None;
        }
        let planner = &self.planner;
        let mut engines = planner.engines_of(model).filter(|e| e.state.has_process()).peekable();
        engines.peek()?;
        engines.try_fold(Tick(0), |latest, e| {
            let is_unused = planner.in_use_count(e) == 0;
            planner.idle_at(e, Millis::ZERO).filter(|_| is_unused).map(|at| latest.max(at))
        })
    }

    /// Returns every configured model.
    pub fn specs(&self) -> impl Iterator<Item = &ModelSpec> {
        self.planner.models.values().filter_map(|m| m.spec.as_deref())
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

    /// Memory reserved for the engine, over all its accelerators.
    #[must_use]
    pub fn reserved_bytes(&self, engine: &EngineId) -> Bytes {
        let accounts = self.planner.ledger.accelerators.accounts_of(engine);
        accounts.map(|(_, account)| account.booked_by(engine)).sum()
    }

    /// Memory that the engine would free if it slept, over all its accelerators.
    #[must_use]
    pub fn freed_by_sleep(&self, engine: &EngineId) -> Bytes {
        let residue = self.planner.residue_of(engine);
        let accounts = self.planner.ledger.accelerators.accounts_of(engine);
        accounts.map(|(_, account)| account.booked_by(engine).saturating_sub(residue)).sum()
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

    /// Number of requests for this model that queue at this gateway.
    #[must_use]
    pub fn waiting(&self, model: &ModelName) -> usize {
        self.dispatch.waiting(model)
    }

    /// Number of requests for this model that queue at all gateways, as far as the others have reported.
    #[must_use]
    pub fn waiting_everywhere(&self, model: &ModelName) -> u32 {
        let own = u32::try_from(self.waiting(model)).unwrap_or(u32::MAX);
        own.saturating_add(self.planner.remote_demand.of(model).waiting)
    }

    /// Models whose requests queue at this gateway.
    pub fn queued_models(&self) -> impl Iterator<Item = &ModelName> {
        self.dispatch.queued_models()
    }

    /// The best state of the model's engines.
    #[must_use]
    pub fn state(&self, model: &ModelName) -> ModelState {
        self.planner.model_state(model)
    }

    /// The latest failure among the model's engines that have not served since.
    #[must_use]
    pub fn last_failure(&self, model: &ModelName) -> Option<LastFailure> {
        self.engines_of(model).filter_map(Engine::last_failure).max_by_key(|failure| failure.at)
    }

    /// The latest outcome among the model's engines that have not served since.
    #[must_use]
    pub fn last_outcome(&self, model: &ModelName) -> Option<&LastOutcome> {
        self.planner.last_outcome_of(model)
    }

    /// Why this model, alone or with its dependencies, fits nowhere even if every other model is evicted.
    #[must_use]
    pub fn unplaceable_reason(&self, model: &ModelName) -> Option<String> {
        self.planner.unplaceable_reason(model)
    }

    /// Whether the tokens that this model serves to this key count towards fairness.
    ///
    /// They count once the key's requests have waited for the model, and while the model stays busy.
    #[must_use]
    pub fn tracks_key(&self, model: &ModelName, key: &str) -> bool {
        self.dispatch.tracks_key(model, key)
    }

    /// Every key that [`Self::tracks_key`], for models with waiters. The driver reports their tokens as
    /// [`Event::Served`].
    pub fn tracked_keys(&self) -> impl Iterator<Item = (&ModelName, &str)> {
        self.dispatch.tracked_keys()
    }

    /// Whether shutdown is not ordered and all engines that already ran are known.
    ///
    /// A gateway that is not the leader knows them from the leader.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        (self.planner.adopted || !self.planner.role.decides()) && self.planner.shutdown.is_none()
    }

    /// Whether this gateway commands engines, or will once it has adopted the running ones.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.planner.role != LeadershipRole::Follower
    }

    /// Returns this gateway's own demand for every model that is requested or in use.
    ///
    /// Other gateways receive it as [`Event::RemoteDemand`].
    #[must_use]
    pub fn demand(&self) -> BTreeMap<ModelName, GatewayDemand> {
        let used = self.planner.engines.used().map(|engine| &engine.model);
        let models: BTreeSet<&ModelName> = self.dispatch.queued_models().chain(used).collect();
        let known = models.into_iter().filter(|name| self.planner.models.contains_key(*name));
        let all = known.map(|name| (name.clone(), self.demand_of(name)));
        all.filter(|(_, demand)| *demand != GatewayDemand::default()).collect()
    }

    /// Returns this gateway's own demand for one model.
    #[must_use]
    pub fn demand_of(&self, model: &ModelName) -> GatewayDemand {
        GatewayDemand {
            waiting: u32::try_from(self.dispatch.waiting(model)).unwrap_or(u32::MAX),
            in_flight: self.planner.leases_of(model),
            last_request: self.planner.engines_of(model).map(|e| e.last_lease_end).max().unwrap_or_default(),
        }
    }

    /// Whether this gateway leads and has adopted all engines that already ran.
    #[must_use]
    pub fn is_active_leader(&self) -> bool {
        self.planner.role == LeadershipRole::Leader && self.planner.adopted
    }

    /// The latest [`Event::GenerationFloor`]. Each term of this gateway's leadership begins with one of its own.
    #[must_use]
    pub const fn generation_floor(&self) -> Generation {
        self.generation_floor
    }

    /// Whether shutdown was ordered. Gates then close at this gateway alone.
    #[must_use]
    pub fn is_shutting_down(&self) -> bool {
        self.planner.shutdown.is_some()
    }

    /// Whether shutdown was ordered and nothing is left to wait for.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.planner.is_finished()
    }
}

#[cfg(test)]
mod tests;
