//! Variants of one model side by side: each has its own Deployment, reservations and numbers.

use std::collections::BTreeMap;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use nix::sys::signal::Signal;
use rouse_cluster::wait;
use rouse_controllers::{
    crd::{
        InferenceModel,
        inference_model::{EngineState, LearnedStatus},
    },
    label,
};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    installation::{Installation, blocking, reason},
    support::FIELD_MANAGER,
};

/// Two variants that differ in cost and memory only, so that their Pods have the same template.
fn variants(large: Value) -> Value {
    let mut large_variant = json!({"name": "large", "cost": 10, "memory": "80Gi"});
    crate::installation::merge(&mut large_variant, large);
    json!({"cooldownPeriod": "10m", "variants": [large_variant, {"name": "small", "cost": 1, "memory": "40Gi"}]})
}

/// Replicas, sleepers and desired replicas of each variant in the model's status.
fn counts(model: &InferenceModel) -> Vec<(&str, u32, u32, u32)> {
    let variants = model.status.as_ref().map(|status| status.variants.as_slice()).unwrap_or_default();
    variants.iter().map(|own| (own.name.as_str(), own.replicas, own.asleep, own.desired)).collect()
}

fn awake(model: &InferenceModel) -> usize {
    let engines = model.status.as_ref().map(|status| status.engines.as_slice()).unwrap_or_default();
    engines.iter().filter(|engine| engine.state == EngineState::Awake).count()
}

/// Returns the uids of the running Pods, by variant.
async fn pods_by_variant(world: &Installation<'_>) -> BTreeMap<String, Option<String>> {
    let variant = |pod: &Pod| pod.labels().get(label::VARIANT).cloned().unwrap_or_default();
    world.running().await.iter().map(|pod| (variant(pod), pod.uid())).collect()
}

/// Returns the Deployments' names without the hashes of their templates.
async fn deployments(world: &Installation<'_>) -> Vec<String> {
    let all = world.deployments().list(&ListParams::default()).await.unwrap().items;
    let mut names: Vec<String> = all.iter().map(kube::ResourceExt::name_any).collect();
    names.iter_mut().for_each(|name| name.truncate(name.rfind('-').unwrap()));
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cheaper_variant_serves_the_first_request_and_each_has_a_deployment_of_its_own() {
    let world = Installation::new("variants", 2, "256Gi").await;
    world.model("qwen", "40Gi", "", variants(json!({}))).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    // While a leader does not know the pool's accelerators, each variant is refused in turn, so any of them may start
    // first.
    world.until_accelerators().await;
    let answer = blocking(move || client.chat("qwen", false, 4)).await;
    assert_eq!((answer.status, answer.header("x-rouse-cold-start")), (200, "cold"), "{}", answer.text());
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 40)]);
    assert_eq!(deployments(&world).await, ["qwen-small"]);
    let first = [("small", 1, 0, 1), ("large", 0, 0, 0)];
    world.until("qwen", "one engine of the cheaper variant", |model| counts(model) == first).await;

    world.model("qwen", "40Gi", "", variants(json!({"minReplicas": 1}))).await;
    let both = [("small", 1, 0, 1), ("large", 1, 0, 1)];
    let serves = |model: &InferenceModel| counts(model) == both && awake(model) == 2;
    let model = world.until("qwen", "an engine of each variant", serves).await;
    let status = model.status.unwrap();
    assert_eq!(status.replicas, 2);
    let start = |learned: &LearnedStatus| learned.start_millis;
    let starts: Vec<_> = status.variants.iter().map(|own| own.learned.as_ref().and_then(start)).collect();
    assert!(starts.iter().all(Option::is_some), "each start was measured: {starts:?}");
    assert_eq!(status.learned.as_ref().and_then(start), starts[0], "the model's own is the cheapest one's");
    assert_eq!(deployments(&world).await, ["qwen-large", "qwen-small"]);
    let mut reserved = world.reserved_gib().await;
    reserved.sort();
    assert_eq!(reserved, [("qwen".to_owned(), 40), ("qwen".to_owned(), 80)]);
    let pods = pods_by_variant(&world).await;
    assert_eq!(pods.keys().collect::<Vec<_>>(), ["large", "small"]);

    gateway.signal(Signal::SIGKILL);
    gateway.wait_owned().await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    let answer = blocking(move || client.chat("qwen", false, 4)).await;
    assert_eq!((answer.status, answer.header("x-rouse-cold-start")), (200, ""), "{}", answer.text());
    assert_eq!(pods_by_variant(&world).await, pods, "the next leader keeps the engine of each variant");

    world.models().delete("qwen", &DeleteParams::default()).await.unwrap();
    let mut changed = wait::changes(&world.deployments());
    let removed = async {
        while !deployments(&world).await.is_empty() {
            changed.next().await;
        }
    };
    timeout(wait::WAIT_TIMEOUT, removed).await.expect("both Deployments go with their model");
    world.until_reserved("nothing", <[_]>::is_empty).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_variant_that_is_removed_goes_and_the_other_serves_on() {
    let world = Installation::new("variants-fewer", 2, "256Gi").await;
    world.model("qwen", "40Gi", "", variants(json!({"minReplicas": 1}))).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    let before = world.until("qwen", "large to serve", |model| awake(model) > 0).await;
    assert!(counts(&before).iter().any(|(name, ..)| *name == "large"));
    let one = json!({"cooldownPeriod": "10m", "minReplicas": 1, "variants": [{"name": "small", "cost": 1}]});
    world.model("qwen", "40Gi", "", one).await;
    let serves = |model: &InferenceModel| counts(model) == [("small", 1, 0, 1)] && awake(model) == 1;
    world.until("qwen", "only the variant that is left", serves).await;
    world.until_reserved("that one's", |booked| booked == [("qwen".to_owned(), 40)]).await;
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_autoscaler_reads_and_sets_the_number_of_engines_by_the_subresource() {
    let world = Installation::new("variants-scale", 1, "64Gi").await;
    let more = json!({"replicas": 1, "maxReplicas": 3, "saturation": {"actuation": "external"}});
    world.model("qwen", "40Gi", "", more).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    world.until("qwen", "ready", |model| reason(model, "Ready") == "Deployed").await;
    let scale = world.models().get_scale("qwen").await.unwrap();
    assert_eq!(scale.spec.unwrap().replicas, Some(1));
    let status = scale.status.unwrap();
    assert_eq!(status.replicas, 1);
    let selected = ListParams::default().labels(&status.selector.unwrap());
    let pods = world.pods().list(&selected).await.unwrap().items;
    assert_eq!(pods.len(), 1, "the selector is that of the engines' Pods");

    let two = Patch::Merge(json!({"spec": {"replicas": 2}}));
    world.models().patch_scale("qwen", &PatchParams::apply(FIELD_MANAGER), &two).await.unwrap();
    assert_eq!(world.models().get("qwen").await.unwrap().spec.replicas, Some(2));
}
