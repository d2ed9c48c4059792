//! Builds busy fleets of any size, to show how the cost of a decision grows.
//!
//! Eight engines share an accelerator: three are awake and full, of which one may be draining, two sleep, one is
//! starting, the others are cold. No accelerator has room left, so every waiter needs a decision.

use rouse::{
    engine::turn_clients::TurnClients,
    fleet::{
        Fleet,
        command::{AfterDrain, CloseReason, Command},
        event::{AdoptedEngine, Event, Waiter, WaiterId},
    },
    model::{
        Accelerator, AcceleratorId, EngineId, EngineMemory, FleetConfig, FleetSettings, IdlePolicy,
        ModelName, ModelSpec, RehearsalPolicy, SleepLevel, SleepLevelPolicy,
    },
    sim::simulated_model,
    units::{Bytes, Generation, Millis, Tick},
};

/// The moment of every event.
pub(crate) const NOW: Tick = Tick(1_000_000_000);
const MAX_CONCURRENCY: u32 = 3;

/// The waiters of a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitingLoad {
    Nobody,
    /// One waiter for a cold model, which has no room.
    One,
    /// A thousand waiters, spread over all models in turn.
    Thousand,
    /// One waiter for a cold model, for which one engine may be evicted: the plan has commands.
    Evicting,
}

impl WaitingLoad {
    pub(crate) const ALL: [Self; 4] = [Self::Nobody, Self::One, Self::Thousand, Self::Evicting];
}

/// A fleet of this many engines, one for each model, with every possible decision already made.
pub(crate) fn fleet(engines: usize, waiting: WaitingLoad) -> Fleet {
    let mut fleet = Fleet::new();
    let accelerators = (engines / 8).max(1);
    let models = (0..engines).map(model).collect();
    let gpu = |n| Accelerator { metered: true, ..Accelerator::new(gpu(n), Bytes::gib(82)) };
    let mut settings = FleetSettings { host_memory: Bytes::gib(1 << 20), ..FleetSettings::default() };
    settings.queue.max_waiting = 100_000;
    let configuration = FleetConfig { settings, accelerators: (0..accelerators).map(gpu).collect(), models };
    fleet.on(&Event::Configured { configuration: Box::new(configuration) }, NOW);
    for n in 0..engines {
        adopt(&mut fleet, n, n % accelerators, n / accelerators);
    }
    fleet.on(&Event::AdoptionDone, NOW);
    plan_until_quiescent(&mut fleet);
    for n in 0..engines.min(3 * accelerators) {
        let idle = waiting == WaitingLoad::Evicting && n == 0;
        fleet.on(&used_event(n, if idle { 0 } else { MAX_CONCURRENCY }), NOW);
    }
    for n in (2 * accelerators..3 * accelerators).step_by(4) {
        let (engine, generation) = (id(n), Generation(1));
        let close = Command::CloseGate {
            engine,
            generation,
            reason: CloseReason::Turn,
            after_drain: AfterDrain::Sleep(None),
            successor: None,
        };
        fleet.issued(&[close], NOW);
    }
    plan_until_quiescent(&mut fleet);
    match waiting {
        WaitingLoad::Nobody => {}
        WaitingLoad::One | WaitingLoad::Evicting => arrive(&mut fleet, 1, 5 * accelerators),
        WaitingLoad::Thousand => (0..1000).for_each(|id| arrive(&mut fleet, id, id as usize % engines)),
    }
    if waiting != WaitingLoad::Evicting {
        plan_until_quiescent(&mut fleet);
    }
    fleet
}

/// A gate sample of an engine with this many leases.
pub(crate) fn used_event(engine: usize, leases: u32) -> Event {
    Event::GateSampled {
        engine: id(engine),
        generation: Generation(1),
        leases,
        last_lease_end: started(engine),
        last_byte: NOW,
        clients: TurnClients::default(),
        idle_gap: None,
    }
}

/// Plans until no more commands follow at this moment.
pub(crate) fn plan_until_quiescent(fleet: &mut Fleet) {
    for _ in 0..4 {
        let plan = fleet.plan(NOW);
        fleet.issued(&plan.commands, NOW);
    }
    assert!(fleet.plan(NOW).commands.is_empty());
}

fn adopt(fleet: &mut Fleet, n: usize, on: usize, rank: usize) {
    let (asleep, ready) = match rank {
        0..=2 => (None, true),
        3 | 4 => (Some(SleepLevel::One), true),
        7 => (None, false),
        _ => return,
    };
    let found = AdoptedEngine {
        address: ([127, 0, 0, 1], 9).into(),
        accelerators: vec![gpu(on)],
        asleep,
        ready,
        fingerprint: 1,
        last_lease_end: started(n),
        started: started(n),
    };
    fleet.on(&Event::Adopted { engine: id(n), generation: Generation(1), found }, NOW);
    let reading = Event::MeterRead { accelerator: gpu(on), used: Bytes::gib(82), by_engine: None };
    fleet.on(&reading, NOW);
}

/// A start within the engine's present turn.
const fn started(n: usize) -> Tick {
    Tick(NOW.0 - 60_000 - n as u64 % 1000)
}

fn arrive(fleet: &mut Fleet, waiter: u64, model: usize) {
    let waiter = Waiter {
        id: WaiterId(waiter),
        model: name(model),
        band: 0,
        key: format!("key-{}", waiter % 7),
        arrived: NOW,
        deadline: NOW + Millis::secs(500),
        stream: true,
        client: waiter % 7,
        required_engine: None,
    };
    fleet.on(&Event::Arrived { waiter }, NOW);
}

fn model(n: usize) -> ModelSpec {
    ModelSpec {
        idle: IdlePolicy {
            sleep_after: Some(Millis::secs(600)),
            stop_after: Some(Millis::secs(3600)),
            level: SleepLevelPolicy::Auto,
            rehearse: RehearsalPolicy::Never,
        },
        max_concurrency: Some(MAX_CONCURRENCY),
        start_timeout: Millis::secs(600),
        explicit_memory: true,
        ..simulated_model(
            name(n),
            EngineMemory { awake: Bytes::gib(20), asleep: Bytes::gib(1), host: Bytes::gib(1) },
        )
    }
}

pub(crate) fn name(n: usize) -> ModelName {
    format!("model-{n:05}").into()
}

fn id(n: usize) -> EngineId {
    EngineId::new(name(n), 0)
}

fn gpu(n: usize) -> AcceleratorId {
    format!("GPU-{n:08}-0000").into()
}
