//! A leader is killed before any one of its writes about a Warmup of three nodes.

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use rouse_cluster::wait;
use serde_json::json;

use super::{
    fixture::{WarmupFixture, world},
    kubelet::PlayedKubelet,
    nodes::sets,
    objects::{ACTION, SETTINGS, counts},
    report::PodReport,
};
use crate::{crashes::before_each_write, support::cluster};

const IMAGES: [&str; 2] = ["one:1", "two:1"];
const NODES: [&str; 3] = ["a", "b", "c"];
/// How many of the story's writes the gate tries.
const SAMPLED: usize = 3;
/// Nine Pods that are created and deleted, labels of three nodes, statuses, and a failed action that is tried again.
const MOST: u32 = 60;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_of_a_warmup_warms_no_node_twice_and_forgets_none() {
    before_each_write(MOST, SAMPLED, is_killed_before).await;
}

/// Whether the leader was killed before this write.
async fn is_killed_before(write: u32) -> bool {
    let world = Box::pin(world(cluster().await, &format!("warm-crash-{write}"), &NODES)).await;
    world.allow_warm_labels().await;
    let kubelet = PlayedKubelet::start(world.pods());
    let env = [("ROUSE_TEST_ABORT_BEFORE_WRITE", write.to_string())];
    let first = world.gateway_in("gateway-0", SETTINGS, &env);
    // It leads once the first is dead.
    let _second = world.gateway_in("gateway-1", SETTINGS, &[]);
    let mut fixture = WarmupFixture { world, kubelet, gateway: first };
    Box::pin(warms(&fixture)).await;
    fixture.gateway.has_ended()
}

/// Warms three nodes of two images and an action. The action fails once on one of them.
async fn warms(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    kubelet.script(&fixture.node("b"), ACTION, [PodReport::Exited(1), PodReport::Exited(0)]);
    let mut spec = fixture.action_spec(&NODES, json!({}), json!({"parallelism": 2, "backoffLimit": 1}));
    spec["targetNodes"]["imagesPreload"] = json!({"items": IMAGES});
    world.warmup("crash", spec).await;
    let status = world.until_completed("crash").await;
    assert_eq!(counts(&status), (3, 0, 3, 0), "{}: {status:?}", world.name());
    let nodes: Api<Node> = Api::all(world.site.admin.clone());
    let is_warm = |node: &Option<Node>| node.as_ref().is_some_and(|node| sets(node).len() == 1);
    for node in fixture.nodes(&NODES) {
        wait::until(&nodes, &node, "warm", is_warm).await.unwrap();
    }
    kubelet.until_gone().await;
    for ((node, item), pods) in kubelet.counts() {
        let expected = if item == ACTION && node == fixture.node("b") { 2 } else { 1 };
        assert_eq!(pods, expected, "{}: {item} on {node}: {:?}", world.name(), kubelet.counts());
    }
    assert_eq!(kubelet.counts().len(), 9, "{}: {:?}", world.name(), kubelet.counts());
    assert!(kubelet.max_active_nodes() <= 2, "{}: {}", world.name(), kubelet.max_active_nodes());
}
