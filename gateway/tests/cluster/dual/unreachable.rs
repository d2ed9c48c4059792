//! Unreachable or cordoned parts: the reference's rows 8 to 10.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PropagationPolicy},
};
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::time::{Duration, Instant};

use super::{
    DualPodsFixture, SMALL,
    all_modes::{engines_of, for_sleeping_kinds},
    patch,
};
use crate::pairs::{annotation, is_ready, is_unbound, label};

/// Whether the engine has no requester, and no finalizer keeps the requester.
fn is_let_go(requesters: &[Pod], providers: &[Pod]) -> bool {
    is_unbound(&[], providers) && requesters.iter().all(|own| own.finalizers().is_empty())
}

/// Row 8: existing pairs stay untouched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cordon_sends_away_who_has_no_provider_and_no_other() {
    for_sleeping_kinds("dual-cordon", 2, "", async |duo| {
        duo.demand("served", "").await;
        let (requester, provider) = duo.pair("served").await;
        // A map without the other accelerator keeps the next requester waiting.
        let uuid = annotation(&requester, "accelerators").unwrap();
        let node = requester.spec.as_ref().unwrap().node_name.clone().unwrap();
        duo.map(&BTreeMap::from([(node.clone(), format!("{{\"{uuid}\": 0}}"))])).await;
        duo.demand("waiting", "").await;
        let waits =
            |all: &[Pod], _: &[Pod]| matches!(all, [own] if annotation(own, "accelerators").is_some());
        let (waiting, _) = duo.watch_for("waiting", "accelerators", waits).await;
        duo.cordon(&node).await;
        let replaced = |all: &[Pod], _: &[Pod]| matches!(all, [own] if own.uid() != waiting[0].uid());
        duo.watch_for("waiting", "another requester", replaced).await;
        let untouched = |requesters: &[Pod], providers: &[Pod]| {
            let same =
                |own: &Pod| own.uid() == provider.uid() && label(own, "dual") == Some(&*requester.name_any());
            matches!(requesters, [own] if own.uid() == requester.uid() && is_ready(own))
                && providers.iter().any(same)
        };
        duo.watch_for("served", "the pair that was there", untouched).await;
    })
    .await;
}

/// Row 9, at the start: the gateway reports the unreachable stub to its user, serves others meanwhile, and serves the
/// requester once it can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stub_that_cannot_be_reached_is_told_of_and_delays_nobody() {
    let duo = DualPodsFixture::new("dual-deaf", 2, "8Gi", "").await;
    let asked = patch("deaf", &duo.card());
    let nowhere = json!({"dual-pods.llm-d.ai/server-patch": asked, "dual-pods.llm-d.ai/admin-port": "1"});
    duo.ask_by("deaf", 1, 1, nowhere).await;
    let says = |text: &'static str| {
        move |all: &[Pod], _: &[Pod]| {
            all.iter().any(|own| annotation(own, "status").is_some_and(|status| status.contains(text)))
        }
    };
    let (deaf, _) = duo.until("deaf", "told that its stub is not reached", says("the stub at ")).await;
    duo.ask("one", 1, 1, "").await;
    duo.until_served("one").await;
    let mended = json!({"metadata": {"annotations": {"dual-pods.llm-d.ai/admin-port": "8081"}}});
    let name = deaf[0].name_any();
    duo.world.pods().patch(&name, &PatchParams::default(), &Patch::Merge(&mended)).await.unwrap();
    assert_eq!(duo.until_served("deaf").await.0.uid(), deaf[0].uid());
    duo.until("deaf", "told that it is mended", says(r#"{"Errors":null}"#)).await;
}

/// The engine gets as long as a wake may take, and then its requester gets another engine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_hangs_in_its_wake_delays_no_other() {
    let duo = DualPodsFixture::sized(SMALL, "dual-stuck", 2, ", wake: 30s").await;
    duo.ask("stuck", 1, 1, "--wake-time 1h").await;
    let (_, stuck) = duo.until_served("stuck").await;
    duo.ask("well", 1, 1, "").await;
    let (_, well) = duo.until_served("well").await;
    for name in ["stuck", "well"] {
        duo.scale(name, 0).await;
        duo.until_asleep(name).await;
    }
    duo.scale("stuck", 1).await;
    let wakes = |_: &[Pod], all: &[Pod]| matches!(all, [own] if label(own, "sleeping") == Some("false"));
    duo.until("stuck", "being woken", wakes).await;
    duo.scale("well", 1).await;
    assert_eq!(duo.until_served("well").await.1.uid(), well.uid());
    let (requesters, providers) = duo.pairs("stuck").await;
    assert!(!requesters.iter().any(is_ready), "{requesters:#?}");
    assert_eq!(providers.iter().map(Pod::uid).collect::<Vec<_>>(), [stuck.uid()], "it still is");
    assert_ne!(duo.until_served("stuck").await.1.uid(), stuck.uid());
}

/// Row 9, at the end: the gateway puts the engine to sleep all the same, and a stub that cannot answer does not hold
/// its requester.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stub_that_hangs_when_its_requester_is_deleted_keeps_neither() {
    for_sleeping_kinds("dual-mute", 1, ", drain: 1s", async |duo| {
        duo.demand("one", "").await;
        let (requester, provider) = duo.pair("one").await;
        duo.world.runner.signal(&requester, Signal::SIGSTOP);
        duo.sets().delete("one", &DeleteParams::default()).await.unwrap();
        let (_, all) = duo.watch_for("one", "an engine that is nobody's", is_let_go).await;
        assert_eq!(engines_of(&all[0]), engines_of(&provider));
        assert_eq!(label(&all[0], "sleeping"), Some("true"));
        duo.world.runner.signal(&requester, Signal::SIGCONT);
        duo.alone("one").await;
    })
    .await;
}

/// Row 10: the node's kubelet does not report, so no Pod there is seen to end. No finalizer waits for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requester_deleted_on_a_node_that_does_not_report_is_let_go() {
    for_sleeping_kinds("dual-silent", 1, "", async |duo| {
        duo.demand("one", "").await;
        let (_, provider) = duo.pair("one").await;
        let node = format!("{}-a", duo.world.name());
        duo.world.runner.partition(&node);
        duo.scale("one", 0).await;
        let (_, all) = duo.watch_for("one", "an engine that is nobody's", is_let_go).await;
        assert_eq!(label(&all[0], "sleeping"), Some("true"));
        duo.world.runner.heal(&node);
        assert_eq!(engines_of(&duo.alone("one").await), engines_of(&provider));
        duo.scale("one", 1).await;
        assert_eq!(engines_of(&duo.pair("one").await.1), engines_of(&provider));
    })
    .await;
}

/// Row 10, permanently: a user deletes the node's Pods by force. The engine still runs, and no other engine gets its
/// memory until the kubelet has been back for as long as it may need to end the engine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_of_pods_deleted_by_force_on_a_node_that_does_not_report_keeps_its_memory() {
    for_sleeping_kinds("dual-vanished", 1, ", vanishedPodRetention: 15s", async |duo| {
        duo.demand("one", "").await;
        let (requester, provider) = duo.pair("one").await;
        let engines = duo.world.runner.processes(&provider).len();
        let node = format!("{}-a", duo.world.name());
        duo.world.runner.partition(&node);
        let orphan =
            DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
        duo.sets().delete("one", &orphan).await.unwrap();
        let off = json!({"metadata": {"finalizers": null}});
        // The silence of the kubelet may be noticed late, or never, so its time starts here at the earliest.
        let deleted = Instant::now();
        // The provider is deleted first: the gateway would put an engine without a requester to sleep, and a sleeper
        // holds too little to wait for.
        for pod in [&provider, &requester] {
            duo.world.runner.force_delete(pod).await.unwrap();
            let pods = duo.world.pods();
            match pods.patch(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&off)).await {
                // The gateway removed it first.
                Err(kube::Error::Api(gone)) if gone.code == 404 => {}
                patched => drop(patched.unwrap()),
            }
        }
        duo.watch_for("one", "no Pod", |requesters, providers| requesters.is_empty() && providers.is_empty())
            .await;
        assert_eq!(duo.world.runner.processes(&provider).len(), engines, "nobody has told its kubelet");
        duo.demand("two", "").await;
        duo.world.runner.heal(&node);
        duo.lives("two").await;
        assert!(deleted.elapsed() >= Duration::from_secs(15), "{:?}", deleted.elapsed());
    })
    .await;
}
