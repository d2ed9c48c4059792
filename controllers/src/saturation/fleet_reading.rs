//! What decisions read from the fleet, in one call to the driver.

use std::collections::BTreeMap;

use rouse::{
    engine::state::LifecycleState,
    fleet::{Fleet, Plan},
    model::ModelName,
    saturation::FleetLoad,
    units::{Bytes, Tick},
};

/// What the fleet knows at one moment.
#[derive(Debug, Default)]
pub(crate) struct FleetReading {
    pub models: BTreeMap<ModelName, FleetLoad>,
    /// Since when no gateway uses the model. A model that is in use, or whose use is unknown, is not listed.
    pub unused_since: BTreeMap<ModelName, Tick>,
    /// Accelerators of each pool whose memory the pool's ledger has reserved for engines that are not asleep.
    pub held_accelerators: BTreeMap<String, u32>,
}

impl FleetReading {
    /// Reads these models. `counts_accelerators`: whether any of them is limited by free accelerators.
    pub(crate) fn of(fleet: &Fleet, plan: &Plan, models: Vec<ModelName>, counts_accelerators: bool) -> Self {
        let mut reading = Self::default();
        if counts_accelerators {
            reading.held_accelerators = held_accelerators(fleet);
        }
        for model in models {
            let Some(load) = FleetLoad::of(fleet, plan, &model) else { continue };
            if let Some(since) = fleet.unused_since(&model) {
                reading.unused_since.insert(model.clone(), since);
            }
            reading.models.insert(model, load);
        }
        reading
    }
}

/// A sleeper leaves its accelerators to others, so it holds none.
fn held_accelerators(fleet: &Fleet) -> BTreeMap<String, u32> {
    let mut held: BTreeMap<String, u32> = BTreeMap::new();
    for engine in fleet.engines() {
        let is_asleep = matches!(engine.state, LifecycleState::Asleep { .. });
        if is_asleep || fleet.reserved_bytes(&engine.id) == Bytes::ZERO {
            continue;
        }
        let Some(spec) = fleet.engine_spec(&engine.id) else { continue };
        let Some(pool) = spec.accelerators.pool() else { continue };
        let count = held.entry(pool.to_string()).or_default();
        *count = count.saturating_add(spec.accelerators.count());
    }
    held
}
