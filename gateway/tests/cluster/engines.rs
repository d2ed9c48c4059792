//! How the gateway handles and reports the end of an engine.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse::units::Bytes;
use serde_json::json;

use crate::{
    client::TestClient,
    installation::{Installation, blocking, reason},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_dies_is_replaced_and_its_memory_is_booked_once() {
    let world = Installation::new("engine-dies", 2, "64Gi").await;
    world.model("qwen", "40Gi", "", json!({})).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    // The status reports the engine some time later, and could otherwise be mistaken for that of a dead engine.
    world.until("qwen", "ready", |model| reason(model, "Ready") == "Deployed").await;
    let pods = world.running().await;
    let processes = world.runner.processes(&pods[0]);
    let (_, engine) = processes.iter().find(|(container, _)| container == "engine").unwrap();
    kill(Pid::from_raw(*engine), Signal::SIGKILL).unwrap();
    let failed = world.until("qwen", "seen dead", |model| reason(model, "Ready") != "Deployed").await;
    assert!(!failed.status.unwrap().ready);
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 40)]);
    let now = world.running().await;
    assert_eq!(now.len(), 1);
    assert_ne!(now[0].metadata.uid, pods[0].metadata.uid, "what it had is gone with its Pod");
}

/// Metrics that readers of the original design look for, and the number of writes to the cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_name_the_pool_and_count_the_writes() {
    let world = Installation::new("engine-metrics", 2, "64Gi").await;
    world.model("qwen", "40Gi", "", json!({})).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    world.until("qwen", "ready", |model| reason(model, "Ready") == "Deployed").await;
    let admin = TestClient::new(gateway.admin);
    let text = blocking(move || admin.get("/metrics").text()).await;
    let value = |name: &str| {
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let deployments = "rouse_kubernetes_writes_total{kind=\"Deployment\",outcome=\"done\"}";
    assert!((value(deployments) - 1.0).abs() < 0.5, "one Deployment, written once: {text}");
    let made = world.deployments().list(&kube::api::ListParams::default()).await.unwrap();
    assert_eq!(made.items.len(), 1);
    let budget = format!("inference_budget_allocated_bytes{{node_pool=\"{}\"}}", world.name());
    assert!((value(&budget) - Bytes::gib(40).0 as f64).abs() < 1.0, "what the model has booked: {text}");
    assert!(!text.contains("node_pool=\"local\""), "there is no pool of one machine here: {text}");
}
