//! Nodes that are gone, cannot take Pods, or leave the target.

use k8s_openapi::api::core::v1::Node;
use kube::{Api, ResourceExt as _};
use rouse_cluster::wait;
use rouse_controllers::crd::{WarmupStatus, warmup::WarmupStatusPhase};
use serde_json::{Value, json};

use super::{
    fixture::{NODES_LABEL, WarmupFixture},
    kubelet::ANY_ITEM,
    objects::{ACTION, cause, condition, counts, is_in},
    report::PodReport,
};

/// A Warmup of one image on all nodes of the fixture.
fn everywhere(fixture: &WarmupFixture<'_>, image: &str, policies: Value) -> Value {
    let selector = json!({NODES_LABEL: fixture.world.name()});
    let target = json!({"nodeSelector": selector, "imagesPreload": {"items": [image]}});
    json!({"policies": policies, "targetNodes": target})
}

fn ready(status: &str) -> Value {
    json!({"conditions": [{"type": "Ready", "status": status, "reason": "Played", "message": ""}]})
}

fn disk_pressure(status: &str) -> Value {
    json!({"conditions": [{"type": "DiskPressure", "status": status, "reason": "Played", "message": ""}]})
}

const TAINT: &str = "example.com/reserved";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_cannot_take_pods_wait_with_their_cause_and_without_a_pod_and_then_are_warmed() {
    let fixture = WarmupFixture::new("warm-bad-nodes", &["a", "b", "c", "d", "e"]).await;
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [a, b, c, d, e] = ["a", "b", "c", "d", "e"].map(|name| fixture.node(name));
    fixture.patch_node("a", json!({"spec": {"unschedulable": true}})).await;
    // Its kubelet would report it ready again.
    world.runner.partition("b");
    fixture.patch_node_status("b", ready("False")).await;
    let taint = json!({"key": TAINT, "value": "x", "effect": "NoSchedule"});
    fixture.patch_node("c", json!({"spec": {"taints": [taint]}})).await;
    fixture.patch_node_status("d", disk_pressure("True")).await;

    // They use no place of the one at a time.
    world.warmup("bad-nodes", everywhere(&fixture, "x:1", json!({"parallelism": 1}))).await;
    let expected = [(&a, "Cordoned"), (&b, "NodeNotReady"), (&c, "Taint"), (&d, "DiskPressure")];
    let all_named = |status: &WarmupStatus| {
        counts(status) == (5, 0, 1, 0)
            && expected.iter().all(|(node, expected)| cause(status, node).starts_with(expected))
    };
    let status = world.until_warmup("bad-nodes", "four causes", all_named).await;
    assert!(is_in(&status, WarmupStatusPhase::InProgress), "{status:?}");
    let mut messages = status.nodes.iter().filter_map(|own| own.message.as_deref());
    assert!(messages.any(|message| message.contains(TAINT)), "{status:?}");
    for node in [&a, &b, &c, &d] {
        assert_eq!(kubelet.count(node, ANY_ITEM), 0, "{node}");
    }
    assert_eq!(kubelet.count(&e, "x:1"), 1);

    // A toleration in the spec lets it in; the others recover.
    fixture.patch_node("a", json!({"spec": {"unschedulable": false}})).await;
    world.runner.heal("b");
    fixture.patch_node_status("b", ready("True")).await;
    fixture.patch_node_status("d", disk_pressure("False")).await;
    let others_done = |status: &WarmupStatus| counts(status) == (5, 0, 4, 0);
    world.until_warmup("bad-nodes", "all but the tainted one", others_done).await;
    let tolerations = json!([{"key": TAINT, "operator": "Exists"}]);
    world.edit_warmup("bad-nodes", json!({"tolerations": tolerations})).await;
    let status = world.until_completed("bad-nodes").await;
    assert_eq!(counts(&status), (5, 0, 5, 0));
    assert_eq!((kubelet.count(&c, "x:1"), kubelet.max_active_nodes()), (1, 1), "{:?}", kubelet.counts());
}

/// The scheduler would not find the node by its label, and the Warmup pins by the name.
async fn named_otherwise(fixture: &WarmupFixture<'_>) {
    let labels = json!({"metadata": {"labels": {"kubernetes.io/hostname": "another-name"}}});
    fixture.patch_node("a", labels).await;
    fixture.world.warmup("hostname", fixture.spec(&["a"], &["hostname:1"], json!({}))).await;
    fixture.world.until_completed("hostname").await;
    assert_eq!(fixture.kubelet.count(&fixture.node("a"), "hostname:1"), 1);
}

/// The node's own list proves that it has an image: no Pod is needed.
async fn listed(fixture: &WarmupFixture<'_>) {
    let digest = format!("docker.io/library/listed@sha256:{:064x}", 7);
    let images = json!({"images": [{"names": [digest, "docker.io/library/listed:1"], "sizeBytes": 8}]});
    fixture.patch_node_status("a", images).await;
    fixture.world.warmup("listed", fixture.spec(&["a"], &["listed:1"], json!({}))).await;
    let status = fixture.world.until_completed("listed").await;
    assert_eq!(counts(&status), (1, 0, 1, 0));
    assert_eq!(fixture.kubelet.count(&fixture.node("a"), "listed:1"), 0);
}

/// The action asks for more accelerators than are free.
async fn full(fixture: &WarmupFixture<'_>) {
    let (world, node) = (&fixture.world, fixture.node("b"));
    let limits = json!({"resources": {"limits": {"nvidia.com/gpu": "3"}}});
    world.warmup("full", fixture.action_spec(&["b"], limits, json!({"timeoutSeconds": 10}))).await;
    let named = |status: &WarmupStatus| cause(status, &node) == "NodeFull";
    world.until_warmup("full", "NodeFull", named).await;
    let status = world.until_failed("full").await;
    assert_eq!((status.active_node_num, status.succeeded_node_num), (0, 0), "{status:?}");
    fixture.kubelet.until("its Pod's end", |pods| pods.existing(&node, ACTION).next().is_none()).await;
}

/// A node that is deleted meanwhile fails at once, although no limit is set. So does one that never existed.
async fn gone(fixture: &WarmupFixture<'_>) {
    let (world, node) = (&fixture.world, fixture.node("c"));
    fixture.kubelet.script(&node, "gone:1", [PodReport::Pulling]);
    let mut spec = fixture.spec(&["c", "d"], &["gone:1"], json!({"maxFailedNodes": 2}));
    spec["targetNodes"]["nodeNames"].as_array_mut().unwrap().push(json!("never-existed"));
    world.warmup("gone", spec).await;
    let begun = |status: &WarmupStatus| (status.active_node_num, status.succeeded_node_num) == (1, 1);
    let status = world.until_warmup("gone", "one pulling and one done", begun).await;
    assert_eq!(cause(&status, "never-existed"), "NodeGone", "{status:?}");
    fixture.delete_node("c").await;
    let status = world.until_completed("gone").await;
    assert_eq!((counts(&status), cause(&status, &node)), ((3, 0, 1, 2), "NodeGone"), "{status:?}");
    assert!(status.failed_nodes.contains(&node), "{status:?}");
}

/// Nodes that leave the target do not count, and their Pods end.
async fn shrinks(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let labelled = |value: Option<&str>| json!({"metadata": {"labels": {"shrinks": value}}});
    let own = world.name();
    for name in ["e", "f"] {
        fixture.patch_node(name, labelled(Some(own))).await;
    }
    let [e, f] = ["e", "f"].map(|name| fixture.node(name));
    kubelet.script(&f, "shrinks:1", [PodReport::Pulling]);
    let target = json!({"nodeSelector": {"shrinks": own}, "imagesPreload": {"items": ["shrinks:1"]}});
    world.warmup("shrinks", json!({"targetNodes": target})).await;
    let one_done = |status: &WarmupStatus| counts(status) == (2, 1, 1, 0);
    world.until_warmup("shrinks", "one node done", one_done).await;
    fixture.patch_node("f", labelled(None)).await;
    let status = world.until_completed("shrinks").await;
    assert_eq!(counts(&status), (1, 0, 1, 0));
    assert_eq!(condition(&status, "Complete").0, "True");
    kubelet.until("the Pod's end", |pods| pods.existing(&f, "shrinks:1").next().is_none()).await;
    assert_eq!((kubelet.count(&e, "shrinks:1"), kubelet.count(&f, "shrinks:1")), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_count_by_their_names_and_images_while_they_exist_and_are_in_the_target() {
    let fixture = WarmupFixture::new("warm-nodes", &["a", "b", "c", "d", "e", "f"]).await;
    tokio::join!(
        Box::pin(named_otherwise(&fixture)),
        Box::pin(listed(&fixture)),
        Box::pin(full(&fixture)),
        Box::pin(gone(&fixture)),
        Box::pin(shrinks(&fixture)),
    );
}

/// The labels of a Warmup's warm nodes, and of no other node. They go with the Warmup.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn warm_nodes_are_labelled_as_long_as_the_warmup_exists_if_the_gateway_may_label_them() {
    let fixture = WarmupFixture::new("warm-labels", &["a", "b"]).await;
    let world = &fixture.world;
    // Without the right everything else works.
    world.warmup("unlabelled", fixture.spec(&["a"], &["x:1"], json!({}))).await;
    world.until_completed("unlabelled").await;
    world.allow_warm_labels().await;

    fixture.kubelet.script(&fixture.node("b"), "y:1", [PodReport::Pulling]);
    let policies = json!({"ttlSecondsAfterFinished": 1});
    world.warmup("labelled", fixture.spec(&["a", "b"], &["y:1"], policies)).await;
    let nodes: Api<Node> = Api::all(world.site.admin.clone());
    let warm =
        |count: usize| move |node: &Option<Node>| node.as_ref().is_some_and(|node| sets(node).len() == count);
    let labelled = wait::until(&nodes, &fixture.node("a"), "both labels", warm(2)).await.unwrap().unwrap();
    assert!(sets(&labelled).iter().all(|(_, value)| *value == world.name()), "{:?}", labelled.labels());
    let cold = nodes.get(&fixture.node("b")).await.unwrap();
    assert_eq!(sets(&cold).len(), 0, "{:?}", cold.labels());
    assert!(fixture.gateway.metrics().contains("rouse_warm_nodes{"));

    fixture.kubelet.report(&fixture.node("b"), "y:1", PodReport::Present).await;
    wait::until(&nodes, &fixture.node("b"), "its label", warm(1)).await.unwrap();
    wait::until(&world.warmups(), "labelled", "its end", Option::is_none).await.unwrap();
    wait::until(&nodes, &fixture.node("b"), "no label", warm(0)).await.unwrap();
    wait::until(&nodes, &fixture.node("a"), "the other's label", warm(1)).await.unwrap();
    fixture.kubelet.until_gone().await;
}

/// The labels of warm nodes, each with its value.
pub(super) fn sets(node: &Node) -> Vec<(&str, &str)> {
    let labels = node.labels().iter().map(|(key, value)| (key.as_str(), value.as_str()));
    labels.filter(|(key, _)| key.starts_with(super::objects::WARM_PREFIX)).collect()
}
