//! Computes the status of an AcceleratorNode.
//!
//! A full list of accelerators belongs to the program that inspected the node and wrote the list: Rouse leaves it
//! alone. On other nodes Rouse keeps a partial list of the accelerators that stubs reported from models' Pods, as
//! recorded in the pool's ledger.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use rouse::{
    model::AcceleratorId,
    units::{Bytes, Tick, pluralize},
};

use crate::{
    condition::{READY, condition},
    crd::{
        AcceleratorNodeStatus, Quantity,
        ledger::Reservation,
        node::{NodeAccelerator, NodeReservation},
    },
    index::ResolvedNode,
};

/// Computes the wanted status; without accelerators if another program lists them.
#[must_use]
pub fn node_status(
    resolved_node: &ResolvedNode,
    reservations: &[&Reservation],
    generation: Option<i64>,
    stored: &AcceleratorNodeStatus,
    now: Tick,
) -> AcceleratorNodeStatus {
    let before = stored.conditions.as_slice();
    let listed = u32::try_from(resolved_node.capacities.by_uuid.len()).unwrap_or(u32::MAX);
    // In a pool with slots, only the node agent lists accelerators.
    let accelerators = if is_listed_externally(stored) || resolved_node.slots.is_some() {
        Vec::new()
    } else {
        reported_accelerators(resolved_node, reservations, stored)
    };
    let reserved: Bytes = reservations.iter().map(|reservation| reservation.sum()).sum();
    AcceleratorNodeStatus {
        count: listed.max(resolved_node.accelerators),
        healthy: resolved_node.accelerators,
        kind: resolved_node.kind.clone(),
        total: resolved_node.total.map(Quantity::from),
        reserved: Some(Quantity::from(reserved)),
        partial: !accelerators.is_empty(),
        accelerators,
        reservations: reservations.iter().map(|reservation| copy(reservation)).collect(),
        conditions: vec![node_condition(Some(resolved_node), generation, before, now)],
    }
}

/// Whether another program lists the node's accelerators.
const fn is_listed_externally(stored: &AcceleratorNodeStatus) -> bool {
    !stored.partial && !stored.accelerators.is_empty()
}

/// Returns the accelerators listed before, plus those that Pods have now.
///
/// If the node offers fewer accelerators than are listed, only those that Pods have stay: nothing shows which of the
/// others disappeared. A node that offers none is no evidence, since it appears so while its device plugin restarts.
fn reported_accelerators(
    resolved_node: &ResolvedNode,
    reservations: &[&Reservation],
    stored: &AcceleratorNodeStatus,
) -> Vec<NodeAccelerator> {
    let reserved = reservations.iter().flat_map(|reservation| &reservation.accelerators);
    let reserved: BTreeSet<&str> = reserved.map(AcceleratorId::as_str).collect();
    let mut listed = stored.accelerators.clone();
    // Without the label for it, listed accelerators keep their capacity, and new ones have no known capacity.
    if let Some(each) = resolved_node.capacities.unlisted_each {
        let known: BTreeSet<&str> =
            stored.accelerators.iter().map(|accelerator| accelerator.uuid.as_str()).collect();
        listed.iter_mut().for_each(|accelerator| accelerator.capacity = each.into());
        listed.extend(reserved.difference(&known).map(|uuid| NodeAccelerator {
            uuid: (*uuid).to_owned(),
            index: None,
            capacity: each.into(),
            healthy: true,
            configuration: None,
            slots: None,
            last_sleep: None,
            last_seen: None,
        }));
    }
    let offered = resolved_node.accelerators as usize;
    if (1..listed.len()).contains(&offered) {
        listed.retain(|accelerator| reserved.contains(accelerator.uuid.as_str()));
    }
    for accelerator in &mut listed {
        accelerator.healthy = offered > 0 || reserved.contains(accelerator.uuid.as_str());
    }
    listed
}

/// Whether the status is worth a write. Ignores differences in another program's list.
#[must_use]
pub fn node_differs(stored: &AcceleratorNodeStatus, desired: &AcceleratorNodeStatus) -> bool {
    if is_listed_externally(stored) {
        return *stored
            != AcceleratorNodeStatus { accelerators: stored.accelerators.clone(), ..desired.clone() };
    }
    stored != desired
}

fn copy(reservation: &Reservation) -> NodeReservation {
    NodeReservation {
        id: reservation.id,
        model: reservation.model.to_string(),
        variant: (!reservation.variant.is_default()).then(|| reservation.variant.to_string()),
        replica: reservation.replica,
        bytes: reservation.bytes.into(),
        host_bytes: reservation.host_bytes.into(),
        uuids: reservation.accelerators.iter().map(ToString::to_string).collect(),
        state: reservation.state,
    }
}

/// Returns the condition Ready of the node's object. `resolved_node` is `None` if the node is in no pool or does not exist.
#[must_use]
pub fn node_condition(
    resolved_node: Option<&ResolvedNode>,
    generation: Option<i64>,
    before: &[Condition],
    now: Tick,
) -> Condition {
    let warning = resolved_node.and_then(|node| node.warning.as_deref());
    let with_warning = |text: &str| {
        warning.map_or_else(|| text.to_owned(), |warning| format!("{text}. Not counted: {warning}"))
    };
    let (ready, reason, message) = match resolved_node {
        Some(ResolvedNode { pool: Some(pool), accelerators, .. }) if *accelerators > 0 => (
            true,
            "Ready",
            with_warning(&format!("{} for the pool '{pool}'", pluralize(accelerators, "accelerator"))),
        ),
        Some(ResolvedNode { pool: Some(_), .. }) => {
            (false, "NoAccelerators", with_warning("the node has no memory to grant"))
        }
        _ => (false, "NoPool", with_warning("the node is in no AcceleratorPool")),
    };
    condition(READY, ready, reason, &message, generation, before, now)
}

#[cfg(test)]
mod tests {
    use rouse::model::VariantName;
    use serde_json::json;

    use super::*;
    use crate::{
        crd::ledger::{ObjectName, ReservationState},
        index::AcceleratorCapacities,
    };

    const NOW: Tick = Tick(1_780_000_000_000);

    fn on_accelerator(uuid: &str) -> Reservation {
        Reservation {
            id: 1,
            model: ObjectName::new("chat", "m"),
            variant: VariantName::default(),
            replica: 0,
            count: 1,
            bytes: Bytes::gib(40),
            host_bytes: Bytes::ZERO,
            node: Some("n".into()),
            accelerators: vec![uuid.into()],
            state: ReservationState::Placed,
            since: NOW,
        }
    }

    /// A node that offers this many accelerators, each with capacity `each` if its label has one.
    fn offers(accelerators: u32, each: Option<Bytes>) -> ResolvedNode {
        let capacities = AcceleratorCapacities { unlisted_each: each, ..AcceleratorCapacities::default() };
        ResolvedNode { pool: Some("p".into()), accelerators, capacities, ..ResolvedNode::default() }
    }

    #[test]
    fn a_node_lists_the_accelerators_that_stubs_report_and_those_that_are_gone_no_longer() {
        let mut stored = AcceleratorNodeStatus::default();
        let mut after = |held: &[&str], offered, gib: Option<u64>| {
            let held: Vec<_> = held.iter().map(|uuid| on_accelerator(uuid)).collect();
            let place = offers(offered, gib.map(Bytes::gib));
            let status =
                |stored: &_| node_status(&place, &held.iter().collect::<Vec<_>>(), None, stored, NOW);
            let wanted = status(&stored);
            let written = node_differs(&stored, &wanted);
            assert!(!node_differs(&wanted, &status(&wanted)), "it is written once: {wanted:?}");
            stored = wanted;
            assert_eq!(stored.partial, !stored.accelerators.is_empty());
            let listed = stored.accelerators.iter().map(|own| {
                format!("{} {}{}", own.uuid, own.capacity, if own.healthy { "" } else { " not healthy" })
            });
            (written, listed.collect::<Vec<_>>().join(", "))
        };
        let mut is = |held: &[&str], offered, gib, listed: &str, why: &str| {
            assert_eq!(after(held, offered, gib).1, listed, "{why}");
            assert!(!after(held, offered, gib).0, "{why}");
        };
        is(&[], 3, Some(80), "", "no stub has reported any");
        is(&["A"], 3, None, "", "nothing says how much memory it has");
        is(&["A"], 3, Some(80), "A 80Gi", "reported");
        is(&["B", "C"], 3, Some(80), "A 80Gi, B 80Gi, C 80Gi", "that no Pod has it now is no evidence");
        is(&["B"], 3, None, "A 80Gi, B 80Gi, C 80Gi", "nor is a label that went");
        is(&["B"], 3, Some(79), "A 79Gi, B 79Gi, C 79Gi", "the label is corrected");
        let none = "A 79Gi not healthy, B 79Gi, C 79Gi not healthy";
        is(&["B"], 0, Some(79), none, "a device plugin that restarts offers none");
        is(&["B"], 3, Some(79), "A 79Gi, B 79Gi, C 79Gi", "it has restarted");
        is(&["B"], 2, Some(79), "B 79Gi", "one is gone: of A and C it is not known which");
        is(&["C"], 2, Some(79), "B 79Gi, C 79Gi", "it was not this one");
        is(&["D"], 2, Some(79), "D 79Gi", "one was replaced");
        is(&["A", "D"], 1, Some(79), "D 79Gi, A 79Gi", "what Pods have is there");
        is(&[], 1, Some(79), "", "one of them is gone");
    }

    #[test]
    fn only_a_node_agent_lists_accelerators_with_slots() {
        let accelerator = json!({"uuid": "A", "capacity": "79Gi", "healthy": true});
        let stored: AcceleratorNodeStatus =
            serde_json::from_value(json!({"accelerators": [accelerator], "partial": true})).unwrap();
        let place = ResolvedNode { slots: Some(4), ..offers(1, Some(Bytes::gib(80))) };
        let held = on_accelerator("A");
        let wanted = node_status(&place, &[&held], None, &stored, NOW);
        assert!(wanted.accelerators.is_empty() && !wanted.partial, "{wanted:?}");
        assert!(node_differs(&stored, &wanted), "a partial list from before the slots goes");
    }

    #[test]
    fn a_list_of_another_program_is_left_as_it_is() {
        let accelerator = json!({"uuid": "A", "capacity": "79Gi", "healthy": false});
        let mut stored: AcceleratorNodeStatus =
            serde_json::from_value(json!({"accelerators": [accelerator]})).unwrap();
        let held = on_accelerator("B");
        let wanted = node_status(&offers(2, Some(Bytes::gib(80))), &[&held], None, &stored, NOW);
        assert!(wanted.accelerators.is_empty() && !wanted.partial, "{wanted:?}");
        assert!(node_differs(&stored, &wanted), "the rest is written");
        let theirs = std::mem::take(&mut stored.accelerators);
        stored = AcceleratorNodeStatus { accelerators: theirs, ..wanted.clone() };
        assert!(!node_differs(&stored, &wanted));
    }
}
