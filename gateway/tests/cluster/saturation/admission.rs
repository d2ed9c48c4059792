//! Engines that a target asks for and memory refuses, and engines that sleep.

use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt, api::DeleteParams};
use rouse_controllers::crd::{InferenceModel, inference_model::EngineState};
use serde_json::json;

use super::{
    QUICK, after_readings, awake, awake_pods, pods_in, report_load, set_faults, state, target, targets,
};
use crate::{installation::Installation, memory::until_metric};

const ENGINES_READ: &str = "outcome=\"done\",source=\"engines\"";

/// Replicas and sleepers of the model, and of its only variant with the desired replicas.
fn counts(model: &InferenceModel) -> ((u32, u32), (u32, u32, u32)) {
    let Some(status) = &model.status else { return Default::default() };
    let own = status.variants.first().map(|own| (own.replicas, own.asleep, own.desired));
    ((status.replicas, status.asleep), own.unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_gets_no_memory_is_given_up_until_memory_is_released() {
    let world = Installation::new("saturation-memory", 3, "96Gi").await;
    world.model("qwen", "40Gi", "", json!({"minReplicas": 1, "maxReplicas": 2, "saturation": {}})).await;
    let gateway = world.gateway_with("gateway-0", QUICK);
    let one = awake_pods(&world, "qwen", 1).await;
    world.model("llama", "40Gi", "", json!({"minReplicas": 1})).await;
    world.until("llama", "awake", |model| awake(model) == 1).await;

    report_load(&one, 0.95, 0).await;
    let refused = ("True".to_owned(), "InsufficientMemory".to_owned());
    let is_refused = |model: &InferenceModel| state(model, "InsufficientMemory") == refused;
    let given_up = |model: &InferenceModel| is_refused(model) && targets(model) == [("default", 1)];
    world.until("qwen", "refused, and the target back at what runs", given_up).await;
    let own = world.name();
    let labels = format!("{{model=\"qwen\",namespace=\"{own}\",variant=\"default\"}}");
    until_metric(&gateway, &format!("rouse_replicas_refused_by_memory{labels} 1")).await;
    until_metric(&gateway, &format!("rouse_saturated_replicas{labels} 1")).await;
    // The load still asks for it, and it is not tried with every decision.
    after_readings(&gateway, ENGINES_READ, 10.0).await;
    let model = world.models().get("qwen").await.unwrap();
    assert!(given_up(&model), "{:?}", model.status);
    assert_eq!((awake(&model), state(&model, "Saturated").0.as_str()), (1, "True"));
    let booked = world.reserved_gib().await;
    assert_eq!(booked.len(), 2, "{booked:?}");

    world.models().delete("llama", &DeleteParams::default()).await.unwrap();
    let has_both =
        |model: &InferenceModel| awake(model) == 2 && state(model, "InsufficientMemory").0 == "False";
    world.until("qwen", "both engines", has_both).await;
    until_metric(&gateway, &format!("rouse_replicas_refused_by_memory{labels} 0")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_surplus_engine_sleeps_uncounted_and_unread_and_is_woken_for_the_next_load() {
    let world = Installation::new("saturation-asleep", 2, "256Gi").await;
    let own = world.name().to_owned();
    let pool =
        json!({"nodeSelector": {"inference-pool": own}, "memory": "256Gi", "hostSleepMemory": "128Gi"});
    world.pool(&own, pool).await;
    let settings = json!({"minReplicas": 1, "maxReplicas": 2, "memoryAsleep": "2Gi", "hostMemory": "30Gi",
        "engine": {"sleepMode": "vllm"}, "saturation": {}});
    world.model("qwen", "40Gi", "--enable-sleep-mode", settings).await;
    let gateway = world.gateway_with("gateway-0", QUICK);
    let one = awake_pods(&world, "qwen", 1).await;
    report_load(&one, 0.95, 0).await;
    let both = awake_pods(&world, "qwen", 2).await;

    report_load(&both, 0.0, 0).await;
    let one_each = ((1, 1), (1, 1, 1));
    let is_asleep = |model: &InferenceModel| {
        let mut engines = model.status.iter().flat_map(|status| &status.engines);
        counts(model) == one_each && engines.any(|engine| engine.state == EngineState::Asleep)
    };
    let model = world.until("qwen", "one asleep", is_asleep).await;
    let asleep = pods_in(&world, &model, EngineState::Asleep).await;
    let serving = pods_in(&world, &model, EngineState::Awake).await;
    assert_eq!((asleep.len(), serving.len()), (1, 1), "{:?}", model.status);
    let labels = format!("{{model=\"qwen\",namespace=\"{own}\",variant=\"default\"}}");
    until_metric(&gateway, &format!("rouse_current_replicas{labels} 1")).await;

    // What a sleeper reports, or does not, is of no account.
    set_faults(&asleep, r#"{"no-metrics": true}"#).await;
    after_readings(&gateway, ENGINES_READ, 10.0).await;
    let model = world.models().get("qwen").await.unwrap();
    assert_eq!(state(&model, "MetricsAvailable").0, "True");
    assert_eq!((target(&model, "default"), counts(&model)), (1, one_each));
    set_faults(&asleep, r#"{"no-metrics": null}"#).await;

    report_load(&serving, 0.95, 0).await;
    let woken = awake_pods(&world, "qwen", 2).await;
    let uids = |pods: &[Pod]| {
        let mut uids: Vec<_> = pods.iter().map(ResourceExt::uid).collect();
        uids.sort();
        uids
    };
    assert_eq!(uids(&woken), uids(&both), "the sleeper is woken, and no Pod is new");
}
