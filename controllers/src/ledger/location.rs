//! The location of reserved memory.
//!
//! In most pools the kubelet picks an engine's accelerators. There the location is recorded in a second phase, once
//! they are known. In a pool of slots the leader picks them, and the location is written with the reservation.

#[cfg(test)]
mod tests;

use std::fmt;

use rouse::{
    model::AcceleratorId,
    units::{Bytes, Tick},
};

use super::{ReservationRefusal, ReservationRequest};
use crate::{
    crd::ledger::{Ledger, Reservation, ReservationOwner, ReservationState},
    index::AcceleratorCapacities,
};

/// The accelerators that an engine got.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationLocation {
    pub node: String,
    /// Empty if unknown.
    pub accelerators: Vec<AcceleratorId>,
}

/// An engine got accelerators without room for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocationError {
    #[error("the engine needs {wanted} on each accelerator, and those of node {node} have {capacity}")]
    TooSmall { node: String, wanted: Bytes, capacity: Bytes },
    #[error(
        "the engine needs {wanted} on {accelerator} of node {node}, where other engines hold {taken} of {capacity}"
    )]
    Occupied { node: String, accelerator: AcceleratorId, wanted: Bytes, taken: Bytes, capacity: Bytes },
}

impl Ledger {
    /// Reserves memory as [`Self::reserve`] does, if the accelerators of the request's location have room for it, too.
    ///
    /// # Errors
    /// See [`Self::reserve`]. Also: other engines hold too much of one of the accelerators.
    pub fn reserve_at(
        &mut self,
        request: &ReservationRequest,
        capacities: &AcceleratorCapacities,
        total: Bytes,
        now: Tick,
    ) -> Result<u64, ReservationRefusal> {
        if let Some(location) = &request.location {
            self.check_room(&request.engine, request.bytes, location, capacities)?;
        }
        self.reserve(request, total, now)
    }

    /// Records the location of an engine. Without a reservation it does nothing.
    pub fn set_location(&mut self, engine: &ReservationOwner, location: &ReservationLocation, now: Tick) {
        let Some(reservation) = self.reservations.iter_mut().find(|known| known.is_of(engine)) else {
            return;
        };
        let node = Some(location.node.clone()).filter(|node| !node.is_empty());
        // A later report without accelerators does not erase known ones.
        if reservation.node == node && location.accelerators.is_empty() {
            return;
        }
        reservation.node = node;
        reservation.accelerators.clone_from(&location.accelerators);
        if reservation.state == ReservationState::Reserved {
            (reservation.state, reservation.since) = (ReservationState::Placed, now);
        }
    }

    /// Checks whether the engine's memory fits its location beside other reservations.
    ///
    /// # Errors
    /// The memory does not fit.
    pub fn check_fit(
        &self,
        engine: &ReservationOwner,
        location: &ReservationLocation,
        capacities: &AcceleratorCapacities,
    ) -> Result<(), LocationError> {
        let Some(reservation) = self.reservation(engine) else { return Ok(()) };
        self.check_room(engine, reservation.bytes, location, capacities)
    }

    /// Checks whether the location has room for this much of an engine on each accelerator, beside other engines.
    fn check_room(
        &self,
        engine: &ReservationOwner,
        wanted: Bytes,
        location: &ReservationLocation,
        capacities: &AcceleratorCapacities,
    ) -> Result<(), LocationError> {
        let node = location.node.clone();
        if location.accelerators.is_empty() {
            let largest = capacities.unlisted_each.max(capacities.by_uuid.values().copied().max());
            return match largest {
                Some(capacity) if wanted > capacity => {
                    Err(LocationError::TooSmall { node, wanted, capacity })
                }
                _ => Ok(()),
            };
        }
        for accelerator in &location.accelerators {
            let Some(capacity) = capacities.by_uuid.get(accelerator).copied().or(capacities.unlisted_each)
            else {
                continue;
            };
            let others =
                self.on_accelerator(&location.node, accelerator).filter(|other| !other.is_of(engine));
            let taken: Bytes = others.map(|other| other.bytes).sum();
            if wanted > capacity.saturating_sub(taken) {
                let accelerator = accelerator.clone();
                return Err(LocationError::Occupied { node, accelerator, wanted, taken, capacity });
            }
        }
        Ok(())
    }

    /// Iterates over the reservations on this accelerator, including memory that is being released.
    fn on_accelerator<'a>(
        &'a self,
        node: &'a str,
        accelerator: &'a AcceleratorId,
    ) -> impl Iterator<Item = &'a Reservation> {
        let is_there = move |known: &&Reservation| {
            known.node.as_deref() == Some(node) && known.accelerators.contains(accelerator)
        };
        self.reservations.iter().filter(is_there)
    }
}

impl Reservation {
    /// Whether the engine is on exactly these accelerators of this node.
    pub(super) fn is_at(&self, location: &ReservationLocation) -> bool {
        self.node.as_deref() == Some(location.node.as_str()) && location.has_accelerators(&self.accelerators)
    }

    /// Returns where the engine is, if its node is known.
    #[must_use]
    pub fn location(&self) -> Option<ReservationLocation> {
        Some(ReservationLocation { node: self.node.clone()?, accelerators: self.accelerators.clone() })
    }
}

impl ReservationLocation {
    /// Whether these are its accelerators, in any order.
    #[must_use]
    pub fn has_accelerators(&self, accelerators: &[AcceleratorId]) -> bool {
        self.accelerators.len() == accelerators.len()
            && self.accelerators.iter().all(|accelerator| accelerators.contains(accelerator))
    }
}

impl fmt::Display for ReservationLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.accelerators.iter().map(AcceleratorId::as_str).collect();
        let names = if names.is_empty() { "no known accelerator".to_owned() } else { names.join(" and ") };
        write!(f, "{names} of node {}", self.node)
    }
}
