//! What an engine takes is learned also from a meter that does not say whose memory is in use, as in a container that sees no processes
//! but its own: where the engine is alone on its accelerator, from what came to be in use while it started.

use std::collections::BTreeMap;

use rouse::{
    fleet::event::Event,
    model::{
        Accelerator, Accelerators, Configuration, Idle, LevelPolicy, Memory, ModelName, ModelSpec, OwnQueue,
        Settings,
    },
    sim::{Deed, Request, Scenario, World, journal::Line},
    units::{Bytes, Millis},
};

fn model(name: &str, awake: Bytes) -> ModelSpec {
    ModelSpec {
        name: name.into(),
        aliases: Vec::new(),
        accelerators: Accelerators::Count(1),
        memory: Memory { awake, asleep: Bytes::gib(1), host: Bytes::ZERO },
        idle: Idle { sleep_after: None, stop_after: None, level: LevelPolicy::Auto },
        replicas: 1,
        pinned: false,
        min_replicas: 0,
        dependencies: Vec::new(),
        priority: 0,
        max_concurrency: None,
        start_timeout: Millis::secs(60),
        explicit_memory: false,
        can_sleep: true,
        fingerprint: 1,
        eviction: None,
        queue: OwnQueue::default(),
    }
}

/// One accelerator of 80 GiB, of which somebody else uses 4 GiB.
fn world() -> Scenario {
    let gpu = Accelerator { id: "gpu".into(), capacity: Bytes::gib(80), metered: true, units: None };
    let models = vec![model("one", Bytes::gib(20)), model("two", Bytes::gib(10))];
    let configuration = Configuration { settings: Settings::default(), accelerators: vec![gpu], models };
    let mut scenario = Scenario::new("peaks", configuration);
    scenario.nature.per_process = false;
    scenario.at(Millis(1), Deed::Foreign("gpu".into(), Bytes::gib(4)))
}

fn ask(scenario: Scenario, at: u64, model: &str) -> Scenario {
    scenario.at(Millis::secs(at), Deed::Ask(Request::stream(model, Millis::secs(1))))
}

/// What was learned of each model, as a gateway that starts anew recalls it.
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
    // Read again, for another engine: what somebody else has come to use since is not the first one's.
    let learned = peaks(ask(scenario, 50, "two"));
    assert_eq!(learned["one"], Some(Bytes::gib(20)));
}

#[test]
fn of_an_engine_beside_another_nothing_is_learned() {
    let learned = peaks(ask(ask(world(), 5, "one"), 30, "two"));
    assert_eq!(learned["one"], Some(Bytes::gib(20)));
    assert_eq!(learned["two"], None, "either could have taken more meanwhile");
}
