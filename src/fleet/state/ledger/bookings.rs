//! Reservations by engine, with their sum, which is read far more often than it changes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{model::EngineId, shared_map::SharedMap, units::Bytes};

type BookingMap = BTreeMap<EngineId, Bytes>;

/// Reserved bytes by engine. Cheap to clone until a change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "BookingMap", into = "BookingMap")]
pub(in crate::fleet) struct Bookings {
    by_engine: SharedMap<EngineId, Bytes>,
    /// Wider than [`Bytes`], so the sum stays exact even if the declared amounts exceed a `u64`.
    sum: u128,
}

impl Bookings {
    pub(in crate::fleet) fn sum(&self) -> Bytes {
        saturating_bytes(self.sum)
    }

    pub(in crate::fleet) fn is_empty(&self) -> bool {
        self.by_engine.is_empty()
    }

    pub(in crate::fleet) fn of(&self, engine: &EngineId) -> Option<Bytes> {
        self.by_engine.get(engine).copied()
    }

    pub(in crate::fleet) fn iter(&self) -> impl Iterator<Item = (&EngineId, Bytes)> {
        self.by_engine.iter().map(|(engine, bytes)| (engine, *bytes))
    }

    /// Sets the engine's reservation, in place of what it had.
    pub(in crate::fleet) fn book(&mut self, engine: &EngineId, bytes: Bytes) {
        let before = self.by_engine.insert(engine.clone(), bytes).unwrap_or_default();
        self.sum = self.sum - u128::from(before.0) + u128::from(bytes.0);
    }

    pub(in crate::fleet) fn remove(&mut self, engine: &EngineId) {
        if let Some(before) = self.by_engine.remove(engine) {
            self.sum -= u128::from(before.0);
        }
    }

    /// The sum without this engine's reservation.
    pub(in crate::fleet) fn sum_without(&self, engine: &EngineId) -> Bytes {
        saturating_bytes(self.sum - u128::from(self.of(engine).unwrap_or_default().0))
    }
}

/// How many accelerators of a pool each engine has taken.
///
/// An engine has them from its reservation until it is gone, also while it sleeps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "UnitMap", into = "UnitMap")]
pub(in crate::fleet) struct UnitBookings {
    by_engine: SharedMap<EngineId, u32>,
    sum: u64,
}

type UnitMap = BTreeMap<EngineId, u32>;

impl UnitBookings {
    pub(in crate::fleet) fn sum(&self) -> u32 {
        u32::try_from(self.sum).unwrap_or(u32::MAX)
    }

    pub(in crate::fleet) fn is_empty(&self) -> bool {
        self.by_engine.is_empty()
    }

    pub(in crate::fleet) fn of(&self, engine: &EngineId) -> u32 {
        self.by_engine.get(engine).copied().unwrap_or_default()
    }

    pub(in crate::fleet) fn engines(&self) -> impl Iterator<Item = &EngineId> {
        self.by_engine.keys()
    }

    /// Takes units for the engine; an engine that has units keeps those.
    pub(in crate::fleet) fn take(&mut self, engine: &EngineId, units: u32) {
        if !self.by_engine.contains_key(engine) {
            self.by_engine.insert(engine.clone(), units);
            self.sum += u64::from(units);
        }
    }

    pub(in crate::fleet) fn remove(&mut self, engine: &EngineId) {
        if let Some(before) = self.by_engine.remove(engine) {
            self.sum -= u64::from(before);
        }
    }
}

impl From<UnitMap> for UnitBookings {
    fn from(by: UnitMap) -> Self {
        Self { sum: by.values().map(|units| u64::from(*units)).sum(), by_engine: by.into() }
    }
}

impl From<UnitBookings> for UnitMap {
    fn from(bookings: UnitBookings) -> Self {
        bookings.by_engine.iter().map(|(engine, booked)| (engine.clone(), *booked)).collect()
    }
}

fn saturating_bytes(sum: u128) -> Bytes {
    Bytes(u64::try_from(sum).unwrap_or(u64::MAX))
}

impl From<BookingMap> for Bookings {
    fn from(booked: BookingMap) -> Self {
        Self { sum: booked.values().map(|bytes| u128::from(bytes.0)).sum(), by_engine: booked.into() }
    }
}

impl From<Bookings> for BookingMap {
    fn from(bookings: Bookings) -> Self {
        bookings.by_engine.iter().map(|(engine, booked)| (engine.clone(), *booked)).collect()
    }
}
