//! What becomes of a slot whose container is gone.

use std::time::Duration;

use rouse_controllers::crd::DeviceInstanceStatus;
use serde_json::json;
use tokio::time::Instant;

use super::fixture::SlotsFixture;

/// Longest time until another kubelet knows that a slot is free.
const SEEN_WITHIN: Duration = Duration::from_secs(1);

/// The agent is killed meanwhile: the marks are in the object, and no agent remembers anything else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_without_a_container_is_freed_later_and_a_container_that_vanished_for_a_while_keeps_its_slot()
{
    let fixture = SlotsFixture::new("slots-unused", &["a", "b"]).await;
    let [mut a, b] = fixture.nodes(["a", "b"]).await;
    let device = fixture.share("box", 2, json!({"unusedSeconds": 2})).await;
    let resource = device.resource();
    a.until_health(&device, [true, true]).await;
    b.until_health(&device, [true, true]).await;
    let [gone, vanished] = device.slots([0, 1]);
    for (pod, slot) in [("gone", &gone), ("vanished", &vanished)] {
        a.kubelet.allocate_ids(pod, &resource, std::slice::from_ref(slot)).await.unwrap();
    }
    b.until_health(&device, [false, false]).await;

    // An agent does not mark a slot that it has granted itself within the last minute.
    a.kill(&device).await;
    a.kubelet.release("gone");
    a.kubelet.set_listed("vanished", false);
    a.start();
    let is_marked = |status: &DeviceInstanceStatus, slot: &str| status.unused_since.contains_key(slot);
    let both_marked =
        |status: &DeviceInstanceStatus| is_marked(status, &gone) && is_marked(status, &vanished);
    let marked = device.until("both slots to be marked as unused", both_marked).await.status.unwrap();
    assert_eq!(marked.device_usage, device.map([&a.name, &a.name]), "a marked slot is still claimed");

    a.kubelet.set_listed("vanished", true);
    let is_free = |status: &DeviceInstanceStatus| status.device_usage[&gone].is_empty();
    device.until("the slot of the Pod that is gone to be free", is_free).await;
    let freed_at = Instant::now();
    b.until_health(&device, [true, false]).await;
    assert!(freed_at.elapsed() < SEEN_WITHIN, "{:?}", freed_at.elapsed());
    let no_marks = |status: &DeviceInstanceStatus| status.unused_since.is_empty();
    let status = device.until("no marks", no_marks).await.status.unwrap();
    assert_eq!(status.device_usage, device.map(["", &a.name]));
}

/// The kubelet does not answer, so nothing is known about containers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_kubelet_cannot_be_asked_no_slot_is_marked_or_freed() {
    let fixture = SlotsFixture::new("slots-silent", &["a"]).await;
    let [mut a] = fixture.nodes(["a"]).await;
    let device = fixture.share("box", 1, json!({"unusedSeconds": 1})).await;
    a.until_health(&device, [true]).await;
    a.kubelet.allocate("worker", &device.resource(), 1).await.unwrap();
    a.kill(&device).await;
    let claimed = device.object().await;
    a.kubelet.release("worker");
    a.stop_kubelet().await;
    a.start();
    a.until_logged("cannot list the slots in use").await;
    assert_eq!(device.object().await, claimed);

    a.resume_kubelet().await;
    device.until("the mark", |status| !status.unused_since.is_empty()).await;
}
