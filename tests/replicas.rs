//! Several engines of one model: spares never cost another model its turn, and are replaced when they are lost.

use std::collections::BTreeMap;

use rouse::{
    engine::{
        last_outcome::{EngineDiagnostics, FailureRecord, FailureStage, LastFailure},
        state::LifecycleState,
    },
    fault::FailureCause,
    fleet::{
        Fleet,
        command::{CloseReason, Command},
        event::{AdoptedEngine, CanaryVerdict, Event, OperatorAction},
        report::ModelState,
    },
    journal,
    model::{
        Accelerator, EngineId, EngineMemory, FleetConfig, FleetSettings, ModelSpec, SleepLevel,
        SleepLevelPolicy,
    },
    sim::{Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld, simulated_model},
    units::{Bytes, Generation, Millis, Tick},
};

fn model(name: &str, replicas: u32) -> ModelSpec {
    ModelSpec {
        replicas,
        can_sleep: false,
        ..simulated_model(
            name,
            EngineMemory { awake: Bytes::gib(20), asleep: Bytes::mib(256), host: Bytes::gib(1) },
        )
    }
}

/// Accelerators that each hold one engine.
fn base_scenario(gpus: u64, models: Vec<ModelSpec>) -> Scenario {
    let settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    let gpu =
        |n| Accelerator { metered: true, ..Accelerator::new(format!("gpu-{n}").into(), Bytes::gib(24)) };
    Scenario::new("replicas", FleetConfig { settings, accelerators: (0..gpus).map(gpu).collect(), models })
}

fn send_request(model: &str, lasts: Millis) -> ScenarioAction {
    ScenarioAction::SendRequest(SimulatedRequest::stream(model, lasts))
}

fn engine(model: &str, replica: u32) -> EngineId {
    EngineId::new(model.into(), replica)
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

fn was_swapped_out(world: &SimulatedWorld, of: &EngineId) -> bool {
    commands(world).iter().any(
        |(_, c)| matches!(c, Command::CloseGate { engine, reason: CloseReason::Turn, .. } if engine == of),
    )
}

fn awake_count(world: &SimulatedWorld, model: &str) -> usize {
    let engines = world.fleet().engines();
    engines.filter(|e| e.id.model.as_str() == model && e.state == LifecycleState::Awake).count()
}

#[test]
fn a_spare_that_still_starts_makes_room_before_the_engine_in_use() {
    let mut scenario = base_scenario(2, vec![model("qwen", 2), model("llama", 1)]);
    scenario.configuration.settings.turns.max_turn = Millis::secs(20);
    let scenario = scenario
        .at(Millis::secs(1), send_request("llama", Millis::secs(1)))
        .at(Millis(1100), send_request("qwen", Millis::secs(900)))
        .at(Millis::secs(40), ScenarioAction::KillEngine(engine("llama", 0)))
        .at(Millis(40_500), send_request("llama", Millis::secs(1)));
    let world = run(scenario, 120);
    assert!(!was_swapped_out(&world, &engine("qwen", 0)), "its stream goes on");
    assert_eq!(world.tally().count("requests served"), 2);
    assert!(world.longest_wait() < Millis::secs(12), "{}", world.longest_wait());
}

#[test]
fn nobody_waits_for_a_spare_to_be_ready_before_it_is_put_away() {
    let mut scenario = base_scenario(2, vec![model("qwen", 2), model("llama", 1)])
        .at(Millis::secs(1), send_request("qwen", Millis::secs(300)))
        .at(Millis::secs(5), send_request("llama", Millis::secs(1)));
    scenario.hardware.start_time = (Millis::secs(50), Millis::secs(50));
    let world = run(scenario, 120);
    assert_eq!(world.tally().count("requests served"), 1);
    assert!(world.longest_wait() < Millis::secs(52), "{}", world.longest_wait());
    let failed = world.fleet().engines().filter(|e| e.failures > 0).count();
    assert_eq!(failed, 0, "to be put away is no failure");
}

/// A stream of three seconds every second, to a model without a limit.
fn with_streams(mut scenario: Scenario, until: u64) -> Scenario {
    for second in 1..until {
        scenario = scenario.at(Millis::secs(second), send_request("qwen", Millis::secs(3)));
    }
    scenario
}

#[test]
fn a_replica_that_died_comes_back_while_its_model_is_in_use() {
    for replica in 0..2 {
        let scenario = with_streams(base_scenario(2, vec![model("qwen", 2)]), 60)
            .at(Millis::secs(30), ScenarioAction::KillEngine(engine("qwen", replica)));
        let world = run(scenario, 60);
        assert_eq!(awake_count(&world, "qwen"), 2, "#{replica} died");
    }
}

/// The spare is killed whenever it has begun to start.
#[test]
fn a_spare_that_never_starts_keeps_nobody_waiting_and_is_tried_less_and_less() {
    let mut scenario = with_streams(base_scenario(2, vec![model("qwen", 2), model("llama", 1)]), 1200)
        .at(Millis::secs(400), send_request("llama", Millis::secs(1)));
    for second in 1..240 {
        scenario = scenario.at(Millis(second * 5000 + 10), ScenarioAction::KillEngine(engine("qwen", 1)));
    }
    let world = run(scenario, 1200);
    let launches = commands(&world).into_iter().filter(|(at, c)| {
        *at > 600.0 && matches!(c, Command::Launch { engine: e, .. } if *e == engine("qwen", 1))
    });
    let launches = launches.count();
    assert!(launches <= 3, "{launches} in ten minutes");
    assert!(!was_swapped_out(&world, &engine("qwen", 0)));
    assert!(world.longest_wait() < Millis::secs(12), "{}", world.longest_wait());
}

#[test]
fn a_spare_that_does_not_start_in_time_has_failed() {
    let mut scenario = base_scenario(2, vec![model("qwen", 2)])
        .at(Millis::secs(1), send_request("qwen", Millis::secs(300)))
        .at(Millis(1500), ScenarioAction::HangEngine(engine("qwen", 1)));
    scenario.hardware.start_time = (Millis::secs(20), Millis::secs(20));
    let world = run(scenario, 110);
    let spare = world.fleet().engine(&engine("qwen", 1)).expect("it is configured");
    assert!(spare.failures > 0, "{}", spare.state);
}

#[test]
fn a_generation_is_used_once() {
    let mut scenario = base_scenario(2, vec![model("qwen", 2), model("llama", 1)]);
    let both = scenario.configuration.clone();
    let (mut one, mut none) = (both.clone(), both.clone());
    one.models[0].replicas = 1;
    none.models.remove(0);
    for (round, other) in [one, none].into_iter().enumerate() {
        let at = 100 * round as u64;
        scenario = scenario
            .at(Millis::secs(at + 1), send_request("qwen", Millis::secs(80)))
            .at(Millis::secs(at + 20), ScenarioAction::ReloadConfig(Box::new(other)))
            .at(Millis::secs(at + 95), ScenarioAction::ReloadConfig(Box::new(both.clone())));
    }
    let scenario = scenario.at(Millis::secs(201), send_request("qwen", Millis::secs(20)));
    let world = run(scenario, 230);
    let mut last: BTreeMap<EngineId, Generation> = BTreeMap::new();
    let mut launches = 0;
    for (at, command) in commands(&world) {
        let Command::Launch { engine, generation, .. } = command else { continue };
        let before = last.insert(engine.clone(), generation);
        assert!(before.is_none_or(|before| before < generation), "{engine} {generation} at {at}");
        launches += 1;
    }
    assert!(launches >= 5, "{launches} launches");
}

#[test]
fn a_replica_that_never_failed_starts_while_the_other_is_left_alone() {
    let mut scenario = base_scenario(1, vec![model("qwen", 2), model("llama", 1)])
        .at(Millis::secs(1), send_request("llama", Millis(100)))
        .at(Millis::secs(60), send_request("qwen", Millis(100)));
    // The first engine is killed repeatedly.
    for n in 0..200 {
        scenario = scenario.at(Millis(60_000 + n * 500), ScenarioAction::KillEngine(engine("qwen", 0)));
    }
    let world = run(scenario, 120);
    assert_eq!(world.tally().count("requests served"), 2);
}

#[test]
fn a_leader_that_stops_answering_gives_the_lead_to_one_that_answers() {
    let scenario = with_streams(base_scenario(2, vec![model("qwen", 2), model("llama", 1)]), 120)
        .at(Millis::secs(30), ScenarioAction::HangEngine(engine("qwen", 0)))
        .at(Millis::secs(37), send_request("llama", Millis::secs(1)));
    let world = run(scenario, 120);
    assert!(!was_swapped_out(&world, &engine("qwen", 1)), "the healthy one goes on");
}

/// `llama` dies repeatedly while it serves, so it backs off for seconds though its requests wait.
#[test]
fn a_place_that_is_waited_for_is_not_given_to_a_spare_while_its_model_is_left_alone() {
    let mut narrow = model("llama", 1);
    narrow.max_concurrency = Some(1);
    let mut scenario = with_streams(base_scenario(2, vec![model("qwen", 2), narrow]), 100);
    for n in 0..6 {
        scenario = scenario.at(Millis(500 + n), send_request("llama", Millis::secs(1000)));
    }
    for at in [20, 40, 60] {
        scenario = scenario.at(Millis::secs(at), ScenarioAction::KillEngine(engine("llama", 0)));
    }
    let world = run(scenario, 100);
    let launched = |id: &EngineId| {
        let launches = commands(&world);
        launches.iter().filter(|(_, c)| matches!(c, Command::Launch { engine, .. } if engine == id)).count()
    };
    assert_eq!(launched(&engine("llama", 0)), 4);
    assert_eq!(launched(&engine("qwen", 1)), 0, "the place is kept");
}

/// At least two of three engines must run: each of them replaces an idle model and is never evicted again.
#[test]
fn so_many_engines_as_are_to_run_start_at_once_and_stay() {
    let mut least = model("qwen", 3);
    least.min_replicas = 2;
    least.idle.sleep_after = Some(Millis::secs(5));
    let mut scenario = base_scenario(2, vec![model("llama", 1), least]);
    scenario.configuration.settings.turns.residency = Millis::secs(5);
    let before = scenario.configuration.clone();
    scenario.configuration.models.truncate(1);
    let scenario = scenario
        .at(Millis::secs(1), send_request("llama", Millis(500)))
        .at(Millis::secs(20), ScenarioAction::ReloadConfig(Box::new(before)))
        .at(Millis::secs(60), send_request("llama", Millis(500)));
    let world = run(scenario, 120);
    let launched = |replica| {
        let first = commands(&world)
            .into_iter()
            .find(|(_, c)| matches!(c, Command::Launch { engine: id, .. } if *id == engine("qwen", replica)));
        first.map(|(at, _)| at)
    };
    assert!(launched(0).is_some_and(|at| (20.0..21.0).contains(&at)), "{:?}", launched(0));
    // Its accelerator belonged to another model, which is idle and past its residency.
    assert!(launched(1).is_some_and(|at| at < 25.0), "{:?}", launched(1));
    assert_eq!(launched(2), None, "nobody asked for a third");
    assert!(was_swapped_out(&world, &engine("llama", 0)));
    assert_eq!(awake_count(&world, "qwen"), 2, "unused for long, and there all the same");
    assert_eq!(awake_count(&world, "llama"), 0);
}

#[test]
fn an_engine_that_level_2_would_cost_its_adapters_sleeps_at_level_1_or_is_stopped() {
    for (room, levels) in [(64, &[SleepLevel::One][..]), (0, &[])] {
        let mut adapted = model("qwen", 1);
        adapted.can_sleep = true;
        adapted.idle.sleep_after = Some(Millis::secs(5));
        adapted.idle.level = SleepLevelPolicy::OneOrStop;
        let mut scenario =
            base_scenario(1, vec![adapted]).at(Millis::secs(1), send_request("qwen", Millis::secs(1)));
        scenario.configuration.settings.host_memory = Bytes::gib(room);
        let world = run(scenario, 60);
        let given = commands(&world);
        let slept = given.iter().filter_map(|(_, command)| match command {
            Command::Sleep { level, .. } => Some(*level),
            _ => None,
        });
        assert!(slept.eq(levels.iter().copied()), "{given:?}");
        assert_eq!(given.iter().any(|(_, c)| matches!(c, Command::Stop { .. })), room == 0, "{given:?}");
        let order = OperatorAction::Sleep { level: Some(SleepLevel::Two) };
        let refused = world.fleet().validate_action(&"qwen".into(), order);
        assert!(refused.as_ref().is_err_and(|why| why.contains("LoRA")), "{refused:?}");
    }
}

#[test]
fn a_start_that_failed_is_remembered_for_as_long_as_nobody_asks() {
    let mut scenario =
        base_scenario(1, vec![model("qwen", 1)]).at(Millis::secs(1), send_request("qwen", Millis::secs(1)));
    scenario.fault_rates.start_failed = 1.0;
    let mut world = SimulatedWorld::new(scenario);
    world.run_until(Millis::secs(60)).unwrap_or_else(|failure| panic!("{failure}"));
    let failed = world.fleet().last_failure(&"qwen".into()).expect("it failed");
    assert_eq!((&failed.cause, failed.count), (&FailureCause::CommandNotFound, 2));
    // An alert fires after five minutes.
    for minute in 1..=20 {
        world.run_until(Millis::secs(60 * minute)).unwrap_or_else(|failure| panic!("{failure}"));
        let fleet = world.fleet();
        let line = fleet.report(&fleet.plan(world.now())).models["qwen"].clone();
        assert_eq!(line.state, ModelState::Failed, "after {minute} minutes");
        assert!(line.reason.contains("(command_not_found), 2 failures in a row"), "{}", line.reason);
        assert_eq!(fleet.last_failure(&"qwen".into()).as_ref(), Some(&failed));
    }
}

#[test]
fn a_failure_before_a_restart_is_remembered_until_the_engine_serves() {
    const ADOPTED: Generation = Generation(7);
    let (now, failed_at) = (Tick(1_000_000), Tick(500_000));
    let names = ["cold", "starting", "dying", "awake", "changed"];
    let models = names.iter().map(|name| model(name, 1)).collect();
    let configuration = Box::new(base_scenario(5, models).configuration);
    let mut fleet = Fleet::new();
    fleet.on(&Event::Configured { configuration }, now);
    for (name, gpu, ready) in
        [("starting", "gpu-1", false), ("dying", "gpu-2", false), ("awake", "gpu-3", true)]
    {
        let found = AdoptedEngine {
            address: ([127, 0, 0, 1], 1).into(),
            accelerators: vec![gpu.into()],
            asleep: None,
            ready,
            fingerprint: 1,
            last_lease_end: Tick(0),
            started: now,
        };
        fleet.on(&Event::Adopted { engine: engine(name, 0), generation: ADOPTED, found }, now);
    }
    fleet.take_routing_changes();
    let failure = FailureRecord {
        stage: FailureStage::Starting,
        cause: FailureCause::Exited(3),
        count: 2,
        diagnostics: EngineDiagnostics::default(),
    };
    for (name, fingerprint) in
        [("cold", 1), ("starting", 1), ("dying", 1), ("awake", 1), ("changed", 2), ("removed", 1)]
    {
        let (engine, failure) = (engine(name, 0), failure.clone());
        fleet.on(&Event::FailureRestored { engine, fingerprint, at: failed_at, failure }, now);
    }
    let rerouted = fleet.take_routing_changes().models;
    assert_eq!(rerouted.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["cold", "dying", "starting"]);
    fleet.on(&Event::AdoptionDone, now);
    let restored = LastFailure { at: failed_at, cause: FailureCause::Exited(3), count: 2 };
    for (name, expected) in [
        ("cold", Some(&restored)),
        ("starting", Some(&restored)),
        ("awake", None),
        ("changed", None),
        ("removed", None),
    ] {
        assert_eq!(fleet.last_failure(&name.into()).as_ref(), expected, "{name}");
    }
    let plan = fleet.plan(now);
    let cold = fleet.report(&plan).models["cold"].clone();
    assert_eq!(cold.state, ModelState::Failed);
    let words =
        "not running: last start failed at 00:08:20.000: exit status 3 (exited:3), 2 failures in a row";
    assert!(cold.reason.starts_with(words), "{}", cold.reason);
    fleet.issued(&plan.commands, now);

    // The next failure counts on, and what its engine showed is not said of the earlier one.
    let (dying, diagnostics) = (engine("dying", 0), EngineDiagnostics::from_system("of this run"));
    fleet.on(&Event::Diagnostics { engine: dying.clone(), generation: ADOPTED, diagnostics }, now);
    assert_eq!(fleet.last_outcome(&dying.model).map(|past| past.diagnostics()).as_deref(), Some(""));
    let cause = FailureCause::Exited(1);
    fleet.on(&Event::Gone { engine: dying.clone(), generation: ADOPTED, cause: cause.clone() }, now);
    assert_eq!(fleet.last_failure(&dying.model), Some(LastFailure { at: now, cause, count: 3 }));

    let starting = engine("starting", 0);
    fleet.on(&Event::Ready { engine: starting.clone(), generation: ADOPTED }, now);
    let probe = fleet.plan(now);
    fleet.issued(&probe.commands, now);
    assert!(fleet.last_failure(&starting.model).is_some(), "it has not served yet");
    let verdict = CanaryVerdict::Passed;
    fleet.on(&Event::Canary { engine: starting.clone(), generation: ADOPTED, verdict }, now);
    assert_eq!(fleet.last_failure(&starting.model), None);
}

#[test]
fn one_that_lost_its_adapters_in_its_sleep_is_started_anew_and_not_woken() {
    let mut deep = model("qwen", 1);
    deep.can_sleep = true;
    deep.idle.sleep_after = Some(Millis::secs(5));
    deep.idle.level = SleepLevelPolicy::Two;
    let scenario = base_scenario(1, vec![deep]).at(Millis::secs(1), send_request("qwen", Millis::secs(1)));
    let mut adapted = scenario.configuration.clone();
    adapted.models[0].idle.level = SleepLevelPolicy::OneOrStop;
    let scenario = scenario
        .at(Millis::secs(60), ScenarioAction::ReloadConfig(Box::new(adapted)))
        .at(Millis::secs(80), send_request("qwen", Millis::secs(1)));
    let given = commands(&run(scenario, 160));
    let slept = given.iter().position(|(_, c)| matches!(c, Command::Sleep { level: SleepLevel::Two, .. }));
    let (before, after) = given.split_at(slept.expect("it was asleep at level 2"));
    let launched = |part: &[(f64, Command)]| part.iter().any(|(_, c)| matches!(c, Command::Launch { .. }));
    assert!(launched(before) && launched(after), "{given:?}");
    assert!(!given.iter().any(|(_, c)| matches!(c, Command::Wake { .. })), "{given:?}");
}

#[test]
fn an_order_against_what_is_to_run_is_refused_until_it_is_unpinned() {
    let mut least = model("qwen", 2);
    (least.min_replicas, least.can_sleep) = (1, true);
    least.idle.sleep_after = Some(Millis::secs(5));
    let scenario = base_scenario(1, vec![least]);
    let scenario =
        scenario.at(Millis::secs(30), ScenarioAction::OperatorAction("qwen".into(), OperatorAction::Unpin));
    let mut world = SimulatedWorld::new(scenario).with_journal();
    world.run_until(Millis::secs(20)).unwrap_or_else(|failure| panic!("{failure}"));
    let fleet = world.fleet();
    let report = fleet.report(&fleet.plan(world.now()));
    assert_eq!(report.models["qwen"].reason, "1 of 2 engines awake; kept by minReplicas 1");
    for order in [OperatorAction::Stop, OperatorAction::Sleep { level: None }] {
        let refused = fleet.validate_action(&"qwen".into(), order);
        assert!(refused.as_ref().is_err_and(|why| why.contains("minReplicas 1")), "{refused:?}");
    }
    world.run_until(Millis::secs(60)).unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(awake_count(&world, "qwen"), 0, "unpinned, it is put away like any other");
    assert_eq!(world.fleet().validate_action(&"qwen".into(), OperatorAction::Stop), Ok(()));
}
