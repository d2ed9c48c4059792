//! What is tried again: Pods that were deleted while they pulled, those that failed during a pause, and nodes that had
//! failed before an edit.

use rouse_controllers::crd::{WarmupStatus, warmup::WarmupStatusPhase};
use serde_json::json;

use super::{
    fixture::WarmupFixture,
    objects::{cause, counts, is_in, items_of},
    report::PodReport,
};

/// A client that deletes every Pod meets pauses that double, and the node does not fail by that.
async fn deleted_while_pulling(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("a"));
    kubelet.script(&node, "deleted:1", [PodReport::Pulling]);
    world.warmup("deleted", fixture.spec(&["a"], &["deleted:1"], json!({"backoffLimit": 0}))).await;
    for pods in 1..=3 {
        kubelet.until_count(&node, "deleted:1", pods).await;
        kubelet.report(&node, "deleted:1", PodReport::Pulling).await;
        fixture.delete_pods_of(&node, "deleted:1").await;
        kubelet.until_gone_from(&node, "deleted:1").await;
    }
    kubelet.until_count(&node, "deleted:1", 4).await;
    kubelet.report(&node, "deleted:1", PodReport::Present).await;
    let status = world.until_completed("deleted").await;
    assert_eq!((counts(&status), kubelet.count(&node, "deleted:1")), ((1, 0, 1, 0), 4));
    // Pauses of half a second, one and two.
    let seconds = kubelet.seconds_of_tries(&node, "deleted:1");
    assert!(seconds >= 3, "four tries within {seconds} s");
}

/// An edit of the policies alone tries again what had failed for good.
async fn edited_after_a_failure(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("b"));
    let text = "docker.io/library/late:1: not found".to_owned();
    kubelet.script(&node, "late:1", [PodReport::PullFailed("ErrImagePull", text), PodReport::Present]);
    world.warmup("late", fixture.spec(&["a", "b"], &["late:1"], json!({"maxFailedNodes": 1}))).await;
    let status = world.until_completed("late").await;
    assert_eq!((counts(&status), cause(&status, &node)), ((2, 0, 1, 1), "NotFound"), "{status:?}");
    world.edit_warmup("late", json!({"policies": {"parallelism": 3}})).await;
    let status = world.until_completed("late").await;
    assert_eq!(counts(&status), (2, 0, 2, 0), "{status:?}");
    let of_other = kubelet.count(&fixture.node("a"), "late:1");
    assert_eq!((kubelet.count(&node, "late:1"), of_other), (2, 1), "only what had failed is done again");
}

/// A pull that began before a pause and fails during it counts: the node has no more tries than without the pause.
async fn failed_during_a_pause(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("b"));
    let failed = || {
        let text = "dial tcp 192.0.2.1:443: connect: connection refused".to_owned();
        PodReport::PullFailed("ErrImagePull", text)
    };
    kubelet.script(&node, "halted:1", [PodReport::Pulling]);
    world.warmup("halted", fixture.spec(&["b"], &["halted:1"], json!({"backoffLimit": 1}))).await;
    world.until_warmup("halted", "begun", |status| status.active_node_num == 1).await;
    world.edit_warmup("halted", json!({"paused": true})).await;
    world.until_warmup("halted", "paused", |status| is_in(status, WarmupStatusPhase::Paused)).await;
    kubelet.report(&node, "halted:1", failed()).await;
    let counted = |status: &WarmupStatus| items_of(status, &node).iter().any(|own| own.attempts == 1);
    world.until_warmup("halted", "one failure", counted).await;
    world.edit_warmup("halted", json!({"paused": false})).await;
    kubelet.until_count(&node, "halted:1", 2).await;
    kubelet.report(&node, "halted:1", failed()).await;
    let status = world.until_failed("halted").await;
    assert_eq!((counts(&status), kubelet.count(&node, "halted:1")), ((1, 0, 0, 1), 2), "{status:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_pulls_are_repeated_after_pauses_and_failed_nodes_after_an_edit() {
    let fixture = WarmupFixture::new("warm-retried", &["a", "b"]).await;
    tokio::join!(
        Box::pin(deleted_while_pulling(&fixture)),
        Box::pin(edited_after_a_failure(&fixture)),
        Box::pin(failed_during_a_pause(&fixture)),
    );
}
