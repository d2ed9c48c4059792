//! Actions of several containers, and actions that never end.

use serde_json::{Value, json};

use super::{
    fixture::WarmupFixture,
    objects::{ACTION, condition, counts},
    report::PodReport,
};

/// The spec of a Warmup whose action has these fields in its Pod's spec.
fn pod_spec(fixture: &WarmupFixture<'_>, node: &str, pod: Value, policies: Value) -> Value {
    let mut spec = fixture.action_spec(&[node], json!({}), policies);
    let pod = json!({"targetNodes": {"customizedAction": {"podTemplate": {"spec": pod}}}});
    crate::installation::merge(&mut spec, pod);
    spec
}

/// A sidecar never ends by itself: the action is done although it runs.
async fn beside_a_sidecar(fixture: &WarmupFixture<'_>) {
    let (world, node) = (&fixture.world, fixture.node("a"));
    fixture.kubelet.script(&node, ACTION, [PodReport::ExitedBesideReady(&["action"])]);
    let sidecar =
        json!({"name": "proxy", "image": "registry.example.com/proxy:1", "restartPolicy": "Always"});
    let spec = pod_spec(fixture, "a", json!({"initContainers": [sidecar]}), json!({"backoffLimit": 0}));
    world.warmup("sidecar", spec).await;
    let status = world.until_completed("sidecar").await;
    assert_eq!((counts(&status), fixture.kubelet.count(&node, ACTION)), ((1, 0, 1, 0), 1), "{status:?}");
}

/// Each container counts by itself: one has exited, and the other is ready by its probe.
async fn beside_a_daemon(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("b"));
    kubelet.script(&node, ACTION, [PodReport::Running { ready: false }]);
    let containers = json!([
        {"name": "action", "image": "registry.example.com/action:1"},
        {"name": "daemon", "image": "registry.example.com/daemon:1",
            "readinessProbe": {"exec": {"command": ["is-warm"]}}},
    ]);
    let spec = pod_spec(fixture, "b", json!({"containers": containers}), json!({"backoffLimit": 0}));
    world.warmup("daemon", spec).await;
    world.until_warmup("daemon", "running", |status| counts(status) == (1, 1, 0, 0)).await;
    kubelet.report(&node, ACTION, PodReport::ExitedBesideReady(&["action"])).await;
    let status = world.until_completed("daemon").await;
    assert_eq!((counts(&status), kubelet.count(&node, ACTION)), ((1, 0, 1, 0), 1), "{status:?}");
    kubelet.until_gone_from(&node, ACTION).await;
}

/// A daemon without a probe is ready as soon as it runs, which proves nothing: the timeout ends it.
async fn never_ends(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("c"));
    kubelet.script(&node, ACTION, [PodReport::Running { ready: true }]);
    world.warmup("endless", fixture.action_spec(&["c"], json!({}), json!({"timeoutSeconds": 5}))).await;
    let status = world.until_failed("endless").await;
    assert_eq!(condition(&status, "Complete").1, "TimeoutExceeded", "{status:?}");
    assert_eq!((status.succeeded_node_num, kubelet.count(&node, ACTION)), (0, 1), "{status:?}");
    kubelet.until_gone_from(&node, ACTION).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_action_is_done_beside_a_sidecar_or_a_ready_daemon_and_ends_at_its_deadline_otherwise() {
    let fixture = WarmupFixture::new("warm-actions", &["a", "b", "c"]).await;
    tokio::join!(
        Box::pin(beside_a_sidecar(&fixture)),
        Box::pin(beside_a_daemon(&fixture)),
        Box::pin(never_ends(&fixture)),
    );
}
