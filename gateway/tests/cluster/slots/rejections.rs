//! Pods that a kubelet has rejected for want of a slot.

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use rouse_cluster::wait;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

use crate::{
    events::until_event_with,
    installation::{ClusterGateway, Installation},
};

/// Pods of one owner in this test, and the least time that their deletions take: one second, and twice as long for each
/// further one.
const PODS: u32 = 3;
const LEAST_TIME: Duration = Duration::from_secs(1 + 2 + 4);
const MESSAGE: &str =
    "Allocate failed due to rpc error: code = FailedPrecondition desc = node b has claimed the slot";

/// Plays an owner that makes another Pod as soon as the last one is deleted, and a kubelet that rejects each of them.
pub(super) async fn are_deleted_with_pauses(world: &Installation<'_>, gateway: &ClusterGateway) {
    let owners: Api<ConfigMap> = world.site.namespace.api();
    let owner = json!({"metadata": {"name": "owner"}});
    let owner: ConfigMap = serde_json::from_value(owner).unwrap();
    let owner = owners.create(&PostParams::default(), &owner).await.unwrap();
    let reference = json!([{
        "apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.uid(), "controller": true,
    }]);
    reject(world, "lonely", json!([]), "rouse.dev/box").await;
    reject(world, "other", reference.clone(), "nvidia.com/gpu").await;
    let started = Instant::now();
    for number in 0..PODS {
        let name = format!("rejected-{number}");
        let pod = reject(world, &name, reference.clone(), "rouse.dev/box").await;
        until_event_with(world, &pod, "Rejected", "node b has claimed").await;
        wait::until(&world.pods(), &name, "its deletion", Option::is_none).await.unwrap();
    }
    let took = started.elapsed();
    assert!(took >= LEAST_TIME, "{PODS} rejected Pods were replaced within {took:?}");
    let counter = format!("rouse_slots_rejected_pods_total {PODS}");
    assert!(gateway.metrics().lines().any(|line| line == counter), "{}", gateway.metrics());
    for (name, why) in [("lonely", "nothing replaces it"), ("other", "it asked for no slot")] {
        assert!(world.pods().get_opt(name).await.unwrap().is_some(), "{name}: {why}");
    }
}

/// Creates a Pod, and writes into its status that its kubelet has rejected it.
async fn reject(world: &Installation<'_>, name: &str, owners: Value, resource: &str) -> Pod {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "ownerReferences": owners},
        "spec": {
            // No scheduler and no kubelet touches it.
            "schedulerName": "none",
            "containers": [{
                "name": "main",
                "image": "registry.example.com/worker:1",
                "resources": {"limits": {resource: "1"}},
            }],
        },
    });
    let pod: Pod = serde_json::from_value(pod).unwrap();
    world.pods().create(&PostParams::default(), &pod).await.unwrap();
    let status = json!({"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": MESSAGE});
    let patch = Patch::Merge(json!({"status": status}));
    world.pods().patch_status(name, &PatchParams::default(), &patch).await.unwrap()
}
