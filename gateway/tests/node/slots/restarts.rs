//! Restarts of the kubelet, of the agent, of the container runtime, and of the whole node.

use std::collections::BTreeMap;

use rouse_cluster::node::NodeOutage;
use serde_json::json;
use tokio::time::{Duration, Instant};

use super::{
    device::SharedDevice,
    slots_node::{SlotsNode, kind, slots_node},
    worker::RunningWorker,
};
use crate::shared_node::run;

/// Longest time until the kubelet offers the resources again.
const BACK_WITHIN: Duration = Duration::from_secs(10);
/// ReplicaSets of one Pod each: one requests the kind, the other one the device.
const SETS: [&str; 2] = ["kept-kind", "kept-device"];

/// A device whose two slots are both in use.
struct KeptSlots {
    device: SharedDevice,
    usage: BTreeMap<String, String>,
}

impl KeptSlots {
    async fn new(node: &SlotsNode) -> Self {
        let device = node.share("kept", 2, json!({})).await;
        let resources = [kind("kept"), device.resource()];
        // Of the two slots, the instance has the one that the kind has not.
        let left = [2, 1].map(|devices: u32| [(resources[0].as_str(), devices), (resources[1].as_str(), 1)]);
        for ((set, resource), left) in SETS.into_iter().zip(&resources).zip(&left) {
            node.create_set(set, resource).await;
            node.until_set_ready(set).await;
            node.until_allocatable(left).await;
        }
        let usage = device.usage().await;
        let own = node.name();
        let mut uses: Vec<&str> = usage.values().map(String::as_str).collect();
        uses.sort_unstable();
        assert_eq!(uses, [format!("C:kept-0:{own}").as_str(), own]);
        Self { device, usage }
    }

    /// Waits until the kubelet offers this many devices of the kind, and as many slots of the device.
    async fn until_offered(&self, node: &SlotsNode, count: u32) {
        node.until_allocatable(&[(&kind("kept"), count), (&self.device.resource(), count)]).await;
    }

    /// Waits until the kubelet offers the resources again. The claims must be as they were.
    async fn are_back(&self, node: &SlotsNode, after: &str, begun: Instant) {
        self.until_offered(node, 1).await;
        let took = begun.elapsed();
        println!("after {after}, the resources are back within {took:.1?}");
        assert!(took < BACK_WITHIN, "after {after}: {took:?}");
        assert_eq!(self.device.usage().await, self.usage, "after {after}");
    }
}

async fn workers(node: &SlotsNode) -> [RunningWorker; 2] {
    let [first, second] = SETS;
    [node.until_set_ready(first).await, node.until_set_ready(second).await]
}

fn identities(workers: &[RunningWorker; 2]) -> [(Option<String>, Vec<i32>); 2] {
    workers.each_ref().map(RunningWorker::identity)
}

#[test]
fn resources_are_back_within_10_s_of_a_restart_of_kubelet_agent_or_node_and_pods_keep_their_slots() {
    run(async {
        let mut node = slots_node().await;
        let kept = KeptSlots::new(&node).await;
        let before = workers(&node).await;

        for (outage, what) in [
            (NodeOutage::Kubelet, "a restart of the kubelet"),
            (NodeOutage::Servers, "a restart of kubelet and containerd"),
        ] {
            node.runner().stop(outage).await.unwrap();
            let begun = Instant::now();
            node.runner().resume().await.unwrap();
            kept.are_back(&node, what, begun).await;
            assert_eq!(identities(&workers(&node).await), identities(&before), "{what} ended a Pod");
        }

        node.agent.kill().await;
        // Without its agent, no slot of the node is healthy.
        kept.until_offered(&node, 0).await;
        let begun = Instant::now();
        node.agent.start();
        kept.are_back(&node, "the end of the agent by SIGKILL", begun).await;
        assert_eq!(
            identities(&workers(&node).await),
            identities(&before),
            "the end of the agent ended a Pod"
        );

        node.agent.kill().await;
        node.runner().stop(NodeOutage::Power).await.unwrap();
        for worker in &before {
            assert_eq!(node.runner().processes(&worker.pod).unwrap(), Vec::<i32>::new());
        }
        let begun = Instant::now();
        node.agent.start();
        node.runner().resume().await.unwrap();
        kept.are_back(&node, "a reboot of the node", begun).await;
        // The kubelet rejects Pods that it admits before the agent has registered. Others take their places.
        let after = workers(&node).await;
        let replaced = before.iter().zip(&after).filter(|(old, new)| old.name() != new.name()).count();
        println!("the reboot replaced {replaced} of {} Pods", after.len());
        assert_eq!(kept.device.usage().await, kept.usage, "a Pod got another slot after the reboot");

        for set in SETS {
            node.delete_set(set).await;
        }
    });
}
