//! Reads from Nodes what the decisions about Warmups need.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, NodeSystemInfo, Taint};
use kube::ResourceExt as _;
use rouse::warmup::{NodeTaint, NodeUidKey, TaintEffect, WarmSet, WarmupNodeFacts};

use crate::{dual_pods::NODE_READY_CONDITION, image_reference::ImageReference, label};

/// The condition of a Node whose disk is nearly full.
pub(crate) const NODE_DISK_PRESSURE_CONDITION: &str = "DiskPressure";

/// The first kubelet in which image volumes are stable.
const IMAGE_VOLUME_KUBELET: (u32, u32) = (1, 36);
/// The first version of each container runtime that mounts images.
const IMAGE_VOLUME_RUNTIMES: [(&str, (u32, u32)); 2] = [("containerd", (2, 1)), ("cri-o", (1, 33))];

/// Keeps what [`mounts_images`] reads.
pub(crate) fn slim_system(system: NodeSystemInfo) -> NodeSystemInfo {
    let NodeSystemInfo { kubelet_version, container_runtime_version, .. } = system;
    NodeSystemInfo { kubelet_version, container_runtime_version, ..NodeSystemInfo::default() }
}

/// Whether the node can mount an image as a volume, as far as the versions of its programs tell.
///
/// On a node that cannot, a Pod with such a volume would wait for ever.
pub(super) fn mounts_images(node: &Node) -> bool {
    let status = node.status.as_ref();
    let Some(system) = status.and_then(|status| status.node_info.as_ref()) else { return false };
    let Some((runtime, version)) = system.container_runtime_version.split_once("://") else { return false };
    let oldest = IMAGE_VOLUME_RUNTIMES.iter().find(|(name, _)| *name == runtime);
    oldest.is_some_and(|(_, oldest)| minor_version(version) >= Some(*oldest))
        && minor_version(&system.kubelet_version) >= Some(IMAGE_VOLUME_KUBELET)
}

/// Reads the first two numbers of a version such as `v1.36.2` or `2.1.0-rc.1`.
fn minor_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim_start_matches('v').split(['.', '-', '+']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Reads a Node, without its images. `installation` is the value of the labels that count.
pub(super) fn node_facts(node: &Node, installation: &str) -> WarmupNodeFacts {
    let spec = node.spec.as_ref();
    let warm = node.labels().iter().filter(|(_, value)| *value == installation);
    let warm = warm.filter_map(|(key, _)| key.strip_prefix(label::WARM_PREFIX)).map(WarmSet::from);
    WarmupNodeFacts {
        uid: node.metadata.uid.as_deref().map(NodeUidKey::new).unwrap_or_default(),
        ready: has_condition(node, NODE_READY_CONDITION) && node.metadata.deletion_timestamp.is_none(),
        cordoned: spec.and_then(|spec| spec.unschedulable) == Some(true),
        disk_pressure: has_condition(node, NODE_DISK_PRESSURE_CONDITION),
        taints: spec.into_iter().flat_map(|spec| spec.taints.iter().flatten()).filter_map(taint).collect(),
        images: BTreeSet::new(),
        labels_warm: warm.collect(),
    }
}

pub(crate) fn has_condition(node: &Node, name: &str) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == name && condition.status == "True")
}

/// Reads a taint; `None` if it has an effect that is not known.
fn taint(taint: &Taint) -> Option<NodeTaint> {
    let effect = match taint.effect.as_str() {
        "NoSchedule" => TaintEffect::NoSchedule,
        "PreferNoSchedule" => TaintEffect::PreferNoSchedule,
        "NoExecute" => TaintEffect::NoExecute,
        _ => return None,
    };
    Some(NodeTaint { key: taint.key.clone(), value: taint.value.clone().unwrap_or_default(), effect })
}

/// Returns the name that both a Node and a Warmup can be compared by; `None` for a name such as `<none>:<none>`.
pub(super) fn canonical(reference: &str) -> Option<String> {
    ImageReference::parse(reference).ok().map(|parsed| parsed.canonical())
}
