//! Checks what may be reserved, and when a reservation may shrink.

use std::collections::BTreeSet;

use super::super::world::SimulatedWorld;
use crate::{
    model::{AcceleratorId, AcceleratorRequirement, EngineId},
    units::{Bytes, Generation},
};

impl SimulatedWorld {
    /// Number of units that the engine takes on each account: accelerators of its pool, or one slot.
    pub(in crate::sim) fn units_of(&self, engine: &EngineId) -> u32 {
        self.spec_of(engine).and_then(|spec| spec.accelerators.units()).unwrap_or(1)
    }

    pub(in crate::sim) fn check_reserve(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        accelerators: &[AcceleratorId],
        bytes: Bytes,
    ) {
        self.check_slots(engine, accelerators);
        for id in accelerators {
            let Some(device) = self.machine.accelerators.get(id) else {
                self.record_violation(format!("{engine} is placed on {id}, which does not exist"));
                continue;
            };
            let booking =
                self.machine.reservations.get(engine).filter(|booking| booking.accelerators.contains(id));
            let (booked_bytes, booked_units) =
                booking.map_or((Bytes::ZERO, 0), |booking| (booking.bytes, booking.units));
            let booked_by_others = self.machine.reserved_on(id).saturating_sub(booked_bytes);
            let other_bookings = self.machine.reservations_on(id).filter(|(other, _)| *other != engine);
            let units_taken: u32 = other_bookings.map(|(_, booking)| booking.units).sum();
            // An engine keeps its units even if the pool has become smaller.
            let units = self.units_of(engine).max(booked_units);
            if booked_by_others + bytes > device.configured_capacity {
                self.record_violation(format!(
                    "{engine} {generation} reserves {bytes} on {id}, where {booked_by_others} of {} are booked",
                    device.configured_capacity
                ));
            } else if let Some(all) =
                device.units.filter(|all| units > booked_units && units_taken + units > *all)
            {
                self.record_violation(format!(
                    "{engine} {generation} takes {units} units of {id}, where {units_taken} of {all} are taken"
                ));
            } else if device.lost && bytes > booked_bytes {
                self.record_violation(format!("{engine} is placed on {id}, which is lost"));
            }
        }
    }

    /// In a pool with slots, an engine gets distinct accelerators of one node, as many as its model requires. No other
    /// engine of its variant has the same.
    fn check_slots(&mut self, engine: &EngineId, accelerators: &[AcceleratorId]) {
        let required = self.spec_of(engine).map(|spec| spec.accelerators.clone());
        let Some(AcceleratorRequirement::Slots { pool, count }) = required else { return };
        self.tally.add("reservations of slots");
        let distinct: BTreeSet<&AcceleratorId> = accelerators.iter().collect();
        let devices = distinct.iter().filter_map(|id| self.machine.accelerators.get(*id));
        let in_pool = devices.filter(|device| device.pool.as_ref() == Some(&pool));
        let nodes: Vec<Option<&String>> = in_pool.map(|device| device.node.as_ref()).collect();
        let is_right = nodes.len() == count as usize
            && accelerators.len() == nodes.len()
            && nodes.windows(2).all(|pair| matches!(pair, [a, b] if a == b));
        if !is_right {
            self.record_violation(format!(
                "{engine} gets {accelerators:?}, and needs {count} accelerators of one node of {pool}"
            ));
        }
        let is_twin = |other: &EngineId| {
            other != engine && (&other.model, &other.variant) == (&engine.model, &engine.variant)
        };
        let mut twins = self.machine.reservations.iter().filter(|(other, _)| is_twin(other));
        let has_same =
            twins.any(|(_, booking)| booking.accelerators.iter().collect::<BTreeSet<_>>() == distinct);
        if has_same {
            self.record_violation(format!("{engine} gets {accelerators:?}, as another engine of its model"));
        }
    }

    /// A reservation may not shrink below the memory that is really held. If the meter cannot attribute memory to a
    /// process, either of two conditions suffices: all reservations together cover the reading, or a sleeper whose wake
    /// is cancelled keeps the reservation that it was adopted with. The rest counts as foreign memory while it sleeps.
    pub(in crate::sim) fn check_shrink(&mut self, engine: &EngineId, generation: Generation, bytes: Bytes) {
        let Some(process) = self.machine.process(engine, generation) else {
            return;
        };
        let (memory_held, phase, accelerators) =
            (process.memory_held, process.phase, process.accelerators.clone());
        let per_process = self.scenario.hardware.meter_per_process;
        if !per_process && process.adopted_bytes.is_some_and(|adopted| bytes >= adopted) {
            return;
        }
        if memory_held <= bytes || accelerators.is_empty() || !self.machine.are_metered(&accelerators) {
            return;
        }
        let own_booking = self.machine.reservations.get(engine).map_or(Bytes::ZERO, |b| b.bytes);
        let covered = accelerators.iter().all(|id| {
            let foreign = self.machine.accelerators.get(id).map_or(Bytes::ZERO, |d| d.foreign_bytes);
            let booked = self.machine.reserved_on(id).saturating_sub(own_booking) + bytes;
            self.machine.used(id).saturating_sub(foreign) <= booked
        });
        if per_process || !covered {
            self.record_violation(format!(
                "the reservation of {engine} {generation} shrinks to {bytes} while it is {phase:?} and holds {memory_held}"
            ));
        }
    }
}
