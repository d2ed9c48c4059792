//! What is physically true: accelerators, who holds how much of them, and what was booked.

use std::collections::{BTreeMap, BTreeSet};

use super::process::{Phase, Process};
use crate::{
    model::{Accelerator, AcceleratorId, EngineId, Level},
    units::{Bytes, Generation},
};

/// One accelerator as it is.
#[derive(Clone, Debug)]
pub(super) struct Device {
    /// What is really there: a pool that is made smaller loses nothing that anybody still uses.
    pub(super) capacity: Bytes,
    /// What may be granted, as configured: bytes, and of a pool accelerators.
    pub(super) granted: Bytes,
    pub(super) units: Option<u32>,
    pub(super) metered: bool,
    pub(super) lost: bool,
    /// It works again, and nobody has noticed: only a reading tells.
    pub(super) back: bool,
    /// In use by processes that are none of ours.
    pub(super) foreign: Bytes,
    /// Grows whenever an engine takes memory here: what a profiling engine must not see.
    pub(super) taken: u64,
}

/// A right to memory, as the platform has recorded it.
#[derive(Clone, Debug)]
pub(super) struct Booking {
    pub(super) generation: Generation,
    pub(super) accelerators: Vec<AcceleratorId>,
    pub(super) bytes: Bytes,
    /// Of a pool: accelerators.
    pub(super) units: u32,
    /// The fleet has been told that it stands.
    pub(super) placed: bool,
}

/// Somebody asked for memory that is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OutOfMemory {
    pub(super) accelerator: AcceleratorId,
    /// Not the fleet's doing: somebody else's memory, or what was adopted in excess.
    pub(super) excused: bool,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Machine {
    pub(super) devices: BTreeMap<AcceleratorId, Device>,
    pub(super) processes: BTreeMap<EngineId, Process>,
    pub(super) bookings: BTreeMap<EngineId, Booking>,
    /// Processes that died, with `Gone` not yet delivered.
    pub(super) going: BTreeSet<(EngineId, Generation)>,
}

impl Machine {
    pub(super) fn configure(&mut self, accelerators: &[Accelerator]) {
        for accelerator in accelerators {
            let device = self.devices.entry(accelerator.id.clone()).or_insert_with(|| Device {
                capacity: accelerator.capacity,
                granted: accelerator.capacity,
                units: accelerator.units,
                metered: accelerator.metered,
                lost: false,
                back: false,
                foreign: Bytes::ZERO,
                taken: 0,
            });
            device.capacity = device.capacity.max(accelerator.capacity);
            device.granted = accelerator.capacity;
            device.units = accelerator.units;
        }
    }

    pub(super) fn process(&mut self, engine: &EngineId, generation: Generation) -> Option<&mut Process> {
        self.processes.get_mut(engine).filter(|process| process.generation == generation)
    }

    /// Bytes in use on an accelerator, by everybody.
    pub(super) fn used(&self, accelerator: &AcceleratorId) -> Bytes {
        let foreign = self.devices.get(accelerator).map_or(Bytes::ZERO, |d| d.foreign);
        foreign + self.on(accelerator).map(|process| process.held).sum::<Bytes>()
    }

    pub(super) fn on(&self, accelerator: &AcceleratorId) -> impl Iterator<Item = &Process> {
        self.processes.values().filter(move |process| process.accelerators.contains(accelerator))
    }

    pub(super) fn booked(&self, accelerator: &AcceleratorId) -> Bytes {
        self.bookings_on(accelerator).map(|(_, booking)| booking.bytes).sum()
    }

    pub(super) fn bookings_on(
        &self,
        accelerator: &AcceleratorId,
    ) -> impl Iterator<Item = (&EngineId, &Booking)> {
        self.bookings.iter().filter(move |(_, booking)| booking.accelerators.contains(accelerator))
    }

    /// Host memory that sleepers hold, and those that fall asleep or wake.
    pub(super) fn host_held(&self) -> Bytes {
        let asleep = |phase| {
            matches!(
                phase,
                Phase::FallingAsleep(Level::One) | Phase::Asleep(Level::One) | Phase::Waking(Level::One)
            )
        };
        self.processes.values().filter(|p| asleep(p.phase)).map(Process::host).sum()
    }

    /// The process now holds so much on each of its accelerators, if that is there.
    pub(super) fn hold(&mut self, engine: &EngineId, bytes: Bytes) -> Result<(), OutOfMemory> {
        let Some(process) = self.processes.get(engine) else {
            return Ok(());
        };
        let before = process.held;
        let accelerators = process.accelerators.clone();
        if bytes > before {
            for id in &accelerators {
                let after = self.used(id).saturating_sub(before) + bytes;
                let Some(device) = self.devices.get(id) else {
                    continue;
                };
                if after > device.capacity {
                    return Err(OutOfMemory {
                        accelerator: id.clone(),
                        excused: device.foreign > Bytes::ZERO,
                    });
                }
            }
            for id in &accelerators {
                if let Some(device) = self.devices.get_mut(id) {
                    device.taken += 1;
                }
            }
        }
        if let Some(process) = self.processes.get_mut(engine) {
            process.held = bytes;
        }
        Ok(())
    }

    /// What a profiling engine compares: it must be alone while it measures.
    pub(super) fn taken(&self, engine: &EngineId) -> u64 {
        let Some(process) = self.processes.get(engine) else {
            return 0;
        };
        let devices = process.accelerators.iter().filter_map(|id| self.devices.get(id));
        devices.map(|device| device.taken).sum()
    }

    /// All accelerators of the engine can be read, so late or unexpected memory can be seen.
    pub(super) fn metered(&self, accelerators: &[AcceleratorId]) -> bool {
        accelerators.iter().all(|id| self.devices.get(id).is_some_and(|d| d.metered))
    }

    pub(super) fn reading(&self, accelerator: &AcceleratorId) -> BTreeMap<EngineId, Bytes> {
        self.on(accelerator).map(|process| (process.engine.clone(), process.held)).collect()
    }
}
