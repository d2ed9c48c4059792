//! Variants of a model run side by side, and a failed start puts one behind the others.

use rouse::{
    model::{AcceleratorRequirement, EngineVariant, ModelSpec},
    saturation::{FleetLoad, RefusalCause},
    sim::{Scenario, ScenarioAction, SimulatedWorld},
    units::Millis,
};

use crate::harness::{
    awake, launched, memory, model, request, scaled, simulated, until, variant_engine, variants,
    with_accelerators, with_variants,
};

fn variant_target(variant: &str, replicas: u32) -> ScenarioAction {
    ScenarioAction::SetTarget("qwen".into(), variant.into(), replicas)
}

/// The variant `l4` serves a request, and after 20 s `h100` gets a target beside it.
fn with_second_variant_after_20_s() -> Scenario {
    with_accelerators(&[24, 48], vec![with_variants("qwen")])
        .at(Millis(500), variant_target("l4", 1))
        .at(Millis(500), variant_target("h100", 0))
        .at(Millis::secs(1), request("qwen", 200))
        .at(Millis::secs(20), variant_target("h100", 1))
}

#[test]
fn two_variants_run_side_by_side_each_with_its_own_memory() {
    let scenario = with_second_variant_after_20_s().at(Millis::secs(60), variant_target("l4", 0));
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
    let scenario = with_second_variant_after_20_s()
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
