//! What is tried again: Pods that were deleted while they pulled, and nodes that had failed before an edit.

use serde_json::json;

use super::{
    fixture::WarmupFixture,
    objects::{cause, counts},
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_pulls_are_repeated_after_pauses_and_failed_nodes_after_an_edit() {
    let fixture = WarmupFixture::new("warm-retried", &["a", "b"]).await;
    tokio::join!(Box::pin(deleted_while_pulling(&fixture)), Box::pin(edited_after_a_failure(&fixture)),);
}
