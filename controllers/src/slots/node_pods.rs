//! Counts the Pods that may still use slots of nodes that are not ready.
//!
//! A node that does not report may still run them, so its slots are not free before they are gone. These Pods may be in
//! any namespace, and a watch of all Pods of the cluster would cost every gateway their memory. So the leader lists the
//! Pods of such a node, and only while it is not ready.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, api::ListParams};
use rouse::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
};
use tokio::time;

use super::pod_facts;
use crate::writer::Error;

/// Longest interval between two lists of one node's Pods.
const MAX_INTERVAL: Millis = Millis::secs(30);
/// Timeout of one list.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// The nodes whose Pods are listed.
#[derive(Debug)]
pub(super) struct NodePodLists {
    interval: Millis,
    /// Each with the moment of its next list; `None` while one is under way.
    nodes: BTreeMap<NodeName, Option<Tick>>,
}

impl NodePodLists {
    /// `node_timeout`: how long a node may be unready before its slots are freed.
    pub(super) fn new(node_timeout: Millis) -> Self {
        Self { interval: node_timeout.min(MAX_INTERVAL), nodes: BTreeMap::new() }
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

    /// Takes the end of a list.
    pub(super) fn finished(&mut self, node: &NodeName, now: Tick) {
        if let Some(next) = self.nodes.get_mut(node) {
            *next = Some(now + self.interval);
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

/// Counts the Pods of a node that may still use slots, in all namespaces.
///
/// # Errors
/// The list failed. Nothing is known then.
pub(super) async fn count(client: &Client, of_node: &ListParams) -> Result<u32, Error> {
    let pods: Api<Pod> = Api::all(client.clone());
    let listed = time::timeout(LIST_TIMEOUT, pods.list(of_node)).await.map_err(|_| Error::Timeout)??;
    let count = listed.items.iter().filter(|pod| pod_facts::may_use_slots(pod)).count();
    Ok(u32::try_from(count).unwrap_or(u32::MAX))
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
        lists.finished(&a, Tick(1_000));
        assert!(lists.begin_due([&a, &b].into_iter(), Tick(30_999)).is_empty());
        assert_eq!(lists.next_deadline(), Some(Tick(31_000)));
        assert_eq!(lists.begin_due([&a, &b].into_iter(), Tick(31_000)), std::slice::from_ref(&a));
        lists.begin_due(std::iter::empty(), Tick(31_000));
        lists.finished(&a, Tick(31_000));
        assert_eq!(lists.next_deadline(), None, "the node is ready again");
        assert_eq!(lists.begin_due([&a].into_iter(), Tick(32_000)), [a]);
    }
}
