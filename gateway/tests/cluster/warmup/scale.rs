//! A Warmup of thousands of nodes: never more active than allowed, a small object, and few calls for each node.
//!
//! The nodes are objects only, and no scheduler runs: this process plays the kubelets. `make soak` warms 5,000 nodes,
//! and the gate a tenth of them.

use std::collections::BTreeMap;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, ResourceExt as _,
    api::ListParams,
    core::PartialObjectMeta,
    runtime::{WatchStreamExt as _, watcher},
};
use rouse_cluster::ServerRole;
use rouse_controllers::crd::{Warmup, warmup::WarmupStatusPhase};
use rouse_testing::sample::size;
use serde_json::{Value, json};
use tokio::{
    task::JoinHandle,
    time::{Duration, Instant, timeout},
};

use super::{
    kubelet::PlayedKubelet,
    objects::{SETTINGS, WARM_PREFIX, counts},
};
use crate::{
    crowd, installation::Installation, runner::TestPrograms, site::GatewayNamespace, support::own_cluster,
};

const WHOLE: usize = 5000;
const TENTH: usize = 500;
const PARALLELISM: usize = 50;
/// Largest size of the Warmup's object, as promised.
const MAX_BYTES: usize = 100_000;
/// A Pod is created and deleted, and the node gets its label.
const CALLS_PER_NODE: usize = 3;
/// Calls of a leader that do not depend on the number of nodes, for each second.
const CALLS_PER_SECOND: usize = 10;
const IMAGE: &str = "registry.example.com/engine:1";
const LIMIT: Duration = Duration::from_secs(600);

fn node(n: usize) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": format!("node-{n:04}"), "labels": {"kubernetes.io/os": "linux"}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    })
}

/// Follows the object to its end, and returns its largest size and its largest number of active nodes.
fn follow(warmups: Api<Warmup>) -> JoinHandle<(usize, u32)> {
    tokio::spawn(async move {
        let mut versions =
            watcher(warmups, watcher::Config::default()).default_backoff().applied_objects().boxed();
        let mut largest = (0, 0);
        while let Some(version) = versions.next().await {
            // An error is one of the connection, from which the watcher recovers.
            let Ok(warmup) = version else { continue };
            let bytes = serde_json::to_vec(&warmup).unwrap().len();
            let status = warmup.status.unwrap_or_default();
            largest = (largest.0.max(bytes), largest.1.max(status.active_node_num));
            if matches!(status.phase, Some(WarmupStatusPhase::Completed | WarmupStatusPhase::Failed)) {
                break;
            }
        }
        largest
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_nodes_are_warmed_fifty_at_a_time_by_a_small_object_and_few_calls() {
    let nodes = size(WHOLE, TENTH);
    let cluster = own_cluster().await;
    let site = GatewayNamespace::new(&cluster, "warm-scale").await;
    // The controller manager would find all nodes dead.
    cluster.stop_server(ServerRole::ControllerManager).await;
    Box::pin(crowd::all::<Node>(&Api::all(site.admin.clone()), nodes, node)).await;
    let watched = site.namespace.name().to_owned();
    let kubelet = PlayedKubelet::without_scheduler(site.namespace.api());
    let world = Installation {
        site,
        runner: kubelet,
        dir: tempfile::tempdir().unwrap(),
        program: TestPrograms::optimised().gateway,
        stub_image: "example.com/stub".to_owned(),
        watched,
    };
    world.allow_warm_labels().await;
    let _gateway = world.gateway_with("gateway-0", SETTINGS);
    let followed = follow(world.warmups());

    let begun = Instant::now();
    let target = json!({"nodeSelector": {"kubernetes.io/os": "linux"}, "imagesPreload": {"items": [IMAGE]}});
    world.warmup("scale", json!({"policies": {"parallelism": PARALLELISM}, "targetNodes": target})).await;
    let (bytes, active) = timeout(LIMIT, followed).await.expect("it does not end").unwrap();
    let took = begun.elapsed();
    let status = world.until_completed("scale").await;
    let all = u32::try_from(nodes).unwrap();
    assert_eq!(counts(&status), (all, 0, all, 0));

    let kubelet = &world.runner;
    kubelet.until_gone().await;
    until_labelled(&world, nodes).await;
    let calls = world.site.cluster.calls(&world.site.account).unwrap();
    let mut counted: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for call in &calls {
        *counted.entry((&*call.verb, &*call.resource)).or_default() += 1;
    }
    println!(
        "{nodes} nodes in {took:.1?}: {} active at most, {bytes} bytes at most, {} calls: {counted:?}",
        kubelet.max_active_nodes(),
        calls.len()
    );
    assert!(kubelet.max_active_nodes() <= PARALLELISM, "{} active", kubelet.max_active_nodes());
    assert!(active as usize <= PARALLELISM, "{active} active in the status");
    assert!(bytes <= MAX_BYTES, "an object of {bytes} bytes");
    assert!(kubelet.counts().values().all(|pods| *pods == 1), "a node was warmed twice");
    let seconds = usize::try_from(begun.elapsed().as_secs()).unwrap() + 1;
    let most = CALLS_PER_NODE * nodes + CALLS_PER_SECOND * seconds + 100;
    assert!(calls.len() <= most, "{} calls, {most} are allowed: {counted:?}", calls.len());
}

/// Waits until this many nodes have the Warmup's label.
async fn until_labelled<R>(world: &Installation<'_, R>, count: usize) {
    let api: Api<PartialObjectMeta<Node>> = Api::all(world.site.admin.clone());
    let labelled = async {
        loop {
            let all = api.list(&ListParams::default()).await.unwrap().items;
            let warm = all.iter().filter(|node| node.labels().keys().any(|key| key.starts_with(WARM_PREFIX)));
            if warm.count() == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    timeout(LIMIT, labelled).await.expect("not all nodes are labelled");
}
