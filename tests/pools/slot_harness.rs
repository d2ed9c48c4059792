//! A pool with slots, models for it, and what is taken of it.

use rouse::{
    fleet::report::AcceleratorView,
    model::{Accelerator, AcceleratorRequirement, EngineId, ModelSpec},
    units::Millis,
};

use crate::harness::{PoolHarness, gpu, model};

/// Accelerators of the pool, `gpu-0` and so on: how many each node has.
pub(crate) fn slot_pool(nodes: &[(&str, usize)], gib: u64, slots: u32) -> Vec<Accelerator> {
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
pub(crate) fn on_slots(name: &str, count: u32, gib: u64) -> ModelSpec {
    ModelSpec {
        accelerators: AcceleratorRequirement::Slots { pool: "pool-a".into(), count },
        ..model(name, gib)
    }
}

/// The same model, whose engine falls asleep after ten seconds without a request.
pub(crate) fn that_sleeps_when_idle(mut spec: ModelSpec) -> ModelSpec {
    spec.idle.sleep_after = Some(Millis::secs(10));
    spec
}

/// GiB reserved and slots taken on each accelerator, by name.
pub(crate) fn usage(world: &PoolHarness) -> Vec<(u64, u32)> {
    let view = world.fleet.view(&world.fleet.report(&world.fleet.plan(world.now)));
    let of = |accelerator: &AcceleratorView| (accelerator.reserved.0 >> 30, accelerator.units_taken.unwrap());
    view.accelerators.iter().map(of).collect()
}

/// Names of the accelerators that an engine has.
pub(crate) fn accelerators_of(world: &PoolHarness, id: &EngineId) -> Vec<String> {
    world.fleet.engine(id).unwrap().accelerators.iter().map(ToString::to_string).collect()
}
