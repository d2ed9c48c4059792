//! The status of an AcceleratorNode, but for its list of accelerators, which is what a stub found on the node.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use rouse::units::{Bytes, Tick};

use crate::controllers::{
    condition::{READY, condition},
    crd::{AcceleratorNodeStatus, Quantity, ledger::Reservation, node::NodeReservation},
    index::NodePlace,
};

/// The status that the node's object should have, without accelerators.
#[must_use]
pub fn node_status(
    place: &NodePlace,
    reservations: &[&Reservation],
    generation: Option<i64>,
    stored: &AcceleratorNodeStatus,
    now: Tick,
) -> AcceleratorNodeStatus {
    let before = stored.conditions.as_slice();
    let listed = u32::try_from(place.room.capacities.len()).unwrap_or(u32::MAX);
    let reserved: Bytes = reservations.iter().map(|reservation| reservation.sum()).sum();
    AcceleratorNodeStatus {
        count: listed.max(place.accelerators),
        healthy: place.accelerators,
        kind: place.kind.clone(),
        total: place.total.map(Quantity::from),
        reserved: Some(Quantity::from(reserved)),
        accelerators: Vec::new(),
        reservations: reservations.iter().map(|reservation| copy(reservation)).collect(),
        conditions: vec![node_condition(Some(place), generation, before, now)],
    }
}

/// Whether to write it. The accelerators are for who found them to write.
#[must_use]
pub fn node_differs(stored: &AcceleratorNodeStatus, wanted: &AcceleratorNodeStatus) -> bool {
    *stored != AcceleratorNodeStatus { accelerators: stored.accelerators.clone(), ..wanted.clone() }
}

fn copy(reservation: &Reservation) -> NodeReservation {
    NodeReservation {
        id: reservation.id,
        model: reservation.model.to_string(),
        replica: reservation.replica,
        bytes: reservation.bytes.into(),
        host_bytes: reservation.host_bytes.into(),
        uuids: reservation.accelerators.iter().map(ToString::to_string).collect(),
        state: reservation.state,
    }
}

/// The condition Ready of the node's object. `None`: the node is of no pool's selector, or is not there.
#[must_use]
pub fn node_condition(
    place: Option<&NodePlace>,
    generation: Option<i64>,
    before: &[Condition],
    now: Tick,
) -> Condition {
    let doubt = place.and_then(|place| place.doubt.as_deref());
    let said =
        |text: &str| doubt.map_or_else(|| text.to_owned(), |doubt| format!("{text}. Left out: {doubt}"));
    let (ready, reason, message) = match place {
        Some(NodePlace { pool: Some(pool), accelerators, .. }) if *accelerators > 0 => {
            (true, "Ready", said(&format!("{accelerators} accelerators for the pool '{pool}'")))
        }
        Some(NodePlace { pool: Some(_), .. }) => (false, "NoAccelerators", said("it has nothing to grant")),
        _ => (false, "NoPool", said("it is in no AcceleratorPool")),
    };
    condition(READY, ready, reason, &message, generation, before, now)
}
