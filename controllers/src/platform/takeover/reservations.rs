//! The reservations that a takeover finds, by engine.

use std::{collections::BTreeMap, sync::Arc};

use crate::{crd::ledger::ObjectName, platform::ModelPlacement};

/// An engine that has a reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::platform) struct EngineReservation {
    pub(in crate::platform) pool: String,
    pub(in crate::platform) model: ObjectName,
    pub(in crate::platform) replica: u32,
    /// A former leader saw the engine asleep, and released the memory that the engine no longer holds.
    pub(super) asleep: bool,
    /// The engine has a place and all of its memory: it neither sleeps nor stops, as far as the ledger knows.
    pub(super) placed: bool,
}

/// All reservations, by model and replica. One engine can have reservations in several pools.
#[derive(Debug, Default)]
pub(super) struct EngineReservations(BTreeMap<ObjectName, BTreeMap<u32, Vec<EngineReservation>>>);

impl EngineReservations {
    pub(super) fn new(reservations: impl IntoIterator<Item = EngineReservation>) -> Self {
        let mut all = Self::default();
        for entry in reservations {
            let replicas = all.0.entry(entry.model.clone()).or_default();
            replicas.entry(entry.replica).or_default().push(entry);
        }
        all
    }

    /// Returns this engine's reservations.
    pub(super) fn of(&self, model: &ObjectName, replica: u32) -> &[EngineReservation] {
        self.0.get(model).and_then(|replicas| replicas.get(&replica)).map(Vec::as_slice).unwrap_or_default()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &EngineReservation> {
        self.0.values().flat_map(BTreeMap::values).flatten()
    }

    /// Returns the placement in the pool of the engine's reservation, even if its model now names another.
    pub(super) fn with_reserved_pool(
        &self,
        placement: &Arc<ModelPlacement>,
        replica: u32,
    ) -> Arc<ModelPlacement> {
        let own_entries = self.of(&placement.owner.object, replica);
        let is_named = |entry: &EngineReservation| placement.pool.as_ref() == Some(&entry.pool);
        match own_entries.first() {
            Some(first) if !own_entries.iter().any(is_named) => placement.in_pool(&first.pool),
            _ => Arc::clone(placement),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::platform::testing;

    fn reservation() -> impl Strategy<Value = EngineReservation> {
        (0..3_u32, 0..3_u32, 0..3_u32, any::<bool>()).prop_map(|(pool, model, replica, asleep)| {
            let (pool, model) = (format!("p{pool}"), ObjectName::new("chat", format!("m{model}")));
            EngineReservation { pool, model, replica, asleep, placed: !asleep }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn an_engine_has_the_reservations_that_a_scan_finds(
            all in prop::collection::vec(reservation(), 0..20),
            named in prop::option::of(0..3_u32),
        ) {
            let reservations = EngineReservations::new(all.clone());
            prop_assert_eq!(reservations.iter().count(), all.len());
            let mut placement = testing::placement("m0", "chat");
            placement.pool = named.map(|pool| format!("p{pool}"));
            let placement = Arc::new(placement);
            for replica in 0..3 {
                let own = all.iter().filter(|it| it.model.name == "m0" && it.replica == replica);
                let own: Vec<EngineReservation> = own.cloned().collect();
                prop_assert_eq!(reservations.of(&placement.owner.object, replica), own.as_slice());
                let reserved = reservations.with_reserved_pool(&placement, replica);
                if own.iter().any(|it| Some(&it.pool) == placement.pool.as_ref()) || own.is_empty() {
                    prop_assert_eq!(&reserved, &placement);
                } else {
                    prop_assert_eq!(reserved.pool.as_ref(), own.first().map(|it| &it.pool));
                }
            }
        }
    }
}
