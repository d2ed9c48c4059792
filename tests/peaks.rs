//! Learns a model's peak from a meter without per-process figures, like NVML's in a container.
//!
//! If the engine is alone on its accelerator, its peak is the growth of used memory during its start.

use std::collections::BTreeMap;

use rouse::{
    fleet::event::Event,
    model::{Accelerator, FleetConfig, FleetSettings, ModelName},
    sim::{
        Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld, journal::JournalLine,
        scenario::scripts::model,
    },
    units::{Bytes, Millis},
};

/// One accelerator of 80 GiB, 4 GiB of which another program uses.
fn base_scenario() -> Scenario {
    let gpu = Accelerator { id: "gpu".into(), capacity: Bytes::gib(80), metered: true, units: None };
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
        Event::MeasurementsRestored { model, learned } => Some((model.clone(), learned.peak)),
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
