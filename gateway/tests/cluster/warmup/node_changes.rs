//! Nodes that go, come back, are replaced, or become able to take Pods.

use rouse_controllers::crd::{WarmupStatus, warmup::WarmupStatusPhase};
use serde_json::{Value, json};

use super::{
    fixture::WarmupFixture,
    objects::{cause, counts, is_in, items_of},
    report::PodReport,
};

/// Sets or removes a label, whose value is the namespace, on these nodes.
async fn label(fixture: &WarmupFixture<'_>, nodes: &[&str], key: &str, is_set: bool) {
    let value = is_set.then(|| fixture.world.name().to_owned());
    for node in nodes {
        fixture.patch_node(node, json!({"metadata": {"labels": {key: value}}})).await;
    }
}

/// A Warmup of one image on the nodes with this label.
fn selecting(fixture: &WarmupFixture<'_>, key: &str, image: &str, policies: Value) -> Value {
    let target = json!({"nodeSelector": {key: fixture.world.name()}, "imagesPreload": {"items": [image]}});
    json!({"policies": policies, "targetNodes": target})
}

/// A selected node that is deleted after it had begun has failed, although it is no target any more.
async fn selected_and_gone(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("b"));
    label(fixture, &["a", "b"], "selected", true).await;
    kubelet.script(&node, "selected:1", [PodReport::Pulling]);
    let spec = selecting(fixture, "selected", "selected:1", json!({"maxFailedNodes": 1}));
    world.warmup("selected", spec).await;
    world.until_warmup("selected", "one node done", |status| counts(status) == (2, 1, 1, 0)).await;
    fixture.delete_node("b").await;
    let status = world.until_completed("selected").await;
    assert_eq!(counts(&status), (2, 0, 1, 1), "the success counts once: {status:?}");
    kubelet.until_gone_from(&node, "selected:1").await;
}

/// Another node of the same name has nothing of what the deleted one had.
async fn replaced(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [c, d] = ["c", "d"].map(|name| fixture.node(name));
    kubelet.script(&d, "replaced:1", [PodReport::Pulling]);
    world.warmup("replaced", fixture.spec(&["c", "d"], &["replaced:1"], json!({}))).await;
    world.until_warmup("replaced", "one node done", |status| counts(status) == (2, 1, 1, 0)).await;
    kubelet.until_gone_from(&c, "replaced:1").await;
    fixture.replace_node("c").await;
    kubelet.until_count(&c, "replaced:1", 2).await;
    kubelet.report(&d, "replaced:1", PodReport::Present).await;
    let status = world.until_completed("replaced").await;
    assert_eq!(counts(&status), (2, 0, 2, 0), "{status:?}");
    assert_eq!((kubelet.count(&c, "replaced:1"), kubelet.count(&d, "replaced:1")), (2, 1));
}

/// A node that leaves the target and comes back is done still.
async fn comes_back(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [e, f] = ["e", "f"].map(|name| fixture.node(name));
    label(fixture, &["e", "f"], "comes-back", true).await;
    kubelet.script(&f, "back:1", [PodReport::Pulling]);
    world.warmup("back", selecting(fixture, "comes-back", "back:1", json!({}))).await;
    let one_done = |status: &WarmupStatus| counts(status) == (2, 1, 1, 0);
    world.until_warmup("back", "one node done", one_done).await;
    label(fixture, &["e"], "comes-back", false).await;
    world.until_warmup("back", "one node", |status| counts(status) == (1, 1, 0, 0)).await;
    label(fixture, &["e"], "comes-back", true).await;
    world.until_warmup("back", "both nodes", one_done).await;
    kubelet.report(&f, "back:1", PodReport::Present).await;
    world.until_completed("back").await;
    assert_eq!((kubelet.count(&e, "back:1"), kubelet.count(&f, "back:1")), (1, 1));
}

/// One toleration of everything lets image-only work in, whatever taints the node has.
async fn tolerates_everything(fixture: &WarmupFixture<'_>) {
    let taint = |key: &str| json!({"key": key, "value": "x", "effect": "NoSchedule"});
    let taints = json!([taint("example.com/first"), taint("example.com/second")]);
    fixture.patch_node("g", json!({"spec": {"taints": taints}})).await;
    let mut spec = fixture.spec(&["g"], &["tolerated:1"], json!({}));
    spec["tolerations"] = json!([{"operator": "Exists"}]);
    fixture.world.warmup("tolerant", spec).await;
    fixture.world.until_completed("tolerant").await;
    assert_eq!(fixture.kubelet.count(&fixture.node("g"), "tolerated:1"), 1);
}

/// An action waits for room without a failure. An image needs no room.
async fn full_until_there_is_room(fixture: &WarmupFixture<'_>) {
    let (world, node) = (&fixture.world, fixture.node("h"));
    let limits = json!({"resources": {"limits": {"nvidia.com/gpu": "3"}}});
    world.warmup("full", fixture.action_spec(&["h"], limits, json!({"backoffLimit": 0}))).await;
    let waits = |status: &WarmupStatus| {
        is_in(status, WarmupStatusPhase::InProgress)
            && cause(status, &node) == "NodeFull"
            && items_of(status, &node).iter().all(|own| own.attempts == 0)
    };
    world.until_warmup("full", "NodeFull", waits).await;
    world.warmup("small", fixture.spec(&["h"], &["small:1"], json!({}))).await;
    world.until_completed("small").await;
    let more = json!({"nvidia.com/gpu": "3"});
    fixture.patch_node_status("h", json!({"capacity": more, "allocatable": more})).await;
    let status = world.until_completed("full").await;
    assert_eq!(counts(&status), (1, 0, 1, 0), "{status:?}");
}

/// A pull that fills the disk has failed once. It is not repeated while the node has disk pressure.
async fn disk_full(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("i"));
    let pressure = |status: &str| json!({"conditions": [{"type": "DiskPressure", "status": status, "reason": "Played", "message": ""}]});
    kubelet.script(&node, "disk:1", [PodReport::Pulling, PodReport::Present]);
    world.warmup("disk", fixture.spec(&["i"], &["disk:1"], json!({"backoffLimit": 1}))).await;
    // The leader would delete an unbound Pod, which the scheduler keeps off a node with disk pressure.
    kubelet.report(&node, "disk:1", PodReport::Pulling).await;
    fixture.patch_node_status("i", pressure("True")).await;
    let under_pressure = |status: &WarmupStatus| cause(status, &node) == "DiskPressure";
    // The leader has seen the pressure once it names it, so the next attempt does not come before.
    world.warmup("pressed", fixture.spec(&["i"], &["pressed:1"], json!({}))).await;
    world.until_warmup("pressed", "DiskPressure", under_pressure).await;
    let text = "write /var/lib/containerd/tmpmounts/mount1/weights: no space left on device".to_owned();
    kubelet.report(&node, "disk:1", PodReport::PullFailed("ErrImagePull", text)).await;
    kubelet.until_gone_from(&node, "disk:1").await;
    let waits = |status: &WarmupStatus| {
        let failed_once = items_of(status, &node).iter().any(|own| own.attempts == 1);
        counts(status) == (1, 0, 0, 0) && under_pressure(status) && failed_once
    };
    world.until_warmup("disk", "DiskPressure", waits).await;
    assert_eq!((kubelet.count(&node, "disk:1"), kubelet.count(&node, "pressed:1")), (1, 0));
    fixture.patch_node_status("i", pressure("False")).await;
    for name in ["disk", "pressed"] {
        world.until_completed(name).await;
    }
    assert_eq!(kubelet.count(&node, "disk:1"), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_change_while_they_are_warmed_count_by_what_they_are_now() {
    let fixture = WarmupFixture::new("warm-changes", &["a", "b", "c", "d", "e", "f", "g", "h", "i"]).await;
    tokio::join!(
        Box::pin(selected_and_gone(&fixture)),
        Box::pin(replaced(&fixture)),
        Box::pin(comes_back(&fixture)),
        Box::pin(tolerates_everything(&fixture)),
        Box::pin(full_until_there_is_room(&fixture)),
        Box::pin(disk_full(&fixture)),
    );
}
