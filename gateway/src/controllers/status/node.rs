//! The status of an AcceleratorNode.
//!
//! Its list of accelerators is that of who looked at the node, if somebody did: it is left alone. Otherwise it has those that Pods
//! were given, as their stubs said and the ledger keeps it.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use rouse::{
    model::AcceleratorId,
    units::{Bytes, Tick},
};

use crate::controllers::{
    condition::{READY, condition},
    crd::{
        AcceleratorNodeStatus, Quantity,
        ledger::Reservation,
        node::{NodeAccelerator, NodeReservation},
    },
    index::NodePlace,
};

/// The status that the node's object should have; without accelerators where their list is somebody else's.
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
    let accelerators = accelerators(place, reservations, stored);
    let reserved: Bytes = reservations.iter().map(|reservation| reservation.sum()).sum();
    AcceleratorNodeStatus {
        count: listed.max(place.accelerators),
        healthy: place.accelerators,
        kind: place.kind.clone(),
        total: place.total.map(Quantity::from),
        reserved: Some(Quantity::from(reserved)),
        partial: !accelerators.is_empty(),
        accelerators,
        reservations: reservations.iter().map(|reservation| copy(reservation)).collect(),
        conditions: vec![node_condition(Some(place), generation, before, now)],
    }
}

/// Those that were listed before or that Pods have now, of which the node still has as many.
fn accelerators(
    place: &NodePlace,
    reservations: &[&Reservation],
    stored: &AcceleratorNodeStatus,
) -> Vec<NodeAccelerator> {
    let others = !stored.partial && !stored.accelerators.is_empty();
    let Some(each) = place.room.each.filter(|_| !others) else { return Vec::new() };
    let held = reservations.iter().flat_map(|reservation| &reservation.accelerators);
    let held: BTreeSet<&str> = held.map(AcceleratorId::as_str).collect();
    let mut uuids: Vec<&str> = stored.accelerators.iter().map(|known| known.uuid.as_str()).collect();
    let known: BTreeSet<&str> = uuids.iter().copied().collect();
    uuids.extend(held.difference(&known));
    // Where its device plugin offers fewer, some are gone, and none that a Pod has.
    let has = place.units.map_or(usize::MAX, |units| units as usize);
    while uuids.len() > has {
        let Some(gone) = uuids.iter().position(|uuid| !held.contains(uuid)) else { break };
        uuids.remove(gone);
    }
    let accelerator = |uuid: &str| NodeAccelerator {
        uuid: uuid.to_owned(),
        capacity: each.into(),
        healthy: true,
        last_sleep: None,
    };
    uuids.into_iter().map(accelerator).collect()
}

/// Whether to write it. Accelerators that somebody else lists are theirs to write.
#[must_use]
pub fn node_differs(stored: &AcceleratorNodeStatus, wanted: &AcceleratorNodeStatus) -> bool {
    if stored.partial || wanted.partial {
        return stored != wanted;
    }
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
