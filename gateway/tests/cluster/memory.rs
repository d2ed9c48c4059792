//! Accelerator memory of engines, as the stubs beside them measure it.

use nix::sys::signal::Signal;
use rouse::units::Bytes;
use rouse_controllers::crd::{InferenceModel, Quantity};
use serde_json::json;
use tokio::time::{Duration, sleep, timeout};

use crate::installation::{ClusterGateway, Installation, blocking, reason};

fn peak(model: &InferenceModel) -> Option<Bytes> {
    model.status.as_ref()?.observed_peak_memory.as_ref().map(|peak| peak.bytes().unwrap())
}

/// Waits until the gateway's metrics have this line.
pub(crate) async fn until_metric(gateway: &ClusterGateway, line: &str) {
    let told = async {
        while !gateway.metrics().lines().any(|found| found == line) {
            sleep(Duration::from_millis(50)).await;
        }
    };
    let told = timeout(rouse_cluster::wait::WAIT_TIMEOUT, told).await;
    assert!(told.is_ok(), "no {line} in\n{}", gateway.metrics());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_most_that_an_engine_used_is_in_its_model_s_status_and_outlives_its_gateway() {
    let world = Installation::new("memory-peak", 2, "128Gi").await;
    world.set_accelerators("qwen", &[("GPU-a", 60 << 10)]);
    world.model("qwen", "80Gi", "", json!({})).await;
    let gateway = world.gateway("gateway-0", "");
    world.until("qwen", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);

    let seen = world.until("qwen", "seen", |model| peak(model) == Some(Bytes::gib(60))).await;
    let status = seen.status.unwrap();
    assert_eq!(status.utilization_percent, Some(75));
    assert!(status.recommendation.unwrap().starts_with("declare memory: 66Gi instead of 80Gi"));
    assert!(status.last_observation.is_some());
    assert_eq!(status.learned.unwrap().peak, Some(Quantity::from(Bytes::gib(60))));
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 80)], "what is declared stays booked");
    let own = world.name();
    let line = format!(
        "inference_model_memory_observed_peak_bytes{{model=\"qwen\",namespace=\"{own}\"}} {}",
        Bytes::gib(60).0
    );
    until_metric(&gateway, &line).await;

    // The engine uses less by now. The next gateway has read only the lower value, and knows the recorded peak.
    world.set_accelerators("qwen", &[("GPU-a", 50 << 10)]);
    gateway.signal(Signal::SIGKILL);
    gateway.wait_owned().await;
    let gateway = world.gateway("gateway-1", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.header("x-rouse-cold-start"), "");
    until_metric(&gateway, &line).await;
    until_metric(&gateway, "rouse_accelerator_readings_total{outcome=\"done\",source=\"stub\"} 1").await;
    assert_eq!(peak(&world.models().get("qwen").await.unwrap()), Some(Bytes::gib(60)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_others_use_of_the_same_accelerator_is_no_engine_s_peak() {
    let world = Installation::new("memory-shared", 3, "128Gi").await;
    let own = world.name().to_owned();
    let shared = json!({"nodeSelector": {"inference-pool": own}, "memory": "128Gi", "slots": 2});
    world.pool(&own, shared).await;
    for (model, mib) in [("first", 30 << 10), ("second", 55 << 10), ("wide", 0)] {
        world.set_accelerators(model, &[("GPU-a", mib)]);
        world.model(model, "30Gi", "", json!({})).await;
    }
    // As in a container that sees other Pods' accelerators, too.
    world.set_accelerators("wide", &[("GPU-b", 70 << 10), ("GPU-c", 70 << 10)]);
    let gateway = world.gateway("gateway-0", "");
    world.until("wide", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("first", false, 4)).await.status, 200);
    world.until("first", "seen", |model| peak(model) == Some(Bytes::gib(30))).await;

    let left_out = |count: u32| {
        format!("rouse_accelerator_readings_total{{outcome=\"left_out\",source=\"stub\"}} {count}")
    };
    assert_eq!(blocking(move || client.chat("second", false, 4)).await.status, 200);
    until_metric(&gateway, &left_out(1)).await;
    assert_eq!(blocking(move || client.chat("wide", false, 4)).await.status, 200);
    until_metric(&gateway, &left_out(2)).await;
    for (model, expected) in [("first", Some(Bytes::gib(30))), ("second", None), ("wide", None)] {
        assert_eq!(peak(&world.models().get(model).await.unwrap()), expected, "{model}");
    }
}
