//! A pause begins nothing anew: failures of Pods that began before it count.

use std::sync::Arc;

use proptest::prelude::*;
use rouse::{
    units::Millis,
    warmup::{WarmupCause, WarmupLimits, WarmupPhase, WarmupProgress, WarmupReason, WarmupTargets},
};

use crate::harness::{WarmupHarness, created, items};

fn limited(backoff_limit: u32) -> WarmupHarness {
    let limits = WarmupLimits { backoff_limit: Some(backoff_limit), ..WarmupLimits::default() };
    WarmupHarness::new(&["n1"], limits)
}

/// Failures of the only node that is listed.
fn attempts(cluster: &WarmupHarness) -> u32 {
    let [node] = cluster.report().nodes.as_slice() else { panic!("{:?}", cluster.report()) };
    node.attempts
}

#[test]
fn a_failure_after_a_pause_has_begun_counts_and_the_next_try_waits() {
    for has_new_leader in [false, true] {
        let mut cluster = limited(1);
        cluster.settle();
        cluster.set_paused(true);
        cluster.settle();
        if has_new_leader {
            cluster.restart();
        }
        cluster.pull_fails("n1", WarmupCause::Network);
        cluster.settle();
        assert_eq!((attempts(&cluster), cluster.pods.len()), (1, 0));
        cluster.set_paused(false);
        if has_new_leader {
            cluster.restart();
        }
        assert!(created(&cluster.settle()).is_empty(), "the pause after a failure is not over");
        assert_eq!(created(&cluster.pass(13)), ["n1"]);
        cluster.pull_fails("n1", WarmupCause::Network);
        cluster.settle();
        assert_eq!(cluster.report().reason, WarmupReason::MaxFailedNodesExceeded);
    }
}

#[test]
fn a_failure_after_the_end_of_a_pause_counts() {
    let mut cluster = limited(0);
    cluster.settle();
    for is_paused in [true, false] {
        cluster.set_paused(is_paused);
        cluster.settle();
    }
    cluster.pull_fails("n1", WarmupCause::Network);
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::MaxFailedNodesExceeded);
}

/// A Warmup whose only node has failed once.
fn failed_once() -> WarmupHarness {
    let mut cluster = limited(1);
    cluster.settle();
    cluster.pull_fails("n1", WarmupCause::Network);
    cluster.settle();
    cluster
}

#[test]
fn a_pause_that_ends_before_a_leader_has_seen_it_begins_nothing_anew() {
    for has_new_leader in [false, true] {
        let mut cluster = failed_once();
        cluster.request.generation += 2;
        if has_new_leader {
            cluster.restart();
        } else {
            cluster.send_warmup();
        }
        cluster.settle();
        let progress = &cluster.report().progress;
        assert_eq!((progress.generation, progress.start_generation, attempts(&cluster)), (3, 1, 1));
    }
}

#[test]
fn an_edit_that_pauses_and_changes_more_begins_anew() {
    for has_new_leader in [false, true] {
        let mut cluster = failed_once();
        cluster.request.paused = true;
        // The request is the same apart from its hash: its targets have changed.
        cluster.change_spec();
        if has_new_leader {
            cluster.restart();
        } else {
            cluster.send_warmup();
        }
        cluster.settle();
        assert_eq!((attempts(&cluster), cluster.report().progress.start_generation), (0, 2));
    }
}

#[test]
fn a_pause_begins_nothing_anew_that_an_earlier_version_began() {
    let mut cluster = failed_once();
    cluster.stored = Arc::new(WarmupProgress { spec_hash: None, ..WarmupProgress::clone(&cluster.stored) });
    cluster.request.paused = true;
    cluster.request.generation += 1;
    cluster.restart();
    cluster.settle();
    assert_eq!((attempts(&cluster), cluster.report().progress.start_generation), (1, 1));
    assert!(cluster.stored.spec_hash.is_some(), "the next leader compares it");
}

#[test]
fn a_final_cause_during_a_pause_is_final() {
    let limits = WarmupLimits { max_failed_nodes: 1, ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1", "n2"], limits);
    cluster.settle();
    cluster.set_paused(true);
    cluster.pull_fails("n1", WarmupCause::NotFound);
    cluster.settle();
    assert_eq!(cluster.counts(), [2, 0, 1, 1]);
    cluster.set_paused(false);
    assert!(created(&cluster.pass(1000)).is_empty());
    cluster.pulled("n2");
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::CompletedWithFailures);
}

#[test]
fn a_failed_pod_stays_over_a_pause_until_the_stored_status_has_its_failure() {
    let mut cluster = limited(1);
    cluster.settle();
    cluster.stores = false;
    cluster.pull_fails("n1", WarmupCause::Network);
    cluster.plan();
    cluster.set_paused(true);
    cluster.plan();
    assert_eq!(cluster.pods.len(), 1);
    // Nothing was stored: the next leader finds the failure in the Pod.
    cluster.restart();
    cluster.plan();
    assert_eq!((attempts(&cluster), cluster.pods.len()), (1, 1));
    cluster.store();
    cluster.plan();
    assert!(cluster.pods.is_empty());
}

#[test]
fn the_log_of_a_failed_action_stays_while_its_warmup_is_paused() {
    let targets = WarmupTargets::Nodes([("n1".into(), items(&[], true))].into());
    let mut cluster = WarmupHarness::with_targets(&["n1"], targets, WarmupLimits::default());
    cluster.settle();
    cluster.action_fails("n1", 3);
    cluster.settle();
    cluster.set_paused(true);
    cluster.pass(1000);
    assert_eq!(cluster.pods.len(), 1);
    cluster.set_paused(false);
    // It goes when the next attempt has begun.
    assert_eq!(created(&cluster.settle()), ["n1"]);
    assert_eq!(cluster.pods.len(), 1);
}

#[test]
fn an_edit_after_a_pause_forgets_the_failures_before_it() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    cluster.settle();
    for is_paused in [true, false] {
        cluster.set_paused(is_paused);
        cluster.settle();
        assert_eq!(cluster.report().progress.start_generation, 1);
    }
    cluster.pull_fails("n1", WarmupCause::Network);
    cluster.settle();
    assert_eq!(attempts(&cluster), 1);
    cluster.edit(|request| request.limits.parallelism = Some(7));
    assert_eq!(created(&cluster.settle()), ["n1"]);
    assert_eq!((attempts(&cluster), cluster.report().progress.start_generation), (0, 4));
}

/// What happens to a Warmup of one node.
#[derive(Clone, Copy, Debug)]
enum PauseStep {
    PauseOrResume,
    /// A pause and its end, which the leader sees as one edit.
    UnseenPause,
    PullFails,
    NewLeader,
    TimePasses,
}

proptest! {
    #[test]
    fn no_pauses_give_a_node_more_tries_than_its_limit(
        limit in 0..3_u32,
        steps in prop::collection::vec(
            prop::sample::select(vec![
                PauseStep::PauseOrResume,
                PauseStep::UnseenPause,
                PauseStep::PullFails,
                PauseStep::NewLeader,
                PauseStep::TimePasses,
            ]),
            0..40,
        ),
    ) {
        let mut cluster = limited(limit);
        let mut tries = created(&cluster.settle()).len();
        let mut failures = 0;
        for step in steps {
            match step {
                PauseStep::PauseOrResume => cluster.set_paused(!cluster.request.paused),
                PauseStep::UnseenPause => {
                    cluster.request.generation += 2;
                    cluster.send_warmup();
                }
                PauseStep::PullFails if cluster.pods.is_empty() => {}
                PauseStep::PullFails => {
                    cluster.pull_fails("n1", WarmupCause::Network);
                    failures += 1;
                }
                PauseStep::NewLeader => cluster.restart(),
                PauseStep::TimePasses => cluster.now = cluster.now + Millis::secs(400),
            }
            tries += created(&cluster.settle()).len();
        }
        let has_failed = cluster.report().progress.phase == WarmupPhase::Failed;
        prop_assert_eq!(has_failed, failures > limit);
        prop_assert_eq!(attempts(&cluster), failures);
        prop_assert!(tries <= usize::try_from(limit + 1).unwrap(), "{} tries", tries);
    }
}
