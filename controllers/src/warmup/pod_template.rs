//! Builds the Pods of Warmups.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Toleration;
use rouse::{
    pairing::ids::NodeName,
    warmup::{ImageName, WarmupItem},
};
use rouse_net::stub_api::Epoch;
use serde_json::{Map, Value, json};

use super::keys;
use crate::{
    convert::warmup::{ActionTemplate, NodeActions},
    crd::{GROUP, ledger::ObjectName},
    label,
    workload::{EPOCH, MANAGED, ROUSE, merge},
};

/// Kind of the owner of these Pods.
pub(super) const KIND: &str = "Warmup";
/// Command of the Pods that pull an image. It fails to start in nearly every image. The image is on the node by then.
const COMMAND: &str = "/rouse-warmup";
/// Arguments of the stub in the Pods that mount an image. It prints its version and ends.
const STUB_ARGS: [&str; 1] = ["--version"];
/// Time to end in seconds. With 0 the API server would remove the Pod at once, although its kubelet still pulls:
/// nothing would show that the node is busy.
const GRACE_SECONDS: u32 = 1;
/// User of the containers that Rouse defines. Any image starts as it, since nothing of the image runs.
const USER: u32 = 65532;
/// Length of a Pod's name. It is the host name as well, which is a label.
const MAX_NAME_CHARS: usize = 63;
/// Digits of the hash in a Pod's name. With half of them, two of 20,000 Pods would share a name in one case of twenty.
const HASH_CHARS: usize = 16;

/// What one Pod is built from.
pub(super) struct WarmupPodParts<'a> {
    pub(super) warmup: &'a ObjectName,
    /// Of the Warmup.
    pub(super) uid: &'a str,
    pub(super) node: &'a NodeName,
    pub(super) item: &'a WarmupItem,
    pub(super) generation: u64,
    pub(super) items_hash: u32,
    pub(super) attempt: u32,
    pub(super) epoch: Epoch,
    /// What the node should have.
    pub(super) actions: &'a NodeActions,
    /// Of the Warmup and of the target's Pods.
    pub(super) tolerations: &'a [Toleration],
    /// Image of the stub, if the node mounts images as volumes.
    pub(super) mounted_by: Option<&'a str>,
}

/// Returns the Pod's name. Every leader gives the same Pod the same name, so that it is not created twice.
///
/// A Warmup that was deleted and created again has another uid, so it does not take the Pods of the former for its own.
pub(super) fn name(
    warmup: &ObjectName,
    uid: &str,
    node: &NodeName,
    item: &WarmupItem,
    generation: u64,
    attempt: u32,
) -> String {
    let identity = keys::identity(node, item, generation);
    let hash: String = label::value(&format!("{uid} {identity}")).chars().take(HASH_CHARS).collect();
    let suffix = format!("-{hash}-{attempt}");
    let head: String = warmup.name.chars().take(MAX_NAME_CHARS - suffix.len()).collect();
    // A part of a name ends with a letter or a digit.
    format!("{}{suffix}", head.trim_end_matches(['-', '.']))
}

/// Returns the Pod; `None` if its action is no longer what the node should have.
pub(super) fn pod(parts: &WarmupPodParts<'_>) -> Option<Value> {
    let (mut pod, image) = match parts.item {
        WarmupItem::Image(image) => {
            // The stub's own image would be pulled for its container anyway.
            let mounted_by = parts.mounted_by.filter(|stub| *stub != image.as_str());
            (image_pod(image, mounted_by), image.as_str())
        }
        WarmupItem::Action(hash) => {
            let action = parts.actions.action.as_ref().filter(|action| action.hash == *hash)?;
            (action_pod(action), keys::ACTION_ITEM)
        }
    };
    let WarmupPodParts { warmup, uid, node, item, generation, items_hash, attempt, epoch, .. } = parts;
    let own = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name(warmup, uid, node, item, *generation, *attempt),
            "namespace": warmup.namespace,
            "labels": {
                MANAGED: ROUSE,
                keys::WARMUP: label::value(&warmup.name),
            },
            "annotations": {
                keys::NAME: warmup.name,
                keys::NODE: node.as_str(),
                keys::ITEM: image,
                keys::ITEMS: items_hash.to_string(),
                keys::GENERATION: generation.to_string(),
                keys::ATTEMPT: attempt.to_string(),
                EPOCH: epoch.to_string(),
            },
            // Without blockOwnerDeletion, which takes a right of its own.
            "ownerReferences": [{
                "apiVersion": format!("{GROUP}/v1alpha1"),
                "kind": KIND,
                "name": warmup.name,
                "uid": uid,
                "controller": true,
            }],
        },
        "spec": {"affinity": on_node(node)},
    });
    merge::into(&mut pod, &own);
    if let WarmupItem::Action(hash) = item {
        merge::into(&mut pod, &json!({"metadata": {"annotations": {keys::ACTION: hash.as_str()}}}));
    }
    let spec = pod.get_mut("spec")?.as_object_mut()?;
    let secrets = parts.actions.pull_secrets.iter().map(|name| json!({"name": name}));
    add_missing(spec, "imagePullSecrets", secrets);
    // A toleration always serializes.
    let tolerations = parts.tolerations.iter().filter_map(|it| serde_json::to_value(it).ok());
    add_missing(spec, "tolerations", tolerations);
    Some(pod)
}

/// A Pod that is over as soon as the node has the image.
fn image_pod(image: &ImageName, mounted_by: Option<&str>) -> Value {
    let mut container = json!({
        "name": keys::CONTAINER,
        "image": mounted_by.unwrap_or_else(|| image.as_str()),
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": true,
            "runAsNonRoot": true,
            "runAsUser": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    });
    let mut spec = json!({
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
    });
    if mounted_by.is_some() {
        // The container must be created to show that the mount succeeded. Some runtimes refuse to create one whose
        // command does not exist.
        let mounts = json!([{"name": keys::CONTAINER, "mountPath": "/image", "readOnly": true}]);
        merge::into(&mut container, &json!({"args": STUB_ARGS, "volumeMounts": mounts}));
        let source = json!({"reference": image.as_str(), "pullPolicy": "IfNotPresent"});
        merge::into(&mut spec, &json!({"volumes": [{"name": keys::CONTAINER, "image": source}]}));
    } else {
        merge::into(&mut container, &json!({"command": [COMMAND]}));
    }
    merge::into(&mut spec, &json!({"containers": [container]}));
    json!({"spec": spec})
}

/// The user's Pod. It has access to the API server only if it names an account for that.
fn action_pod(action: &ActionTemplate) -> Value {
    let mut pod = Value::Object(action.template.value());
    let sets = |field: &str| pod.pointer(&format!("/spec/{field}")).is_some_and(|value| !value.is_null());
    if !["serviceAccountName", "serviceAccount", "automountServiceAccountToken"].into_iter().any(sets) {
        merge::into(&mut pod, &json!({"spec": {"automountServiceAccountToken": false}}));
    }
    pod
}

/// Returns the affinity to one node. The label of the host name may differ from the node's name.
fn on_node(node: &NodeName) -> Value {
    let term =
        json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node.as_str()]}]});
    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}})
}

/// Adds the items to a list that are not in it.
fn add_missing(spec: &mut Map<String, Value>, list: &str, items: impl Iterator<Item = Value>) {
    let known = spec.remove(list);
    let mut all = match known {
        Some(Value::Array(known)) => known,
        _ => Vec::new(),
    };
    for item in items {
        if !all.contains(&item) {
            all.push(item);
        }
    }
    if !all.is_empty() {
        spec.insert(list.to_owned(), Value::Array(all));
    }
}

/// Returns every image that the containers of this Pod template have.
pub(super) fn images(template: &Map<String, Value>) -> BTreeSet<ImageName> {
    let containers = |field: &str| {
        let list = template.get("spec").and_then(|spec| spec.get(field)).and_then(Value::as_array);
        list.map(Vec::as_slice).unwrap_or_default()
    };
    let all = containers("initContainers").iter().chain(containers("containers"));
    let images = all.filter_map(|container| container.get("image")?.as_str());
    images.filter(|image| !image.is_empty()).map(ImageName::from).collect()
}
