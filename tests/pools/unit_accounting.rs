//! Pools: bytes and accelerators, where another component selects the accelerators.

use rouse::{
    fleet::{
        command::Command,
        event::{AdoptedEngine, Event, PublishedEngine, PublishedEngineState},
    },
    journal,
    model::{Accelerator, AcceleratorRequirement, EvictionPolicy, ModelSpec},
    units::{Bytes, Generation, Millis},
};

use crate::harness::{PoolHarness, assert_never_fits, engine, gpu, model, with_instant_turns};

fn pool(gib: u64, units: u32) -> Accelerator {
    Accelerator { id: "pool-a".into(), units: Some(units), ..gpu(gib) }
}

/// A model on this many accelerators of the pool, with `gib` on each.
fn model_in_pool(name: &str, count: u32, gib: u64) -> ModelSpec {
    ModelSpec {
        accelerators: AcceleratorRequirement::InPool { pool: "pool-a".into(), count },
        ..model(name, gib)
    }
}

/// Bytes reserved and accelerators taken in the pool.
fn taken(world: &PoolHarness) -> (Bytes, u32) {
    let report = world.fleet.report(&world.fleet.plan(world.now));
    let view = world.fleet.view(&report);
    let [pool] = view.accelerators.as_slice() else { panic!("{:?}", view.accelerators) };
    (pool.reserved, pool.units_taken.unwrap())
}

fn reservations(world: &PoolHarness) -> Vec<(&str, usize, Bytes)> {
    let reserved = world.ordered.iter().filter_map(|command| match command {
        Command::Reserve { engine, accelerators, bytes, .. } => {
            Some((engine.model.as_str(), accelerators.len(), *bytes))
        }
        _ => None,
    });
    reserved.collect()
}

#[test]
fn an_engine_takes_its_memory_once_for_each_accelerator() {
    let mut world = PoolHarness::new(vec![pool(640, 8)], vec![model_in_pool("m", 4, 60)]);
    let asked = world.ask("m");
    assert_eq!(world.served, [asked]);
    assert_eq!(reservations(&world), [("m", 1, Bytes::gib(240))]);
    assert_eq!(taken(&world), (Bytes::gib(240), 4));
    let launched = world.ordered.iter().find_map(|command| match command {
        Command::Launch { accelerators, .. } => Some(accelerators.clone()),
        _ => None,
    });
    assert_eq!(launched.unwrap(), ["pool-a".into()], "the pool stands for what is picked of it");
}

#[test]
fn where_all_accelerators_are_taken_the_memory_that_is_left_helps_nobody() {
    let mut world = PoolHarness::new(
        vec![pool(640, 4)],
        vec![model_in_pool("first", 3, 20), model_in_pool("second", 2, 20)],
    );
    world.configure(|configuration| configuration.settings.eviction = EvictionPolicy::Never);
    world.ask("first");
    world.ask("second");
    assert_eq!(taken(&world), (Bytes::gib(60), 3));
    let free = "1 of 4 accelerators of pool-a are free, and the engine needs 2: held by first, 1 lease, never evicted";
    assert!(world.reason("second").starts_with(free), "{}", world.reason("second"));

    world.configure(|configuration| configuration.models[1] = model_in_pool("second", 1, 20));
    assert_eq!(taken(&world), (Bytes::gib(80), 4));
    world.configure(|configuration| configuration.models.push(model_in_pool("third", 1, 20)));
    world.ask("third");
    let full =
        "all 4 accelerators of pool-a are taken: held by first, 1 lease, never evicted; held by second";
    assert!(world.reason("third").starts_with(full), "{}", world.reason("third"));
}

#[test]
fn the_accelerators_that_the_first_in_line_waits_for_are_not_for_those_behind_it() {
    let mut world = PoolHarness::new(
        vec![pool(640, 4)],
        vec![model_in_pool("busy", 2, 20), model_in_pool("large", 3, 20), model_in_pool("small", 1, 20)],
    );
    world.ask("busy");
    let large = world.ask("large");
    let small = world.ask("small");
    assert_eq!(taken(&world), (Bytes::gib(40), 2), "two are free, and they are spoken for");
    world.send(Event::Left { waiter: large });
    assert!(world.served.contains(&small));
}

#[test]
fn whoever_makes_room_gives_back_accelerators_and_not_only_memory() {
    // A sleeping engine keeps its accelerators, so it has to be stopped.
    let models =
        vec![model_in_pool("first", 2, 20), model_in_pool("second", 2, 20), model_in_pool("third", 1, 20)];
    let mut world = PoolHarness::new(vec![pool(640, 4)], models);
    world.configure(with_instant_turns);
    for name in ["first", "second"] {
        world.ask(name);
        world.finish_requests(engine(name));
        world.advance(Millis::secs(1));
    }
    let asked = world.ask("third");
    assert!(world.served.contains(&asked));
    let states = ["first", "second", "third"].map(|name| world.state(&engine(name)));
    assert_eq!(states, ["Cold", "Awake", "Awake"], "the one unused for longest");
    assert_eq!(taken(&world), (Bytes::gib(60), 3));
}

#[test]
fn where_only_memory_is_short_a_sleeper_keeps_its_accelerators() {
    let mut world = PoolHarness::new(
        vec![pool(100, 4)],
        vec![model_in_pool("first", 2, 40), model_in_pool("second", 2, 40)],
    );
    world.configure(with_instant_turns);
    world.ask("first");
    world.finish_requests(engine("first"));
    world.advance(Millis::secs(1));
    let asked = world.ask("second");
    assert!(world.served.contains(&asked));
    assert_eq!(world.state(&engine("first")), "Asleep(1)");
    assert_eq!(taken(&world), (Bytes::gib(82), 4));
}

#[test]
fn a_sleeper_that_keeps_no_memory_keeps_its_accelerators_and_wakes_with_them() {
    let mut lean = model_in_pool("lean", 3, 40);
    lean.memory.asleep = Bytes::ZERO;
    lean.idle.sleep_after = Some(Millis::secs(10));
    let mut world = PoolHarness::new(vec![pool(640, 4)], vec![lean, model_in_pool("other", 2, 20)]);
    world.configure(|configuration| configuration.settings.eviction = EvictionPolicy::Never);
    world.ask("lean");
    world.finish_requests(engine("lean"));
    world.advance(Millis::secs(10));
    assert_eq!((world.state(&engine("lean")), taken(&world)), ("Asleep(1)".to_owned(), (Bytes::ZERO, 3)));
    world.ask("other");
    assert!(!world.served.is_empty() && world.reason("other").starts_with("1 of 4 accelerators"));
    let asked = world.ask("lean");
    assert_eq!((world.served.last(), taken(&world)), (Some(&asked), (Bytes::gib(120), 3)));
}

#[test]
fn what_no_pool_like_this_could_hold_is_refused_at_once() {
    for (spec, why) in [
        (
            model_in_pool("m", 9, 1),
            "the model needs 9Gi and 9 accelerators of pool-a, which has 640Gi and 8 accelerators in all",
        ),
        (
            model_in_pool("m", 8, 81),
            "the model needs 648Gi and 8 accelerators of pool-a, which has 640Gi and 8 accelerators in all",
        ),
    ] {
        assert_never_fits(vec![pool(640, 8)], spec, why);
    }
}

#[test]
fn a_learned_peak_counts_for_each_accelerator_unless_no_pool_could_hold_it() {
    for (peak, booked) in [(70, 280), (200, 240)] {
        let mut world = PoolHarness::new(vec![pool(640, 8)], vec![model_in_pool("m", 4, 60)]);
        let learned =
            rouse::fleet::event::LearnedMeasurements { peak: Some(Bytes::gib(peak)), ..Default::default() };
        let variant = rouse::model::VariantName::default();
        world.send(Event::MeasurementsRestored { model: "m".into(), variant, learned });
        world.ask("m");
        assert_eq!(reservations(&world), [("m", 1, Bytes::gib(booked))]);
    }
}

#[test]
fn launches_into_a_pool_do_not_wait_for_each_other_and_nobody_else_is_put_there() {
    let mut world = PoolHarness::new(
        vec![pool(640, 8), gpu(10)],
        vec![model_in_pool("a", 1, 60), model_in_pool("b", 1, 60), model("c", 60)],
    );
    world.stuck = true;
    world.ask("a");
    world.ask("b");
    assert_eq!(["a", "b"].map(|name| world.state(&engine(name))), ["Launching", "Launching"]);
    let asked = world.ask("c");
    assert!(world.refused.contains_key(&asked), "a pool is for those who name it");
}

#[test]
fn a_pool_that_grows_lets_those_start_who_wait() {
    let mut world = PoolHarness::new(
        vec![pool(160, 2)],
        vec![model_in_pool("first", 2, 80), model_in_pool("second", 2, 80)],
    );
    world.configure(|configuration| configuration.settings.eviction = EvictionPolicy::Never);
    world.ask("first");
    let asked = world.ask("second");
    for larger in [pool(320, 2), pool(160, 4)] {
        world.configure(|configuration| configuration.accelerators = vec![larger]);
        assert!(!world.served.contains(&asked), "of one of the two there is not enough");
    }
    world.configure(|configuration| configuration.accelerators = vec![pool(320, 4)]);
    assert!(world.served.contains(&asked));
    assert_eq!(taken(&world), (Bytes::gib(320), 4));
}

#[test]
fn a_pool_that_shrinks_below_what_is_booked_says_so_and_grants_nothing_new() {
    let mut world = PoolHarness::new(
        vec![pool(640, 8)],
        vec![model_in_pool("first", 4, 80), model_in_pool("second", 1, 10)],
    );
    world.configure(|configuration| configuration.settings.eviction = EvictionPolicy::Never);
    world.ask("first");
    for (smaller, why) in [
        (pool(300, 8), "overcommitted: 320Gi reserved of 300Gi; nothing new is granted here"),
        (pool(640, 3), "overcommitted: 4 accelerators taken of 3; nothing new is granted here"),
    ] {
        world.configure(|configuration| configuration.accelerators = vec![smaller]);
        let report = world.fleet.report(&world.fleet.plan(world.now));
        assert_eq!(report.accelerators["pool-a"], why);
        let asked = world.ask("second");
        assert!(!world.served.contains(&asked) && !world.refused.contains_key(&asked));
        assert_eq!(world.state(&engine("first")), "Awake", "whoever is there stays");
        world.send(Event::Left { waiter: asked });
    }
    world.configure(|configuration| configuration.accelerators = vec![pool(640, 8)]);
    let asked = world.ask("second");
    assert!(world.served.contains(&asked));
}

#[test]
fn a_model_without_accelerators_starts_at_once_and_blocks_no_other() {
    let mut elsewhere = ModelSpec { accelerators: AcceleratorRequirement::Count(0), ..model("elsewhere", 0) };
    elsewhere.can_sleep = false;
    let mut world = PoolHarness::new(
        vec![pool(80, 1)],
        vec![model_in_pool("here", 1, 80), elsewhere, model_in_pool("other", 1, 80)],
    );
    world.configure(with_instant_turns);
    world.ask("here");
    let asked = world.ask("elsewhere");
    assert_eq!(world.served.last(), Some(&asked));
    assert_eq!(reservations(&world).last(), Some(&("elsewhere", 0, Bytes::ZERO)));
    assert_eq!(taken(&world), (Bytes::gib(80), 1));
    for name in ["here", "elsewhere"] {
        world.finish_requests(engine(name));
    }
    world.advance(Millis::secs(1));
    let asked = world.ask("other");
    assert_eq!((world.served.last(), world.state(&engine("here"))), (Some(&asked), "Cold".to_owned()));
    assert_eq!(world.state(&engine("elsewhere")), "Awake");
}

#[test]
fn a_state_in_a_journal_has_what_is_taken_and_one_without_pools_does_not_speak_of_it() {
    let mut world =
        PoolHarness::new(vec![pool(640, 4)], vec![model_in_pool("m", 3, 20), model_in_pool("n", 2, 20)]);
    world.configure(|configuration| configuration.settings.eviction = EvictionPolicy::Never);
    world.ask("m");
    world.reload_from_journal();
    world.ask("n");
    assert_eq!(taken(&world), (Bytes::gib(60), 3));

    let plain = PoolHarness::new(vec![gpu(24)], vec![model("m", 20)]);
    let plain = journal::write_turn(plain.now, &plain.fleet.snapshot()).unwrap();
    assert!(!plain.contains("units") && !plain.contains("taken"), "{plain}");
}

/// It may have more, but has at least one. A gateway that follows leaves it to the leader.
#[test]
fn an_engine_of_a_former_model_takes_one_accelerator_once_this_gateway_leads() {
    let mut world = PoolHarness::new(vec![pool(640, 8)], vec![model_in_pool("m", 1, 60)]);
    world.send(Event::LeadershipChanged { leads: false });
    let (engine, generation, address) = (engine("former"), Generation(1), ([127, 0, 0, 1], 1).into());
    let published = PublishedEngine {
        state: PublishedEngineState::Awake,
        address: Some(address),
        fingerprint: 0,
        accelerators: vec!["pool-a".into()],
        since: world.now,
        failure: None,
    };
    world.send(Event::Published { engine: engine.clone(), generation, published: Some(published) });
    assert_eq!(taken(&world), (Bytes::ZERO, 0));
    world.send(Event::LeadershipChanged { leads: true });
    let found = AdoptedEngine {
        address,
        accelerators: vec!["pool-a".into()],
        asleep: None,
        ready: true,
        fingerprint: 0,
        last_lease_end: world.now,
        started: world.now,
    };
    world.send(Event::Adopted { engine, generation, found });
    assert_eq!(taken(&world), (Bytes::ZERO, 1));
}
