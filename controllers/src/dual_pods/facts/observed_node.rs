//! Reads a node's facts from API objects.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{ConfigMap, Node, NodeCondition};
use kube::ResourceExt as _;
use rouse::pairing::ids::NodeName;

use super::AcceleratorIndices;
use crate::dual_pods::population::NodeTraits;

/// Condition of a Node that shows whether its kubelet reports.
pub const NODE_READY_CONDITION: &str = "Ready";

/// The facts that a Node object contains.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ObservedNode {
    pub(super) traits: NodeTraits,
    /// Keys of the node's taints.
    pub(super) taints: BTreeSet<String>,
    /// The node accepts no new Pods.
    pub(super) cordoned: bool,
    /// The node's kubelet has stopped reporting.
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

/// Whether the node takes new Pods: it is not cordoned, and its kubelet does not report that it is unready.
#[must_use]
pub fn takes_pods(node: &Node) -> bool {
    let is_cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true);
    let is_unready = readiness(node).is_some_and(|ready| ready.status != "True");
    !is_cordoned && !is_unready && node.metadata.deletion_timestamp.is_none()
}

/// Returns the Ready condition. Its status is `Unknown` once the kubelet has been silent for too long.
fn readiness(node: &Node) -> Option<&NodeCondition> {
    node.status
        .as_ref()?
        .conditions
        .as_ref()?
        .iter()
        .find(|condition| condition.type_ == NODE_READY_CONDITION)
}

/// Parses the map: by node, `{"GPU-…": 0}`. Skips unreadable entries with a warning.
pub(super) fn parse_gpu_map(map: &ConfigMap) -> BTreeMap<NodeName, AcceleratorIndices> {
    let entry = |(node, text): (&String, &String)| match serde_json::from_str::<AcceleratorIndices>(text) {
        Ok(numbers) => Some((NodeName::from(node.as_str()), numbers)),
        Err(error) => {
            tracing::warn!(
                map = map.name_any(),
                node,
                %error,
                "GPU map entry ignored: it is not a JSON object of UUIDs and indices"
            );
            None
        }
    };
    map.data.iter().flatten().filter_map(entry).collect()
}
