//! Whether an engine uses the accelerators of its requester.

use rouse_controllers::crd::InferenceModel;
use serde_json::json;

use super::{
    DualPodsFixture,
    models::{asks, model_with, pods},
};
use crate::installation::blocking;

/// MiB of an accelerator that the driver itself uses.
const DRIVERS: u64 = 450;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_takes_nothing_of_its_accelerator_serves_nobody() {
    let duo = DualPodsFixture::new("dual-proof", 1, "8Gi", "").await;
    let node = duo.world.runner.node(&format!("{}-a", duo.world.name()));
    let (accelerator, _) = node.devices().remove(0);
    let reads = |mib| duo.world.set_accelerators("one", &[(&accelerator, mib)]);
    reads(DRIVERS);
    model_with(&duo, "one", "--load-time 1s", json!({})).await;
    let client = duo.gateway.client();
    let refused = blocking(move || client.chat("one", false, 4)).await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    let told = |model: &InferenceModel| {
        let status = model.status.clone().unwrap_or_default();
        let says = |text: &str| text.contains("NoDeviceAccess") && text.contains(&accelerator);
        status.conditions.iter().any(|condition| says(&condition.message))
    };
    duo.world.until("one", "why", told).await;
    let find = async || pods(&duo, "one").await;
    duo.world.until_pods(find, "none left", |_, engines| engines.is_empty()).await;

    // The engine's Pod reaches the accelerator from here on, and the refused client retries after its `retry-after`.
    let wait = refused.header("retry-after").parse().unwrap();
    tokio::time::sleep(std::time::Duration::from_secs(wait)).await;
    let mended = async {
        duo.world.until_pods(find, "the next engine", |_, engines| !engines.is_empty()).await;
        reads(DRIVERS + (40 << 10));
    };
    tokio::join!(asks(&duo, "one"), mended);
}
