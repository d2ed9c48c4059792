//! Thresholds from the ConfigMap and from the model.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::crd::InferenceModel;
use serde_json::json;
use tokio::time::{Duration, sleep, timeout};

use super::{QUICK, awake_pods, condition, report_load, state, target};
use crate::{
    installation::{Installation, blocking},
    memory::until_metric,
    support::FIELD_MANAGER,
};

/// Applies the ConfigMap with this entry for all models.
async fn configure(world: &Installation<'_>, default: &str) {
    let name = "rouse-saturation-config";
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"default": default},
    });
    let maps: Api<ConfigMap> = world.site.namespace.api();
    maps.patch(name, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&map)).await.unwrap();
}

fn thresholds(model: &InferenceModel) -> &str {
    let saturation = model.status.as_ref().and_then(|status| status.saturation.as_ref());
    saturation.and_then(|saturation| saturation.thresholds.as_deref()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_entry_is_refused_with_its_reason_and_the_last_good_one_stays_until_it_is_corrected() {
    let world = Installation::new("saturation-bad", 2, "128Gi").await;
    configure(&world, "queueLengthThreshold: 2\nqueueSpareTrigger: 1").await;
    world.model("qwen", "40Gi", "", json!({"minReplicas": 1, "maxReplicas": 2, "saturation": {}})).await;
    let gateway = world.gateway_with("gateway-0", QUICK);
    let pods = awake_pods(&world, "qwen", 1).await;
    // With the good entry one place in the queue is spare, which is enough.
    report_load(&pods, 0.0, 1).await;
    world.until("qwen", "the ConfigMap's", |model| thresholds(model).contains("2 waiting")).await;

    configure(&world, "queueLengthThreshold: 2\nqueueSpareTrigger: 7").await;
    let refused = ("False".to_owned(), "InvalidThresholds".to_owned());
    let model = world.until("qwen", "refused", |model| state(model, "ThresholdsAccepted") == refused).await;
    let message = &condition(&model, "ThresholdsAccepted").unwrap().message;
    assert!(message.contains("entry default") && message.contains("queueSpareTrigger (7)"), "{message}");
    assert!(thresholds(&model).contains("2 waiting"), "{}", thresholds(&model));
    until_metric(&gateway, "rouse_saturation_thresholds_refused 1").await;
    gateway.until_logged("WARN", "thresholds refused").await;
    assert_eq!(target(&world.models().get("qwen").await.unwrap(), "default"), 1);

    configure(&world, "queueLengthThreshold: 2\nqueueSpareTrigger: 2").await;
    let model = world.until("qwen", "the corrected one's", |model| target(model, "default") == 2).await;
    assert_eq!(condition(&model, "ThresholdsAccepted"), None);
    until_metric(&gateway, "rouse_saturation_thresholds_refused 0").await;
    world.edit("qwen", json!({"saturation": {"queueLengthThreshold": 50}})).await;
    world.until("qwen", "its own", |model| thresholds(model).contains("50 waiting")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_scales_no_model_by_its_load_asks_for_no_thresholds() {
    let world = Installation::new("saturation-off", 1, "16Gi").await;
    world.model("qwen", "10Gi", "", json!({"maxReplicas": 2, "saturation": {}})).await;
    let asks_for = |resource: &str| {
        let calls = world.site.cluster.calls(&world.site.account).unwrap();
        calls.iter().any(|call| call.resource == resource)
    };
    let off = world.gateway_with("gateway-0", ", saturation: {enabled: false}");
    let client = off.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    assert!(asks_for("inferencemodels") && !asks_for("configmaps"));

    // With the same rights, one that scales by load asks at once.
    let _on = world.gateway("gateway-1", "");
    let asked = async {
        while !asks_for("configmaps") {
            sleep(Duration::from_millis(200)).await;
        }
    };
    timeout(WAIT_TIMEOUT, asked).await.expect("it never asks for the ConfigMap");
}
