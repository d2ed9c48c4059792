//! As many objects as a large cluster has, in a cluster of their own: each watch of nodes and pools sees all of them.

use std::collections::BTreeSet;

use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::PostParams,
    runtime::{WatchStreamExt as _, watcher},
};
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::crd::{AcceleratorPool, InferenceModel};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::time::timeout;

pub(crate) const MODELS: usize = 2000;
pub(crate) const POOLS: usize = 200;
pub(crate) const NODES: usize = 1000;
/// How many objects the test creates at once.
const AT_ONCE: usize = 8;

pub(crate) fn model(n: usize) -> String {
    format!("model-{n:04}")
}

/// Creates the nodes and pools, and the models in this namespace.
pub(crate) async fn make(client: &Client, namespace: &str) {
    all::<Node>(&Api::all(client.clone()), NODES, node).await;
    all::<AcceleratorPool>(&Api::all(client.clone()), POOLS, pool).await;
    all::<InferenceModel>(&Api::namespaced(client.clone(), namespace), MODELS, large_model).await;
}

/// Creates this many objects.
pub(crate) async fn all<K>(api: &Api<K>, count: usize, object: fn(usize) -> Value)
where
    K: Resource + Clone + DeserializeOwned + Serialize + std::fmt::Debug,
{
    let made = stream::iter(0..count).map(async |n| {
        let object: K = serde_json::from_value(object(n)).unwrap();
        api.create(&PostParams::default(), &object).await.unwrap();
    });
    made.buffer_unordered(AT_ONCE).collect::<()>().await;
}

/// A node with the labels of its accelerators and the images that a kubelet lists.
fn node(n: usize) -> Value {
    let images: Vec<Value> = (0..20).map(|image| {
        let name = format!("registry.example.com/team-{image}/engine@sha256:{:064x}", n * 20 + image);
        json!({"names": [name, format!("registry.example.com/team-{image}/engine:{n}")], "sizeBytes": 8_000_000_000_u64})
    }).collect();
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": format!("node-{n:04}"),
            "labels": {"inference-pool": format!("pool-{}", n % POOLS), "nvidia.com/gpu.memory": "81559"},
        },
        "status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"}, "images": images},
    })
}

fn pool(n: usize) -> Value {
    let name = format!("pool-{n}");
    json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "AcceleratorPool",
        "metadata": {"name": name},
        "spec": {"nodeSelector": {"inference-pool": name}},
    })
}

/// A model with a template as people write them.
fn large_model(n: usize) -> Value {
    let env: Vec<Value> = (0..12)
        .map(|e| json!({"name": format!("SETTING_{e}"), "value": format!("a value of some length, {n}")}))
        .collect();
    json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": model(n)},
        "spec": {
            "modelName": format!("organisation/{}-instruct", model(n)),
            "memory": "70Gi",
            "nodeSelector": {"inference-pool": format!("pool-{}", n % POOLS)},
            "engine": {"kind": "vllm"},
            "template": {"spec": {"containers": [{
                "name": "engine",
                "image": "vllm/vllm-openai:v0.11.0",
                "args": ["--model", model(n), "--max-model-len", "32768", "--gpu-memory-utilization", "0.9"],
                "env": env,
                "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "64Gi"}, "requests": {"cpu": "8"}},
                "volumeMounts": [{"name": "models", "mountPath": "/models"}],
            }], "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]}},
        },
    })
}

/// Waits until `fits` holds for this many objects.
pub(crate) async fn until<K>(api: Api<K>, count: usize, what: &str, fits: fn(&K) -> bool)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let mut fitting = BTreeSet::new();
    let seen = async {
        let objects = watcher(api, watcher::Config::default()).default_backoff().applied_objects();
        let mut objects = std::pin::pin!(objects);
        while fitting.len() < count {
            let object = objects.next().await.expect("a watch does not end").unwrap();
            if fits(&object) {
                // An Event's name begins with the model's name.
                fitting.insert(object.name_any().split('.').next().unwrap_or_default().to_owned());
            }
        }
    };
    let outcome = timeout(WAIT_TIMEOUT, seen).await;
    assert!(outcome.is_ok(), "{what}: so far of {} of {count}", fitting.len());
}

pub(crate) type ModelApi = Api<InferenceModel>;
pub(crate) type PoolApi = Api<AcceleratorPool>;
