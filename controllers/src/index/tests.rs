mod capacity;
mod models;
mod orders;
mod size;
mod slots;

use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

use super::*;

const SCOPE: WatchScope = WatchScope {
    policy: ConversionPolicy { any_backend: false, dual_pods: None },
    nodes: true,
    namespaces: 1,
};

/// Resolves an index with these objects.
fn settled(objects: impl IntoIterator<Item = IndexedObject>) -> Arc<Resolved> {
    let mut index = ClusterIndex::new(SCOPE);
    objects.into_iter().for_each(|object| index.apply(object));
    index.resolved()
}

fn metadata(namespace: Option<&str>, name: &str, generation: i64) -> Value {
    json!({
        "name": name,
        "namespace": namespace,
        "uid": format!("uid-{name}"),
        "generation": generation,
        "creationTimestamp": "2026-11-01T00:00:00Z",
    })
}

fn with(mut base: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().unwrap() {
        base[name] = value.clone();
    }
    base.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    base
}

/// The smallest valid model in the namespace `chat` with these spec fields on top; `null` removes a field.
fn model(name: &str, fields: Value) -> IndexedObject {
    model_at(name, fields, 1).into()
}

fn model_at(name: &str, fields: Value, generation: i64) -> InferenceModel {
    let spec = json!({"modelName": name, "memory": "40Gi", "containerImage": "vllm:1"});
    serde_json::from_value(json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": metadata(Some("chat"), name, generation),
        "spec": with(spec, fields),
    }))
    .unwrap()
}

/// A pool of the nodes with `inference-pool: NAME`, unless the fields say otherwise.
fn pool(name: &str, fields: Value) -> IndexedObject {
    pool_at(name, fields, 1).into()
}

fn pool_at(name: &str, fields: Value, generation: i64) -> AcceleratorPool {
    serde_json::from_value(json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "AcceleratorPool",
        "metadata": metadata(None, name, generation),
        "spec": with(json!({"nodeSelector": {"inference-pool": name}}), fields),
    }))
    .unwrap()
}

/// A node of the pool with that name, with accelerators of 80 GiB.
fn node(name: &str, pool: &str, units: Value) -> IndexedObject {
    labelled(name, json!({"inference-pool": pool, "nvidia.com/gpu.memory": "81920"}), units)
}

fn labelled(name: &str, labels: Value, units: Value) -> IndexedObject {
    let mut metadata = metadata(None, name, 1);
    metadata["labels"] = labels;
    let allocatable = json!({"cpu": "64", "nvidia.com/gpu": units});
    let node: Node = serde_json::from_value(json!({
        "metadata": metadata,
        "status": {"allocatable": with(allocatable, json!({}))},
    }))
    .unwrap();
    node.into()
}

/// An AcceleratorNode as a stub reports it: each accelerator's capacity and health.
fn stub(name: &str, accelerators: &[(&str, bool)]) -> IndexedObject {
    let listed: Vec<_> = accelerators
        .iter()
        .enumerate()
        .map(|(n, (capacity, healthy))| json!({"uuid": format!("GPU-{n}"), "capacity": capacity, "healthy": healthy}))
        .collect();
    let node: AcceleratorNode = serde_json::from_value(json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "AcceleratorNode",
        "metadata": metadata(None, name, 1),
        "spec": {},
        "status": {"accelerators": listed},
    }))
    .unwrap();
    node.into()
}

fn object(name: &str) -> ObjectName {
    ObjectName::new("chat", name)
}

/// Returns the reason and message in a rejected model's condition.
fn rejected(settled: &Resolved, name: &str) -> (&'static str, String) {
    let rejected = settled.rejected.get(&object(name)).unwrap_or_else(|| panic!("{name} is served"));
    (rejected.rejections.reason(), rejected.rejections.to_string())
}

fn trouble(settled: &Resolved, pool: &str) -> (&'static str, String) {
    let trouble = settled.pools[pool].problem.as_ref().unwrap_or_else(|| panic!("{pool} is ready"));
    (trouble.reason(), trouble.to_string())
}
