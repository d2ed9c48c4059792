//! Pools with slots: the decisions pick accelerators, each of which has memory and slots.

use rouse::{
    fault::FailureCause,
    fleet::{command::Command, event::Event},
    model::{AcceleratorId, AcceleratorRequirement, EngineId, ModelSpec},
    units::{Bytes, Millis},
};

use crate::{
    harness::{PoolHarness, assert_never_fits, engine, model},
    slot_harness::{accelerators_of, on_slots, slot_pool, that_sleeps_when_idle, usage},
};

/// Reports that the cluster did not place the Pod of the engine that starts.
fn fail_to_place(world: &mut PoolHarness) {
    let generation = world.fleet.engine(&engine("m")).unwrap().generation;
    let cause = FailureCause::Unschedulable;
    world.send(Event::StartFailed { engine: engine("m"), generation, cause });
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
    fail_to_place(&mut world);
    world.advance(Millis::secs(1));
    assert_eq!(world.served, [asked]);
    assert_eq!(accelerators_of(&world, &engine("m")), ["gpu-1"]);
    // Where nothing else may become free, the same is tried again.
    let mut world = PoolHarness::new(slot_pool(&[("a", 1)], 24, 2), vec![on_slots("m", 1, 20)]);
    let asked = world.ask_while_stuck("m");
    fail_to_place(&mut world);
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
        fail_to_place(&mut world);
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
        fail_to_place(&mut world);
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
        assert_never_fits(accelerators, spec, why);
    }
}

/// An accelerator has fewer slots than the pool says if its agent offers fewer, and none if by another resource.
#[test]
fn a_model_without_a_slot_anywhere_is_refused_at_once_and_served_when_there_is_one() {
    let mut some = slot_pool(&[("a", 2), ("b", 2)], 24, 1);
    some[0].units = Some(0);
    some[2].units = Some(0);
    let what = "the pool's resource must name the DeviceConfiguration that offers the accelerators";
    let none = "the model needs a slot on 1 accelerator of one node of pool-a, and no node has slots on any";
    assert_never_fits(slot_pool(&[("a", 2)], 24, 0), on_slots("m", 1, 20), &format!("{none}: {what}"));
    let one = "the model needs a slot on 2 accelerators of one node of pool-a, and no node has slots on more than 1";
    assert_never_fits(some.clone(), on_slots("m", 2, 20), &format!("{one}: {what}"));

    let mut world = PoolHarness::new(some, vec![on_slots("m", 2, 20)]);
    assert!(world.fleet.unplaceable_reason(&"m".into()).is_some());
    world.configure(|configuration| configuration.accelerators = slot_pool(&[("a", 2), ("b", 2)], 24, 1));
    assert_eq!(world.fleet.unplaceable_reason(&"m".into()), None);
    let asked = world.ask("m");
    assert_eq!(world.served, [asked]);
}

#[test]
fn a_model_that_never_has_a_slot_beside_its_dependency_names_the_slots_until_there_are_more() {
    let needs = ModelSpec { dependencies: vec!["base".into()], ..on_slots("m", 1, 10) };
    let models = vec![on_slots("base", 1, 10), needs];
    let mut world = PoolHarness::new(slot_pool(&[("a", 1)], 24, 1), models);
    let why = world.fleet.unplaceable_reason(&"m".into()).unwrap();
    assert!(why.contains("never fits together with its dependencies"), "{why}");
    assert!(why.ends_with("the capacity is 24Gi and 1 slot in gpu-0"), "{why}");
    let asked = world.ask("m");
    assert!(world.refused.contains_key(&asked), "{:?}", world.served);
    world.configure(|configuration| configuration.accelerators = slot_pool(&[("a", 1)], 24, 2));
    assert_eq!(world.fleet.unplaceable_reason(&"m".into()), None);
    let asked = world.ask("m");
    world.advance(Millis::secs(1));
    assert!(world.served.contains(&asked), "{:?}", world.refused);
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
