//! The loop: what the gateway's driver does, with jumps in place of waits.

use std::collections::BTreeMap;

use super::{
    agenda::Agenda,
    client::{Client, ClientId, Request},
    gate::Gate,
    inject::Injection,
    journal::Line,
    keys::Keys,
    machine::Machine,
    process::Step,
    random::Random,
    scenario::{Deed, Scenario},
    tally::Tally,
};
use crate::{
    fleet::{
        Fleet, Plan,
        event::{Event, OperationId, WaiterId},
    },
    model::{AcceleratorId, EngineId, ModelName},
    units::{Generation, Millis, Tick},
};

/// More turns than this at one moment is a driver that spins.
const SPIN: u32 = 500;

const QUIET: Millis = Millis::secs(3600);

/// A simulated world with a real fleet in it.
#[derive(Clone, Debug)]
pub struct World {
    pub(super) scenario: Scenario,
    pub(super) now: Tick,
    pub(super) random: Random,
    pub(super) tally: Tally,

    // The gateway
    pub(super) fleet: Fleet,
    pub(super) inbox: Vec<Event>,
    /// A release mattered to the driver.
    pub(super) notified: bool,
    pub(super) deadline: Option<Tick>,
    pub(super) gates: BTreeMap<EngineId, Gate>,
    pub(super) waiters: BTreeMap<WaiterId, ClientId>,
    /// How many are parked, by model.
    pub(super) parked: BTreeMap<ModelName, u32>,
    /// Since when a model's waiters have waited without any of them being granted a lease.
    pub(super) waiting: BTreeMap<ModelName, Tick>,
    pub(super) longest_wait: Millis,
    pub(super) keys: Keys,
    pub(super) operations: BTreeMap<OperationId, bool>,
    pub(super) next_waiter: u64,
    pub(super) next_operation: u64,
    pub(super) shutdown: bool,
    /// An operator's last word on pinning.
    pub(super) pins: BTreeMap<ModelName, bool>,
    pub(super) next_model: u64,

    // The rest of the world
    pub(super) machine: Machine,
    pub(super) clients: BTreeMap<ClientId, Client>,
    pub(super) next_client: u64,
    /// What was adopted needs more than there is: out-of-memory is no defect until that is over.
    pub(super) excess: bool,
    pub(super) agenda: Agenda<Happening>,
    pub(super) calm: bool,

    pub(super) journal: Option<Vec<Line>>,
    pub(super) violations: Vec<String>,
    steps: u64,
    same_moment: u32,
}

/// A broken promise, with what is needed to see it again.
#[derive(Clone, Debug)]
pub struct Failure {
    pub scenario: String,
    pub step: u64,
    pub at: Tick,
    pub messages: Vec<String>,
}

/// Something that will happen without the fleet.
#[derive(Clone, Debug)]
pub(super) enum Happening {
    Tell(Event),
    /// The source with this number makes its next requests.
    Demand(usize),
    Ask(Request),
    Leave {
        client: ClientId,
        serial: u32,
    },
    Overdue {
        client: ClientId,
        serial: u32,
    },
    FirstByte {
        client: ClientId,
        serial: u32,
    },
    End {
        client: ClientId,
        serial: u32,
    },
    /// The client or the gateway gives up on an engine that says nothing.
    Silent {
        client: ClientId,
        serial: u32,
    },
    Process {
        engine: EngineId,
        generation: Generation,
        serial: u32,
        step: Step,
    },
    Health {
        engine: EngineId,
        generation: Generation,
        serial: u32,
    },
    Probed {
        engine: EngineId,
        generation: Generation,
    },
    /// The stub turns the client's request away.
    TurnedAway {
        client: ClientId,
        serial: u32,
    },
    /// The platform asks an engine's stub whether it lets requests in.
    AskStub {
        engine: EngineId,
        generation: Generation,
    },
    Read(AcceleratorId),
    ReadAll,
    Inject(Injection),
    Deed(Deed),
}

impl World {
    #[must_use]
    pub fn new(scenario: Scenario) -> Self {
        let mut world = Self {
            now: scenario.start,
            random: Random::new(scenario.seed ^ 0x5eed_0f2a_11ce),
            tally: Tally::default(),
            fleet: Fleet::new(),
            inbox: Vec::new(),
            notified: false,
            deadline: None,
            gates: BTreeMap::new(),
            waiters: BTreeMap::new(),
            parked: BTreeMap::new(),
            waiting: BTreeMap::new(),
            longest_wait: Millis::ZERO,
            keys: Keys::default(),
            operations: BTreeMap::new(),
            next_waiter: 0,
            next_operation: 0,
            shutdown: false,
            pins: BTreeMap::new(),
            next_model: 0,
            machine: Machine::default(),
            clients: BTreeMap::new(),
            next_client: 0,
            excess: false,
            agenda: Agenda::default(),
            calm: false,
            journal: None,
            violations: Vec::new(),
            steps: 0,
            same_moment: 0,
            scenario,
        };
        world.begin();
        world
    }

    /// Keeps the journal from here on: call it before the first step.
    #[must_use]
    pub fn recorded(mut self) -> Self {
        self.journal = Some(vec![Line::header(env!("CARGO_PKG_VERSION"), self.now)]);
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
        let still = self.waiting.iter().filter(|(model, _)| self.parked.get(*model).is_some_and(|n| *n > 0));
        still.map(|(_, since)| self.now.since(*since)).fold(self.longest_wait, Millis::max)
    }

    #[must_use]
    pub const fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// What was recorded; empty when nothing was.
    #[must_use]
    pub fn journal(&self) -> &[Line] {
        self.journal.as_deref().unwrap_or_default()
    }

    /// Runs so many turns, then lets demand and faults end and everything come to rest; every
    /// eighth seed shuts the gateway down instead, in the middle of what goes on.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn run(&mut self, steps: u64) -> Result<(), Failure> {
        for _ in 0..steps {
            // A world in which nothing concerns the driver for so long has nothing more to tell.
            if !self.step_until(self.now + QUIET)? {
                break;
            }
        }
        if self.scenario.seed % 8 == 7 { self.end_by_shutdown() } else { self.rest() }
    }

    /// Runs until this long after the start.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn run_until(&mut self, after: Millis) -> Result<(), Failure> {
        let end = self.scenario.start + after;
        while self.step_until(end)? {}
        self.now = end;
        Ok(())
    }

    /// Time moves to the next thing that matters to the driver, which takes its turn. False when nothing is left.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn step(&mut self) -> Result<bool, Failure> {
        self.step_until(Tick(u64::MAX))
    }

    /// As [`Self::step`], but time does not pass `end`: then it is false, too.
    pub(super) fn step_until(&mut self, end: Tick) -> Result<bool, Failure> {
        loop {
            let Some(next) = self.next_moment().filter(|next| *next <= end) else {
                return Ok(false);
            };
            if next > self.now {
                self.now = next;
                self.same_moment = 0;
            }
            while let Some(happening) = self.agenda.pop_due(self.now) {
                self.happen(happening);
            }
            let timer = self.deadline.is_some_and(|at| at <= self.now);
            if timer || self.notified || !self.inbox.is_empty() || !self.violations.is_empty() {
                break;
            }
        }
        self.turn();
        if self.violations.is_empty() {
            return Ok(true);
        }
        Err(Failure {
            scenario: self.scenario.name.clone(),
            step: self.steps,
            at: self.now,
            messages: std::mem::take(&mut self.violations),
        })
    }

    fn next_moment(&self) -> Option<Tick> {
        if !self.inbox.is_empty() || self.notified {
            return Some(self.now);
        }
        let timers = self.agenda.next_at().into_iter().chain(self.deadline);
        timers.min().map(|at| at.max(self.now))
    }

    /// One turn of the driver.
    fn turn(&mut self) {
        self.steps += 1;
        self.same_moment += 1;
        if self.same_moment > SPIN {
            self.violation(format!("the driver took {SPIN} turns at one moment"));
        }
        self.notified = false;
        let mut events = std::mem::take(&mut self.inbox);
        events.extend(self.sample());
        self.sample_keys(&mut events);
        for event in &events {
            self.fleet.on(event, self.now);
            self.delivered(event);
        }
        if let Some(journal) = &mut self.journal {
            journal.push(Line::Turn { at: self.now, events });
        }
        let plan = self.fleet.plan(self.now);
        self.fleet.issued(&plan.commands, self.now);
        self.check_turn(&plan);
        self.deadline = self.fleet.next_deadline();
        for command in plan.commands {
            self.execute(command);
        }
    }

    fn check_turn(&mut self, plan: &Plan) {
        let again = self.fleet.plan(self.now).commands;
        if !again.is_empty() {
            self.violation(format!("planning again at the same moment gives {again:?}"));
        }
        for broken in self.fleet.check() {
            self.violation(format!("Fleet::check: {broken}"));
        }
        if let Some(at) = self.fleet.next_deadline().filter(|at| *at <= self.now) {
            self.violation(format!("next_deadline is {at}, which is not after {}", self.now));
        }
        self.check_report(plan);
        if self.steps.is_multiple_of(16) {
            self.check_view(plan);
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Tell(event) => self.tell(event),
            Happening::Demand(source) => self.demand(source),
            Happening::Ask(request) => self.ask(request),
            Happening::Leave { client, serial } => self.leave(client, serial),
            Happening::Overdue { client, serial } => self.overdue(client, serial),
            Happening::FirstByte { client, serial } => self.first_byte(client, serial),
            Happening::End { client, serial } => self.exchange_due(client, serial),
            Happening::Silent { client, serial } => self.silent(client, serial),
            Happening::Process { engine, generation, serial, step } => {
                self.process_step(engine, generation, serial, step)
            }
            Happening::Health { engine, generation, serial } => self.health(engine, generation, serial),
            Happening::Probed { engine, generation } => self.probed(engine, generation),
            Happening::TurnedAway { client, serial } => self.turned_away(client, serial),
            Happening::AskStub { engine, generation } => self.ask_stub(engine, generation),
            Happening::Read(accelerator) => self.read(&accelerator),
            Happening::ReadAll => self.read_all(),
            Happening::Inject(injection) => self.inject(injection),
            Happening::Deed(deed) => self.deed(deed),
        }
    }

    fn demand(&mut self, number: usize) {
        if self.calm {
            return;
        }
        let Some(source) = self.scenario.sources.get(number).cloned() else {
            return;
        };
        let (arrivals, next) = source.pattern.next(self.now, &mut self.random);
        for at in arrivals {
            let request = source.habits.request(&source.model, &mut self.random);
            self.agenda.add(at, Happening::Ask(request));
        }
        self.agenda.add(next, Happening::Demand(number));
    }

    /// An event reaches the driver's channel.
    pub(super) fn tell(&mut self, event: Event) {
        self.inbox.push(event);
    }

    /// A span by chance.
    pub(super) fn draw(&mut self, (low, high): (Millis, Millis)) -> Millis {
        Millis(self.random.between(low.0, high.0))
    }

    pub(super) fn violation(&mut self, message: String) {
        self.violations.push(message);
    }

    pub(super) fn spec_known(&self, model: &ModelName) -> bool {
        let models = &self.scenario.configuration.models;
        models.iter().any(|spec| spec.name == *model)
    }

    pub(super) fn priority(&self, model: &ModelName) -> i32 {
        let models = &self.scenario.configuration.models;
        models.iter().find(|spec| spec.name == *model).map_or(0, |spec| spec.priority)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{} fails at step {}, {}:", self.scenario, self.step, self.at)?;
        for message in &self.messages {
            writeln!(f, "  {message}")?;
        }
        Ok(())
    }
}
