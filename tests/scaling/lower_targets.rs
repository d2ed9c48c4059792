//! A lower target ends engines: which one, how long it drains, and where it starts again.

use rouse::{
    engine::state::LifecycleState,
    fleet::command::{CloseReason, Command},
    model::{AcceleratorId, AcceleratorRequirement, DrainDeadlinePolicy, ModelSpec},
    sim::{Scenario, SimulatedWorld},
    units::Millis,
};

use crate::harness::{
    awake, base_scenario, closed_at, commands, default_variant, engine, launched, model, request, scaled,
    simulated, target, until,
};

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
