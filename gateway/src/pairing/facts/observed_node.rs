//! What objects say of a node.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{ConfigMap, Node, NodeCondition};
use kube::ResourceExt as _;
use rouse::pairing::ids::NodeName;

use super::AcceleratorIndices;
use crate::pairing::population::NodeTraits;

/// The condition of a Node from which its kubelet's silence is known.
pub const NODE_READY_CONDITION: &str = "Ready";

/// What a Node object says.
#[derive(Clone, Debug, Default)]
pub(super) struct ObservedNode {
    pub(super) traits: NodeTraits,
    /// The keys of its taints.
    pub(super) taints: BTreeSet<String>,
    /// It takes nothing new.
    pub(super) cordoned: bool,
    /// Its kubelet has stopped to report.
    pub(super) silent: bool,
}

impl ObservedNode {
    pub(super) fn of(node: &Node) -> Self {
        let unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true);
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.clone());
        let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
        Self {
            traits: NodeTraits {
                labels: node.labels().clone(),
                allocatable: allocatable.unwrap_or_default(),
            },
            taints: taints.map(|taint| taint.key.clone()).collect(),
            cordoned: unschedulable || node.metadata.deletion_timestamp.is_some(),
            silent: readiness(node).is_some_and(|ready| ready.status == "Unknown"),
        }
    }
}

/// What the cluster makes of the node's kubelet: `Unknown`, when it has not heard of it for too long.
fn readiness(node: &Node) -> Option<&NodeCondition> {
    node.status
        .as_ref()?
        .conditions
        .as_ref()?
        .iter()
        .find(|condition| condition.type_ == NODE_READY_CONDITION)
}

/// By node: `{"GPU-…": 0}`. What cannot be read is passed over, and said.
pub(super) fn parse_gpu_map(map: &ConfigMap) -> BTreeMap<NodeName, AcceleratorIndices> {
    let entry = |(node, text): (&String, &String)| match serde_json::from_str::<AcceleratorIndices>(text) {
        Ok(numbers) => Some((NodeName::from(node.as_str()), numbers)),
        Err(error) => {
            tracing::warn!(map = map.name_any(), node, %error, "an entry is no object of UUIDs and numbers");
            None
        }
    };
    map.data.iter().flatten().filter_map(entry).collect()
}
