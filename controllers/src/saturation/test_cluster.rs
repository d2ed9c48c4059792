//! The cluster of the tests: two pools with a node each, and a model with a variant in each.

use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

use crate::{
    convert::ConversionPolicy,
    crd::{AcceleratorPool, InferenceModel},
    index::{ClusterIndex, WatchScope},
    workload::merge,
};

/// Names of the pools and of the variants in them.
pub(super) const POOLS: [&str; 2] = ["l4", "h100"];

/// Returns a cluster with both pools and their nodes, and the model `chat/qwen`. `spec`: changes to the model's.
pub(super) fn cluster(accelerators: u32, spec: &Value) -> ClusterIndex {
    let policy = ConversionPolicy { any_backend: false, dual_pods: None };
    let mut cluster = ClusterIndex::new(WatchScope { policy, nodes: true, namespaces: 1 });
    for name in POOLS {
        cluster.apply(pool(name, &json!({})));
        cluster.apply(node(name, accelerators, &json!({})));
    }
    let mut model = json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
        "metadata": {"name": "qwen", "namespace": "chat", "uid": "u1"},
        "spec": {"modelName": "qwen", "memory": "40Gi", "containerImage": "vllm:1", "saturation": {}},
    });
    merge::into(&mut model, &json!({"spec": spec}));
    let model: InferenceModel = serde_json::from_value(model).unwrap();
    cluster.apply(model);
    cluster
}

/// Returns a pool with these changes to its spec.
pub(super) fn pool(name: &str, spec: &Value) -> AcceleratorPool {
    let mut pool = json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorPool", "metadata": {"name": name},
        "spec": {"nodeSelector": {"pool": name}},
    });
    merge::into(&mut pool, &json!({"spec": spec}));
    serde_json::from_value(pool).unwrap()
}

/// Returns a node of this pool with accelerators of 80 GiB, and with these changes.
pub(super) fn node(pool: &str, accelerators: u32, changes: &Value) -> Node {
    let mut node = json!({
        "metadata": {"name": format!("node-{pool}"), "labels": {
            "pool": pool, "zone": "a", "nvidia.com/gpu.memory": "81920",
        }},
        "status": {
            "allocatable": {"nvidia.com/gpu": accelerators.to_string()},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    });
    merge::into(&mut node, changes);
    serde_json::from_value(node).unwrap()
}
