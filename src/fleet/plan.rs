//! The leader's decision: which engines run, sleep, or make room.
//!
//! [`Planner`] is the state; [`PlanBuilder`] is one decision over a copy of it. A decision has a fixed order: first
//! what each engine's own state demands (`advance`), then the starts (`admit`), because engines on their way out are
//! room that need not be made twice.

pub(in crate::fleet) mod admit;
pub(in crate::fleet) mod advance;
pub(in crate::fleet) mod desired;
pub(in crate::fleet) mod evict;
pub(in crate::fleet) mod leadership;
pub(in crate::fleet) mod operations;
pub(in crate::fleet) mod place;

mod deadlines;
mod model_record;
mod rehearsal;
mod verdicts;

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

pub(in crate::fleet) use self::model_record::{KeptAwakeModels, ModelRecord};
pub use self::verdicts::WaiterVerdicts;
use crate::{
    engine::{Admission, Engine, state::LifecycleState},
    fleet::{
        command::Command,
        event::OperationId,
        explain::ModelReason,
        plan::{
            admit::closure::ClosureAttempt,
            desired::ScalingIndex,
            leadership::LeadershipRole,
            operations::OperatorOperation,
            place::{PlacementCandidate, candidate_sets::CandidateCache},
            rehearsal::WantedMemory,
        },
        report::{ModelReport, Report},
        state::{
            dependencies::DependencyGraph,
            due_index::DueIndex,
            engines::EngineTable,
            ledger::{MemoryLedger, amount::ResourceAmount, pool_accelerators::PoolAccelerators},
            remote_demand::RemoteDemand,
            variant_specs::VariantSpecs,
        },
    },
    model::{
        AcceleratorId, AcceleratorRequirement, EngineId, EvictionPolicy, FleetSettings, ModelName, ModelSpec,
        SleepLevel, SleepLevelPolicy, VariantName,
    },
    units::{Bytes, Generation, Millis, Tick},
};

/// The state that plans are made from, except for the demand.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Planner {
    pub(in crate::fleet) settings: FleetSettings,
    pub(in crate::fleet) models: Arc<BTreeMap<ModelName, ModelRecord>>,
    pub(in crate::fleet) engines: EngineTable,
    pub(in crate::fleet) ledger: MemoryLedger,
    /// All engines that already ran are known.
    pub(in crate::fleet) adopted: bool,
    /// Shutdown was ordered; `true`: engines are stopped too.
    pub(in crate::fleet) shutdown: Option<bool>,
    #[serde(with = "crate::fleet::plan::operations::as_list")]
    pub(in crate::fleet) operations: BTreeMap<OperationId, OperatorOperation>,
    /// Derived from the other fields.
    #[serde(skip)]
    pub(in crate::fleet) due_index: DueIndex,
    /// Derived from the specs in `models`.
    #[serde(skip)]
    pub(in crate::fleet) dependencies: DependencyGraph,
    /// Derived from `models`.
    #[serde(skip)]
    pub(in crate::fleet) kept_awake: KeptAwakeModels,
    /// Derived from the specs in `models`.
    #[serde(skip)]
    pub(in crate::fleet) variant_specs: VariantSpecs,
    /// Derived from the targets in `models` and from the engines.
    #[serde(skip)]
    pub(in crate::fleet) scaling: ScalingIndex,
    /// Moment of the last recorded plan.
    pub(in crate::fleet) last_planned: Tick,
    /// The highest generation among removed engines.
    ///
    /// An engine that returns under the same name continues from here, so late events of the old one do not count for
    /// it.
    pub(in crate::fleet) last_generation: Generation,
    #[serde(default, skip_serializing_if = "RemoteDemand::is_empty")]
    pub(in crate::fleet) remote_demand: RemoteDemand,
    #[serde(default, skip_serializing_if = "LeadershipRole::decides")]
    pub(in crate::fleet) role: LeadershipRole,
    /// Until this moment, other gateways may use engines without having reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::fleet) remote_use_unknown_until: Option<Tick>,
    /// No other gateway exists that could use an engine.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(in crate::fleet) has_no_peers: bool,
    /// When the cluster's API server stopped answering this gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::fleet) api_unreachable_since: Option<Tick>,
    /// Engines seen while another gateway led, and not yet found running since this gateway leads.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(in crate::fleet) unconfirmed_engines: BTreeSet<EngineId>,
}

/// Numbers of one model's queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueDemand {
    pub waiting: u32,
    /// The part of `waiting` that waits at other gateways.
    pub remote: u32,
    /// The highest band among the waiters.
    pub band: i32,
    /// The earliest arrival.
    pub oldest: Tick,
}

/// A decision in progress.
pub struct PlanBuilder<'a> {
    pub(in crate::fleet) planner: Planner,
    pub(in crate::fleet) demand: &'a BTreeMap<ModelName, QueueDemand>,
    /// Number of waiters of each client, by the client's hash.
    pub(in crate::fleet) waiting_clients: &'a BTreeMap<u64, u32>,
    pub(in crate::fleet) now: Tick,
    commands: Vec<Command>,
    /// Each model's reason: what it waits for, or why it stays as it is.
    pub(in crate::fleet) reasons: Arc<BTreeMap<ModelName, ModelReason>>,
    /// What the next engine of a variant waits for, in models with targets.
    pub(in crate::fleet) replica_reasons: ReplicaReasons,
    /// Memory that models earlier in line will take on an accelerator.
    pub(in crate::fleet) claims: BTreeMap<AcceleratorId, ResourceAmount>,
    /// Every engine that is wanted and not awake, in turn order.
    ///
    /// Computed when this pass begins to admit.
    pub(in crate::fleet) turn_order: Vec<EngineId>,
    /// Position of each of these engines in that order, and of the engines that they need.
    pub(in crate::fleet) turn_positions: BTreeMap<EngineId, usize>,
    /// The attempt to bring up an engine with its dependencies, while one runs.
    pub(in crate::fleet) closure_attempt: Option<ClosureAttempt>,
    /// The part of `claims` that is for dependencies of another engine.
    pub(in crate::fleet) dependency_claims: BTreeMap<EngineId, PlacementCandidate>,
    /// Engines in line that claim nothing, because no eviction could give them the memory that they lack.
    ///
    /// Among them are the dependencies that have their place in line from such an engine.
    pub(in crate::fleet) out_of_reach: BTreeSet<EngineId>,
    /// Derived from the draft. Each change of the draft discards it.
    pub(in crate::fleet) cache: DraftCache,
}

/// What several questions about one draft have in common. Made when it is first asked for.
#[derive(Debug, Default)]
pub(in crate::fleet) struct DraftCache {
    candidates: CandidateCache,
    wanted_memory: OnceCell<WantedMemory>,
}

/// What the next engine of each variant waits for.
pub(in crate::fleet) type ReplicaReasons = BTreeMap<(ModelName, VariantName), ModelReason>;

/// Inputs of a report, besides the state.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct ReportInputs {
    pub(in crate::fleet) reasons: Arc<BTreeMap<ModelName, ModelReason>>,
    pub(in crate::fleet) replica_reasons: ReplicaReasons,
    pub(in crate::fleet) demand: BTreeMap<ModelName, QueueDemand>,
    /// The engines that are wanted and not awake, in turn order.
    pub(in crate::fleet) turn_order: Vec<EngineId>,
    pub(in crate::fleet) now: Tick,
}

impl<'a> PlanBuilder<'a> {
    pub(in crate::fleet) fn new(
        mut planner: Planner,
        demand: &'a BTreeMap<ModelName, QueueDemand>,
        clients: &'a BTreeMap<u64, u32>,
        now: Tick,
    ) -> Self {
        planner.advance_time(now);
        Self {
            planner,
            demand,
            waiting_clients: clients,
            now,
            commands: Vec::new(),
            reasons: Arc::default(),
            replica_reasons: ReplicaReasons::new(),
            claims: BTreeMap::new(),
            turn_order: Vec::new(),
            turn_positions: BTreeMap::new(),
            closure_attempt: None,
            dependency_claims: BTreeMap::new(),
            out_of_reach: BTreeSet::new(),
            cache: DraftCache::default(),
        }
    }

    pub(in crate::fleet) fn decide(&mut self) {
        if !self.planner.role.decides() {
            self.plan_as_follower();
        } else if self.planner.adopted {
            self.finish_superseded();
            self.advance();
            if self.planner.shutdown.is_none() {
                self.drain_surplus();
                self.admit();
            }
            self.finish_operations();
        }
        self.explain_api_unreachable();
    }

    /// Adds a command to the plan and records it in the draft at once.
    pub(in crate::fleet) fn emit(&mut self, command: Command) {
        self.record(&command);
        self.commands.push(command);
    }

    pub(in crate::fleet) fn record(&mut self, command: &Command) {
        self.planner.apply(command, self.now);
        self.cache = DraftCache::default();
    }

    /// Number of commands decided and not yet taken.
    pub(in crate::fleet) const fn command_count(&self) -> usize {
        self.commands.len()
    }

    /// Removes and returns the commands decided since [`Self::command_count`] was `decided`.
    pub(in crate::fleet) fn take_commands_since(&mut self, decided: usize) -> Vec<Command> {
        self.commands.split_off(decided)
    }

    pub(in crate::fleet) fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    pub(in crate::fleet) fn max_waiting(&self) -> usize {
        self.planner.settings.queue.max_waiting as usize
    }

    /// The model's own `queue.maxWaiting`, if it has one.
    pub(in crate::fleet) fn max_waiting_for(&self, model: &ModelName) -> Option<usize> {
        self.planner.spec(model)?.queue.max_waiting.map(|most| most as usize)
    }

    pub(in crate::fleet) fn waiting(&self, model: &ModelName) -> u32 {
        self.demand.get(model).map_or(0, |d| d.waiting)
    }

    /// Engines that must prove themselves and have no request to do it with. None if another gateway leads.
    pub(in crate::fleet) fn engines_awaiting_probe(&self) -> Vec<EngineId> {
        if self.planner.role.decides() { self.planner.engines.awaiting_probe() } else { Vec::new() }
    }

    pub(in crate::fleet) fn probe(&mut self, engine: &EngineId) {
        let generation = self.generation(engine);
        self.emit(Command::Probe { engine: engine.clone(), generation });
    }

    pub(in crate::fleet) fn generation(&self, engine: &EngineId) -> Generation {
        self.planner.engines.get(engine).map_or(Generation(0), |e| e.generation)
    }

    pub(in crate::fleet) fn admission(&self, engine: &EngineId) -> Admission {
        self.planner.engines.get(engine).map_or(Admission::Closed, |e| e.admission)
    }

    /// Returns the draft, in which all commands are recorded, and the inputs of its report.
    pub(in crate::fleet) fn into_parts(self) -> (Planner, ReportInputs) {
        let Self { planner, reasons, replica_reasons, turn_order, now, .. } = self;
        (planner, ReportInputs { reasons, replica_reasons, demand: BTreeMap::new(), turn_order, now })
    }
}

impl Planner {
    pub(in crate::fleet) fn report(&self, inputs: &ReportInputs) -> Report {
        let model_report = |name: &ModelName| {
            let QueueDemand { waiting, remote: remote_waiting, .. } =
                inputs.demand.get(name).copied().unwrap_or_default();
            let state = self.model_state(name);
            let leases = self.leases_of(name);
            let contended = || self.explain_contended(name, &inputs.reasons);
            let reason = inputs.reasons.get(name).cloned().or_else(contended);
            let reason = reason.unwrap_or_else(|| self.explain_without_demand(name));
            let (wait, last) = (reason.wait_details(inputs.now), self.last_outcome_of(name).cloned());
            ModelReport {
                state,
                waiting,
                remote_waiting,
                leases,
                variants: self.reported_variants(name, &inputs.replica_reasons),
                wait,
                last_outcome: last,
                reason: reason.text + &reason.admin_details,
            }
        };
        let accounts = &self.ledger.accelerators;
        Report {
            models: self.models.keys().map(|name| (name.clone(), model_report(name))).collect(),
            accelerators: accounts.iter().filter_map(|(id, a)| Some((id.clone(), a.problem()?))).collect(),
        }
    }

    pub(in crate::fleet) fn is_kept_awake(&self, id: &EngineId) -> bool {
        self.models.get(&id.model).is_some_and(|model| model.keeps_awake(id))
    }

    pub(in crate::fleet) fn leases_of(&self, model: &ModelName) -> u32 {
        self.engines.of_model(model).map(|e| e.leases).sum()
    }

    pub(in crate::fleet) fn spec(&self, model: &ModelName) -> Option<&ModelSpec> {
        self.models.get(model)?.spec.as_deref()
    }

    /// When engines of this model may be evicted. A model that is no longer configured follows the fleet's policy.
    pub(in crate::fleet) fn eviction_of(&self, model: &ModelName) -> EvictionPolicy {
        self.spec(model).map_or(self.settings.eviction, |spec| self.settings.eviction_of(spec))
    }

    /// How long requests for this model wait at most.
    pub(in crate::fleet) fn max_wait_of(&self, model: &ModelName) -> Millis {
        self.spec(model).map_or(self.settings.queue.max_wait, |spec| self.settings.max_wait_of(spec))
    }

    /// Returns an accelerator of this engine that no longer answers.
    pub(in crate::fleet) fn lost_accelerator(&self, id: &EngineId) -> Option<&AcceleratorId> {
        let engine = self.engines.get(id)?;
        engine
            .accelerators
            .iter()
            .find(|a| self.ledger.accelerators.get(a).is_none_or(|account| !account.healthy))
    }

    /// Whether the engine is outdated, its model is no longer configured, or shutdown stops all engines.
    pub(in crate::fleet) fn is_unwanted(&self, id: &EngineId) -> bool {
        let Some(e) = self.engines.get(id) else { return false };
        let outdated = self.engine_spec(id).is_none_or(|spec| self.is_outdated(e, spec));
        outdated || self.shutdown == Some(true)
    }

    /// Whether the configuration does not have this engine, or not as it runs. `spec`: that of the engine's variant.
    ///
    /// An engine asleep at level 2 counts as outdated if a wake would not restore all that it had: an operator's own
    /// call, or a gateway that did not know, put it there.
    pub(in crate::fleet) fn is_outdated(&self, e: &Engine, spec: &ModelSpec) -> bool {
        let lost = spec.idle.level == SleepLevelPolicy::OneOrStop
            && e.state == LifecycleState::Asleep { level: SleepLevel::Two };
        let differs =
            e.state.has_process() && (e.fingerprint != spec.fingerprint || self.is_misplaced(e, spec));
        e.id.replica >= spec.replicas || lost || differs
    }

    /// Whether the engine was placed before its pool got slots, or while it had some.
    ///
    /// Its memory is on accounts where no engine of the pool is placed any more, so nothing would make room there.
    fn is_misplaced(&self, e: &Engine, spec: &ModelSpec) -> bool {
        match &spec.accelerators {
            AcceleratorRequirement::Slots { pool, .. } => e.accelerators.contains(pool),
            AcceleratorRequirement::InPool { pool, .. } => {
                let mut accounts = e.accelerators.iter().filter_map(|a| self.ledger.accelerators.get(a));
                accounts.any(|account| account.pool.as_ref() == Some(pool))
            }
            AcceleratorRequirement::Count(_) | AcceleratorRequirement::Ids(_) => false,
        }
    }

    /// The most that one account could hold for an engine with this spec: the largest accelerator, of the pool if that
    /// has slots, or the whole pool.
    pub(in crate::fleet) fn largest(&self, spec: &ModelSpec) -> Bytes {
        match &spec.accelerators {
            AcceleratorRequirement::InPool { pool, .. } => {
                self.ledger.accelerators.get(pool).map_or(Bytes::ZERO, |account| account.capacity)
            }
            AcceleratorRequirement::Slots { pool, .. } => {
                self.ledger.accelerators.pool(pool).map_or(Bytes::ZERO, PoolAccelerators::largest)
            }
            AcceleratorRequirement::Count(_) | AcceleratorRequirement::Ids(_) => {
                self.ledger.accelerators.largest_capacity()
            }
        }
    }

    pub(in crate::fleet) fn is_finished(&self) -> bool {
        match self.shutdown {
            None => false,
            Some(true) if self.role.decides() => self.engines.values().all(|e| !e.state.has_process()),
            Some(_) => self.engines.values().all(|e| e.admission == Admission::Closed && e.leases == 0),
        }
    }
}
