//! The kubelet and the agent restart. The resources come back, and containers keep their slots.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;
use tokio::time::Instant;

use super::{agent::SlotNodeFixture, device::SharedDevice, fixture::SlotsFixture};

/// Longest time until the kubelet has the resources again.
const BACK_WITHIN: Duration = Duration::from_secs(10);

/// Waits until all of the slots of `device` and all `devices` of the resource `kind` are healthy.
async fn until_back(node: &SlotNodeFixture, device: &SharedDevice, kind: &str, devices: usize) {
    let restarted_at = Instant::now();
    node.until_health(device, [true; 3]).await;
    let whole = format!("{devices} healthy devices");
    node.until_devices(kind, &whole, |found| found.len() == devices && found.values().all(|health| *health))
        .await;
    assert!(restarted_at.elapsed() < BACK_WITHIN, "{:?}", restarted_at.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_of_kubelet_or_agent_the_resources_are_back_and_containers_keep_their_slots() {
    let fixture = SlotsFixture::new("slots-restart", &["a"]).await;
    let [mut a] = fixture.nodes(["a"]).await;
    let device = fixture.share("box", 3, json!({})).await;
    let resource = device.resource();
    let kind = format!("rouse.dev/{}", fixture.configuration_name("box"));
    until_back(&a, &device, &kind, 1).await;
    assert_eq!(a.kubelet.allocate("first", &resource, 1).await.unwrap().ids, device.slots([0]));
    let claimed = device.object().await;

    let registrations = a.kubelet.registrations(&resource);
    a.restart_kubelet().await;
    until_back(&a, &device, &kind, 1).await;
    assert!(a.kubelet.registrations(&resource) > registrations);
    assert_eq!(device.object().await, claimed, "a restart of the kubelet changed the object");
    assert_eq!(a.kubelet.allocate("second", &resource, 1).await.unwrap().ids, device.slots([1]));
    let claimed = device.object().await;

    // An agent that ends says that it has no devices any more.
    a.signal(Signal::SIGTERM);
    a.agent_ended().await;
    a.until_all(&device, false).await;
    assert!(a.kubelet.last_list(&resource).values().all(|healthy| !healthy), "the last list was not sent");
    a.start();
    until_back(&a, &device, &kind, 1).await;
    assert_eq!(device.object().await, claimed, "a restart of the agent changed the object");

    // As after a reboot: neither is there when the other one starts.
    a.kill(&device).await;
    a.stop_kubelet().await;
    a.start();
    a.resume_kubelet().await;
    until_back(&a, &device, &kind, 1).await;
    assert_eq!(device.object().await, claimed, "a reboot changed the object");
    assert_eq!(a.kubelet.allocate("third", &resource, 1).await.unwrap().ids, device.slots([2]));
    assert_eq!(device.usage().await, device.map([&a.name; 3]));
}
