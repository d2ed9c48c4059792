//! The rules in numbers.

use rouse::{
    units::{Millis, Tick},
    warmup::{
        NodeCounts, WarmupLimits, WarmupPhase, WarmupReason, WarmupVerdict, is_permanent, judge,
        nodes_to_begin,
    },
};

use crate::harness::{START, WarmupHarness, created};

#[test]
fn as_many_nodes_begin_as_there_is_room_for() {
    for parallelism in [Some(1), Some(2), None] {
        for active in 0..=2_u32 {
            for pending in 0..=3_u32 {
                let room = parallelism.map_or(pending, |limit: u32| limit.saturating_sub(active));
                let expected = pending.min(room);
                assert_eq!(
                    nodes_to_begin(parallelism, active, pending),
                    expected,
                    "{parallelism:?} {active} {pending}"
                );
            }
        }
    }
}

#[test]
fn a_node_has_failed_for_good_with_more_failures_than_its_limit() {
    for (failures, limit, expected) in [
        (0, Some(0), false),
        (1, Some(0), true),
        (2, Some(2), false),
        (3, Some(2), true),
        (u32::MAX, None, false),
    ] {
        assert_eq!(is_permanent(failures, limit), expected, "{failures} of {limit:?}");
    }
}

/// The vectors' unset limit of failed nodes is the largest number here: our default is 0. A Warmup without nodes waits
/// for its target instead of completing.
#[test]
fn the_verdict_follows_from_the_numbers() {
    let unset = u32::MAX;
    for (desired, succeeded, failed, active, max_failed, expected) in [
        (0, 0, 0, 0, unset, WarmupVerdict::WaitingForTarget),
        (3, 3, 0, 0, unset, WarmupVerdict::Completed),
        (3, 2, 1, 0, unset, WarmupVerdict::Completed),
        (3, 2, 1, 0, 0, WarmupVerdict::Failed),
        (3, 2, 1, 0, 1, WarmupVerdict::Completed),
        (3, 1, 2, 0, 1, WarmupVerdict::Failed),
        (3, 2, 0, 1, unset, WarmupVerdict::InProgress),
        (3, 2, 0, 0, unset, WarmupVerdict::InProgress),
    ] {
        let counts = NodeCounts { desired, succeeded, failed, active };
        assert_eq!(judge(&counts, max_failed), expected, "{counts:?} of {max_failed}");
    }
}

#[test]
fn a_timeout_ends_the_active_nodes_and_keeps_the_numbers_of_the_others() {
    let names: Vec<String> = (0..10).map(|n| format!("n{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let limits =
        WarmupLimits { timeout: Some(Millis::secs(100)), max_failed_nodes: 1, ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&names, limits);
    cluster.settle();
    names[..5].iter().for_each(|name| cluster.pulled(name));
    cluster.pull_fails("n5", rouse::warmup::WarmupCause::NotFound);
    cluster.settle();
    assert_eq!(cluster.counts(), [10, 5, 1, 4]);
    cluster.pass(100);
    assert_eq!(cluster.counts(), [10, 5, 1, 0]);
    assert_eq!(cluster.report().progress.phase, WarmupPhase::Failed);
    assert_eq!(cluster.report().reason, WarmupReason::TimeoutExceeded);
    assert!(cluster.pods.is_empty(), "{:?}", cluster.pods);
    assert!(created(&cluster.pass(1000)).is_empty());
}

/// The next look at the clock is at the deadline, and within ten minutes.
#[test]
fn a_deadline_is_looked_at_in_time() {
    let due_after = |timeout: u64, passed: u64| {
        let limits = WarmupLimits { timeout: Some(Millis::secs(timeout)), ..WarmupLimits::default() };
        let mut cluster = WarmupHarness::new(&["n1"], limits);
        cluster.pass(passed);
        cluster.warmups.next_deadline().map(|at| at.since(cluster.now))
    };
    assert_eq!(due_after(86_400, 0), Some(Millis::secs(600)));
    assert_eq!(due_after(600, 300), Some(Millis::secs(300)));
    assert_eq!(due_after(60, 60), None);
}

#[test]
fn a_finished_warmup_is_deleted_after_its_time_to_live() {
    let limits = WarmupLimits { ttl: Some(Millis::secs(120)), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1"], limits);
    cluster.settle();
    cluster.pulled("n1");
    cluster.pass(30);
    assert_eq!(cluster.report().progress.phase, WarmupPhase::Completed);
    assert_eq!(cluster.warmups.next_deadline(), Some(START + Millis::secs(120)));
    cluster.pass(89);
    assert!(!cluster.is_deleted);
    cluster.pass(1);
    assert!(cluster.is_deleted);

    // A leader that begins long after that deletes it at once.
    let limits = WarmupLimits { ttl: Some(Millis::secs(60)), ..WarmupLimits::default() };
    let mut late = WarmupHarness::new(&["n1"], limits);
    late.settle();
    late.pulled("n1");
    late.settle();
    late.now = Tick(late.now.0 + 600_000);
    late.restart();
    late.settle();
    assert!(late.is_deleted);

    let mut kept = WarmupHarness::new(&["n1"], WarmupLimits::default());
    kept.settle();
    kept.pulled("n1");
    kept.pass(1_000_000);
    assert!(!kept.is_deleted);
}
