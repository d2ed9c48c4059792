//! What of a requester its provider begins with.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, Container, Pod, PodSpec};
use serde_json::{Map, Value, json};

use super::keys::is_reserved;

type PodLabels = BTreeMap<String, String>;

/// A ReplicaSet's, on its Pods: with it the provider would be one of them.
pub(super) const TEMPLATE_HASH: &str = "pod-template-hash";
/// The token that every Pod is given; the provider gets its own.
const TOKEN_VOLUME: &str = "kube-api-access-";

/// Labels, namespace and spec, without what is only the requester's own.
pub(super) fn base(requester: &Pod) -> Map<String, Value> {
    let labels: PodLabels = requester.metadata.labels.clone().unwrap_or_default();
    let labels = labels.into_iter().filter(|(key, _)| key != TEMPLATE_HASH && !is_reserved(key));
    let labels: PodLabels = labels.collect();
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
        // Where the requester is was its scheduler's to say, by rules about requesters. The provider goes to the same node.
        node_name: None,
        scheduler_name: None,
        scheduling_gates: None,
        topology_spread_constraints: None,
        affinity: requester.affinity.as_ref().and_then(node_affinity),
        // What these are follows from the class, and an API server refuses a Pod that says otherwise.
        priority: None,
        preemption_policy: None,
        // A name among the Pods of a set.
        hostname: None,
        subdomain: None,
        // The former spelling of the next one, of which a patch would have to change both.
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

/// What is said of nodes. What is said of other Pods was about requesters: a provider that may not be beside a requester could
/// not be beside its own.
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
