//! When the leader takes a node for lost, and what it then writes.

use rouse::{
    slots::{NodeLoss, SlotUsage, SlotsCommand, SlotsController, SlotsEvent},
    units::Millis,
};

use crate::{
    harness::{instance_with, usages},
    leader::LeaderHarness,
};

const HOUR: Millis = Millis::secs(3600);

/// Node a and node b have slots of one camera, and node a one of another.
fn two_cameras() -> LeaderHarness {
    let mut leader = LeaderHarness::new(3, &["a", "b"]);
    leader.set_instance("cam-1", instance_with("cam-1", &["a", "b", "C:cams-0:a"], &["a", "b"]));
    leader.set_instance("cam-2", instance_with("cam-2", &["", "a", ""], &["a"]));
    leader
}

/// The instance, the node and the cause of each command. There must be no others.
fn losses(commands: &[SlotsCommand]) -> Vec<(&str, &str, NodeLoss)> {
    let losses = commands.iter().map(|command| match command {
        SlotsCommand::FreeNode { instance, node, cause, .. } => (instance.as_str(), node.as_str(), *cause),
        other => panic!("{other:?}"),
    });
    losses.collect()
}

fn assert_node_a_is_lost(leader: &LeaderHarness) {
    assert_eq!(usages(leader.usage("cam-1")), ["", "b", ""]);
    assert_eq!(usages(leader.usage("cam-2")), ["", "", ""]);
    for name in ["cam-1", "cam-2"] {
        assert!(!leader.usage(name).nodes.contains("a"), "{name}");
    }
}

#[test]
fn a_node_that_is_added_loses_nothing_whether_it_is_ready_or_not() {
    for ready in [true, false] {
        let mut leader = two_cameras();
        leader.set_node("c", Some(ready));
        leader.edit_instance("cam-2", |usage| {
            usage.nodes.insert("c".into());
            usage.slots.insert("cam-2-0".into(), SlotUsage::Instance { node: "c".into() });
        });
        assert_eq!(leader.pass(HOUR), [], "ready: {ready}");
    }
}

#[test]
fn a_node_that_is_not_ready_is_lost_after_five_minutes_without_pods() {
    let mut leader = two_cameras();
    leader.set_node("a", Some(false));
    leader.set_requested("a", &[]);
    assert_eq!(leader.pass(Millis::secs(299)), []);
    let commands = leader.pass(Millis::secs(1));
    assert_eq!(losses(&commands), [("cam-1", "a", NodeLoss::NotReady), ("cam-2", "a", NodeLoss::NotReady)]);
    assert_node_a_is_lost(&leader);
    assert_eq!(leader.pass(Millis::secs(200)), []);
}

#[test]
fn a_node_that_is_not_ready_keeps_its_slots_while_it_has_pods_or_their_number_is_unknown() {
    let mut leader = two_cameras();
    // This number is from before.
    leader.set_requested("a", &[]);
    leader.set_node("a", Some(false));
    assert_eq!(leader.pass(HOUR), []);
    leader.set_requested("a", &["rouse.dev/other"]);
    assert_eq!(leader.pass(HOUR), []);
    leader.set_requested("a", &[]);
    assert_eq!(leader.settle().len(), 2);
    assert_node_a_is_lost(&leader);
}

#[test]
fn a_node_that_is_ready_again_has_its_five_minutes_anew() {
    let mut leader = two_cameras();
    for _ in 0..10 {
        leader.set_node("a", Some(false));
        leader.set_requested("a", &[]);
        assert_eq!(leader.pass(Millis::secs(290)), []);
        // Another heartbeat without a change of readiness does not begin them anew.
        leader.set_node("a", Some(false));
        leader.set_node("a", Some(true));
        assert_eq!(leader.pass(Millis::secs(1)), []);
    }
    leader.set_node("a", Some(false));
    assert_eq!(leader.pass(HOUR), [], "its Pods were not counted since");
}

#[test]
fn a_node_that_is_deleted_is_lost_at_once() {
    let mut leader = two_cameras();
    leader.set_node("a", None);
    let commands = leader.settle();
    assert_eq!(losses(&commands), [("cam-1", "a", NodeLoss::Gone), ("cam-2", "a", NodeLoss::Gone)]);
    assert_node_a_is_lost(&leader);
    // It comes back under the same name, and its agent is faster than the watch of nodes.
    leader.edit_instance("cam-2", |usage| {
        usage.nodes.insert("a".into());
    });
    assert_eq!(leader.pass(Millis::secs(20)), []);
    leader.set_node("a", Some(true));
    assert_eq!(leader.pass(HOUR), []);
}

#[test]
fn a_node_that_is_gone_when_the_leader_starts_is_lost_after_half_a_minute() {
    let mut leader = two_cameras();
    leader.settle();
    leader.controller = SlotsController::default();
    leader.set_node("a", None);
    leader.change_leader();
    assert_eq!(leader.pass(Millis::secs(29)), []);
    assert_eq!(
        losses(&leader.pass(Millis::secs(1))),
        [("cam-1", "a", NodeLoss::Gone), ("cam-2", "a", NodeLoss::Gone)]
    );
    assert_node_a_is_lost(&leader);
}

#[test]
fn a_node_that_the_watch_reports_late_is_not_lost() {
    let mut leader = two_cameras();
    leader.set_instance("cam-3", instance_with("cam-3", &["new", "", ""], &["new"]));
    // The index knows no such node.
    leader.set_node("new", None);
    assert_eq!(leader.pass(Millis::secs(29)), []);
    leader.set_node("new", Some(true));
    assert_eq!(leader.pass(HOUR), []);
}

#[test]
fn a_leader_that_has_not_listed_everything_and_a_follower_write_nothing() {
    let mut leader = two_cameras();
    leader.send(SlotsEvent::LeadershipGained);
    leader.set_instance("cam-2", instance_with("cam-2", &["gone"], &["gone"]));
    assert_eq!(leader.pass(HOUR), []);
    leader.send(SlotsEvent::Listed);
    assert!(!leader.settle().is_empty());
    leader.send(SlotsEvent::LeadershipLost);
    leader.set_instance("cam-3", instance_with("cam-3", &["gone"], &["gone"]));
    leader.set_node("gone", None);
    assert_eq!(leader.pass(HOUR), []);
}

#[test]
fn two_lost_nodes_of_one_instance_are_removed_one_after_the_other() {
    let mut leader = two_cameras();
    leader.set_node("a", None);
    leader.set_node("b", None);
    let first = leader.plan();
    assert_eq!(losses(&first), [("cam-1", "a", NodeLoss::Gone), ("cam-2", "a", NodeLoss::Gone)]);
    first.iter().for_each(|command| leader.execute(command));
    assert_eq!(losses(&leader.settle()), [("cam-1", "b", NodeLoss::Gone)]);
    assert_eq!(usages(leader.usage("cam-1")), ["", "", ""]);
}

#[test]
fn a_write_that_an_agent_outran_is_decided_anew_on_what_it_wrote() {
    let mut leader = two_cameras();
    leader.set_node("a", None);
    let commands = leader.plan();
    // Before the leader's writes, node b claims the free slot of camera 2.
    leader.edit_instance("cam-2", |usage| {
        usage.slots.insert("cam-2-2".into(), SlotUsage::Instance { node: "b".into() });
    });
    commands.iter().for_each(|command| leader.execute(command));
    assert_eq!(usages(leader.usage("cam-2")), ["", "a", "b"], "the write was refused");
    assert_eq!(losses(&leader.settle()), [("cam-2", "a", NodeLoss::Gone)]);
    assert_eq!(usages(leader.usage("cam-2")), ["", "", "b"]);
}

#[test]
fn a_write_that_fails_or_is_lost_is_repeated_after_a_pause() {
    let mut leader = two_cameras();
    leader.set_instance("cam-1", instance_with("cam-1", &["", "b", ""], &["b"]));
    leader.set_node("a", None);
    let commands = leader.plan();
    leader.fail(&commands[0], false);
    assert_eq!(leader.plan(), []);
    leader.now = leader.now + Millis::secs(5);
    let again = leader.plan();
    assert_eq!(again, commands);
    // Rights are missing.
    leader.fail(&again[0], true);
    leader.now = leader.now + Millis::secs(59);
    assert_eq!(leader.plan(), []);
    leader.now = leader.now + Millis::secs(1);
    assert_eq!(leader.plan(), commands);
    // Its outcome never comes.
    leader.now = leader.now + Millis::secs(59);
    assert_eq!(leader.plan(), []);
    assert_eq!(leader.controller.next_deadline(), Some(leader.now + Millis::secs(1)));
    leader.now = leader.now + Millis::secs(1);
    assert_eq!(leader.plan(), commands);
}

/// A user has written a text that is no usage. The reader of the object takes the whole text for a node's name.
#[test]
fn a_slot_of_a_node_that_never_was_is_freed() {
    let mut leader = two_cameras();
    leader.edit_instance("cam-2", |usage| {
        usage.slots.insert("cam-2-2".into(), SlotUsage::Instance { node: "C:x".into() });
    });
    let commands = leader.pass(Millis::secs(30));
    assert_eq!(losses(&commands), [("cam-2", "C:x", NodeLoss::Gone)]);
    assert_eq!(usages(leader.usage("cam-2")), ["", "a", ""]);
}
