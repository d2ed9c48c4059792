//! Models that the gateway scales by the load of their engines. Tests set what the engines report.

mod admission;
mod alerts;
mod autoscaler;
mod chart_autoscaler;
mod external_metrics;
mod metrics_api;
mod outages;
mod thresholds;
mod timelines;

use std::net::SocketAddr;

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Condition};
use kube::ResourceExt as _;
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::crd::{InferenceModel, inference_model::EngineState};
use tokio::time::{Duration, sleep, timeout};

use crate::{
    client::TestClient,
    installation::{ClusterGateway, Installation, blocking},
    pairs,
};

/// Settings of a gateway that decides five times a second, by the load of the last second.
const QUICK: &str = ", saturation: {interval: 200ms, window: 1s, stabilisation: 0s}";

/// Sets what the engines in these Pods report from now on: use of the KV cache and waiting requests.
async fn report_load(pods: &[Pod], kv_use: f64, waiting: u32) {
    set_faults(pods, &format!(r#"{{"kv-use": {kv_use}, "queue-length": {waiting}}}"#)).await;
}

async fn set_faults(pods: &[Pod], faults: &str) {
    for pod in pods {
        let engine = TestClient::new(SocketAddr::new(pairs::address(pod), 8000));
        let faults = faults.to_owned();
        let answer = blocking(move || engine.post("/sim/faults", &faults)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
}

/// Target of each variant in the model's status.
fn targets(model: &InferenceModel) -> Vec<(&str, u32)> {
    let saturation = model.status.as_ref().and_then(|status| status.saturation.as_ref());
    let targets = saturation.map(|saturation| saturation.targets.as_slice()).unwrap_or_default();
    targets.iter().map(|target| (target.variant.as_str(), target.replicas)).collect()
}

/// Target of one variant; 0 without one.
fn target(model: &InferenceModel, variant: &str) -> u32 {
    targets(model).into_iter().find(|(name, _)| *name == variant).map_or(0, |(_, replicas)| replicas)
}

/// Number of awake engines.
fn awake(model: &InferenceModel) -> usize {
    let engines = model.status.as_ref().map(|status| status.engines.as_slice()).unwrap_or_default();
    engines.iter().filter(|engine| engine.state == EngineState::Awake).count()
}

fn condition<'a>(model: &'a InferenceModel, kind: &str) -> Option<&'a Condition> {
    model.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == kind)
}

/// Status and reason of a condition; empty without it.
fn state(model: &InferenceModel, kind: &str) -> (String, String) {
    let found = condition(model, kind);
    found.map(|found| (found.status.clone(), found.reason.clone())).unwrap_or_default()
}

/// Value of the first series of this gateway that begins so.
fn metric(gateway: &ClusterGateway, series: &str) -> Option<f64> {
    let text = gateway.metrics();
    let line = text.lines().find(|line| line.starts_with(series))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

/// Waits until the gateway has decided this many times more by current metrics, or failed to read as often.
async fn after_readings(gateway: &ClusterGateway, labels: &str, count: f64) {
    let series = format!("rouse_saturation_readings_total{{{labels}}}");
    let before = metric(gateway, &series).unwrap_or_default();
    let counted = async {
        while metric(gateway, &series).unwrap_or_default() < before + count {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(WAIT_TIMEOUT, counted).await.unwrap_or_else(|_| panic!("{series} stands still at {before}"));
}

/// Waits until this many engines of the model are awake, and returns their Pods.
async fn awake_pods(world: &Installation<'_>, model: &str, count: usize) -> Vec<Pod> {
    world.until(model, &format!("{count} awake engines"), |model| awake(model) == count).await;
    let pods = world.running().await;
    assert_eq!(pods.len(), count);
    pods
}

/// The Pods of the model's engines in this state.
async fn pods_in(world: &Installation<'_>, model: &InferenceModel, state: EngineState) -> Vec<Pod> {
    let engines = model.status.as_ref().map(|status| status.engines.as_slice()).unwrap_or_default();
    let names: Vec<&str> =
        engines.iter().filter(|engine| engine.state == state).map(|engine| engine.pod.as_str()).collect();
    world.running().await.into_iter().filter(|pod| names.contains(&pod.name_any().as_str())).collect()
}
