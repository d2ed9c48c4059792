//! The set of slots: its first map, growth, shrinking; and how slots are freed.

use rouse::slots::{InstanceName, InstanceUsage, LayoutChange, SlotChange, SlotUsage, UnusedChange};

use crate::harness::{START, instance_with, slots, texts, usages};

fn cam() -> InstanceName {
    InstanceName::from("cam")
}

#[test]
fn the_first_map_has_a_free_slot_for_each_number() {
    let mut instance = InstanceUsage::default();
    let layout = instance.layout(&cam(), 3);
    assert_eq!(layout, [LayoutChange::Add(slots(&["cam-0", "cam-1", "cam-2"]))]);
    instance.apply_layout(&layout);
    assert_eq!(usages(&instance), ["", "", ""]);
    assert_eq!(instance.layout(&cam(), 3), [], "the second time nothing is to be done");
}

#[test]
fn a_larger_capacity_adds_slots_and_a_smaller_one_removes_free_slots_only() {
    let mut instance = instance_with("cam", &["a", "", "b", "", "C:v-1:a"], &["a", "b"]);
    assert_eq!(instance.layout(&cam(), 6), [LayoutChange::Add(slots(&["cam-5"]))]);
    let shrink = instance.layout(&cam(), 2);
    assert_eq!(shrink, [LayoutChange::Remove(slots(&["cam-3"]))]);
    instance.apply_layout(&shrink);
    assert_eq!(usages(&instance), ["a", "", "b", "C:v-1:a"]);
    assert_eq!(instance.layout(&cam(), 2), [], "the slots in use stay");
    // They go once they are free.
    let freed = instance.freed_of(&"a".into());
    instance.apply(&freed).unwrap();
    assert_eq!(instance.layout(&cam(), 2), [LayoutChange::Remove(slots(&["cam-4"]))]);
    // A capacity that was raised meanwhile keeps them.
    assert_eq!(instance.layout(&cam(), 5), [LayoutChange::Add(slots(&["cam-3"]))]);
}

#[test]
fn a_free_slot_with_a_foreign_name_goes_and_a_used_one_stays() {
    let mut instance = instance_with("cam", &["", ""], &["a"]);
    instance.slots.insert("lamp-0".into(), SlotUsage::Free);
    instance.slots.insert("lamp-1".into(), SlotUsage::Instance { node: "a".into() });
    let layout = instance.layout(&cam(), 2);
    assert_eq!(layout, [LayoutChange::Remove(slots(&["lamp-0"]))]);
    instance.apply_layout(&layout);
    let kept = [("cam-0", ""), ("cam-1", ""), ("lamp-1", "a")];
    assert_eq!(texts(&instance), kept.map(|(slot, usage)| (slot.to_owned(), usage.to_owned())));
}

#[test]
fn no_instance_gets_more_slots_than_names_have_digits_for() {
    let layout = InstanceUsage::default().layout(&cam(), u32::MAX);
    assert!(matches!(layout.as_slice(), [LayoutChange::Add(slots)] if slots.len() == 256), "{layout:?}");
}

#[test]
fn freeing_what_is_free_or_gone_changes_nothing() {
    let mut instance = instance_with("cam", &["a", ""], &["a"]);
    assert_eq!(instance.free(&slots(&["cam-1", "cam-9"])), []);
    instance.unused_since.insert("cam-0".into(), START);
    let free = instance.free(&slots(&["cam-0", "cam-9"]));
    let expected = SlotChange {
        slot: "cam-0".into(),
        from: SlotUsage::Instance { node: "a".into() },
        to: SlotUsage::Free,
        unused_since: Some(UnusedChange::Clear { was: START }),
    };
    assert_eq!(free, [expected]);
    instance.apply(&free).unwrap();
    assert_eq!((usages(&instance), instance.unused_since.len()), (vec![String::new(); 2], 0));
    assert_eq!(instance.used(), 0);
}

#[test]
fn a_lost_node_loses_all_its_slots_and_no_others() {
    let mut instance = instance_with("cam", &["a", "b", "C:v-1:a", "C:v-1:b", ""], &["a", "b"]);
    assert_eq!(instance.used(), 4);
    let freed = instance.freed_of(&"a".into());
    instance.apply(&freed).unwrap();
    assert_eq!(usages(&instance), ["", "b", "", "C:v-1:b", ""]);
    assert_eq!(instance.freed_of(&"c".into()), []);
}
