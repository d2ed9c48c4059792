//! A claim of one node: what its container gets, what the object says, and what the other kubelets see.

use std::time::Duration;

use nix::sys::signal::Signal;
use rouse::slots::property_suffix;
use rouse_cluster::device_manager::DeviceHealth;
use serde_json::json;
use tokio::time::Instant;

use super::{device::SharedDevice, fixture::SlotsFixture};

/// Longest time until every other kubelet knows a claim.
const SEEN_WITHIN: Duration = Duration::from_secs(1);

/// The example of the design: five slots, and `node-a` claims the one with the number 3.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_of_capacity_five_has_five_slots_and_what_node_a_claims_is_unhealthy_everywhere_else() {
    let fixture = SlotsFixture::new("slots-claim", &["node-a", "node-b", "node-c"]).await;
    let [a, b, c] = fixture.nodes(["node-a", "node-b", "node-c"]).await;
    let device = fixture.share("box", 5, json!({})).await;
    let resource = device.resource();
    device.until_usage([""; 5]).await;
    let mut nodes = [&a, &b, &c].map(|node| node.name.clone());
    nodes.sort();
    let listed = |found: &[String]| {
        let mut found = found.to_vec();
        found.sort();
        found == nodes
    };
    let object = device.until("three nodes", |status| listed(&status.nodes)).await;
    assert_eq!((object.spec.capacity, object.spec.shared), (5, true));
    for node in [&a, &b, &c] {
        node.until_health(&device, [true; 5]).await;
    }

    let third = device.slots([3]);
    let granted = a.kubelet.allocate_ids("worker", &resource, &third).await.unwrap();
    let granted_at = Instant::now();
    let others = [true, true, true, false, true];
    tokio::join!(b.until_health(&device, others), c.until_health(&device, others));
    assert!(granted_at.elapsed() < SEEN_WITHIN, "{:?}", granted_at.elapsed());
    let own = a.name.as_str();
    assert_eq!(device.usage().await, device.map(["", "", "", own, ""]));
    assert_eq!(a.kubelet.devices(&resource).values().filter(|healthy| **healthy).count(), 5);
    let annotation = format!("slot.rouse.dev/{}", device.slot(3));
    assert_eq!(granted.allocation.annotations[&annotation], format!("{} {own}", device.name));
}

/// The kubelet of `b` asks for a slot that it last saw free. The test runs on one thread, on which the list that comes
/// before the error is also read before it.
#[tokio::test]
async fn a_stale_request_gets_an_error_after_the_true_list_and_does_not_touch_the_claim() {
    let fixture = SlotsFixture::new("slots-stale", &["a", "b"]).await;
    let [a, b] = fixture.nodes(["a", "b"]).await;
    let device = fixture.share("box", 3, json!({})).await;
    let resource = device.resource();
    a.until_health(&device, [true; 3]).await;
    b.until_health(&device, [true; 3]).await;

    b.signal(Signal::SIGSTOP);
    let [first] = device.slots([0]);
    a.kubelet.allocate_ids("winner", &resource, std::slice::from_ref(&first)).await.unwrap();
    let claimed = device.object().await;
    // All or nothing: the other two slots are free.
    let all = device.slots([2, 1, 0]);
    let go_on = async { b.signal(Signal::SIGCONT) };
    let (refused, ()) = tokio::join!(b.kubelet.allocate_ids("loser", &resource, &all), go_on);
    assert!(!b.kubelet.last_list(&resource)[&first], "the list was not sent before the error");
    let refused = refused.unwrap_err();
    let words = format!("node {} has claimed slot {first} meanwhile", a.name);
    assert!(refused.contains("FailedPrecondition") && refused.contains(&words), "{refused}");
    assert_eq!(device.object().await, claimed, "the refused request changed the object");

    let two = device.slots([1, 2]);
    b.kubelet.allocate_ids("pair", &resource, &two).await.unwrap();
    assert_eq!(device.usage().await, device.map([&a.name, &b.name, &b.name]));
    a.until_health(&device, [true, false, false]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_asks_for_two_of_a_kind_gets_different_devices_with_the_properties_of_both() {
    let fixture = SlotsFixture::new("slots-kind", &["a", "b"]).await;
    let [a, b] = fixture.nodes(["a", "b"]).await;
    let devices = json!([
        {"id": "left", "properties": {"port": "9001"}},
        {"id": "right", "properties": {"port": "9002"}},
    ]);
    let spec = json!({
        "capacity": 2,
        "discovery": {"static": {"devices": devices}},
        "env": {"ADDRESS": "$(id):$(port)"},
        "mounts": [{"hostPath": "/etc/box", "containerPath": "/box", "readOnly": true}],
        "devices": [{"hostPath": "/dev/null", "containerPath": "/dev/box", "permissions": "r"}],
    });
    let kind = format!("rouse.dev/{}", fixture.configuration_name("kind"));
    fixture.configure("kind", spec).await;
    let both = ["left", "right"].map(|id| fixture.device("kind", id, None));
    for node in [&a, &b] {
        for device in &both {
            node.until_health(device, [true, true]).await;
        }
        node.until_devices(&kind, "one device for each instance", |found| found.len() == 2).await;
    }

    let granted = a.kubelet.allocate("pair", &kind, 2).await.unwrap();
    for device in &both {
        let usage = device.usage().await;
        let used: Vec<&String> = usage.values().filter(|usage| !usage.is_empty()).collect();
        assert!(
            matches!(&used[..], [usage] if usage.starts_with("C:") && usage.ends_with(&a.name)),
            "{used:?}"
        );
        // The slots of the kind are no slots of the instance, on no node.
        let taken = |found: &DeviceHealth| found.values().filter(|healthy| !**healthy).count() == 1;
        for node in [&a, &b] {
            node.until_devices(&device.resource(), "one slot that is taken", taken).await;
        }
    }
    let allocation = granted.allocation;
    let property =
        |device: &SharedDevice| allocation.env[&format!("PORT_{}", property_suffix(&device.name))].clone();
    assert_eq!(both.each_ref().map(property), ["9001", "9002"]);
    assert!(["left:9001", "right:9002"].contains(&allocation.env["ADDRESS"].as_str()), "{allocation:?}");
    assert_eq!((allocation.mounts.len(), allocation.devices.len()), (1, 1), "{allocation:?}");
    assert_eq!(allocation.annotations.len(), 2, "{allocation:?}");

    // Two more fit, and then nothing is left on any node.
    b.kubelet.allocate("pair", &kind, 2).await.unwrap();
    let held = |found: &DeviceHealth| found.len() == 2;
    a.until_devices(&kind, "its own two devices", held).await;
    let refused = a.kubelet.allocate("one more", &kind, 1).await.unwrap_err();
    assert!(refused.contains("1 devices requested, 0 available"), "{refused}");
}
