//! What goes wrong with Pods and stubs.

use std::io::{Read as _, Write as _};

use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PropagationPolicy},
};
use rouse_cluster::wait;
use serde_json::json;

use super::Duo;
use crate::{
    client::{Answer, Client, chat_body, request},
    pairs::{annotation, label},
    support::MANAGER,
    world::aside,
};

/// A requester is killed without grace and its accelerator handed on at once, while its engine is awake. The engines know what is on
/// the accelerator and die where there is too little: one that is launched before the other sleeps does not live.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_accelerator_that_is_handed_on_at_once_gets_no_engine_before_the_former_one_sleeps() {
    let duo = Duo::new("dual-race", 1, "8Gi", "").await;
    duo.ask("first", 1, 1, "--sleep-time 1500ms").await;
    let (requester, sleeper) = duo.served("first").await;
    duo.ask("second", 1, 1, "").await;
    let orphan =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
    duo.sets().delete("first", &orphan).await.unwrap();
    duo.world.pods().delete(&requester.name_any(), &DeleteParams::default().grace_period(0)).await.unwrap();
    let (_, provider) = duo.served("second").await;
    let (_, all) = duo.pairs("second").await;
    assert_eq!(all.len(), 1, "none of its engines died");
    assert_eq!(provider.status.unwrap().container_statuses.unwrap()[0].restart_count, 0);
    assert_eq!(duo.asleep("first").await.uid(), sleeper.uid());
}

/// A client has all its tokens, from a requester that is told to go meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_through_a_requester_that_is_deleted_ends_whole() {
    let duo = Duo::new("dual-stream", 1, "8Gi", "").await;
    duo.ask("chat", 1, 1, "--itl 20ms").await;
    let (requester, provider) = duo.served("chat").await;
    let ip = requester.status.as_ref().unwrap().pod_ip.clone().unwrap();
    let client = Client::new(format!("{ip}:8082").parse().unwrap());
    let (begun, begins) = tokio::sync::oneshot::channel();
    let stream = tokio::task::spawn_blocking(move || {
        let mut socket = client.connect();
        let text = request("/v1/chat/completions", "", &chat_body("chat", true, 100));
        socket.write_all(text.as_bytes()).unwrap();
        let mut bytes = vec![0; 16];
        socket.read_exact(&mut bytes).unwrap();
        begun.send(()).unwrap();
        socket.read_to_end(&mut bytes).ok();
        Answer::parse(&bytes).unwrap()
    });
    begins.await.unwrap();
    duo.scale("chat", 0).await;
    let answer = stream.await.unwrap();
    assert!(answer.is_whole_stream(), "{answer:?}");
    assert_eq!(duo.asleep("chat").await.uid(), provider.uid());
}

/// An engine that answers nobody any more holds up its requester no longer than it is given, and is ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_requester_whose_provider_hangs_is_gone_within_the_deadline() {
    let duo = Duo::new("dual-hung", 1, "8Gi", ", drain: 1s, sleep: 2s").await;
    duo.ask("hung", 1, 1, "").await;
    let (_, provider) = duo.served("hung").await;
    let engine = provider.status.as_ref().unwrap().pod_ip.clone().unwrap();
    let engine = Client::new(format!("{engine}:8000").parse().unwrap());
    let hangs = aside(move || engine.raw(&request("/sim/faults", "", r#"{"hang": true}"#))).await;
    assert_eq!(hangs.status, 200, "{}", hangs.text());
    duo.scale("hung", 0).await;
    duo.until("hung", "neither Pod", |requesters, providers| requesters.is_empty() && providers.is_empty())
        .await;
    // What comes next is served by an engine of its own.
    duo.scale("hung", 1).await;
    let (_, next) = duo.served("hung").await;
    assert_ne!(next.uid(), provider.uid());
    assert_eq!(label(&next, "sleeping"), Some("false"));
}

/// What the API server refuses is told to the user, and tried again; once it is mended, that is told as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_a_quota_denies_is_told_of_and_made_when_there_is_room() {
    let duo = Duo::new("dual-quota", 1, "8Gi", "").await;
    let quotas: Api<ResourceQuota> = duo.world.site.namespace.api();
    let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}});
    quotas.patch("one", &PatchParams::apply(MANAGER), &Patch::Apply(&quota)).await.unwrap();
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
    let (requester, _) = duo.served("one").await;
    let mended = |all: &[Pod], _: &[Pod]| {
        all.iter().any(|pod| annotation(pod, "status") == Some(r#"{"Errors":null}"#))
    };
    let (told, _) = duo.until("one", "told that it is mended", mended).await;
    assert_eq!(told[0].uid(), requester.uid());
}
