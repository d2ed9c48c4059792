//! Pools with slots: the decisions pick accelerators, each of which has memory and slots.

use rouse::{
    fault::{FailureCause, Fault},
    fleet::{
        command::Command,
        event::{AdoptedEngine, Event},
    },
    model::{
        Accelerator, AcceleratorId, AcceleratorRequirement, EngineId, EvictionPolicy, FleetConfig, ModelSpec,
    },
    sim::{SplitMix64, journal},
    units::{Bytes, Generation, Millis},
};

use crate::harness::{PoolHarness, engine, gpu, model, with_instant_turns};

/// Accelerators of the pool, `gpu-0` and so on: how many each node has.
fn slot_pool(nodes: &[(&str, usize)], gib: u64, slots: u32) -> Vec<Accelerator> {
    let names = nodes.iter().flat_map(|(node, count)| std::iter::repeat_n(*node, *count));
    let accelerator = |(n, node): (usize, &str)| Accelerator {
        id: format!("gpu-{n}").into(),
        units: Some(slots),
        pool: Some("pool-a".into()),
        node: Some(node.to_owned()),
        ..gpu(gib)
    };
    names.enumerate().map(accelerator).collect()
}

/// A model on this many accelerators of one node of the pool, with `gib` on each.
fn on_slots(name: &str, count: u32, gib: u64) -> ModelSpec {
    ModelSpec {
        accelerators: AcceleratorRequirement::Slots { pool: "pool-a".into(), count },
        ..model(name, gib)
    }
}

fn that_sleeps_when_idle(mut spec: ModelSpec) -> ModelSpec {
    spec.idle.sleep_after = Some(Millis::secs(10));
    spec
}

/// GiB reserved and slots taken on each accelerator, by name.
fn usage(world: &PoolHarness) -> Vec<(u64, u32)> {
    let view = world.fleet.view(&world.fleet.report(&world.fleet.plan(world.now)));
    let of = |accelerator: &rouse::fleet::report::AcceleratorView| {
        (accelerator.reserved.0 >> 30, accelerator.units_taken.unwrap())
    };
    view.accelerators.iter().map(of).collect()
}

fn accelerators_of(world: &PoolHarness, id: &EngineId) -> Vec<String> {
    world.fleet.engine(id).unwrap().accelerators.iter().map(ToString::to_string).collect()
}

fn count(world: &PoolHarness, which: fn(&Command) -> bool) -> usize {
    world.ordered.iter().filter(|command| which(command)).count()
}

#[test]
fn an_engine_gets_accelerators_of_one_node_with_its_memory_and_a_slot_of_each() {
    let mut world = PoolHarness::new(slot_pool(&[("a", 1), ("b", 2)], 24, 4), vec![on_slots("m", 2, 20)]);
    let asked = world.ask("m");
    assert_eq!(world.served, [asked]);
    assert_eq!(usage(&world), [(0, 0), (20, 1), (20, 1)]);
    assert_eq!(accelerators_of(&world, &engine("m")), ["gpu-1", "gpu-2"]);
    let reserved = world.ordered.iter().find_map(|command| match command {
        Command::Reserve { accelerators, bytes, .. } => Some((accelerators.clone(), *bytes)),
        _ => None,
    });
    let both: Vec<AcceleratorId> = vec!["gpu-1".into(), "gpu-2".into()];
    assert_eq!(reserved, Some((both, Bytes::gib(20))), "the bytes are those on each");
}

#[test]
fn two_models_that_do_not_fit_beside_each_other_take_turns_without_a_launch() {
    let mut world = PoolHarness::new(
        slot_pool(&[("a", 1)], 24, 2),
        vec![on_slots("first", 1, 20), on_slots("second", 1, 20)],
    );
    world.configure(with_instant_turns);
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
    let mut world = PoolHarness::new(
        slot_pool(&[("a", 1)], 24, 2),
        vec![on_slots("first", 1, 20), on_slots("second", 1, 20)],
    );
    world.configure(with_instant_turns);
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

#[test]
fn a_model_that_was_measured_to_keep_everything_asleep_sleeps_again_after_its_next_start() {
    let mut world = PoolHarness::new(
        slot_pool(&[("a", 1)], 24, 2),
        vec![on_slots("first", 1, 20), on_slots("second", 1, 20)],
    );
    world.configure(with_instant_turns);
    world.residues.insert(engine("first"), Bytes::gib(20));
    take_turns(&mut world, &["first", "second"]);
    assert_eq!(world.state(&engine("first")), "Cold", "it left no room for the other one");
    world.residues.clear();
    take_turns(&mut world, &["first", "second"]);
    assert_eq!((world.state(&engine("first")), usage(&world)), ("Asleep(1)".to_owned(), vec![(21, 2)]));
}

#[test]
fn models_that_fit_beside_each_other_are_awake_at_once_on_the_accelerators_with_the_most_free_memory() {
    let models = ["a", "b", "c"].map(|name| on_slots(name, 1, 10)).into();
    let mut world = PoolHarness::new(slot_pool(&[("n", 2)], 24, 2), models);
    for name in ["a", "b", "c"] {
        world.ask(name);
    }
    assert_eq!(world.served.len(), 3);
    let places = ["a", "b", "c"].map(|name| accelerators_of(&world, &engine(name)).join(" "));
    assert_eq!(places, ["gpu-0", "gpu-1", "gpu-0"]);
    assert_eq!(usage(&world), [(20, 2), (10, 1)]);
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
fn two_engines_of_a_model_are_never_on_the_same_accelerators() {
    let twice = || vec![ModelSpec { replicas: 2, min_replicas: 2, ..on_slots("m", 1, 10) }];
    let second = EngineId::new("m".into(), 1);
    let world = PoolHarness::new(slot_pool(&[("a", 1), ("b", 1)], 64, 4), twice());
    assert_eq!(usage(&world), [(10, 1), (10, 1)]);
    let mut world = PoolHarness::new(slot_pool(&[("a", 1)], 64, 4), twice());
    assert_eq!((usage(&world), world.state(&second)), (vec![(10, 1)], "Cold".to_owned()));
    let why = "waiting for accelerators without another engine of the model";
    assert!(world.reason("m").ends_with(why), "{}", world.reason("m"));
    world.configure(|configuration| configuration.accelerators = slot_pool(&[("a", 2)], 64, 4));
    assert_eq!((usage(&world), world.state(&second)), (vec![(10, 1), (10, 1)], "Awake".to_owned()));
}

#[test]
fn a_model_has_an_engine_on_each_accelerator_however_many_there_are() {
    let many = ModelSpec { replicas: 66, ..on_slots("many", 1, 10) };
    let mut world = PoolHarness::new(slot_pool(&[("a", 66)], 64, 4), vec![on_slots("other", 1, 20), many]);
    world.ask("other");
    world.configure(|configuration| configuration.models[1].min_replicas = 66);
    let engines = (0..66).map(|replica| EngineId::new("many".into(), replica));
    assert_eq!(engines.filter(|id| world.state(id) == "Awake").count(), 66);
    assert!(usage(&world).iter().all(|(_, taken)| *taken > 0));
}

#[test]
fn no_engine_starts_on_a_node_that_takes_no_pods_and_those_that_sleep_there_wake() {
    let models = ["m", "n"].map(|name| that_sleeps_when_idle(on_slots(name, 1, 10)));
    let mut world = PoolHarness::new(slot_pool(&[("a", 1), ("b", 1)], 24, 2), models.into());
    world.configure(|configuration| configuration.accelerators[0].cordoned = true);
    world.ask("m");
    assert_eq!(accelerators_of(&world, &engine("m")), ["gpu-1"], "gpu-0 is first by name");
    world.finish_requests(engine("m"));
    world.advance(Millis::secs(20));
    assert_eq!(world.state(&engine("m")), "Asleep(1)");
    world.configure(|configuration| configuration.accelerators[1].cordoned = true);
    let (sleeping, cold) = (world.ask("m"), world.ask("n"));
    assert_eq!(world.served.last(), Some(&sleeping));
    assert_eq!(accelerators_of(&world, &engine("m")), ["gpu-1"]);
    assert!(!world.served.contains(&cold) && !world.refused.contains_key(&cold));
    let why = world.reason("n");
    assert!(why.starts_with("waiting for a node of pool-a that takes new Pods"), "{why}");
    world.configure(|configuration| configuration.accelerators[0].cordoned = false);
    assert_eq!(world.served.last(), Some(&cold));
    assert_eq!(accelerators_of(&world, &engine("n")), ["gpu-0"]);
}

#[test]
fn after_a_start_that_the_cluster_did_not_place_the_next_one_is_on_other_accelerators() {
    let mut world = PoolHarness::new(slot_pool(&[("a", 1), ("b", 1)], 24, 2), vec![on_slots("m", 1, 20)]);
    let asked = world.ask_while_stuck("m");
    assert_eq!(accelerators_of(&world, &engine("m")), ["gpu-0"]);
    let generation = world.fleet.engine(&engine("m")).unwrap().generation;
    let cause = FailureCause::Unschedulable;
    world.send(Event::StartFailed { engine: engine("m"), generation, cause });
    world.advance(Millis::secs(1));
    assert_eq!(world.served, [asked]);
    assert_eq!(accelerators_of(&world, &engine("m")), ["gpu-1"]);
    // Where nothing else may become free, the same is tried again.
    let mut world = PoolHarness::new(slot_pool(&[("a", 1)], 24, 2), vec![on_slots("m", 1, 20)]);
    let asked = world.ask_while_stuck("m");
    let generation = world.fleet.engine(&engine("m")).unwrap().generation;
    let cause = FailureCause::Unschedulable;
    world.send(Event::StartFailed { engine: engine("m"), generation, cause });
    world.advance(Millis::secs(1));
    assert_eq!(world.served, [asked]);
}

#[test]
fn starts_that_the_cluster_does_not_place_go_round_all_accelerators_with_room() {
    let nodes = [("a", 1), ("b", 1), ("c", 1)];
    let mut world = PoolHarness::new(slot_pool(&nodes, 24, 2), vec![on_slots("m", 1, 20)]);
    world.stuck = true;
    world.configure(|configuration| configuration.models[0].min_replicas = 1);
    let mut places = Vec::new();
    for _ in 0..5 {
        assert_eq!(world.state(&engine("m")), "Launching");
        places.extend(accelerators_of(&world, &engine("m")));
        let generation = world.fleet.engine(&engine("m")).unwrap().generation;
        let cause = FailureCause::Unschedulable;
        world.send(Event::StartFailed { engine: engine("m"), generation, cause });
        // No back-off of so few failures is longer, and no start gives up so soon.
        world.advance(Millis::secs(20));
    }
    assert_eq!(places, ["gpu-0", "gpu-1", "gpu-2", "gpu-0", "gpu-1"]);
}

/// A node with so many accelerators alone has more sets of two than are listed.
#[test]
fn starts_that_the_cluster_does_not_place_reach_a_node_behind_all_sets_of_a_large_one() {
    let mut accelerators = slot_pool(&[("large", 12), ("small", 2)], 80, 2);
    for accelerator in &mut accelerators[12..] {
        accelerator.capacity = Bytes::gib(48);
    }
    let mut world = PoolHarness::new(accelerators, vec![on_slots("m", 2, 20)]);
    world.stuck = true;
    world.configure(|configuration| configuration.models[0].min_replicas = 1);
    let mut refused = std::collections::BTreeSet::new();
    for _ in 0..6 {
        refused.extend(accelerators_of(&world, &engine("m")));
        let generation = world.fleet.engine(&engine("m")).unwrap().generation;
        let cause = FailureCause::Unschedulable;
        world.send(Event::StartFailed { engine: engine("m"), generation, cause });
        // No back-off of so few failures is longer, and no start gives up so soon.
        world.advance(Millis::secs(20));
    }
    assert_eq!(refused.len(), 12, "each of the large node, once: {refused:?}");
    assert_eq!(accelerators_of(&world, &engine("m")), ["gpu-12", "gpu-13"]);
}

#[test]
fn accelerators_on_which_the_ledger_reserves_nothing_are_tried_after_others() {
    let mut world = PoolHarness::new(slot_pool(&[("a", 1), ("b", 1)], 24, 2), vec![on_slots("m", 1, 20)]);
    world.occupied.insert("gpu-0".into());
    let asked = world.ask("m");
    world.advance(Millis::secs(1));
    assert_eq!(world.served, [asked]);
    assert_eq!(accelerators_of(&world, &engine("m")), ["gpu-1"]);
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
fn what_no_node_of_the_pool_could_hold_is_refused_at_once() {
    let mut mixed = slot_pool(&[("a", 2), ("b", 1)], 24, 4);
    mixed[1].capacity = Bytes::gib(80);
    for (accelerators, spec, why) in [
        (
            Vec::new(),
            on_slots("m", 1, 1),
            "the model needs 1 accelerator of pool-a, and no node of it lists any",
        ),
        (
            mixed.clone(),
            on_slots("m", 3, 1),
            "the model needs 3 accelerators of one node of pool-a, and no node has more than 2",
        ),
        (
            mixed.clone(),
            on_slots("m", 2, 30),
            "the model needs 30Gi on each accelerator (required: 2, large enough on one node: 1): the largest of \
             pool-a has 80Gi (grantable, after headroom)",
        ),
        (
            mixed,
            on_slots("m", 1, 81),
            "the model needs 81Gi on each accelerator: the largest of pool-a has 80Gi (grantable, after headroom)",
        ),
    ] {
        let mut world = PoolHarness::new(accelerators, vec![spec]);
        let asked = world.ask("m");
        let Fault::InsufficientMemory(shortage) = &world.refused[&asked] else {
            panic!("{:?}", world.refused)
        };
        assert!(shortage.permanent);
        assert_eq!(shortage.wait.waited_for, why);
    }
}

#[test]
fn only_models_of_the_pool_are_placed_on_its_accelerators() {
    let mut elsewhere = on_slots("elsewhere", 1, 10);
    elsewhere.accelerators = AcceleratorRequirement::Slots { pool: "pool-b".into(), count: 1 };
    let mut world = PoolHarness::new(slot_pool(&[("a", 1)], 24, 4), vec![model("any", 10), elsewhere]);
    for name in ["any", "elsewhere"] {
        let asked = world.ask(name);
        assert!(world.refused.contains_key(&asked), "{name}");
    }
}

#[test]
fn a_sleeper_leaves_a_faulty_accelerator_for_one_that_works() {
    let spec = that_sleeps_when_idle(on_slots("m", 1, 20));
    let mut world = PoolHarness::new(slot_pool(&[("a", 2)], 24, 2), vec![spec]);
    world.ask("m");
    world.finish_requests(engine("m"));
    world.advance(Millis::secs(20));
    assert_eq!(accelerators_of(&world, &engine("m")), ["gpu-0"]);
    world.configure(|configuration| configuration.accelerators[0].capacity = Bytes::ZERO);
    assert_eq!(world.state(&engine("m")), "Asleep(1)", "nobody needs it");
    let asked = world.ask("m");
    assert_eq!(world.served.last(), Some(&asked));
    assert_eq!(accelerators_of(&world, &engine("m")), ["gpu-1"]);
    assert_eq!(usage(&world), [(0, 0), (20, 1)]);
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
    let snapshot = journal::write_turn(world.now, &world.fleet.snapshot()).unwrap();
    let header = journal::write(&journal::JournalLine::header("1", world.now)).unwrap();
    world.fleet = rouse::fleet::Fleet::new();
    for line in journal::read(&format!("{header}\n{snapshot}\n")).unwrap() {
        let journal::JournalLine::Turn { at, events } = line else { continue };
        events.iter().for_each(|event: &Event| world.fleet.on(event, at));
    }
    assert_eq!(world.fleet.broken_invariants(), [""; 0]);
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
