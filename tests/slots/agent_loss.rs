//! When the leader frees the slots of a ready node whose agent is gone.
//!
//! The kubelet no longer offers an instance some minutes after the agent's end. A container keeps its slot without an
//! agent, and its Pod shows that there may be one.

use rouse::{
    pairing::ids::NodeName,
    slots::{NodeLoss, SlotUsage, SlotsCommand},
    units::Millis,
};

use crate::{
    harness::{instance_with, usages},
    leader::LeaderHarness,
};

const HOUR: Millis = Millis::secs(3600);
/// Resources by which Pods get a slot of the first camera.
const RESOURCES: [&str; 2] = ["rouse.dev/cam-1", "rouse.dev/cams"];

/// Nodes a and b have slots of one camera, and node a one of another. Both see both.
fn two_cameras() -> LeaderHarness {
    let mut leader = LeaderHarness::new(3, &["a", "b"]);
    leader.set_instance("cam-1", instance_with("cam-1", &["a", "b", "C:cams-0:a"], &["a", "b"]));
    leader.set_instance("cam-2", instance_with("cam-2", &["", "a", ""], &["a", "b"]));
    leader
}

/// The kubelet of node a offers nothing any more, and no Pod there requests a slot.
fn without_agent() -> LeaderHarness {
    let mut leader = two_cameras();
    leader.set_offered("a", &[]);
    leader.set_requested("a", &[]);
    leader
}

/// The instance and the node of each command. There must be no others.
fn freed(commands: &[SlotsCommand]) -> Vec<(&str, &str)> {
    let freed = commands.iter().map(|command| match command {
        SlotsCommand::FreeNode { instance, node, cause: NodeLoss::NoAgent, .. } => {
            (instance.as_str(), node.as_str())
        }
        other => panic!("{other:?}"),
    });
    freed.collect()
}

#[test]
fn a_ready_node_without_an_agent_loses_its_slots_after_five_minutes_if_no_pod_may_have_one() {
    let mut leader = without_agent();
    assert_eq!(leader.pass(Millis::secs(299)), []);
    assert_eq!(freed(&leader.pass(Millis::secs(1))), [("cam-1", "a"), ("cam-2", "a")]);
    assert_eq!(usages(leader.usage("cam-1")), ["", "b", ""]);
    assert_eq!(usages(leader.usage("cam-2")), ["", "", ""]);
    for name in ["cam-1", "cam-2"] {
        let nodes: Vec<&str> = leader.usage(name).nodes.iter().map(NodeName::as_str).collect();
        assert_eq!(nodes, ["b"], "{name}");
    }
}

#[test]
fn a_slot_stays_claimed_as_long_as_a_pod_of_the_node_may_have_it_or_that_is_unknown() {
    for resource in RESOURCES {
        let mut leader = two_cameras();
        leader.set_offered("a", &[]);
        assert_eq!(leader.pass(HOUR), [], "the Pods of the node are unknown");
        leader.set_requested("a", &[resource]);
        let other = if resource == "rouse.dev/cams" { Vec::new() } else { vec![("cam-2", "a")] };
        assert_eq!(freed(&leader.pass(HOUR)), other, "a Pod requests {resource}");
        assert_eq!(usages(leader.usage("cam-1")), ["a", "b", "C:cams-0:a"]);
        leader.set_requested("a", &["rouse.dev/cam-9"]);
        assert!(freed(&leader.settle()).contains(&("cam-1", "a")), "no Pod has its slots any more");
    }
}

#[test]
fn a_node_whose_agent_offers_an_instance_keeps_the_slots_of_that_one() {
    let mut leader = two_cameras();
    leader.set_offered("a", &["cam-1"]);
    leader.set_requested("a", &[]);
    assert_eq!(freed(&leader.pass(HOUR)), [("cam-2", "a")]);
    assert_eq!(usages(leader.usage("cam-1")), ["a", "b", "C:cams-0:a"], "its agent frees them");
}

#[test]
fn an_agent_that_is_back_has_its_five_minutes_anew() {
    let mut leader = two_cameras();
    for _ in 0..10 {
        leader.set_offered("a", &[]);
        leader.set_requested("a", &[]);
        assert_eq!(leader.pass(Millis::secs(290)), []);
        leader.set_node("a", Some(true));
        assert_eq!(leader.pass(Millis::secs(1)), []);
    }
    leader.set_offered("a", &[]);
    assert_eq!(leader.pass(HOUR), [], "its Pods were not listed since");
}

#[test]
fn a_new_agent_is_seen_before_its_kubelet_offers_anything() {
    let mut leader = two_cameras();
    leader.set_offered("new", &[]);
    leader.edit_instance("cam-2", |usage| {
        usage.nodes.insert("new".into());
        usage.slots.insert("cam-2-0".into(), SlotUsage::Instance { node: "new".into() });
    });
    leader.set_requested("new", &[]);
    assert_eq!(leader.pass(Millis::secs(30)), []);
    leader.set_node("new", Some(true));
    assert_eq!(leader.pass(HOUR), []);
}

#[test]
fn the_next_leader_waits_as_long_again() {
    let mut leader = without_agent();
    assert_eq!(leader.pass(Millis::secs(200)), []);
    leader.change_leader();
    leader.set_requested("a", &[]);
    assert_eq!(leader.pass(Millis::secs(299)), []);
    assert_eq!(freed(&leader.pass(Millis::secs(1))), [("cam-1", "a"), ("cam-2", "a")]);
}

#[test]
fn a_node_without_an_agent_that_is_not_ready_either_counts_as_one_that_is_not_ready() {
    let mut leader = without_agent();
    leader.pass(Millis::secs(200));
    leader.set_node("a", Some(false));
    leader.set_requested("a", &["rouse.dev/cam-9"]);
    assert_eq!(leader.pass(HOUR), [], "a Pod with a slot of any device is on it");
}
