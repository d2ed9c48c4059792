//! The observed usage of a pool's engines.

use rouse::{
    fleet::event::{Event, LearnedMeasurements},
    model::{Accelerator, AcceleratorRequirement, EngineId, ModelName, VariantName},
    units::{Bytes, Generation},
};

use crate::harness::{PoolHarness, engine, model};

fn pool() -> Accelerator {
    Accelerator { units: Some(4), ..Accelerator::new("pool".into(), Bytes::gib(100)) }
}

fn of_pool(name: &str, gib: u64) -> rouse::model::ModelSpec {
    let accelerators = AcceleratorRequirement::InPool { pool: "pool".into(), count: 1 };
    rouse::model::ModelSpec { accelerators, ..model(name, gib) }
}

fn observed(world: &PoolHarness, model: &str) -> Option<Bytes> {
    world.fleet.learned_of(&ModelName::from(model), &VariantName::default()).unwrap().observed
}

fn observe(world: &mut PoolHarness, engine: EngineId, generation: Generation, gib: u64) {
    world.send(Event::UsageObserved { engine, generation, used: Bytes::gib(gib) });
}

#[test]
fn the_most_that_an_engine_of_this_life_was_seen_to_use_is_kept() {
    let mut world = PoolHarness::new(vec![pool()], vec![of_pool("a", 40)]);
    observe(&mut world, engine("a"), Generation(0), 5);
    assert_eq!(observed(&world, "a"), None, "it has no process");
    world.ask("a");
    let now = world.fleet.engine(&engine("a")).unwrap().generation;
    observe(&mut world, engine("a"), now, 30);
    observe(&mut world, engine("a"), now, 20);
    observe(&mut world, engine("a"), Generation(now.0 + 1), 35);
    assert_eq!(observed(&world, "a"), Some(Bytes::gib(30)));
}

/// Reservations of a pool are in a ledger that others read, and they equal the declared memory.
#[test]
fn of_a_pool_what_was_declared_is_booked_whatever_was_seen() {
    let mut world = PoolHarness::new(vec![pool()], vec![of_pool("a", 40), of_pool("b", 60)]);
    let learned = LearnedMeasurements { observed: Some(Bytes::gib(70)), ..LearnedMeasurements::default() };
    let variant = VariantName::default();
    world.send(Event::MeasurementsRestored { model: "a".into(), variant, learned });
    world.ask("a");
    world.ask("b");
    let reserved = |world: &PoolHarness| {
        let plan = world.fleet.plan(world.now);
        world.fleet.view(&world.fleet.report(&plan)).accelerators[0].reserved
    };
    assert_eq!(world.state(&engine("b")), "Awake", "{}", world.reason("b"));
    assert_eq!(reserved(&world), Bytes::gib(100));
    assert_eq!(observed(&world, "a"), Some(Bytes::gib(70)));
}
