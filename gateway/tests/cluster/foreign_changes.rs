//! How others change Rouse's objects: people with kubectl, controllers of the cluster, an invalid object.

use futures_util::StreamExt as _;
use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use nix::sys::signal::Signal;
use rouse_cluster::wait;
use serde_json::json;
use tokio::time::timeout;

use crate::{
    installation::{Installation, blocking, reason},
    support::FIELD_MANAGER,
};

async fn its_deployment(world: &Installation<'_>) -> Deployment {
    let mut all = world.deployments().list(&ListParams::default()).await.unwrap().items;
    assert_eq!(all.len(), 1);
    all.remove(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_a_user_adds_to_a_deployment_are_given_up() {
    let world = Installation::new("strangers-scale", 4, "128Gi").await;
    world.model("qwen", "40Gi", "", json!({})).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    let own = world.running().await[0].name_any();

    let (name, three) = (its_deployment(&world).await.name_any(), json!({"spec": {"replicas": 3}}));
    world
        .deployments()
        .patch(&name, &PatchParams::apply(FIELD_MANAGER), &Patch::Merge(&three))
        .await
        .unwrap();
    let one = |found: &Option<Deployment>| {
        let Some(found) = found else { return false };
        let status = found.status.clone().unwrap_or_default();
        let is_looked_at = status.observed_generation == found.metadata.generation;
        let wanted = found.spec.as_ref().and_then(|spec| spec.replicas);
        is_looked_at && (wanted, status.replicas) == (Some(1), Some(1))
    };
    wait::until(&world.deployments(), &name, "one Pod again", one).await.unwrap();
    // The Deployment's count may be from before there were three Pods.
    let left = async {
        let mut changed = wait::changes(&world.pods());
        loop {
            let pods = world.running().await;
            if pods.len() == 1 {
                return pods;
            }
            changed.next().await;
        }
    };
    let left = timeout(wait::WAIT_TIMEOUT, left).await.expect("one Pod again");
    assert_eq!(left[0].name_any(), own, "the engine is not the one that went");
    let client = gateway.client();
    assert!(blocking(move || client.chat("qwen", true, 4)).await.is_whole_stream());
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 40)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_whose_pod_is_deleted_is_replaced_and_gets_no_request() {
    let world = Installation::new("strangers-delete", 2, "128Gi").await;
    world.model("qwen", "40Gi", "", json!({})).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    // The status reports the engine some time later, and could otherwise be mistaken for that of a draining one.
    world.until("qwen", "ready", |model| reason(model, "Ready") == "Deployed").await;
    let before = world.running().await[0].name_any();
    world.pods().delete(&before, &DeleteParams::default()).await.unwrap();
    let leaves = |model: &_| reason(model, "Ready") != "Deployed";
    world.until("qwen", "seen to go", leaves).await;
    let client = gateway.client();
    let answer = blocking(move || client.chat("qwen", true, 4)).await;
    assert!(answer.is_whole_stream(), "{answer:?}");
    assert_ne!(world.running().await[0].name_any(), before);
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 40)]);
}

/// No decision covers a model that is not served. The next leader ends its leftovers all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_of_a_model_that_became_invalid_without_a_leader_end_and_return_their_memory() {
    let world = Installation::new("strangers-spoiled", 2, "128Gi").await;
    world.model("qwen", "40Gi", "", json!({})).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    gateway.signal(Signal::SIGKILL);
    gateway.wait_owned().await;
    world.model("qwen", "40Gi", "", json!({"dependencies": ["nobody"]})).await;
    let _gateway = world.gateway("gateway-1", "");
    world.until("qwen", "refused", |model| reason(model, "Accepted") == "DependencyMissing").await;
    world.until_reserved("nothing", <[_]>::is_empty).await;
    assert_eq!(world.running().await.len(), 0);
}

/// The namespace's quota of Pods denies every Pod, and waiting requests get that reason long before the start's own
/// deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_the_namespace_denies_says_so() {
    let world = Installation::new("strangers-denied", 2, "128Gi").await;
    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}},
    });
    let quotas: kube::Api<k8s_openapi::api::core::v1::ResourceQuota> = world.site.namespace.api();
    quotas.patch("none", &PatchParams::apply(FIELD_MANAGER), &Patch::Apply(&quota)).await.unwrap();
    let counted = |found: &Option<k8s_openapi::api::core::v1::ResourceQuota>| {
        found.as_ref().and_then(|found| found.status.as_ref()?.hard.as_ref()).is_some()
    };
    wait::until(&quotas, "none", "counted", counted).await.unwrap();
    world.model("qwen", "40Gi", "", json!({"startTimeout": "5m", "queue": {"maxWait": "20s"}})).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    let refused = blocking(move || client.chat("qwen", false, 4)).await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    let why = |model: &rouse_controllers::crd::InferenceModel| {
        let status = model.status.clone().unwrap_or_default();
        status.conditions.iter().any(|it| it.type_ == "Available" && it.message.contains("quota"))
    };
    world.until("qwen", "told why", why).await;
    world.until_reserved("nothing", <[_]>::is_empty).await;
}
