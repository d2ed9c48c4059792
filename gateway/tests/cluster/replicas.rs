//! Several gateways: all serve, one leads, and another leads once that one is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{Api, ResourceExt as _, api::ListParams};
use nix::sys::signal::Signal;
use rouse_cluster::wait::{self, WAIT_TIMEOUT};
use serde_json::json;

use crate::{
    client::TestResponse,
    installation::{ClusterGateway, Installation, blocking, reason},
    site::LEASE_NAME,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_waits_at_any_gateway_starts_its_model_and_is_served_there() {
    let world = Installation::new("replicas-any", 4, "128Gi").await;
    world.model("one", "40Gi", "", json!({})).await;
    world.model("two", "40Gi", "", json!({})).await;
    let mut gateways = vec![world.gateway("gateway-0", ""), world.gateway("gateway-1", "")];
    // Whichever gateway leads, the other one gets a request for one of these models.
    for (gateway, model) in gateways.iter().zip(["one", "two"]) {
        let client = gateway.client();
        let answer = blocking(move || client.chat(model, true, 4)).await;
        assert!(answer.is_whole_stream(), "{answer:?}");
    }
    let pods = world.running().await;
    assert_eq!(pods.len(), 2);
    // Both gateways learn of both engines from the statuses and route by that, so no request waits.
    for gateway in &gateways {
        for model in ["one", "two"] {
            at_once(gateway, model).await;
        }
    }
    let same = world.running().await;
    let names = |pods: &[Pod]| pods.iter().map(|pod| pod.name_any()).collect::<BTreeSet<_>>();
    assert_eq!(names(&same), names(&pods), "nothing was started twice");

    // Both gateways report the outcome of a failed start, the leader and the follower.
    world.model("broken", "40Gi", "--fault exit-at-start=3", json!({})).await;
    world.until("broken", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    // A follower learns of a model by its own watch.
    for gateway in &gateways {
        let known = async {
            while !lists(gateway, "broken").await {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(WAIT_TIMEOUT, known).await.expect("it is listed");
    }
    let answers = async { tokio::join!(ask(&gateways[0], "broken"), ask(&gateways[1], "broken")) };
    let answers = tokio::time::timeout(Duration::from_secs(60), answers).await.expect("somebody still waits");
    for answer in [answers.0, answers.1] {
        assert_eq!(answer.status, 503, "{answer:?}");
        assert!(answer.text().contains("exited:3"), "{answer:?}");
    }

    // The leader is killed: the other gateway continues to serve without a pause.
    let holder = world.site.holder().await;
    let leads = usize::from(!holder.starts_with("gateway-0"));
    assert!(holder.starts_with(&format!("gateway-{leads}")), "{holder:?} leads");
    let killed = gateways.remove(leads);
    killed.signal(Signal::SIGKILL);
    killed.wait_owned().await;
    for model in ["one", "two"] {
        let answer = ask(&gateways[0], model).await;
        assert_eq!((answer.status, answer.header("server-timing")), (200, ""), "{model} was waited for");
    }
    let client = gateways[0].client();
    world.model("three", "40Gi", "", json!({})).await;
    world.until("three", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let cold =
        tokio::time::timeout(Duration::from_secs(60), blocking(move || client.chat("three", false, 4)));
    assert_eq!(cold.await.unwrap().status, 200);
    assert_eq!(world.reserved_gib().await.len(), 3);
}

async fn lists(gateway: &ClusterGateway, model: &'static str) -> bool {
    let client = gateway.client();
    blocking(move || client.get("/v1/models").text().contains(model)).await
}

async fn ask(gateway: &ClusterGateway, model: &'static str) -> TestResponse {
    let client = gateway.client();
    blocking(move || client.chat(model, false, 4)).await
}

/// Waits until this gateway serves a request without a wait, which it does once it has read of the model's engine.
async fn at_once(gateway: &ClusterGateway, model: &'static str) {
    let served = async {
        loop {
            let answer = ask(gateway, model).await;
            assert_eq!(answer.status, 200, "{model}: {answer:?}");
            // The header lists the parts of a wait, if the request waited.
            if answer.header("server-timing").is_empty() {
                return;
            }
        }
    };
    let served = tokio::time::timeout(WAIT_TIMEOUT, Box::pin(served)).await;
    assert!(served.is_ok(), "requests for {model} go on to wait");
}

/// A leader that was stopped, and resumes while another leads, has all its knowledge and must not act on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_was_stopped_changes_nothing_when_it_goes_on() {
    let world = Installation::new("replicas-stopped", 4, "128Gi").await;
    world.model("one", "40Gi", "", json!({"cooldownPeriod": "3s"})).await;
    world.model("two", "40Gi", "", json!({})).await;
    let first = world.gateway("gateway-0", "");
    let client = first.client();
    assert_eq!(blocking(move || client.chat("two", false, 4)).await.status, 200);
    world.until("two", "ready", |model| reason(model, "Ready") == "Deployed").await;
    let second = world.gateway("gateway-1", "");
    let leases: Api<Lease> = world.site.namespace.api();
    let holder = |lease: &Option<Lease>| {
        let spec = lease.as_ref().and_then(|lease| lease.spec.as_ref());
        spec.and_then(|spec| spec.holder_identity.clone()).unwrap_or_default()
    };
    assert!(holder(&leases.get_opt(LEASE_NAME).await.unwrap()).starts_with("gateway-0"));
    let wrote = written(&first);
    first.signal(Signal::SIGSTOP);
    let taken = |lease: &Option<Lease>| holder(lease).starts_with("gateway-1");
    wait::until(&leases, LEASE_NAME, "the other to lead", taken).await.unwrap();
    // The second gateway's decisions meanwhile: it starts an engine of `one` and stops it again.
    let client = second.client();
    assert_eq!(blocking(move || client.chat("one", false, 4)).await.status, 200);
    world.until("one", "put away", |model| reason(model, "Ready") == "ScaledToZero").await;
    let state = || async {
        let deployments = world.deployments().list(&ListParams::default()).await.unwrap().items;
        let pods = world.running().await.into_iter().map(|pod| pod.uid());
        let generations =
            deployments.into_iter().map(|d| (d.labels()["rouse.dev/model"].clone(), d.metadata.generation));
        (generations.collect::<BTreeMap<_, _>>(), pods.collect::<BTreeSet<_>>(), world.reserved_gib().await)
    };
    let before = state().await;
    first.signal(Signal::SIGCONT);
    // The first gateway serves as a follower.
    for model in ["two", "one"] {
        let client = first.client();
        assert_eq!(blocking(move || client.chat(model, false, 4)).await.status, 200, "{model}");
    }
    assert!(holder(&leases.get_opt(LEASE_NAME).await.unwrap()).starts_with("gateway-1"));
    world.until("one", "put away", |model| reason(model, "Ready") == "ScaledToZero").await;
    let after = state().await;
    // The second gateway started and stopped `one` once more, and changed nothing of `two`.
    let changes = |(name, generation): (&String, &Option<i64>)| generation.unwrap() - before.0[name].unwrap();
    let mut changes: Vec<i64> = after.0.iter().map(changes).collect();
    changes.sort_unstable();
    assert_eq!(changes, [0, 2], "{before:?} {after:?}");
    assert_eq!(before.1, after.1, "the same Pods");
    assert_eq!(before.2, after.2, "the same bookings");
    assert_eq!(written(&first), wrote, "it wrote though another leads");
}

/// How often the gateway has written a Deployment or a Pod, by its metrics. Only the leader may write them.
fn written(gateway: &ClusterGateway) -> Vec<String> {
    let mine = |kind: &str| format!("rouse_kubernetes_writes_total{{kind=\"{kind}\",outcome=\"done\"}}");
    let (deployments, pods) = (mine("Deployment"), mine("Pod"));
    let counted = gateway.metrics();
    let lines = counted.lines().filter(|line| line.starts_with(&deployments) || line.starts_with(&pods));
    lines.map(str::to_owned).collect()
}
