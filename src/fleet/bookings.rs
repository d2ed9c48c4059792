//! Who has booked how much of something, with the sum, which is asked for far more often than it changes.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{model::EngineId, units::Bytes};

type Map = BTreeMap<EngineId, Bytes>;

/// Cheap to clone until it is changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Map", into = "Map")]
pub(super) struct Bookings {
    booked: Arc<Map>,
    /// Exact, where the sum of what was declared exceeds all numbers.
    sum: u128,
}

impl Bookings {
    pub(super) fn sum(&self) -> Bytes {
        bytes(self.sum)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.booked.is_empty()
    }

    pub(super) fn of(&self, engine: &EngineId) -> Option<Bytes> {
        self.booked.get(engine).copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&EngineId, Bytes)> {
        self.booked.iter().map(|(engine, bytes)| (engine, *bytes))
    }

    /// In place of what it had.
    pub(super) fn book(&mut self, engine: &EngineId, bytes: Bytes) {
        let before = Arc::make_mut(&mut self.booked).insert(engine.clone(), bytes).unwrap_or_default();
        self.sum = self.sum - u128::from(before.0) + u128::from(bytes.0);
    }

    pub(super) fn remove(&mut self, engine: &EngineId) {
        if self.booked.contains_key(engine) {
            let before = Arc::make_mut(&mut self.booked).remove(engine).unwrap_or_default();
            self.sum -= u128::from(before.0);
        }
    }

    /// All but this engine's.
    pub(super) fn beside(&self, engine: &EngineId) -> Bytes {
        bytes(self.sum - u128::from(self.of(engine).unwrap_or_default().0))
    }
}

/// How many accelerators of a pool each engine has taken. It has them from its reservation until it is gone: asleep as
/// well.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Units", into = "Units")]
pub(super) struct Taken {
    by: Arc<Units>,
    sum: u64,
}

type Units = BTreeMap<EngineId, u32>;

impl Taken {
    pub(super) fn sum(&self) -> u32 {
        u32::try_from(self.sum).unwrap_or(u32::MAX)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by.is_empty()
    }

    pub(super) fn of(&self, engine: &EngineId) -> u32 {
        self.by.get(engine).copied().unwrap_or_default()
    }

    pub(super) fn engines(&self) -> impl Iterator<Item = &EngineId> {
        self.by.keys()
    }

    /// What it has already it keeps.
    pub(super) fn take(&mut self, engine: &EngineId, units: u32) {
        if !self.by.contains_key(engine) {
            Arc::make_mut(&mut self.by).insert(engine.clone(), units);
            self.sum += u64::from(units);
        }
    }

    pub(super) fn remove(&mut self, engine: &EngineId) {
        if self.by.contains_key(engine) {
            let before = Arc::make_mut(&mut self.by).remove(engine).unwrap_or_default();
            self.sum -= u64::from(before);
        }
    }
}

impl From<Units> for Taken {
    fn from(by: Units) -> Self {
        Self { sum: by.values().map(|units| u64::from(*units)).sum(), by: Arc::new(by) }
    }
}

impl From<Taken> for Units {
    fn from(taken: Taken) -> Self {
        Self::clone(&taken.by)
    }
}

fn bytes(sum: u128) -> Bytes {
    Bytes(u64::try_from(sum).unwrap_or(u64::MAX))
}

impl From<Map> for Bookings {
    fn from(booked: Map) -> Self {
        Self { sum: booked.values().map(|bytes| u128::from(bytes.0)).sum(), booked: Arc::new(booked) }
    }
}

impl From<Bookings> for Map {
    fn from(bookings: Bookings) -> Self {
        Self::clone(&bookings.booked)
    }
}
