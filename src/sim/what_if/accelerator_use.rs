//! How long the accelerators of a simulated run were awake and in use.

use std::collections::BTreeMap;

use crate::{
    model::AcceleratorId,
    sim::{process::SimulatedProcessPhase, world::SimulatedWorld},
    units::Millis,
};

const HOUR_MS: f64 = 3_600_000.0;

/// Hours of all accelerators together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AcceleratorHours {
    pub total: f64,
    /// With an awake engine.
    pub awake: f64,
    /// The part of `awake` in which no engine of the accelerator had a request.
    pub idle: f64,
}

/// Accelerators at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct AcceleratorUse {
    total: u64,
    awake: u64,
    /// With an awake engine that has a request.
    busy: u64,
}

/// Sums of [`AcceleratorUse`] over time, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AcceleratorUseMeter {
    total: u64,
    awake: u64,
    busy: u64,
}

impl AcceleratorUse {
    pub(super) fn of(world: &SimulatedWorld) -> Self {
        let mut awake: BTreeMap<&AcceleratorId, bool> = BTreeMap::new();
        let processes = world.machine.processes.values();
        for process in processes.filter(|process| process.phase == SimulatedProcessPhase::Awake) {
            let has_request = world.gates.get(&process.engine).is_some_and(|gate| !gate.leases.is_empty());
            for id in &process.accelerators {
                *awake.entry(id).or_default() |= has_request;
            }
        }
        let busy = awake.values().filter(|has_request| **has_request).count() as u64;
        Self { total: world.machine.accelerators.len() as u64, awake: awake.len() as u64, busy }
    }
}

impl AcceleratorUseMeter {
    pub(super) const fn add(&mut self, state: AcceleratorUse, lasted: Millis) {
        self.total += state.total * lasted.0;
        self.awake += state.awake * lasted.0;
        self.busy += state.busy * lasted.0;
    }

    pub(super) fn hours(&self) -> AcceleratorHours {
        let hours = |ms: u64| ms as f64 / HOUR_MS;
        AcceleratorHours {
            total: hours(self.total),
            awake: hours(self.awake),
            idle: hours(self.awake - self.busy),
        }
    }
}
