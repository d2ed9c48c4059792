//! The reservations that a takeover finds, by engine.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    crd::ledger::ReservationOwner, ledger::ReservationLocation, platform::ModelPlacement, workload::Sidecar,
};

/// An engine that has a reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::platform) struct EngineReservation {
    pub(in crate::platform) pool: String,
    pub(in crate::platform) engine: ReservationOwner,
    /// A former leader saw the engine asleep, and released the memory that the engine no longer holds.
    pub(super) asleep: bool,
    /// The engine has a place and all of its memory: it neither sleeps nor stops, as far as the ledger knows.
    pub(super) placed: bool,
    /// Where the engine is, if that is known.
    pub(super) location: Option<ReservationLocation>,
}

/// All reservations, by engine. One engine can have reservations in several pools.
#[derive(Debug, Default)]
pub(super) struct EngineReservations(BTreeMap<ReservationOwner, Vec<EngineReservation>>);

impl EngineReservations {
    pub(super) fn new(reservations: impl IntoIterator<Item = EngineReservation>) -> Self {
        let mut all = Self::default();
        for entry in reservations {
            all.0.entry(entry.engine.clone()).or_default().push(entry);
        }
        all
    }

    /// Returns this engine's reservations.
    pub(super) fn of(&self, engine: &ReservationOwner) -> &[EngineReservation] {
        self.0.get(engine).map(Vec::as_slice).unwrap_or_default()
    }

    /// Whether this engine has a reservation in this pool.
    pub(super) fn has(&self, engine: &ReservationOwner, pool: &str) -> bool {
        self.of(engine).iter().any(|entry| entry.pool == pool)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &EngineReservation> {
        self.0.values().flatten()
    }

    /// Returns the placement in the pool of the engine's reservation, even if its model now names another.
    ///
    /// In a pool of slots, the placement is on the accelerators of the reservation.
    pub(super) fn reserved_placement(
        &self,
        placement: &Arc<ModelPlacement>,
        replica: u32,
        sidecar: &Sidecar,
    ) -> Arc<ModelPlacement> {
        let own_entries = self.of(&placement.reservation_owner(replica));
        let named = own_entries.iter().find(|entry| placement.pool.as_ref() == Some(&entry.pool));
        let Some(entry) = named.or_else(|| own_entries.first()) else { return Arc::clone(placement) };
        let reserved = if named.is_some() { Arc::clone(placement) } else { placement.in_pool(&entry.pool) };
        match &entry.location {
            Some(location) => reserved.on(location.clone(), sidecar),
            None => reserved,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rouse::model::VariantName;

    use super::*;
    use crate::{crd::ledger::ObjectName, platform::testing, workload::SlotTerms};

    fn reservation() -> impl Strategy<Value = EngineReservation> {
        let engine = (0..2_u32, 0..3_u32, any::<bool>()).prop_map(|(model, replica, named)| {
            let model = ObjectName::new("chat", format!("m{model}"));
            let variant = if named { "large".into() } else { VariantName::default() };
            ReservationOwner { model, variant, replica }
        });
        (0..3_u32, engine, any::<bool>()).prop_map(|(pool, engine, asleep)| EngineReservation {
            pool: format!("p{pool}"),
            engine,
            asleep,
            placed: !asleep,
            location: None,
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
                let engine = placement.reservation_owner(replica);
                let own: Vec<EngineReservation> =
                    all.iter().filter(|it| it.engine == engine).cloned().collect();
                prop_assert_eq!(reservations.of(&engine), own.as_slice());
                for pool in ["p0", "p1", "p2"] {
                    prop_assert_eq!(reservations.has(&engine, pool), own.iter().any(|it| it.pool == pool));
                }
                let reserved = reservations.reserved_placement(&placement, replica, &testing::sidecar());
                if own.iter().any(|it| Some(&it.pool) == placement.pool.as_ref()) || own.is_empty() {
                    prop_assert_eq!(&reserved, &placement);
                } else {
                    prop_assert_eq!(reserved.pool.as_ref(), own.first().map(|it| &it.pool));
                }
            }
        }
    }

    #[test]
    fn an_engine_of_slots_is_on_the_accelerators_of_its_reservation() {
        let mut placement = testing::placement("m0", "chat");
        placement.pool = Some("p0".to_owned());
        placement.slots = Some(SlotTerms { configuration: Some("h100".into()), location: None });
        let placement = Arc::new(placement);
        let location = ReservationLocation { node: "n".to_owned(), accelerators: vec!["gpu-1".into()] };
        let entry = |replica: u32, location: Option<ReservationLocation>| EngineReservation {
            pool: "p0".to_owned(),
            engine: placement.reservation_owner(replica),
            asleep: false,
            placed: true,
            location,
        };
        let reservations = EngineReservations::new([entry(0, Some(location.clone())), entry(1, None)]);
        let reserved = |replica: u32| {
            reservations.reserved_placement(&placement, replica, &testing::sidecar()).location().cloned()
        };
        assert_eq!(reserved(0), Some(location));
        assert_eq!((reserved(1), reserved(2)), (None, None), "the takeover asks its stub");
    }
}
