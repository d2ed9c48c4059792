//! Finds out whether a node that has a model's images can take another engine of it, as far as the objects say.
//!
//! The answer only orders variants by how fast they start. Whether there is memory, the ledger of the pool decides, and
//! on which node, the scheduler.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use rouse::units::Bytes;

use crate::{
    convert::ModelVariant,
    crd::AcceleratorNode,
    dual_pods::takes_pods,
    index::{ResolvedNode, ServedVariant},
    label,
    watch::{Delta, WatchedObject},
};

/// The nodes that are warm for any model, as last observed.
#[derive(Debug, Default)]
pub(crate) struct WarmNodes {
    nodes: BTreeMap<String, WarmNode>,
    /// Names of nodes by the key of a label of warm nodes.
    by_label: BTreeMap<String, BTreeSet<String>>,
    /// Reserved memory of each node with accelerators.
    reserved: BTreeMap<String, Bytes>,
}

#[derive(Debug)]
struct WarmNode {
    labels: BTreeMap<String, String>,
    /// The node takes new Pods.
    is_schedulable: bool,
}

impl WarmNodes {
    pub(crate) fn apply_nodes(&mut self, delta: &Delta<Node>) {
        match delta {
            Delta::All { objects, .. } => {
                self.nodes.clear();
                self.by_label.clear();
                objects.iter().for_each(|found| self.node_applied(found));
            }
            Delta::Applied(found) => self.node_applied(found),
            Delta::Deleted(name) => self.remove_node(&name.name),
        }
    }

    pub(crate) fn apply_accelerator_nodes(&mut self, delta: &Delta<AcceleratorNode>) {
        match delta {
            Delta::All { objects, .. } => {
                self.reserved.clear();
                objects.iter().for_each(|found| self.accelerator_node_applied(found));
            }
            Delta::Applied(found) => self.accelerator_node_applied(found),
            Delta::Deleted(name) => {
                self.reserved.remove(&name.name);
            }
        }
    }

    /// Whether a node with this label can take another engine of the variant.
    pub(crate) fn can_take_one(
        &self,
        label: &str,
        variant: &ServedVariant,
        converted: &ModelVariant,
        nodes: &BTreeMap<String, ResolvedNode>,
    ) -> bool {
        let can_take = |name: &String| {
            let (Some(warm), Some(resolved)) = (self.nodes.get(name), nodes.get(name)) else { return false };
            let is_selected = label::has_all(&warm.labels, &converted.node_selector);
            warm.is_schedulable
                && variant.pool.is_some()
                && resolved.pool == variant.pool
                && is_selected
                && resolved.has_room_for(converted, self.reserved.get(name).copied().unwrap_or_default())
        };
        self.by_label.get(label).into_iter().flatten().any(can_take)
    }

    /// An unreadable node stays as it was last seen.
    fn node_applied(&mut self, found: &WatchedObject<Node>) {
        let WatchedObject::Readable(node) = found else { return };
        let name = node.name_any();
        self.remove_node(&name);
        let labels = node.labels();
        let warm: Vec<&String> = labels.keys().filter(|key| key.starts_with(label::WARM_PREFIX)).collect();
        if warm.is_empty() {
            return;
        }
        for key in warm {
            self.by_label.entry(key.clone()).or_default().insert(name.clone());
        }
        let node = WarmNode { labels: labels.clone(), is_schedulable: takes_pods(node) };
        self.nodes.insert(name, node);
    }

    fn remove_node(&mut self, name: &str) {
        let Some(node) = self.nodes.remove(name) else { return };
        for key in node.labels.keys() {
            if let Some(names) = self.by_label.get_mut(key) {
                names.remove(name);
                if names.is_empty() {
                    self.by_label.remove(key);
                }
            }
        }
    }

    fn accelerator_node_applied(&mut self, found: &WatchedObject<AcceleratorNode>) {
        let WatchedObject::Readable(node) = found else { return };
        let reserved = node.status.as_ref().and_then(|status| status.reserved.as_ref()?.bytes().ok());
        self.reserved.insert(node.name_any(), reserved.unwrap_or_default());
    }
}
