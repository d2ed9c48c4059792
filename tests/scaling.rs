//! Targets of saturation: replicas start and end by them without taking what others use. Variants run side by side.

use std::collections::BTreeMap;

use rouse::{
    engine::state::LifecycleState,
    fleet::{
        Fleet,
        command::{CloseReason, Command},
        event::{AdoptedEngine, Event, LearnedMeasurements, PublishedEngine, PublishedEngineState},
        report::VariantReport,
    },
    model::{
        Accelerator, AcceleratorId, AcceleratorRequirement, DrainDeadlinePolicy, EngineId, EngineMemory,
        EngineVariant, FleetConfig, FleetSettings, ModelSpec, ProtectionPolicy, ScaleUpEviction, VariantName,
    },
    saturation::{FleetLoad, RefusalCause},
    sim::{Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld, SplitMix64, journal, simulated_model},
    units::{Bytes, Generation, Millis, Tick},
};

fn memory(gib: u64) -> EngineMemory {
    EngineMemory { awake: Bytes::gib(gib), asleep: Bytes::mib(256), host: Bytes::gib(1) }
}

fn model(name: &str, replicas: u32) -> ModelSpec {
    ModelSpec { replicas, can_sleep: false, ..simulated_model(name, memory(20)) }
}

/// A model whose targets say how many engines run.
fn scaled(name: &str, replicas: u32) -> ModelSpec {
    ModelSpec { scaled: true, ..model(name, replicas) }
}

/// Accelerators that each hold one engine.
fn base_scenario(gpus: usize, models: Vec<ModelSpec>) -> Scenario {
    with_accelerators(&vec![24; gpus], models)
}

fn with_accelerators(gib: &[u64], models: Vec<ModelSpec>) -> Scenario {
    let settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    let gpu = |(n, gib): (usize, &u64)| Accelerator {
        metered: true,
        ..Accelerator::new(format!("gpu-{n}").into(), Bytes::gib(*gib))
    };
    let accelerators = gib.iter().enumerate().map(gpu).collect();
    Scenario::new("scaling", FleetConfig { settings, accelerators, models })
}

fn request(model: &str, seconds: u64) -> ScenarioAction {
    ScenarioAction::SendRequest(SimulatedRequest::stream(model, Millis::secs(seconds)))
}

fn target(model: &str, replicas: u32) -> ScenarioAction {
    ScenarioAction::SetTarget(model.into(), VariantName::default(), replicas)
}

fn engine(model: &str, replica: u32) -> EngineId {
    EngineId::new(model.into(), replica)
}

fn simulated(scenario: Scenario) -> SimulatedWorld {
    SimulatedWorld::new(scenario).with_journal()
}

/// Runs the world until this many seconds after its start.
fn until(world: &mut SimulatedWorld, seconds: u64) {
    world.run_until(Millis::secs(seconds)).unwrap_or_else(|failure| panic!("{failure}"));
}

fn awake(world: &SimulatedWorld) -> Vec<String> {
    let awake = world.fleet().engines().filter(|e| e.state == LifecycleState::Awake);
    awake.map(|e| e.id.to_string()).collect()
}

fn variants(world: &SimulatedWorld, model: &str) -> BTreeMap<VariantName, VariantReport> {
    world.fleet().variants(&world.fleet().plan(world.now()), &model.into())
}

fn default_variant(world: &SimulatedWorld, model: &str) -> VariantReport {
    variants(world, model).remove(VariantName::DEFAULT).expect("it is configured")
}

/// All issued commands, with seconds since the start of the world, as the journal's text replays them.
fn commands(world: &SimulatedWorld) -> Vec<(f64, Command)> {
    let mut all = Vec::new();
    let start = world.journal()[0].at();
    let lines: Vec<journal::JournalLine> = world
        .journal()
        .iter()
        .map(|line| {
            serde_json::from_str(&journal::write(line).expect("a line is written")).expect("a line is read")
        })
        .collect();
    assert!(lines == world.journal(), "a journal is read as it was written");
    journal::replay(&lines, |at, _, plan, _| {
        let after = at.since(start).0 as f64 / 1000.0;
        all.extend(plan.commands.iter().map(|command| (after, command.clone())));
    });
    all
}

/// When the gate of this engine first closed for this reason.
fn closed_at(world: &SimulatedWorld, of: &EngineId, why: CloseReason) -> Option<f64> {
    let mut closed = commands(world).into_iter().filter(
        |(_, c)| matches!(c, Command::CloseGate { engine, reason, .. } if engine == of && *reason == why),
    );
    closed.next().map(|(at, _)| at)
}

fn launched(world: &SimulatedWorld) -> Vec<String> {
    let launches = commands(world).into_iter().filter_map(|(_, command)| match command {
        Command::Launch { engine, accelerators, bytes, .. } => {
            Some(format!("{engine} on {} with {bytes}", accelerators[0]))
        }
        _ => None,
    });
    launches.collect()
}

#[test]
fn a_model_has_as_many_engines_as_its_target_says_while_it_is_in_use_and_no_spares() {
    let scenario = base_scenario(3, vec![scaled("qwen", 3)])
        .at(Millis(500), target("qwen", 1))
        .at(Millis::secs(1), request("qwen", 100))
        .at(Millis::secs(20), target("qwen", 2));
    let mut world = simulated(scenario);
    until(&mut world, 19);
    assert_eq!(awake(&world), ["qwen#0"], "there is memory for three, and the target is one");
    until(&mut world, 21);
    let report = default_variant(&world, "qwen");
    assert_eq!((report.current, report.target, report.wait), (2, Some(2), None), "one of them starts");
    until(&mut world, 40);
    assert_eq!(awake(&world), ["qwen#0", "qwen#1"]);
    let shown = world.fleet().report(&world.fleet().plan(world.now())).to_string();
    assert!(shown.contains("default: 2 running or starting, 2 desired (the scenario says so)"), "{shown}");
}

#[test]
fn a_target_starts_nothing_while_nobody_uses_the_model() {
    let mut world =
        simulated(base_scenario(2, vec![scaled("qwen", 2)]).at(Millis::secs(1), target("qwen", 2)));
    until(&mut world, 60);
    assert!(commands(&world).iter().all(|(_, c)| matches!(c, Command::ReadMeter { .. })));
    let report = default_variant(&world, "qwen");
    assert_eq!((report.current, report.target), (0, Some(2)));
}

/// `llama` is idle from about second 10, and protected for 30 seconds from then on.
fn beside_an_idle_model(more: ModelSpec) -> Scenario {
    let mut scenario = base_scenario(2, vec![more, model("llama", 1)]);
    scenario.configuration.settings.turns.protection = ProtectionPolicy::Always;
    scenario
        .at(Millis(500), target("qwen", 1))
        .at(Millis::secs(1), request("llama", 1))
        .at(Millis::secs(2), request("qwen", 900))
        .at(Millis::secs(20), target("qwen", 2))
}

#[test]
fn a_replica_takes_the_place_of_an_idle_engine_once_its_protection_is_over() {
    let mut world = simulated(beside_an_idle_model(scaled("qwen", 2)));
    until(&mut world, 35);
    assert_eq!(awake(&world), ["llama#0", "qwen#0"]);
    let wait = default_variant(&world, "qwen").wait.expect("one engine is missing");
    assert!(wait.insufficient_memory && wait.reason.contains("held by llama"), "{}", wait.reason);
    until(&mut world, 70);
    let closed = closed_at(&world, &engine("llama", 0), CloseReason::Turn);
    assert!(closed.is_some_and(|at| (39.0..42.0).contains(&at)), "{closed:?}");
    assert_eq!(awake(&world), ["qwen#0", "qwen#1"]);
}

#[test]
fn a_model_that_may_evict_nothing_waits_for_free_memory() {
    let modest = ModelSpec { may_evict: ScaleUpEviction::Never, ..scaled("qwen", 2) };
    let mut world = simulated(beside_an_idle_model(modest));
    until(&mut world, 300);
    assert_eq!(awake(&world), ["llama#0", "qwen#0"]);
    let wait = default_variant(&world, "qwen").wait.expect("one engine is missing");
    assert!(wait.insufficient_memory, "{}", wait.reason);
}

#[test]
fn a_replica_never_takes_the_place_of_an_engine_in_use_and_is_tried_again_when_memory_is_released() {
    let scenario = base_scenario(2, vec![scaled("qwen", 2), model("llama", 1)])
        .at(Millis(500), target("qwen", 1))
        .at(Millis::secs(1), request("llama", 300))
        .at(Millis::secs(2), request("qwen", 900))
        .at(Millis::secs(20), target("qwen", 2));
    let mut world = simulated(scenario);
    until(&mut world, 290);
    assert_eq!(awake(&world), ["llama#0", "qwen#0"], "longer than any turn");
    let report = default_variant(&world, "qwen");
    let wait = report.wait.expect("one engine is missing");
    assert_eq!((report.current, report.target), (1, Some(2)));
    assert!(wait.insufficient_memory && wait.reason.contains("held by llama"), "{}", wait.reason);
    until(&mut world, 340);
    assert_eq!(awake(&world), ["qwen#0", "qwen#1"]);
    assert_eq!(world.tally().count("requests served"), 1, "that of llama, to its end");
    assert_eq!(default_variant(&world, "qwen").wait, None);
}

#[test]
fn of_two_idle_models_with_targets_neither_takes_from_the_other() {
    let scenario = base_scenario(3, vec![scaled("qwen", 2), scaled("llama", 2)])
        .at(Millis(500), target("qwen", 2))
        .at(Millis(500), target("llama", 2))
        .at(Millis::secs(1), request("llama", 5))
        .at(Millis::secs(1), request("qwen", 5));
    let mut world = simulated(scenario);
    until(&mut world, 600);
    let awake = awake(&world);
    assert_eq!(awake.len(), 3, "{awake:?}");
    let swapped = commands(&world)
        .into_iter()
        .filter(|(_, c)| matches!(c, Command::CloseGate { reason: CloseReason::Turn, .. }));
    assert_eq!(swapped.count(), 0);
}

/// Both engines of `qwen` are awake from about second 18. The first stream is on #0 from second 9. The second arrives at
/// second 40 and goes to #1 if the first has not ended.
fn with_two_streams(first: u64, second: u64) -> Scenario {
    base_scenario(2, vec![scaled("qwen", 2)])
        .at(Millis(500), target("qwen", 2))
        .at(Millis::secs(1), request("qwen", first))
        .at(Millis::secs(40), request("qwen", second))
}

#[test]
fn a_lower_target_drains_the_highest_replica_number_to_the_end_of_its_streams() {
    let mut world = simulated(with_two_streams(300, 60).at(Millis::secs(50), target("qwen", 1)));
    until(&mut world, 95);
    assert!(closed_at(&world, &engine("qwen", 1), CloseReason::ScaledDown).is_some_and(|at| at < 51.0));
    let draining = world.fleet().engine(&engine("qwen", 1)).unwrap();
    assert!(matches!(draining.state, LifecycleState::Draining { .. }), "{}", draining.state);
    assert_eq!(default_variant(&world, "qwen").current, 1);
    until(&mut world, 120);
    assert_eq!(world.tally().count("requests served"), 1, "its stream ended by itself");
    assert_eq!(world.fleet().engine(&engine("qwen", 1)).unwrap().state, LifecycleState::Cold);
    assert_eq!(awake(&world), ["qwen#0"]);
}

#[test]
fn an_engine_that_a_lower_target_drains_gives_its_place_to_another_model_like_a_turn() {
    let mut scenario = with_two_streams(900, 900)
        .at(Millis::secs(50), target("qwen", 1))
        .at(Millis::secs(60), request("llama", 30));
    scenario.configuration.models.push(model("llama", 1));
    scenario.configuration.settings.turns.on_deadline = DrainDeadlinePolicy::Cut;
    let mut world = simulated(scenario);
    // The drain began at second 50, and has two minutes; the engine's turn ended before.
    until(&mut world, 165);
    assert_eq!(awake(&world), ["qwen#0"]);
    until(&mut world, 200);
    assert_eq!(awake(&world), ["llama#0", "qwen#0"]);
    assert!(closed_at(&world, &engine("qwen", 0), CloseReason::Turn).is_none(), "the engine that stays");
}

#[test]
fn an_idle_engine_goes_before_one_in_use_whatever_its_number() {
    let mut world = simulated(with_two_streams(35, 300).at(Millis::secs(50), target("qwen", 1)));
    until(&mut world, 49);
    let leases = |replica| world.fleet().engine(&engine("qwen", replica)).unwrap().leases;
    assert_eq!((leases(0), leases(1)), (0, 1));
    until(&mut world, 60);
    assert_eq!(awake(&world), ["qwen#1"]);
    assert!(closed_at(&world, &engine("qwen", 0), CloseReason::ScaledDown).is_some());
}

#[test]
fn a_target_that_rises_again_calls_a_draining_engine_back() {
    let scenario = with_two_streams(300, 200)
        .at(Millis::secs(50), target("qwen", 1))
        .at(Millis::secs(60), target("qwen", 2));
    let mut world = simulated(scenario);
    until(&mut world, 70);
    assert_eq!(awake(&world), ["qwen#0", "qwen#1"]);
    assert!(!commands(&world).iter().any(|(_, c)| matches!(c, Command::Stop { .. })));
}

#[test]
fn a_surplus_that_can_sleep_sleeps_and_is_woken_for_the_next_target() {
    let sleeper = ModelSpec { can_sleep: true, ..scaled("qwen", 3) };
    let scenario = base_scenario(3, vec![sleeper])
        .at(Millis(500), target("qwen", 2))
        .at(Millis::secs(1), request("qwen", 300))
        .at(Millis::secs(40), target("qwen", 1))
        .at(Millis::secs(60), target("qwen", 2));
    let mut world = simulated(scenario);
    until(&mut world, 59);
    let report = default_variant(&world, "qwen");
    assert_eq!((report.current, report.asleep), (1, 1));
    until(&mut world, 70);
    assert_eq!(awake(&world), ["qwen#0", "qwen#1"]);
    assert!(commands(&world).iter().any(|(_, c)| matches!(c, Command::Wake { .. })));
    assert_eq!(launched(&world).len(), 2, "the third is never started");
}

#[test]
fn a_sleeper_whose_place_is_in_use_moves_to_free_memory_for_the_next_target() {
    let scenario = |gpu: AcceleratorId| {
        let sleeper = ModelSpec { can_sleep: true, ..scaled("qwen", 2) };
        let busy = ModelSpec { accelerators: AcceleratorRequirement::Ids(vec![gpu]), ..model("llama", 1) };
        base_scenario(3, vec![sleeper, busy])
            .at(Millis(500), target("qwen", 2))
            .at(Millis::secs(1), request("qwen", 900))
            .at(Millis::secs(40), target("qwen", 1))
            .at(Millis::secs(60), request("llama", 800))
            .at(Millis::secs(300), target("qwen", 2))
    };
    let place = |world: &SimulatedWorld| {
        world.fleet().engine(&engine("qwen", 1)).and_then(|e| e.accelerators.first().cloned())
    };
    let mut world = simulated(scenario("gpu-0".into()));
    until(&mut world, 55);
    let slept_on = place(&world).expect("it sleeps");
    let mut world = simulated(scenario(slept_on.clone()));
    until(&mut world, 290);
    assert_eq!(awake(&world), ["llama#0", "qwen#0"]);
    assert_eq!(place(&world).as_ref(), Some(&slept_on));
    until(&mut world, 360);
    assert_eq!(awake(&world), ["llama#0", "qwen#0", "qwen#1"]);
    assert_ne!(place(&world), Some(slept_on));
}

#[test]
fn no_target_goes_below_the_engines_that_are_to_run_or_ends_the_last_that_serves() {
    for (least, pinned) in [(1, false), (0, true), (0, false)] {
        let kept = ModelSpec { min_replicas: least, pinned, ..scaled("qwen", 2) };
        let scenario = base_scenario(2, vec![kept])
            .at(Millis(500), target("qwen", 2))
            .at(Millis::secs(1), request("qwen", 30))
            .at(Millis::secs(60), target("qwen", 0));
        let mut world = simulated(scenario);
        until(&mut world, 50);
        assert_eq!(awake(&world).len(), 2);
        until(&mut world, 200);
        assert_eq!(awake(&world).len(), 1, "minReplicas {least}, pinned {pinned}");
        let expected = u32::from(least > 0 || pinned);
        assert_eq!(default_variant(&world, "qwen").target, Some(expected));
    }
}

#[test]
fn idleness_ends_all_engines_together_and_the_next_request_starts_one() {
    let mut idle = scaled("qwen", 2);
    idle.idle.sleep_after = Some(Millis::secs(20));
    let scenario = base_scenario(2, vec![idle])
        .at(Millis(500), target("qwen", 2))
        .at(Millis::secs(1), request("qwen", 60))
        .at(Millis::secs(200), request("qwen", 60));
    let mut world = simulated(scenario);
    until(&mut world, 65);
    assert_eq!(awake(&world).len(), 2, "one of them never had a request");
    until(&mut world, 120);
    assert_eq!(awake(&world), Vec::<String>::new());
    assert_eq!(default_variant(&world, "qwen").target, Some(0));
    until(&mut world, 240);
    assert_eq!(awake(&world), ["qwen#0"]);
}

#[test]
fn a_scaled_model_has_no_spares_before_its_first_target() {
    let scenario = base_scenario(3, vec![scaled("qwen", 3)])
        .at(Millis::secs(1), request("qwen", 100))
        .at(Millis::secs(40), target("qwen", 2));
    let mut world = simulated(scenario);
    until(&mut world, 39);
    assert_eq!(awake(&world), ["qwen#0"], "there is memory for three");
    let shown = world.fleet().report(&world.fleet().plan(world.now())).to_string();
    assert!(shown.contains("default: 1 running or starting\n"), "{shown}");
    until(&mut world, 70);
    assert_eq!(awake(&world), ["qwen#0", "qwen#1"]);
}

#[test]
fn after_a_restart_a_scaled_model_awaits_its_target_with_what_runs() {
    let scenario = base_scenario(3, vec![scaled("qwen", 3)])
        .at(Millis(500), target("qwen", 2))
        .at(Millis::secs(1), request("qwen", 20))
        .at(Millis::secs(50), ScenarioAction::RestartGateway)
        .at(Millis::secs(60), request("qwen", 200))
        .at(Millis::secs(120), target("qwen", 1));
    let mut world = simulated(scenario);
    until(&mut world, 119);
    assert_eq!(awake(&world), ["qwen#0", "qwen#1"]);
    assert_eq!(default_variant(&world, "qwen").target, None);
    until(&mut world, 140);
    assert_eq!(awake(&world).len(), 1);
}

#[test]
fn a_reload_that_no_longer_scales_a_model_drops_its_targets() {
    let now = Tick(1_000_000);
    let configured = |spec: ModelSpec| Event::Configured {
        configuration: Box::new(base_scenario(2, vec![spec]).configuration),
    };
    let desired = || {
        let (model, variant) = ("qwen".into(), VariantName::default());
        Event::Desired { model, variant, replicas: 1, reason: "quiet".to_owned() }
    };
    let shown = |fleet: &Fleet| {
        let variants = fleet.variants(&fleet.plan(now), &"qwen".into());
        (fleet.is_scaled(&"qwen".into()), variants[VariantName::DEFAULT].target)
    };
    let mut fleet = Fleet::new();
    fleet.on(&configured(scaled("qwen", 2)), now);
    assert_eq!(shown(&fleet), (true, None));
    fleet.on(&desired(), now);
    assert_eq!(shown(&fleet), (true, Some(1)));
    fleet.on(&configured(model("qwen", 2)), now);
    assert_eq!(shown(&fleet), (false, None));
    fleet.on(&desired(), now);
    assert_eq!(shown(&fleet), (false, None), "a target for a model that is not scaled");
    assert_eq!(fleet.broken_invariants(), Vec::<String>::new());
}

/// A cheap variant on gpu-0 and a dear one, with twice its memory, on gpu-1.
fn with_variants(name: &str) -> ModelSpec {
    let on = |gpu: &str, gib| ModelSpec {
        accelerators: AcceleratorRequirement::Ids(vec![gpu.into()]),
        memory: memory(gib),
        fingerprint: gib,
        ..scaled(name, 1)
    };
    let (cheap, dear) = (on("gpu-0", 20), on("gpu-1", 40));
    let variants = vec![
        EngineVariant::from_spec("h100".into(), 5.0, &dear),
        EngineVariant::from_spec("l4".into(), 1.0, &cheap),
    ];
    ModelSpec { variants, ..cheap }
}

fn variant_engine(variant: &str) -> EngineId {
    EngineId::of_variant("qwen".into(), variant.into(), 0)
}

#[test]
fn two_variants_run_side_by_side_each_with_its_own_memory() {
    let variant_target =
        |variant: &str, replicas| ScenarioAction::SetTarget("qwen".into(), variant.into(), replicas);
    let scenario = with_accelerators(&[24, 48], vec![with_variants("qwen")])
        .at(Millis(500), variant_target("l4", 1))
        .at(Millis(500), variant_target("h100", 0))
        .at(Millis::secs(1), request("qwen", 200))
        .at(Millis::secs(20), variant_target("h100", 1))
        .at(Millis::secs(60), variant_target("l4", 0));
    let mut world = simulated(scenario);
    until(&mut world, 50);
    assert_eq!(launched(&world), ["qwen#l4.0 on gpu-0 with 20Gi", "qwen#h100.0 on gpu-1 with 40Gi"]);
    let current = |world: &SimulatedWorld| -> Vec<(String, u32)> {
        variants(world, "qwen").into_iter().map(|(name, report)| (name.to_string(), report.current)).collect()
    };
    assert_eq!(current(&world), [("h100".to_owned(), 1), ("l4".to_owned(), 1)]);
    until(&mut world, 250);
    assert_eq!(awake(&world), ["qwen#h100.0"], "the cheap one drained once its stream had ended");
    assert_eq!(world.tally().count("requests served"), 1);
    assert_eq!(world.tally().count("requests"), 1);
}

#[test]
fn from_zero_exactly_one_variant_starts_the_cheapest_that_fits() {
    // The cheapest there is has no accelerator that could hold it.
    let nowhere = ModelSpec { memory: memory(400), ..scaled("qwen", 1) };
    let mut spec = with_variants("qwen");
    spec.variants.push(EngineVariant::from_spec("b200".into(), 0.5, &nowhere));
    let scenario = |more: Vec<ModelSpec>| {
        let models = [vec![spec.clone()], more].concat();
        with_accelerators(&[24, 48], models).at(Millis::secs(30), request("qwen", 30))
    };
    let mut world = simulated(scenario(Vec::new()));
    until(&mut world, 50);
    assert_eq!(awake(&world), ["qwen#l4.0"]);
    assert_eq!(launched(&world).len(), 1, "{:?}", launched(&world));

    let pinned = ModelSpec {
        pinned: true,
        accelerators: AcceleratorRequirement::Ids(vec!["gpu-0".into()]),
        ..model("llama", 1)
    };
    let mut world = simulated(scenario(vec![pinned]));
    until(&mut world, 50);
    assert_eq!(awake(&world), ["llama#0", "qwen#h100.0"], "another model keeps the place of the cheap one");
    until(&mut world, 100);
    assert_eq!(world.tally().count("requests served"), 1);
}

#[test]
fn a_variant_whose_starts_keep_failing_says_so_until_it_serves() {
    let of_variant =
        |variant: &str, replicas| ScenarioAction::SetTarget("qwen".into(), variant.into(), replicas);
    let scenario = with_accelerators(&[24, 48], vec![with_variants("qwen")])
        .at(Millis(500), of_variant("l4", 1))
        .at(Millis(500), of_variant("h100", 0))
        .at(Millis::secs(1), request("qwen", 200))
        .at(Millis::secs(20), of_variant("h100", 1))
        .at(Millis::secs(23), ScenarioAction::KillEngine(variant_engine("h100")))
        .at(Millis::secs(26), ScenarioAction::KillEngine(variant_engine("h100")));
    let mut world = simulated(scenario);
    let refused = |world: &SimulatedWorld| {
        let plan = world.fleet().plan(world.now());
        let load = FleetLoad::of(world.fleet(), &plan, &"qwen".into()).expect("it is configured");
        load.variants.into_values().map(|engines| engines.refused).collect::<Vec<_>>()
    };
    until(&mut world, 25);
    assert_eq!(refused(&world), [None, None], "one failure may have been an accident");
    until(&mut world, 29);
    assert_eq!(refused(&world), [Some(RefusalCause::StartFailed), None]);
    let wait = variants(&world, "qwen")["h100"].wait.clone().expect("its start failed");
    assert!(wait.failed && wait.reason.contains("2 failures in a row"), "{}", wait.reason);
    until(&mut world, 60);
    assert_eq!(awake(&world), ["qwen#h100.0", "qwen#l4.0"]);
    assert_eq!(refused(&world), [None, None]);
}

#[test]
fn a_failed_start_puts_a_variant_behind_the_others_for_ten_minutes() {
    let mut spec = with_variants("qwen");
    spec.idle.stop_after = Some(Millis::secs(20));
    let scenario = with_accelerators(&[24, 48], vec![spec])
        .at(Millis::secs(1), request("qwen", 10))
        .at(Millis::secs(4), ScenarioAction::KillEngine(variant_engine("l4")))
        .at(Millis::secs(200), request("qwen", 10))
        .at(Millis::secs(700), request("qwen", 10));
    let mut world = simulated(scenario);
    until(&mut world, 760);
    let launched: Vec<String> = launched(&world)
        .iter()
        .filter_map(|launch| launch.split_once(' ').map(|(engine, _)| engine.to_owned()))
        .collect();
    assert_eq!(launched, ["qwen#l4.0", "qwen#h100.0", "qwen#h100.0", "qwen#l4.0"]);
    assert_eq!(world.tally().count("requests served"), 3);
}

#[test]
fn what_was_learned_of_a_variant_outlasts_a_restart() {
    let scenario = with_accelerators(&[24, 48], vec![with_variants("qwen")])
        .at(Millis::secs(1), request("qwen", 10))
        .at(Millis::secs(60), ScenarioAction::RestartGateway);
    let mut world = simulated(scenario);
    let start = |world: &SimulatedWorld, variant: &str| {
        world.fleet().learned_of(&"qwen".into(), &variant.into()).and_then(|learned| learned.start)
    };
    until(&mut world, 59);
    let learned = start(&world, "l4");
    assert!(learned.is_some());
    until(&mut world, 70);
    assert_eq!((start(&world, "l4"), start(&world, "h100")), (learned, None));
}

#[test]
fn a_stored_measurement_names_its_variant_unless_it_is_the_default_one() {
    let stored = |variant: VariantName| {
        let learned = LearnedMeasurements::default();
        let event = Event::MeasurementsRestored { model: "qwen".into(), variant, learned };
        let stored = serde_json::to_value(&event).unwrap();
        assert_eq!(serde_json::from_value::<Event>(stored.clone()).unwrap(), event);
        stored.get("variant").cloned()
    };
    assert_eq!(stored(VariantName::default()), None);
    assert_eq!(stored("h100".into()), Some("h100".into()));
}

fn found(fingerprint: u64, gpu: &str) -> AdoptedEngine {
    AdoptedEngine {
        address: ([127, 0, 0, 1], 1).into(),
        accelerators: vec![gpu.into()],
        asleep: None,
        ready: true,
        fingerprint,
        last_lease_end: Tick(0),
        started: Tick(1_000_000),
    }
}

#[test]
fn a_new_leader_adopts_each_engine_as_its_variant_and_awaits_its_own_targets() {
    let configuration = with_accelerators(&[24, 48], vec![with_variants("qwen")]).configuration;
    let (now, generation) = (Tick(1_000_000), Generation(3));
    let mut fleet = Fleet::new();
    fleet.on(&Event::Configured { configuration: Box::new(configuration) }, now);
    let desired = |replicas| {
        let (model, variant) = ("qwen".into(), "h100".into());
        Event::Desired { model, variant, replicas, reason: "busy".to_owned() }
    };
    let targets = |fleet: &Fleet| -> Vec<u32> {
        let variants = fleet.variants(&fleet.plan(now), &"qwen".into());
        variants.into_values().filter_map(|report| report.target).collect()
    };
    fleet.on(&desired(1), now);
    assert_eq!(targets(&fleet), [1]);
    fleet.on(&Event::LeadershipChanged { leads: false }, now);
    assert_eq!(targets(&fleet), [0; 0], "another gateway decides");
    fleet.on(&desired(1), now);
    assert_eq!(targets(&fleet), [0; 0], "a follower has no targets");
    let published = PublishedEngine {
        state: PublishedEngineState::Awake,
        address: Some(([127, 0, 0, 1], 1).into()),
        fingerprint: 40,
        accelerators: vec!["gpu-1".into()],
        since: now,
        failure: None,
    };
    let engine = variant_engine("h100");
    fleet.on(&Event::Published { engine, generation, published: Some(published) }, now);
    fleet.on(&Event::LeadershipChanged { leads: true }, now);
    for (variant, gpu, fingerprint) in [("h100", "gpu-1", 40), ("l4", "gpu-0", 20), ("gone", "gpu-0", 7)] {
        let (engine, found) = (variant_engine(variant), found(fingerprint, gpu));
        fleet.on(&Event::Adopted { engine, generation, found }, now);
    }
    fleet.on(&Event::AdoptionDone, now);
    fleet.on(&desired(1), now);
    let plan = fleet.plan(now);
    fleet.issued(&plan.commands, now);
    let closed: Vec<&EngineId> = plan
        .commands
        .iter()
        .filter_map(|command| match command {
            Command::CloseGate { engine, .. } => Some(engine),
            _ => None,
        })
        .collect();
    assert_eq!(closed, [&variant_engine("gone")], "only the variant that is not configured ends");
    assert_eq!(fleet.broken_invariants(), Vec::<String>::new());
    let reserved: Vec<(String, Bytes)> = fleet
        .view(&fleet.report(&plan))
        .engines
        .iter()
        .map(|view| (view.engine.to_string(), view.reserved))
        .collect();
    assert!(reserved.contains(&("qwen#h100.0".to_owned(), Bytes::gib(40))), "{reserved:?}");
    assert!(reserved.contains(&("qwen#l4.0".to_owned(), Bytes::gib(20))), "{reserved:?}");
}

#[test]
fn a_journal_that_starts_over_keeps_targets_and_variants() {
    let scenario = with_accelerators(&[24, 48], vec![with_variants("qwen")])
        .at(Millis(500), ScenarioAction::SetTarget("qwen".into(), "h100".into(), 1))
        .at(Millis::secs(1), request("qwen", 200));
    let mut world = simulated(scenario);
    until(&mut world, 40);
    let text = serde_json::to_string(&world.fleet().snapshot()).unwrap();
    let events: Vec<Event> = serde_json::from_str(&text).unwrap();
    let mut restored = Fleet::new();
    events.iter().for_each(|event| restored.on(event, world.now()));
    assert_eq!(restored.broken_invariants(), Vec::<String>::new());
    assert_eq!(
        restored.variants(&restored.plan(world.now()), &"qwen".into()),
        variants(&world, "qwen"),
        "what it has and should have"
    );
    assert!(restored.engines().eq(world.fleet().engines()));
    assert!(text.contains("qwen#h100.0"), "{text}");
}

/// Random worlds with all their faults, in which targets change at random.
#[test]
fn no_world_with_targets_breaks_an_invariant() {
    let mut scaled_down = 0;
    for seed in 0..48 {
        let mut scenario = Scenario::from_seed(seed);
        scenario.configuration.models.iter_mut().for_each(|spec| spec.scaled = true);
        let mut random = SplitMix64::new(seed);
        let models = scenario.configuration.models.clone();
        for at in 1..40 {
            let Some(spec) = random.pick(&models) else { continue };
            let replicas = u32::try_from(random.between(0, u64::from(spec.replicas) + 1)).unwrap();
            let action = ScenarioAction::SetTarget(spec.name.clone(), VariantName::default(), replicas);
            scenario = scenario.at(Millis::secs(at * 7), action);
        }
        let mut world = SimulatedWorld::new(scenario).with_journal();
        world.run(300).unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
        let commands = commands(&world);
        let closed = |(_, c): &&(f64, Command)| {
            matches!(c, Command::CloseGate { reason: CloseReason::ScaledDown, .. })
        };
        scaled_down += commands.iter().filter(closed).count();
    }
    assert!(scaled_down > 0, "no target ever took an engine away");
}
