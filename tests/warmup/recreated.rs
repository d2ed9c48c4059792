//! Nodes that were deleted, and others that were created under their names.

use rouse::warmup::{
    NodeUidKey, WarmupCause, WarmupCommand, WarmupLimits, WarmupNodeFacts, WarmupReason, WarmupTargets,
};

use crate::harness::{SET, WarmupHarness, created, image, items, present, ready};

fn with_uid(uid: &str) -> WarmupNodeFacts {
    WarmupNodeFacts { uid: NodeUidKey::new(uid), ..ready() }
}

/// Two nodes with uids, of which the first is done.
fn half_done(limits: WarmupLimits) -> WarmupHarness {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], limits);
    cluster.set_node("n1", Some(with_uid("a")));
    cluster.set_node("n2", Some(with_uid("b")));
    cluster.settle();
    cluster.pulled("n1");
    cluster.settle();
    assert_eq!(cluster.counts(), [2, 1, 0, 1]);
    cluster
}

#[test]
fn a_node_that_is_created_again_while_no_leader_watches_is_warmed_again() {
    let mut cluster = half_done(WarmupLimits::default());
    cluster.restart();
    assert!(created(&cluster.settle()).is_empty(), "it is the same node");
    cluster.nodes.insert("n1".into(), with_uid("c"));
    cluster.restart();
    assert_eq!(created(&cluster.settle()), ["n1"]);
    assert_eq!(cluster.counts(), [2, 0, 0, 2]);
    cluster.restart();
    assert!(created(&cluster.settle()).is_empty());
    cluster.pulled("n1");
    cluster.pulled("n2");
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
    cluster.restart();
    assert!(cluster.pass(1000).is_empty());
}

#[test]
fn a_node_that_is_created_again_under_the_eyes_of_the_leader_is_warmed_again() {
    for plans_between in [false, true] {
        let mut cluster = half_done(WarmupLimits::default());
        cluster.set_node("n1", None);
        if plans_between {
            assert!(created(&cluster.settle()).is_empty());
            assert_eq!(cluster.counts(), [2, 1, 0, 1]);
        }
        cluster.set_node("n1", Some(with_uid("c")));
        assert_eq!(created(&cluster.settle()), ["n1"]);
        assert_eq!(cluster.counts(), [2, 0, 0, 2]);
    }
}

#[test]
fn what_a_deleted_node_had_of_its_items_counts_no_more() {
    let both = WarmupTargets::Nodes([("n1".into(), items(&["a:1", "b:1"], false))].into());
    let mut cluster = WarmupHarness::with_targets(&["n1"], both, WarmupLimits::default());
    cluster.set_node("n1", Some(with_uid("a")));
    cluster.settle();
    cluster.play("n1", &image("a:1"), present(cluster.now));
    cluster.settle();
    cluster.set_node("n1", None);
    cluster.set_node("n1", Some(with_uid("b")));
    let commands = cluster.settle();
    let images = commands.iter().filter_map(|command| match command {
        WarmupCommand::CreatePod { item, .. } => Some(item.to_string()),
        _ => None,
    });
    assert_eq!(images.collect::<Vec<_>>(), ["a:1"], "the other Pod still pulls");
}

#[test]
fn a_success_stays_until_the_outcome_of_its_node_is_stored_and_not_only_that_of_a_deleted_one() {
    let deletions = |commands: &[WarmupCommand]| {
        commands.iter().filter(|command| matches!(command, WarmupCommand::DeletePod { .. })).count()
    };
    let mut cluster = half_done(WarmupLimits::default());
    cluster.set_node("n1", None);
    cluster.set_node("n1", Some(with_uid("c")));
    cluster.stores = false;
    assert_eq!(created(&cluster.settle()), ["n1"]);
    cluster.pulled("n1");
    assert_eq!(deletions(&cluster.settle()), 0);
    cluster.store();
    assert_eq!(deletions(&cluster.settle()), 1);
}

#[test]
fn failures_of_a_deleted_node_do_not_count_for_another() {
    let limits = WarmupLimits { max_failed_nodes: 1, ..WarmupLimits::default() };
    let mut cluster = half_done(limits);
    cluster.nodes.insert("n1".into(), with_uid("c"));
    cluster.restart();
    cluster.settle();
    cluster.pull_fails("n1", WarmupCause::Auth);
    cluster.settle();
    assert_eq!(cluster.counts(), [2, 0, 1, 1]);
    cluster.nodes.insert("n1".into(), with_uid("d"));
    cluster.restart();
    assert_eq!(created(&cluster.settle()), ["n1"]);
    let found = cluster.report().nodes.iter().find(|node| node.node.as_str() == "n1").unwrap();
    assert_eq!(found.attempts, 0);
}

#[test]
fn a_finished_warmup_labels_no_node_that_it_has_not_warmed() {
    let is_labelled = |cluster: &WarmupHarness| !cluster.nodes["n1"].labels_warm.is_empty();
    for (uid, has_label, expected) in
        [("a", false, true), ("a", true, true), ("c", false, false), ("c", true, false)]
    {
        for is_watched in [false, true] {
            let mut cluster = half_done(WarmupLimits::default());
            cluster.pulled("n2");
            cluster.settle();
            assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
            assert!(is_labelled(&cluster));
            let mut facts = with_uid(uid);
            if has_label {
                facts.labels_warm.insert(SET.into());
            }
            if is_watched {
                cluster.set_node("n1", None);
                cluster.settle();
                cluster.set_node("n1", Some(facts));
            } else {
                cluster.nodes.insert("n1".into(), facts);
                cluster.restart();
            }
            let commands = cluster.pass(100);
            assert!(created(&commands).is_empty(), "the Warmup has finished");
            assert_eq!(is_labelled(&cluster), expected, "{uid} {has_label} {is_watched}");
            assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
        }
    }
}

#[test]
fn a_record_without_uids_is_that_of_the_node_of_the_name() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    cluster.settle();
    cluster.pulled("n1");
    cluster.settle();
    cluster.nodes.insert("n1".into(), with_uid("a"));
    cluster.restart();
    assert!(created(&cluster.settle()).is_empty());
    assert_eq!(cluster.counts(), [2, 1, 0, 1]);
    cluster.nodes.insert("n1".into(), with_uid("b"));
    cluster.restart();
    assert_eq!(created(&cluster.settle()), ["n1"]);
}
