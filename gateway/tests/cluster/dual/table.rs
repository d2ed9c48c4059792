//! The failures in the reference's table, row by row, with what becomes of them here. What else shows a row: `away`, `crashes`,
//! `races`, `rollouts`, `uninstalled`.

use std::collections::BTreeMap;

use http::Method;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::{
    ResourceExt as _,
    api::{DeleteParams, EvictParams, Patch, PatchParams},
};
use nix::sys::signal::Signal;
use rouse_cluster::wait::PATIENCE;
use serde_json::{Value, json};

use super::{
    Duo,
    both::{Home, both, engines_of, is_empty},
    launchers::launcher_at,
    patch,
};
use crate::{
    launched::lives,
    pairs::{annotation, is_left, is_ready, label, renewed},
};

/// Its container runs, and does not serve.
fn is_starting(pod: &Pod) -> bool {
    let all = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let runs = |own: &ContainerStatus| own.state.as_ref().is_some_and(|state| state.running.is_some());
    all.filter(|own| own.name == "inference-server").any(|own| runs(own) && !own.ready)
}

/// Another requester has come, and is served.
fn is_replaced(before: &Pod) -> impl Fn(&[Pod], &[Pod]) -> bool {
    let before = before.uid();
    move |requesters, _| matches!(requesters, [own] if own.uid() != before && is_ready(own))
}

/// Row 1. Nobody waits for the hour that the start takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requester_deleted_while_its_provider_is_starting_waits_for_no_start() {
    both("dual-early", 1, "", async |duo| {
        duo.demand("one", "--start-time 1h").await;
        let starts = |_: &[Pod], providers: &[Pod]| {
            matches!(providers, [own] if label(own, "dual").is_some() && (duo.home == Home::Launcher || is_starting(own)))
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

/// Row 2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_evicted_through_the_api_and_both_come_anew() {
    both("dual-evicted", 1, "", async |duo| {
        duo.demand("one", "").await;
        let (requester, provider) = duo.pair("one").await;
        duo.world.pods().evict(&provider.name_any(), &EvictParams::default()).await.unwrap();
        duo.watch_for("one", "two new Pods", renewed(&requester, &provider)).await;
        duo.pair("one").await;
    })
    .await;
}

/// Row 2, as the kubelet evicts: the object stays, and says that the Pod has failed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_that_failed_and_whose_object_stays_is_cleared_away() {
    let duo = Duo::new("dual-failed", 1, "8Gi", "").await;
    let mut asked: Value = serde_json::from_str(&patch("one", &duo.card())).unwrap();
    asked["spec"]["restartPolicy"] = json!("Never");
    duo.ask_with("one", 1, 1, &asked.to_string()).await;
    let (requester, provider) = duo.served("one").await;
    duo.world.runner.signal(&provider, Signal::SIGKILL);
    duo.until("one", "two new Pods", renewed(&requester, &provider)).await;
    duo.served("one").await;
}

/// Rows 3 and 4: in a Pod of its own the engine is the container, in a launcher it goes with the container.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_that_dies_takes_its_engines_and_the_requester_is_replaced() {
    both("dual-died", 1, "", async |duo| {
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
        // In the launcher the sleeper was lost with the container: so is what was written of it.
        let left = if duo.home == Home::Launcher { 1 } else { 0 };
        assert_eq!(lives(&next).len(), left, "{next:#?}");
    })
    .await;
}

/// Rows 3 and 4, where nobody is there to notice: what was started in its place is awake for nobody, and may be nobody's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sleeper_whose_container_died_is_cleared_away() {
    both("dual-lost", 1, "", async |duo| {
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
    let duo = Duo::with_launchers("dual-launcher-forgets", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    duo.launched("one").await;
    duo.scale("one", 0).await;
    let launcher = duo.put_away("one", 1).await;
    let there = launcher_at(&launcher);
    let all = there.call(Method::DELETE, "/v2/vllm/instances", None, None, PATIENCE).await.unwrap();
    assert!(all.success());
    assert_eq!(duo.put_away("one", 0).await.uid(), launcher.uid());
}

/// Row 6: it is not taken for one that is still to be made, behind a gate that is open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bound_instance_that_is_absent_after_a_controller_restart_costs_its_requester() {
    let mut duo = Duo::with_launchers("dual-launcher-absent", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    let (requester, launcher) = duo.launched("one").await;
    duo.kill().await;
    let there = launcher_at(&launcher);
    let all = there.call(Method::DELETE, "/v2/vllm/instances", None, None, PATIENCE).await.unwrap();
    assert!(all.success());
    duo.begin("gateway-1");
    duo.see("one", "another requester", is_replaced(&requester)).await;
    let (_, same) = duo.launched("one").await;
    assert_eq!(same.uid(), launcher.uid());
    assert_ne!(lives(&same), lives(&launcher));
}

/// Row 8: existing pairs are untouched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cordon_sends_away_who_has_no_provider_and_no_other() {
    both("dual-cordon", 2, "", async |duo| {
        duo.demand("served", "").await;
        let (requester, provider) = duo.pair("served").await;
        // A map that lacks the other accelerator keeps the next one waiting.
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
        let (still, same) = duo.pair("served").await;
        assert_eq!((still.uid(), same.uid()), (requester.uid(), provider.uid()));
    })
    .await;
}

/// Row 9, at the beginning: its user is told, nobody else waits for it, and it is served once it can be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stub_that_cannot_be_reached_is_told_of_and_delays_nobody() {
    let duo = Duo::new("dual-deaf", 2, "8Gi", "").await;
    let asked = patch("deaf", &duo.card());
    let nowhere = json!({"dual-pods.llm-d.ai/server-patch": asked, "dual-pods.llm-d.ai/admin-port": "1"});
    duo.ask_by("deaf", 1, 1, nowhere).await;
    let says = |text: &'static str| {
        move |all: &[Pod], _: &[Pod]| {
            all.iter().any(|own| annotation(own, "status").is_some_and(|status| status.contains(text)))
        }
    };
    let (deaf, _) = duo.until("deaf", "told that its stub is not reached", says("its stub")).await;
    duo.ask("one", 1, 1, "").await;
    duo.served("one").await;
    let mended = json!({"metadata": {"annotations": {"dual-pods.llm-d.ai/admin-port": "8081"}}});
    let name = deaf[0].name_any();
    duo.world.pods().patch(&name, &PatchParams::default(), &Patch::Merge(&mended)).await.unwrap();
    assert_eq!(duo.served("deaf").await.0.uid(), deaf[0].uid());
    duo.until("deaf", "told that it is mended", says(r#"{"Errors":null}"#)).await;
}

/// Row 9, at the end: its engine is put to sleep all the same, and it is not held for what it cannot say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stub_that_hangs_when_its_requester_is_deleted_keeps_neither() {
    both("dual-mute", 1, ", drain: 1s", async |duo| {
        duo.demand("one", "").await;
        let (requester, provider) = duo.pair("one").await;
        duo.world.runner.signal(&requester, Signal::SIGSTOP);
        duo.sets().delete("one", &DeleteParams::default()).await.unwrap();
        let left = |requesters: &[Pod], providers: &[Pod]| {
            is_left(&[], providers) && requesters.iter().all(|own| own.finalizers().is_empty())
        };
        let (_, all) = duo.watch_for("one", "an engine that is nobody's", left).await;
        assert_eq!(engines_of(&all[0]), engines_of(&provider));
        assert_eq!(label(&all[0], "sleeping"), Some("true"));
        duo.world.runner.signal(&requester, Signal::SIGCONT);
        duo.alone("one").await;
    })
    .await;
}

/// Row 10: the node's kubelet says nothing, and what ends there is not seen to end. No finalizer waits for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requester_deleted_on_a_node_that_does_not_report_is_let_go() {
    both("dual-silent", 1, "", async |duo| {
        duo.demand("one", "").await;
        let (_, provider) = duo.pair("one").await;
        let node = format!("{}-a", duo.world.name());
        duo.world.runner.partition(&node);
        duo.scale("one", 0).await;
        let left = |requesters: &[Pod], providers: &[Pod]| {
            is_left(&[], providers) && requesters.iter().all(|own| own.finalizers().is_empty())
        };
        let (_, all) = duo.watch_for("one", "an engine that is nobody's", left).await;
        assert_eq!(label(&all[0], "sleeping"), Some("true"));
        duo.world.runner.heal(&node);
        assert_eq!(engines_of(&duo.alone("one").await), engines_of(&provider));
        duo.scale("one", 1).await;
        assert_eq!(engines_of(&duo.pair("one").await.1), engines_of(&provider));
    })
    .await;
}
