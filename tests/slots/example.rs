//! The example of the design, to the letter.

use rouse::{
    pairing::ids::NodeName,
    slots::{ClaimError, ClaimKind, InstanceName, InstanceUsage, SlotName},
};

use crate::harness::{slots, texts};

const INSTANCE: &str = "my-resource-00095f";
const SLOTS: [&str; 5] = [
    "my-resource-00095f-0",
    "my-resource-00095f-1",
    "my-resource-00095f-2",
    "my-resource-00095f-3",
    "my-resource-00095f-4",
];

/// A device that ten nodes see, with capacity 5.
fn my_resource() -> InstanceUsage {
    let nodes = ('a'..='j').map(|letter| NodeName::from(format!("node-{letter}"))).collect();
    let mut usage = InstanceUsage { capacity: 5, nodes, ..InstanceUsage::default() };
    let layout = usage.layout(&InstanceName::from(INSTANCE), 5);
    usage.apply_layout(&layout);
    usage
}

fn map(usages: [&str; 5]) -> Vec<(String, String)> {
    SLOTS.into_iter().zip(usages).map(|(slot, usage)| (slot.to_owned(), usage.to_owned())).collect()
}

/// The list for the kubelet of a node.
fn list(usage: &InstanceUsage, node: &str) -> Vec<(SlotName, bool)> {
    usage.health(&InstanceName::from(INSTANCE), &node.into(), true).into_iter().collect()
}

fn healthy_but(unhealthy: &[usize]) -> Vec<(SlotName, bool)> {
    let numbers = 0..SLOTS.len();
    numbers.map(|number| (SLOTS[number].into(), !unhealthy.contains(&number))).collect()
}

#[test]
fn five_slots_are_empty_at_first_and_healthy_everywhere() {
    let usage = my_resource();
    assert_eq!(texts(&usage), map(["", "", "", "", ""]));
    assert_eq!(list(&usage, "node-a"), healthy_but(&[]));
    assert_eq!(list(&usage, "node-b"), healthy_but(&[]));
}

#[test]
fn a_slot_that_node_a_claims_is_unhealthy_on_every_other_node() {
    let mut usage = my_resource();
    let claim = usage.claim(&slots(&SLOTS[3..4]), &"node-a".into(), &ClaimKind::Instance).unwrap();
    usage.apply(&claim).unwrap();
    assert_eq!(texts(&usage), map(["", "", "", "node-a", ""]));
    assert_eq!(list(&usage, "node-a"), healthy_but(&[]), "its container may be started again");
    for letter in 'b'..='j' {
        assert_eq!(list(&usage, &format!("node-{letter}")), healthy_but(&[3]), "node-{letter}");
    }
    // A node that does not see the device offers none of it.
    assert_eq!(list(&usage, "node-z"), healthy_but(&[0, 1, 2, 3, 4]));
}

#[test]
fn a_kubelet_that_asks_for_a_claimed_slot_gets_an_error_and_the_claim_stays() {
    let mut usage = my_resource();
    // Node b has read the object, and node a is faster.
    let stale = usage.clone();
    let claim = |usage: &InstanceUsage, node: &str| {
        usage.claim(&slots(&SLOTS[3..4]), &node.into(), &ClaimKind::Instance)
    };
    usage.apply(&claim(&usage, "node-a").unwrap()).unwrap();
    let after_a = usage.clone();
    let late = claim(&stale, "node-b").unwrap();
    assert_eq!(usage.apply(&late).unwrap_err().0, SlotName::from(SLOTS[3]));
    assert_eq!(usage, after_a);
    // After it has read the object again, node b knows why, and sends its kubelet the list.
    let refused = ClaimError::TakenByNode { slot: SLOTS[3].into(), node: "node-a".into() };
    assert_eq!(claim(&usage, "node-b"), Err(refused));
    assert_eq!(list(&usage, "node-b"), healthy_but(&[3]));
    // Another slot is free.
    let other = usage.claim(&slots(&SLOTS[2..3]), &"node-b".into(), &ClaimKind::Instance).unwrap();
    usage.apply(&other).unwrap();
    assert_eq!(texts(&usage), map(["", "", "node-b", "node-a", ""]));
}

#[test]
fn of_ten_nodes_five_get_a_slot_and_the_next_one_does_when_a_slot_is_freed() {
    let mut usage = my_resource();
    let nodes: Vec<NodeName> = usage.nodes.iter().cloned().collect();
    let start = |usage: &mut InstanceUsage, node: &NodeName| {
        let list = usage.health(&InstanceName::from(INSTANCE), node, true);
        let mut healthy = list.into_iter().filter(|(_, is_healthy)| *is_healthy);
        let free = healthy.find(|(slot, _)| usage.slots[slot].is_free());
        let Some((slot, _)) = free else { return false };
        let claim = usage.claim(&[slot], node, &ClaimKind::Instance).unwrap();
        usage.apply(&claim).is_ok()
    };
    let started: Vec<bool> = nodes.iter().map(|node| start(&mut usage, node)).collect();
    assert_eq!(started, [true, true, true, true, true, false, false, false, false, false]);
    assert_eq!(usage.used(), 5);
    let freed = usage.freed_of(&nodes[1]);
    usage.apply(&freed).unwrap();
    assert!(start(&mut usage, &nodes[7]));
    assert!(!start(&mut usage, &nodes[8]));
    assert_eq!(texts(&usage), map(["node-a", "node-h", "node-c", "node-d", "node-e"]));
}
