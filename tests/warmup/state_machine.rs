//! The state machine of KEP-129, step by step.

use rouse::{
    units::Millis,
    warmup::{ItemState, WarmupCause, WarmupLimits, WarmupPhase, WarmupReason, WarmupTargets},
};

use crate::harness::{START, WarmupHarness, action, created, image, items, present};

#[test]
fn step_1_a_valid_warmup_is_in_progress() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    cluster.plan();
    let progress = &cluster.report().progress;
    assert_eq!((progress.phase, progress.start), (WarmupPhase::InProgress, Some(START)));
    assert_eq!((progress.generation, progress.completion), (1, None));
}

#[test]
fn step_2_nodes_are_warmed_within_the_parallelism_and_counted() {
    let limits = WarmupLimits { parallelism: Some(2), max_failed_nodes: 9, ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1", "n2", "n3", "n4"], limits);
    assert_eq!(created(&cluster.settle()), ["n1", "n2"]);
    assert_eq!(cluster.counts(), [4, 0, 0, 2]);
    assert_eq!(cluster.report().items[&ItemState::Pulling], 2);
    assert_eq!(cluster.report().items[&ItemState::Pending], 2);
    cluster.pulled("n1");
    assert_eq!(created(&cluster.settle()), ["n3"]);
    cluster.pull_fails("n2", WarmupCause::NotFound);
    assert_eq!(created(&cluster.settle()), ["n4"]);
    assert_eq!(cluster.counts(), [4, 1, 1, 2]);
}

#[test]
fn step_3_it_ends_when_every_node_has_ended_and_not_before() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    cluster.settle();
    cluster.pulled("n1");
    cluster.settle();
    assert_eq!(cluster.report().progress.phase, WarmupPhase::InProgress);
    cluster.pulled("n2");
    cluster.settle();
    assert_eq!(cluster.report().progress.phase, WarmupPhase::Completed);
}

#[test]
fn step_3_1_it_is_completed_when_no_node_has_failed() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    cluster.settle();
    cluster.now = START + Millis::secs(7);
    cluster.pulled("n1");
    cluster.pulled("n2");
    cluster.settle();
    let report = cluster.report();
    assert_eq!((report.progress.phase, report.reason), (WarmupPhase::Completed, WarmupReason::AllNodesWarm));
    assert_eq!(report.progress.completion, Some(START + Millis::secs(7)));
    assert_eq!(cluster.counts(), [2, 2, 0, 0]);
    assert_eq!(cluster.report().items[&ItemState::Present], 2);
    assert!(cluster.report().nodes.is_empty() && cluster.pods.is_empty());
}

#[test]
fn step_3_2_it_has_failed_when_a_node_has_failed_and_names_the_node() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    cluster.settle();
    cluster.pulled("n1");
    cluster.pull_fails("n2", WarmupCause::Auth);
    cluster.settle();
    let report = cluster.report();
    assert_eq!(report.progress.phase, WarmupPhase::Failed);
    assert_eq!(report.reason, WarmupReason::MaxFailedNodesExceeded);
    assert_eq!(cluster.counts(), [2, 1, 1, 0]);
    let failed = &report.nodes[0];
    assert_eq!((failed.node.as_str(), failed.state), ("n2", ItemState::Failed));
    assert_eq!(failed.cause, Some(WarmupCause::Auth));
}

#[test]
fn images_of_a_node_are_pulled_in_parallel_and_its_action_runs_after_all_of_them() {
    let targets = WarmupTargets::Nodes([("n1".into(), items(&["a:1", "b:1"], true))].into());
    let mut cluster = WarmupHarness::with_targets(&["n1"], targets, WarmupLimits::default());
    cluster.settle();
    assert_eq!(cluster.pods.len(), 2);
    cluster.play("n1", &image("a:1"), present(START));
    assert!(created(&cluster.settle()).is_empty());
    cluster.play("n1", &image("b:1"), present(START));
    assert_eq!(created(&cluster.settle()), ["n1"]);
    let name = cluster.pod_name("n1", &action());
    assert!(cluster.pods[&name].item.is_action());
    cluster.play("n1", &action(), rouse::warmup::WarmupPodState::Done { at: START });
    cluster.settle();
    assert_eq!(cluster.report().progress.phase, WarmupPhase::Completed);
    assert!(cluster.pods.is_empty());
}

#[test]
fn a_pause_begins_nothing_and_stops_the_clock() {
    let limits =
        WarmupLimits { parallelism: Some(1), timeout: Some(Millis::secs(100)), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1", "n2"], limits);
    cluster.pass(40);
    cluster.set_paused(true);
    cluster.settle();
    assert_eq!(cluster.report().progress.phase, WarmupPhase::Paused);
    // What runs goes on, and its outcome is shown.
    cluster.pulled("n1");
    assert!(created(&cluster.pass(1000)).is_empty());
    assert_eq!(cluster.counts(), [2, 1, 0, 0]);
    // A new leader knows of the pause.
    cluster.restart();
    assert!(created(&cluster.pass(1000)).is_empty());

    cluster.set_paused(false);
    assert_eq!(created(&cluster.settle()), ["n2"]);
    cluster.pass(59);
    assert_eq!(cluster.report().progress.phase, WarmupPhase::InProgress);
    cluster.pass(1);
    assert_eq!(cluster.report().reason, WarmupReason::TimeoutExceeded);
    assert_eq!(cluster.report().progress.paused_for, Millis::secs(2000));
}

#[test]
fn a_pause_does_not_change_an_end() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    cluster.settle();
    cluster.pulled("n1");
    cluster.settle();
    cluster.set_paused(true);
    cluster.settle();
    assert_eq!(cluster.report().progress.phase, WarmupPhase::Completed);
}
