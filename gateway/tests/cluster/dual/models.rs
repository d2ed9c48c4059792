//! InferenceModels of mode dualPods: their engines sleep without requests and wake through requesters.

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::ListParams};
use rouse_cluster::wait;
use rouse_controllers::crd::{AcceleratorNode, InferenceModel, inference_model::EngineState};
use serde_json::json;

use super::{DualPodsFixture, node};
use crate::{
    client::TestResponse,
    installation::{blocking, reason},
    launched::generations,
    nodes,
    pairs::{annotation, label},
    streams::HeldClientStream,
};

/// Creates a model with `--enable-sleep-mode`. Each engine takes 40 GiB of an accelerator with 64 GiB.
pub(super) async fn model(duo: &DualPodsFixture, name: &str, more: serde_json::Value) {
    model_with(duo, name, "", more).await;
}

/// Creates such a model with more flags of its engine.
pub(super) async fn model_with(duo: &DualPodsFixture, name: &str, flags: &str, more: serde_json::Value) {
    let flags = format!("--enable-sleep-mode {} {flags}", duo.card());
    let mut spec =
        json!({"mode": "dualPods", "memoryAsleep": "1Gi", "hostMemory": "8Gi", "cooldownPeriod": "2s"});
    crate::installation::merge(&mut spec, more);
    duo.world.model(name, "40Gi", &flags, spec).await;
    let known = |model: &InferenceModel| {
        model.status.as_ref().is_some_and(|status| status.observed_generation.is_some())
    };
    duo.world.until(name, "known to the gateway", known).await;
}

/// Returns this model's requesters and its engines' Pods.
pub(super) async fn pods(duo: &DualPodsFixture, name: &str) -> (Vec<Pod>, Vec<Pod>) {
    let all = duo.world.pods().list(&ListParams::default()).await.unwrap().items;
    let own = all.into_iter().filter(|pod| {
        let containers = &pod.spec.as_ref().unwrap().containers;
        containers.iter().flat_map(|own| own.args.iter().flatten()).any(|word| word == name)
            || annotation(pod, "server-patch").is_some_and(|patch| patch.contains(&format!("\"{name}\"")))
    });
    own.partition(|pod| annotation(pod, "server-patch").is_some())
}

pub(super) async fn asks(duo: &DualPodsFixture, name: &'static str) {
    let client = duo.gateway.client();
    let answer = blocking(move || client.chat(name, true, 4)).await;
    assert!(answer.is_whole_stream(), "{answer:?}");
}

async fn idle(duo: &DualPodsFixture, name: &'static str) -> Pod {
    duo.world.until(name, "idle", |model| reason(model, "Ready") == "ScaledToZero").await;
    let (requesters, mut engines) = pods(duo, name).await;
    assert!(requesters.is_empty(), "{requesters:#?}");
    assert_eq!(engines.len(), 1, "{engines:#?}");
    assert_eq!(label(&engines[0], "sleeping"), Some("true"));
    let freed = |booked: &[(String, u64)]| booked.iter().all(|(model, _)| model != name);
    duo.world.until_reserved("no memory for who sleeps", freed).await;
    engines.remove(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cold_request_makes_an_engine_which_then_sleeps_and_is_woken_by_the_next() {
    let mut duo = DualPodsFixture::new("dual-model", 1, "8Gi", "").await;
    model(&duo, "one", json!({})).await;
    asks(&duo, "one").await;
    let (requesters, engines) = pods(&duo, "one").await;
    assert_eq!((requesters.len(), engines.len()), (1, 1), "{requesters:#?} {engines:#?}");
    let told = duo.world.models().get("one").await.unwrap().status.unwrap();
    assert!(matches!(&told.engines[..], [engine] if engine.state == EngineState::Awake), "{told:?}");
    let node = duo.world.runner.node(&format!("{}-a", duo.world.name()));
    let (accelerator, _) = node.devices().remove(0);
    let copies = Api::all(duo.world.site.admin.clone());
    let reported = |copy: &Option<AcceleratorNode>| nodes::listed(copy) == [accelerator.as_str()];
    wait::until(&copies, node.name(), "the accelerator that the requester's stub reported", reported)
        .await
        .unwrap();

    let asleep = idle(&duo, "one").await;
    assert_eq!(asleep.uid(), engines[0].uid());
    asks(&duo, "one").await;
    let (_, woken) = pods(&duo, "one").await;
    assert_eq!(woken.iter().map(|pod| pod.uid()).collect::<Vec<_>>(), [asleep.uid()]);

    // The next leader continues with the sleeper.
    duo.restart("gateway-2").await;
    asks(&duo, "one").await;
    let (requesters, same) = pods(&duo, "one").await;
    assert_eq!(requesters.len(), 1, "{requesters:#?}");
    assert_eq!(same.iter().map(|pod| pod.uid()).collect::<Vec<_>>(), [asleep.uid()]);
}

/// The model declares one GiB of residue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_sleeper_was_seen_to_keep_is_written_down_and_outlives_its_leader() {
    let mut duo = DualPodsFixture::new("dual-residue", 1, "8Gi", "").await;
    let node = duo.world.runner.node(&format!("{}-a", duo.world.name()));
    let (accelerator, _) = node.devices().remove(0);
    let reads = |mib| duo.world.set_accelerators("one", &[(&accelerator, mib)]);
    reads(0);
    model_with(&duo, "one", "--load-time 1s", json!({})).await;
    let kept = |engine: &Pod| -> serde_json::Value {
        let kept = serde_json::from_str::<serde_json::Value>(&engine.annotations()["rouse.dev/engine"]);
        kept.unwrap()["sizes"]["asleep"].clone()
    };
    let begins = async {
        duo.world
            .until_pods(async || pods(&duo, "one").await, "an engine", |_, engines| !engines.is_empty())
            .await;
        reads(5 << 10);
    };
    tokio::join!(asks(&duo, "one"), begins);
    let (_, engines) = pods(&duo, "one").await;
    assert_eq!(kept(&engines[0]), json!(1_u64 << 30));
    assert_eq!(kept(&idle(&duo, "one").await), json!(5_u64 << 30));
    duo.restart("gateway-2").await;
    asks(&duo, "one").await;
    assert_eq!(kept(&idle(&duo, "one").await), json!(5_u64 << 30));
}

/// The scheduler prefers free room, and the other node has more of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_requester_comes_to_the_node_where_its_engine_sleeps() {
    let duo = DualPodsFixture::new("dual-place", 1, "8Gi", "").await;
    model(&duo, "one", json!({})).await;
    asks(&duo, "one").await;
    let asleep = idle(&duo, "one").await;
    duo.world.runner.add_node(node(duo.world.name(), "b", 1)).await.unwrap();
    duo.write_accelerator_files(&["a", "b"]);
    asks(&duo, "one").await;
    let (_, engines) = pods(&duo, "one").await;
    assert_eq!(engines.iter().map(|pod| pod.uid()).collect::<Vec<_>>(), [asleep.uid()]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_of_an_inference_server_config_is_served_by_a_launchers_engine() {
    let duo = DualPodsFixture::with_launchers("dual-configured", 1).await;
    duo.config("weights", "").await;
    let asked = json!({"dual-pods.llm-d.ai/inference-server-config": "weights"});
    model(&duo, "chat", json!({"template": {"metadata": {"annotations": asked}}})).await;
    // The engine has the model's name, from its options.
    asks(&duo, "chat").await;
    let launchers = ListParams::default().labels("app.kubernetes.io/component=launcher");
    let launcher = async || duo.world.pods().list(&launchers).await.unwrap().items.remove(0);
    let serving = launcher().await;
    duo.world.until("chat", "idle", |model| reason(model, "Ready") == "ScaledToZero").await;
    asks(&duo, "chat").await;
    let woken = launcher().await;
    assert_eq!((woken.uid(), generations(&woken)), (serving.uid(), generations(&serving)));
    assert_eq!(generations(&woken).len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_models_have_one_accelerator_by_turns_and_neither_loads_twice() {
    let duo = DualPodsFixture::new("dual-turns", 1, "8Gi", "").await;
    for name in ["left", "right"] {
        model(&duo, name, json!({"cooldownPeriod": "1s"})).await;
    }
    let mut seen = Vec::new();
    for _ in 0..3 {
        for name in ["left", "right"] {
            asks(&duo, name).await;
            let (_, engines) = pods(&duo, name).await;
            let [engine] = &engines[..] else { panic!("{engines:#?}") };
            seen.push((name, engine.uid().unwrap()));
        }
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 2, "an engine was made anew: {seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_with_an_engines_pod_is_said_by_its_model() {
    let duo = DualPodsFixture::new("dual-wrong", 1, "8Gi", "").await;
    let wrong = json!({"template": {"spec": {"noSuchField": true}}, "queue": {"maxWait": "20s"}});
    model(&duo, "wrong", wrong).await;
    let client = duo.gateway.client();
    let answer = blocking(move || client.chat("wrong", false, 4)).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    let text = "noSuchField";
    let told = |model: &InferenceModel| {
        let status = model.status.clone().unwrap_or_default();
        status.conditions.iter().any(|condition| condition.message.contains(text))
    };
    duo.world.until("wrong", "why", told).await;
}

/// Opens a stream through gateway, stub and engine, deletes its requester meanwhile, and returns the stream's answer.
async fn interrupted(duo: &DualPodsFixture, flags: &str) -> TestResponse {
    model_with(duo, "one", flags, json!({"cooldownPeriod": "1h"})).await;
    asks(duo, "one").await;
    let stream = HeldClientStream::open(&duo.gateway, "one", 100).await;
    let (requesters, _) = pods(duo, "one").await;
    duo.delete(&requesters[0]).await;
    let answer = stream.finish().await;
    // The next request gets another requester.
    asks(duo, "one").await;
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_whose_requester_is_deleted_finishes_within_the_drain_deadline() {
    let duo = DualPodsFixture::new("dual-model-drained", 1, "8Gi", "").await;
    let answer = interrupted(&duo, "--itl 20ms").await;
    assert!(answer.is_whole_stream(), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_lasts_longer_than_the_drain_of_its_requester_ends_with_an_error_in_it() {
    let duo = DualPodsFixture::new("dual-model-cut", 1, "8Gi", ", drain: 1s").await;
    let answer = interrupted(&duo, "--itl 1s").await;
    let events = answer.events();
    assert!(events.last().is_some_and(|last| last.contains("\"error\"")), "{events:?}");
}
