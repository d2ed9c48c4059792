//! A new leader continues from the stored status and the Pods that exist.

use rouse::{
    units::Millis,
    warmup::{WarmupCause, WarmupCommand, WarmupLimits, WarmupPhase, WarmupReason, WarmupTargets},
};

use crate::harness::{START, WarmupHarness, action, created, image, items, present, targets};

fn deletions(commands: &[WarmupCommand]) -> usize {
    commands.iter().filter(|command| matches!(command, WarmupCommand::DeletePod { .. })).count()
}

#[test]
fn a_pod_stays_until_the_stored_status_has_what_it_shows() {
    let limits = WarmupLimits { max_failed_nodes: 9, ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1", "n2", "n3"], limits);
    cluster.stores = false;
    cluster.plan();
    cluster.pulled("n1");
    cluster.pull_fails("n2", WarmupCause::Network);
    cluster.pull_fails("n3", WarmupCause::NotFound);
    assert_eq!(deletions(&cluster.plan()), 0);
    assert_eq!(deletions(&cluster.plan()), 0);
    // Nothing was stored: the next leader finds all of it in the Pods.
    cluster.restart();
    assert_eq!(deletions(&cluster.plan()), 0);
    assert_eq!(cluster.counts(), [3, 1, 1, 2]);
    let tried = cluster.report().nodes.iter().find(|node| node.node.as_str() == "n2").unwrap();
    assert_eq!(tried.attempts, 1);
    cluster.store();
    assert_eq!(deletions(&cluster.plan()), 3);
    // Everything was stored: the next leader needs no Pod.
    cluster.restart();
    cluster.plan();
    assert_eq!(cluster.counts(), [3, 1, 1, 0]);
    assert!(cluster.pods.is_empty());
}

#[test]
fn a_failure_that_a_former_leader_has_counted_is_not_counted_again() {
    let limits = WarmupLimits { backoff_limit: Some(1), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1"], limits);
    cluster.settle();
    cluster.stores = false;
    cluster.pull_fails("n1", WarmupCause::Network);
    cluster.plan();
    cluster.store();
    // The leader dies between the write of the status and the deletion of the Pod.
    for _ in 0..3 {
        cluster.restart();
        cluster.stores = true;
        assert!(!cluster.pods.is_empty());
        let plan = cluster.warmups.plan(cluster.now);
        assert_eq!(deletions(&plan.commands), 1);
    }
    cluster.settle();
    assert_eq!(cluster.report().nodes[0].attempts, 1);
    assert_eq!(cluster.report().progress.phase, WarmupPhase::InProgress);
}

#[test]
fn a_node_with_two_images_keeps_the_success_of_one_until_it_has_both() {
    let targets = WarmupTargets::Nodes([("n1".into(), items(&["a:1", "b:1"], false))].into());
    let mut cluster = WarmupHarness::with_targets(&["n1"], targets, WarmupLimits::default());
    cluster.settle();
    cluster.play("n1", &image("a:1"), present(START));
    cluster.settle();
    assert_eq!(cluster.pods.len(), 2);
    cluster.restart();
    assert!(created(&cluster.settle()).is_empty());
    cluster.play("n1", &image("b:1"), present(START));
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
    assert!(cluster.pods.is_empty());
}

#[test]
fn the_last_failed_pod_of_an_action_stays_for_its_log() {
    let targets = WarmupTargets::Nodes([("n1".into(), items(&[], true))].into());
    let limits = WarmupLimits { backoff_limit: Some(1), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::with_targets(&["n1"], targets, limits);
    cluster.settle();
    cluster.action_fails("n1", 3);
    cluster.settle();
    assert_eq!(cluster.pods.len(), 1);
    assert_eq!(cluster.counts(), [1, 0, 0, 0]);
    // It goes when the next attempt has begun.
    assert_eq!(created(&cluster.pass(13)), ["n1"]);
    assert_eq!(cluster.pods.len(), 1);
    cluster.action_fails("n1", 4);
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::MaxFailedNodesExceeded);
    assert_eq!(cluster.cause("n1"), Some(WarmupCause::ActionFailed { exit_code: 4 }));
    cluster.restart();
    cluster.pass(1000);
    assert_eq!(cluster.pods.len(), 1);
    // A new generation does not need it.
    cluster.edit(|_| {});
    cluster.settle();
    let pods: Vec<_> = cluster.pods.values().map(|pod| (pod.generation, pod.item.clone())).collect();
    assert_eq!(pods, [(2, action())]);
}

#[test]
fn a_pause_or_its_end_under_the_next_leader_does_not_begin_anew() {
    let limits = WarmupLimits { timeout: Some(Millis::secs(100)), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1"], limits);
    cluster.pass(50);
    cluster.request.paused = true;
    cluster.request.generation += 1;
    cluster.restart();
    cluster.pass(500);
    assert_eq!(cluster.report().progress.start, Some(START));
    cluster.request.paused = false;
    cluster.request.generation += 1;
    cluster.restart();
    cluster.pass(49);
    assert_eq!(cluster.report().progress.phase, WarmupPhase::InProgress);
    cluster.pass(1);
    assert_eq!(cluster.report().reason, WarmupReason::TimeoutExceeded);
}

#[test]
fn a_node_that_left_before_the_end_is_not_open_for_a_new_leader_of_a_completed_warmup() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    cluster.settle();
    cluster.pull_fails("n1", WarmupCause::Network);
    cluster.settle();
    cluster.set_targets(targets(&["n2"]));
    cluster.pulled("n2");
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
    cluster.targets = targets(&["n1", "n2"]);
    cluster.restart();
    assert!(cluster.pass(1000).is_empty());
    assert_eq!(cluster.counts(), [1, 1, 0, 0]);
}

#[test]
fn a_new_leader_of_a_finished_warmup_orders_nothing() {
    let limits = WarmupLimits { timeout: Some(Millis::secs(60)), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1", "n2"], limits);
    cluster.settle();
    cluster.pulled("n1");
    cluster.pass(60);
    assert_eq!(cluster.report().reason, WarmupReason::TimeoutExceeded);
    cluster.restart();
    assert!(cluster.pass(1000).is_empty());
    assert_eq!(cluster.report().reason, WarmupReason::TimeoutExceeded);
    assert_eq!(cluster.counts(), [2, 1, 0, 0]);
}
