//! Providers and engines that vanish, by the rows of the reference's table of failures. Its other rows: `away` (5, 7),
//! `unreachable` (8 to 10), `uninstalled` (11), `crashes` and `rollouts` (6, 12).

use http::Method;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::{ResourceExt as _, api::EvictParams};
use nix::sys::signal::Signal;
use rouse_cluster::wait::WAIT_TIMEOUT;
use serde_json::{Value, json};

use super::{
    DualPodsFixture,
    all_modes::{TestedProviderKind, engines_of, for_all_kinds, for_sleeping_kinds, is_empty},
    patch,
};
use crate::{
    launched::generations,
    pairs::{both_replaced, is_ready, label},
};

/// Whether the container runs and does not serve yet.
fn is_starting(pod: &Pod) -> bool {
    let all = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let runs = |own: &ContainerStatus| own.state.as_ref().is_some_and(|state| state.running.is_some());
    all.filter(|own| own.name == "inference-server").any(|own| runs(own) && !own.ready)
}

/// Whether another requester has replaced this one and is ready.
fn is_replaced(before: &Pod) -> impl Fn(&[Pod], &[Pod]) -> bool {
    let before = before.uid();
    move |requesters, _| matches!(requesters, [own] if own.uid() != before && is_ready(own))
}

/// Row 1. The deletion does not wait for the start, which takes an hour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requester_deleted_while_its_provider_is_starting_waits_for_no_start() {
    for_all_kinds("dual-early", 1, "", async |duo| {
        duo.demand("one", "--start-time 1h").await;
        let starts = |_: &[Pod], providers: &[Pod]| {
            matches!(providers, [own] if label(own, "dual").is_some() && (duo.provider_kind == TestedProviderKind::Launcher || is_starting(own)))
        };
        duo.watch_for("one", "an engine that starts", starts).await;
        duo.scale("one", 0).await;
        let over = |requesters: &[Pod], providers: &[Pod]| requesters.is_empty() && is_empty(&[], providers);
        duo.watch_for("one", "the end of both", over).await;
        duo.demand("one", "").await;
        duo.pair("one").await;
    })
    .await;
}

/// Row 2: an eviction through the API.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_evicted_through_the_api_and_both_come_anew() {
    for_all_kinds("dual-evicted", 1, "", async |duo| {
        duo.demand("one", "").await;
        let (requester, provider) = duo.pair("one").await;
        duo.world.pods().evict(&provider.name_any(), &EvictParams::default()).await.unwrap();
        duo.watch_for("one", "two new Pods", both_replaced(&requester, &provider)).await;
        duo.pair("one").await;
    })
    .await;
}

/// Row 2, as the kubelet evicts: the object stays and reports the Pod as failed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_that_failed_and_whose_object_stays_is_cleared_away() {
    let duo = DualPodsFixture::new("dual-failed", 1, "8Gi", "").await;
    let mut asked: Value = serde_json::from_str(&patch("one", &duo.card())).unwrap();
    asked["spec"]["restartPolicy"] = json!("Never");
    duo.ask_with("one", 1, 1, &asked.to_string()).await;
    let (requester, provider) = duo.until_served("one").await;
    duo.world.runner.signal(&provider, Signal::SIGKILL);
    duo.until("one", "two new Pods", both_replaced(&requester, &provider)).await;
    duo.until_served("one").await;
}

/// Rows 3 and 4: in a Pod of its own the engine is the container; in a launcher the engine ends with the container.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_that_dies_takes_its_engines_and_the_requester_is_replaced() {
    for_sleeping_kinds("dual-died", 1, "", async |duo| {
        duo.demand("old", "").await;
        duo.pair("old").await;
        duo.scale("old", 0).await;
        duo.alone("old").await;
        duo.demand("one", "").await;
        let (requester, provider) = duo.pair("one").await;
        duo.world.runner.signal(&provider, Signal::SIGKILL);
        duo.watch_for("one", "another requester", is_replaced(&requester)).await;
        let (_, next) = duo.pair("one").await;
        assert_ne!(engines_of(&next), engines_of(&provider));
        // The launcher lost the sleeper with the container, and the gateway has removed its record.
        assert_eq!(
            generations(&next).len(),
            usize::from(duo.provider_kind == TestedProviderKind::Launcher),
            "{next:#?}"
        );
    })
    .await;
}

/// Rows 3 and 4 without a requester: the engine started in its place is awake without a requester, and may belong to
/// none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sleeper_whose_container_died_is_cleared_away() {
    for_sleeping_kinds("dual-lost", 1, "", async |duo| {
        duo.demand("one", "").await;
        duo.pair("one").await;
        duo.scale("one", 0).await;
        let sleeper = duo.alone("one").await;
        duo.world.runner.signal(&sleeper, Signal::SIGKILL);
        duo.watch_for("one", "no engine", is_empty).await;
        duo.scale("one", 1).await;
        assert_ne!(engines_of(&duo.pair("one").await.1), engines_of(&sleeper));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sleeping_instance_that_stops_is_no_longer_in_the_launchers_record() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-forgets", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    duo.until_launched("one").await;
    duo.scale("one", 0).await;
    let launcher = duo.until_unbound("one", 1).await;
    let there = duo.launcher_at(&launcher).await;
    let all = there.call(Method::DELETE, "/v2/vllm/instances", None, None, WAIT_TIMEOUT).await.unwrap();
    assert!(all.success());
    assert_eq!(duo.until_unbound("one", 0).await.uid(), launcher.uid());
}

/// Row 6: the gateway does not mistake the lost engine for one that it still has to start behind an open gate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bound_instance_that_is_absent_after_a_controller_restart_costs_its_requester() {
    let mut duo = DualPodsFixture::with_launchers("dual-launcher-absent", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    let (requester, launcher) = duo.until_launched("one").await;
    duo.kill().await;
    let there = duo.launcher_at(&launcher).await;
    let all = there.call(Method::DELETE, "/v2/vllm/instances", None, None, WAIT_TIMEOUT).await.unwrap();
    assert!(all.success());
    duo.begin("gateway-1");
    duo.until_launchers("one", "another requester", is_replaced(&requester)).await;
    let (_, same) = duo.until_launched("one").await;
    assert_eq!(same.uid(), launcher.uid());
    assert_ne!(generations(&same), generations(&launcher));
}
