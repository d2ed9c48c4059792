//! Rehearsed sleep: each process sleeps and wakes once where that harms nobody, and its memory stays its own meanwhile.

use rouse::{
    fleet::{
        command::{CloseReason, Command},
        event::OperatorAction,
    },
    journal,
    model::{
        Accelerator, AcceleratorRequirement, EngineId, EngineMemory, EvictionPolicy, FleetConfig,
        FleetSettings, IdlePolicy, ModelSpec, RehearsalPolicy, SleepLevelPolicy,
    },
    sim::{Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld, simulated_model},
    units::{Bytes, Millis},
};

/// How long an engine is idle before it rehearses its sleep.
const QUIET: Millis = Millis::secs(5);
/// The sleeps here are slow, so that requests can come during one.
const SLEEP_TIME: Millis = Millis::secs(5);

fn model(name: &str, rehearse: RehearsalPolicy) -> ModelSpec {
    let memory = EngineMemory { awake: Bytes::gib(20), asleep: Bytes::mib(256), host: Bytes::gib(4) };
    let spec = simulated_model(name, memory);
    ModelSpec { idle: IdlePolicy { level: SleepLevelPolicy::One, rehearse, ..spec.idle }, ..spec }
}

/// One accelerator, which holds one awake engine. A start takes 8 s, a wake 0.8 s.
fn base_scenario(models: Vec<ModelSpec>) -> Scenario {
    let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    settings.turns.residency = QUIET;
    let gpu = Accelerator { metered: true, ..Accelerator::new("gpu-0".into(), Bytes::gib(24)) };
    let mut scenario = Scenario::new("rehearsal", FleetConfig { settings, accelerators: vec![gpu], models });
    scenario.hardware.sleep_time = (SLEEP_TIME, SLEEP_TIME);
    scenario
}

fn request(model: &str) -> ScenarioAction {
    ScenarioAction::SendRequest(SimulatedRequest::stream(model, Millis::secs(1)))
}

fn engine(model: &str) -> EngineId {
    EngineId::new(model.into(), 0)
}

fn run(scenario: Scenario, lasts: u64) -> SimulatedWorld {
    let mut world = SimulatedWorld::new(scenario).with_journal();
    if let Err(failure) = world.run_until(Millis::secs(lasts)) {
        panic!("{failure}");
    }
    world
}

/// All issued commands, with seconds since the start of the world.
fn commands(world: &SimulatedWorld) -> Vec<(f64, Command)> {
    let mut all = Vec::new();
    let start = world.journal()[0].at();
    journal::replay(world.journal(), |at, _, plan, _| {
        let after = at.since(start).0 as f64 / 1000.0;
        all.extend(plan.commands.iter().map(|command| (after, command.clone())));
    });
    all
}

/// When commands of this kind were issued for the engine, in seconds.
fn times(world: &SimulatedWorld, of: &str, is_kind: fn(&Command) -> bool) -> Vec<f64> {
    let id = engine(of);
    let is_for_engine = |command: &Command| match command {
        Command::Sleep { engine, .. }
        | Command::Wake { engine, .. }
        | Command::Launch { engine, .. }
        | Command::Reserve { engine, .. }
        | Command::Shrink { engine, .. }
        | Command::Stop { engine, .. }
        | Command::Grant { engine, .. }
        | Command::CloseGate { engine, .. } => *engine == id,
        _ => false,
    };
    let all = commands(world).into_iter();
    all.filter(|(_, command)| is_for_engine(command) && is_kind(command)).map(|(at, _)| at).collect()
}

const fn is_sleep(command: &Command) -> bool {
    matches!(command, Command::Sleep { .. })
}

const fn is_wake(command: &Command) -> bool {
    matches!(command, Command::Wake { .. })
}

const fn is_launch(command: &Command) -> bool {
    matches!(command, Command::Launch { .. })
}

const fn is_shrink(command: &Command) -> bool {
    matches!(command, Command::Shrink { .. })
}

const fn is_grant(command: &Command) -> bool {
    matches!(command, Command::Grant { .. })
}

const fn is_rehearsal(command: &Command) -> bool {
    matches!(command, Command::CloseGate { reason: CloseReason::Rehearsal, .. })
}

#[test]
fn an_idle_engine_sleeps_and_wakes_once_and_keeps_its_memory() {
    let scenario = base_scenario(vec![model("qwen", RehearsalPolicy::Idle)])
        .at(Millis::secs(1), request("qwen"))
        .at(Millis::secs(60), request("qwen"));
    let world = run(scenario, 300);
    let (sleeps, wakes) = (times(&world, "qwen", is_sleep), times(&world, "qwen", is_wake));
    assert_eq!((sleeps.len(), wakes.len()), (1, 1), "{sleeps:?} {wakes:?}");
    assert!(sleeps[0] > 15.0 && wakes[0] < 21.0, "after its request and {QUIET}: {sleeps:?} {wakes:?}");
    let reserves = times(&world, "qwen", |command| matches!(command, Command::Reserve { .. }));
    assert_eq!((reserves.len(), times(&world, "qwen", is_shrink).len()), (1, 0), "its launch reserved it");
    let learned = world.fleet().learned()["qwen"];
    assert_eq!(learned.sleep, Some(SLEEP_TIME));
    assert_eq!(learned.times.sleep, None, "a rehearsal is no sleep in use");
    assert_eq!(learned.times.rehearsed_sleep.map(|known| known.mean), Some(SLEEP_TIME));
    assert!(learned.wake.is_some() && learned.start.is_some() && learned.peak.is_some());
    assert_eq!(world.tally().count("requests served"), 2);
}

#[test]
fn a_sleep_in_use_replaces_the_time_of_the_rehearsal() {
    let models = vec![model("qwen", RehearsalPolicy::Idle), model("llama", RehearsalPolicy::Never)];
    let scenario =
        base_scenario(models).at(Millis::secs(1), request("qwen")).at(Millis::secs(60), request("llama"));
    let world = run(scenario, 120);
    assert_eq!(times(&world, "qwen", is_sleep).len(), 2);
    let learned = world.fleet().learned()["qwen"];
    assert!(learned.times.sleep.is_some() && learned.sleep == learned.times.sleep.map(|known| known.mean));
    assert!(learned.times.rehearsed_sleep.is_some());
}

#[test]
fn a_rehearsal_measures_a_residue_beyond_the_declared_one() {
    let mut scenario =
        base_scenario(vec![model("qwen", RehearsalPolicy::Idle)]).at(Millis::secs(1), request("qwen"));
    scenario.fault_rates.oversized_residue = 1.0;
    let world = run(scenario, 60);
    assert_eq!(world.fleet().learned()["qwen"].residue, Some(Bytes::mib(512)));
    assert!(times(&world, "qwen", is_shrink).is_empty());
}

#[test]
fn a_new_engine_that_rehearses_at_its_start_gets_its_first_request_after_the_wake() {
    let scenario =
        base_scenario(vec![model("qwen", RehearsalPolicy::Start)]).at(Millis::secs(1), request("qwen"));
    let world = run(scenario, 120);
    let (sleeps, wakes) = (times(&world, "qwen", is_sleep), times(&world, "qwen", is_wake));
    let grants = times(&world, "qwen", is_grant);
    assert_eq!((sleeps.len(), wakes.len(), grants.len()), (1, 1, 1));
    assert!(sleeps[0] < wakes[0] && wakes[0] < grants[0], "{sleeps:?} {wakes:?} {grants:?}");
    // The start, the sleep, the wake, and two first exchanges.
    assert!(world.longest_wait() < Millis(14_500), "{}", world.longest_wait());
    let learned = world.fleet().learned()["qwen"];
    assert!(learned.peak.is_some(), "the meter was read while the engine had all its memory");
    assert_eq!(world.tally().count("requests served"), 1);
}

#[test]
fn a_request_during_a_rehearsal_is_served_after_the_wake_without_a_start() {
    let scenario = base_scenario(vec![model("qwen", RehearsalPolicy::Idle)])
        .at(Millis::secs(1), request("qwen"))
        .at(Millis::secs(17), request("qwen"));
    let world = run(scenario, 120);
    assert_eq!(world.tally().count("requests served"), 2);
    let wakes = times(&world, "qwen", is_wake);
    let grants = times(&world, "qwen", is_grant);
    assert_eq!((times(&world, "qwen", is_launch).len(), wakes.len(), grants.len()), (1, 1, 2));
    assert!(wakes[0] > 17.0 && grants[1] < wakes[0] + 1.0, "{wakes:?} {grants:?}");
}

#[test]
fn no_engine_rehearses_while_another_model_waits_for_its_memory() {
    for policy in [RehearsalPolicy::Start, RehearsalPolicy::Idle] {
        let models = vec![model("qwen", policy), model("llama", RehearsalPolicy::Never)];
        let scenario =
            base_scenario(models).at(Millis::secs(1), request("qwen")).at(Millis::secs(2), request("llama"));
        let world = run(scenario, 60);
        assert!(times(&world, "qwen", is_rehearsal).is_empty(), "{policy:?}");
        assert!(times(&world, "qwen", is_grant)[0] < 9.5, "{policy:?}: it serves as soon as it is ready");
        assert_eq!(world.tally().count("requests served"), 2, "{policy:?}");
    }
}

#[test]
fn a_rehearsal_becomes_a_sleep_when_another_model_asks_for_the_memory() {
    let models = vec![model("qwen", RehearsalPolicy::Idle), model("llama", RehearsalPolicy::Never)];
    let scenario =
        base_scenario(models).at(Millis::secs(1), request("qwen")).at(Millis::secs(17), request("llama"));
    let world = run(scenario, 60);
    assert_eq!(times(&world, "qwen", is_rehearsal).len(), 1);
    assert_eq!(times(&world, "qwen", is_sleep).len(), 1, "it sleeps already");
    assert!(times(&world, "qwen", is_wake).is_empty());
    assert_eq!(times(&world, "qwen", is_shrink).len(), 1, "it gives its memory up");
    assert_eq!(world.tally().count("requests served"), 2);
}

#[test]
fn an_engine_that_may_not_be_evicted_wakes_from_its_rehearsal_whoever_asks_for_the_memory() {
    for eviction in [EvictionPolicy::Never, EvictionPolicy::Cooldown] {
        let mut models = vec![model("qwen", RehearsalPolicy::Idle), model("llama", RehearsalPolicy::Never)];
        models[0].eviction = Some(eviction);
        models[0].idle.sleep_after = Some(Millis::secs(600));
        let scenario =
            base_scenario(models).at(Millis::secs(1), request("qwen")).at(Millis::secs(17), request("llama"));
        let world = run(scenario, 60);
        assert_eq!(times(&world, "qwen", is_rehearsal).len(), 1, "{eviction:?}");
        assert_eq!(times(&world, "qwen", is_wake).len(), 1, "{eviction:?}");
        assert_eq!(times(&world, "qwen", is_shrink).len(), 0, "{eviction:?}: it keeps its memory");
        assert_eq!(world.tally().count("requests served"), 1, "{eviction:?}");
    }
}

#[test]
fn an_engine_whose_dependency_goes_away_stays_asleep() {
    let mut needing = model("qwen", RehearsalPolicy::Idle);
    needing.dependencies = vec!["embedder".into()];
    let mut needed = model("embedder", RehearsalPolicy::Never);
    needed.accelerators = AcceleratorRequirement::Count(0);
    let scenario = base_scenario(vec![needing.clone(), needed]).at(Millis::secs(1), request("qwen"));
    let sleeps = times(&run(scenario.clone(), 60), "qwen", is_sleep);
    let [sleep] = sleeps[..] else { panic!("one rehearsal: {sleeps:?}") };
    // The configuration loses the dependency while the engine falls asleep.
    let asleep = Millis((sleep * 1000.0) as u64) + Millis::secs(1);
    let without = FleetConfig { models: vec![needing], ..scenario.configuration.clone() };
    let world = run(scenario.at(asleep, ScenarioAction::ReloadConfig(Box::new(without))), 60);
    assert_eq!(times(&world, "qwen", is_sleep), [sleep]);
    assert!(times(&world, "qwen", is_wake).is_empty(), "what it needs is gone");
    assert_eq!(times(&world, "qwen", is_shrink).len(), 1, "it gives its memory up");
}

#[test]
fn a_rehearsal_ends_for_a_request_for_a_model_that_depends_on_the_engine() {
    let mut needing = model("qwen", RehearsalPolicy::Never);
    needing.dependencies = vec!["embedder".into()];
    let mut needed = model("embedder", RehearsalPolicy::Idle);
    let mut starting = ModelSpec { explicit_memory: true, ..model("small", RehearsalPolicy::Never) };
    for (spec, gib) in [(&mut needing, 10), (&mut needed, 10), (&mut starting, 3)] {
        spec.memory.awake = Bytes::gib(gib);
    }
    let sleep = ScenarioAction::OperatorAction("qwen".into(), OperatorAction::Sleep { level: None });
    let mut scenario = base_scenario(vec![needing, needed, starting])
        .at(Millis::secs(1), request("qwen"))
        .at(Millis::secs(60), sleep);
    scenario.hardware.start_time = (Millis::secs(20), Millis::secs(20));
    // So the meter does not show the engine's release while another engine starts beside it.
    scenario.hardware.meter_per_process = false;
    let sleeps = times(&run(scenario.clone(), 120), "embedder", is_sleep);
    let [sleep] = sleeps[..] else { panic!("one rehearsal: {sleeps:?}") };
    let while_it_falls_asleep = Millis((sleep * 1000.0) as u64 + 1000);
    let scenario =
        scenario.at(while_it_falls_asleep, request("small")).at(while_it_falls_asleep, request("qwen"));
    let world = run(scenario, 160);
    assert_eq!(times(&world, "embedder", is_sleep), [sleep]);
    let wakes = times(&world, "embedder", is_wake);
    let [wake] = wakes[..] else { panic!("its dependent is asked for: {wakes:?}") };
    assert!(wake - sleep < 10.0, "it waited for the other's start of 20 s: {}", wake - sleep);
    assert_eq!(world.tally().count("requests served"), 3);
}

#[test]
fn without_host_memory_for_level_1_nothing_is_rehearsed() {
    for policy in [RehearsalPolicy::Start, RehearsalPolicy::Idle] {
        let mut scenario = base_scenario(vec![model("qwen", policy)]).at(Millis::secs(1), request("qwen"));
        scenario.configuration.settings.host_memory = Bytes::gib(3);
        let world = run(scenario, 120);
        assert_eq!(world.tally().count("sleeps"), 0, "{policy:?}");
    }
}

#[test]
fn an_engine_that_does_not_wake_starts_again_and_is_not_rehearsed_again() {
    let scenario = base_scenario(vec![model("qwen", RehearsalPolicy::Start)])
        .at(Millis::secs(1), request("qwen"))
        .at(Millis::secs(5), ScenarioAction::RefuseNextWake(engine("qwen")));
    let world = run(scenario, 120);
    assert_eq!(times(&world, "qwen", is_launch).len(), 2);
    assert_eq!(times(&world, "qwen", is_sleep).len(), 1);
    assert_eq!(world.tally().count("requests served"), 1);
}

#[test]
fn an_engine_that_stays_awake_when_it_should_sleep_goes_on_serving() {
    let mut scenario = base_scenario(vec![model("qwen", RehearsalPolicy::Idle)])
        .at(Millis::secs(1), request("qwen"))
        .at(Millis::secs(40), request("qwen"));
    scenario.fault_rates.sleep_denied = 1.0;
    let world = run(scenario, 120);
    assert_eq!((times(&world, "qwen", is_launch).len(), times(&world, "qwen", is_sleep).len()), (1, 1));
    assert_eq!((world.tally().count("stops"), world.tally().count("requests served")), (0, 2));
}

#[test]
fn each_process_rehearses_its_sleep() {
    let scenario = base_scenario(vec![model("qwen", RehearsalPolicy::Idle)])
        .at(Millis::secs(1), request("qwen"))
        .at(Millis::secs(60), ScenarioAction::KillEngine(engine("qwen")))
        .at(Millis::secs(70), request("qwen"));
    let world = run(scenario, 200);
    assert_eq!(times(&world, "qwen", is_launch).len(), 2);
    assert_eq!(times(&world, "qwen", is_rehearsal).len(), 2);
}

#[test]
fn a_restarted_gateway_does_not_rehearse_engines_that_it_finds() {
    let scenario = base_scenario(vec![model("qwen", RehearsalPolicy::Idle)])
        .at(Millis::secs(1), request("qwen"))
        .at(Millis::secs(12), ScenarioAction::RestartGateway);
    let world = run(scenario, 120);
    assert_eq!(world.tally().count("sleeps"), 0, "they may have slept before");
}
