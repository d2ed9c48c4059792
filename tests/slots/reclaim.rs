//! Reconciliation of claims with the containers of a node, and the five minutes.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    slots::{ClaimKind, InstanceUsage, Reclaimer, SlotUsage, UnusedChange},
    units::{Millis, Tick},
};

use crate::harness::{Instances, START, instance_with, usages};

const UNUSED_AFTER: Millis = Millis::secs(300);
/// Time between two rounds.
const ROUND: Millis = Millis::secs(10);

/// One instance and the agent of node a.
struct ReclaimHarness {
    instances: Instances,
    reclaimer: Reclaimer,
    now: Tick,
}

impl ReclaimHarness {
    fn new(usages: &[&str]) -> Self {
        let instance = instance_with("cam", usages, &["a", "b"]);
        Self {
            instances: BTreeMap::from([("cam".into(), instance)]),
            reclaimer: Reclaimer::new("a".into(), UNUSED_AFTER),
            now: START,
        }
    }

    /// A new agent knows what the object says.
    fn restart_agent(&mut self) {
        self.reclaimer = Reclaimer::new("a".into(), UNUSED_AFTER);
    }

    /// One round. Returns the number of changed slots.
    fn round(&mut self, in_use: &[&str]) -> usize {
        let in_use: BTreeSet<String> = in_use.iter().map(|id| (*id).to_owned()).collect();
        let plan = self.reclaimer.plan(&self.instances, &in_use, self.now);
        for (name, changes) in &plan {
            self.instances.get_mut(name).unwrap().apply(changes).unwrap();
        }
        assert!(self.reclaimer.plan(&self.instances, &in_use, self.now).is_empty(), "{:?}", self.instances);
        plan.iter().map(|(_, changes)| changes.len()).sum()
    }

    /// Rounds for this long, in which the containers stay the same. Returns the changed slots.
    fn rounds(&mut self, span: Millis, in_use: &[&str]) -> usize {
        let end = self.now + span;
        let mut changed = 0;
        while self.now < end {
            self.now = self.now + ROUND;
            changed += self.round(in_use);
        }
        changed
    }

    fn cam(&mut self) -> &mut InstanceUsage {
        self.instances.get_mut("cam").unwrap()
    }

    fn usages(&self) -> Vec<String> {
        usages(&self.instances["cam"])
    }

    fn unused_since(&self, slot: &str) -> Option<Tick> {
        self.instances["cam"].unused_since.get(slot).copied()
    }
}

#[test]
fn nothing_is_to_be_done_while_each_claim_has_its_container() {
    let mut node = ReclaimHarness::new(&["a", "", "b", "C:v-1:a", "C:v-1:b"]);
    assert_eq!(node.rounds(Millis::secs(3600), &["cam-0", "v-1"]), 0);
    assert_eq!(node.usages(), ["a", "", "b", "C:v-1:a", "C:v-1:b"]);
}

#[test]
fn a_slot_that_a_container_uses_is_claimed_again() {
    let mut node = ReclaimHarness::new(&["", "", "b"]);
    assert_eq!(node.round(&["cam-1"]), 1);
    assert_eq!(node.usages(), ["", "a", "b"]);
}

#[test]
fn a_slot_that_another_node_has_is_never_claimed_again() {
    let mut node = ReclaimHarness::new(&["b", "C:v-1:b", "C:v-2:a"]);
    assert_eq!(node.rounds(Millis::secs(3600), &["cam-0", "cam-1", "cam-2", "v-2", "v-9", "lamp-0"]), 0);
    assert_eq!(node.usages(), ["b", "C:v-1:b", "C:v-2:a"]);
}

#[test]
fn a_virtual_device_in_use_gets_the_slot_that_it_had() {
    let mut node = ReclaimHarness::new(&["", "C:v-1:a"]);
    assert_eq!(node.round(&["v-1"]), 0);
    // The leader took the node for lost.
    let freed = node.cam().freed_of(&"a".into());
    node.cam().apply(&freed).unwrap();
    assert_eq!(node.round(&["v-1"]), 1);
    assert_eq!(node.usages(), ["", "C:v-1:a"]);
    // After another node was faster, or if the slot was never seen, there is nothing to restore.
    let freed = node.cam().freed_of(&"a".into());
    node.cam().apply(&freed).unwrap();
    node.cam().slots.insert("cam-1".into(), SlotUsage::Instance { node: "b".into() });
    assert_eq!(node.round(&["v-1", "v-2"]), 0);
    node.restart_agent();
    node.cam().slots.insert("cam-1".into(), SlotUsage::Free);
    assert_eq!(node.round(&["v-1", "v-2"]), 0);
}

#[test]
fn a_slot_without_a_container_is_freed_after_five_minutes() {
    let mut node = ReclaimHarness::new(&["a", "C:v-1:a", "b", "a"]);
    let in_use = ["cam-3"];
    assert_eq!(node.round(&in_use), 2, "both are marked");
    assert_eq!(node.unused_since("cam-0"), Some(START));
    assert_eq!(node.unused_since("cam-1"), Some(START));
    assert_eq!(node.rounds(Millis::secs(290), &in_use), 0);
    assert_eq!(node.usages(), ["a", "C:v-1:a", "b", "a"]);
    assert_eq!(node.rounds(ROUND, &in_use), 2);
    assert_eq!(node.usages(), ["", "", "b", "a"]);
    assert!(node.cam().unused_since.is_empty());
}

#[test]
fn slots_are_claimed_again_and_freed_in_the_same_round() {
    let mut node = ReclaimHarness::new(&["a", ""]);
    node.round(&[]);
    node.rounds(Millis::secs(290), &[]);
    node.now = node.now + ROUND;
    assert_eq!(node.round(&["cam-1"]), 2);
    assert_eq!(node.usages(), ["", "a"]);
}

#[test]
fn a_container_that_vanishes_for_a_while_keeps_its_slot() {
    let mut node = ReclaimHarness::new(&["a"]);
    node.rounds(Millis::secs(290), &[]);
    assert_eq!(node.unused_since("cam-0"), Some(START + ROUND));
    assert_eq!(node.rounds(ROUND, &["cam-0"]), 1, "the mark goes");
    assert_eq!(node.unused_since("cam-0"), None);
    // The five minutes begin anew.
    assert_eq!(node.rounds(Millis::secs(300), &[]), 1);
    assert_eq!(node.usages(), ["a"]);
    assert_eq!(node.rounds(ROUND, &[]), 1);
    assert_eq!(node.usages(), [""]);
}

#[test]
fn a_query_that_fails_ends_no_wait_and_frees_nothing() {
    let mut node = ReclaimHarness::new(&["a", "a", "a"]);
    assert_eq!(node.round(&["cam-1"]), 2);
    // Without an answer there is no round, however long that takes.
    node.now = node.now + Millis::secs(3600);
    assert_eq!(node.usages(), ["a", "a", "a"]);
    // The first answer decides: what runs is kept, and what was unused and is unused goes.
    assert_eq!(node.round(&["cam-0", "cam-1"]), 2);
    assert_eq!(node.usages(), ["a", "a", ""]);
    assert!(node.cam().unused_since.is_empty());
}

#[test]
fn an_agent_that_restarts_goes_on_with_the_same_five_minutes() {
    let mut node = ReclaimHarness::new(&["a"]);
    node.round(&[]);
    for _ in 0..29 {
        node.restart_agent();
        assert_eq!(node.rounds(ROUND, &[]), 0);
    }
    node.restart_agent();
    assert_eq!(node.usages(), ["a"]);
    assert_eq!(node.rounds(ROUND, &[]), 1);
    assert_eq!(node.usages(), [""], "300 s after it was marked");
}

#[test]
fn a_slot_that_was_just_allocated_counts_as_used_until_the_kubelet_reports_it() {
    let mut node = ReclaimHarness::new(&["a"]);
    node.reclaimer.claimed(&"cam-0".into(), START);
    assert_eq!(node.rounds(Millis::secs(50), &[]), 0);
    assert_eq!(node.rounds(ROUND, &[]), 1);
    assert_eq!(node.unused_since("cam-0"), Some(START + Millis::secs(60)));
    // It is allocated again just before it would be freed.
    node.rounds(Millis::secs(290), &[]);
    let now = node.now;
    node.reclaimer.claimed(&"cam-0".into(), now);
    assert_eq!(node.rounds(ROUND, &[]), 1);
    assert_eq!((node.usages(), node.unused_since("cam-0")), (vec!["a".to_owned()], None));
}

#[test]
fn a_reclaim_that_lost_a_race_frees_nothing() {
    let mut node = ReclaimHarness::new(&["a"]);
    node.rounds(Millis::secs(300), &[]);
    let plan = node.reclaimer.plan(&node.instances, &BTreeSet::new(), node.now + ROUND);
    let [(_, changes)] = plan.as_slice() else { panic!("one instance: {plan:?}") };
    assert_eq!(changes[0].unused_since, Some(UnusedChange::Clear { was: START + ROUND }));
    // A container got the slot meanwhile, which the mark shows.
    let claim = node.instances["cam"].claim(&["cam-0".into()], &"a".into(), &ClaimKind::Instance);
    node.cam().apply(&claim.unwrap()).unwrap();
    node.cam().apply(changes).unwrap_err();
    assert_eq!(node.usages(), ["a"]);
}

#[test]
fn a_mark_from_before_the_clock_was_set_back_begins_anew() {
    let mut node = ReclaimHarness::new(&["a"]);
    node.cam().unused_since.insert("cam-0".into(), START + Millis::secs(86_400));
    assert_eq!(node.round(&[]), 1);
    assert_eq!(node.unused_since("cam-0"), Some(START));
}
