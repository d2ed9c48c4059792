//! The flows of an operator with a budget: a model that is cold, one that goes to sleep, one for which there is no room.

use std::time::Duration;

use serde_json::json;

use crate::world::{World, aside};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cold_model_is_started_by_its_first_request_and_put_away_when_nobody_asks() {
    let world = World::new("flow-cold", 1, "128Gi").await;
    world.model("qwen", "80Gi", "", json!({"cooldownPeriod": "2s"})).await;
    let gateway = world.gateway("gateway-0", "");
    world.until("qwen", "accepted", |model| crate::world::reason(model, "Accepted") == "Accepted").await;
    assert_eq!(world.running().await.len(), 0, "nothing is started before somebody asks");

    let client = gateway.client();
    let answer = aside(move || client.chat("qwen", true, 8)).await;
    assert!(answer.is_whole_stream(), "{answer:?}");
    assert_eq!(answer.header("x-rouse-cold-start"), "cold");
    assert_eq!(world.booked().await, [("qwen".to_owned(), 80)]);
    world.until("qwen", "ready", |model| model.status.as_ref().is_some_and(|status| status.ready)).await;
    assert_eq!(world.running().await.len(), 1);

    let zero = |model: &_| crate::world::reason(model, "Ready") == "ScaledToZero";
    tokio::time::timeout(Duration::from_secs(30), world.until("qwen", "scaled to zero", zero)).await.unwrap();
    assert_eq!(world.booked().await, []);
    assert_eq!(world.running().await.len(), 0);
}
