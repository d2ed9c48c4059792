//! The end of a DeviceConfiguration.

use kube::api::DeleteParams;
use serde_json::json;

use super::fixture::SlotsFixture;

/// No leader acts here. `leader` has its part: it deletes the instance once no slot is in use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_configuration_is_offered_on_no_node_and_its_claims_outlive_it() {
    let fixture = SlotsFixture::new("slots-deleted", &["a", "b"]).await;
    let [a, b] = fixture.nodes(["a", "b"]).await;
    let device = fixture.share("box", 2, json!({})).await;
    a.until_health(&device, [true, true]).await;
    b.until_health(&device, [true, true]).await;
    a.kubelet.allocate_ids("worker", &device.resource(), &device.slots([1])).await.unwrap();
    b.until_health(&device, [true, false]).await;
    let name = fixture.configuration_name("box");
    fixture.configurations().delete(&name, &DeleteParams::default()).await.unwrap();
    let kind = format!("rouse.dev/{name}");
    for node in [&a, &b] {
        node.until_all(&device, false).await;
        node.until_devices(&kind, "no healthy device", |found| !found.values().any(|healthy| *healthy)).await;
    }
    assert_eq!(device.usage().await, device.map(["", &a.name]), "a container lost its slot");

    // The same name is the same devices, and no other node gets the slot that a container has.
    fixture.share("box", 2, json!({})).await;
    a.until_health(&device, [true, true]).await;
    b.until_health(&device, [true, false]).await;
    assert_eq!(device.usage().await, device.map(["", &a.name]));
}
