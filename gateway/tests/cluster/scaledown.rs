//! Pods that end while streams run on them: every stream ends whole, and the Pod ends after the last one.

use crate::{
    installation::{ClusterGateway, Installation, blocking, reason},
    streams::HeldClientStream,
};
use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse_cluster::{LinkMode, wait};
use rouse_controllers::crd::{InferenceModel, inference_model::EngineState};
use serde_json::json;

/// At 20 ms each, longer than it takes to stall the engines.
const TOKENS: u32 = 300;
/// Stalls the engines, so that no stream ends before the step that it must outlive has begun.
const STILL: &str = r#"{"stall-streams": true}"#;
const ON: &str = r#"{"stall-streams": null}"#;

fn drains(model: &InferenceModel, replica: u32) -> bool {
    let engines = model.status.as_ref().map(|status| status.engines.as_slice()).unwrap_or_default();
    engines.iter().any(|engine| engine.replica == replica && engine.state == EngineState::Draining)
}

/// Asserts that all streams end whole, and that the Pod exists until then.
async fn outlives(world: &Installation<'_>, pod: &Pod, streams: Vec<HeldClientStream>) {
    let pods = world.pods();
    let name = pod.name_any();
    let told = wait::until(&pods, &name, "it to be told to go", |pod| {
        pod.as_ref().is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())
    });
    tokio::select! {
        biased;
        _ = join_all(streams.into_iter().map(HeldClientStream::finish_whole)) => {}
        told = told => panic!("the Pod goes under its streams: {:?}", told.unwrap()),
    }
    wait::until(&pods, &name, "it to go", Option::is_none).await.unwrap();
}

/// The leader does not learn of the streams, because their gateway cannot reach the API server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_seems_idle_goes_behind_the_streams_of_a_gateway_that_nobody_hears() {
    let world = Installation::new("unheard", 2, "64Gi").await;
    world.model("qwen", "40Gi", "--itl 20ms", json!({"cooldownPeriod": "1s"})).await;
    let leads = world.gateway("gateway-0", "");
    let client = leads.client();
    let link = world.site.cluster.link().await.unwrap();
    let kubeconfig = link.kubeconfig(&world.site.account).unwrap();
    let unheard = [world.gateway_by("gateway-1", "", &kubeconfig, &[])];
    unheard[0].until_ready().await;
    assert_eq!(blocking(move || client.chat("qwen", true, 100)).await.status, 200);
    link.set(LinkMode::Cut);
    let pods = world.running().await;
    let streams = HeldClientStream::open_each(&unheard, "qwen", TOKENS, 2).await;
    world.faults(&pods, STILL).await;
    world.until("qwen", "put away", |model| drains(model, 0)).await;
    world.faults(&pods, ON).await;
    outlives(&world, &pods[0], streams).await;
    world.until("qwen", "put away", |model| reason(model, "Ready") == "ScaledToZero").await;
    world.until_reserved("nothing", <[_]>::is_empty).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edited_template_and_a_lower_number_end_no_stream_of_any_gateway() {
    let world = Installation::new("goes", 4, "256Gi").await;
    let several = json!({"maxReplicas": 2, "maxConcurrency": 2});
    world.model("qwen", "40Gi", "--itl 20ms", several.clone()).await;
    let gateways: Vec<ClusterGateway> = (0..3).map(|n| world.gateway(&format!("gateway-{n}"), "")).collect();
    // Three streams through each gateway. An engine takes two of a gateway's streams, so each gateway has one at the
    // second engine.
    let streams = HeldClientStream::open_each(&gateways, "qwen", TOKENS, 3).await;
    let pods = world.running().await;
    assert_eq!(pods.len(), 2);
    world.faults(&pods, STILL).await;
    let is =
        |pod: &&Pod, replica: &str| pod.annotations().get("rouse.dev/replica").is_some_and(|r| r == replica);
    let of = |replica: &str| pods.iter().find(|pod| is(pod, replica)).cloned().expect("it has a Pod");

    let one = json!({"maxReplicas": 1, "maxConcurrency": 2});
    world.model("qwen", "40Gi", "--itl 20ms", one.clone()).await;
    world.until("qwen", "one too many", |model| drains(model, 1)).await;
    world.faults(&pods, ON).await;
    outlives(&world, &of("1"), streams).await;
    let left: Vec<_> = world.running().await.into_iter().map(|pod| pod.uid()).collect();
    assert_eq!(left, [of("0").uid()]);

    let first = [of("0")];
    let streams = HeldClientStream::open_each(&gateways, "qwen", TOKENS, 2).await;
    world.faults(&first, STILL).await;
    world.model("qwen", "40Gi", "--itl 19ms", one).await;
    world.until("qwen", "outdated", |model| drains(model, 0)).await;
    world.faults(&first, ON).await;
    let client = gateways[1].client();
    let next = tokio::spawn(blocking(move || client.chat("qwen", true, 4)));
    outlives(&world, &of("0"), streams).await;
    let answer = next.await.unwrap();
    assert!(answer.is_whole_stream(), "{answer:?}");
    world.until_reserved("the next one alone", |booked| booked == [("qwen".to_owned(), 40)]).await;
}
