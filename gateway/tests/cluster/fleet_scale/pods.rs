//! Pods of Deployments as their controllers, the scheduler and a kubelet would make them.

use std::{
    collections::{BTreeMap, VecDeque},
    net::Ipv4Addr,
};

use k8s_openapi::{
    api::{apps::v1::Deployment, core::v1::Pod},
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::objects::{ACCELERATORS_PER_NODE, NODES_PER_POOL, POOL_LABEL, node_name, pool_name};

/// The hash of a ReplicaSet's template, which is a label of its Pods.
const REPLICA_SET_HASH: &str = "5d8f7c9b6d";
const REPLICA_SET_LABEL: &str = "pod-template-hash";

/// One accelerator of one node.
#[derive(Clone)]
pub(super) struct AcceleratorSlot {
    pub(super) node: String,
    pub(super) accelerator: String,
}

/// All accelerators of this many pools. Neighbours in a queue are on different nodes.
pub(super) fn free_accelerators(pools: usize) -> BTreeMap<String, VecDeque<AcceleratorSlot>> {
    let of_pool = |pool: usize| {
        let slots = (0..ACCELERATORS_PER_NODE).flat_map(move |accelerator| {
            (pool * NODES_PER_POOL..(pool + 1) * NODES_PER_POOL).map(move |node| {
                let node = node_name(node);
                AcceleratorSlot { accelerator: format!("GPU-{node}-{accelerator}"), node }
            })
        });
        (pool_name(pool), slots.collect::<VecDeque<_>>())
    };
    (0..pools).map(of_pool).collect()
}

/// The Deployment's Pod of this number, and its pool.
pub(super) fn new_pod(deployment: &Deployment, number: u32) -> (Pod, String) {
    let template = deployment.spec.clone().unwrap().template;
    let spec = template.spec.unwrap();
    let pool = spec.node_selector.as_ref().unwrap()[POOL_LABEL].clone();
    let set = format!("{}-{REPLICA_SET_HASH}", deployment.name_any());
    let mut metadata = template.metadata.unwrap_or_default();
    metadata.name = Some(format!("{set}-{number}"));
    metadata.labels.get_or_insert_default().insert(REPLICA_SET_LABEL.to_owned(), REPLICA_SET_HASH.to_owned());
    metadata.owner_references = Some(vec![OwnerReference {
        api_version: "apps/v1".to_owned(),
        kind: "ReplicaSet".to_owned(),
        name: set,
        uid: deployment.uid().unwrap(),
        controller: Some(true),
        ..OwnerReference::default()
    }]);
    (Pod { metadata, spec: Some(spec), status: None }, pool)
}

/// The status that a kubelet reports once all containers run.
pub(super) fn running_status(pod: &Pod, address: Ipv4Addr) -> Value {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let containers: Vec<Value> = containers
        .map(|container| {
            json!({
                "name": container.name, "image": container.image, "imageID": "", "ready": true,
                "started": true, "restartCount": 0, "state": {"running": {}},
            })
        })
        .collect();
    let mut patch = status_conditions(false);
    patch["status"]["phase"] = json!("Running");
    patch["status"]["podIP"] = json!(address);
    patch["status"]["podIPs"] = json!([{"ip": address}]);
    patch["status"]["containerStatuses"] = json!(containers);
    patch
}

/// A patch of the Pod's conditions.
pub(super) fn status_conditions(ready: bool) -> Value {
    let condition =
        |kind: &str, status: bool| json!({"type": kind, "status": if status { "True" } else { "False" }});
    json!({"status": {"conditions": [
        condition("PodScheduled", true),
        condition("Initialized", true),
        condition("ContainersReady", ready),
        condition("Ready", ready),
    ]}})
}

/// Accepts that a Pod is gone: the gateway and a rollout end Pods at any time.
pub(super) fn unless_gone<T>(outcome: kube::Result<T>) {
    match outcome {
        Ok(_) => {}
        Err(kube::Error::Api(gone)) if gone.code == 404 => {}
        Err(error) => panic!("a Pod cannot be changed: {error}"),
    }
}
