//! What a restart, a change of leader and a new journal keep of targets, variants and measurements.

use rouse::{
    fleet::{
        Fleet,
        command::Command,
        event::{AdoptedEngine, Event, LearnedMeasurements, PublishedEngine, PublishedEngineState},
    },
    model::{EngineId, VariantName},
    sim::{ScenarioAction, SimulatedWorld},
    units::{Bytes, Generation, Millis, Tick},
};

use crate::harness::{
    awake, base_scenario, default_variant, request, scaled, simulated, target, until, variant_engine,
    variants, with_accelerators, with_variants,
};

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
