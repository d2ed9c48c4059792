//! Failures of launchers and of their engines.

use std::net::SocketAddr;

use http::Method;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::platform::launcher::instance_id;
use rouse_net::http_client::HttpClient;
use serde_json::{Value, json};

use super::super::DualPodsFixture;
use crate::{
    client::{TestClient, request},
    events,
    installation::blocking,
    launched::{engines, generations},
    pairs::{address, annotation, chat_with_requester, is_ready},
};

impl DualPodsFixture {
    /// Waits until another requester has replaced this one and is ready.
    async fn replaced(&self, name: &str, before: &Pod) {
        let other = |requesters: &[Pod], _: &[Pod]| matches!(requesters, [own] if own.uid() != before.uid() && is_ready(own));
        self.until_launchers(name, "another requester", other).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_instance_recovery_after_its_instance_was_deleted() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-killed", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    let (requester, launcher) = duo.until_launched("one").await;
    let there = duo.launcher_at(&launcher).await;
    // Every Pod of the cluster can reach this port.
    let stranger = HttpClient::new(SocketAddr::new(address(&launcher), 8001), None);
    for (method, path) in [(Method::PUT, "/v2/vllm/instances/mine"), (Method::DELETE, "/v2/vllm/instances")] {
        let body = json!({"options": "--port 9000"});
        assert_eq!(stranger.call(method, path, Some(&body), None, WAIT_TIMEOUT).await.unwrap().status, 401);
    }
    let all = there.call(Method::DELETE, "/v2/vllm/instances", None, None, WAIT_TIMEOUT).await.unwrap();
    assert!(all.success());
    duo.replaced("one", &requester).await;
    assert_eq!(duo.until_launched("one").await.1.uid(), launcher.uid());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_instance_recovery_after_its_process_died() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-died", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    let (requester, launcher) = duo.until_launched("one").await;
    let port = u16::try_from(engines(&launcher)[0]["port"].as_u64().unwrap()).unwrap();
    let engine = TestClient::new(SocketAddr::new(address(&launcher), port));
    let dies = blocking(move || engine.raw(&request("/sim/faults", "", r#"{"die-mid-stream": 2}"#))).await;
    assert_eq!(dies.status, 200, "{}", dies.text());
    assert!(!chat_with_requester(address(&requester), "one").await.is_whole_stream());
    duo.replaced("one", &requester).await;
    let (_, same) = duo.until_launched("one").await;
    assert_eq!(same.uid(), launcher.uid());
    assert_ne!(generations(&same), generations(&launcher));
    assert_eq!(engines(&same).len(), 1, "of the one that died nothing is left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bound_launcher_deletion_replaces_its_requester_and_the_launcher() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-deleted", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    let (requester, launcher) = duo.until_launched("one").await;
    duo.delete(&launcher).await;
    duo.replaced("one", &requester).await;
    assert_ne!(duo.until_launched("one").await.1.uid(), launcher.uid());
}

/// The stray engine stands for a late order of a replaced leader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_nobody_knows_of_is_ended() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-stray", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    let (_, launcher) = duo.until_launched("one").await;
    let there = duo.launcher_at(&launcher).await;
    let device = annotation(&launcher, "accelerators").unwrap().to_owned();
    let stray = instance_id(rouse::pairing::ids::EngineFingerprint(1), &[device.as_str().into()]);
    let path = format!("/v2/vllm/instances/{stray}");
    let body = json!({"options": "--port 9000", "gpu_uuids": [device], "annotations": {"rouse.dev/generation": "1"}});
    let since = there.get("/v2/vllm/instances?detail=false", WAIT_TIMEOUT).await.unwrap();
    let since = serde_json::from_slice::<Value>(&since.body).unwrap()["revision"].clone();
    assert_eq!(there.call(Method::PUT, &path, Some(&body), None, WAIT_TIMEOUT).await.unwrap().status, 201);
    let watch = format!("/v2/vllm/instances/watch?since={since}");
    let mut lines = there.stream_lines(&watch, None, WAIT_TIMEOUT, 1 << 20).await.unwrap();
    let gone = async {
        while let Some(line) = lines.next().await.unwrap() {
            let event: Value = serde_json::from_slice(&line).unwrap();
            if event["type"] == "DELETED" && event["object"]["instance_id"] == stray.as_str() {
                return;
            }
        }
        panic!("the launcher ended the stream");
    };
    tokio::time::timeout(WAIT_TIMEOUT, gone).await.unwrap();
    assert_eq!(
        generations(&duo.until_launched("one").await.1),
        generations(&launcher),
        "the other one serves"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_that_nobody_needs_is_ended_and_one_with_a_sleeper_is_not() {
    let duo = DualPodsFixture::with_launchers_of("dual-launcher-idle", 1, ", idle: 1s", "").await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    duo.until_launched("one").await;
    duo.scale("one", 0).await;
    let launcher = duo.until_unbound("one", 1).await;
    duo.scale("one", 1).await;
    assert_eq!(duo.until_launched("one").await.1.uid(), launcher.uid());
    duo.scale("one", 0).await;
    duo.until_unbound("one", 1).await;
    // The sleeper ends with its configuration.
    duo.config("one", "--itl 20ms").await;
    duo.until_launchers("one", "no launcher", |_, launchers| launchers.is_empty()).await;
}

/// The gateway creates the next launcher ten seconds after the first has failed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn launchers_that_crash_are_not_made_again_without_pause() {
    let duo = DualPodsFixture::with_launchers_of("dual-launcher-crash", 1, "", "--no-such-flag").await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    let (_, first) = duo.until_launchers("one", "a launcher", |_, launchers| launchers.len() == 1).await;
    let other = |_: &[Pod], launchers: &[Pod]| matches!(launchers, [own] if own.uid() != first[0].uid());
    let (_, second) = duo.until_launchers("one", "another launcher", other).await;
    let made = |pod: &Pod| pod.creation_timestamp().unwrap().0;
    let between = made(&second[0]).duration_since(made(&first[0]));
    assert!(between.as_secs() >= 10, "{between:?}");
    let (requesters, _) =
        duo.until_launchers("one", "a requester", |requesters, _| requesters.len() == 1).await;
    let told = events::until_event_with(&duo.world, &requesters[0], "Waiting", "was never ready").await;
    assert!(told.message.as_ref().unwrap().contains("the container exited with code 2"), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_requester_asks_for_in_vain_is_said_until_it_is_there() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-none", 1).await;
    duo.request("one", 1, 1).await;
    let says = |text: &'static str| {
        move |requesters: &[Pod], _: &[Pod]| {
            let status = requesters.first().and_then(|own| annotation(own, "status"));
            status.is_some_and(|status| status.contains(text))
        }
    };
    duo.until_launchers("one", "told what is missing", says("there is no InferenceServerConfig")).await;
    duo.config("one", "'").await;
    duo.until_launchers("one", "told what is wrong", says("a quotation begun with")).await;
    duo.config("one", "--no-such-flag").await;
    duo.until_launchers("one", "told that it ends", says("exited with code 64 before it answered")).await;
    duo.config("one", "").await;
    duo.until_launched("one").await;
    duo.until_launchers("one", "told that it is mended", says(r#"{"Errors":null}"#)).await;
}
