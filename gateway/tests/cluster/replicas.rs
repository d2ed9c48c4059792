//! Several gateways: all serve, one decides, and another does when that one is gone.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;

use crate::world::{World, aside, reason};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_waits_at_any_gateway_starts_its_model_and_is_served_there() {
    let world = World::new("replicas-any", 4, "128Gi").await;
    world.model("one", "40Gi", "", json!({})).await;
    world.model("two", "40Gi", "", json!({})).await;
    let mut gateways = vec![world.gateway("gateway-0", ""), world.gateway("gateway-1", "")];
    // Whichever of them leads, one of these models is asked for at the other.
    for (gateway, model) in gateways.iter().zip(["one", "two"]) {
        let client = gateway.client();
        let answer = aside(move || client.chat(model, true, 4)).await;
        assert!(answer.is_whole_stream(), "{answer:?}");
    }
    let pods = world.running().await;
    assert_eq!(pods.len(), 2);
    // Both know both by now, and route by that.
    for gateway in &gateways {
        for model in ["one", "two"] {
            let client = gateway.client();
            assert_eq!(aside(move || client.chat(model, false, 4)).await.status, 200);
        }
    }
    assert_eq!(world.running().await.len(), 2, "nothing was started twice");

    // One is killed. Whether it led or not, the other serves on, at once and from nothing.
    let killed = gateways.remove(0);
    killed.signal(Signal::SIGKILL);
    let client = gateways[0].client();
    for model in ["one", "two"] {
        assert_eq!(aside(move || client.chat(model, false, 4)).await.status, 200);
    }
    world.model("three", "40Gi", "", json!({})).await;
    world.until("three", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let cold = tokio::time::timeout(Duration::from_secs(60), aside(move || client.chat("three", false, 4)));
    assert_eq!(cold.await.unwrap().status, 200);
    assert_eq!(world.booked().await.len(), 3);
}
