//! Models with dependencies, beyond the simulator's checks in every world and the written scenarios.

use rouse::{
    fault::{FailureCause, Fault},
    fleet::{
        Fleet,
        command::{CloseReason, Command},
        event::{Event, OperatorAction},
        report::ModelState,
    },
    journal,
    model::{
        Accelerator, AcceleratorRequirement, EngineId, EngineMemory, FleetConfig, FleetSettings, ModelName,
        ModelSpec,
    },
    sim::{Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld, simulated_model},
    units::{Bytes, Millis, Tick},
};

fn model(name: &str, gib: u64, dependencies: &[&str]) -> ModelSpec {
    ModelSpec {
        dependencies: dependencies.iter().map(|name| (*name).into()).collect(),
        ..simulated_model(
            name,
            EngineMemory { awake: Bytes::gib(gib), asleep: Bytes::mib(256), host: Bytes::gib(1) },
        )
    }
}

/// One accelerator of 24Gi.
fn base_scenario(models: Vec<ModelSpec>) -> Scenario {
    let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    settings.turns.residency = Millis::secs(5);
    let gpu = Accelerator { metered: true, ..Accelerator::new("gpu-0".into(), Bytes::gib(24)) };
    Scenario::new("needs", FleetConfig { settings, accelerators: vec![gpu], models })
}

fn send_request(model: &str) -> ScenarioAction {
    ScenarioAction::SendRequest(SimulatedRequest::stream(model, Millis(500)))
}

fn engine(model: &str) -> EngineId {
    EngineId::new(model.into(), 0)
}

fn run(scenario: Scenario, lasts: u64) -> SimulatedWorld {
    let mut world = SimulatedWorld::new(scenario).with_journal();
    world.run_until(Millis::secs(lasts)).unwrap_or_else(|failure| panic!("{failure}"));
    world
}

/// When the first matching command was issued after `after`. Both times are seconds since the start of the world.
fn first_command_at(world: &SimulatedWorld, after: f64, wanted: impl Fn(&Command) -> bool) -> Option<f64> {
    let start = world.journal()[0].at();
    let mut found = None;
    journal::replay(world.journal(), |at, _, plan, _| {
        let at = at.since(start).0 as f64 / 1000.0;
        if found.is_none() && at >= after && plan.commands.iter().any(&wanted) {
            found = Some(at);
        }
    });
    found
}

fn is_sleep_of(of: &str) -> impl Fn(&Command) -> bool {
    move |command| matches!(command, Command::Sleep { engine: id, .. } if *id == engine(of))
}

#[test]
fn what_is_in_the_way_goes_and_what_it_needs_after_it() {
    let scenario =
        base_scenario(vec![model("base", 8, &[]), model("other", 20, &[]), model("top", 8, &["base"])]);
    let scenario =
        scenario.at(Millis::secs(1), send_request("top")).at(Millis::secs(40), send_request("other"));
    let world = run(scenario, 60);
    let (top, base) = (
        first_command_at(&world, 40.0, is_sleep_of("top")),
        first_command_at(&world, 40.0, is_sleep_of("base")),
    );
    // Falling asleep takes 400 ms.
    assert!(top.zip(base).is_some_and(|(top, base)| base >= top + 0.4), "{top:?} {base:?}");
    let closes = |c: &Command| {
        matches!(c, Command::CloseGate { engine: id, reason: CloseReason::Turn, successor: Some(to), .. }
            if *id == engine("base") && *to == engine("other"))
    };
    assert!(first_command_at(&world, 40.0, closes).is_some(), "nobody would have put it away for itself");
    assert_eq!(world.tally().count("requests served"), 2);
}

#[test]
fn what_is_idle_stays_where_what_it_needs_would_not_make_enough_room() {
    let mut top = model("top", 8, &["base"]);
    top.pinned = true;
    let scenario = base_scenario(vec![model("base", 8, &[]), model("other", 14, &[]), top]);
    let mut scenario = scenario.at(Millis::secs(40), send_request("other"));
    scenario.configuration.settings.queue.max_wait = Millis::secs(10);
    let world = run(scenario, 60);
    let closes = |c: &Command| matches!(c, Command::CloseGate { .. });
    assert_eq!(first_command_at(&world, 0.0, closes), None);
    assert_eq!(world.tally().count("requests served"), 0);
}

#[test]
fn a_failure_of_what_is_needed_refuses_as_its_own_and_leaves_nothing_reserved() {
    let mut scenario = base_scenario(vec![model("base", 8, &[]), model("top", 8, &["base"])]);
    scenario.fault_rates.start_failed = 1.0;
    let world = run(scenario.at(Millis::secs(1), send_request("top")), 60);
    let refuses = |c: &Command| match c {
        Command::Refuse { fault: Fault::ModelNotReady { model, cause, wait }, .. } => {
            assert_eq!((model.as_str(), cause), ("top", &FailureCause::CommandNotFound));
            assert!(
                wait.waited_for.starts_with("waits for its dependency 'base': last start failed"),
                "{wait:?}"
            );
            true
        }
        _ => false,
    };
    assert!(first_command_at(&world, 0.0, refuses).is_some());
    assert!(world.fleet().engine(&engine("top")).is_some_and(|e| e.pending_reservation.is_none()));
    let launched = |c: &Command| matches!(c, Command::Launch { engine: id, .. } if *id == engine("top"));
    assert_eq!(first_command_at(&world, 0.0, launched), None);
}

#[test]
fn an_order_to_stop_what_is_needed_is_carried_out_and_it_comes_back() {
    let scenario = base_scenario(vec![model("base", 8, &[]), model("top", 8, &["base"])]);
    let scenario = scenario
        .at(Millis::secs(1), send_request("top"))
        .at(Millis::secs(40), ScenarioAction::OperatorAction("base".into(), OperatorAction::Stop))
        .at(Millis::secs(41), send_request("top"));
    let world = run(scenario, 60);
    let stops = |c: &Command| matches!(c, Command::Stop { engine: id, .. } if *id == engine("base"));
    let launches = |c: &Command| matches!(c, Command::Launch { engine: id, .. } if *id == engine("base"));
    assert!(first_command_at(&world, 40.0, stops).is_some_and(|at| at < 41.0));
    assert!(first_command_at(&world, 40.0, launches).is_some());
    assert_eq!(world.tally().count("requests served"), 2, "what is awake goes on");
}

#[test]
fn a_model_whose_dependencies_never_fit_says_so_before_the_first_request() {
    let large = model("large", 90, &[]);
    let models =
        vec![model("base", 14, &[]), model("beside", 12, &["base"]), large, model("top", 8, &["large"])];
    let world = run(base_scenario(models).at(Millis::secs(40), send_request("top")), 60);
    let fleet = world.fleet();
    let report = fleet.report(&fleet.plan(world.now()));
    for (name, why) in [
        ("beside", "can never start: the model never fits together with its dependencies: "),
        ("top", "can never start: its dependency 'large' can never start: the model needs 90Gi "),
    ] {
        let line = &report.models[name];
        assert!(line.reason.starts_with(why), "{}", line.reason);
        assert_eq!(line.state, ModelState::Unplaceable, "{name}");
    }
    let refuses = |c: &Command| match c {
        Command::Refuse { fault: Fault::InsufficientMemory(shortage), .. } => shortage.permanent,
        _ => false,
    };
    assert!(first_command_at(&world, 40.0, refuses).is_some());
}

/// The state of a model depends on its dependencies.
#[test]
fn a_reload_of_a_dependency_changes_its_dependents() {
    let mut configuration = base_scenario(Vec::new()).configuration;
    let mut fleet = Fleet::new();
    let mut reload = |models: Vec<ModelSpec>| {
        configuration.models = models;
        fleet.on(&Event::Configured { configuration: Box::new(configuration.clone()) }, Tick(1));
        let changes = fleet.take_routing_changes();
        let specs = changes.specs.iter().map(|name| name.as_str().to_owned()).collect::<Vec<_>>();
        (changes.reconfigured, specs, fleet.state(&"top".into()))
    };
    let models = |base: Option<u64>| {
        let others = [model("other", 6, &[]), model("middle", 6, &["base"]), model("top", 6, &["middle"])];
        others.into_iter().chain(base.map(|gib| model("base", gib, &[]))).collect::<Vec<_>>()
    };
    let all = ["base", "middle", "top"].map(str::to_owned);
    let (reconfigured, ..) = reload(models(Some(6)));
    assert!(reconfigured, "the accelerators are new");
    assert_eq!(reload(models(Some(6))), (false, Vec::new(), ModelState::Cold));
    assert_eq!(reload(models(Some(400))), (false, all.to_vec(), ModelState::Unplaceable));
    assert_eq!(reload(models(None)).1, all, "it is removed");
    assert_eq!(reload(models(Some(6))), (false, all.to_vec(), ModelState::Cold), "it is back");
}

/// The engine that starts measures free memory, so it waits for the sleeper's release. The sleeper's meter does not name
/// engines.
#[test]
fn a_reservation_that_waits_for_a_dependency_does_not_hide_a_neighbours_release() {
    let mut scenario = base_scenario(vec![
        model("other", 10, &[]),
        model("top", 12, &["base"]),
        ModelSpec { accelerators: AcceleratorRequirement::Count(0), ..model("base", 1, &[]) },
    ]);
    scenario.hardware.meter_per_process = false;
    let other = || ModelName::from("other");
    let scenario = scenario
        .at(Millis::secs(1), send_request("other"))
        .at(Millis::secs(19), ScenarioAction::DelayNextRelease(engine("other"), Millis::secs(1)))
        .at(Millis::secs(20), ScenarioAction::OperatorAction(other(), OperatorAction::Sleep { level: None }))
        .at(Millis(20_600), send_request("top"));
    let world = run(scenario, 100);
    assert_eq!(world.tally().count("requests served"), 2);
}

/// The same with a sleeper that waits for its dependency: it does not use its reservation before it wakes.
#[test]
fn a_sleeper_that_waits_for_a_dependency_does_not_hide_a_neighbours_release() {
    let mut scenario =
        base_scenario(vec![model("other", 10, &[]), model("top", 6, &["base"]), model("base", 4, &[])]);
    scenario.hardware.meter_per_process = false;
    let order = |name: &str, action: OperatorAction| ScenarioAction::OperatorAction(name.into(), action);
    let sleep = || OperatorAction::Sleep { level: None };
    let scenario = scenario
        .at(Millis::secs(1), send_request("top"))
        .at(Millis::secs(40), order("top", sleep()))
        .at(Millis::secs(50), order("base", OperatorAction::Stop))
        .at(Millis::secs(55), send_request("other"))
        .at(Millis::secs(79), ScenarioAction::DelayNextRelease(engine("other"), Millis::secs(1)))
        .at(Millis::secs(80), order("other", sleep()))
        .at(Millis(80_600), send_request("top"));
    let world = run(scenario, 160);
    let launches = |c: &Command| matches!(c, Command::Launch { engine: e, .. } if *e == engine("base"));
    assert!(first_command_at(&world, 50.0, launches).is_some_and(|at| at > 80.0), "it was stopped");
    assert_eq!(world.tally().count("requests served"), 3);
}

/// A model comes to need another one while its reservation is being confirmed, and the other waits for the same memory.
#[test]
fn a_reservation_that_a_reload_makes_wait_holds_up_no_dependency() {
    let models = || vec![model("late", 6, &[]), model("base", 6, &[]), model("top", 6, &["base"])];
    let mut scenario = base_scenario(models());
    scenario.hardware.placement_time = (Millis::secs(3), Millis::secs(3));
    let mut next = FleetConfig { models: models(), ..scenario.configuration.clone() };
    next.models[0].dependencies = vec!["base".into()];
    let stop = ScenarioAction::OperatorAction("late".into(), OperatorAction::Stop);
    let scenario = scenario
        .at(Millis::secs(1), send_request("late"))
        .at(Millis::secs(25), stop)
        .at(Millis::secs(40), send_request("late"))
        .at(Millis::secs(41), send_request("top"))
        .at(Millis::secs(42), ScenarioAction::ReloadConfig(Box::new(next)));
    assert_eq!(run(scenario, 160).tally().count("requests served"), 3);
}

fn on(gpu: &str, spec: ModelSpec) -> ModelSpec {
    ModelSpec { accelerators: AcceleratorRequirement::Ids(vec![gpu.into()]), ..spec }
}

/// The turn of `dep` ends before long, and then the sleeper wakes. Only `top` cannot do without `dep`.
#[test]
fn a_sleeper_that_will_wake_is_not_stopped_for_a_model_behind_it_that_needs_a_neighbour() {
    let mut sleeper = model("sleeper", 20, &[]);
    sleeper.memory.asleep = Bytes::gib(2);
    let base = ModelSpec { accelerators: AcceleratorRequirement::Count(0), ..model("base", 1, &[]) };
    let scenario =
        base_scenario(vec![model("dep", 10, &[]), base, sleeper, model("top", 1, &["dep", "base"])]);
    let order = ScenarioAction::OperatorAction("sleeper".into(), OperatorAction::Sleep { level: None });
    let long = SimulatedRequest::stream("dep", Millis::secs(100));
    let scenario = scenario
        .at(Millis::secs(1), send_request("sleeper"))
        .at(Millis::secs(20), order)
        .at(Millis::secs(25), ScenarioAction::SendRequest(long))
        .at(Millis::secs(45), send_request("sleeper"))
        .at(Millis::secs(46), send_request("top"));
    let world = run(scenario, 300);
    let is_stop = |c: &Command| matches!(c, Command::Stop { engine: e, .. } if *e == engine("sleeper"));
    assert_eq!(first_command_at(&world, 0.0, is_stop), None);
    assert_eq!(world.tally().count("requests served"), 4);
}

/// `x` has the sleeper's memory for some time. `r`, which can never run, needs the sleeper, and so does `top`, which runs.
#[test]
fn a_sleeper_that_another_model_needs_is_not_stopped_because_one_of_them_cannot_run() {
    let count_zero =
        |name| ModelSpec { accelerators: AcceleratorRequirement::Count(0), ..model(name, 1, &[]) };
    let mut scenario = base_scenario(vec![
        on("gpu-0", model("sleeper", 14, &[])),
        on("gpu-0", model("x", 12, &[])),
        on("gpu-0", model("c", 1, &[])),
        ModelSpec { pinned: true, ..on("gpu-1", model("p", 20, &[])) },
        on("gpu-1", model("r", 20, &["sleeper"])),
        count_zero("top"),
    ]);
    scenario.configuration.models[0].memory.asleep = Bytes::gib(2);
    let gpu = Accelerator { id: "gpu-1".into(), ..scenario.configuration.accelerators[0].clone() };
    scenario.configuration.accelerators.push(gpu);
    let mut next = scenario.configuration.clone();
    next.models[5].dependencies = vec!["sleeper".into()];
    let order = ScenarioAction::OperatorAction("sleeper".into(), OperatorAction::Sleep { level: None });
    let long = |name: &str| ScenarioAction::SendRequest(SimulatedRequest::stream(name, Millis::secs(100)));
    let scenario = scenario
        .at(Millis::secs(1), send_request("sleeper"))
        .at(Millis::secs(30), order)
        .at(Millis::secs(40), long("x"))
        .at(Millis::secs(50), long("top"))
        .at(Millis::secs(70), ScenarioAction::ReloadConfig(Box::new(next)))
        .at(Millis::secs(75), send_request("r"))
        .at(Millis::secs(76), send_request("c"));
    let world = run(scenario, 140);
    let is_stop = |c: &Command| matches!(c, Command::Stop { engine: e, .. } if *e == engine("sleeper"));
    assert_eq!(first_command_at(&world, 0.0, is_stop), None);
}

/// The sleeper has its place in line from `top`, and is asked for itself as well, behind the model that lacks its memory.
#[test]
fn a_sleeper_that_cannot_wake_for_its_dependent_keeps_no_memory_from_those_before_its_own_request() {
    let mut scenario = base_scenario(vec![
        model("stays", 12, &[]),
        model("sleeper", 14, &[]),
        model("behind", 11, &[]),
        ModelSpec { accelerators: AcceleratorRequirement::Count(0), ..model("top", 1, &["sleeper"]) },
    ]);
    scenario.configuration.models[1].memory.asleep = Bytes::gib(2);
    let order = |name: &str, action| ScenarioAction::OperatorAction(name.into(), action);
    let scenario = scenario
        .at(Millis::secs(1), send_request("sleeper"))
        .at(Millis::secs(30), order("sleeper", OperatorAction::Sleep { level: None }))
        .at(Millis::secs(40), order("stays", OperatorAction::Pin))
        .at(Millis::secs(60), send_request("top"))
        .at(Millis::secs(61), send_request("behind"))
        .at(Millis::secs(62), send_request("sleeper"));
    assert_eq!(run(scenario, 120).tally().count("requests served"), 2, "of four");
}

/// Neither can wake: the place of `base` is taken for good.
#[test]
fn a_sleeper_whose_dependency_cannot_wake_keeps_no_memory_from_those_behind_it() {
    let mut scenario = base_scenario(vec![
        on("gpu-0", model("base", 20, &[])),
        on("gpu-0", model("stays", 20, &[])),
        on("gpu-1", model("top", 14, &["base"])),
        on("gpu-1", model("behind", 23, &[])),
    ]);
    scenario.configuration.models[2].memory.asleep = Bytes::gib(2);
    let gpu = Accelerator { id: "gpu-1".into(), ..scenario.configuration.accelerators[0].clone() };
    scenario.configuration.accelerators.push(gpu);
    let order = |name: &str, action| ScenarioAction::OperatorAction(name.into(), action);
    let scenario = scenario
        .at(Millis::secs(1), send_request("top"))
        .at(Millis::secs(40), order("top", OperatorAction::Sleep { level: None }))
        .at(Millis::secs(50), order("stays", OperatorAction::Pin))
        .at(Millis::secs(90), send_request("top"))
        .at(Millis::secs(91), send_request("behind"));
    assert_eq!(run(scenario, 160).tally().count("requests served"), 2, "of three");
}

/// A gateway that restarts does not know how much an engine uses whose model is gone from the configuration.
#[test]
fn nothing_is_placed_beside_an_engine_whose_model_is_no_longer_configured() {
    let scenario = base_scenario(vec![model("old", 20, &[])]);
    let next = ModelSpec { pinned: true, ..model("next", 20, &[]) };
    let mut without = FleetConfig { models: vec![next], ..scenario.configuration.clone() };
    without.accelerators.iter_mut().for_each(|gpu| gpu.metered = false);
    let long = SimulatedRequest::stream("old", Millis::secs(60));
    let scenario = scenario
        .at(Millis::secs(1), ScenarioAction::SendRequest(long))
        .at(Millis::secs(15), ScenarioAction::ReloadConfig(Box::new(without)))
        .at(Millis::secs(16), ScenarioAction::RestartGateway);
    // Each reservation is checked against the memory that is in use.
    let world = run(scenario, 100);
    let launched = first_command_at(
        &world,
        0.0,
        |c| matches!(c, Command::Launch { engine: e, .. } if *e == engine("next")),
    );
    assert!(launched.is_some(), "once the engine is gone");
}
