//! Replicas start by their targets without taking what others use, and end together when their model is idle.

use rouse::{
    fleet::{
        Fleet,
        command::{CloseReason, Command},
        event::Event,
    },
    model::{ModelSpec, ProtectionPolicy, ScaleUpEviction, VariantName},
    sim::{Scenario, ScenarioAction, SimulatedWorld, SplitMix64},
    units::{Millis, Tick},
};

use crate::harness::{
    awake, base_scenario, closed_at, commands, default_variant, engine, model, request, scaled, simulated,
    target, until,
};

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
