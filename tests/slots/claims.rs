//! Claims by both kinds of resources, and what the kubelet may allocate.

use rouse::slots::{ClaimError, ClaimKind, SlotChange, SlotUsage, UnusedChange};

use crate::harness::{START, instance_with, slots, usages};

const NODES: [&str; 2] = ["a", "b"];

fn virtual_device(id: &str) -> ClaimKind {
    ClaimKind::Configuration(id.into())
}

/// The usage of the slot, the node that wants it, and the usage afterwards or the reason of the refusal.
#[test]
fn a_claim_succeeds_by_the_usage_of_the_slot() {
    let taken = || Err(ClaimError::TakenByNode { slot: "cam-0".into(), node: "b".into() });
    let other_plugin = || Err(ClaimError::TakenByOtherPlugin { slot: "cam-0".into() });
    let other_device = ClaimError::TakenByVirtualDevice { slot: "cam-0".into(), virtual_id: "v-1".into() };
    let cases = [
        ("", ClaimKind::Instance, Ok("a")),
        ("a", ClaimKind::Instance, Ok("a")),
        ("b", ClaimKind::Instance, taken()),
        ("C:v-1:a", ClaimKind::Instance, other_plugin()),
        ("C:v-1:b", ClaimKind::Instance, taken()),
        ("", virtual_device("v-1"), Ok("C:v-1:a")),
        ("C:v-1:a", virtual_device("v-1"), Ok("C:v-1:a")),
        ("C:v-1:a", virtual_device("v-2"), Err(other_device)),
        ("C:v-1:b", virtual_device("v-1"), taken()),
        ("a", virtual_device("v-1"), other_plugin()),
        ("b", virtual_device("v-1"), taken()),
    ];
    for (usage, kind, expected) in cases {
        let mut instance = instance_with("cam", &[usage], &NODES);
        let before = instance.clone();
        let outcome = instance.claim(&slots(&["cam-0"]), &"a".into(), &kind);
        match expected {
            Ok(text) => {
                instance.apply(&outcome.unwrap()).unwrap();
                assert_eq!(usages(&instance), [text], "{usage}");
            }
            Err(error) => {
                assert_eq!(outcome, Err(error), "{usage}");
                assert_eq!(instance, before);
            }
        }
    }
}

#[test]
fn a_slot_that_the_node_has_is_granted_without_a_write() {
    let mut instance = instance_with("cam", &["a", "C:v-1:a"], &NODES);
    for (slot, kind) in [("cam-0", ClaimKind::Instance), ("cam-1", virtual_device("v-1"))] {
        assert_eq!(instance.claim(&slots(&[slot]), &"a".into(), &kind), Ok(Vec::new()), "{slot}");
    }
    // A reclaim may be decided already. The write that ends the mark makes it fail.
    instance.unused_since.insert("cam-0".into(), START);
    let reclaim = instance.free(&slots(&["cam-0"]));
    let claim = instance.claim(&slots(&["cam-0"]), &"a".into(), &ClaimKind::Instance).unwrap();
    let own = SlotUsage::Instance { node: "a".into() };
    let expected = SlotChange {
        slot: "cam-0".into(),
        from: own.clone(),
        to: own,
        unused_since: Some(UnusedChange::Clear { was: START }),
    };
    assert_eq!(claim, [expected]);
    instance.apply(&claim).unwrap();
    instance.apply(&reclaim).unwrap_err();
    assert_eq!(usages(&instance), ["a", "C:v-1:a"]);
}

#[test]
fn several_slots_are_claimed_together_or_not_at_all() {
    let mut instance = instance_with("cam", &["", "a", "b", ""], &NODES);
    let claim = |ids: &[&str]| instance.claim(&slots(ids), &"a".into(), &ClaimKind::Instance);
    assert_eq!(
        claim(&["cam-0", "cam-2"]),
        Err(ClaimError::TakenByNode { slot: "cam-2".into(), node: "b".into() })
    );
    assert_eq!(claim(&["cam-0", "cam-4"]), Err(ClaimError::NoSlot("cam-4".into())));
    let both = claim(&["cam-3", "cam-1", "cam-0", "cam-3"]).unwrap();
    assert_eq!(both.len(), 2, "each slot once, and the one that the node has needs no change: {both:?}");
    // Another node gets one of them first.
    let mut raced = instance.clone();
    let other = raced.claim(&slots(&["cam-3"]), &"b".into(), &ClaimKind::Instance).unwrap();
    raced.apply(&other).unwrap();
    raced.apply(&both).unwrap_err();
    assert_eq!(usages(&raced), ["", "a", "b", "b"]);
    instance.apply(&both).unwrap();
    assert_eq!(usages(&instance), ["a", "a", "b", "a"]);
}

#[test]
fn a_node_that_does_not_see_the_device_claims_nothing() {
    let instance = instance_with("cam", &[""], &["b"]);
    let claim = instance.claim(&slots(&["cam-0"]), &"a".into(), &ClaimKind::Instance);
    assert_eq!(claim, Err(ClaimError::NotSeen { node: "a".into() }));
}

/// The kubelet shows the text as the message of the Pod.
#[test]
fn a_refusal_says_what_happened_and_what_helps() {
    let errors = [
        ClaimError::NoSlot("cam-0".into()),
        ClaimError::NotSeen { node: "a".into() },
        ClaimError::TakenByNode { slot: "cam-0".into(), node: "b".into() },
        ClaimError::TakenByOtherPlugin { slot: "cam-0".into() },
        ClaimError::TakenByVirtualDevice { slot: "cam-0".into(), virtual_id: "v-1".into() },
        ClaimError::Insufficient { wanted: 2, free: 1 },
    ];
    insta::assert_snapshot!(errors.map(|error| error.to_string()).join("\n"), @"
    slot cam-0 is gone, with its device or because of a lower capacity: delete the Pod, so that the one that replaces it gets another slot
    node a does not see the device now: check that the device can be reached from there
    node b has claimed slot cam-0 meanwhile: delete the Pod, so that the one that replaces it gets another slot
    slot cam-0 is in use by the other resource of its device: delete the Pod, so that the one that replaces it gets another slot
    slot cam-0 is in use as virtual device v-1: delete the Pod, so that the one that replaces it gets another slot
    the container requests 2 different devices, and 1 can be had: request fewer, or wait until slots of other devices are free
    ");
}

#[test]
fn what_the_kubelet_may_allocate_follows_the_usage() {
    let list = |usages: &[&str], node: &str, device_healthy: bool| {
        let instance = instance_with("cam", usages, &NODES);
        instance.health(&"cam".into(), &node.into(), device_healthy).into_values().collect::<Vec<bool>>()
    };
    let all = ["", "a", "b", "C:v-1:a", "C:v-1:b"];
    assert_eq!(list(&all, "a", true), [true, true, false, false, false]);
    assert_eq!(list(&all, "b", true), [true, false, true, false, false]);
    // The map changes, and the list with it.
    assert_eq!(list(&["b", "a", "", "", "C:v-1:b"], "a", true), [false, true, true, true, false]);
    // A faulty device, and a node that does not see it.
    assert_eq!(list(&all, "a", false), [false; 5]);
    assert_eq!(list(&all, "c", true), [false; 5]);
    assert_eq!(list(&[], "a", true), [false; 0]);
}

#[test]
fn no_slot_above_a_lowered_capacity_is_for_a_new_container() {
    let mut instance = instance_with("cam", &["a", "", "a", ""], &NODES);
    instance.capacity = 2;
    let health = instance.health(&"cam".into(), &"a".into(), true);
    let healthy: Vec<bool> = health.into_values().collect();
    assert_eq!(healthy, [true, true, false, false]);
    assert_eq!(usages(&instance), ["a", "", "a", ""], "the container that runs keeps its slot");
}
