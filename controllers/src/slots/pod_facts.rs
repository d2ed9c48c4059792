//! Reads from Pods whether they have a slot, or were rejected for want of one.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    pairing::ids::Uid,
    slots::{RejectedPod, names::RESOURCE_DOMAIN},
};

/// Reason of a Pod that its kubelet rejected, because a device plugin did not give it its devices.
const ADMISSION_ERROR: &str = "UnexpectedAdmissionError";

/// Returns the resources by which the Pod asks for slots of devices.
fn slot_resources(pod: &Pod) -> impl Iterator<Item = &String> {
    let containers =
        pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    let resources = containers.filter_map(|container| container.resources.as_ref());
    let names = resources.flat_map(|all| all.limits.iter().chain(&all.requests).flat_map(BTreeMap::keys));
    names.filter(|name| slot_resource(name).is_some())
}

/// Returns what a resource of slots is named after: an instance or a configuration.
pub(crate) fn slot_resource(name: &str) -> Option<&str> {
    name.strip_prefix(RESOURCE_DOMAIN)?.strip_prefix('/')
}

/// Whether the Pod asks for slots of a device.
pub(super) fn asks_for_slots(pod: &Pod) -> bool {
    slot_resources(pod).next().is_some()
}

/// Returns the resources by which a container of the Pod may still use slots.
pub(super) fn used_slot_resources(pod: &Pod) -> impl Iterator<Item = &String> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let has_ended = matches!(phase, Some("Succeeded" | "Failed"));
    slot_resources(pod).filter(move |_| !has_ended)
}

/// Whether a kubelet has rejected the Pod, which asks for slots. It never starts, and its owner makes another.
pub(crate) fn is_rejected(pod: &Pod) -> bool {
    rejected(pod).is_some()
}

/// Reads a rejected Pod.
///
/// A Pod that no controller owns stays: nothing would replace it, and its owner wants to read why it failed.
pub(super) fn rejected(pod: &Pod) -> Option<RejectedPod> {
    let status = pod.status.as_ref()?;
    let has_failed = status.phase.as_deref() == Some("Failed");
    if !has_failed || status.reason.as_deref() != Some(ADMISSION_ERROR) || !asks_for_slots(pod) {
        return None;
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true))?;
    Some(RejectedPod {
        namespace: pod.namespace()?,
        name: pod.name_any(),
        uid: Uid::from(pod.uid()?),
        owner: Uid::from(owner.uid.as_str()),
    })
}

/// Returns the kubelet's message about the Pod.
pub(super) fn message(pod: &Pod) -> String {
    pod.status.as_ref().and_then(|status| status.message.clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(resource: &str, status: &Value, metadata: &Value) -> Pod {
        let mut pod = json!({
            "metadata": {
                "name": "one", "namespace": "chat", "uid": "u",
                "ownerReferences": [{
                    "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs-u", "controller": true,
                }],
            },
            "spec": {"containers": [{"name": "main", "resources": {"limits": {resource: "1"}}}]},
            "status": status,
        });
        crate::workload::merge::into(&mut pod, &json!({"metadata": metadata}));
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn a_pod_is_rejected_if_its_kubelet_says_so_and_it_asked_for_a_slot() {
        let refused = json!({"phase": "Failed", "reason": "UnexpectedAdmissionError"});
        let found = rejected(&pod("rouse.dev/gpu-0123456789", &refused, &json!({}))).unwrap();
        assert_eq!((found.namespace.as_str(), found.name.as_str()), ("chat", "one"));
        assert_eq!((found.uid.as_str(), found.owner.as_str()), ("u", "rs-u"));
        for (resource, status, metadata) in [
            ("nvidia.com/gpu", refused.clone(), json!({})),
            ("rouse.development/gpu", refused.clone(), json!({})),
            ("rouse.dev/gpu", json!({"phase": "Failed", "reason": "Evicted"}), json!({})),
            ("rouse.dev/gpu", json!({"phase": "Pending", "reason": "UnexpectedAdmissionError"}), json!({})),
            ("rouse.dev/gpu", refused.clone(), json!({"ownerReferences": []})),
            ("rouse.dev/gpu", refused, json!({"deletionTimestamp": "2026-01-01T00:00:00Z"})),
        ] {
            assert!(!is_rejected(&pod(resource, &status, &metadata)), "{resource} {status} {metadata}");
        }
    }

    #[test]
    fn a_pod_may_use_its_slots_until_it_has_ended() {
        for (phase, may_use) in
            [("Pending", true), ("Running", true), ("Failed", false), ("Succeeded", false)]
        {
            let pod = pod("rouse.dev/gpu", &json!({"phase": phase}), &json!({}));
            assert_eq!(used_slot_resources(&pod).any(|name| name == "rouse.dev/gpu"), may_use, "{phase}");
        }
        let other = pod("nvidia.com/gpu", &json!({"phase": "Running"}), &json!({}));
        assert_eq!(used_slot_resources(&other).next(), None);
    }

    #[test]
    fn an_init_container_asks_for_slots_too() {
        let mut pod = pod("cpu", &json!({}), &json!({}));
        let init = json!([{"name": "first", "resources": {"requests": {"rouse.dev/camera": "1"}}}]);
        assert!(!asks_for_slots(&pod));
        pod.spec.as_mut().unwrap().init_containers = serde_json::from_value(init).unwrap();
        assert!(asks_for_slots(&pod));
    }
}
