//! Warmups of models give way to the pull that a starting engine needs.

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse_cluster::wait::{self, WAIT_TIMEOUT};
use rouse_controllers::{
    crd::{WarmupStatus, warmup::WarmupStatusPhase},
    label::MODEL,
};
use serde_json::json;
use tokio::time::timeout;

use super::{
    fixture,
    kubelet::{ANY_ITEM, PlayedKubelet},
    objects::{SETTINGS, cause, counts, is_in},
};
use crate::{installation::Installation, support::cluster};

/// Waits until a Pod of an engine is bound, and returns the name of its node.
async fn node_of_bound_engine(world: &Installation<'_>) -> String {
    let mut changes = wait::changes(&world.pods());
    let bound = async {
        while changes.next().await.is_some() {
            let pods = world.running().await;
            let engine = pods.iter().find(|pod: &&Pod| pod.labels().contains_key(MODEL));
            let spec = engine.and_then(|pod| pod.spec.as_ref());
            if let Some(node) = spec.and_then(|spec| spec.node_name.clone()) {
                return node;
            }
        }
        panic!("the watch of Pods ended")
    };
    timeout(WAIT_TIMEOUT, Box::pin(bound)).await.expect("no engine is bound")
}

/// An engine is bound to a node whose kubelet reports nothing of it yet. A model's images are warmed on the other node
/// meanwhile, and on that of the engine after its pull.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_not_warmed_on_a_node_where_an_engine_pulls_until_that_has_pulled() {
    let world = Box::pin(fixture::world(cluster().await, "warm-engine-pulls", &["a", "b"])).await;
    let kubelet = PlayedKubelet::start(world.pods());
    for node in ["a", "b"] {
        world.runner.delay_reports(node);
    }
    world.model("starts", "10Gi", "", json!({"cooldownPeriod": "10m", "minReplicas": 1})).await;
    let _gateway = world.gateway_with("gateway-0", SETTINGS);
    let pulling = node_of_bound_engine(&world).await;
    let other = ["a", "b"].map(|name| world.runner.node(name).name().to_owned());
    let other = other.iter().find(|node| **node != pulling).unwrap();

    world.model("kept", "10Gi", "", json!({"cooldownPeriod": "10m", "warmup": "auto"})).await;
    let gives_way = |status: &WarmupStatus| {
        counts(status) == (2, 0, 1, 0)
            && cause(status, &pulling) == "EnginePulling"
            && is_in(status, WarmupStatusPhase::InProgress)
    };
    world.until_warmup("kept-warmup", "one node warm and one that pulls", gives_way).await;
    assert_eq!(kubelet.count(&pulling, ANY_ITEM), 0, "{:?}", kubelet.counts());
    assert!(kubelet.count(other, ANY_ITEM) > 0, "{:?}", kubelet.counts());

    for node in ["a", "b"] {
        world.runner.heal(node);
    }
    world.until_warmup("kept-warmup", "both nodes", |status| counts(status) == (2, 0, 2, 0)).await;
    assert!(kubelet.count(&pulling, ANY_ITEM) > 0, "{:?}", kubelet.counts());
    kubelet.until_gone().await;
}
