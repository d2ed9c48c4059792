//! Pools with slots: the memory and the slots that engines reserve, give back and keep.

use rouse::{
    fleet::{
        command::Command,
        event::{AdoptedEngine, Event, OperationId, OperatorAction, PublishedEngine, PublishedEngineState},
    },
    journal,
    model::{
        Accelerator, AcceleratorRequirement, EvictionPolicy, FleetConfig, ModelName, ModelSpec, SleepLevel,
    },
    sim::SplitMix64,
    units::{Bytes, Generation, Millis},
};

use crate::{
    harness::{PoolHarness, engine, gpu, model, with_instant_turns},
    slot_harness::{accelerators_of, on_slots, slot_pool, that_sleeps_when_idle, usage},
};

fn count(world: &PoolHarness, which: fn(&Command) -> bool) -> usize {
    world.ordered.iter().filter(|command| which(command)).count()
}

/// An accelerator with two slots, and two models that do not fit there at once.
fn two_large_models() -> PoolHarness {
    let mut world = PoolHarness::new(
        slot_pool(&[("a", 1)], 24, 2),
        vec![on_slots("first", 1, 20), on_slots("second", 1, 20)],
    );
    world.configure(with_instant_turns);
    world
}

#[test]
fn two_models_that_do_not_fit_beside_each_other_take_turns_without_a_launch() {
    let mut world = two_large_models();
    for turn in 0..6 {
        let name = ["first", "second"][turn % 2];
        let asked = world.ask(name);
        assert_eq!(world.served.last(), Some(&asked), "turn {turn}");
        world.finish_requests(engine(name));
        world.advance(Millis::secs(1));
        assert_eq!(usage(&world), [if turn == 0 { (20, 1) } else { (21, 2) }]);
    }
    assert_eq!(count(&world, |command| matches!(command, Command::Launch { .. })), 2);
    assert_eq!(count(&world, |command| matches!(command, Command::Sleep { .. })), 5);
    assert_eq!(count(&world, |command| matches!(command, Command::Stop { .. })), 0);
}

/// Has each of these models serve a request, and end it.
fn take_turns(world: &mut PoolHarness, names: &[&str]) {
    for name in names {
        let asked = world.ask(name);
        assert_eq!(world.served.last(), Some(&asked), "{name}");
        world.finish_requests(engine(name));
        world.advance(Millis::secs(1));
    }
}

/// Otherwise the decisions would wake an engine for which pairing sees no room, and pairing would wait for ever.
#[test]
fn what_a_sleeper_was_measured_to_keep_counts_in_place_of_what_was_declared() {
    let mut world = two_large_models();
    world.residues.insert(engine("first"), Bytes::gib(3));
    take_turns(&mut world, &["first", "second"]);
    assert_eq!(usage(&world), [(23, 2)]);
    world.residues.insert(engine("first"), Bytes::gib(1));
    take_turns(&mut world, &["first", "second"]);
    assert_eq!(usage(&world), [(21, 2)], "the last measurement counts");
    // Beside what the first one keeps now, the second one has no room.
    world.residues.insert(engine("first"), Bytes::gib(5));
    take_turns(&mut world, &["first", "second"]);
    assert_eq!(world.state(&engine("first")), "Cold");
    assert_eq!(usage(&world), [(20, 1)]);
}

/// In mode deployment the stub reads the whole accelerator, and not one engine.
#[test]
fn what_is_in_use_beside_other_engines_counts_as_what_a_sleeper_keeps() {
    let mut world = two_large_models();
    world.used_after_sleep = [(engine("first"), Bytes::gib(3)), (engine("second"), Bytes::gib(5))].into();
    take_turns(&mut world, &["first", "second"]);
    assert_eq!(usage(&world), [(23, 2)], "the first one was alone there");
    take_turns(&mut world, &["first"]);
    assert_eq!(usage(&world), [(22, 2)], "3Gi of the 5Gi in use were reserved for the first one");
    world.used_after_sleep.insert(engine("first"), Bytes::gib(2));
    take_turns(&mut world, &["second"]);
    assert_eq!(
        usage(&world),
        [(23, 2)],
        "as before: the second one may use less than the 2Gi that it has reserved"
    );
}

/// A reservation that waits for its dependency is not in use yet.
#[test]
fn what_is_only_reserved_beside_a_sleeper_does_not_hide_what_it_keeps() {
    let top = ModelSpec { dependencies: vec!["base".into()], ..on_slots("top", 1, 10) };
    let base = ModelSpec { accelerators: AcceleratorRequirement::Count(0), ..model("base", 1) };
    let first = that_sleeps_when_idle(on_slots("first", 1, 10));
    let mut world = PoolHarness::new(slot_pool(&[("a", 1)], 24, 2), vec![first, top, base]);
    world.ask("first");
    world.finish_requests(engine("first"));
    world.ask_while_stuck("top");
    assert_eq!((usage(&world), world.state(&engine("top"))), (vec![(20, 2)], "Cold".to_owned()));
    world.used_after_sleep.insert(engine("first"), Bytes::gib(3));
    world.advance(Millis::secs(20));
    assert_eq!(world.state(&engine("first")), "Asleep(1)");
    assert_eq!(usage(&world), [(13, 2)]);
}

/// The configuration has come to say less meanwhile.
#[test]
fn a_sleeper_that_gives_up_a_reservation_keeps_what_it_had() {
    let mut top =
        that_sleeps_when_idle(ModelSpec { dependencies: vec!["base".into()], ..on_slots("top", 1, 10) });
    top.memory.asleep = Bytes::gib(4);
    let base = ModelSpec { accelerators: AcceleratorRequirement::Count(0), ..model("base", 1) };
    let mut world = PoolHarness::new(slot_pool(&[("a", 1)], 24, 2), vec![top, base]);
    let stop = |world: &mut PoolHarness, operation: u64| {
        world.send(Event::OperatorRequest {
            operation: OperationId(operation),
            model: "base".into(),
            action: OperatorAction::Stop,
        });
    };
    world.ask("top");
    world.finish_requests(engine("top"));
    world.advance(Millis::secs(20));
    assert_eq!((usage(&world), world.state(&engine("top"))), (vec![(4, 1)], "Asleep(1)".to_owned()));
    stop(&mut world, 1);
    world.configure(|configuration| configuration.models[0].memory.asleep = Bytes::gib(1));
    let asked = world.ask_while_stuck("top");
    assert_eq!(usage(&world), [(10, 1)]);
    world.send(Event::Left { waiter: asked });
    stop(&mut world, 2);
    assert_eq!((usage(&world), world.state(&engine("top"))), (vec![(4, 1)], "Asleep(1)".to_owned()));
    let learned = world.fleet.learned();
    assert_eq!(learned[&ModelName::from("top")].residue, None, "nothing was measured");
}

#[test]
fn a_model_that_was_measured_to_keep_everything_asleep_sleeps_again_after_its_next_start() {
    let mut world = two_large_models();
    world.residues.insert(engine("first"), Bytes::gib(20));
    take_turns(&mut world, &["first", "second"]);
    assert_eq!(world.state(&engine("first")), "Cold", "it left no room for the other one");
    world.residues.clear();
    take_turns(&mut world, &["first", "second"]);
    assert_eq!((world.state(&engine("first")), usage(&world)), ("Asleep(1)".to_owned(), vec![(21, 2)]));
}

#[test]
fn the_sleeper_that_was_unused_for_longest_is_stopped_where_a_slot_is_lacking_and_not_memory() {
    let models = ["first", "second", "third"].map(|name| that_sleeps_when_idle(on_slots(name, 1, 20)));
    let mut world = PoolHarness::new(slot_pool(&[("a", 1)], 64, 2), models.into());
    world.configure(with_instant_turns);
    for name in ["first", "second"] {
        world.ask(name);
        world.finish_requests(engine(name));
        world.advance(Millis::secs(1));
    }
    world.advance(Millis::secs(20));
    assert_eq!(usage(&world), [(2, 2)], "both sleep, with their slots");
    world.configure(|configuration| configuration.settings.eviction = EvictionPolicy::Never);
    let asked = world.ask("third");
    let taken = "all 2 slots of gpu-0 are taken: held by first, ";
    assert!(world.reason("third").starts_with(taken), "{}", world.reason("third"));
    world.configure(|configuration| configuration.settings.eviction = EvictionPolicy::Residency);
    assert!(world.served.contains(&asked));
    let states = ["first", "second", "third"].map(|name| world.state(&engine(name)));
    assert_eq!(states, ["Cold", "Asleep(1)", "Awake"]);
    assert_eq!(usage(&world), [(21, 2)]);
}

#[test]
fn engines_sleep_at_level_one_only_while_their_own_node_has_the_ram() {
    let mut accelerators = slot_pool(&[("a", 1), ("b", 1)], 64, 2);
    for accelerator in &mut accelerators {
        accelerator.host_memory = Some(Bytes::gib(10));
    }
    let models = ["first", "second", "third"].map(|name| {
        let mut spec = that_sleeps_when_idle(on_slots(name, 1, 20));
        spec.memory.host = Bytes::gib(8);
        spec
    });
    let mut world = PoolHarness::new(accelerators, models.into());
    for name in ["first", "second", "third"] {
        world.ask(name);
        world.finish_requests(engine(name));
    }
    let places = ["first", "second", "third"].map(|name| accelerators_of(&world, &engine(name)).join(" "));
    assert_eq!(places, ["gpu-0", "gpu-1", "gpu-0"]);
    world.advance(Millis::secs(20));
    let states = ["first", "second", "third"].map(|name| world.state(&engine(name)));
    assert_eq!(states, ["Asleep(1)", "Asleep(1)", "Asleep(2)"], "each node has RAM for one of them");
}

#[test]
fn a_follower_counts_the_engines_that_the_leader_publishes_on_their_accelerators() {
    let mut world = PoolHarness::new(slot_pool(&[("a", 2)], 24, 2), vec![on_slots("m", 1, 20)]);
    world.send(Event::LeadershipChanged { leads: false });
    let published = |state: PublishedEngineState, accelerator: &str| PublishedEngine {
        state,
        address: Some(([127, 0, 0, 1], 1).into()),
        fingerprint: 0,
        accelerators: vec![accelerator.into()],
        since: world.now,
        failure: None,
    };
    let (awake, asleep) = (PublishedEngineState::Awake, PublishedEngineState::Asleep(SleepLevel::One));
    let changes = [
        (1, Some(published(awake, "gpu-1")), [(0, 0), (20, 1)]),
        (1, Some(published(asleep, "gpu-1")), [(0, 0), (1, 1)]),
        (2, Some(published(awake, "gpu-0")), [(20, 1), (0, 0)]),
        (2, None, [(0, 0), (0, 0)]),
    ];
    for (generation, published, expected) in changes {
        let generation = Generation(generation);
        world.send(Event::Published { engine: engine("m"), generation, published });
        assert_eq!(usage(&world), expected, "{generation}");
    }
}

#[test]
fn what_a_found_engine_holds_counts_once_its_accelerator_is_listed_again() {
    let mut world = PoolHarness::new(Vec::new(), vec![on_slots("m", 1, 20)]);
    let found = AdoptedEngine {
        address: ([127, 0, 0, 1], 1).into(),
        accelerators: vec!["gpu-0".into()],
        asleep: None,
        ready: true,
        fingerprint: world.configuration.models[0].fingerprint,
        last_lease_end: world.now,
        started: world.now,
    };
    world.send(Event::Adopted { engine: engine("m"), generation: Generation(1), found });
    assert_eq!(usage(&world), [(20, 1)], "nothing is granted there");
    world.configure(|configuration| configuration.accelerators = slot_pool(&[("a", 1)], 24, 2));
    assert_eq!((usage(&world), world.state(&engine("m"))), (vec![(20, 1)], "Awake".to_owned()));
}

#[test]
fn an_engine_placed_before_its_pool_got_slots_ends_and_starts_on_an_accelerator_and_so_the_other_way() {
    let pool = Accelerator { id: "pool-a".into(), units: Some(2), ..gpu(48) };
    let of_pool = AcceleratorRequirement::InPool { pool: "pool-a".into(), count: 1 };
    let of_slots = AcceleratorRequirement::Slots { pool: "pool-a".into(), count: 1 };
    let with_slots = slot_pool(&[("a", 1)], 24, 2);
    let mut world = PoolHarness::new(vec![pool.clone()], vec![on_slots("m", 1, 20)]);
    for (accelerators, requirement, place) in [
        (vec![pool.clone()], of_pool.clone(), "pool-a"),
        (with_slots, of_slots, "gpu-0"),
        (vec![pool], of_pool, "pool-a"),
    ] {
        world.configure(|configuration| {
            configuration.accelerators = accelerators;
            configuration.models[0].accelerators = requirement;
        });
        assert_eq!(world.state(&engine("m")), "Cold", "{place}");
        let asked = world.ask("m");
        assert_eq!(world.served.last(), Some(&asked));
        world.finish_requests(engine("m"));
        assert_eq!(accelerators_of(&world, &engine("m")), [place]);
        assert_eq!(usage(&world), [(20, 1)], "no other account is left");
    }
}

#[test]
fn no_accelerator_has_more_reserved_or_more_engines_than_it_has_room_for() {
    for seed in 0..40 {
        let mut random = SplitMix64::new(seed);
        let slots = u32::try_from(random.between(1, 3)).unwrap();
        let spec = |number: u64, random: &mut SplitMix64| {
            let accelerators = if random.chance(0.2) { 2 } else { 1 };
            let spec = on_slots(&format!("m{number}"), accelerators, random.between(4, 20));
            if random.chance(0.5) { that_sleeps_when_idle(spec) } else { spec }
        };
        let models = (0..6).map(|number| spec(number, &mut random)).collect();
        let mut world = PoolHarness::new(slot_pool(&[("a", 2), ("b", 1)], 24, slots), models);
        world.configure(with_instant_turns);
        for step in 0..60 {
            let name = format!("m{}", random.between(0, 5));
            let is_used = world.fleet.engine(&engine(&name)).is_some_and(|e| e.leases > 0);
            match random.between(0, 2) {
                0 => {
                    world.ask(&name);
                }
                1 if is_used => {
                    world.finish_requests(engine(&name));
                    let generation = world.fleet.engine(&engine(&name)).unwrap().generation;
                    world.send(Event::Drained { engine: engine(&name), generation });
                }
                _ => world.advance(Millis::secs(random.between(1, 30))),
            }
            let used = usage(&world);
            assert!(
                used.iter().all(|(gib, taken)| *gib <= 24 && *taken <= slots),
                "seed {seed}, step {step}: {used:?} of 24 GiB and {slots} slots each"
            );
        }
        assert!(!world.served.is_empty(), "seed {seed}");
    }
}

#[test]
fn a_state_in_a_journal_has_the_pool_and_the_node_of_each_accelerator() {
    let mut world = PoolHarness::new(slot_pool(&[("a", 1), ("b", 1)], 24, 2), vec![on_slots("m", 1, 20)]);
    world.ask("m");
    let before = usage(&world);
    world.reload_from_journal();
    assert_eq!(usage(&world), before);
    let view = world.fleet.view(&world.fleet.report(&world.fleet.plan(world.now)));
    let places = view.accelerators.iter().map(|a| (a.pool.as_ref().unwrap().as_str(), a.node.as_deref()));
    assert_eq!(places.collect::<Vec<_>>(), [("pool-a", Some("a")), ("pool-a", Some("b"))]);
    let pool = AcceleratorRequirement::Slots { pool: "pool-a".into(), count: 1 };
    assert_eq!(world.fleet.free_memory(&pool), Bytes::gib(28));
    let capacity = world.fleet.accelerator_capacity(&"pool-a".into()).unwrap();
    assert_eq!((capacity.capacity, capacity.units), (Bytes::gib(48), Some(4)));
}

/// Checks that a configuration with slots is read as it was written.
#[test]
fn a_configuration_with_slots_survives_a_journal() {
    let configuration = FleetConfig {
        settings: rouse::model::FleetSettings::default(),
        accelerators: slot_pool(&[("a", 1)], 24, 2),
        models: vec![on_slots("m", 1, 20)],
    };
    let event = Event::Configured { configuration: Box::new(configuration) };
    let text = journal::write_turn(rouse::units::Tick(1), std::slice::from_ref(&event)).unwrap();
    let header = journal::write(&journal::JournalLine::header("1", rouse::units::Tick(1))).unwrap();
    let lines = journal::read(&format!("{header}\n{text}\n")).unwrap();
    let journal::JournalLine::Turn { events, .. } = &lines[1] else { panic!("{lines:?}") };
    assert_eq!(*events, [event]);
}
