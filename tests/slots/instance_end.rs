//! What else the leader does about instances: their slots follow the capacity, and they end.

use rouse::{
    slots::{InstanceEnd, LayoutChange, SlotUsage, SlotsCommand},
    units::Millis,
};

use crate::{
    harness::{instance_with, slots, usages},
    leader::LeaderHarness,
};

const HOUR: Millis = Millis::secs(3600);

fn one_camera(usages: &[&str], nodes: &[&str]) -> LeaderHarness {
    let mut leader = LeaderHarness::new(2, &["a", "b"]);
    leader.set_instance("cam", instance_with("cam", usages, nodes));
    leader
}

/// The change of each command. There must be no others.
fn layouts(commands: &[SlotsCommand]) -> Vec<&[LayoutChange]> {
    let layouts = commands.iter().map(|command| match command {
        SlotsCommand::SetLayout { changes, .. } => changes.as_slice(),
        other => panic!("{other:?}"),
    });
    layouts.collect()
}

/// Why the instance is deleted by the only command.
fn end(commands: &[SlotsCommand]) -> InstanceEnd {
    match commands {
        [SlotsCommand::DeleteInstance { cause, .. }] => *cause,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_slots_follow_the_capacity_of_the_configuration() {
    let mut leader = one_camera(&[], &["a"]);
    assert_eq!(layouts(&leader.settle()), [[LayoutChange::Add(slots(&["cam-0", "cam-1"]))]]);
    leader.set_capacity(Some(3));
    assert_eq!(layouts(&leader.settle()), [[LayoutChange::Add(slots(&["cam-2"]))]]);
    leader.edit_instance("cam", |usage| {
        usage.slots.insert("cam-2".into(), SlotUsage::Instance { node: "a".into() });
    });
    leader.set_capacity(Some(1));
    assert_eq!(layouts(&leader.settle()), [[LayoutChange::Remove(slots(&["cam-1"]))]]);
    assert_eq!(leader.pass(HOUR), [], "the slot in use stays");
    leader.edit_instance("cam", |usage| {
        usage.slots.insert("cam-2".into(), SlotUsage::Free);
    });
    assert_eq!(layouts(&leader.settle()), [[LayoutChange::Remove(slots(&["cam-2"]))]]);
    assert_eq!(usages(leader.usage("cam")), [""]);
}

#[test]
fn an_instance_that_no_node_sees_for_five_minutes_is_deleted() {
    let mut leader = one_camera(&["", ""], &["a"]);
    leader.edit_instance("cam", |usage| usage.nodes.clear());
    assert_eq!(leader.pass(Millis::secs(299)), []);
    // A node sees it again.
    leader.edit_instance("cam", |usage| {
        usage.nodes.insert("b".into());
    });
    assert_eq!(leader.pass(HOUR), []);
    leader.edit_instance("cam", |usage| usage.nodes.clear());
    assert_eq!(leader.pass(Millis::secs(299)), []);
    assert_eq!(end(&leader.pass(Millis::secs(1))), InstanceEnd::NoNodes);
    assert!(leader.instances.is_empty());
    assert_eq!(leader.controller.next_deadline(), None);
}

#[test]
fn an_instance_with_a_used_slot_is_not_deleted() {
    let mut leader = one_camera(&["", "a"], &[]);
    assert_eq!(leader.pass(HOUR), []);
    leader.set_capacity(None);
    assert_eq!(leader.pass(HOUR), []);
    // The last slot is free: now.
    leader.edit_instance("cam", |usage| {
        usage.slots.insert("cam-1".into(), SlotUsage::Free);
    });
    assert_eq!(end(&leader.settle()), InstanceEnd::NoConfiguration);
}

#[test]
fn an_instance_of_a_lost_node_is_first_freed_and_then_deleted() {
    let mut leader = one_camera(&["a", ""], &["a"]);
    leader.set_node("a", None);
    let freed = leader.settle();
    assert!(matches!(freed.as_slice(), [SlotsCommand::FreeNode { .. }]), "{freed:?}");
    assert_eq!(end(&leader.pass(Millis::secs(300))), InstanceEnd::NoNodes);
}

#[test]
fn an_instance_without_a_configuration_is_deleted_unless_the_watch_was_only_late() {
    let mut leader = one_camera(&["", ""], &["a"]);
    leader.set_capacity(None);
    assert_eq!(leader.pass(Millis::secs(29)), []);
    leader.set_capacity(Some(2));
    assert_eq!(leader.pass(HOUR), []);
    leader.set_capacity(None);
    assert_eq!(leader.pass(Millis::secs(29)), []);
    assert_eq!(end(&leader.pass(Millis::secs(1))), InstanceEnd::NoConfiguration);
}

#[test]
fn an_instance_that_is_used_again_before_its_deletion_stays() {
    let mut leader = one_camera(&["", ""], &[]);
    leader.now = leader.now + Millis::secs(1);
    leader.settle();
    leader.now = leader.now + Millis::secs(300);
    let delete = leader.plan();
    assert_eq!(end(&delete), InstanceEnd::NoNodes);
    leader.edit_instance("cam", |usage| {
        usage.nodes.insert("a".into());
        usage.slots.insert("cam-0".into(), SlotUsage::Instance { node: "a".into() });
    });
    leader.execute(&delete[0]);
    assert_eq!(leader.pass(HOUR), []);
    assert_eq!(usages(leader.usage("cam")), ["a", ""]);
}
