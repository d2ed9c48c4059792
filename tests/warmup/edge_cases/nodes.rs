//! Edge cases of nodes and targets: those that go, come back, take no Pods, or have other items than before.

use rouse::{
    units::Millis,
    warmup::{
        ItemState, NodeTaint, TaintEffect, TolerationOperator, WarmupCause, WarmupEvent, WarmupLimits,
        WarmupPhase, WarmupPodState, WarmupReason, WarmupTargets, WarmupToleration,
    },
};

use crate::harness::{START, WarmupHarness, created, image, items, present, ready, targets};

fn lenient() -> WarmupLimits {
    WarmupLimits { max_failed_nodes: 100, ..WarmupLimits::default() }
}

#[test]
fn a_node_that_is_deleted_fails_at_once_if_it_was_named_or_had_begun() {
    // Named: it stays a target.
    let mut named = WarmupHarness::new(&["n1", "n2"], lenient());
    named.settle();
    named.set_node("n1", None);
    named.settle();
    assert_eq!(named.counts(), [2, 0, 1, 1]);
    assert_eq!(named.cause("n1"), Some(WarmupCause::NodeGone));

    // Selected: it leaves the targets, in either order of the two events.
    for is_node_first in [false, true] {
        let mut selected =
            WarmupHarness::new(&["n1", "n2", "n3"], WarmupLimits { parallelism: Some(1), ..lenient() });
        selected.settle();
        if is_node_first {
            selected.set_node("n1", None);
            selected.set_node("n2", None);
        }
        selected.set_targets(targets(&["n3"]));
        if !is_node_first {
            selected.set_node("n1", None);
            selected.set_node("n2", None);
        }
        selected.settle();
        // The first one had begun. The second one is as if it had never been there.
        assert_eq!(selected.counts()[..3], [2, 0, 1]);
        // The failure is remembered without the node and its Pod.
        selected.restart();
        selected.pulled("n3");
        selected.settle();
        assert_eq!(selected.counts(), [2, 1, 1, 0]);
        assert_eq!(selected.report().reason, WarmupReason::CompletedWithFailures);
    }

    let mut unknown = WarmupHarness::with_targets(&[], targets(&["n9"]), WarmupLimits::default());
    unknown.settle();
    assert_eq!(unknown.report().progress.phase, WarmupPhase::Failed);
    assert_eq!(unknown.cause("n9"), Some(WarmupCause::NodeGone));
}

#[test]
fn a_node_that_takes_no_pods_is_named_with_its_cause_and_takes_no_room() {
    let gpu = NodeTaint { key: "gpu".to_owned(), value: "yes".to_owned(), effect: TaintEffect::NoSchedule };
    let limits = WarmupLimits { parallelism: Some(1), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1", "n2", "n3", "n4", "n5"], limits);
    cluster.edit_node("n1", |facts| facts.cordoned = true);
    cluster.edit_node("n2", |facts| facts.ready = false);
    cluster.edit_node("n3", |facts| facts.taints.push(gpu.clone()));
    cluster.edit_node("n4", |facts| facts.disk_pressure = true);
    assert_eq!(created(&cluster.plan()), ["n5"]);
    for (node, cause) in [
        ("n1", WarmupCause::Cordoned),
        ("n2", WarmupCause::NodeNotReady),
        ("n3", WarmupCause::Taint("gpu".to_owned())),
        ("n4", WarmupCause::DiskPressure),
    ] {
        assert_eq!(cluster.cause(node), Some(cause), "{node}");
    }
    cluster.pulled("n5");
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::WaitingForNodes);
    assert!(cluster.report().message.contains("without timeoutSeconds"), "{}", cluster.report().message);

    // Each begins as soon as it takes Pods.
    cluster.edit_node("n1", |facts| facts.cordoned = false);
    assert_eq!(created(&cluster.settle()), ["n1"]);
    cluster.pulled("n1");
    let toleration = WarmupToleration {
        key: Some("gpu".to_owned()),
        operator: TolerationOperator::Equal,
        value: "yes".to_owned(),
        effect: None,
    };
    cluster.edit(|request| request.tolerations.push(toleration));
    assert_eq!(created(&cluster.settle()), ["n3"]);
    // A kubelet that falls silent does not hold the others up.
    cluster.edit_node("n3", |facts| facts.ready = false);
    cluster.edit_node("n4", |facts| facts.disk_pressure = false);
    assert_eq!(created(&cluster.settle()), ["n4"]);
    assert_eq!(cluster.counts(), [5, 2, 0, 1]);
}

#[test]
fn a_node_that_stays_unusable_fails_the_warmup_at_its_timeout_only() {
    let limits = WarmupLimits { timeout: Some(Millis::secs(900)), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1"], limits);
    cluster.edit_node("n1", |facts| facts.cordoned = true);
    assert!(created(&cluster.pass(899)).is_empty());
    assert_eq!(cluster.report().progress.phase, WarmupPhase::InProgress);
    cluster.pass(1);
    assert_eq!(cluster.report().reason, WarmupReason::TimeoutExceeded);
    assert_eq!(cluster.report().items[&ItemState::Skipped], 1);
    assert_eq!(cluster.cause("n1"), Some(WarmupCause::Cordoned));
}

#[test]
fn a_refused_spec_creates_no_pod() {
    let refused = WarmupTargets::Refused { reason: "images[0] is not a reference".to_owned() };
    let mut cluster = WarmupHarness::with_targets(&["n1"], refused, WarmupLimits::default());
    assert!(cluster.settle().is_empty());
    let report = cluster.report();
    assert_eq!((report.progress.phase, report.reason), (WarmupPhase::Failed, WarmupReason::InvalidSpec));
    assert_eq!(report.message, "images[0] is not a reference");
    // The corrected spec begins.
    cluster.targets = targets(&["n1"]);
    cluster.send(WarmupEvent::Targets { id: cluster.id.clone(), targets: targets(&["n1"]) });
    cluster.edit(|_| {});
    assert_eq!(created(&cluster.settle()), ["n1"]);
}

#[test]
fn a_node_that_reports_the_image_itself_needs_no_pod_and_its_silence_proves_nothing() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    cluster.edit_node("n1", |facts| drop(facts.images.replace("app:1".into())));
    assert_eq!(created(&cluster.settle()), ["n2"]);
    cluster.pulled("n2");
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
    cluster.edit_node("n1", |facts| facts.images.clear());
    assert!(created(&cluster.pass(1000)).is_empty());
}

#[test]
fn a_node_that_loses_an_image_is_warmed_again_if_it_is_kept_warm() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    cluster.request.keep_warm = true;
    cluster.edit(|_| {});
    cluster.settle();
    cluster.pulled("n1");
    cluster.pass(10_000);
    assert_eq!(cluster.report().reason, WarmupReason::KeepingWarm);
    assert_eq!(cluster.report().progress.phase, WarmupPhase::InProgress);
    // The list did not show the image yet, and then it does.
    cluster.edit_node("n1", |facts| facts.cordoned = false);
    assert!(created(&cluster.settle()).is_empty());
    cluster.edit_node("n1", |facts| drop(facts.images.replace("app:1".into())));
    assert!(created(&cluster.settle()).is_empty());
    cluster.edit_node("n1", |facts| facts.images.clear());
    assert_eq!(created(&cluster.settle()), ["n1"]);
    cluster.pulled("n1");
    cluster.settle();
    // New targets are warmed, too.
    cluster.set_node("n2", Some(ready()));
    cluster.set_targets(targets(&["n1", "n2"]));
    assert_eq!(created(&cluster.settle()), ["n2"]);
    // A failed node is tried again after a quarter of an hour.
    cluster.pull_fails("n2", WarmupCause::NotFound);
    cluster.settle();
    assert_eq!(cluster.counts(), [2, 1, 1, 0]);
    assert!(created(&cluster.pass(899)).is_empty());
    assert_eq!(created(&cluster.pass(2)), ["n2"]);
}

#[test]
fn a_target_that_is_not_there_is_waited_for_and_then_missed() {
    let pending = || WarmupTargets::Pending { reason: "group sglang has no bound Pods".to_owned() };
    for missing in [pending(), WarmupTargets::Nodes([].into())] {
        let mut cluster = WarmupHarness::with_targets(&["n1"], missing.clone(), WarmupLimits::default());
        cluster.pass(599);
        assert_eq!(cluster.report().progress.phase, WarmupPhase::InProgress);
        assert_eq!(cluster.report().reason, WarmupReason::WaitingForTarget);
        cluster.pass(1);
        assert_eq!(cluster.report().progress.phase, WarmupPhase::Failed);
        assert_eq!(cluster.report().reason, WarmupReason::TargetNotFound);

        // It appears in time.
        let mut cluster = WarmupHarness::with_targets(&["n1"], missing.clone(), WarmupLimits::default());
        cluster.pass(599);
        cluster.set_targets(targets(&["n1"]));
        assert_eq!(created(&cluster.pass(10)), ["n1"]);

        // A shorter timeout counts instead, and a pause does not.
        let limits = WarmupLimits { timeout: Some(Millis::secs(60)), ..WarmupLimits::default() };
        let mut cluster = WarmupHarness::with_targets(&["n1"], missing, limits);
        cluster.pass(30);
        cluster.set_paused(true);
        cluster.pass(1000);
        cluster.set_paused(false);
        cluster.pass(29);
        assert_eq!(cluster.report().reason, WarmupReason::WaitingForTarget);
        cluster.pass(1);
        assert_eq!(cluster.report().reason, WarmupReason::TargetNotFound);
    }
    let mut kept = WarmupHarness::with_targets(&["n1"], pending(), WarmupLimits::default());
    kept.edit(|request| request.keep_warm = true);
    kept.pass(10_000);
    assert_eq!(kept.report().reason, WarmupReason::WaitingForTarget);
    assert_eq!(kept.report().progress.phase, WarmupPhase::InProgress);
}

#[test]
fn an_edit_redoes_the_nodes_whose_items_changed_and_no_others() {
    let both = |first: &[&str]| {
        WarmupTargets::Nodes(
            [("n1".into(), items(first, false)), ("n2".into(), items(&["b:1"], false))].into(),
        )
    };
    let limits = WarmupLimits { max_failed_nodes: 1, ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::with_targets(&["n1", "n2"], both(&["a:1"]), limits);
    cluster.settle();
    cluster.play("n1", &image("a:1"), present(START));
    cluster.play("n2", &image("b:1"), present(START));
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
    // Another image for the first node, and a leader that has not seen the former spec.
    cluster.targets = both(&["a:2"]);
    cluster.change_spec();
    cluster.now = START + Millis::secs(50);
    cluster.restart();
    assert_eq!(created(&cluster.settle()), ["n1"]);
    assert_eq!(cluster.report().progress.start, Some(START + Millis::secs(50)));
    assert_eq!(cluster.counts(), [2, 1, 0, 1]);

    // An edit also tries what has failed again. Pulls under way go on.
    cluster.play("n1", &image("a:2"), WarmupPodState::Pending { cause: Some(WarmupCause::Auth) });
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::CompletedWithFailures);
    cluster.edit(|_| {});
    assert_eq!(created(&cluster.settle()), ["n1"]);
    cluster.play("n1", &image("a:2"), WarmupPodState::Pulling);
    cluster.edit(|request| request.limits.parallelism = Some(7));
    assert!(cluster.settle().is_empty());
    cluster.play("n1", &image("a:2"), present(cluster.now));
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
}

#[test]
fn nodes_outside_the_targets_do_not_count() {
    let mut cluster = WarmupHarness::new(&["n1", "n2", "n3"], lenient());
    cluster.settle();
    cluster.pulled("n1");
    cluster.pull_fails("n2", WarmupCause::NotFound);
    cluster.settle();
    assert_eq!(cluster.counts(), [3, 1, 1, 1]);
    cluster.set_targets(targets(&["n3"]));
    cluster.settle();
    assert_eq!(cluster.counts(), [1, 0, 0, 1]);
    assert_eq!(cluster.nodes_with_pods().into_iter().collect::<Vec<_>>(), ["n3"]);
    // One that comes back is done still.
    cluster.set_targets(targets(&["n1", "n3"]));
    assert!(created(&cluster.settle()).is_empty());
    assert_eq!(cluster.counts(), [2, 1, 0, 1]);
}
