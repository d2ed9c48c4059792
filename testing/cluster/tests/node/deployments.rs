//! Deployments with the real controllers, the real scheduler and the real kubelet.

use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use rouse_cluster::{TestCluster, wait};
use serde_json::json;

use crate::{
    engine::{address, introduce},
    site,
    support::{deployment, pods},
};

async fn scale(api: &Api<Deployment>, replicas: u32) {
    let spec = json!({ "spec": { "replicas": replicas } });
    api.patch("qwen", &PatchParams::default(), &Patch::Merge(spec)).await.unwrap();
}

fn running(deployment: &Option<Deployment>) -> (i32, i32) {
    let status = deployment.as_ref().and_then(|deployment| deployment.status.clone()).unwrap_or_default();
    (status.replicas.unwrap_or(0), status.ready_replicas.unwrap_or(0))
}

#[tokio::test]
async fn a_deployment_scales_from_nothing_and_back() {
    let node = site::node().await;
    let namespace = TestCluster::shared().namespace("scaled").await.unwrap();
    let api: Api<Deployment> = namespace.api();
    deployment(&namespace, "qwen", 0, site::engine()).await;
    let seen = |deployment: &Option<Deployment>| {
        deployment
            .as_ref()
            .is_some_and(|d| d.status.as_ref().is_some_and(|s| s.observed_generation == Some(1)))
    };
    wait::until(&api, "qwen", "a look at it", seen).await.unwrap();
    assert!(pods(&namespace).await.is_empty());

    scale(&api, 1).await;
    wait::until(&api, "qwen", "a Pod", |deployment| running(deployment).0 == 1).await.unwrap();
    let pod = pods(&namespace).await.pop().unwrap();
    let has_address = |pod: &Option<Pod>| {
        pod.as_ref().is_some_and(|pod| {
            pod.status.as_ref().is_some_and(|s| s.pod_ip.is_some() && s.phase.as_deref() == Some("Running"))
        })
    };
    let api_of_pods: Api<Pod> = namespace.api();
    let pod = wait::until(&api_of_pods, &pod.name_any(), "its address", has_address).await.unwrap().unwrap();
    introduce(address(&pod)).await;
    wait::until(&api, "qwen", "a ready one", |deployment| running(deployment) == (1, 1)).await.unwrap();

    scale(&api, 0).await;
    wait::until(&api_of_pods, &pod.name_any(), "its end", Option::is_none).await.unwrap();
    wait::until(&api, "qwen", "none", |deployment| running(deployment) == (0, 0)).await.unwrap();
    assert_eq!(node.processes(&pod).unwrap(), Vec::<i32>::new());
}
