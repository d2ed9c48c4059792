//! Warmups that never end.

use rouse::warmup::{WarmupCause, WarmupLimits, WarmupPhase, WarmupReason, WarmupTargets};

use crate::harness::{WarmupHarness, created, items, ready, targets};

fn kept_warm(names: &[&str]) -> WarmupHarness {
    let mut cluster = WarmupHarness::new(names, WarmupLimits::default());
    cluster.edit(|request| request.keep_warm = true);
    cluster
}

#[test]
fn a_node_that_is_deleted_and_comes_back_under_its_name_is_warmed_again() {
    for leaves_targets in [false, true] {
        let mut cluster = kept_warm(&["n1", "n2"]);
        cluster.settle();
        cluster.pulled("n1");
        cluster.pulled("n2");
        cluster.settle();
        assert_eq!(cluster.report().reason, WarmupReason::KeepingWarm);
        cluster.set_node("n1", None);
        if leaves_targets {
            cluster.set_targets(targets(&["n2"]));
        }
        assert!(created(&cluster.settle()).is_empty());
        assert_eq!(cluster.cause("n1"), (!leaves_targets).then_some(WarmupCause::NodeGone));
        cluster.set_node("n1", Some(ready()));
        cluster.set_targets(targets(&["n1", "n2"]));
        assert_eq!(created(&cluster.settle()), ["n1"]);
        assert_eq!(cluster.counts(), [2, 1, 0, 1]);
    }

    // The node is back before anything is planned.
    let mut cluster = kept_warm(&["n1"]);
    cluster.settle();
    cluster.pulled("n1");
    cluster.settle();
    cluster.set_node("n1", None);
    cluster.set_node("n1", Some(ready()));
    assert_eq!(created(&cluster.settle()), ["n1"]);
}

#[test]
fn nodes_that_were_lost_and_are_no_targets_any_more_do_not_count() {
    let mut cluster = kept_warm(&["n1", "n2"]);
    cluster.settle();
    cluster.set_node("n1", None);
    cluster.settle();
    assert_eq!(cluster.counts(), [2, 0, 1, 1]);
    cluster.set_targets(targets(&["n2"]));
    cluster.settle();
    assert_eq!(cluster.counts(), [1, 0, 0, 1]);
    cluster.restart();
    cluster.settle();
    assert_eq!(cluster.counts(), [1, 0, 0, 1]);
}

#[test]
fn a_target_that_is_refused_for_a_while_does_not_end_it() {
    let mut cluster = kept_warm(&["n1"]);
    cluster.settle();
    cluster.pulled("n1");
    cluster.settle();
    cluster.set_targets(WarmupTargets::Refused { reason: "the selector is invalid".to_owned() });
    cluster.pass(10_000);
    assert_eq!(cluster.report().progress.phase, WarmupPhase::InProgress);
    assert_eq!(cluster.report().reason, WarmupReason::InvalidSpec);
    assert_eq!(cluster.report().message, "the selector is invalid");
    cluster.set_node("n2", Some(ready()));
    cluster.set_targets(targets(&["n1", "n2"]));
    assert_eq!(created(&cluster.settle()), ["n2"]);
    assert_eq!(cluster.report().reason, WarmupReason::Warming);
}

#[test]
fn a_refusal_is_named_only_while_nodes_are_open() {
    let mut cluster = kept_warm(&["n1", "n2"]);
    assert_eq!(cluster.refuse().len(), 2);
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::PodsRefused);
    cluster.edit_node("n1", |facts| drop(facts.images.replace("app:1".into())));
    cluster.set_targets(targets(&["n1"]));
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::KeepingWarm);
}

#[test]
fn a_failed_action_is_tried_again_though_its_pod_stays_for_its_log() {
    for is_restarted in [false, true] {
        let action_only = WarmupTargets::Nodes([("n1".into(), items(&[], true))].into());
        let limits = WarmupLimits { backoff_limit: Some(0), ..WarmupLimits::default() };
        let mut cluster = WarmupHarness::with_targets(&["n1"], action_only, limits);
        cluster.edit(|request| request.keep_warm = true);
        cluster.settle();
        cluster.action_fails("n1", 3);
        cluster.settle();
        if is_restarted {
            cluster.restart();
        }
        assert!(created(&cluster.pass(899)).is_empty());
        assert_eq!((cluster.counts(), cluster.pods.len()), ([1, 0, 1, 0], 1));
        assert_eq!(created(&cluster.pass(2)), ["n1"]);
        assert_eq!((cluster.counts(), cluster.pods.len()), ([1, 0, 0, 1], 1));
    }
}
