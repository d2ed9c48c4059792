//! The end of a Pod: its slot is free again.

use rouse_cluster::wait::WAIT_TIMEOUT;
use serde_json::json;
use tokio::time::{Duration, sleep, timeout};

use super::slots_node::{SlotsNode, slots_node};
use crate::shared_node::run;

/// Between two queries of the kubelet, which reports no end of a container.
const QUERY_INTERVAL: Duration = Duration::from_millis(50);

/// The agent leaves a slot alone for a minute after it has given it to a container. Other tests use the node meanwhile.
#[test]
fn a_slot_whose_pod_has_ended_is_marked_as_unused_and_then_free() {
    run(async {
        let (device, own) = {
            let node = slots_node().await;
            // A query of the agent finds the slot unused, and the next one frees it.
            let device = node.share("brief", 1, json!({"unusedSeconds": 1})).await;
            node.create_worker("brief", &device.resource()).await;
            node.until_ready("brief").await;
            assert_eq!(device.usage().await, device.map([node.name()]));
            let given = [(device.resource(), vec![device.slot(0)])];
            assert_eq!(devices_of(&node, "brief").await, given);

            node.delete_worker("brief").await;
            let released = async {
                while !devices_of(&node, "brief").await.is_empty() {
                    sleep(QUERY_INTERVAL).await;
                }
            };
            timeout(WAIT_TIMEOUT, released).await.expect("the kubelet lists a Pod that is gone");
            (device, node.name().to_owned())
        };
        let marked = device.until("its slot to be unused", |status| !status.unused_since.is_empty()).await;
        let status = marked.status.unwrap();
        assert_eq!(status.device_usage, device.map([&own]), "it was freed before its time");
        assert!(status.unused_since.contains_key(&device.slot(0)), "{status:?}");
        device.until_usage([""]).await;
        assert!(device.object().await.status.unwrap().unused_since.is_empty());
    });
}

/// The resources that the kubelet lists for this Pod, each with its devices.
async fn devices_of(node: &SlotsNode, pod: &str) -> Vec<(String, Vec<String>)> {
    let listed = node.runner().pod_devices().await.unwrap().into_iter();
    let own =
        listed.filter(|devices| devices.namespace == node.ground.installation.name() && devices.pod == pod);
    own.map(|devices| (devices.resource, devices.ids)).collect()
}
