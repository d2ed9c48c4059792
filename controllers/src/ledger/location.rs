//! Records the location of reserved memory: the second phase, once Kubernetes has picked the accelerators.

use rouse::{
    model::AcceleratorId,
    units::{Bytes, Tick},
};

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
        let (node, wanted) = (location.node.clone(), reservation.bytes);
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
                self.on_accelerator(&location.node, accelerator).filter(|other| other.id != reservation.id);
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

#[cfg(test)]
mod tests {
    use rouse::model::VariantName;

    use super::*;
    use crate::{crd::ledger::ObjectName, ledger::ReservationRequest};

    const TOTAL: Bytes = Bytes::gib(320);

    fn ledger(names: &[(&str, u64)]) -> Ledger {
        let mut ledger = Ledger::default();
        for (name, gib) in names {
            let wanted = ReservationRequest {
                engine: named(name),
                count: 1,
                bytes: Bytes::gib(*gib),
                host_bytes: Bytes::ZERO,
                quota: None,
            };
            ledger.reserve(&wanted, TOTAL, Tick(1)).unwrap();
        }
        ledger
    }

    fn named(name: &str) -> ReservationOwner {
        let (model, variant) = (ObjectName::new("chat", name), VariantName::default());
        ReservationOwner { model, variant, replica: 0 }
    }

    fn spot(accelerators: &[&str]) -> ReservationLocation {
        ReservationLocation {
            node: "n".into(),
            accelerators: accelerators.iter().map(|id| (*id).into()).collect(),
        }
    }

    #[test]
    fn a_booking_is_placed_where_its_engine_is_and_stays_there() {
        let mut ledger = ledger(&[("a", 40)]);
        ledger.set_location(&named("a"), &spot(&["gpu-1"]), Tick(5));
        let at = |ledger: &Ledger| {
            let own = ledger.reservation(&named("a")).unwrap();
            (own.state, own.node.clone(), own.accelerators.clone(), own.since)
        };
        let placed = (ReservationState::Placed, Some("n".to_owned()), vec!["gpu-1".into()], Tick(5));
        assert_eq!(at(&ledger), placed);
        ledger.set_location(&named("a"), &spot(&[]), Tick(6));
        assert_eq!(at(&ledger), placed, "who cannot say says nothing");
        let id = ledger.reservation(&named("a")).unwrap().id;
        ledger.mark_releasing(id, Tick(7));
        ledger.set_location(&named("a"), &spot(&["gpu-1"]), Tick(8));
        assert_eq!(at(&ledger).0, ReservationState::Releasing);
        ledger.set_location(&named("other"), &spot(&["gpu-1"]), Tick(9));
        assert_eq!(ledger.reservations.len(), 1);
    }

    #[test]
    fn what_others_have_on_an_accelerator_is_not_there_for_a_newcomer() {
        let mut ledger = ledger(&[("a", 40), ("b", 50)]);
        ledger.set_location(&named("a"), &spot(&["gpu-1"]), Tick(5));
        let capacities = [("gpu-1".into(), Bytes::gib(80)), ("gpu-2".into(), Bytes::ZERO)];
        let capacities = AcceleratorCapacities { unlisted_each: None, by_uuid: capacities.into() };
        let fits = |accelerators: &[&str]| ledger.check_fit(&named("b"), &spot(accelerators), &capacities);
        let (wanted, capacity) = (Bytes::gib(50), Bytes::gib(80));
        let (node, accelerator, taken) = ("n".to_owned(), "gpu-1".into(), Bytes::gib(40));
        assert_eq!(
            fits(&["gpu-1"]),
            Err(LocationError::Occupied { node, accelerator, wanted, taken, capacity })
        );
        assert!(
            matches!(fits(&["gpu-2"]), Err(LocationError::Occupied { capacity: Bytes::ZERO, .. })),
            "it is faulty"
        );
        assert_eq!(fits(&["gpu-3"]), Ok(()), "of which nothing is known");
        assert_eq!(fits(&[]), Ok(()));
        assert_eq!(
            ledger.check_fit(&named("a"), &spot(&["gpu-1"]), &capacities),
            Ok(()),
            "its own does not count"
        );
    }

    #[test]
    fn an_engine_does_not_fit_on_a_node_whose_accelerators_are_all_smaller() {
        let ledger = ledger(&[("a", 40)]);
        let fits = |capacities: &AcceleratorCapacities| ledger.check_fit(&named("a"), &spot(&[]), capacities);
        assert_eq!(fits(&AcceleratorCapacities::default()), Ok(()));
        let small =
            AcceleratorCapacities { unlisted_each: Some(Bytes::gib(24)), ..AcceleratorCapacities::default() };
        let (node, wanted, capacity) = ("n".to_owned(), Bytes::gib(40), Bytes::gib(24));
        assert_eq!(fits(&small), Err(LocationError::TooSmall { node, wanted, capacity }));
        let by_uuid = [("x".into(), Bytes::gib(24)), ("y".into(), Bytes::gib(80))].into();
        assert_eq!(
            fits(&AcceleratorCapacities { unlisted_each: None, by_uuid }),
            Ok(()),
            "it may be on the larger one"
        );
    }
}
