//! Failures of Pods and stubs.

use std::io::{Read as _, Write as _};

use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use nix::sys::signal::Signal;
use rouse_cluster::wait;
use serde_json::json;
use tokio::time::{Duration, Instant};

use super::{
    DualPodsFixture,
    all_modes::{engines_of, for_all_kinds, for_all_kinds_small},
};
use crate::{
    client::{TestClient, TestResponse, chat_body, request},
    pairs::{annotation, label},
    support::FIELD_MANAGER,
};

/// A client gets all its tokens through a requester that is deleted meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_through_a_requester_that_is_deleted_ends_whole() {
    let duo = DualPodsFixture::new("dual-stream", 1, "8Gi", "").await;
    duo.ask("chat", 1, 1, "--itl 20ms").await;
    let (requester, provider) = duo.until_served("chat").await;
    let ip = requester.status.as_ref().unwrap().pod_ip.clone().unwrap();
    let client = TestClient::new(format!("{ip}:8082").parse().unwrap());
    let (begun, begins) = tokio::sync::oneshot::channel();
    let stream = tokio::task::spawn_blocking(move || {
        let mut socket = client.connect();
        let text = request("/v1/chat/completions", "", &chat_body("chat", true, 100));
        socket.write_all(text.as_bytes()).unwrap();
        let mut bytes = vec![0; 16];
        socket.read_exact(&mut bytes).unwrap();
        begun.send(()).unwrap();
        socket.read_to_end(&mut bytes).ok();
        TestResponse::parse(&bytes).unwrap()
    });
    begins.await.unwrap();
    duo.scale("chat", 0).await;
    let answer = stream.await.unwrap();
    assert!(answer.is_whole_stream(), "{answer:?}");
    assert_eq!(duo.until_asleep("chat").await.uid(), provider.uid());
}

/// An engine that stops answering delays its requester no longer than the deadline, and is ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_requester_whose_provider_hangs_is_gone_within_the_deadline() {
    for_all_kinds_small("dual-hung", ", drain: 1s, sleep: 2s", async |duo| {
        duo.demand("hung", "").await;
        let (_, provider) = duo.pair("hung").await;
        duo.world.runner.signal(&provider, Signal::SIGSTOP);
        duo.scale("hung", 0).await;
        duo.watch_for("hung", "no requester", |requesters, _| requesters.is_empty()).await;
        let gone = |_: &[Pod], all: &[Pod]| all.iter().all(|own| own.uid() != provider.uid());
        duo.watch_for("hung", "no provider", gone).await;
        // The next requester gets a new engine.
        duo.scale("hung", 1).await;
        let (_, next) = duo.pair("hung").await;
        assert_eq!(label(&next, "sleeping"), Some("false"));
    })
    .await;
}

/// The gateway ends the engine as soon as the engine has denied the sleep for long enough, and does not wait for the
/// sleep timeout: 50 s for 40 GiB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_takes_the_order_to_sleep_and_stays_awake_makes_room_for_the_next() {
    for_all_kinds("dual-denied", 1, "", async |duo| {
        duo.demand("awake", "--fault ignore-sleep").await;
        let (_, provider) = duo.pair("awake").await;
        let before = engines_of(&provider);
        let began = Instant::now();
        duo.scale("awake", 0).await;
        duo.watch_for("awake", "no requester", |requesters, _| requesters.is_empty()).await;
        duo.scale("awake", 1).await;
        let (_, next) = duo.pair("awake").await;
        let waited = began.elapsed();
        assert_ne!(engines_of(&next), before);
        assert!(waited < Duration::from_secs(45), "{waited:?}");
    })
    .await;
}

/// The gateway reports an API server's refusal to the user and retries. Once the retry succeeds, it reports that as
/// well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_a_quota_denies_is_told_of_and_made_when_there_is_room() {
    let duo = DualPodsFixture::new("dual-quota", 1, "8Gi", "").await;
    let quotas: Api<ResourceQuota> = duo.world.site.namespace.api();
    let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}});
    quotas.patch("one", &PatchParams::apply(FIELD_MANAGER), &Patch::Apply(&quota)).await.unwrap();
    let counted = |found: &Option<ResourceQuota>| {
        found.as_ref().and_then(|found| found.status.as_ref()?.hard.as_ref()).is_some()
    };
    wait::until(&quotas, "one", "counted", counted).await.unwrap();
    duo.ask("one", 1, 1, "").await;
    let denied = |all: &[Pod], _: &[Pod]| {
        all.iter().any(|pod| annotation(pod, "status").is_some_and(|text| text.contains("exceeded quota")))
    };
    duo.until("one", "told of the quota", denied).await;
    quotas.delete("one", &DeleteParams::default()).await.unwrap();
    let (requester, _) = duo.until_served("one").await;
    let mended = |all: &[Pod], _: &[Pod]| {
        all.iter().any(|pod| annotation(pod, "status") == Some(r#"{"Errors":null}"#))
    };
    let (told, _) = duo.until("one", "told that it is mended", mended).await;
    assert_eq!(told[0].uid(), requester.uid());
}
