//! Several gateways: all serve, one decides, and another does when that one is gone.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, ResourceExt as _, api::ListParams};
use nix::sys::signal::Signal;
use rouse_cluster::wait;
use serde_json::json;

use crate::{
    site::LEASE,
    world::{Gateway, World, aside, reason},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_waits_at_any_gateway_starts_its_model_and_is_served_there() {
    let world = World::new("replicas-any", 4, "128Gi").await;
    world.model("one", "40Gi", "", json!({})).await;
    world.model("two", "40Gi", "", json!({})).await;
    let mut gateways = vec![world.gateway("gateway-0", ""), world.gateway("gateway-1", "")];
    // Whichever of them leads, one of these models is asked for at the other.
    for (gateway, model) in gateways.iter().zip(["one", "two"]) {
        let client = gateway.client();
        let answer = aside(move || client.chat(model, true, 4)).await;
        assert!(answer.is_whole_stream(), "{answer:?}");
    }
    let pods = world.running().await;
    assert_eq!(pods.len(), 2);
    // Both know both by now, and route by that.
    for gateway in &gateways {
        for model in ["one", "two"] {
            let client = gateway.client();
            assert_eq!(aside(move || client.chat(model, false, 4)).await.status, 200);
        }
    }
    assert_eq!(world.running().await.len(), 2, "nothing was started twice");

    // What comes of a start that fails is told at both, by the one that decides and by the one that does not.
    world.model("broken", "40Gi", "--fault exit-at-start=3", json!({})).await;
    world.until("broken", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let ask = async |gateway: &Gateway| {
        let client = gateway.client();
        aside(move || client.chat("broken", false, 4)).await
    };
    let answers = async { tokio::join!(ask(&gateways[0]), ask(&gateways[1])) };
    let answers = tokio::time::timeout(Duration::from_secs(60), answers).await.expect("somebody still waits");
    for answer in [answers.0, answers.1] {
        assert_eq!(answer.status, 503, "{answer:?}");
        assert!(answer.text().contains("exited:3"), "{answer:?}");
    }

    // One is killed. Whether it led or not, the other serves on, at once and from nothing.
    let killed = gateways.remove(0);
    killed.signal(Signal::SIGKILL);
    let client = gateways[0].client();
    for model in ["one", "two"] {
        assert_eq!(aside(move || client.chat(model, false, 4)).await.status, 200);
    }
    world.model("three", "40Gi", "", json!({})).await;
    world.until("three", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let cold = tokio::time::timeout(Duration::from_secs(60), aside(move || client.chat("three", false, 4)));
    assert_eq!(cold.await.unwrap().status, 200);
    assert_eq!(world.booked().await.len(), 3);
}

/// One that was stopped while it led, and goes on when another leads, has all that it knew and may do nothing with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_was_stopped_changes_nothing_when_it_goes_on() {
    let world = World::new("replicas-stopped", 4, "128Gi").await;
    world.model("one", "40Gi", "", json!({"cooldownPeriod": "3s"})).await;
    world.model("two", "40Gi", "", json!({})).await;
    let first = world.gateway("gateway-0", "");
    let client = first.client();
    assert_eq!(aside(move || client.chat("two", false, 4)).await.status, 200);
    world.until("two", "ready", |model| reason(model, "Ready") == "Deployed").await;
    let second = world.gateway("gateway-1", "");
    let leases: Api<Lease> = world.site.namespace.api();
    let holder = |lease: &Option<Lease>| {
        let spec = lease.as_ref().and_then(|lease| lease.spec.as_ref());
        spec.and_then(|spec| spec.holder_identity.clone()).unwrap_or_default()
    };
    assert!(holder(&leases.get_opt(LEASE).await.unwrap()).starts_with("gateway-0"));
    first.signal(Signal::SIGSTOP);
    let taken = |lease: &Option<Lease>| holder(lease).starts_with("gateway-1");
    wait::until(&leases, LEASE, "the other to lead", taken).await.unwrap();
    // What the second decides meanwhile: one is started, and put away again.
    let client = second.client();
    assert_eq!(aside(move || client.chat("one", false, 4)).await.status, 200);
    world.until("one", "put away", |model| reason(model, "Ready") == "ScaledToZero").await;
    let versions = || async {
        let deployments = world.deployments().list(&ListParams::default()).await.unwrap().items;
        let pods = world.running().await.into_iter().map(|pod| pod.uid());
        let generations = deployments.into_iter().map(|d| (d.name_any(), d.metadata.generation));
        (generations.collect::<Vec<_>>(), pods.collect::<Vec<_>>(), world.booked().await)
    };
    let before = versions().await;
    first.signal(Signal::SIGCONT);
    // It serves, as one that does not lead.
    for model in ["two", "one"] {
        let client = first.client();
        assert_eq!(aside(move || client.chat(model, false, 4)).await.status, 200, "{model}");
    }
    assert!(holder(&leases.get_opt(LEASE).await.unwrap()).starts_with("gateway-1"));
    world.until("one", "put away", |model| reason(model, "Ready") == "ScaledToZero").await;
    let after = versions().await;
    assert_eq!(before.1, after.1, "the same Pods");
    assert_eq!(before.2, after.2, "the same bookings");
}
