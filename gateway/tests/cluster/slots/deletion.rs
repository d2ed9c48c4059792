//! The end of a DeviceConfiguration.

use kube::api::DeleteParams;
use serde_json::json;

use super::fixture::SlotsFixture;

/// Kubernetes deletes the instance by its owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_instances_of_a_deleted_configuration_go_and_no_node_offers_its_slots_any_more() {
    let fixture = SlotsFixture::new("slots-deleted", &["a"]).await;
    let [node] = fixture.nodes(["a"]).await;
    let device = fixture.share("box", 1, json!({})).await;
    node.until_health(&device, [true]).await;
    let name = fixture.configuration_name("box");
    fixture.configurations().delete(&name, &DeleteParams::default()).await.unwrap();
    device.until_gone().await;
    node.until_all(&device, false).await;
    let kind = format!("rouse.dev/{name}");
    node.until_devices(&kind, "no healthy device", |found| !found.values().any(|healthy| *healthy)).await;

    // The same name is another configuration.
    let device = fixture.share("box", 2, json!({})).await;
    node.until_health(&device, [true, true]).await;
    device.until_usage(["", ""]).await;
}
