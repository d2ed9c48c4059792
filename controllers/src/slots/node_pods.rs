//! Lists the slots that Pods may still use on nodes whose slots no agent frees: those that are not ready, and those
//! without an agent.
//!
//! Such a node may still run the Pods, so its slots are not free before they are gone. These Pods may be in any
//! namespace, and a watch of all Pods of the cluster would cost every gateway their memory. So the leader lists the
//! Pods of such a node, and only while it is one.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, api::ListParams};
use rouse::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
};
use tokio::time;

use super::pod_facts;
use crate::writer::Error;

/// Longest interval between two lists of one node's Pods, while it is not ready.
const MAX_INTERVAL: Millis = Millis::secs(30);
/// Timeout of one list.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// The nodes whose Pods are listed.
#[derive(Debug)]
pub(super) struct NodePodLists {
    /// Between two lists of a node that is not ready.
    interval: Millis,
    /// The same for a ready node without an agent. It may run its Pods for weeks, and there may be many such nodes.
    ready_interval: Millis,
    /// Each with the moment of its next list; `None` while one is under way.
    nodes: BTreeMap<NodeName, Option<Tick>>,
}

impl NodePodLists {
    /// `node_timeout`: how long a node may be unready before its slots are freed.
    pub(super) fn new(node_timeout: Millis) -> Self {
        let interval = node_timeout.min(MAX_INTERVAL);
        Self { interval, ready_interval: node_timeout, nodes: BTreeMap::new() }
    }

    pub(super) fn clear(&mut self) {
        self.nodes.clear();
    }

    /// Sets the nodes whose Pods are to be listed, and begins the lists that are due.
    pub(super) fn begin_due<'a>(
        &mut self,
        wanted: impl Iterator<Item = &'a NodeName>,
        now: Tick,
    ) -> Vec<NodeName> {
        let mut before = std::mem::take(&mut self.nodes);
        let mut due = Vec::new();
        for node in wanted {
            let mut next = before.remove(node).unwrap_or(Some(now));
            if next.is_some_and(|next| next <= now) {
                due.push(node.clone());
                next = None;
            }
            self.nodes.insert(node.clone(), next);
        }
        due
    }

    /// Takes the end of a list. `is_ready`: the node is ready.
    pub(super) fn finished(&mut self, node: &NodeName, is_ready: bool, now: Tick) {
        let interval = if is_ready { self.ready_interval } else { self.interval };
        if let Some(next) = self.nodes.get_mut(node) {
            *next = Some(now + interval);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Tick> {
        self.nodes.values().flatten().min().copied()
    }
}

/// Selects the Pods of a node as they are now.
pub(super) fn of_node(node: &NodeName) -> ListParams {
    ListParams::default().fields(&format!("spec.nodeName={node}"))
}

/// Selects the Pods of a node as the API server has them in memory: without that, some API servers read all Pods of the
/// cluster for each list, and when a zone fails, there is a list for each of its nodes.
pub(super) fn of_node_lately(node: &NodeName) -> ListParams {
    of_node(node).match_any()
}

/// Returns the resources of slots that Pods of a node may still use, in all namespaces.
///
/// # Errors
/// The list failed. Nothing is known then.
pub(super) async fn requested(client: &Client, of_node: &ListParams) -> Result<BTreeSet<String>, Error> {
    let pods: Api<Pod> = Api::all(client.clone());
    let listed = time::timeout(LIST_TIMEOUT, pods.list(of_node)).await.map_err(|_| Error::Timeout)??;
    Ok(listed.items.iter().flat_map(pod_facts::used_slot_resources).cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_listed_at_once_and_then_at_intervals_while_it_is_wanted() {
        let (mut lists, [a, b]) = (NodePodLists::new(Millis::secs(300)), ["a", "b"].map(NodeName::from));
        assert_eq!(lists.begin_due([&a].into_iter(), Tick(0)), std::slice::from_ref(&a));
        assert_eq!(
            lists.begin_due([&a, &b].into_iter(), Tick(1)),
            std::slice::from_ref(&b),
            "one is under way"
        );
        assert_eq!(lists.next_deadline(), None);
        lists.finished(&a, false, Tick(1_000));
        assert!(lists.begin_due([&a, &b].into_iter(), Tick(30_999)).is_empty());
        assert_eq!(lists.next_deadline(), Some(Tick(31_000)));
        assert_eq!(lists.begin_due([&a, &b].into_iter(), Tick(31_000)), std::slice::from_ref(&a));
        lists.begin_due(std::iter::empty(), Tick(31_000));
        lists.finished(&a, false, Tick(31_000));
        assert_eq!(lists.next_deadline(), None, "the node is ready again");
        assert_eq!(lists.begin_due([&a].into_iter(), Tick(32_000)), std::slice::from_ref(&a));
        lists.finished(&a, true, Tick(32_000));
        assert_eq!(
            lists.next_deadline(),
            Some(Tick(332_000)),
            "its agent is gone, and its Pods may stay for long"
        );
    }
}
