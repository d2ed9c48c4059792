//! The objects of a fleet: nodes in pools, and models whose engines always run.

use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use rouse_controllers::crd::{AcceleratorPool, InferenceModel};
use serde_json::{Value, json};

use crate::crowd;

/// Engines of each model. They run without requests.
pub(super) const ENGINES: u32 = 5;
/// Models that use one pool. All of their engines take five eighths of its accelerators.
pub(super) const MODELS_PER_POOL: usize = 20;
pub(super) const NODES_PER_POOL: usize = 20;
pub(super) const ACCELERATORS_PER_NODE: usize = 8;
/// Models without engines, of the first pool. Each shows once when a leader decides.
pub(super) const COLD_MODELS: usize = 2;
pub(super) const POOL_LABEL: &str = "inference-pool";

/// Creates everything for this many models in this namespace.
pub(super) async fn create_all(client: &Client, namespace: &str, models: usize) {
    let pools = models / MODELS_PER_POOL;
    Box::pin(crowd::all::<Node>(&Api::all(client.clone()), pools * NODES_PER_POOL, node)).await;
    Box::pin(crowd::all::<AcceleratorPool>(&Api::all(client.clone()), pools, pool)).await;
    let api: Api<InferenceModel> = Api::namespaced(client.clone(), namespace);
    Box::pin(crowd::all(&api, models, running_model)).await;
    Box::pin(crowd::all(&api, COLD_MODELS, cold_model)).await;
}

pub(super) fn node_name(n: usize) -> String {
    format!("node-{n:04}")
}

pub(super) fn pool_name(n: usize) -> String {
    format!("pool-{n:02}")
}

pub(super) fn cold_name(n: usize) -> String {
    format!("cold-{n}")
}

fn node(n: usize) -> Value {
    let accelerators = json!({"nvidia.com/gpu": ACCELERATORS_PER_NODE.to_string()});
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node_name(n),
            "labels": {POOL_LABEL: pool_name(n / NODES_PER_POOL), "nvidia.com/gpu.memory": "81559"},
        },
        "status": {"capacity": accelerators, "allocatable": accelerators},
    })
}

fn pool(n: usize) -> Value {
    json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "AcceleratorPool",
        "metadata": {"name": pool_name(n)},
        "spec": {"nodeSelector": {POOL_LABEL: pool_name(n)}},
    })
}

fn running_model(n: usize) -> Value {
    object(&crowd::model(n), running_spec(n, "first"))
}

fn cold_model(n: usize) -> Value {
    object(&cold_name(n), spec(&cold_name(n), &pool_name(0), 0, 1, "first"))
}

/// The spec of the model of this number. Another revision is another template.
pub(super) fn running_spec(n: usize, revision: &str) -> Value {
    spec(&crowd::model(n), &pool_name(n / MODELS_PER_POOL), ENGINES, ENGINES, revision)
}

fn object(name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": name},
        "spec": spec,
    })
}

fn spec(name: &str, pool: &str, least: u32, most: u32, revision: &str) -> Value {
    json!({
        "modelName": name,
        "memory": "70Gi",
        "nodeSelector": {POOL_LABEL: pool},
        "minReplicas": least,
        "maxReplicas": most,
        "startTimeout": "30m",
        "engine": {"kind": "vllm"},
        "template": {"spec": {"containers": [{
            "name": "engine",
            "image": "example.com/engine",
            "args": ["--host", "$(POD_IP)", "--port", "8000", "--model", name],
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "REVISION", "value": revision},
            ],
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
        }]}},
    })
}
