//! Models that need other models, and models with a minimum of engines.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use rouse_cluster::wait;
use rouse_controllers::crd::AcceleratorPool;
use serde_json::json;
use tokio::time::sleep;

use crate::installation::{Installation, blocking, reason};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_model_needs_is_ready_before_it_and_goes_after_it() {
    let world = Installation::new("needs", 2, "128Gi").await;
    world.model("base", "40Gi", "--start-time 3s", json!({"cooldownPeriod": "1s"})).await;
    let top = json!({"cooldownPeriod": "10m", "modelName": "org/top", "dependencies": ["base"]});
    world.model("top", "60Gi", "--model org/top", top).await;
    let gateway = world.gateway("gateway-0", "");
    world.until("top", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    assert_eq!(world.running().await.len(), 0, "nothing is started before somebody asks");

    let client = gateway.client();
    let answer = tokio::spawn(blocking(move || client.chat("org/top", true, 8)));
    let pools: Api<AcceleratorPool> = Api::all(world.site.admin.clone());
    let both = |pool: &Option<AcceleratorPool>| {
        pool.as_ref().and_then(|pool| pool.status.as_ref()).is_some_and(|status| status.count == 2)
    };
    wait::until(&pools, world.name(), "both reserved for", both).await.unwrap();
    assert!(world.running().await.iter().all(|pod| !is_of(pod, "top")), "it waits for what it needs");
    let answer = answer.await.unwrap();
    assert!(answer.is_whole_stream(), "{answer:?}");
    let before = world.running().await;
    let (base, top) = (pod_of(&before, "base"), pod_of(&before, "top"));
    let created = |pod: &Pod| pod.metadata.creation_timestamp.as_ref().unwrap().0;
    // The base model takes three seconds to start, and whole-second timestamps may hide one of them.
    let apart = created(&top).duration_since(created(&base)).as_secs();
    assert!(apart >= 2, "the one that needs the other was started {apart} s after it");

    // The base model is unused for longer than its own cooldown, but stays for the top model, which is unused for less
    // than its own.
    sleep(Duration::from_secs(3)).await;
    let still = world.running().await;
    assert_eq!(pod_of(&still, "base").metadata.uid, base.metadata.uid);
    assert_eq!(pod_of(&still, "top").metadata.uid, top.metadata.uid);
    assert_eq!(still.len(), 2);

    world.edit("top", json!({"cooldownPeriod": "5s"})).await;
    let zero = |model: &_| reason(model, "Ready") == "ScaledToZero";
    world.until("base", "scaled to zero", zero).await;
    let left = world.running().await;
    assert!(left.is_empty(), "what needs it is there without it: {left:?}");
    world.until("top", "scaled to zero", zero).await;
    world.until_reserved("nothing", <[_]>::is_empty).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn as_many_engines_as_are_to_run_start_without_a_request_and_stay() {
    let world = Installation::new("least", 2, "128Gi").await;
    world
        .model("kept", "40Gi", "", json!({"cooldownPeriod": "1s", "minReplicas": 1, "maxReplicas": 2}))
        .await;
    let _gateway = world.gateway("gateway-0", "");
    world.until("kept", "ready", |model| reason(model, "Ready") == "Deployed").await;
    let before = world.running().await;
    assert_eq!(before.len(), 1, "as many as minReplicas says");
    sleep(Duration::from_secs(3)).await;
    let after = world.running().await;
    let uids = |pods: &[Pod]| pods.iter().map(|pod| pod.metadata.uid.clone()).collect::<Vec<_>>();
    assert_eq!(uids(&after), uids(&before), "unused for longer than its cooldown");
    assert_eq!(world.reserved_gib().await, [("kept".to_owned(), 40)]);
}

/// Deployments and their Pods have the name of the model's object as a prefix.
fn is_of(pod: &Pod, object: &str) -> bool {
    pod.metadata.name.as_deref().is_some_and(|name| name.starts_with(&format!("{object}-")))
}

fn pod_of(pods: &[Pod], object: &str) -> Pod {
    pods.iter().find(|pod| is_of(pod, object)).unwrap_or_else(|| panic!("no Pod of {object}")).clone()
}
