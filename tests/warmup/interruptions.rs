//! Pods that others refuse, delete or replace, and what is forgotten of nodes.

use rouse::{
    units::Millis,
    warmup::{WarmupEvent, WarmupLimits, WarmupPodState, WarmupTargets},
};

use crate::harness::{WarmupHarness, created, image, items, ready};

#[test]
fn a_node_whose_pod_is_refused_does_not_hold_the_others_up() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    assert_eq!(created(&cluster.refuse()), ["n1", "n2"]);
    cluster.now = cluster.now + Millis::secs(13);
    assert_eq!(created(&cluster.refuse()), ["n1"]);
    cluster.now = cluster.now + Millis::secs(26);
    assert_eq!(created(&cluster.refuse()), ["n2"]);
}

#[test]
fn a_client_that_deletes_pods_meets_longer_pauses_each_time() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    cluster.settle();
    for (before, after) in [(9, 4), (19, 6), (39, 11)] {
        cluster.play("n1", &image("app:1"), WarmupPodState::Pulling);
        let name = cluster.pod_name("n1", &image("app:1"));
        cluster.remove_pod(&name);
        assert!(created(&cluster.pass(before)).is_empty());
        assert_eq!(created(&cluster.pass(after)), ["n1"]);
    }
}

#[test]
fn an_earlier_pod_does_not_stand_for_the_one_that_is_being_created() {
    let action_only =
        WarmupTargets::Nodes([("n1".into(), items(&[], true)), ("n2".into(), items(&[], true))].into());
    let limits = WarmupLimits { parallelism: Some(1), max_failed_nodes: 9, ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::with_targets(&["n1", "n2"], action_only, limits);
    assert_eq!(created(&cluster.settle()), ["n1"]);
    cluster.action_fails("n1", 3);
    cluster.edit(|_| {});
    let commands = cluster.warmups.plan(cluster.now).commands;
    cluster.warmups.issued(&commands, cluster.now);
    assert_eq!(created(&commands), ["n1"]);
    // The deletion of the old Pod is seen before the new Pod.
    let (name, mut pod) = cluster.pods.pop_first().unwrap();
    pod.terminating = true;
    cluster.send(WarmupEvent::Pod { name, pod: Some(pod) });
    assert!(created(&cluster.warmups.plan(cluster.now).commands).is_empty());
}

#[test]
fn nothing_is_kept_of_nodes_that_are_gone() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    cluster.settle();
    cluster.send(WarmupEvent::Node { name: "gone-1".into(), facts: None });
    for pods in [0, 1, 0] {
        cluster.send(WarmupEvent::EnginesPulling { node: "gone-2".into(), pods });
    }
    cluster.set_node("gone-3", Some(ready()));
    cluster.settle();
    cluster.set_node("gone-3", None);
    cluster.settle();
    let known = format!("{:?}", cluster.warmups);
    assert!(known.contains("n1") && !known.contains("gone"), "{known}");
}
