//! The gateways' world: the physical state of engines and requests, and which events reach which gateway, and when.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    driver::{DriverCore, UnsettledWork},
    fleet::{
        Fleet,
        event::{AdoptedEngine, Event, GatewayDemand, PublishedEngine, Waiter, WaiterId},
    },
    journal,
    model::{
        Accelerator, AcceleratorId, EngineId, EngineMemory, FleetConfig, FleetSettings, IdlePolicy,
        ModelName, ModelSpec, RehearsalPolicy, SleepLevel, SleepLevelPolicy,
    },
    sim::{SplitMix64, simulated_model},
    units::{Bytes, Generation, Millis, Tick},
};

mod driver;
mod engines;

const GATEWAYS: usize = 3;
const NEVER: Tick = Tick(1 << 50);
/// Limit on the steps until all requests have ended.
const MAX_SETTLING_STEPS: u32 = 5000;

pub(crate) struct MultiGatewayHarness {
    now: Tick,
    random: SplitMix64,
    configuration: FleetConfig,
    gateways: Vec<FakeGateway>,
    leader: usize,
    /// When the leader adopts the running engines; until then it decides nothing.
    adopts_at: Option<Tick>,
    processes: BTreeMap<EngineId, FakeProcess>,
    leases: Vec<FakeLease>,
    published: BTreeMap<EngineId, (Generation, Option<PublishedEngine>)>,
    delayed_events: Vec<(Tick, usize, Event)>,
    waiters: u64,
    /// All events are delivered at once, and no more random events happen.
    settling: bool,
    pub(crate) tally: BTreeMap<&'static str, u64>,
    pub(crate) transcript: Option<Vec<String>>,
    violations: Vec<String>,
    /// Engines whose gate the turn under way has closed: a lease that the same plan grants is not to be had.
    closed_in_turn: BTreeSet<EngineId>,
    /// Events of the last turn, while the world settles. A report of a world that never rests names them.
    last_events: Vec<Event>,
}

#[derive(Default)]
struct FakeGateway {
    core: DriverCore,
    inbox: Vec<Event>,
    gates: BTreeMap<EngineId, FakeGate>,
    parked: BTreeMap<WaiterId, Waiter>,
    /// Engines with published state that has not been delivered.
    unseen_engines: BTreeSet<EngineId>,
    /// Gateways whose demand has not been delivered.
    unseen_gateways: BTreeSet<usize>,
    published_demand: BTreeMap<ModelName, GatewayDemand>,
}

#[derive(Clone, Debug)]
struct FakeGate {
    generation: Generation,
    open: bool,
    awaiting_stub: bool,
    /// Closed, with its drain not reported yet.
    closing: bool,
    last_sample: (u32, Tick),
    last_lease_end: Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FakeProcessPhase {
    Launching,
    Loading,
    /// The engine serves.
    Up,
    FallingAsleep(SleepLevel),
    Asleep(SleepLevel),
    Waking,
    Stopping,
}

#[derive(Clone, Debug)]
struct FakeProcess {
    generation: Generation,
    phase: FakeProcessPhase,
    /// When the phase ends, if it does.
    due: Option<Tick>,
    accelerators: Vec<AcceleratorId>,
    /// The stub's gate is open.
    stub_gate_open: bool,
    /// The engine sleeps, or slept before it was stopped: most of its memory is free.
    memory_released: bool,
}

#[derive(Clone, Debug)]
struct FakeLease {
    gateway: usize,
    engine: EngineId,
    generation: Generation,
    ends: Tick,
    canary: bool,
}

fn configuration(random: &mut SplitMix64) -> FleetConfig {
    let gpu = |n| Accelerator::new(format!("gpu-{n}").into(), Bytes::gib(24));
    let mut settings = FleetSettings { host_memory: Bytes::gib(16), ..FleetSettings::default() };
    settings.queue.max_wait = Millis(NEVER.0);
    settings.turns.residency = Millis(random.between(0, 2000));
    settings.turns.max_turn = Millis(random.between(1000, 6000));
    let model = |n: u64, random: &mut SplitMix64| ModelSpec {
        idle: IdlePolicy {
            sleep_after: random.chance(0.7).then(|| Millis(random.between(500, 8000))),
            stop_after: random.chance(0.3).then(|| Millis(random.between(5000, 20_000))),
            level: SleepLevelPolicy::Auto,
            rehearse: RehearsalPolicy::Never,
        },
        replicas: random.between(1, 2) as u32,
        max_concurrency: random.chance(0.5).then(|| random.between(1, 4) as u32),
        start_timeout: Millis::secs(600),
        explicit_memory: random.chance(0.5),
        can_sleep: random.chance(0.8),
        ..simulated_model(
            format!("model-{n}"),
            EngineMemory {
                awake: Bytes::gib(*random.pick(&[8, 11, 20]).expect("one of three")),
                asleep: Bytes::gib(1),
                host: Bytes::gib(4),
            },
        )
    };
    let models = (0..random.between(2, 4)).map(|n| model(n, random)).collect();
    FleetConfig { settings, accelerators: (0..2).map(gpu).collect(), models }
}

impl MultiGatewayHarness {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = SplitMix64::new(seed.wrapping_mul(0x9e37_79b9));
        let configuration = configuration(&mut random);
        let mut world = Self {
            now: Tick(1_000_000),
            random,
            configuration,
            gateways: Vec::new(),
            leader: 0,
            adopts_at: None,
            processes: BTreeMap::new(),
            leases: Vec::new(),
            published: BTreeMap::new(),
            delayed_events: Vec::new(),
            waiters: 0,
            settling: false,
            tally: BTreeMap::new(),
            transcript: None,
            violations: Vec::new(),
            closed_in_turn: BTreeSet::new(),
            last_events: Vec::new(),
        };
        for gateway in 0..GATEWAYS {
            world.gateways.push(FakeGateway::default());
            world.start_gateway(gateway);
        }
        world.elect(0);
        world
    }

    pub(crate) fn run(&mut self, steps: u64) -> Result<(), String> {
        for _ in 0..steps {
            self.now = self.now + Millis(self.random.between(1, 300));
            self.random_events();
            self.step()?;
        }
        self.settling = true;
        for _ in 0..MAX_SETTLING_STEPS {
            let busy = self.gateways.iter().any(|g| !g.parked.is_empty()) || !self.leases.is_empty();
            if !busy && self.adopts_at.is_none() {
                return Ok(());
            }
            self.now = self.now + Millis(100);
            self.step()?;
        }
        let waiting: Vec<_> = self.gateways.iter().map(|g| g.parked.values().collect::<Vec<_>>()).collect();
        let engines =
            self.gateways[self.leader].core.fleet().engines().map(|e| format!("{} {}", e.id, e.state));
        let engines: Vec<_> = engines.collect();
        let work = UnsettledWork::new(
            "steps since the last random event",
            MAX_SETTLING_STEPS,
            &self.last_events,
            &[],
        );
        Err(format!("somebody waits for ever: {work}; {waiting:?}, {engines:?}, {:?}", self.processes))
    }

    fn count(&mut self, counter: &'static str) {
        *self.tally.entry(counter).or_default() += 1;
    }

    fn violation(&mut self, text: String) {
        self.violations.push(text);
    }

    fn send(&mut self, gateway: usize, event: Event) {
        self.gateways[gateway].inbox.push(event);
    }

    /// Starts a new gateway as a follower that will receive all published state.
    fn start_gateway(&mut self, gateway: usize) {
        let others = (0..GATEWAYS).filter(|other| *other != gateway);
        let fresh = FakeGateway {
            unseen_engines: self.published.keys().cloned().collect(),
            unseen_gateways: others.collect(),
            ..FakeGateway::default()
        };
        self.gateways[gateway] = fresh;
        let configuration = Box::new(self.configuration.clone());
        self.send(gateway, Event::Configured { configuration });
        self.send(gateway, Event::LeadershipChanged { leads: false });
    }

    /// Elects a leader. The old leader is notified before the new one, and the new one has received all published
    /// state.
    fn elect(&mut self, gateway: usize) {
        if self.leader != gateway {
            self.count("leaders changed");
            let (old, known_engines) = (self.leader, self.known_engines(self.leader));
            self.send(old, Event::LeadershipChanged { leads: false });
            self.gateways[old].unseen_engines.extend(known_engines);
        }
        self.leader = gateway;
        self.delayed_events.clear();
        let stale = std::mem::take(&mut self.gateways[gateway].unseen_engines);
        stale.into_iter().for_each(|engine| self.deliver_published(gateway, &engine));
        self.send(gateway, Event::LeadershipChanged { leads: true });
        self.adopts_at = Some(self.now + Millis(self.random.between(0, 2000)));
    }

    fn known_engines(&self, gateway: usize) -> Vec<EngineId> {
        let known = self.gateways[gateway].core.fleet().engines().map(|e| e.id.clone());
        known.chain(self.published.keys().cloned()).collect()
    }

    /// The leader adopts the running engines. Every transition has ended by then.
    fn adopt(&mut self) {
        self.adopts_at = None;
        self.processes.retain(|_, process| process.phase != FakeProcessPhase::Stopping);
        let started = self.now;
        let mut found = Vec::new();
        for (engine, process) in &mut self.processes {
            process.phase = match process.phase {
                FakeProcessPhase::FallingAsleep(level) => FakeProcessPhase::Asleep(level),
                FakeProcessPhase::Waking => FakeProcessPhase::Up,
                phase => phase,
            };
            process.memory_released = matches!(process.phase, FakeProcessPhase::Asleep(_));
            if !matches!(process.phase, FakeProcessPhase::Launching | FakeProcessPhase::Loading) {
                process.due = None;
            }
            let asleep = match process.phase {
                FakeProcessPhase::Asleep(level) => Some(level),
                _ => None,
            };
            // The gate of a running engine is open: the previous leader's unfinished work is abandoned.
            process.stub_gate_open = process.phase == FakeProcessPhase::Up;
            let accelerators = process.accelerators.clone();
            let ready = matches!(process.phase, FakeProcessPhase::Up | FakeProcessPhase::Asleep(_));
            let last_end = Tick(0);
            let found_as = AdoptedEngine {
                address: address(),
                accelerators,
                asleep,
                ready,
                fingerprint: 1,
                last_lease_end: last_end,
                started,
            };
            found.push(Event::Adopted {
                engine: engine.clone(),
                generation: process.generation,
                found: found_as,
            });
        }
        let doors = found.iter().filter(|event| match event {
            Event::Adopted { engine, generation, found } => {
                let gate = self.gateways[self.leader].gates.get(engine);
                found.ready
                    && found.asleep.is_none()
                    && gate.is_some_and(|gate| gate.open && gate.generation == *generation)
            }
            _ => false,
        });
        let doors = doors.count() as u64;
        *self.tally.entry("engines that kept their gate").or_default() += doors;
        found.push(Event::AdoptionDone);
        found.into_iter().for_each(|event| self.send(self.leader, event));
    }

    fn random_events(&mut self) {
        if self.random.chance(0.5) {
            self.arrive();
        }
        if self.random.chance(0.03) {
            self.leave();
        }
        if self.random.chance(0.01) {
            let next = self.random.between(0, GATEWAYS as u64 - 1) as usize;
            if next != self.leader {
                self.elect(next);
            }
        }
        if self.random.chance(0.005) {
            self.restart();
        }
        if self.random.chance(0.01) {
            self.kill_random_process();
        }
        if self.random.chance(0.02) {
            self.resume_from_snapshot();
        }
    }

    /// Replaces a fleet with one restored from its journal snapshot.
    fn resume_from_snapshot(&mut self) {
        let gateway = self.random.between(0, GATEWAYS as u64 - 1) as usize;
        let line =
            journal::write_turn(self.now, &self.gateways[gateway].core.fleet().snapshot()).expect("a line");
        let header = journal::write(&journal::JournalLine::header("0", self.now)).expect("a line");
        let lines = journal::read(&format!("{header}\n{line}\n")).expect("a journal");
        let mut fleet = Fleet::new();
        for line in &lines {
            if let journal::JournalLine::Turn { events, .. } = line {
                events.iter().for_each(|event| fleet.on(event, self.now));
            }
        }
        self.gateways[gateway].core = DriverCore::with_fleet(fleet);
    }

    fn arrive(&mut self) {
        let gateway = self.random.between(0, GATEWAYS as u64 - 1) as usize;
        let models: Vec<ModelName> = self.configuration.models.iter().map(|m| m.name.clone()).collect();
        let model = self.random.pick(&models).expect("there are models").clone();
        let (arrived, stream) = (self.now, self.random.chance(0.7));
        self.park(gateway, model, arrived, stream);
        self.count("arrivals");
    }

    fn park(&mut self, gateway: usize, model: ModelName, arrived: Tick, stream: bool) {
        self.waiters += 1;
        let (id, key) = (WaiterId(self.waiters), String::new());
        let waiter = Waiter {
            id,
            model,
            band: 0,
            key,
            arrived,
            deadline: NEVER,
            stream,
            client: 0,
            required_engine: None,
        };
        self.gateways[gateway].parked.insert(id, waiter.clone());
        self.send(gateway, Event::Arrived { waiter });
    }

    fn leave(&mut self) {
        let gateway = self.random.between(0, GATEWAYS as u64 - 1) as usize;
        if let Some((waiter, _)) = self.gateways[gateway].parked.pop_first() {
            self.send(gateway, Event::Left { waiter });
        }
    }

    /// A gateway dies with all its state, and a new one takes its place.
    fn restart(&mut self) {
        self.count("gateways restarted");
        let gateway = self.random.between(0, GATEWAYS as u64 - 1) as usize;
        self.leases.retain(|lease| lease.gateway != gateway);
        self.start_gateway(gateway);
        for other in (0..GATEWAYS).filter(|other| *other != gateway) {
            self.gateways[other].unseen_gateways.remove(&gateway);
            let demand = None;
            self.send(other, Event::RemoteDemand { gateway: gateway.to_string(), demand });
        }
        if gateway == self.leader {
            let next = self.random.between(0, GATEWAYS as u64 - 1) as usize;
            self.leader = next;
            self.count("leaders changed");
            self.elect(next);
        }
    }

    fn step(&mut self) -> Result<(), String> {
        self.end_leases_due();
        self.move_processes();
        let now = self.now;
        for (_, to, event) in self.delayed_events.extract_if(.., |(at, ..)| *at <= now).collect::<Vec<_>>() {
            self.send(to, event);
        }
        if self.adopts_at.is_some_and(|at| at <= self.now) {
            self.adopt();
        }
        for gateway in 0..GATEWAYS {
            self.deliver(gateway);
            self.turn(gateway);
        }
        match self.violations.is_empty() {
            true => Ok(()),
            false => Err(format!("at {}: {}", self.now, self.violations.join("; "))),
        }
    }

    fn end_leases_due(&mut self) {
        let now = self.now;
        self.end_leases(|lease| lease.ends <= now);
    }
}

fn address() -> std::net::SocketAddr {
    ([127, 0, 0, 1], 1).into()
}
