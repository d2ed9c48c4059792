//! Builds the part of a requester that its provider starts from.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, Container, Pod, PodSpec};
use serde_json::{Map, Value, json};

use super::keys::is_reserved;

/// A ReplicaSet's label on its Pods; with it the provider would count as a Pod of the set.
pub(super) const TEMPLATE_HASH: &str = "pod-template-hash";
/// Volume of the token that every Pod gets; the provider gets its own.
const TOKEN_VOLUME: &str = "kube-api-access-";

/// Returns labels, namespace and spec, without the fields that belong to the requester alone.
pub(super) fn base(requester: &Pod) -> Map<String, Value> {
    let labels = requester.metadata.labels.clone().unwrap_or_default();
    let labels = labels.into_iter().filter(|(key, _)| key != TEMPLATE_HASH && !is_reserved(key));
    let labels: BTreeMap<String, String> = labels.collect();
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": requester.metadata.namespace, "labels": labels},
        "spec": spec(requester.spec.clone().unwrap_or_default()),
    });
    match pod {
        Value::Object(pod) => pod,
        _ => Map::new(),
    }
}

fn spec(requester: PodSpec) -> PodSpec {
    let mut spec = PodSpec {
        ephemeral_containers: None,
        // The scheduler placed the requester by rules for requesters. The provider goes to the same node.
        node_name: None,
        scheduler_name: None,
        scheduling_gates: None,
        topology_spread_constraints: None,
        affinity: requester.affinity.as_ref().and_then(node_affinity),
        // The priority class defines these fields, and an API server refuses a Pod that contradicts the class.
        priority: None,
        preemption_policy: None,
        // Identifies a Pod within a set.
        hostname: None,
        subdomain: None,
        // Deprecated alias of `service_account_name`; a patch would otherwise have to change both fields.
        service_account: requester
            .service_account
            .clone()
            .filter(|_| requester.service_account_name.is_none()),
        ..requester
    };
    let Some(volumes) = &mut spec.volumes else { return spec };
    volumes.retain(|volume| !volume.name.starts_with(TOKEN_VOLUME));
    if volumes.is_empty() {
        spec.volumes = None;
    }
    let all = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
    all.for_each(without_token);
    spec
}

/// Keeps the node affinity only. Pod affinity was meant for requesters: a provider that may not run beside a requester
/// could not run beside its own.
fn node_affinity(affinity: &Affinity) -> Option<Affinity> {
    let node_affinity = Some(affinity.node_affinity.clone()?);
    Some(Affinity { node_affinity, ..Affinity::default() })
}

fn without_token(container: &mut Container) {
    let Some(mounts) = &mut container.volume_mounts else { return };
    mounts.retain(|mount| !mount.name.starts_with(TOKEN_VOLUME));
    if mounts.is_empty() {
        container.volume_mounts = None;
    }
}
