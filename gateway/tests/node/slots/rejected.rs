//! A Pod whose slot another node has claimed before the kubelet asks for it.

use std::{collections::BTreeMap, pin::pin};

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, PostParams},
    runtime::{WatchStreamExt as _, watcher},
};
use nix::sys::signal::Signal;
use rouse_cluster::wait::WAIT_TIMEOUT;
use serde_json::json;
use tokio::time::{Duration, Instant, timeout, timeout_at};

use super::{
    slots_node::{SlotsNode, slots_node},
    worker::phase,
};
use crate::shared_node::run;

/// A Node without a kubelet.
const OTHER_NODE: &str = "other";
const SET: &str = "contested";
/// How long the Pods of the ReplicaSet are counted, from the rejection of the first.
const WINDOW: Duration = Duration::from_secs(12);
/// Maximum number of Pods that the ReplicaSet makes in that time. The kubelet reports that the slot is gone within a
/// second. Until then, the scheduler gives it each Pod that replaces a rejected one.
const MAX_MADE: usize = 40;
/// Maximum number of rejected Pods that the leader deletes in that time: 1, 2, 4 and 8 seconds after their rejections.
/// The fifth waits for 16 seconds.
const MAX_DELETED: usize = 4;

/// The Pods of the ReplicaSet.
#[derive(Default)]
struct SetHistory {
    /// When each Pod was first seen, by uid.
    made: BTreeMap<String, Instant>,
    /// Reason and message of each Pod that has failed, by uid.
    failed: BTreeMap<String, (String, String)>,
}

impl SetHistory {
    fn record(&mut self, pod: &Pod) {
        let uid = pod.uid().unwrap();
        self.made.entry(uid.clone()).or_insert_with(Instant::now);
        if phase(pod) == "Failed" {
            let status = pod.status.clone().unwrap();
            let (reason, message) = (status.reason.unwrap_or_default(), status.message.unwrap_or_default());
            self.failed.insert(uid, (reason, message));
        }
    }
}

/// The number of Pods of the ReplicaSet that the leader has deleted.
fn deleted(node: &SlotsNode) -> usize {
    let site = &node.ground.installation.site;
    let calls = site.cluster.calls(&site.account).unwrap();
    let of_set = calls.iter().filter(|call| {
        (call.verb.as_str(), call.resource.as_str()) == ("delete", "pods") && call.name.starts_with(SET)
    });
    of_set.filter(|call| call.code == 200).count()
}

#[test]
fn a_pod_whose_slot_was_taken_is_rejected_and_deleted_and_its_replicaset_makes_no_storm() {
    run(async {
        let node = slots_node().await;
        let device = node.share("contested", 1, json!({})).await;
        let (resource, slot) = (device.resource(), device.slot(0));
        let other = json!({"metadata": {"name": OTHER_NODE}, "spec": {"unschedulable": true}});
        let other = serde_json::from_value(other).unwrap();
        node.node_api().create(&PostParams::default(), &other).await.unwrap();

        // The agent does not see the claim, and the kubelet offers the slot.
        node.agent.signal(Signal::SIGSTOP);
        device.set(&slot, "", OTHER_NODE).await;
        let claimed = device.usage().await;
        let of_set = watcher::Config::default().labels(&format!("app={SET}"));
        let mut events = pin!(watcher(node.pods(), of_set).default_backoff().applied_objects());
        let mut history = SetHistory::default();
        node.create_set(SET, &resource).await;
        let bound = async {
            loop {
                let pod = events.next().await.unwrap().unwrap();
                history.record(&pod);
                if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) {
                    return pod;
                }
            }
        };
        let first = timeout(WAIT_TIMEOUT, bound).await.expect("no Pod was bound to the node");
        // Within milliseconds the kubelet sees the Pod and asks the agent. It goes on with its reports meanwhile.
        node.until_reports(2).await;
        assert_eq!(phase(&node.pods().get(&first.name_any()).await.unwrap()), "Pending");
        node.agent.signal(Signal::SIGCONT);
        let begun = Instant::now();
        while let Ok(event) = timeout_at(begun + WINDOW, events.next()).await {
            history.record(&event.unwrap().unwrap());
        }

        let (reason, message) = &history.failed[&first.uid().unwrap()];
        assert_eq!(reason, "UnexpectedAdmissionError", "{message}");
        let words = format!("node {OTHER_NODE} has claimed slot {slot} meanwhile");
        assert!(message.contains(&words), "{message}");
        assert!(history.failed.values().all(|(reason, _)| reason == "UnexpectedAdmissionError"));
        let (made, deleted) = (history.made.len(), deleted(&node));
        println!("{made} Pods in {WINDOW:?}, {} of them rejected, {deleted} deleted", history.failed.len());
        assert!(made <= MAX_MADE, "a storm: {made} Pods");
        let last = history.made.values().max().unwrap().duration_since(begun);
        assert!(last < WINDOW / 2, "Pods are still made after {last:?}");
        assert!((1..=MAX_DELETED).contains(&deleted), "{deleted} Pods were deleted");
        let waiting: Vec<Pod> =
            node.pods_of(SET).await.into_iter().filter(|pod| phase(pod) != "Failed").collect();
        assert!(matches!(&waiting[..], [pod] if phase(pod) == "Pending"), "{waiting:?}");
        assert_eq!(device.usage().await, claimed, "the rejected Pods changed the claim");

        device.set(&slot, OTHER_NODE, "").await;
        node.until_set_ready(SET).await;
        node.delete_set(SET).await;
        node.node_api().delete(OTHER_NODE, &DeleteParams::default()).await.unwrap();
    });
}
