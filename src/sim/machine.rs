//! The physical truth: accelerators, the memory that processes hold on them, and reservations.

use std::collections::{BTreeMap, BTreeSet};

use super::process::{SimulatedProcess, SimulatedProcessPhase};
use crate::{
    model::{Accelerator, AcceleratorId, EngineId, SleepLevel},
    units::{Bytes, Generation},
};

/// The physical state of one accelerator.
#[derive(Clone, Debug)]
pub(super) struct SimulatedAccelerator {
    /// Physical memory. A pool that shrinks loses nothing that is still in use.
    pub(super) capacity: Bytes,
    /// Grantable capacity, as configured: `configured_capacity` in bytes; `units` in accelerators of a pool, or in slots
    /// of an accelerator in one.
    pub(super) configured_capacity: Bytes,
    pub(super) units: Option<u32>,
    /// The pool and the node of an accelerator with slots.
    pub(super) pool: Option<AcceleratorId>,
    pub(super) node: Option<String>,
    /// Limit on the host memory of the node's sleepers.
    pub(super) host_memory: Option<Bytes>,
    pub(super) metered: bool,
    pub(super) lost: bool,
    /// The accelerator works again, but the fleet learns it only from a reading.
    pub(super) recovered_unnoticed: bool,
    /// Memory in use by foreign processes.
    pub(super) foreign_bytes: Bytes,
    /// Counts memory allocations by engines here. It must not change while an engine profiles.
    pub(super) allocations: u64,
}

/// A right to memory, as recorded by the platform.
#[derive(Clone, Debug)]
pub(super) struct SimulatedReservation {
    pub(super) generation: Generation,
    pub(super) accelerators: Vec<AcceleratorId>,
    pub(super) bytes: Bytes,
    /// Accelerators of a pool, or slots: one on each accelerator.
    pub(super) units: u32,
    /// The fleet has received its confirmation.
    pub(super) confirmed: bool,
}

/// A process allocated memory that is not available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OutOfMemory {
    pub(super) accelerator: AcceleratorId,
    /// Foreign memory caused it, not the fleet.
    pub(super) excused: bool,
}

#[derive(Clone, Debug, Default)]
pub(super) struct SimulatedMachine {
    pub(super) accelerators: BTreeMap<AcceleratorId, SimulatedAccelerator>,
    pub(super) processes: BTreeMap<EngineId, SimulatedProcess>,
    pub(super) reservations: BTreeMap<EngineId, SimulatedReservation>,
    /// Processes that died, with `Gone` not yet delivered.
    pub(super) unreported_exits: BTreeSet<(EngineId, Generation)>,
}

impl SimulatedMachine {
    pub(super) fn configure(&mut self, accelerators: &[Accelerator]) {
        for accelerator in accelerators {
            let device =
                self.accelerators.entry(accelerator.id.clone()).or_insert_with(|| SimulatedAccelerator {
                    capacity: accelerator.capacity,
                    configured_capacity: accelerator.capacity,
                    units: accelerator.units,
                    pool: accelerator.pool.clone(),
                    node: accelerator.node.clone(),
                    host_memory: accelerator.host_memory,
                    metered: accelerator.metered,
                    lost: false,
                    recovered_unnoticed: false,
                    foreign_bytes: Bytes::ZERO,
                    allocations: 0,
                });
            device.capacity = device.capacity.max(accelerator.capacity);
            device.configured_capacity = accelerator.capacity;
            device.units = accelerator.units;
        }
    }

    pub(super) fn process(
        &mut self,
        engine: &EngineId,
        generation: Generation,
    ) -> Option<&mut SimulatedProcess> {
        self.processes.get_mut(engine).filter(|process| process.generation == generation)
    }

    /// Bytes in use on an accelerator, by all processes.
    pub(super) fn used(&self, accelerator: &AcceleratorId) -> Bytes {
        let foreign = self.accelerators.get(accelerator).map_or(Bytes::ZERO, |d| d.foreign_bytes);
        foreign + self.processes_on(accelerator).map(|process| process.memory_held).sum::<Bytes>()
    }

    pub(super) fn processes_on(
        &self,
        accelerator: &AcceleratorId,
    ) -> impl Iterator<Item = &SimulatedProcess> {
        self.processes.values().filter(move |process| process.accelerators.contains(accelerator))
    }

    pub(super) fn reserved_on(&self, accelerator: &AcceleratorId) -> Bytes {
        self.reservations_on(accelerator).map(|(_, booking)| booking.bytes).sum()
    }

    pub(super) fn reservations_on(
        &self,
        accelerator: &AcceleratorId,
    ) -> impl Iterator<Item = (&EngineId, &SimulatedReservation)> {
        self.reservations.iter().filter(move |(_, booking)| booking.accelerators.contains(accelerator))
    }

    /// Host memory of engines that sleep, fall asleep or wake at level 1.
    pub(super) fn host_memory_held(&self) -> Bytes {
        self.host_memory_held_by(|_| true)
    }

    /// The limit on the host memory of this engine's node, if it has one of its own, and what sleepers hold of it.
    pub(super) fn host_memory_of_node(&self, engine: &EngineId) -> Option<(Bytes, Bytes)> {
        let device_of = |process: &SimulatedProcess| self.accelerators.get(process.accelerators.first()?);
        let device = device_of(self.processes.get(engine)?)?;
        let limit = device.host_memory?;
        let on_node = |process: &SimulatedProcess| {
            device_of(process).is_some_and(|other| (&other.pool, &other.node) == (&device.pool, &device.node))
        };
        Some((limit, self.host_memory_held_by(on_node)))
    }

    fn host_memory_held_by(&self, counts: impl Fn(&SimulatedProcess) -> bool) -> Bytes {
        let asleep = |phase| {
            matches!(
                phase,
                SimulatedProcessPhase::FallingAsleep(SleepLevel::One)
                    | SimulatedProcessPhase::Asleep(SleepLevel::One)
                    | SimulatedProcessPhase::Waking(SleepLevel::One)
            )
        };
        let holders = self.processes.values().filter(|p| asleep(p.phase) && counts(p));
        holders.map(SimulatedProcess::host_bytes).sum()
    }

    /// Sets the memory that the process holds on each of its accelerators, if available.
    pub(super) fn set_memory(&mut self, engine: &EngineId, bytes: Bytes) -> Result<(), OutOfMemory> {
        let Some(process) = self.processes.get(engine) else {
            return Ok(());
        };
        let before = process.memory_held;
        let accelerators = process.accelerators.clone();
        if bytes > before {
            for id in &accelerators {
                let after = self.used(id).saturating_sub(before) + bytes;
                let Some(device) = self.accelerators.get(id) else {
                    continue;
                };
                if after > device.capacity {
                    return Err(OutOfMemory {
                        accelerator: id.clone(),
                        excused: device.foreign_bytes > Bytes::ZERO,
                    });
                }
            }
            for id in &accelerators {
                if let Some(device) = self.accelerators.get_mut(id) {
                    device.allocations += 1;
                }
            }
        }
        if let Some(process) = self.processes.get_mut(engine) {
            process.memory_held = bytes;
        }
        Ok(())
    }

    /// The allocation count that a profiling engine compares: no other engine may allocate while it measures.
    pub(super) fn allocation_count(&self, engine: &EngineId) -> u64 {
        let Some(process) = self.processes.get(engine) else {
            return 0;
        };
        let devices = process.accelerators.iter().filter_map(|id| self.accelerators.get(id));
        devices.map(|device| device.allocations).sum()
    }

    /// Whether all these accelerators are metered, so that late or unexpected memory is visible.
    pub(super) fn are_metered(&self, accelerators: &[AcceleratorId]) -> bool {
        accelerators.iter().all(|id| self.accelerators.get(id).is_some_and(|d| d.metered))
    }

    pub(super) fn reading_by_engine(&self, accelerator: &AcceleratorId) -> BTreeMap<EngineId, Bytes> {
        self.processes_on(accelerator).map(|process| (process.engine.clone(), process.memory_held)).collect()
    }
}
