//! The simulation loop: runs the driver's turn, and jumps through time instead of waiting.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    client::{SimulatedClient, SimulatedClientId, SimulatedRequest},
    event_queue::EventQueue,
    gate::SimulatedGate,
    inbox::SimulatedInbox,
    inject::FaultInjection,
    key_usage::KeyUsage,
    machine::SimulatedMachine,
    platform_defect::PlatformDefect,
    process::ProcessStep,
    quotes::QuoteLog,
    random::SplitMix64,
    routes::SimulatedRoutes,
    scenario::{Scenario, ScenarioAction},
    tally::Tally,
};
use crate::{
    driver::DriverCore,
    fleet::{
        Fleet,
        command::CloseReason,
        event::{Event, OperationId, WaiterId},
    },
    journal::JournalLine,
    model::{AcceleratorId, EngineId, ModelName},
    units::{Generation, Millis, Tick},
};

const MAX_QUIET_TIME: Millis = Millis::secs(3600);

/// A simulated world with a real fleet in it.
#[derive(Clone, Debug)]
pub struct SimulatedWorld {
    pub(super) scenario: Scenario,
    pub(super) now: Tick,
    pub(super) random: SplitMix64,
    pub(super) tally: Tally,

    // The gateway
    pub(super) core: DriverCore,
    pub(super) inbox: SimulatedInbox,
    /// The driver takes a turn without a new event, such as after a lease release.
    pub(super) wakeup_pending: bool,
    pub(super) deadline: Option<Tick>,
    pub(super) gates: BTreeMap<EngineId, SimulatedGate>,
    pub(super) routes: SimulatedRoutes,
    /// Put back by a test.
    pub(super) defect: Option<PlatformDefect>,
    /// Engines whose gate the turn under way has closed.
    pub(super) closed_in_turn: BTreeSet<EngineId>,
    /// For each engine whose gate the current plan closes: the engines that the plan stops before, in its own order.
    pub(super) stops_before_close: BTreeMap<EngineId, Vec<EngineId>>,
    pub(super) waiters: BTreeMap<WaiterId, SimulatedClientId>,
    /// Number of parked requests, by model.
    pub(super) parked: BTreeMap<ModelName, u32>,
    /// Since when no waiter of a model has been granted a lease.
    pub(super) waiting_since: BTreeMap<ModelName, Tick>,
    pub(super) longest_wait: Millis,
    pub(super) key_usage: KeyUsage,
    pub(super) quotes: QuoteLog,
    pub(super) operations: BTreeMap<OperationId, bool>,
    pub(super) next_waiter: u64,
    pub(super) next_operation: u64,
    pub(super) shutdown: bool,
    /// The last pin or unpin by an operator, by model.
    pub(super) pins: BTreeMap<ModelName, bool>,
    pub(super) next_model: u64,

    // The rest of the world
    pub(super) machine: SimulatedMachine,
    pub(super) clients: BTreeMap<SimulatedClientId, SimulatedClient>,
    pub(super) next_client: u64,
    pub(super) event_queue: EventQueue<WorldEvent>,
    pub(super) quiescing: bool,

    pub(super) journal: Option<Vec<JournalLine>>,
    pub(super) violations: Vec<String>,
    /// Engines that the current turn has closed although a dependent needs them, and that dependent.
    pub(super) unreplaced: Vec<(EngineId, CloseReason, EngineId)>,
    /// Events of the last turn, since demand has stopped. A report of a world that never rests names them.
    pub(super) last_events: Vec<Event>,
    steps: u64,
}

/// Broken invariants, with what is needed to reproduce them.
#[derive(Clone, Debug)]
pub struct InvariantViolation {
    pub scenario: String,
    pub step: u64,
    pub at: Tick,
    pub messages: Vec<String>,
}

/// An event that happens without the fleet.
#[derive(Clone, Debug)]
pub(super) enum WorldEvent {
    FleetEvent(Event),
    /// The source with this number generates its next requests.
    SourceDue(usize),
    RequestArrives(SimulatedRequest),
    ClientLeaves {
        client: SimulatedClientId,
        serial: u32,
    },
    CheckWaitDeadline {
        client: SimulatedClientId,
        serial: u32,
    },
    CanaryFirstByte {
        client: SimulatedClientId,
        serial: u32,
    },
    ExchangeEnds {
        client: SimulatedClientId,
        serial: u32,
    },
    /// The client or the gateway gives up on a silent engine.
    SilenceTimeout {
        client: SimulatedClientId,
        serial: u32,
    },
    ProcessStep {
        engine: EngineId,
        generation: Generation,
        serial: u32,
        step: ProcessStep,
    },
    HealthProbe {
        engine: EngineId,
        generation: Generation,
        serial: u32,
    },
    ProbeCompletes {
        engine: EngineId,
        generation: Generation,
    },
    /// The stub rejects the client's request.
    StubRejects {
        client: SimulatedClientId,
        serial: u32,
    },
    /// The platform polls whether an engine's stub admits requests.
    PollStubGate {
        engine: EngineId,
        generation: Generation,
    },
    ReadMeter(AcceleratorId),
    ReadAllMeters,
    InjectFault(FaultInjection),
    Action(ScenarioAction),
}

impl SimulatedWorld {
    #[must_use]
    pub fn new(scenario: Scenario) -> Self {
        let mut world = Self {
            now: scenario.start,
            random: SplitMix64::new(scenario.seed ^ 0x5eed_0f2a_11ce),
            tally: Tally::default(),
            core: DriverCore::new(),
            inbox: SimulatedInbox::default(),
            wakeup_pending: false,
            deadline: None,
            gates: BTreeMap::new(),
            routes: SimulatedRoutes::new(),
            defect: None,
            closed_in_turn: BTreeSet::new(),
            stops_before_close: BTreeMap::new(),
            waiters: BTreeMap::new(),
            parked: BTreeMap::new(),
            waiting_since: BTreeMap::new(),
            longest_wait: Millis::ZERO,
            key_usage: KeyUsage::default(),
            quotes: QuoteLog::default(),
            operations: BTreeMap::new(),
            next_waiter: 0,
            next_operation: 0,
            shutdown: false,
            pins: BTreeMap::new(),
            next_model: 0,
            machine: SimulatedMachine::default(),
            clients: BTreeMap::new(),
            next_client: 0,
            event_queue: EventQueue::default(),
            quiescing: false,
            journal: None,
            violations: Vec::new(),
            unreplaced: Vec::new(),
            last_events: Vec::new(),
            steps: 0,
            scenario,
        };
        world.begin();
        world
    }

    /// Records the journal from here on. Call it before the first step.
    #[must_use]
    pub fn with_journal(mut self) -> Self {
        self.journal = Some(vec![JournalLine::header(env!("CARGO_PKG_VERSION"), self.now)]);
        self
    }

    #[must_use]
    pub const fn now(&self) -> Tick {
        self.now
    }

    #[must_use]
    pub const fn tally(&self) -> &Tally {
        &self.tally
    }

    /// The longest time in which a model had waiters and none of them got a lease.
    #[must_use]
    pub fn longest_wait(&self) -> Millis {
        let still =
            self.waiting_since.iter().filter(|(model, _)| self.parked.get(*model).is_some_and(|n| *n > 0));
        still.map(|(_, since)| self.now.since(*since)).fold(self.longest_wait, Millis::max)
    }

    #[must_use]
    pub const fn fleet(&self) -> &Fleet {
        self.core.fleet()
    }

    /// The recorded journal; empty without [`Self::with_journal`].
    #[must_use]
    pub fn journal(&self) -> &[JournalLine] {
        self.journal.as_deref().unwrap_or_default()
    }

    /// Runs this many turns, then ends demand and faults and lets everything come to rest. Every eighth seed shuts the
    /// gateway down instead, in the middle of its work.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn run(&mut self, steps: u64) -> Result<(), InvariantViolation> {
        for _ in 0..steps {
            // Nothing has concerned the driver for that long, so no further turn follows.
            if !self.step_until(self.now + MAX_QUIET_TIME)? {
                break;
            }
        }
        if self.scenario.seed % 8 == 7 { self.run_shutdown() } else { self.run_until_quiescent() }
    }

    /// Runs until this long after the start.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn run_until(&mut self, after: Millis) -> Result<(), InvariantViolation> {
        let end = self.scenario.start + after;
        while self.step_until(end)? {}
        self.now = end;
        Ok(())
    }

    /// Advances to the next moment that concerns the driver, which takes its turn. Returns false if nothing is left.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn step(&mut self) -> Result<bool, InvariantViolation> {
        self.step_until(Tick(u64::MAX))
    }

    /// Steps as [`Self::step`] does, but not past `end`. Returns false if the next moment lies beyond.
    pub(super) fn step_until(&mut self, end: Tick) -> Result<bool, InvariantViolation> {
        loop {
            let next = self.next_moment();
            if next.is_none_or(|next| next > self.now) {
                self.check_idle_driver();
                if !self.violations.is_empty() {
                    break;
                }
            }
            let Some(next) = next.filter(|next| *next <= end) else {
                return Ok(false);
            };
            if next > self.now {
                self.now = next;
                self.core.chain_mut().begin();
            }
            while let Some(event) = self.event_queue.pop_due(self.now) {
                self.handle_event(event);
            }
            let timer = self.deadline.is_some_and(|at| at <= self.now);
            if timer || self.wakeup_pending || !self.inbox.is_empty() || !self.violations.is_empty() {
                break;
            }
        }
        self.turn();
        if self.violations.is_empty() {
            return Ok(true);
        }
        Err(InvariantViolation {
            scenario: self.scenario.name.clone(),
            step: self.steps,
            at: self.now,
            messages: std::mem::take(&mut self.violations),
        })
    }

    fn next_moment(&self) -> Option<Tick> {
        if !self.inbox.is_empty() || self.wakeup_pending {
            return Some(self.now);
        }
        let timers = self.event_queue.next_at().into_iter().chain(self.deadline);
        timers.min().map(|at| at.max(self.now))
    }

    /// Runs one turn of the driver.
    fn turn(&mut self) {
        self.steps += 1;
        self.wakeup_pending = false;
        self.closed_in_turn.clear();
        let mut batch = self.take_turn_events();
        if let Some(spinning) = self.core.chain_mut().extend(&batch) {
            self.record_violation(spinning.to_string());
        }
        // The turn borrows both, and no part of the world reads the fleet meanwhile.
        let (mut core, now) = (std::mem::take(&mut self.core), self.now);
        core.turn(self, &mut batch, now);
        self.core = core;
        self.deadline = self.core.fleet().next_deadline();
        batch.into_iter().for_each(|event| self.inbox.push(event));
    }

    pub(super) fn check_turn(&mut self, core: &DriverCore, events: &[Event]) {
        if self.quiescing {
            self.last_events = events.to_vec();
        }
        for defect in core.defects(self.now) {
            self.record_violation(defect);
        }
        self.check_report(core);
        if self.steps.is_multiple_of(16) {
            self.check_view(core);
        }
    }

    fn handle_event(&mut self, event: WorldEvent) {
        match event {
            WorldEvent::FleetEvent(event) => self.send_event(event),
            WorldEvent::SourceDue(source) => self.generate_requests(source),
            WorldEvent::RequestArrives(request) => self.request_arrives(request),
            WorldEvent::ClientLeaves { client, serial } => self.client_leaves(client, serial),
            WorldEvent::CheckWaitDeadline { client, serial } => self.check_wait_deadline(client, serial),
            WorldEvent::CanaryFirstByte { client, serial } => self.canary_first_byte(client, serial),
            WorldEvent::ExchangeEnds { client, serial } => self.exchange_ends(client, serial),
            WorldEvent::SilenceTimeout { client, serial } => self.silence_timeout(client, serial),
            WorldEvent::ProcessStep { engine, generation, serial, step } => {
                self.run_process_step(engine, generation, serial, step)
            }
            WorldEvent::HealthProbe { engine, generation, serial } => {
                self.health_probe(engine, generation, serial)
            }
            WorldEvent::ProbeCompletes { engine, generation } => self.complete_probe(engine, generation),
            WorldEvent::StubRejects { client, serial } => self.stub_rejects(client, serial),
            WorldEvent::PollStubGate { engine, generation } => self.poll_stub_gate(engine, generation),
            WorldEvent::ReadMeter(accelerator) => self.read_meter(&accelerator),
            WorldEvent::ReadAllMeters => self.read_all_meters(),
            WorldEvent::InjectFault(injection) => self.inject(injection),
            WorldEvent::Action(action) => self.apply_action(action),
        }
    }

    fn generate_requests(&mut self, number: usize) {
        if self.quiescing {
            return;
        }
        let Some(source) = self.scenario.sources.get(number).cloned() else {
            return;
        };
        let (arrivals, next) = source.pattern.next_arrivals(self.now, &mut self.random);
        for at in arrivals {
            let request = source.behaviour.random_request(&source.model, &mut self.random);
            self.event_queue.schedule(at, WorldEvent::RequestArrives(request));
        }
        self.event_queue.schedule(next, WorldEvent::SourceDue(number));
    }

    /// Delivers an event to the driver's channel.
    pub(super) fn send_event(&mut self, event: Event) {
        self.inbox.push(event);
    }

    /// A random duration in this range.
    pub(super) fn random_duration(&mut self, (low, high): (Millis, Millis)) -> Millis {
        Millis(self.random.between(low.0, high.0))
    }

    pub(super) fn record_violation(&mut self, message: String) {
        self.violations.push(message);
    }

    pub(super) fn is_configured(&self, model: &ModelName) -> bool {
        let models = &self.scenario.configuration.models;
        models.iter().any(|spec| spec.name == *model)
    }

    pub(super) fn priority(&self, model: &ModelName) -> i32 {
        let models = &self.scenario.configuration.models;
        models.iter().find(|spec| spec.name == *model).map_or(0, |spec| spec.priority)
    }
}

impl std::fmt::Display for InvariantViolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{} fails at step {}, {}:", self.scenario, self.step, self.at)?;
        for message in &self.messages {
            writeln!(f, "  {message}")?;
        }
        Ok(())
    }
}
