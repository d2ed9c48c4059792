//! Turns: no request waits longer than the turns before it add up to, and swaps are few.

use rouse::{
    engine::SLEEP_DENIAL_TIMEOUT,
    fleet::event::OperatorAction,
    model::{
        Accelerator, AcceleratorRequirement, DrainDeadlinePolicy, EngineMemory, EvictionPolicy, FleetConfig,
        FleetSettings, ModelSpec,
    },
    sim::{
        ArrivalPattern, ClientBehaviour, HardwareProfile, RequestSource, Scenario, ScenarioAction,
        SimulatedRequest, SimulatedWorld, SplitMix64, fcfs, simulated_model, trace,
    },
    units::{Bytes, Millis},
};
use rouse_testing::sample::{first_seed, size};

mod bursts;
mod protection;
mod reports;

fn model(name: &str, memory: Bytes) -> ModelSpec {
    simulated_model(name, EngineMemory { awake: memory, asleep: Bytes::mib(256), host: Bytes::gib(1) })
}

fn configuration(gpus: u64, models: u64, settings: FleetSettings) -> FleetConfig {
    let gpu =
        |n| Accelerator { metered: true, ..Accelerator::new(format!("gpu-{n}").into(), Bytes::gib(24)) };
    // On one accelerator each model fills it; two accelerators hold two models each.
    let memory = Bytes::gib(if gpus == 1 { 20 } else { 11 });
    FleetConfig {
        settings,
        accelerators: (0..gpus).map(gpu).collect(),
        models: (0..models).map(|n| model(&format!("model-{n}"), memory)).collect(),
    }
}

/// A swap's time beyond drain, sleep and wake: probes, a meter reading, the canary's first byte.
const SLACK: Millis = Millis(100);
/// Some world of each sample must come this close to its bound; otherwise the bound would prove nothing.
const MAX_BOUND_RATIO: f64 = 1.1;

/// Longest wait of 99 of 100 requests of the recorded trace. It was 4.129 s while a model stayed for its residency (ADR
/// 9), and must not grow.
const MAX_P99_WAIT: Millis = Millis(4_200);

/// Seeds in the soak, and each day in the gate.
const SEEDS: u64 = 100;
const SAMPLED: u64 = 25;

#[test]
fn no_model_waits_longer_than_the_turns_before_it() {
    let (first, seeds) = match std::env::var("ROUSE_TURN_SEEDS") {
        Ok(seeds) => (0, seeds.parse().expect("a number")),
        Err(_) => (first_seed(SEEDS, SAMPLED), size(SEEDS, SAMPLED)),
    };
    let (mut tightest, mut swaps) = (f64::MAX, 0);
    let both = (first..first + seeds).flat_map(|seed| [(seed, false), (SEEDS + seed, true)]);
    for (seed, limited) in both {
        let (scenario, bound) = contended_scenario(seed, limited);
        let mut world = SimulatedWorld::new(scenario);
        if let Err(failure) = world.run_until(Millis::secs(600)) {
            panic!("{failure}");
        }
        let longest = world.longest_wait();
        assert!(longest <= bound, "seed {seed}: a model waited {longest}, the turns before it allow {bound}");
        tightest = tightest.min(bound.0 as f64 / longest.0.max(1) as f64);
        swaps += world.tally().count("swaps");
    }
    println!(
        "{} worlds from seed {first} on, {swaps} swaps; the tightest bound is {tightest:.3} of its longest wait",
        seeds * 2
    );
    assert!(swaps > seeds, "the models did not get in each other's way: {swaps} swaps");
    assert!(tightest <= MAX_BOUND_RATIO, "the tightest bound is {tightest:.3} times what a model waited");
}

/// Models that each fill the accelerator and always have requests, and the longest allowed wait. `limited`: each serves
/// few requests at a time, so a model that ends its turn leaves an old backlog behind.
fn contended_scenario(seed: u64, limited: bool) -> (Scenario, Millis) {
    let mut random = SplitMix64::new(seed.wrapping_mul(7919));
    let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    settings.queue.max_wait = Millis::secs(3600);
    let turns = &mut settings.turns;
    turns.max_turn = Millis(random.between(2000, 20_000));
    turns.residency = Millis(random.between(0, turns.max_turn.0));
    turns.drain_deadline = Millis(random.between(500, 8000));
    let cut = random.chance(0.5);
    turns.on_deadline = if cut { DrainDeadlinePolicy::Cut } else { DrainDeadlinePolicy::Wait };
    let turns = *turns;
    let models = random.between(2, 5);
    let longest = Millis(random.between(500, 30_000));
    let mut scenario = Scenario::new(&format!("crowd {seed}"), configuration(1, models, settings));
    scenario.seed = seed;
    scenario.hardware = HardwareProfile {
        // A start takes no longer than a wake, so one bound holds from the first turn on.
        start_time: (Millis(200), Millis(900)),
        wake_time: (Millis(200), Millis(900)),
        sleep_time: (Millis(100), Millis(700)),
        ..HardwareProfile::default()
    };
    let hardware = scenario.hardware;
    if limited {
        for spec in &mut scenario.configuration.models {
            spec.max_concurrency = u32::try_from(random.between(1, 3)).ok();
        }
    }
    scenario.sources = (0..models).map(|n| source(&format!("model-{n}"), longest, &mut random)).collect();
    // A drain ends with its longest stream, or at its deadline if the deadline cuts.
    let drain = if cut { longest.min(turns.drain_deadline) } else { longest };
    let swap = |drain: Millis| drain + hardware.sleep_time.1 + hardware.wake_time.1 + SLACK;
    // A model whose gate has just closed waits for its own drain and sleep, a whole turn of each other model, and its
    // own wake. A full model granted its last lease some time before; that lease ends within one exchange, and the
    // drain ends with it.
    let own_wait = swap(if limited { longest } else { drain });
    let others = Millis((turns.max_turn + swap(drain)).0 * (models - 1));
    (scenario, own_wait + others)
}

/// A higher band keeps its model while it uses it. Once it pauses, the lower band gets a whole turn for the swap.
#[test]
fn a_lower_band_is_served_in_the_pauses_of_a_higher_one() {
    let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    settings.queue.max_wait = Millis::secs(3600);
    settings.turns.max_turn = Millis::secs(10);
    settings.turns.residency = Millis::ZERO;
    let mut scenario = Scenario::new("two bands", configuration(1, 2, settings));
    scenario.configuration.models[0].priority = 1;
    scenario.hardware.wake_time = (Millis(300), Millis(300));
    let mut random = SplitMix64::new(5);
    scenario.sources = (0..2).map(|n| source(&format!("model-{n}"), Millis::secs(2), &mut random)).collect();
    scenario.sources[0].pattern = ArrivalPattern::Poisson { mean_gap: Millis::secs(3) };
    scenario.sources[1].pattern = ArrivalPattern::Poisson { mean_gap: Millis::secs(1) };
    let mut world = SimulatedWorld::new(scenario);
    if let Err(failure) = world.run_until(Millis::secs(600)) {
        panic!("{failure}");
    }
    let (wakes, swaps) = (world.tally().count("wakes"), world.tally().count("swaps"));
    println!("{swaps} swaps, {wakes} wakes, longest wait {}", world.longest_wait());
    // A lower band evicted before it has served would have waited all the time.
    assert!(world.longest_wait() < Millis::secs(60), "a model waited {}", world.longest_wait());
    assert!(swaps <= 200, "{swaps} swaps in ten minutes");
}

fn fixed(name: &str, memory: Bytes) -> ModelSpec {
    ModelSpec { accelerators: AcceleratorRequirement::Ids(vec!["gpu-0".into()]), ..model(name, memory) }
}

fn run(scenario: Scenario) -> SimulatedWorld {
    let mut world = SimulatedWorld::new(scenario);
    if let Err(failure) = world.run_until(Millis::secs(200)) {
        panic!("{failure}");
    }
    world
}

fn ask(model: &str) -> ScenarioAction {
    ScenarioAction::SendRequest(SimulatedRequest::stream(model, Millis(200)))
}

#[test]
fn a_sleeper_whose_place_is_taken_for_good_starts_elsewhere() {
    let mut configuration = configuration(2, 1, FleetSettings::default());
    configuration.models = vec![model("moves", Bytes::gib(20)), fixed("stays", Bytes::gib(20))];
    let scenario = Scenario::new("taken for good", configuration)
        .at(Millis::secs(1), ask("moves"))
        .at(
            Millis::secs(30),
            ScenarioAction::OperatorAction("moves".into(), OperatorAction::Sleep { level: None }),
        )
        .at(Millis::secs(60), ScenarioAction::OperatorAction("stays".into(), OperatorAction::Pin))
        .at(Millis::secs(120), ask("moves"));
    let world = run(scenario);
    assert_eq!(world.tally().count("requests served"), 2);
    assert_eq!(world.tally().count("launches"), 3, "it was started anew");
}

/// Each start succeeds, so no start backs off: each waits only for the previous engine's stop.
#[test]
fn an_engine_that_never_sleeps_or_wakes_starts_at_once_each_time() {
    for (sleep_refused, sleep_hangs, wake_refused) in [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)] {
        let mut settings = FleetSettings::default();
        settings.timeouts.sleep = Millis::secs(1);
        let mut configuration = configuration(1, 1, settings);
        configuration.models[0].idle.sleep_after = Some(Millis::secs(2));
        let mut scenario = Scenario::new("sleepless", configuration);
        scenario.fault_rates.sleep_refused = sleep_refused;
        scenario.fault_rates.sleep_hangs = sleep_hangs;
        scenario.fault_rates.wake_refused = wake_refused;
        // Each request arrives as soon as the previous engine is certainly gone.
        let every = if sleep_hangs > 0.0 { 50 } else { 14 };
        for n in 0..8 {
            scenario = scenario.at(Millis::secs(1 + n * every), ask("model-0"));
        }
        let mut world = SimulatedWorld::new(scenario);
        if let Err(failure) = world.run_until(Millis::secs(1 + 8 * every)) {
            panic!("{failure}");
        }
        assert_eq!(world.tally().count("requests served"), 8);
        assert!(world.longest_wait() < Millis::secs(10), "{}", world.longest_wait());
    }
}

/// The engine is started once. An operator's order puts it to sleep only once, as if the engine had been woken
/// afterwards.
#[test]
fn an_engine_that_is_told_to_sleep_and_stays_awake_serves_who_comes_meanwhile() {
    for order in [false, true] {
        let mut configuration = configuration(1, 1, FleetSettings::default());
        configuration.models[0].idle.sleep_after = (!order).then_some(Millis::secs(20));
        let mut scenario = Scenario::new("stays awake", configuration)
            .at(Millis::secs(1), ask("model-0"))
            .at(Millis::secs(23), ask("model-0"));
        if order {
            let sleep = OperatorAction::Sleep { level: None };
            scenario = scenario.at(Millis(22_500), ScenarioAction::OperatorAction("model-0".into(), sleep));
        }
        scenario.hardware.start_time = (Millis::secs(1), Millis::secs(1));
        scenario.fault_rates.sleep_denied = 1.0;
        let world = run(scenario);
        let tally = |what| world.tally().count(what);
        assert_eq!(tally("requests served"), 2);
        assert_eq!((tally("launches"), tally("called back from a sleep that was denied")), (1, 1));
        assert!(world.longest_wait() <= SLEEP_DENIAL_TIMEOUT + SLACK, "{}", world.longest_wait());
        // The idle timer orders a second sleep, after which no request arrives.
        let (sleeps, stops) = if order { (1, 0) } else { (2, 1) };
        assert_eq!((tally("sleeps"), tally("stops")), (sleeps, stops));
        assert_eq!(tally("operations done"), u64::from(order));
    }
}

/// The model that has waited for the memory goes first, even before requests for the evicted model.
#[test]
fn an_engine_that_makes_room_and_stays_awake_is_stopped() {
    let mut scenario = Scenario::new("stays awake in the way", configuration(1, 2, FleetSettings::default()))
        .at(Millis::secs(1), ask("model-0"))
        .at(Millis::secs(60), ask("model-1"))
        .at(Millis::secs(61), ask("model-0"));
    scenario.fault_rates.sleep_denied = 1.0;
    let world = run(scenario);
    let tally = |what| world.tally().count(what);
    assert_eq!((tally("requests served"), tally("launches")), (3, 3));
    assert_eq!(tally("called back from a sleep that was denied"), 0);
}

#[test]
fn what_can_never_be_had_is_not_kept_from_others() {
    let mut configuration = configuration(1, 1, FleetSettings::default());
    let large = fixed("large", Bytes::gib(20));
    configuration.models = vec![fixed("pinned", Bytes::gib(10)), large, fixed("small", Bytes::gib(4))];
    configuration.models[0].pinned = true;
    let scenario = Scenario::new("out of reach", configuration)
        .at(Millis::secs(60), ask("large"))
        .at(Millis::secs(61), ask("small"));
    let world = run(scenario);
    assert_eq!(world.tally().count("requests served"), 1);
}

/// It is never evicted: it falls asleep when it is idle, and then keeps its residue for good.
#[test]
fn a_residue_that_never_goes_is_not_kept_from_others() {
    let mut configuration = configuration(1, 1, FleetSettings::default());
    configuration.models =
        [("stays", 10), ("large", 23), ("small", 4)].map(|(name, gib)| fixed(name, Bytes::gib(gib))).to_vec();
    let stays = &mut configuration.models[0];
    stays.memory.asleep = Bytes::gib(2);
    (stays.eviction, stays.idle.sleep_after) = (Some(EvictionPolicy::Never), Some(Millis::secs(20)));
    let scenario = Scenario::new("a residue that never goes", configuration)
        .at(Millis::secs(1), ask("stays"))
        .at(Millis::secs(60), ask("large"))
        .at(Millis::secs(61), ask("small"));
    assert_eq!(run(scenario).tally().count("requests served"), 2, "large can never start");
}

/// It never falls asleep by itself, and others may have the memory of a sleeper at once.
#[test]
fn a_sleeper_with_a_cooldown_counts_for_those_who_wait() {
    let mut configuration = configuration(1, 1, FleetSettings::default());
    configuration.models = [("sleeper", 10), ("busy", 10), ("large", 22), ("small", 8)]
        .map(|(name, gib)| fixed(name, Bytes::gib(gib)))
        .to_vec();
    configuration.models[0].memory.asleep = Bytes::gib(3);
    configuration.models[0].eviction = Some(EvictionPolicy::Cooldown);
    let sleep = OperatorAction::Sleep { level: None };
    let scenario = Scenario::new("a sleeper with a cooldown", configuration)
        .at(Millis::secs(1), ask("sleeper"))
        .at(Millis::secs(30), ScenarioAction::OperatorAction("sleeper".into(), sleep))
        .at(Millis::secs(40), ScenarioAction::SendRequest(SimulatedRequest::stream("busy", Millis::secs(60))))
        .at(Millis::secs(60), ask("large"))
        .at(Millis::secs(61), ask("small"));
    let mut world = SimulatedWorld::new(scenario);
    world.run_until(Millis::secs(90)).unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(world.tally().count("requests served"), 1, "what is free is kept for the one that came first");
    world.run_until(Millis::secs(200)).unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(world.tally().count("requests served"), 4);
}

/// A sleeper of 14Gi that keeps 2Gi, beside a model of 12Gi. Who asks for it again stands before a model of 11Gi in line.
fn sleeper_in_line(taken: (Millis, ScenarioAction)) -> SimulatedWorld {
    let mut configuration = configuration(1, 1, FleetSettings::default());
    configuration.models = [("stays", 12), ("sleeper", 14), ("behind", 11)]
        .map(|(name, gib)| fixed(name, Bytes::gib(gib)))
        .to_vec();
    configuration.models[1].memory.asleep = Bytes::gib(2);
    let sleep = OperatorAction::Sleep { level: None };
    let scenario = Scenario::new("a sleeper in line", configuration)
        .at(Millis::secs(1), ask("sleeper"))
        .at(Millis::secs(30), ScenarioAction::OperatorAction("sleeper".into(), sleep))
        .at(taken.0, taken.1)
        .at(Millis::secs(60), ask("sleeper"))
        .at(Millis::secs(61), ask("behind"));
    run(scenario)
}

#[test]
fn a_sleeper_that_cannot_wake_keeps_no_memory_from_those_behind_it() {
    let pin = ScenarioAction::OperatorAction("stays".into(), OperatorAction::Pin);
    let world = sleeper_in_line((Millis::secs(40), pin));
    assert_eq!(world.tally().count("requests served"), 2, "of three");
}

#[test]
fn a_sleeper_that_will_wake_is_not_stopped_for_those_behind_it() {
    let long = SimulatedRequest::stream("stays", Millis::secs(60));
    let world = sleeper_in_line((Millis::secs(40), ScenarioAction::SendRequest(long)));
    assert_eq!(world.tally().count("requests served"), 4);
    assert_eq!((world.tally().count("launches"), world.tally().count("wakes")), (3, 1));
}

fn source(model: &str, longest: Millis, random: &mut SplitMix64) -> RequestSource {
    let behaviour = ClientBehaviour { exchange: (Millis(50), longest), ..ClientBehaviour::default() };
    let gap = Millis(random.between(200, 8000));
    RequestSource {
        model: model.into(),
        pattern: ArrivalPattern::Poisson { mean_gap: gap },
        behaviour,
        offset: Millis::ZERO,
    }
}

/// The end-to-end test's world: six models, two accelerators that hold two each, two hundred clients for a minute.
#[test]
fn turns_swap_far_less_than_first_come_first_served() {
    let arrivals = recorded_trace();
    let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    settings.turns.residency = Millis::secs(1);
    settings.turns.max_turn = Millis::secs(3);
    settings.turns.drain_deadline = Millis::secs(2);
    settings.turns.on_deadline = DrainDeadlinePolicy::Cut;
    let mut scenario = Scenario::new("two hundred clients", configuration(2, 6, settings));
    let (wake, sleep) = (Millis(50), Millis(50));
    scenario.hardware = HardwareProfile {
        start_time: (Millis(300), Millis(300)),
        wake_time: (wake, wake),
        sleep_time: (sleep, sleep),
        first_byte: (Millis(5), Millis(5)),
        ..HardwareProfile::default()
    };
    for arrival in &arrivals {
        let client = u64::from(arrival.client) + 1;
        let request = SimulatedRequest {
            client,
            ..SimulatedRequest::stream(&format!("model-{}", arrival.model), arrival.stream)
        };
        scenario = scenario.at(arrival.at, ScenarioAction::SendRequest(request));
    }
    let mut world = SimulatedWorld::new(scenario);
    if let Err(failure) = world.run_until(Millis::secs(120)) {
        panic!("{failure}");
    }
    let swaps = world.tally().count("swaps");
    let fcfs_outcome = fcfs::serve(&arrivals, 4, wake + sleep);
    let (requests, mut waits) = (arrivals.len(), world.waits("").to_vec());
    // Requests served at once count as no wait.
    waits.resize(requests, Millis::ZERO);
    waits.sort_unstable();
    let most = waits[requests * 99 / 100];
    println!("99 of 100 waited at most {most}");
    println!(
        "{} requests: {swaps} swaps, longest wait {}; first come, first served: {} swaps, longest wait {}",
        arrivals.len(),
        world.longest_wait(),
        fcfs_outcome.swaps,
        fcfs_outcome.longest_wait
    );
    assert_eq!(world.tally().count("requests served"), arrivals.len() as u64);
    assert!(swaps * 5 <= fcfs_outcome.swaps, "{swaps} swaps against {}", fcfs_outcome.swaps);
    assert!(most <= MAX_P99_WAIT, "one in a hundred waited longer than {MAX_P99_WAIT}: {most}");
}

/// Returns the recorded trace, which the end-to-end test plays against real processes. It must equal its generator's
/// output.
fn recorded_trace() -> Vec<trace::TraceArrival> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/gateway/tests/data/trace-200.csv");
    let arrivals = trace::open_loop(1, 200, 6, 60);
    if std::env::var_os("ROUSE_RECORD").is_some() {
        std::fs::write(path, trace::write(&arrivals)).expect("the trace is written");
    }
    let text = std::fs::read_to_string(path).expect("the trace is on file");
    let on_file = trace::read(&text).expect("the trace can be read");
    assert_eq!(on_file, arrivals, "ROUSE_RECORD=1 writes it anew");
    on_file
}
