//! The chart's autoscaler of gateways, as helm renders it: Kubernetes's controller scales their Deployment by their
//! CPU.
//!
//! No gateway runs: the test reports their Pods as ready, and how much CPU they use.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
};
use rouse_cluster::{
    Namespace, TestCluster,
    wait::{self, WAIT_TIMEOUT},
};
use serde_json::{Value, json};
use tokio::time::{Duration, sleep, timeout};

use super::metrics_api::{self, VERSION};
use crate::{
    rendered::render,
    support::{FIELD_MANAGER, apply_object},
};

const GROUP: &str = "metrics.k8s.io";
/// The kinds of the release that the autoscaler needs.
const KINDS: [&str; 3] = ["ServiceAccount", "Deployment", "HorizontalPodAutoscaler"];
/// When Pods became ready: long enough ago for the autoscaler to count their CPU.
const READY_SINCE: &str = "2026-01-01T00:00:00Z";

/// What each Pod uses, in thousandths of a core.
type CpuUse = Arc<Mutex<BTreeMap<String, u32>>>;

/// A gateway requests half a core, and the chart's autoscaler aims at 70 % of it. The cluster must be the test's own.
pub(super) async fn gateways_are_scaled_by_their_cpu(cluster: &TestCluster) {
    let (namespace, client) = (cluster.namespace("gateways").await.unwrap(), cluster.client().await.unwrap());
    let used = CpuUse::default();
    let (served, own) = (Arc::clone(&used), namespace.name().to_owned());
    let respond = move |below: &str| pod_metrics(below, &own, &served.lock().unwrap());
    metrics_api::install(&client, &namespace, GROUP, respond).await;
    let values = r#"gateway.autoscaling={"enabled": true, "scaleDownSeconds": 0}"#;
    for object in render(namespace.name(), &["--set-json", values]) {
        if KINDS.contains(&object["kind"].as_str().unwrap()) {
            let parameters = PatchParams::apply(FIELD_MANAGER);
            apply_object(&client, &object, Some(namespace.name()), &parameters).await.unwrap();
        }
    }
    until_gateways(&namespace, 2).await;
    run_pods(&namespace, 2, 500, &used).await;
    until_gateways(&namespace, 3).await;
    run_pods(&namespace, 3, 150, &used).await;
    until_gateways(&namespace, 2).await;
}

/// Waits until the Deployment asks for this number of Pods.
async fn until_gateways(namespace: &Namespace, number: i32) {
    let deployments: Api<Deployment> = namespace.api();
    let fits = |found: &Option<Deployment>| {
        let spec = found.as_ref().and_then(|deployment| deployment.spec.as_ref());
        spec.is_some_and(|spec| spec.replicas == Some(number))
    };
    wait::until(&deployments, "rouse-gateway", &format!("{number} gateways"), fits).await.unwrap();
}

/// Waits for this number of Pods, and makes each of them ready and use so much CPU.
async fn run_pods(namespace: &Namespace, count: usize, millicores: u32, used: &CpuUse) {
    let pods: Api<Pod> = namespace.api();
    let there = async {
        loop {
            let found = pods.list(&ListParams::default()).await.unwrap().items;
            if found.len() >= count {
                return found;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let found = timeout(WAIT_TIMEOUT, there).await.expect("the Deployment has too few Pods");
    *used.lock().unwrap() = found.iter().map(|pod| (pod.name_any(), millicores)).collect();
    for pod in found {
        let ready = json!({"type": "Ready", "status": "True", "lastTransitionTime": READY_SINCE});
        let status = json!({"phase": "Running", "startTime": READY_SINCE, "conditions": [ready]});
        let patch = Patch::Merge(json!({"status": status}));
        pods.patch_status(&pod.name_any(), &PatchParams::default(), &patch).await.unwrap();
    }
}

/// Returns what metrics-server answers about the Pods of this namespace.
fn pod_metrics(below: &str, namespace: &str, used: &BTreeMap<String, u32>) -> Option<Value> {
    let path = below.split('?').next().unwrap_or_default();
    if path.strip_prefix("/namespaces/")?.strip_suffix("/pods")? != namespace {
        return None;
    }
    let item = |(name, millicores): (&String, &u32)| {
        json!({
            "metadata": {"name": name, "namespace": namespace}, "timestamp": READY_SINCE, "window": "1s",
            "containers": [{"name": "gateway", "usage": {"cpu": format!("{millicores}m"), "memory": "64Mi"}}],
        })
    };
    let items: Vec<Value> = used.iter().map(item).collect();
    Some(json!({
        "kind": "PodMetricsList", "apiVersion": format!("{GROUP}/{VERSION}"), "metadata": {}, "items": items,
    }))
}
