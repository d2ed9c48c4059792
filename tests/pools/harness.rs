//! A fleet whose commands all succeed at once.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    driver::{MAX_CHAINED_TURNS, UnsettledWork},
    engine::turn_clients::TurnClients,
    fault::Fault,
    fleet::{
        Fleet,
        command::Command,
        event::{CanaryVerdict, Event, Waiter, WaiterId},
    },
    journal,
    model::{
        Accelerator, AcceleratorId, EngineId, EngineMemory, FleetConfig, FleetSettings, ModelName, ModelSpec,
    },
    sim::simulated_model,
    units::{Bytes, Generation, Millis, Tick},
};

pub(crate) struct PoolHarness {
    pub(crate) fleet: Fleet,
    pub(crate) now: Tick,
    pub(crate) configuration: FleetConfig,
    /// All commands so far.
    pub(crate) ordered: Vec<Command>,
    pub(crate) refused: BTreeMap<WaiterId, Fault>,
    pub(crate) served: Vec<WaiterId>,
    /// Launched engines report nothing more.
    pub(crate) stuck: bool,
    /// Accelerators on which the ledger reserves nothing, for reasons that the decisions do not know.
    pub(crate) occupied: BTreeSet<AcceleratorId>,
    /// Memory that each engine keeps on each of its accelerators, as measured when it falls asleep.
    pub(crate) residues: BTreeMap<EngineId, Bytes>,
    /// Memory in use on each accelerator of each engine, by all engines there, as read when it falls asleep.
    pub(crate) used_after_sleep: BTreeMap<EngineId, Bytes>,
    waiters: u64,
}

pub(crate) fn engine(model: &str) -> EngineId {
    EngineId::new(model.into(), 0)
}

pub(crate) fn model(name: &str, gib: u64) -> ModelSpec {
    ModelSpec {
        // Its engines have their accelerators exclusively.
        explicit_memory: true,
        ..simulated_model(
            name,
            EngineMemory { awake: Bytes::gib(gib), asleep: Bytes::gib(1), host: Bytes::gib(1) },
        )
    }
}

pub(crate) fn gpu(gib: u64) -> Accelerator {
    Accelerator::new("gpu-0".into(), Bytes::gib(gib))
}

/// Makes models evictable as soon as they have no requests.
pub(crate) fn with_instant_turns(configuration: &mut FleetConfig) {
    configuration.settings.turns.residency = Millis::ZERO;
}

/// Checks that on these accelerators a request for the model is refused for good, for this reason.
pub(crate) fn assert_never_fits(accelerators: Vec<Accelerator>, spec: ModelSpec, why: &str) {
    let name = spec.name.clone();
    let mut world = PoolHarness::new(accelerators, vec![spec]);
    let asked = world.ask(name.as_str());
    let Fault::InsufficientMemory(shortage) = &world.refused[&asked] else { panic!("{:?}", world.refused) };
    assert!(shortage.permanent);
    assert_eq!(shortage.wait.waited_for, why);
}

impl PoolHarness {
    pub(crate) fn new(accelerators: Vec<Accelerator>, models: Vec<ModelSpec>) -> Self {
        let settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
        let configuration = FleetConfig { settings, accelerators, models };
        let mut world = Self {
            fleet: Fleet::new(),
            now: Tick(1_000_000),
            configuration,
            ordered: Vec::new(),
            refused: BTreeMap::new(),
            served: Vec::new(),
            stuck: false,
            occupied: BTreeSet::new(),
            residues: BTreeMap::new(),
            used_after_sleep: BTreeMap::new(),
            waiters: 0,
        };
        world.configure(|_| {});
        world.send(Event::AdoptionDone);
        world
    }

    /// Applies a changed configuration.
    pub(crate) fn configure(&mut self, change: impl FnOnce(&mut FleetConfig)) {
        change(&mut self.configuration);
        self.send(Event::Configured { configuration: Box::new(self.configuration.clone()) });
    }

    pub(crate) fn send(&mut self, event: Event) {
        self.fleet.on(&event, self.now);
        self.run_until_idle();
    }

    /// Adds a waiting request for the model.
    pub(crate) fn ask(&mut self, model: &str) -> WaiterId {
        self.waiters += 1;
        let id = WaiterId(self.waiters);
        let waiter = Waiter {
            id,
            model: model.into(),
            band: 0,
            key: String::new(),
            arrived: self.now,
            deadline: self.now + Millis::secs(3600),
            stream: true,
            client: 0,
            required_engine: None,
        };
        self.send(Event::Arrived { waiter });
        id
    }

    /// Does the same, where an engine that is launched reports nothing.
    pub(crate) fn ask_while_stuck(&mut self, model: &str) -> WaiterId {
        self.stuck = true;
        let waiter = self.ask(model);
        self.stuck = false;
        waiter
    }

    /// Completes all requests of the engine.
    pub(crate) fn finish_requests(&mut self, engine: EngineId) {
        let generation = self.fleet.engine(&engine).unwrap().generation;
        let (last_end, last_byte) = (self.now, self.now);
        self.send(Event::GateSampled {
            engine,
            generation,
            leases: 0,
            last_lease_end: last_end,
            last_byte,
            clients: TurnClients::default(),
            idle_gap: None,
        });
    }

    /// Advances the time and handles everything that falls due.
    pub(crate) fn advance(&mut self, span: Millis) {
        let end = self.now + span;
        while let Some(at) = self.fleet.next_deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.run_until_idle();
        }
        self.now = end;
        self.run_until_idle();
    }

    /// Replaces the fleet with one that has read its state from a journal.
    pub(crate) fn reload_from_journal(&mut self) {
        let snapshot = journal::write_turn(self.now, &self.fleet.snapshot()).unwrap();
        let header = journal::write(&journal::JournalLine::header("1", self.now)).unwrap();
        self.fleet = Fleet::new();
        for line in journal::read(&format!("{header}\n{snapshot}\n")).unwrap() {
            let journal::JournalLine::Turn { at, events } = line else { continue };
            events.iter().for_each(|event| self.fleet.on(event, at));
        }
        assert_eq!(self.fleet.broken_invariants(), [""; 0]);
    }

    pub(crate) fn state(&self, engine: &EngineId) -> String {
        self.fleet.engine(engine).map_or_else(|| "unknown".to_owned(), |e| e.state.to_string())
    }

    /// The reason for a model's state.
    pub(crate) fn reason(&self, model: &str) -> String {
        let plan = self.fleet.plan(self.now);
        assert!(plan.commands.is_empty(), "{:?}", plan.commands);
        self.fleet.report(&plan).models[&ModelName::from(model)].reason.clone()
    }

    /// Plans and executes until no command is left.
    fn run_until_idle(&mut self) {
        let (mut outcomes, mut commands) = (Vec::new(), Vec::new());
        for _ in 0..MAX_CHAINED_TURNS {
            let plan = self.fleet.plan(self.now);
            self.fleet.issued(&plan.commands, self.now);
            assert!(self.fleet.plan(self.now).commands.is_empty(), "once more at the same moment");
            assert_eq!(self.fleet.broken_invariants(), [""; 0]);
            if plan.commands.is_empty() {
                return;
            }
            outcomes.clear();
            for command in &plan.commands {
                for outcome in self.outcomes(command) {
                    self.fleet.on(&outcome, self.now);
                    outcomes.push(outcome);
                }
            }
            commands.clone_from(&plan.commands);
            self.ordered.extend(plan.commands);
        }
        panic!("{}", UnsettledWork::new("plans at one moment", MAX_CHAINED_TURNS, &outcomes, &commands));
    }

    fn outcomes(&mut self, command: &Command) -> Vec<Event> {
        let ready = |engine: &EngineId, generation: Generation| {
            let engine = engine.clone();
            Event::Ready { engine, generation }
        };
        match command.clone() {
            Command::Reserve { engine, generation, accelerators, .. }
                if accelerators.iter().any(|accelerator| self.occupied.contains(accelerator)) =>
            {
                vec![Event::Conflict { engine, generation }]
            }
            Command::Reserve { engine, generation, accelerators, .. } => {
                vec![Event::Placed { engine, generation, accelerators }]
            }
            Command::Launch { .. } if self.stuck => Vec::new(),
            Command::Launch { engine, generation, .. } => {
                let address = ([127, 0, 0, 1], 1).into();
                let ready = ready(&engine, generation);
                let profiled = Event::Profiled { engine: engine.clone(), generation };
                vec![Event::Started { engine, generation, address }, profiled, ready]
            }
            Command::Wake { engine, generation, .. } => vec![ready(&engine, generation)],
            Command::Sleep { engine, generation, level } => {
                let measured = self.residues.get(&engine).map(|bytes| Event::ResidueMeasured {
                    engine: engine.clone(),
                    generation,
                    bytes: *bytes,
                });
                let read = self.used_after_sleep.get(&engine).map(|bytes| {
                    let accelerators = &self.fleet.engine(&engine).unwrap().accelerators;
                    let used = accelerators.iter().map(|on| (on.clone(), *bytes)).collect();
                    Event::UsageAfterSleep { engine: engine.clone(), generation, used }
                });
                let slept = Event::Slept { engine, generation, level };
                measured.into_iter().chain(read).chain([slept]).collect()
            }
            Command::Stop { engine, generation, .. } => {
                vec![Event::Gone { engine, generation, cause: rouse::fault::FailureCause::Stopped }]
            }
            Command::CloseGate { engine, generation, .. } => {
                let busy = self.fleet.engine(&engine).is_some_and(|e| e.leases > 0);
                if busy { Vec::new() } else { vec![Event::Drained { engine, generation }] }
            }
            Command::Grant { waiter, engine, generation, canary } => {
                self.served.push(waiter);
                let verdict = CanaryVerdict::Passed;
                if canary { vec![Event::Canary { engine, generation, verdict }] } else { Vec::new() }
            }
            Command::Probe { engine, generation } => {
                vec![Event::Canary { engine, generation, verdict: CanaryVerdict::Passed }]
            }
            Command::Refuse { waiter, fault } => {
                self.refused.insert(waiter, fault);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }
}
