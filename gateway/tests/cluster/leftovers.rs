//! Objects and requests that ended gateways leave behind.

use std::time::Duration;

use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use nix::sys::signal::Signal;
use rouse_cluster::wait;
use rouse_controllers::crd::GatewayReplica;
use serde_json::json;

use crate::{
    installation::{Installation, blocking, reason},
    site::LEASE_NAME,
    support::FIELD_MANAGER,
};

/// A Pod that no kubelet runs, with this grace in seconds between its deletion and its kill.
async fn pod(world: &Installation<'_>, name: &str, grace: u64) -> Pod {
    let pod = json!({
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": grace,
            "nodeSelector": {"nowhere": "here"},
            "containers": [{"name": "gateway", "image": "none"}],
        },
    });
    world.pods().create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap()
}

fn replicas(world: &Installation<'_>) -> Api<GatewayReplica> {
    world.site.namespace.api()
}

async fn until(world: &Installation<'_>, name: &str, what: &str, there: bool) {
    let fits = |found: &Option<GatewayReplica>| {
        found.as_ref().is_some_and(|found| found.status.is_some()) == there && found.is_some() == there
    };
    wait::until(&replicas(world), name, what, fits).await.unwrap();
}

/// Waits until the gateway reports one waiting request, and returns that report.
pub(crate) async fn a_request_waits(world: &Installation<'_>) -> GatewayReplica {
    let waiting = |found: &Option<GatewayReplica>| {
        found.as_ref().and_then(|found| found.status.as_ref()).is_some_and(|status| status.waiting == 1)
    };
    wait::until(&replicas(world), "gateway-0", "a request to wait", waiting).await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateways_object_goes_with_it_or_with_its_pod() {
    let world = Installation::new("leftovers", 1, "16Gi").await;
    let uid = pod(&world, "gateway-0", 30).await.uid().unwrap();
    let settings = |uid: &str| format!(", podUid: {uid}");
    let (ends, dies) = (world.gateway("gateway-1", ""), world.gateway_with("gateway-0", &settings(&uid)));
    until(&world, "gateway-0", "it to be there", true).await;
    until(&world, "gateway-1", "it to be there", true).await;

    ends.signal(Signal::SIGTERM);
    ends.wait_owned().await;
    assert!(replicas(&world).get_opt("gateway-1").await.unwrap().is_none(), "it ended in order");
    dies.signal(Signal::SIGKILL);
    dies.wait_owned().await;
    assert!(replicas(&world).get_opt("gateway-0").await.unwrap().is_some());
    world.pods().delete("gateway-0", &DeleteParams::default().grace_period(0)).await.unwrap();
    until(&world, "gateway-0", "it to go with its Pod", false).await;
}

/// The grace of a gateway's Pod may end before its waiting requests do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_is_to_end_leaves_the_lease_to_others_before_its_requests_are_over() {
    let world = Installation::new("leftovers-lease", 1, "16Gi").await;
    world.model("slow", "10Gi", "--start-time 60s", json!({})).await;
    // Several times as long as the release of the lease takes to be seen.
    let gateway = world.gateway("gateway-0", "shutdown: {grace: 10s}");
    let client = gateway.client();
    let waits = tokio::spawn(blocking(move || client.chat("slow", false, 4)));
    a_request_waits(&world).await;
    gateway.signal(Signal::SIGTERM);
    let leases: Api<Lease> = world.site.namespace.api();
    let given = |lease: &Option<Lease>| {
        let spec = lease.as_ref().and_then(|lease| lease.spec.as_ref());
        spec.is_some_and(|spec| spec.holder_identity.as_deref().unwrap_or_default().is_empty())
    };
    wait::until(&leases, LEASE_NAME, "it to be given back", given).await.unwrap();
    assert!(!waits.is_finished(), "the request waits for as long as it may");
    // No gateway leads, so the engine cannot start. The gateway's object is removed before its client gets the answer.
    assert_eq!(waits.await.unwrap().status, 503);
    assert!(replicas(&world).get_opt("gateway-0").await.unwrap().is_none());
    gateway.wait_owned().await;
}

/// The Pod's grace counts, whatever the gateway's file says. The test plays the kubelet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_with_a_request_that_waits_leaves_nothing_behind_when_its_kubelet_would_kill_it() {
    const GRACE: u64 = 20;
    let world = Installation::new("leftovers-grace", 1, "16Gi").await;
    world.model("slow", "10Gi", "--start-time 60s", json!({})).await;
    let own = pod(&world, "gateway-0", GRACE).await;
    let mut gateway = world.gateway("gateway-0", "shutdown: {grace: 5m}");
    let client = gateway.client();
    let waits = tokio::spawn(blocking(move || client.chat("slow", false, 4)));
    let object = a_request_waits(&world).await;
    let owners: Vec<_> = object.owner_references().iter().map(|owner| Some(owner.uid.clone())).collect();
    assert_eq!(owners, [own.uid()], "it goes with the Pod of its name");
    gateway.signal(Signal::SIGTERM);
    let ended = async {
        while !gateway.has_ended() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let ended = tokio::time::timeout(Duration::from_secs(GRACE), ended).await;
    assert!(ended.is_ok(), "its kubelet kills it");
    assert_eq!(waits.await.unwrap().status, 503, "its client was told");
    assert!(replicas(&world).get_opt("gateway-0").await.unwrap().is_none());
    assert_eq!(world.site.holder().await, "", "the lease is anybody's");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dead_gateway_waited_for_starts_nothing() {
    let world = Installation::new("leftovers-demand", 1, "16Gi").await;
    world.model("wanted", "10Gi", "", json!({})).await;
    world.model("asked", "10Gi", "", json!({})).await;
    let left = |name: &str, model: &str| {
        json!({
            "apiVersion": "rouse.dev/v1alpha1", "kind": "GatewayReplica", "metadata": {"name": name},
            "spec": {"address": "127.0.0.1:1"},
            "status": {"waiting": 1, "models": {model: {"waiting": 1, "inFlight": 0}}},
        })
    };
    let write = async |name: &str, model: &str| {
        let (api, how, object) = (replicas(&world), PatchParams::apply(FIELD_MANAGER), left(name, model));
        api.patch(name, &how, &Patch::Apply(&object)).await.unwrap();
        api.patch_status(name, &how, &Patch::Apply(&object)).await.unwrap();
    };
    write("dead", "wanted").await;
    // As long as a silent gateway's report counts.
    tokio::time::sleep(Duration::from_secs(61)).await;
    write("lives", "asked").await;
    let _gateway = world.gateway("gateway-0", "");
    world
        .until("asked", "started for the one that lives", |model| reason(model, "Ready") == "Deployed")
        .await;
    let model = world.models().get("wanted").await.unwrap();
    assert_eq!(reason(&model, "Ready"), "ScaledToZero", "{model:?}");
    assert_eq!(world.reserved_gib().await, [("asked".to_owned(), 10)]);
}
