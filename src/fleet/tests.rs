//! A turn visits the engines that its events concern, however many others there are.
//!
//! The engines that a turn visits are counted, not timed: a count is the same on every machine. The checks that only
//! debug builds make are not counted.

use std::collections::BTreeMap;

use super::{
    Fleet,
    command::{CloseReason, Command},
    event::{AdoptedEngine, CanaryVerdict, Event, GatewayDemand, Waiter, WaiterId},
    state::engines::visits,
};
use crate::{
    engine::turn_clients::TurnClients,
    fault::FailureCause,
    model::{
        Accelerator, AcceleratorRequirement, EngineId, EngineMemory, FleetConfig, FleetSettings, IdlePolicy,
        ModelName, ModelSpec, SleepLevel,
    },
    sim::simulated_model,
    units::{Bytes, Generation, Millis, Tick},
};

const START: Tick = Tick(1_000_000_000);
/// More than any turn below needs, and far fewer than the engines of the larger fleet.
const MAX_VISITS: u64 = 400;
/// The models of the script, each with one engine. All others have two engines and no requests.
const AWAKE: usize = 0;
const ASLEEP: usize = 1;
const COLD: usize = 2;

#[test]
fn a_turn_visits_as_few_engines_in_a_large_fleet_as_in_a_small_one() {
    let small = visits_by_turn(40);
    let large = visits_by_turn(1000);
    assert_eq!(small, large, "visits of each turn with 40 models and with 1000");
    assert!(large.iter().all(|(_, visits)| *visits <= MAX_VISITS), "{large:?}");
}

#[test]
fn an_idle_engine_of_a_scaled_model_rests_while_another_one_is_used_and_both_end_together() {
    let timeout = Millis::secs(10);
    let idle = IdlePolicy { sleep_after: Some(timeout), ..model(AWAKE).idle };
    let spec = ModelSpec { scaled: true, replicas: 2, idle, ..model(AWAKE) };
    let engines = [0, 1].map(|replica| EngineId::new(name(AWAKE), replica));
    let adopted = |engine: &EngineId| Event::Adopted {
        engine: engine.clone(),
        generation: Generation(1),
        found: adopted_engine(None),
    };
    let [used, unused] = &engines;
    let sample = |leases, now| Event::GateSampled {
        engine: used.clone(),
        generation: Generation(1),
        leases,
        last_lease_end: now,
        last_byte: now,
        clients: TurnClients::default(),
        idle_gap: None,
    };
    let mut fleet = Fleet::new();
    let pool = Accelerator { units: Some(6), ..Accelerator::new("pool".into(), Bytes::gib(90)) };
    let configuration =
        FleetConfig { settings: FleetSettings::default(), accelerators: vec![pool], models: vec![spec] };
    fleet.on(&Event::Configured { configuration: Box::new(configuration) }, START);
    engines.iter().for_each(|engine| fleet.on(&adopted(engine), START));
    fleet.on(&Event::AdoptionDone, START);
    let turn = |fleet: &mut Fleet, now| {
        let plan = fleet.plan(now);
        fleet.issued(&plan.commands, now);
        assert_eq!(fleet.broken_invariants(), Vec::<String>::new());
        plan.commands
    };
    while !turn(&mut fleet, START).is_empty() {}

    fleet.on(&sample(1, START), START);
    let later = START + Millis::secs(60);
    assert!(turn(&mut fleet, later).is_empty());
    assert!(!fleet.planner.due_engines(later).contains(unused), "the model is in use");
    assert_eq!(fleet.unused_since(&name(AWAKE)), None);

    fleet.on(&sample(0, later), later);
    assert_eq!(fleet.unused_since(&name(AWAKE)), Some(later));
    assert!(fleet.next_deadline().is_some_and(|at| at <= later + timeout));
    let commands = turn(&mut fleet, later + timeout);
    let is_idle =
        |command: &&Command| matches!(command, Command::CloseGate { reason: CloseReason::Idle, .. });
    assert_eq!(commands.iter().filter(is_idle).count(), 2, "{commands:?}");
    let demand = GatewayDemand { waiting: 0, in_flight: 1, last_request: later };
    let demand = Some(BTreeMap::from([(name(AWAKE), demand)]));
    fleet.on(&Event::RemoteDemand { gateway: "other".to_owned(), demand }, later + timeout);
    assert_eq!(fleet.unused_since(&name(AWAKE)), None, "another gateway uses it");
    assert_eq!(fleet.unused_since(&name(COLD)), None, "it is not configured");
}

/// Runs the same turns in a fleet of this size, and returns how many engines each visits.
fn visits_by_turn(models: usize) -> Vec<(&'static str, u64)> {
    let mut world = CountedFleet::new(models);
    world.turn("nothing happens", &[]);
    world.turn("a request begins", &[world.sample(AWAKE, 1)]);
    world.turn("a request ends", &[world.sample(AWAKE, 0)]);
    let arrival = world.arrival(AWAKE);
    let granted = world.turn("a request waits for an awake model", &[arrival]);
    assert!(granted.iter().any(|command| matches!(command, Command::Grant { .. })), "{granted:?}");
    world.turn("it is answered", &[world.sample(AWAKE, 0)]);
    world.start(ASLEEP, |command| matches!(command, Command::Wake { .. }));
    world.start(COLD, |command| matches!(command, Command::Launch { .. }));
    let demand = GatewayDemand { waiting: 0, in_flight: 1, last_request: world.now };
    let demand = Some(BTreeMap::from([(name(AWAKE), demand)]));
    world.turn("another gateway reports", &[Event::RemoteDemand { gateway: "other".to_owned(), demand }]);
    let (engine, generation) = world.engine(AWAKE);
    world.turn("an engine crashes", &[Event::Gone { engine, generation, cause: FailureCause::Unhealthy }]);
    world.turn("it may start again", &[]);
    world.reload("nothing is configured anew", |_| {});
    world.reload("a model has another priority", |models| models[AWAKE].priority = 1);
    world.reload("a model is removed", |models| models.retain(|spec| spec.name != name(COLD)));
    world.reload("a model is added", |models| models.push(model(COLD)));
    world.follow();
    let demand = GatewayDemand { waiting: 1, in_flight: 0, last_request: world.now };
    let demand = Some(BTreeMap::from([(name(COLD), demand)]));
    world.turn("a request waits elsewhere", &[Event::RemoteDemand { gateway: "other".to_owned(), demand }]);
    let report = world.fleet.report_with_waits(&world.fleet.plan(world.now));
    let reason = &report.models[&name(COLD)].reason;
    assert!(reason.contains("starts again"), "the report says what it waits for: {reason}");
    world.reload("a follower reloads", |models| models[AWAKE].priority = 2);
    world.visits
}

struct CountedFleet {
    fleet: Fleet,
    configuration: FleetConfig,
    now: Tick,
    visits: Vec<(&'static str, u64)>,
    waiters: u64,
}

impl CountedFleet {
    /// A pool with room for all models. Of the models without requests, half are awake and half asleep.
    fn new(models: usize) -> Self {
        let mut fleet = Fleet::new();
        let units = Some(u32::try_from(3 * models).unwrap());
        let capacity = Bytes::gib(30 * models as u64);
        let pool = Accelerator { units, ..Accelerator::new("pool".into(), capacity) };
        let settings = FleetSettings { host_memory: Bytes::gib(1 << 20), ..FleetSettings::default() };
        let models: Vec<ModelSpec> = (0..models).map(model).collect();
        let adopted = (0..models.len()).filter(|n| *n != COLD).map(|n| Event::Adopted {
            engine: EngineId::new(name(n), 0),
            generation: Generation(1),
            found: adopted_engine((n % 2 == 1).then_some(SleepLevel::One)),
        });
        let adopted: Vec<Event> = adopted.collect();
        let configuration = FleetConfig { settings, accelerators: vec![pool], models };
        fleet.on(&Event::Configured { configuration: Box::new(configuration.clone()) }, START);
        adopted.iter().for_each(|event| fleet.on(event, START));
        fleet.on(&Event::AdoptionDone, START);
        let mut world = Self { fleet, configuration, now: START, visits: Vec::new(), waiters: 0 };
        while !world.turn("the gates open", &[]).is_empty() {}
        world.visits.clear();
        world
    }

    /// Takes a turn as the driver does, and counts its visits.
    fn turn(&mut self, what: &'static str, events: &[Event]) -> Vec<Command> {
        self.now = self.now + Millis(1);
        let before = visits::count();
        for event in events {
            self.fleet.on(event, self.now);
        }
        let plan = self.fleet.plan(self.now);
        self.fleet.issued(&plan.commands, self.now);
        let deadline = self.fleet.next_deadline();
        drop(self.fleet.take_routing_changes());
        self.visits.push((what, visits::count() - before));
        assert!(deadline.is_none_or(|at| at > self.now));
        assert_eq!(self.fleet.broken_invariants(), Vec::<String>::new());
        plan.commands
    }

    /// Changes the configured models, in a turn of its own.
    fn reload(&mut self, what: &'static str, change: impl FnOnce(&mut Vec<ModelSpec>)) {
        change(&mut self.configuration.models);
        let configuration = Box::new(self.configuration.clone());
        self.turn(what, &[Event::Configured { configuration }]);
    }

    /// Lets another gateway lead from now on, and keeps an engine of each model awake. These turns concern all engines.
    fn follow(&mut self) {
        let counted = self.visits.len();
        self.turn("another gateway leads", &[Event::LeadershipChanged { leads: false }]);
        self.reload("all are kept awake", |models| models.iter_mut().for_each(|spec| spec.min_replicas = 1));
        self.visits.truncate(counted);
    }

    /// Brings up a model for a request that waits for it.
    fn start(&mut self, model: usize, is_start: fn(&Command) -> bool) {
        let arrival = self.arrival(model);
        let reserved = self.turn("a request waits for a model", &[arrival]);
        assert!(reserved.iter().any(|command| matches!(command, Command::Reserve { .. })), "{reserved:?}");
        let (engine, generation) = self.engine(model);
        let accelerators = vec!["pool".into()];
        let placed = Event::Placed { engine: engine.clone(), generation, accelerators };
        let started = self.turn("its memory is reserved", &[placed]);
        assert!(started.iter().any(is_start), "{started:?}");
        let address = ([127, 0, 0, 1], 9).into();
        self.turn("its process runs", &[Event::Started { engine: engine.clone(), generation, address }]);
        let ready = self.turn("it is ready", &[Event::Ready { engine: engine.clone(), generation }]);
        assert!(
            ready.iter().any(|command| matches!(command, Command::Grant { canary: true, .. })),
            "{ready:?}"
        );
        let passed = Event::Canary { engine, generation, verdict: CanaryVerdict::Passed };
        let opened = self.turn("it has proved itself", &[passed]);
        assert!(opened.iter().any(|command| matches!(command, Command::OpenGate { .. })), "{opened:?}");
        self.turn("the request is answered", &[self.sample(model, 0)]);
    }

    fn engine(&self, model: usize) -> (EngineId, Generation) {
        let engine = self.fleet.engines_of(&name(model)).next().expect("an engine of the model");
        (engine.id.clone(), engine.generation)
    }

    fn sample(&self, model: usize, leases: u32) -> Event {
        let (engine, generation) = self.engine(model);
        Event::GateSampled {
            engine,
            generation,
            leases,
            last_lease_end: self.now,
            last_byte: self.now,
            clients: TurnClients::default(),
            idle_gap: None,
        }
    }

    fn arrival(&mut self, model: usize) -> Event {
        self.waiters += 1;
        let waiter = Waiter {
            id: WaiterId(self.waiters),
            model: name(model),
            band: 0,
            key: String::new(),
            client: 1,
            arrived: self.now,
            deadline: self.now + Millis::secs(500),
            stream: true,
            required_engine: None,
        };
        Event::Arrived { waiter }
    }
}

/// An engine that was awake or asleep when its gateway started.
pub(in crate::fleet) fn adopted_engine(asleep: Option<SleepLevel>) -> AdoptedEngine {
    AdoptedEngine {
        address: ([127, 0, 0, 1], 9).into(),
        accelerators: vec!["pool".into()],
        asleep,
        ready: true,
        fingerprint: 1,
        last_lease_end: Tick(0),
        started: START,
    }
}

fn name(model: usize) -> ModelName {
    format!("model-{model:04}").into()
}

fn model(n: usize) -> ModelSpec {
    let memory = EngineMemory { awake: Bytes::gib(10), asleep: Bytes::gib(1), host: Bytes::gib(10) };
    ModelSpec {
        accelerators: AcceleratorRequirement::InPool { pool: "pool".into(), count: 1 },
        replicas: if n > COLD { 2 } else { 1 },
        scaled: n > COLD && n.is_multiple_of(10),
        explicit_memory: true,
        ..simulated_model(name(n), memory)
    }
}
