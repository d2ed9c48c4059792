//! What the next leader makes of Pods, nodes and edits that changed while no gateway led.

use nix::sys::signal::Signal;
use rouse_controllers::crd::{WarmupStatus, warmup::WarmupStatusPhase};
use serde_json::json;

use super::{
    fixture::WarmupFixture,
    objects::{SETTINGS, cause, counts, is_in, items_of},
    report::PodReport,
};

fn unreachable() -> PodReport {
    let text = "dial tcp 192.0.2.1:443: connect: connection refused".to_owned();
    PodReport::PullFailed("ErrImagePull", text)
}

fn one_of_two_done(status: &WarmupStatus) -> bool {
    counts(status) == (2, 1, 1, 0)
}

/// Begins a Warmup whose node has failed once, one with a node that is done, and one that can begin no other node.
async fn begin(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| fixture.node(name));
    kubelet.script(&a, "tried:1", [unreachable(), PodReport::Pulling]);
    kubelet.script(&c, "absent:1", [PodReport::Pulling]);
    kubelet.script(&d, "paused:1", [PodReport::Pulling]);
    world.warmup("tried", fixture.spec(&["a"], &["tried:1"], json!({"backoffLimit": 1}))).await;
    world.warmup("absent", fixture.spec(&["b", "c"], &["absent:1"], json!({}))).await;
    world.warmup("paused", fixture.spec(&["d", "e"], &["paused:1"], json!({"parallelism": 1}))).await;

    kubelet.until_count(&a, "tried:1", 2).await;
    let failed_once = |status: &WarmupStatus| items_of(status, &a).iter().any(|own| own.attempts == 1);
    world.until_warmup("tried", "a failure", failed_once).await;
    world.until_warmup("absent", "one node done", one_of_two_done).await;
    kubelet.until_gone_from(&b, "absent:1").await;
    world.until_warmup("paused", "one node active", |status| counts(status) == (2, 1, 0, 0)).await;
}

/// A failure that was counted counts, although its Pod and the next one are gone.
async fn fails_for_good(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("a"));
    kubelet.until_count(&node, "tried:1", 3).await;
    kubelet.report(&node, "tried:1", unreachable()).await;
    let status = world.until_failed("tried").await;
    assert_eq!((cause(&status, &node), counts(&status)), ("Network", (1, 0, 0, 1)), "{status:?}");
    assert_eq!(kubelet.count(&node, "tried:1"), 3);
}

/// A node that was replaced has nothing. The other one goes on.
async fn is_warmed_again(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [b, c] = ["b", "c"].map(|name| fixture.node(name));
    kubelet.until_count(&b, "absent:1", 2).await;
    kubelet.report(&c, "absent:1", PodReport::Present).await;
    let status = world.until_completed("absent").await;
    assert_eq!(counts(&status), (2, 0, 2, 0), "{status:?}");
    assert_eq!((kubelet.count(&b, "absent:1"), kubelet.count(&c, "absent:1")), (2, 1));
}

/// A pause is kept, and its end repeats nothing.
async fn stays_paused(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [d, e] = ["d", "e"].map(|name| fixture.node(name));
    let paused =
        |status: &WarmupStatus| is_in(status, WarmupStatusPhase::Paused) && counts(status) == (2, 1, 0, 0);
    world.until_warmup("paused", "paused", paused).await;
    kubelet.report(&d, "paused:1", PodReport::Present).await;
    let one_done =
        |status: &WarmupStatus| is_in(status, WarmupStatusPhase::Paused) && counts(status) == (2, 0, 1, 0);
    world.until_warmup("paused", "one node done", one_done).await;
    assert_eq!(kubelet.count(&e, "paused:1"), 0, "nothing begins");
    world.edit_warmup("paused", json!({"paused": false})).await;
    let status = world.until_completed("paused").await;
    assert_eq!(counts(&status), (2, 0, 2, 0), "{status:?}");
    assert_eq!((kubelet.count(&d, "paused:1"), kubelet.count(&e, "paused:1")), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_leader_counts_earlier_failures_and_sees_replaced_nodes_and_pauses() {
    let mut fixture = WarmupFixture::new("warm-next-leader", &["a", "b", "c", "d", "e"]).await;
    Box::pin(begin(&fixture)).await;
    fixture.gateway.signal(Signal::SIGTERM);
    fixture.gateway.wait().await;

    let node = fixture.node("a");
    fixture.delete_pods_of(&node, "tried:1").await;
    fixture.kubelet.until_gone_from(&node, "tried:1").await;
    fixture.replace_node("b").await;
    fixture.world.edit_warmup("paused", json!({"paused": true})).await;

    fixture.gateway = fixture.world.gateway_with("gateway-1", SETTINGS);
    tokio::join!(
        Box::pin(fails_for_good(&fixture)),
        Box::pin(is_warmed_again(&fixture)),
        Box::pin(stays_paused(&fixture)),
    );
}
