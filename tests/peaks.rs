//! Learns a model's peak from a meter without per-process figures, like NVML's in a container.
//!
//! If the engine is alone on its accelerator, its peak is the growth of used memory during its start.

use std::collections::BTreeMap;

use rouse::{
    fleet::event::{Event, OperatorAction},
    journal::JournalLine,
    model::{Accelerator, AcceleratorRequirement, EngineId, FleetConfig, FleetSettings, ModelName},
    sim::{Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld, scenario::scripts::model},
    units::{Bytes, Millis},
};

/// One accelerator of 80 GiB, 4 GiB of which another program uses.
fn base_scenario() -> Scenario {
    let gpu = Accelerator { metered: true, ..Accelerator::new("gpu".into(), Bytes::gib(80)) };
    let models = vec![model("one", 20), model("two", 10)];
    let configuration = FleetConfig { settings: FleetSettings::default(), accelerators: vec![gpu], models };
    let mut scenario = Scenario::new("peaks", configuration);
    scenario.hardware.meter_per_process = false;
    scenario.at(Millis(1), ScenarioAction::SetForeignMemory("gpu".into(), Bytes::gib(4)))
}

fn with_request(scenario: Scenario, at: u64, model: &str) -> Scenario {
    scenario
        .at(Millis::secs(at), ScenarioAction::SendRequest(SimulatedRequest::stream(model, Millis::secs(1))))
}

/// Each model's peak, as a restarted gateway recalls it.
fn recalled_peaks(scenario: Scenario) -> BTreeMap<ModelName, Option<Bytes>> {
    let mut world =
        SimulatedWorld::new(scenario.at(Millis::secs(100), ScenarioAction::RestartGateway)).with_journal();
    world.run_until(Millis::secs(101)).unwrap_or_else(|failure| panic!("{failure}"));
    let turns = world.journal().iter().filter_map(|line| match line {
        JournalLine::Turn { events, .. } => Some(events),
        JournalLine::Header { .. } => None,
    });
    let recalled = turns.flatten().filter_map(|event| match event {
        Event::MeasurementsRestored { model, learned, .. } => Some((model.clone(), learned.peak)),
        _ => None,
    });
    recalled.collect()
}

#[test]
fn an_engine_alone_took_what_came_to_be_in_use_while_it_started() {
    let scenario = with_request(base_scenario(), 5, "one");
    let scenario =
        scenario.at(Millis::secs(40), ScenarioAction::SetForeignMemory("gpu".into(), Bytes::gib(30)));
    // The second engine triggers another reading: memory that another program took since then does not count for the
    // first engine.
    let learned = recalled_peaks(with_request(scenario, 50, "two"));
    assert_eq!(learned["one"], Some(Bytes::gib(20)));
}

#[test]
fn of_an_engine_beside_another_nothing_is_learned() {
    let learned = recalled_peaks(with_request(with_request(base_scenario(), 5, "one"), 30, "two"));
    assert_eq!(learned["one"], Some(Bytes::gib(20)));
    assert_eq!(learned["two"], None, "either could have taken more meanwhile");
}

/// Time from the confirmed sleep of model `one`, which keeps 2 GiB instead of the declared 1 GiB, to the placement of
/// model `two`, if `one` takes this many GiB awake.
fn wait_beyond_the_sleep(gib: u64) -> Millis {
    let mut scenario = base_scenario();
    scenario.configuration.models = vec![model("one", gib), model("two", 70)];
    scenario.hardware.meter_per_process = true;
    scenario.fault_rates.oversized_residue = 1.0;
    let scenario = with_request(with_request(scenario, 5, "one"), 40, "two");
    let mut world = SimulatedWorld::new(scenario).with_journal();
    world.run_until(Millis::secs(100)).unwrap_or_else(|failure| panic!("{failure}"));
    let at = |wanted: fn(&Event) -> bool| {
        let turns = world.journal().iter().filter_map(|line| match line {
            JournalLine::Turn { at, events } => Some((at, events)),
            JournalLine::Header { .. } => None,
        });
        let mut found = turns.filter(|(_, events)| events.iter().any(wanted)).map(|(at, _)| *at);
        found.next_back().expect("it happened")
    };
    let slept = at(|event| matches!(event, Event::Slept { .. }));
    let placed = at(|event| matches!(event, Event::Placed { .. }));
    placed.since(slept)
}

#[test]
fn a_small_part_that_a_sleeper_keeps_beyond_its_declaration_holds_up_nobody() {
    let meter_lag = FleetSettings::default().timeouts.meter_lag;
    // 1 GiB is missing of 69 GiB, then of 9 GiB.
    let (small, large) = (wait_beyond_the_sleep(70), wait_beyond_the_sleep(10));
    assert!(small < Millis(200), "{small}");
    assert!(large >= meter_lag, "the meter may lag: {large}");
}

#[test]
fn memory_of_another_program_is_named_as_the_reason_to_wait() {
    let mut scenario = with_request(base_scenario(), 5, "one");
    scenario.hardware.meter_per_process = true;
    let mut world = SimulatedWorld::new(
        scenario.at(Millis(1), ScenarioAction::SetForeignMemory("gpu".into(), Bytes::gib(70))),
    );
    world.run_until(Millis::secs(30)).unwrap_or_else(|failure| panic!("{failure}"));
    let fleet = world.fleet();
    let reason = fleet.report(&fleet.plan(world.now())).models["one"].reason.clone();
    assert!(reason.contains("another program uses 70Gi there"), "{reason}");
}

/// `calm` keeps 4Gi asleep, and is then configured to keep less. `again`: it is asked for again while `other` falls
/// asleep, and waits for its dependency with all its memory reserved.
fn residue_learned_beside_a_calm_neighbour(again: bool) -> Option<Bytes> {
    let gpu = Accelerator { metered: true, ..Accelerator::new("gpu".into(), Bytes::gib(24)) };
    let mut models = vec![model("calm", 8), model("other", 10), model("base", 1)];
    models[0].memory.asleep = Bytes::gib(4);
    models[0].dependencies = vec!["base".into()];
    models[2].accelerators = AcceleratorRequirement::Count(0);
    let configuration = FleetConfig { settings: FleetSettings::default(), accelerators: vec![gpu], models };
    let mut next = configuration.clone();
    next.models[0].memory.asleep = Bytes::mib(256);
    let order = |name: &str, action| ScenarioAction::OperatorAction(name.into(), action);
    let sleep = || OperatorAction::Sleep { level: None };
    let mut scenario = Scenario::new("a calm neighbour", configuration);
    scenario.hardware.meter_per_process = false;
    scenario = with_request(scenario, 1, "calm")
        .at(Millis::secs(30), order("calm", sleep()))
        .at(Millis::secs(35), order("base", OperatorAction::Stop))
        .at(Millis::secs(40), ScenarioAction::ReloadConfig(Box::new(next)))
        .at(Millis::secs(70), order("other", sleep()));
    scenario = with_request(scenario, 50, "other");
    if again {
        scenario = with_request(scenario, 69, "calm");
    }
    let mut world = SimulatedWorld::new(scenario);
    world.run_until(Millis::secs(76)).unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!((world.tally().count("sleeps"), world.tally().count("wakes")), (2, 0));
    let fleet = world.fleet();
    let calm = fleet.engine(&EngineId::new("calm".into(), 0)).expect("it is configured");
    assert_eq!(calm.pending_reservation.is_some(), again);
    fleet.learned()[&ModelName::from("other")].residue
}

#[test]
fn what_a_neighbour_keeps_beyond_its_new_configuration_is_not_anothers_residue() {
    for again in [false, true] {
        assert_eq!(residue_learned_beside_a_calm_neighbour(again), None, "{again}");
    }
}
