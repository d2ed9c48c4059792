//! Learning a model's peak from a meter without processes, as NVML is in a container.
//!
//! Where the engine is alone on its accelerator, its peak is the growth of the memory in use during its start.

use std::collections::BTreeMap;

use rouse::{
    fleet::event::Event,
    model::{Accelerator, Configuration, ModelName, Settings},
    sim::{Deed, Request, Scenario, World, journal::Line, scenario::scripts::model},
    units::{Bytes, Millis},
};

/// One accelerator of 80 GiB, of which another program uses 4 GiB.
fn world() -> Scenario {
    let gpu = Accelerator { id: "gpu".into(), capacity: Bytes::gib(80), metered: true, units: None };
    let models = vec![model("one", 20), model("two", 10)];
    let configuration = Configuration { settings: Settings::default(), accelerators: vec![gpu], models };
    let mut scenario = Scenario::new("peaks", configuration);
    scenario.nature.per_process = false;
    scenario.at(Millis(1), Deed::Foreign("gpu".into(), Bytes::gib(4)))
}

fn ask(scenario: Scenario, at: u64, model: &str) -> Scenario {
    scenario.at(Millis::secs(at), Deed::Ask(Request::stream(model, Millis::secs(1))))
}

/// The peak of each model, as a restarted gateway recalls it.
fn peaks(scenario: Scenario) -> BTreeMap<ModelName, Option<Bytes>> {
    let mut world = World::new(scenario.at(Millis::secs(100), Deed::Restart)).recorded();
    world.run_until(Millis::secs(101)).unwrap_or_else(|failure| panic!("{failure}"));
    let turns = world.journal().iter().filter_map(|line| match line {
        Line::Turn { events, .. } => Some(events),
        Line::Header { .. } => None,
    });
    let recalled = turns.flatten().filter_map(|event| match event {
        Event::Recalled { model, learned } => Some((model.clone(), learned.peak)),
        _ => None,
    });
    recalled.collect()
}

#[test]
fn an_engine_alone_took_what_came_to_be_in_use_while_it_started() {
    let scenario = ask(world(), 5, "one");
    let scenario = scenario.at(Millis::secs(40), Deed::Foreign("gpu".into(), Bytes::gib(30)));
    // The second engine makes the meter read again: memory that another program took since then is not the first engine's.
    let learned = peaks(ask(scenario, 50, "two"));
    assert_eq!(learned["one"], Some(Bytes::gib(20)));
}

#[test]
fn of_an_engine_beside_another_nothing_is_learned() {
    let learned = peaks(ask(ask(world(), 5, "one"), 30, "two"));
    assert_eq!(learned["one"], Some(Bytes::gib(20)));
    assert_eq!(learned["two"], None, "either could have taken more meanwhile");
}
