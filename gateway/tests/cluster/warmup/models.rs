//! Models whose images are kept warm on the nodes where their next engine may start, and engines that prefer them.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt as _};
use rouse_cluster::{podrunner::NodeSpec, wait};
use rouse_controllers::{
    crd::{WarmupStatus, warmup::WarmupStatusPhase},
    label::MODEL,
    workload::OBJECT,
};
use serde_json::json;

use super::{
    fixture::{self, WarmupFixture},
    kubelet::{ANY_ITEM, PlayedKubelet},
    nodes::sets,
    objects::{SETTINGS, counts, is_in},
    report::PodReport,
};
use crate::{
    installation::{ClusterGateway, Installation, blocking},
    support::cluster,
};

/// Sends a chat, and returns the node of the model's engine.
async fn node_of_engine(world: &Installation<'_>, gateway: &ClusterGateway, model: &'static str) -> String {
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat(model, false, 4)).await.status, 200);
    let pods = world.running().await;
    let is_engine = |pod: &&Pod| {
        pod.labels().contains_key(MODEL) && pod.annotations().get(OBJECT).is_some_and(|name| name == model)
    };
    let engine = pods.iter().find(is_engine).unwrap_or_else(|| panic!("{model} has no Pod"));
    engine.spec.as_ref().unwrap().node_name.clone().unwrap()
}

/// Without the labels the scheduler takes the first of two equal nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_starts_on_the_node_that_is_warm_and_a_model_s_new_nodes_are_warmed() {
    let world = Box::pin(fixture::world(cluster().await, "warm-models", &["a", "b"])).await;
    world.allow_warm_labels().await;
    let [a, b] = ["a", "b"].map(|name| world.runner.node(name).name().to_owned());
    let kubelet = PlayedKubelet::start(world.pods());
    kubelet.script(&a, ANY_ITEM, [PodReport::Pulling]);
    world.model("cold", "10Gi", "", json!({"cooldownPeriod": "10m"})).await;
    world.model("warm", "10Gi", "", json!({"cooldownPeriod": "10m", "warmup": "auto"})).await;
    let gateway = world.gateway_with("gateway-0", SETTINGS);

    let nodes: Api<Node> = Api::all(world.site.admin.clone());
    let is_warm = |node: &Option<Node>| node.as_ref().is_some_and(|node| !sets(node).is_empty());
    wait::until(&nodes, &b, "warm", is_warm).await.unwrap();
    assert!(sets(&nodes.get(&a).await.unwrap()).is_empty());
    assert_eq!(node_of_engine(&world, &gateway, "warm").await, b);
    // A model whose images are not kept warm prefers no node, so it takes the emptier one.
    assert_eq!(node_of_engine(&world, &gateway, "cold").await, a);

    // The model's next engine may start on a new node as well.
    let own = world.name().to_owned();
    let third = NodeSpec::new("c").gpus(2).label("inference-pool", &own);
    let third = world.runner.add_node(third).await.unwrap();
    wait::until(&nodes, third.name(), "warm", is_warm).await.unwrap();

    // Without its wish, nothing is kept warm.
    world.edit("warm", json!({"warmup": "never"})).await;
    let is_cold = |node: &Option<Node>| node.as_ref().is_some_and(|node| sets(node).is_empty());
    for node in [b.as_str(), third.name()] {
        wait::until(&nodes, node, "cold", is_cold).await.unwrap();
    }
    kubelet.until_gone().await;
}

/// A Warmup of a model's nodes: as many as it asks for, and again those that lose an image.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_s_nodes_are_kept_warm_and_one_that_lost_an_image_is_warmed_again() {
    let fixture = WarmupFixture::new("warm-kept", &["a", "b"]).await;
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    world.warmup("absent", json!({"policies": {"timeoutSeconds": 2}, "targetModel": {"name": "qwen"}})).await;
    world.until_failed("absent").await;
    world.model("qwen", "10Gi", "", json!({})).await;
    world.warmup("once", json!({"targetModel": {"name": "qwen", "nodes": 1}})).await;
    let status = world.until_completed("once").await;
    assert_eq!(counts(&status), (1, 0, 1, 0));

    world.warmup("kept", json!({"targetModel": {"name": "qwen", "keepWarm": true}})).await;
    let all_warm = |status: &WarmupStatus| counts(status) == (2, 0, 2, 0);
    let status = world.until_warmup("kept", "both nodes", all_warm).await;
    assert!(is_in(&status, WarmupStatusPhase::InProgress), "it never finishes: {status:?}");
    // The kubelet shows the image, and later it has been collected.
    let node = fixture.node("b");
    let before = kubelet.count(&node, "rouse/engine");
    let listing = |names: &[&str]| {
        let images: Vec<_> = names.iter().map(|name| json!({"names": [name], "sizeBytes": 8})).collect();
        json!({"images": images})
    };
    let others = "docker.io/library/other:1";
    let engine = "docker.io/rouse/engine:latest";
    fixture.patch_node_status("b", listing(&[engine, "docker.io/rouse/stub:latest", others])).await;
    // Another Warmup is done without a Pod once the leader has seen the list.
    world.warmup("seen", fixture.spec(&["b"], &["other:1"], json!({}))).await;
    world.until_completed("seen").await;
    fixture.patch_node_status("b", listing(&["docker.io/rouse/stub:latest", others])).await;
    kubelet.until_count(&node, "rouse/engine", before + 1).await;
    world.until_warmup("kept", "both nodes again", all_warm).await;
    assert_eq!(kubelet.count(&node, "other:1"), 0, "{:?}", kubelet.counts());

    // Another node of the same name has nothing, and is kept warm as well.
    kubelet.until_gone_from(&node, "rouse/engine").await;
    fixture.replace_node("b").await;
    kubelet.until_count(&node, "rouse/engine", before + 2).await;
    world.until_warmup("kept", "both nodes once more", all_warm).await;
}
