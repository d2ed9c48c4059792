//! Deletion of Pods that kubelets rejected: later with each rejection, and few at a time.

use rouse::{
    slots::{SlotsCommand, SlotsEvent},
    units::Millis,
};

use crate::leader::LeaderHarness;

fn leader() -> LeaderHarness {
    LeaderHarness::new(1, &["a"])
}

fn names(commands: &[SlotsCommand]) -> Vec<&str> {
    let names = commands.iter().map(|command| match command {
        SlotsCommand::DeletePod { pod } => pod.name.as_str(),
        other => panic!("{other:?}"),
    });
    names.collect()
}

/// Passes time until the Pod is deleted. Returns the seconds.
fn seconds_until_deleted(leader: &mut LeaderHarness, pod: &str) -> u64 {
    let start = leader.now;
    let at = leader.controller.next_deadline().unwrap();
    assert_eq!(leader.plan(), []);
    leader.now = at;
    assert_eq!(names(&leader.settle()), [pod]);
    at.since(start).0 / 1000
}

#[test]
fn an_owner_whose_pods_are_rejected_again_and_again_waits_longer_each_time() {
    let mut leader = leader();
    let mut pauses = Vec::new();
    for number in 0..12 {
        let name = format!("pod-{number}");
        leader.reject(&name, "owner");
        pauses.push(seconds_until_deleted(&mut leader, &name));
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]);
    // Another owner's Pod does not wait for that.
    leader.reject("other", "other-owner");
    assert_eq!(seconds_until_deleted(&mut leader, "other"), 1);
    // Without a rejection for ten minutes, all is forgotten.
    assert_eq!(leader.pass(Millis::secs(298)), []);
    leader.reject("pod-12", "owner");
    assert_eq!(seconds_until_deleted(&mut leader, "pod-12"), 300);
    assert_eq!(leader.pass(Millis::secs(300)), []);
    leader.reject("pod-13", "owner");
    assert_eq!(seconds_until_deleted(&mut leader, "pod-13"), 1);
}

#[test]
fn a_storm_of_rejections_becomes_no_storm_of_deletions() {
    let mut leader = leader();
    for number in 0..40 {
        leader.reject(&format!("pod-{number:02}"), "owner");
    }
    // Five minutes of the same: 1, 2, 4, ... 256 s, and the rest after 300 s.
    assert_eq!(leader.pass(Millis::secs(299)).len(), 9);
    let commands = leader.plan();
    assert_eq!(commands, []);
    leader.now = leader.now + Millis::secs(1);
    assert_eq!(leader.plan().len(), 16, "at most 16 at once");
}

#[test]
fn at_most_sixteen_deletions_are_under_way_and_each_that_ends_lets_another_begin() {
    let mut leader = leader();
    for number in 0..40 {
        leader.reject(&format!("pod-{number:02}"), &format!("owner-{number}"));
    }
    leader.now = leader.now + Millis::secs(1);
    let first = leader.plan();
    assert_eq!(first.len(), 16);
    assert_eq!(leader.controller.next_deadline(), Some(leader.now + Millis::secs(60)));
    leader.execute(&first[0]);
    leader.fail(&first[1], false);
    // Another client deletes one.
    leader.send(SlotsEvent::RejectedGone { uid: "pod-02".into() });
    leader.rejected.remove("pod-02");
    let next = leader.plan();
    assert_eq!(names(&next), ["pod-16", "pod-17", "pod-18"]);
    for command in first[3..].iter().chain(&next) {
        leader.execute(command);
    }
    assert_eq!(leader.settle().len(), 21);
    // What failed comes again.
    assert_eq!(names(&leader.pass(Millis::secs(10))), ["pod-01"]);
    assert!(leader.rejected.is_empty());
    assert_eq!(leader.controller.next_deadline(), None);
}

#[test]
fn a_deletion_without_an_effect_is_repeated() {
    let mut leader = leader();
    leader.reject("pod", "owner");
    // It is reported again, which is no further rejection.
    leader.reject("pod", "owner");
    leader.now = leader.now + Millis::secs(1);
    let delete = leader.plan();
    let plan_after = |leader: &mut LeaderHarness, seconds: u64| {
        leader.now = leader.now + Millis::secs(seconds);
        leader.plan()
    };
    // Neither an outcome comes, nor is the Pod gone.
    assert_eq!(plan_after(&mut leader, 59), []);
    assert_eq!(plan_after(&mut leader, 1), delete);
    // It was executed, and a finalizer keeps the Pod.
    leader.send(SlotsEvent::Executed(delete[0].clone()));
    assert_eq!(plan_after(&mut leader, 59), []);
    assert_eq!(plan_after(&mut leader, 1), delete);
    // The right is missing.
    leader.fail(&delete[0], true);
    assert_eq!(plan_after(&mut leader, 299), []);
    assert_eq!(plan_after(&mut leader, 1), delete);
}

#[test]
fn a_new_leader_deletes_what_it_finds() {
    let mut leader = leader();
    leader.reject("pod-1", "owner");
    leader.reject("pod-2", "owner");
    leader.change_leader();
    assert_eq!(names(&leader.pass(Millis::secs(2))), ["pod-1", "pod-2"]);
}
