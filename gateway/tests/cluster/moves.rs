//! Models that move to another pool while no gateway leads.

use nix::sys::signal::Signal;
use serde_json::json;

use kube::api::{DeleteParams, ListParams};
use rouse_cluster::wait;

use crate::installation::{Installation, blocking};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_in_a_pool_that_its_model_no_longer_names_goes_and_gives_its_memory_back() {
    Box::pin(given_back("moves-runs", false)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_booking_in_a_pool_that_its_model_no_longer_names_is_given_back() {
    Box::pin(given_back("moves-gone", true)).await;
}

/// A leader ends, the model moves to another pool, and another gateway leads. With `gone` the engine has ended
/// meanwhile.
async fn given_back(name: &str, gone: bool) {
    let world = Installation::new(name, 1, "64Gi").await;
    world.model("qwen", "40Gi", "", json!({})).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 40)]);
    gateway.signal(Signal::SIGKILL);
    gateway.wait_owned().await;

    let elsewhere = json!({"inference-pool": format!("{}-b", world.name())});
    world.pool(&format!("{}-b", world.name()), json!({"nodeSelector": elsewhere, "memory": "64Gi"})).await;
    world.model("qwen", "40Gi", "", json!({"nodeSelector": elsewhere})).await;
    if gone {
        for deployment in world.deployments().list(&ListParams::default()).await.unwrap() {
            let name = deployment.metadata.name.unwrap();
            world.deployments().delete(&name, &DeleteParams::foreground()).await.unwrap();
        }
        for pod in world.running().await {
            let name = pod.metadata.name.unwrap();
            wait::until(&world.pods(), &name, "gone", |pod: &Option<_>| pod.is_none()).await.unwrap();
        }
    }
    let _gateway = world.gateway("gateway-1", "");
    world.until_reserved("nothing", <[_]>::is_empty).await;
    assert_eq!(world.running().await.len(), 0);
}
