//! The leader's decision: which engines run, sleep, or make room.
//!
//! [`Planner`] is the state; [`Draft`] is one decision over a copy of it. The order of a decision is fixed: first what
//! each engine's own life demands (`advance`), then who starts (`admit`), since what is on its way out is room that
//! need not be made twice.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    budget::Ledger,
    calm::Calm,
    command::Command,
    elsewhere::Others,
    engines::Engines,
    event::{Learned, OperationId, Waiter},
    explain::Reason,
    needs::Needs,
    orders::Operation,
    placement::Candidate,
    portion::Portion,
    report::{Line, Report},
    role::Role,
    together::Together,
};
use crate::{
    engine::{Door, Engine, NOT_DUE, state::State},
    fault::{Cause, Fault, Patience, Wait},
    model::{
        AcceleratorId, Accelerators, EngineId, Eviction, Level, LevelPolicy, ModelName, ModelSpec, Settings,
    },
    units::{Bytes, Generation, Millis, Tick},
};

/// Everything the plan is made from, but for the demand.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Planner {
    pub(super) settings: Settings,
    pub(super) models: Arc<BTreeMap<ModelName, Model>>,
    pub(super) engines: Engines,
    pub(super) ledger: Ledger,
    /// Everything that already ran is known.
    pub(super) adopted: bool,
    /// Ordered; `true`: engines are stopped too.
    pub(super) shutdown: Option<bool>,
    #[serde(with = "super::orders::listed")]
    pub(super) operations: BTreeMap<OperationId, Operation>,
    /// Made from the rest.
    #[serde(skip)]
    pub(super) calm: Calm,
    /// As well.
    #[serde(skip)]
    pub(super) needs: Needs,
    /// When a plan was last recorded.
    pub(super) planned: Tick,
    /// The last life of any engine that is no longer known. One that enters under the same name goes on from here, or what
    /// is still said of the old one would count for it.
    pub(super) last_life: Generation,
    #[serde(default, skip_serializing_if = "Others::is_empty")]
    pub(super) elsewhere: Others,
    #[serde(default, skip_serializing_if = "Role::decides")]
    pub(super) role: Role,
    /// Before this moment others may be using what they could not say yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) heard_by: Option<Tick>,
    /// There is no other gateway that could be using anything.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) alone: bool,
    /// Since when the cluster's API has not answered this gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cut_off: Option<Tick>,
    /// Seen while another gateway led, and not found running since this one does.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) unfound: BTreeSet<EngineId>,
}

/// A model and what is known of it beyond its configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Model {
    /// `None`: no longer configured, on its way out.
    pub(super) spec: Option<Arc<ModelSpec>>,
    /// An operator's word on pinning.
    pub(super) pin: Option<bool>,
    pub(super) learned: Learned,
    /// The usual pause between two uses, learned from its own.
    pub(super) gap: Option<Millis>,
    /// Configured or pinned at this moment: a model that is wanted without waiters queues from here.
    pub(super) since: Tick,
}

/// One model's queue, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    pub waiting: u32,
    /// So many of them at other gateways.
    pub elsewhere: u32,
    /// The highest band among the waiters.
    pub band: i32,
    /// The earliest arrival.
    pub oldest: Tick,
}

/// A decision in the making.
pub struct Draft<'a> {
    pub(super) planner: Planner,
    pub(super) demand: &'a BTreeMap<ModelName, Demand>,
    /// Everybody who waits, by their hashes.
    pub(super) clients: &'a BTreeMap<u64, u32>,
    pub(super) now: Tick,
    commands: Vec<Command>,
    /// What each model waits for, or why nothing is done about it.
    pub(super) reasons: Arc<BTreeMap<ModelName, Reason>>,
    /// What a model earlier in line will take on an accelerator.
    pub(super) claims: BTreeMap<AcceleratorId, Portion>,
    /// Every engine that is wanted and not awake, in the order of turns, as it was when this look began to admit.
    pub(super) line: Vec<EngineId>,
    /// Where each of these stands in it, and what they need with them.
    pub(super) places: BTreeMap<EngineId, usize>,
    /// An engine is being brought up along with all that it needs.
    pub(super) together: Option<Together>,
    /// What of the claims is for an engine that others need.
    pub(super) claimed: BTreeMap<EngineId, Candidate>,
}

/// What a report is made of, beside the state.
#[derive(Clone, Debug, Default)]
pub(super) struct Why {
    pub(super) reasons: Arc<BTreeMap<ModelName, Reason>>,
    pub(super) demand: BTreeMap<ModelName, Demand>,
    pub(super) now: Tick,
}

/// What the plan says about those who wait.
pub struct Verdicts {
    reasons: Arc<BTreeMap<ModelName, Reason>>,
    models: Arc<BTreeMap<ModelName, Model>>,
    max_wait: Millis,
    knows: bool,
    shutdown: bool,
    now: Tick,
}

impl Model {
    pub(super) fn pinned(&self) -> bool {
        self.pin.unwrap_or_else(|| self.spec.as_ref().is_some_and(|s| s.pinned))
    }

    /// So many of its engines run whoever asks for them. An operator's unpin lifts that as well.
    pub(super) fn least(&self) -> u32 {
        if self.pin == Some(false) { 0 } else { self.spec.as_ref().map_or(0, |s| s.min_replicas) }
    }

    /// This engine of it is kept awake without demand, and never put away.
    pub(super) fn keeps(&self, replica: u32) -> bool {
        self.pinned() || replica < self.least()
    }

    /// What one awake engine takes on each of its accelerators, or of its pool.
    pub(super) fn need(&self, spec: &ModelSpec, largest: Bytes) -> Portion {
        let declared = spec.accelerators.in_one_place(spec.memory.awake);
        let bytes = match self.learned.peak.map(|peak| spec.accelerators.in_one_place(peak)) {
            // A peak beyond every accelerator is a misreading (somebody else's memory); it must not bar the model.
            Some(peak) if peak <= largest => declared.max(peak),
            _ => declared,
        };
        Portion { bytes, units: spec.accelerators.units().unwrap_or(1) }
    }

    /// What an asleep engine keeps on each of its accelerators.
    pub(super) fn residue(&self, spec: &ModelSpec) -> Bytes {
        spec.memory.asleep.max(self.learned.residue.unwrap_or_default()).min(spec.memory.awake)
    }
}

impl<'a> Draft<'a> {
    pub(super) fn new(
        mut planner: Planner,
        demand: &'a BTreeMap<ModelName, Demand>,
        clients: &'a BTreeMap<u64, u32>,
        now: Tick,
    ) -> Self {
        planner.settle(now);
        Self {
            planner,
            demand,
            clients,
            now,
            commands: Vec::new(),
            reasons: Arc::default(),
            claims: BTreeMap::new(),
            line: Vec::new(),
            places: BTreeMap::new(),
            together: None,
            claimed: BTreeMap::new(),
        }
    }

    pub(super) fn decide(&mut self) {
        if !self.planner.role.decides() {
            self.follow();
        } else if self.planner.adopted {
            self.supersede();
            self.advance();
            if self.planner.shutdown.is_none() {
                self.admit();
            }
            self.finish_operations();
        }
        self.explain_cut_off();
    }

    /// Decides on a command, and records it in the draft at once.
    pub(super) fn emit(&mut self, command: Command) {
        self.planner.apply(&command, self.now);
        self.commands.push(command);
    }

    pub(super) fn record(&mut self, command: &Command) {
        self.planner.apply(command, self.now);
    }

    /// How many commands were decided on, and not taken yet.
    pub(super) const fn decided(&self) -> usize {
        self.commands.len()
    }

    /// What was decided since there were so many.
    pub(super) fn take_back(&mut self, decided: usize) -> Vec<Command> {
        self.commands.split_off(decided)
    }

    pub(super) fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    pub(super) fn verdicts(&self) -> Verdicts {
        Verdicts {
            reasons: Arc::clone(&self.reasons),
            models: Arc::clone(&self.planner.models),
            max_wait: self.planner.settings.queue.max_wait,
            knows: self.planner.knows(),
            shutdown: self.planner.shutdown.is_some(),
            now: self.now,
        }
    }

    pub(super) fn max_waiting(&self) -> usize {
        self.planner.settings.queue.max_waiting as usize
    }

    /// What the model itself says of that, if it does.
    pub(super) fn max_waiting_for(&self, model: &ModelName) -> Option<usize> {
        self.planner.spec(model)?.queue.max_waiting.map(|most| most as usize)
    }

    pub(super) fn waiting(&self, model: &ModelName) -> u32 {
        self.demand.get(model).map_or(0, |d| d.waiting)
    }

    /// Engines that must prove themselves and have nobody to do it with; none where another gateway sees to that.
    pub(super) fn unproven(&self) -> Vec<EngineId> {
        if self.planner.role.decides() { self.planner.engines.unproven() } else { Vec::new() }
    }

    pub(super) fn probe(&mut self, engine: &EngineId) {
        let generation = self.generation(engine);
        self.emit(Command::Probe { engine: engine.clone(), generation });
    }

    pub(super) fn generation(&self, engine: &EngineId) -> Generation {
        self.planner.engines.get(engine).map_or(Generation(0), |e| e.generation)
    }

    pub(super) fn door(&self, engine: &EngineId) -> Door {
        self.planner.engines.get(engine).map_or(Door::Closed, |e| e.door)
    }

    pub(super) fn into_reasons(self) -> Arc<BTreeMap<ModelName, Reason>> {
        self.reasons
    }
}

impl Verdicts {
    /// What a model's waiters wait for, without what is each waiter's own.
    pub(super) fn wait(&self, model: &ModelName) -> Wait {
        self.reasons.get(model).map_or_else(|| Reason::full().wait(self.now), |r| r.wait(self.now))
    }

    /// What set the deadline of this waiter.
    pub(super) fn patience(&self, waiter: &Waiter) -> Patience {
        let spec = self.models.get(&waiter.model).and_then(|model| model.spec.as_ref());
        let longest = spec.and_then(|spec| spec.queue.max_wait).unwrap_or(self.max_wait);
        let shorter = waiter.deadline.since(waiter.arrived) < longest;
        if shorter { Patience::Request } else { Patience::Queue }
    }

    fn has(&self, model: &ModelName) -> bool {
        self.models.get(model).is_some_and(|model| model.spec.is_some())
    }

    /// Everybody who waits for this model is sent away.
    pub(super) fn refuses(&self, model: &ModelName) -> bool {
        let refused = |reason: &Reason| reason.is_final();
        self.shutdown || !self.has(model) || self.reasons.get(model).is_some_and(refused)
    }

    /// Why everybody who waits for this model is sent away, if so.
    pub(super) fn refusal(&self, model: &ModelName, wait: &Wait) -> Option<Fault> {
        if self.shutdown {
            return Some(Fault::ShuttingDown);
        }
        if !self.has(model) {
            return Some(Fault::ModelNotFound { model: model.to_string(), near: Vec::new() });
        }
        self.reasons.get(model)?.refusal(model, wait)
    }

    /// The fault of a waiter whose deadline has passed.
    pub(super) fn late(&self, model: &ModelName, wait: Wait) -> Fault {
        match self.reasons.get(model) {
            Some(reason) => reason.late(model, wait),
            None if !self.knows => {
                Fault::ModelNotReady { model: model.clone(), cause: Cause::Deadline, wait }
            }
            None => Fault::QueueFull { message: format!("'{model}' is at its maxConcurrency"), wait },
        }
    }
}

/// Its model is not configured to have this engine, or not as it runs. One that lies asleep at level 2 has lost what a wake does not
/// read again: an operator's own call, or a gateway that knew no better, put it there.
pub(super) fn is_outdated(e: &Engine, spec: &ModelSpec) -> bool {
    let lost = spec.idle.level == LevelPolicy::OnlyOne && e.state == State::Asleep { level: Level::Two };
    e.id.replica >= spec.replicas || lost || (e.state.has_process() && e.fingerprint != spec.fingerprint)
}

impl Planner {
    pub(super) fn report(&self, why: &Why) -> Report {
        let line = |name: &ModelName| {
            let Demand { waiting, elsewhere, .. } = why.demand.get(name).copied().unwrap_or_default();
            let state = self.model_state(name);
            let leases = self.leases_of(name);
            let sought = || self.explain_sought(name, &why.reasons);
            let reason = why.reasons.get(name).cloned().or_else(sought);
            let reason = reason.unwrap_or_else(|| self.explain_rest(name));
            let (wait, last) = (reason.wait(why.now), self.past_of(name).cloned());
            Line { state, waiting, elsewhere, leases, wait, last, reason: reason.text + &reason.for_admin }
        };
        let accounts = &self.ledger.accelerators;
        Report {
            models: self.models.keys().map(|name| (name.clone(), line(name))).collect(),
            accelerators: accounts.iter().filter_map(|(id, a)| Some((id.clone(), a.trouble()?))).collect(),
        }
    }

    pub(super) fn is_kept(&self, id: &EngineId) -> bool {
        self.models.get(&id.model).is_some_and(|model| model.keeps(id.replica))
    }

    pub(super) fn leases_of(&self, model: &ModelName) -> u32 {
        self.engines.of(model).map(|e| e.leases).sum()
    }

    pub(super) fn spec(&self, model: &ModelName) -> Option<&ModelSpec> {
        self.models.get(model)?.spec.as_deref()
    }

    pub(super) fn shared_spec(&self, model: &ModelName) -> Option<Arc<ModelSpec>> {
        self.models.get(model)?.spec.clone()
    }

    /// When engines of this model may be put away for others. One that is no longer configured has no word of its own.
    pub(super) fn eviction_of(&self, model: &ModelName) -> Eviction {
        self.spec(model).map_or(self.settings.eviction, |spec| self.settings.eviction_of(spec))
    }

    /// How long whoever wants this model waits.
    pub(super) fn max_wait_of(&self, model: &ModelName) -> Millis {
        self.spec(model).map_or(self.settings.queue.max_wait, |spec| self.settings.max_wait_of(spec))
    }

    /// An accelerator of this engine that no longer answers.
    pub(super) fn lost_accelerator(&self, id: &EngineId) -> Option<&AcceleratorId> {
        let engine = self.engines.get(id)?;
        engine
            .accelerators
            .iter()
            .find(|a| self.ledger.accelerators.get(a).is_none_or(|account| !account.healthy))
    }

    /// It should have gone further by now.
    pub(super) fn overdue(&self, id: &EngineId, now: Tick) -> bool {
        let Some(e) = self.engines.get(id) else { return false };
        self.due(e, self.spec(&id.model)).is_some_and(|at| at <= now)
    }

    /// Its model is no longer configured, or configured otherwise, or everything is to be stopped; or it would not wake whole.
    pub(super) fn unwanted(&self, id: &EngineId) -> bool {
        let Some(e) = self.engines.get(id) else { return false };
        let outdated = self.spec(&id.model).is_none_or(|spec| is_outdated(e, spec));
        outdated || self.shutdown == Some(true)
    }

    /// The most that an engine of this model could have in one place: the largest accelerator there is, or all of its
    /// pool.
    pub(super) fn largest(&self, spec: &ModelSpec) -> Bytes {
        match &spec.accelerators {
            Accelerators::Of { pool, .. } => {
                self.ledger.accelerators.get(pool).map_or(Bytes::ZERO, |account| account.capacity)
            }
            Accelerators::Count(_) | Accelerators::Ids(_) => self.ledger.accelerators.largest(),
        }
    }

    pub(super) fn is_finished(&self) -> bool {
        match self.shutdown {
            None => false,
            Some(true) if self.role.decides() => self.engines.values().all(|e| !e.state.has_process()),
            Some(_) => self.engines.values().all(|e| e.door == Door::Closed && e.leases == 0),
        }
    }

    /// Time alone: back-offs that ended, models that are gone for good.
    pub(super) fn settle(&mut self, now: Tick) {
        self.planned = self.planned.max(now);
        let decides = self.role.decides();
        let rested =
            |engine: &Engine| decides && matches!(engine.state, State::Backoff { until, .. } if until <= now);
        for id in self.engines.restless() {
            // Looked at first: a change copies what others still read.
            if !self
                .engines
                .get(&id)
                .is_some_and(|engine| rested(engine) || (engine.failures > 0 && engine.is_forgiven(now)))
            {
                continue;
            }
            self.engines.change(&id, |engine| {
                if rested(engine) {
                    engine.become_state(State::Cold, now);
                }
                if engine.is_forgiven(now) {
                    engine.failures = 0;
                }
            });
        }
        let models = &self.models;
        let left = self.engines.retain(|engine| {
            let spec = models.get(&engine.id.model).and_then(|m| m.spec.as_ref());
            let wanted = spec.is_some_and(|s| engine.id.replica < s.replicas);
            wanted || engine.state.has_process() || engine.orphan.is_some() || engine.placing.is_some()
        });
        for engine in &left {
            self.last_life = self.last_life.max(engine.generation);
            self.forget(&engine.id.model);
        }
    }

    /// Unless it is configured, or something of it still runs.
    pub(super) fn forget(&mut self, name: &ModelName) {
        let gone = self.models.get(name).is_some_and(|model| model.spec.is_none())
            && self.engines.of(name).next().is_none();
        if gone {
            Arc::make_mut(&mut self.models).remove(name);
        }
    }

    /// The first moment after this one at which some decision may change. More than needed is harmless; one too few is a stall.
    pub(super) fn deadline_after(&self, after: Tick) -> Option<Tick> {
        let awaited = self.ledger.accelerators.awaited();
        let lost = awaited.flat_map(|(_, a)| a.lost_at().into_iter().chain(a.sought_at()));
        let orders = self.operations.values().map(|op| op.given + self.max_wait_of(&op.model));
        let mut engines = None;
        self.each_model(|model, of| {
            let spec = model.and_then(|m| m.spec.as_deref());
            let first = of.iter().flat_map(|e| self.deadlines_of(e, spec)).filter(|at| *at > after).min();
            engines = engines.into_iter().chain(first).min();
        });
        lost.chain(orders).filter(|at| *at > after).chain(engines).min()
    }

    fn deadlines_of(&self, e: &Engine, spec: Option<&ModelSpec>) -> impl Iterator<Item = Tick> + use<> {
        let idle = spec.map(|s| s.idle);
        let turns = &self.settings.turns;
        let timeouts = &self.settings.timeouts;
        let own: [Option<Tick>; 5] = match &e.state {
            State::Awake => [
                self.protected(e, self.wake_of(&e.id.model)),
                self.protected(e, self.start_of(&e.id.model)),
                Some(e.turn + turns.max_turn),
                idle.and_then(|i| self.idle_at(e, i.sleep_after?)),
                idle.and_then(|i| self.idle_at(e, i.stop_after?)),
            ],
            State::Draining { .. } => [Some(e.since + turns.drain_deadline), None, None, None, None],
            State::Asleep { .. } => {
                let stops = idle.and_then(|i| i.stop_after).map(|after| e.idle_since().max(e.since) + after);
                [stops, None, None, None, None]
            }
            State::Backoff { until, .. } => [Some(*until), None, None, None, None],
            State::Cold => [Some(e.spare_from()), None, None, None, None],
            State::Stopping { .. } => [Some(e.stop_by), None, None, None, None],
            _ => [None; 5],
        };
        let any: [Option<Tick>; 5] = [
            self.due(e, spec),
            e.hung_at(timeouts),
            // Only one that serves is tried; any other is asked about again when it does.
            e.left_out.filter(|at| *at != NOT_DUE && e.serves()),
            e.shrinking.map(|at| at + timeouts.settle),
            e.shrinking.map(|at| at + Millis(timeouts.settle.0 * 5)),
        ];
        own.into_iter().chain(any).flatten()
    }

    /// By when it should have gone further.
    fn due(&self, e: &Engine, spec: Option<&ModelSpec>) -> Option<Tick> {
        // What it holds is looked up only where its size matters.
        let held = if e.state.moves_memory() { self.ledger.held(&e.id) } else { Bytes::ZERO };
        e.deadline(spec, held, &self.settings.timeouts)
    }
}
