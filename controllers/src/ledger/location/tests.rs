use rouse::model::VariantName;

use super::*;
use crate::{crd::ledger::ObjectName, ledger::SleepingMemory};

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
            location: None,
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
    assert_eq!(fits(&["gpu-1"]), Err(LocationError::Occupied { node, accelerator, wanted, taken, capacity }));
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

fn slot(name: &str, gib: u64, accelerators: &[&str]) -> ReservationRequest {
    ReservationRequest {
        engine: named(name),
        count: u32::try_from(accelerators.len()).unwrap(),
        bytes: Bytes::gib(gib),
        host_bytes: Bytes::ZERO,
        quota: None,
        location: Some(spot(accelerators)),
    }
}

fn of_80_gib(accelerators: &[&str]) -> AcceleratorCapacities {
    let by_uuid = accelerators.iter().map(|id| ((*id).into(), Bytes::gib(80))).collect();
    AcceleratorCapacities { unlisted_each: None, by_uuid }
}

#[test]
fn a_reservation_with_a_location_is_placed_at_once_and_only_where_each_accelerator_has_room() {
    let capacities = of_80_gib(&["gpu-1", "gpu-2"]);
    let mut ledger = Ledger::default();
    let id = ledger.reserve_at(&slot("a", 60, &["gpu-1"]), &capacities, TOTAL, Tick(1)).unwrap();
    let own = ledger.reservation(&named("a")).unwrap();
    assert_eq!((own.id, own.state), (id, ReservationState::Placed));
    assert_eq!(own.location(), Some(spot(&["gpu-1"])));
    let before = ledger.clone();
    for accelerators in [&["gpu-1"][..], &["gpu-2", "gpu-1"]] {
        let refused = ledger.reserve_at(&slot("b", 30, accelerators), &capacities, TOTAL, Tick(2));
        let occupied = LocationError::Occupied {
            node: "n".to_owned(),
            accelerator: "gpu-1".into(),
            wanted: Bytes::gib(30),
            taken: Bytes::gib(60),
            capacity: Bytes::gib(80),
        };
        assert_eq!(refused, Err(ReservationRefusal::Location(occupied)), "the pool has 260 GiB left");
    }
    assert_eq!(ledger, before, "nothing is left of what was refused");
    ledger.reserve_at(&slot("b", 30, &["gpu-2"]), &capacities, TOTAL, Tick(3)).unwrap();
}

#[test]
fn a_repeated_reservation_is_the_same_only_on_the_same_accelerators() {
    let capacities = of_80_gib(&["gpu-1", "gpu-2", "gpu-3"]);
    let mut ledger = Ledger::default();
    let id = ledger.reserve_at(&slot("a", 60, &["gpu-1", "gpu-2"]), &capacities, TOTAL, Tick(1)).unwrap();
    let again = slot("a", 60, &["gpu-2", "gpu-1"]);
    assert_eq!(ledger.reserve_at(&again, &capacities, TOTAL, Tick(2)), Ok(id));
    let elsewhere = ledger.reserve_at(&slot("a", 60, &["gpu-1", "gpu-3"]), &capacities, TOTAL, Tick(3));
    assert_eq!(elsewhere, Err(ReservationRefusal::AlreadyReserved { has: Bytes::gib(120) }));
}

#[test]
fn a_sleeper_with_a_location_wakes_only_once_another_engine_has_left_its_accelerator() {
    let capacities = of_80_gib(&["gpu-1"]);
    let (first, second) = (slot("a", 60, &["gpu-1"]), slot("b", 60, &["gpu-1"]));
    let keeps = SleepingMemory { bytes: Bytes::gib(2), host_bytes: Bytes::gib(40) };
    let mut ledger = Ledger::default();
    ledger.reserve_at(&first, &capacities, TOTAL, Tick(1)).unwrap();
    ledger.mark_asleep(&first.engine, keeps, Tick(2));
    ledger.reserve_at(&second, &capacities, TOTAL, Tick(3)).unwrap();
    let refused = ledger.reserve_at(&first, &capacities, TOTAL, Tick(4));
    assert!(matches!(refused, Err(ReservationRefusal::Location(_))), "{refused:?}");
    ledger.mark_asleep(&second.engine, keeps, Tick(5));
    ledger.reserve_at(&first, &capacities, TOTAL, Tick(6)).unwrap();
    let awake = ledger.reservation(&first.engine).unwrap();
    assert_eq!((awake.bytes, awake.state), (Bytes::gib(60), ReservationState::Placed));
    assert_eq!(awake.location(), first.location);
}

#[test]
fn an_adopted_engine_whose_accelerators_are_known_is_placed() {
    let mut ledger = Ledger::default();
    ledger.adopt(&slot("a", 60, &["gpu-1"]), Tick(1));
    let own = ledger.reservation(&named("a")).unwrap();
    assert_eq!((own.state, own.location()), (ReservationState::Placed, Some(spot(&["gpu-1"]))));
}
