//! Writes to Warmups: the deletion of a finished one, and the Warmups that Rouse keeps for models.

use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use rouse_cluster::wait;
use rouse_controllers::{crd::Warmup, workload::EPOCH};
use serde_json::{Value, json};

use super::{
    gateway::{HeldGateway, world},
    state,
};
use crate::{installation::Installation, support::cluster, warmup::objects::SETTINGS};

const WRITES: [&str; 3] =
    ["POST /warmups/created-warmup", "PATCH /warmups/edited-warmup", "DELETE /warmups/ended"];
/// What a user has written into the Warmup of a model. Rouse wants another number.
const EDITED: i64 = 9;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_held_write_to_a_warmup_changes_what_the_next_leader_wrote() {
    let world = Box::pin(world(cluster().await, "held-warmup")).await;
    let own = world.name().to_owned();
    world.pool(&own, json!({"nodeSelector": {"inference-pool": own}, "memory": "64Gi"})).await;
    world.model("created", "10Gi", "", json!({"warmup": "auto"})).await;
    model_with_an_edited_warmup(&world).await;
    finished_warmup(&world).await;
    let former = Box::pin(HeldGateway::start(&world, SETTINGS, &WRITES)).await;

    let _next = world.gateway_with("gateway-1", SETTINGS);
    let warmups = world.warmups();
    let is_corrected = |found: &Option<Warmup>| {
        let policies = found.as_ref().and_then(|found| found.spec.policies.as_ref());
        policies.is_some_and(|policies| policies.parallelism != Some(EDITED))
    };
    wait::until(&warmups, "created-warmup", "its creation", Option::is_some).await.unwrap();
    wait::until(&warmups, "edited-warmup", "its correction", is_corrected).await.unwrap();
    wait::until(&warmups, "ended", "its deletion", Option::is_none).await.unwrap();
    // A user creates another one of this name.
    world.warmup("ended", json!({"paused": true, "targetNodes": target_nodes()})).await;

    let before = contents(&warmups).await;
    let epoch = world.site.lease().await.unwrap().spec.unwrap().lease_transitions.unwrap().to_string();
    for name in ["created-warmup", "edited-warmup"] {
        let found = warmups.get(name).await.unwrap();
        assert_eq!(found.annotations().get(EPOCH), Some(&epoch), "{name} is not of the next leader");
    }
    former.deliver().await;
    assert_eq!(contents(&warmups).await, before);
}

/// Creates a model and its Warmup, in which a user has changed a number.
async fn model_with_an_edited_warmup(world: &Installation<'_, ()>) {
    let model = world.model("edited", "10Gi", "", json!({"warmup": "auto"})).await;
    let (version, kind) = ("rouse.dev/v1alpha1", "InferenceModel");
    let owner = json!({"apiVersion": version, "kind": kind, "name": "edited", "uid": model.uid(),
        "controller": true});
    let warmup = json!({"apiVersion": version, "kind": "Warmup",
    "metadata": {"name": "edited-warmup", "ownerReferences": [owner]},
    "spec": {
        "policies": {"parallelism": EDITED},
        "targetModel": {"name": "edited", "keepWarm": true},
    }});
    let warmup = serde_json::from_value(warmup).unwrap();
    world.warmups().create(&PostParams::default(), &warmup).await.unwrap();
}

/// Creates a Warmup that has completed, and whose time to live has ended.
async fn finished_warmup(world: &Installation<'_, ()>) {
    let policies = json!({"ttlSecondsAfterFinished": 0});
    let made = world.warmup("ended", json!({"policies": policies, "targetNodes": target_nodes()})).await;
    let status = json!({"status": {
        "observedGeneration": made.metadata.generation,
        "phase": "Completed",
        "startTime": "2026-01-01T00:00:00Z",
        "completionTime": "2026-01-01T00:01:00Z",
    }});
    let patch = Patch::Merge(status);
    world.warmups().patch_status("ended", &PatchParams::default(), &patch).await.unwrap();
}

/// A node that does not exist.
fn target_nodes() -> Value {
    json!({"nodeNames": ["held-warmup-none"], "imagesPreload": {"items": ["x:1"]}})
}

/// The Warmups without their statuses, which the leader goes on to write.
async fn contents(warmups: &Api<Warmup>) -> Vec<Value> {
    let mut contents = Vec::new();
    for name in ["created-warmup", "edited-warmup", "ended"] {
        let mut content = state(warmups, name).await;
        content["status"].take();
        contents.push(content);
    }
    contents
}
