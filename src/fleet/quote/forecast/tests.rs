//! One forecaster serves all models: with the forecasts that each would get alone, and without a walk for each of them.

use proptest::prelude::*;

use super::{WaitForecast, cache::walks};
use crate::{
    engine::turn_clients::TurnClients,
    fleet::{
        Fleet, Plan,
        event::{AdoptedEngine, Event, LearnedMeasurements, Waiter, WaiterId},
        quote::{LearnedTimes, TimeEstimate},
        state::engines::visits,
        tests::adopted_engine,
    },
    model::{
        Accelerator, AcceleratorId, EngineId, EngineMemory, FleetConfig, FleetSettings, IdlePolicy,
        ModelName, ModelSpec, RehearsalPolicy, SleepLevel,
    },
    sim::simulated_model,
    units::{Bytes, Generation, Millis, Tick},
};

const START: Tick = Tick(1_000_000_000);
const GENERATION: Generation = Generation(1);

/// What a model is like, and where its engine is.
#[derive(Clone, Copy, Debug)]
struct DrawnModel {
    gib: u64,
    knows_times: bool,
    rehearses: bool,
    pinned: bool,
    needs_first: bool,
    /// `None`: no process. Else the accelerator, and whether it sleeps.
    found: Option<(usize, bool)>,
    leases: u32,
    waits: bool,
}

fn name(n: usize) -> ModelName {
    format!("model-{n:04}").into()
}

fn gpu(n: usize) -> AcceleratorId {
    format!("gpu-{n:03}").into()
}

fn spec(n: usize, drawn: &DrawnModel) -> ModelSpec {
    let memory = EngineMemory { awake: Bytes::gib(drawn.gib), asleep: Bytes::gib(1), host: Bytes::gib(1) };
    let base = simulated_model(name(n), memory);
    let rehearse = if drawn.rehearses { RehearsalPolicy::Start } else { RehearsalPolicy::Never };
    ModelSpec {
        explicit_memory: true,
        max_concurrency: Some(2),
        pinned: drawn.pinned,
        dependencies: if drawn.needs_first && n > 0 { vec![name(0)] } else { Vec::new() },
        idle: IdlePolicy { rehearse, ..base.idle },
        ..base
    }
}

fn learned(seconds: u64) -> LearnedMeasurements {
    let known = |mean| Some(TimeEstimate { mean: Millis::secs(mean), deviation: Millis(700) });
    let times = LearnedTimes {
        start: known(seconds),
        wake_one: known(2),
        sleep: known(3),
        ..LearnedTimes::default()
    };
    LearnedMeasurements { times, ..LearnedMeasurements::default() }
}

/// The fleet after a few turns with these models and waiters, and its last plan.
fn fleet(drawn: &[DrawnModel], accelerators: usize) -> (Fleet, Plan) {
    let mut fleet = Fleet::new();
    let models = drawn.iter().enumerate().map(|(n, drawn)| spec(n, drawn)).collect();
    let settings = FleetSettings { host_memory: Bytes::gib(1 << 20), ..FleetSettings::default() };
    let accelerators = (0..accelerators).map(|n| Accelerator::new(gpu(n), Bytes::gib(24))).collect();
    let configuration = Box::new(FleetConfig { settings, accelerators, models });
    fleet.on(&Event::Configured { configuration }, START);
    for (n, drawn) in drawn.iter().enumerate() {
        if drawn.knows_times {
            let (model, learned) = (name(n), learned(20 + n as u64 % 7));
            fleet.on(&Event::MeasurementsRestored { model, variant: Default::default(), learned }, START);
        }
        let Some((on, asleep)) = drawn.found else { continue };
        let engine = EngineId::new(name(n), 0);
        let found = AdoptedEngine {
            accelerators: vec![gpu(on)],
            ..adopted_engine(asleep.then_some(SleepLevel::One))
        };
        fleet.on(&Event::Adopted { engine, generation: GENERATION, found }, START);
    }
    fleet.on(&Event::AdoptionDone, START);
    settle(&mut fleet, START);
    let now = START + Millis::secs(20);
    for (n, drawn) in drawn.iter().enumerate().filter(|(_, drawn)| drawn.leases > 0) {
        fleet.on(&sample(n, drawn.leases, now), now);
    }
    settle(&mut fleet, now);
    let now = START + Millis::secs(40);
    for (n, _) in drawn.iter().enumerate().filter(|(_, drawn)| drawn.waits) {
        fleet.on(&arrival(n, now), now);
    }
    let plan = settle(&mut fleet, now);
    (fleet, plan)
}

/// Plans until no more commands follow at this moment, and returns the last plan.
fn settle(fleet: &mut Fleet, now: Tick) -> Plan {
    for _ in 0..10 {
        let plan = fleet.plan(now);
        fleet.issued(&plan.commands, now);
        if plan.commands.is_empty() {
            return plan;
        }
    }
    panic!("each plan has commands");
}

fn sample(n: usize, leases: u32, now: Tick) -> Event {
    Event::GateSampled {
        engine: EngineId::new(name(n), 0),
        generation: GENERATION,
        leases,
        last_lease_end: Tick(0),
        last_byte: now,
        clients: TurnClients::default(),
        idle_gap: None,
    }
}

fn arrival(n: usize, now: Tick) -> Event {
    let waiter = Waiter {
        id: WaiterId(n as u64 + 1),
        model: name(n),
        band: 0,
        key: String::new(),
        client: n as u64,
        arrived: now,
        deadline: now + Millis::secs(600),
        stream: true,
        required_engine: None,
    };
    Event::Arrived { waiter }
}

fn drawn_model(accelerators: usize) -> impl Strategy<Value = DrawnModel> {
    let flags =
        (prop::bool::weighted(0.8), any::<bool>(), prop::bool::weighted(0.1), prop::bool::weighted(0.2));
    let found = prop::option::of((0..accelerators, any::<bool>()));
    (4..20_u64, flags, found, 0..3_u32, any::<bool>()).prop_map(|(gib, flags, found, leases, waits)| {
        let (knows_times, rehearses, pinned, needs_first) = flags;
        // A sleeping engine has no requests.
        let leases = if matches!(found, Some((_, false))) { leases } else { 0 };
        DrawnModel { gib, knows_times, rehearses, pinned, needs_first, found, leases, waits }
    })
}

proptest! {
    #[test]
    fn a_shared_forecaster_forecasts_what_a_fresh_one_does(
        drawn in prop::collection::vec(drawn_model(3), 2..12),
        ahead in 0..4_u32,
    ) {
        let (fleet, plan) = fleet(&drawn, 3);
        let shared = fleet.forecaster(&plan.report_inputs);
        let models: Vec<ModelName> = (0..drawn.len()).map(name).collect();
        let first: Vec<Option<WaitForecast>> = models.iter().map(|model| shared.forecast(model, ahead)).collect();
        for (model, first) in models.iter().zip(first).rev() {
            prop_assert_eq!(first, fleet.forecaster(&plan.report_inputs).forecast(model, ahead), "{}", model);
            prop_assert_eq!(first, shared.forecast(model, ahead), "{} again", model);
        }
    }
}

/// Eight models for each accelerator: one is awake and in use, two sleep, the others are cold, and one of these waits.
fn full_fleet(accelerators: usize) -> (Fleet, Plan) {
    let drawn: Vec<DrawnModel> = (0..8 * accelerators)
        .map(|n| {
            let (on, rank) = (n % accelerators, n / accelerators);
            DrawnModel {
                gib: 16 + n as u64 % 4,
                knows_times: true,
                rehearses: false,
                pinned: false,
                needs_first: false,
                found: (rank < 3).then_some((on, rank > 0)),
                leases: u32::from(rank == 0),
                waits: rank == 3,
            }
        })
        .collect();
    fleet(&drawn, accelerators)
}

/// How many engines and accelerators the forecasts for all models visit.
fn visits_of_all(accelerators: usize) -> (usize, u64, u64) {
    let (fleet, plan) = full_fleet(accelerators);
    let (engines_before, walks_before) = (visits::count(), walks::count());
    let forecasts = fleet.expected_waits(&plan).len();
    (forecasts, visits::count() - engines_before, walks::count() - walks_before)
}

#[test]
fn forecasts_for_all_models_walk_each_accelerator_a_few_times_however_many_models_there_are() {
    let (small, large) = (visits_of_all(10), visits_of_all(120));
    for ((forecasts, engines, walks), accelerators) in [(small, 10_u64), (large, 120)] {
        assert_eq!(forecasts as u64, 8 * accelerators, "each model has a forecast");
        assert!(walks <= 4 * accelerators, "{walks} walks over {accelerators} accelerators");
        assert!(engines <= 8 * accelerators * 200, "{engines} visits of engines");
    }
    assert!(
        large.1 <= 2 * 12 * small.1,
        "they grow with the models, not with their square: {small:?} {large:?}"
    );
}

#[test]
fn a_forecast_for_one_model_walks_as_few_accelerators_in_a_large_fleet_as_in_a_small_one() {
    let walks_of_one = |accelerators: usize| {
        let (fleet, plan) = full_fleet(accelerators);
        let before = walks::count();
        assert!(fleet.forecaster(&plan.report_inputs).forecast(&name(8 * accelerators - 1), 0).is_some());
        walks::count() - before
    };
    assert_eq!(walks_of_one(20), walks_of_one(200));
    assert!(walks_of_one(200) <= 16, "two for each candidate that it looks at");
}
