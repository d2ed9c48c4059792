//! Labels of warm nodes.

use rouse::warmup::{CommandError, WarmSet, WarmupCommand, WarmupEvent, WarmupLimits};

use crate::harness::{SET, WarmupHarness, targets};

fn label_writes(commands: &[WarmupCommand]) -> Vec<String> {
    let writes = commands.iter().filter_map(|command| match command {
        WarmupCommand::SetWarm { node, set } => Some(format!("+{node} {set}")),
        WarmupCommand::RemoveWarm { node, set } => Some(format!("-{node} {set}")),
        _ => None,
    });
    writes.collect()
}

fn warm(node: &str) -> String {
    format!("+{node} {SET}")
}

fn cold(node: &str) -> String {
    format!("-{node} {SET}")
}

/// Lets time pass and orders the writes of labels that are due, which have no effect.
fn order(cluster: &mut WarmupHarness, seconds: u64) -> Vec<String> {
    cluster.now = rouse::units::Tick(cluster.now.0 + seconds * 1000);
    let plan = cluster.warmups.plan(cluster.now);
    cluster.warmups.issued(&plan.commands, cluster.now);
    label_writes(&plan.commands)
}

#[test]
fn a_node_that_is_done_is_labelled_once() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    assert!(label_writes(&cluster.settle()).is_empty());
    cluster.pulled("n1");
    assert_eq!(label_writes(&cluster.settle()), [warm("n1")]);
    assert!(label_writes(&cluster.pass(1000)).is_empty());
    cluster.restart();
    assert!(label_writes(&cluster.pass(1000)).is_empty());
}

#[test]
fn a_write_that_is_not_observed_is_repeated_after_a_while() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    cluster.settle();
    cluster.pulled("n1");
    assert_eq!(order(&mut cluster, 0), [warm("n1")]);
    assert!(order(&mut cluster, 59).is_empty());
    assert_eq!(order(&mut cluster, 1), [warm("n1")]);
}

#[test]
fn while_labels_are_refused_one_of_them_is_tried_every_ten_seconds() {
    let mut cluster = WarmupHarness::new(&["n1", "n2", "n3"], WarmupLimits::default());
    cluster.settle();
    for node in ["n1", "n2", "n3"] {
        cluster.pulled(node);
    }
    let command = |node: &str| WarmupCommand::SetWarm { node: node.into(), set: SET.into() };
    let fail = |cluster: &mut WarmupHarness, node: &str, error: CommandError| {
        cluster.send(WarmupEvent::Failed { command: command(node), error });
    };
    let refused = || CommandError::Refused("forbidden".to_owned());
    assert_eq!(order(&mut cluster, 0), [warm("n1"), warm("n2"), warm("n3")]);
    for node in ["n1", "n2", "n3"] {
        fail(&mut cluster, node, refused());
    }
    assert!(order(&mut cluster, 9).is_empty());
    assert_eq!(order(&mut cluster, 1), [warm("n1")]);
    assert!(order(&mut cluster, 5).is_empty(), "the first try is under way");
    fail(&mut cluster, "n1", refused());
    assert!(order(&mut cluster, 9).is_empty());
    assert_eq!(order(&mut cluster, 1), [warm("n2")], "n1 may be refused for a reason of its own");
    // A try without an answer shows nothing.
    fail(&mut cluster, "n2", CommandError::Transient);
    assert!(order(&mut cluster, 9).is_empty());
    assert_eq!(order(&mut cluster, 1), [warm("n3")]);
    cluster.send(WarmupEvent::Executed(command("n3")));
    assert_eq!(order(&mut cluster, 0), [warm("n1"), warm("n2")]);
}

#[test]
fn the_next_try_of_a_refused_label_is_a_deadline_even_if_the_node_changes_meanwhile() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    cluster.settle();
    cluster.pulled("n1");
    assert_eq!(order(&mut cluster, 0), [warm("n1")]);
    let command = WarmupCommand::SetWarm { node: "n1".into(), set: SET.into() };
    cluster.send(WarmupEvent::Failed { command, error: CommandError::Refused("forbidden".to_owned()) });
    cluster.edit_node("n1", |facts| facts.disk_pressure = true);
    assert!(label_writes(&cluster.pass(9)).is_empty());
    assert_eq!(label_writes(&cluster.pass(1)), [warm("n1")]);
}

#[test]
fn a_node_that_is_warmed_again_is_not_warm_meanwhile() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    cluster.settle();
    cluster.pulled("n1");
    cluster.settle();
    let other = crate::harness::items(&["app:2"], false);
    cluster.set_targets(rouse::warmup::WarmupTargets::Nodes([("n1".into(), other)].into()));
    cluster.edit(|_| {});
    assert_eq!(label_writes(&cluster.settle()), [cold("n1")]);
}

#[test]
fn a_node_that_leaves_the_targets_stays_warm() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    cluster.settle();
    cluster.pulled("n1");
    cluster.settle();
    cluster.set_targets(targets(&["n2"]));
    assert!(label_writes(&cluster.settle()).is_empty());
    cluster.restart();
    assert!(label_writes(&cluster.settle()).is_empty());
}

#[test]
fn a_label_without_a_warmup_or_a_model_is_removed() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    for set in ["aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"] {
        cluster.edit_node("n2", |facts| drop(facts.labels_warm.replace(set.into())));
    }
    cluster.settle();
    cluster.pulled("n1");
    // Which models exist is not known yet.
    assert_eq!(label_writes(&cluster.settle()), [warm("n1")]);
    let known = [WarmSet::from("bbbbbbbbbbbbbbbb")].into();
    cluster.send(WarmupEvent::KnownSets(known));
    assert_eq!(label_writes(&cluster.settle()), ["-n2 aaaaaaaaaaaaaaaa"]);
    cluster.send(WarmupEvent::WarmupDeleted(cluster.id.clone()));
    assert_eq!(label_writes(&cluster.settle()), [cold("n1")]);
}
