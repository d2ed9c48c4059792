//! The reported reasons of competing models: both sides agree, and the prediction comes true.

use rouse::{
    engine::state::LifecycleState,
    fleet::report::ModelState,
    model::{EngineId, ProtectionPolicy},
    units::Tick,
};

use super::{
    protection::{request_by, two_models},
    *,
};

const NAMES: [&str; 2] = ["model-0", "model-1"];

/// Returns an operator's view of both models.
fn reasons(world: &SimulatedWorld) -> [String; 2] {
    let fleet = world.fleet();
    let report = fleet.report(&fleet.plan(world.now()));
    NAMES.map(|name| report.models[name].reason.clone())
}

fn run_until(world: &mut SimulatedWorld, after: Millis) {
    if let Err(failure) = world.run_until(after) {
        panic!("{failure}");
    }
}

fn state(world: &SimulatedWorld, name: &str) -> LifecycleState {
    world.fleet().engine(&EngineId::new(name.into(), 0)).expect("it is configured").state.clone()
}

/// Its idle timer would keep the first model for ten minutes. The second model waits, and gets the memory when the turn
/// rules allow.
#[test]
fn who_waits_and_who_is_waited_for_are_told_one_moment_and_then_it_comes() {
    let mut scenario = two_models("one moment", ProtectionPolicy::Always);
    scenario.configuration.models[0].idle.sleep_after = Some(Millis::secs(600));
    let start = scenario.start;
    let scenario = scenario.at(Millis::secs(1), request_by(1, 0)).at(Millis::secs(70), request_by(2, 1));
    let mut world = SimulatedWorld::new(scenario);

    run_until(&mut world, Millis::secs(69));
    let [first, _] = reasons(&world);
    assert!(first.contains("idle timeout at "), "nobody waits yet: {first}");
    run_until(&mut world, Millis::secs(75));
    let [first, second] = reasons(&world);
    let engine = world.fleet().engine(&EngineId::new(NAMES[0].into(), 0)).expect("it is configured");
    let goes: Tick = engine.idle_since() + Millis::secs(30);
    let words = format!("0 leases, evictable at {goes}");
    assert_eq!(second, format!("waiting for gpu-0: held by model-0, {words}"));
    assert_eq!(first, format!("awake; {words}: 'model-1' waits for its memory"));

    let goes_after = goes.since(start);
    run_until(&mut world, Millis(goes_after.0 - 1));
    assert_eq!(state(&world, NAMES[0]), LifecycleState::Awake);
    run_until(&mut world, Millis(goes_after.0 + 1));
    assert_ne!(state(&world, NAMES[0]), LifecycleState::Awake);
    run_until(&mut world, Millis(goes_after.0 + 10_000));
    let [first, _] = reasons(&world);
    assert!(first.starts_with("asleep at level "), "{first}");
    assert!(first.ends_with(&format!("; evicted at {goes} for model-1")), "{first}");
}

#[test]
fn what_a_reload_makes_impossible_is_told_as_such_before_anybody_asks() {
    let scenario = two_models("too large", ProtectionPolicy::Expected);
    let mut large = scenario.configuration.clone();
    large.models.iter_mut().for_each(|spec| spec.memory.awake = Bytes::gib(90));
    let scenario = scenario
        .at(Millis::secs(1), request_by(1, 0))
        .at(
            Millis::secs(70),
            ScenarioAction::OperatorAction(NAMES[0].into(), OperatorAction::Sleep { level: None }),
        )
        .at(Millis::secs(80), ScenarioAction::ReloadConfig(Box::new(large)))
        .at(Millis::secs(100), request_by(1, 0))
        .at(Millis::secs(100), request_by(2, 1));
    let mut world = SimulatedWorld::new(scenario);
    run_until(&mut world, Millis::secs(90));
    let [slept, new] = reasons(&world);
    let size = "the model needs 90Gi on each accelerator: the largest has 24Gi";
    assert!(
        slept.starts_with("asleep at level ") && slept.contains(&format!("; can never wake: {size}")),
        "{slept}"
    );
    assert!(new.starts_with(&format!("can never start: {size}")), "{new}");
    for name in NAMES {
        assert_eq!(world.fleet().state(&name.into()), ModelState::Unplaceable, "{name}");
    }
    run_until(&mut world, Millis::secs(110));
    assert_eq!(world.tally().count("refused: insufficient memory"), 2, "so it comes");
}
