//! What is physically true: accelerators, who holds how much of them, and what was booked.

use std::collections::{BTreeMap, BTreeSet};

use super::process::{SimulatedProcess, SimulatedProcessPhase};
use crate::{
    model::{Accelerator, AcceleratorId, EngineId, SleepLevel},
    units::{Bytes, Generation},
};

/// One accelerator as it is.
#[derive(Clone, Debug)]
pub(super) struct SimulatedAccelerator {
    /// What is really there: a pool that is made smaller loses nothing that anybody still uses.
    pub(super) capacity: Bytes,
    /// What may be granted, as configured: bytes, and of a pool accelerators.
    pub(super) configured_capacity: Bytes,
    pub(super) units: Option<u32>,
    pub(super) metered: bool,
    pub(super) lost: bool,
    /// It works again, and nobody has noticed: only a reading tells.
    pub(super) recovered_unnoticed: bool,
    /// In use by processes that are none of ours.
    pub(super) foreign_bytes: Bytes,
    /// Grows whenever an engine takes memory here: what a profiling engine must not see.
    pub(super) allocations: u64,
}

/// A right to memory, as the platform has recorded it.
#[derive(Clone, Debug)]
pub(super) struct SimulatedReservation {
    pub(super) generation: Generation,
    pub(super) accelerators: Vec<AcceleratorId>,
    pub(super) bytes: Bytes,
    /// Of a pool: accelerators.
    pub(super) units: u32,
    /// The fleet has been told that it stands.
    pub(super) confirmed: bool,
}

/// Somebody asked for memory that is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OutOfMemory {
    pub(super) accelerator: AcceleratorId,
    /// Not the fleet's doing: somebody else's memory, or what was adopted in excess.
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

    /// Bytes in use on an accelerator, by everybody.
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

    /// Host memory that sleepers hold, and those that fall asleep or wake.
    pub(super) fn host_memory_held(&self) -> Bytes {
        let asleep = |phase| {
            matches!(
                phase,
                SimulatedProcessPhase::FallingAsleep(SleepLevel::One)
                    | SimulatedProcessPhase::Asleep(SleepLevel::One)
                    | SimulatedProcessPhase::Waking(SleepLevel::One)
            )
        };
        self.processes.values().filter(|p| asleep(p.phase)).map(SimulatedProcess::host_bytes).sum()
    }

    /// The process now holds so much on each of its accelerators, if that is there.
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

    /// What a profiling engine compares: it must be alone while it measures.
    pub(super) fn allocation_count(&self, engine: &EngineId) -> u64 {
        let Some(process) = self.processes.get(engine) else {
            return 0;
        };
        let devices = process.accelerators.iter().filter_map(|id| self.accelerators.get(id));
        devices.map(|device| device.allocations).sum()
    }

    /// All accelerators of the engine can be read, so late or unexpected memory can be seen.
    pub(super) fn are_metered(&self, accelerators: &[AcceleratorId]) -> bool {
        accelerators.iter().all(|id| self.accelerators.get(id).is_some_and(|d| d.metered))
    }

    pub(super) fn reading_by_engine(&self, accelerator: &AcceleratorId) -> BTreeMap<EngineId, Bytes> {
        self.processes_on(accelerator).map(|process| (process.engine.clone(), process.memory_held)).collect()
    }
}
