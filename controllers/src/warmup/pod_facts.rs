//! Reads from Pods what the decisions about Warmups need.

mod action;
mod image;
mod scheduling;
#[cfg(test)]
mod tests;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt as _;
use rouse::{
    pairing::ids::NodeName,
    units::Tick,
    warmup::{
        ActionHash, ImageName, WarmPodName, WarmupCause, WarmupId, WarmupItem, WarmupPod, WarmupPodState,
    },
};

use super::{keys, pod_template};
use crate::{
    condition::tick,
    crd::ledger::ObjectName,
    dual_pods, label,
    platform::launcher::pod::{COMPONENT, LAUNCHER},
    workload::{MANAGED, ROUSE},
};

/// Waiting reasons of a container whose image is there.
const AFTER_PULL: [&str; 5] = [
    "CreateContainerConfigError",
    "CreateContainerError",
    "PreStartHookError",
    "PostStartHookError",
    "RunContainerError",
];

/// Reads the Pod; `None` if it is not the Pod of a Warmup.
pub(super) fn pod_facts(pod: &Pod) -> Option<(WarmPodName, WarmupPod)> {
    if !pod.labels().contains_key(keys::WARMUP) {
        return None;
    }
    let annotations = pod.annotations();
    let namespace = pod.namespace()?;
    let warmup = ObjectName::new(namespace.as_str(), annotations.get(keys::NAME)?.as_str());
    let item = match annotations.get(keys::ACTION) {
        Some(hash) => WarmupItem::Action(ActionHash::from(hash.as_str())),
        None => WarmupItem::Image(ImageName::from(annotations.get(keys::ITEM)?.as_str())),
    };
    let state = if item.is_action() { action::state(pod) } else { image::state(pod) };
    let facts = WarmupPod {
        warmup: WarmupId::from(warmup.to_string()),
        node: NodeName::from(annotations.get(keys::NODE)?.as_str()),
        item,
        generation: number(pod, keys::GENERATION),
        items_hash: number(pod, keys::ITEMS),
        attempt: number(pod, keys::ATTEMPT),
        created: created(pod),
        terminating: pod.metadata.deletion_timestamp.is_some(),
        state,
    };
    let name = ObjectName::new(namespace.as_str(), pod.name_any());
    Some((WarmPodName::from(name.to_string()), facts))
}

/// Returns the uid of the Warmup that owns the Pod.
pub(super) fn owner_uid(pod: &Pod) -> Option<&str> {
    let owner = pod.owner_references().iter().find(|owner| owner.kind == pod_template::KIND)?;
    Some(&owner.uid)
}

/// Whether the Pod pulls the image of an engine, or that of the stub beside it.
///
/// With dual pods those are the requester and its provider, which have a label of the model or of each other, and
/// launchers.
pub(crate) fn is_engine(pod: &Pod) -> bool {
    let labels = pod.labels();
    let is = |key: &str, value: &str| labels.get(key).is_some_and(|found| found == value);
    let of_engines = [label::MODEL, dual_pods::keys::ENGINE_OF, dual_pods::keys::DUAL];
    of_engines.iter().any(|key| labels.contains_key(*key)) || (is(COMPONENT, LAUNCHER) && is(MANAGED, ROUSE))
}

/// Returns the node on which this engine's Pod waits for an image; `None` for all other Pods.
pub(super) fn is_pulling_engine(pod: &Pod) -> Option<NodeName> {
    if !is_engine(pod) || pod.metadata.deletion_timestamp.is_some() || has_ended(pod) {
        return None;
    }
    let spec = pod.spec.as_ref()?;
    let node = spec.node_name.as_deref()?;
    let plain_inits = spec.init_containers.iter().flatten();
    let plain_inits = plain_inits.filter(|init| init.restart_policy.as_deref() != Some("Always"));
    let runs = |name: &str| {
        let status = init_containers(pod).iter().find(|status| status.name == name);
        status.and_then(|status| status.state.as_ref()).is_some_and(|state| state.running.is_some())
    };
    // A running init container holds the others back, and their pulls with them.
    if plain_inits.map(|init| init.name.as_str()).any(runs) {
        return None;
    }
    let mut statuses = init_containers(pod).iter().chain(containers(pod)).peekable();
    // Until the kubelet has written a status, nothing is pulled, but the Pod is about to.
    let is_pulling = statuses.peek().is_none() || statuses.any(waits_for_image);
    is_pulling.then(|| NodeName::from(node))
}

/// Whether the container's image is being pulled. After a failed pull it is not: such an engine may never start.
fn waits_for_image(container: &ContainerStatus) -> bool {
    let is_pull = |(reason, _): (&str, &str)| matches!(reason, "ContainerCreating" | "PodInitializing");
    container.image_id.is_empty() && waiting(container).is_some_and(is_pull)
}

/// Returns the number in this annotation. What is missing counts as 0.
fn number<T: std::str::FromStr + Default>(pod: &Pod, key: &str) -> T {
    pod.annotations().get(key).and_then(|text| text.parse().ok()).unwrap_or_default()
}

fn created(pod: &Pod) -> Tick {
    pod.creation_timestamp().map(|time| tick(&time)).unwrap_or_default()
}

fn has_ended(pod: &Pod) -> bool {
    matches!(phase(pod), Some("Succeeded" | "Failed"))
}

fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

fn containers(pod: &Pod) -> &[ContainerStatus] {
    pod.status.as_ref().and_then(|status| status.container_statuses.as_deref()).unwrap_or_default()
}

fn init_containers(pod: &Pod) -> &[ContainerStatus] {
    pod.status.as_ref().and_then(|status| status.init_container_statuses.as_deref()).unwrap_or_default()
}

/// Returns the reason and the message with which the container waits.
fn waiting(container: &ContainerStatus) -> Option<(&str, &str)> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    Some((waiting.reason.as_deref().unwrap_or_default(), waiting.message.as_deref().unwrap_or_default()))
}

/// Returns when the container ended or started, not before its Pod was created.
///
/// A container that never started has a time of 1970.
fn reached_at(pod: &Pod, container: &ContainerStatus) -> Tick {
    let state = container.state.as_ref();
    let ended = state.and_then(|state| state.terminated.as_ref()?.finished_at.as_ref());
    let started = state.and_then(|state| state.running.as_ref()?.started_at.as_ref());
    ended.or(started).map(tick).unwrap_or_default().max(created(pod))
}

/// Returns the state of a Pod that the kubelet has ended before its containers told anything.
fn ended_by_kubelet(pod: &Pod) -> Option<WarmupPodState> {
    if phase(pod) != Some("Failed") {
        return None;
    }
    let status = pod.status.as_ref()?;
    let reason = status.reason.as_deref().unwrap_or_default();
    let message = status.message.as_deref().unwrap_or_default();
    let cause = match reason {
        "Evicted" if message.contains("ephemeral-storage") || message.contains("DiskPressure") => {
            WarmupCause::DiskPressure
        }
        "NodeLost" | "NodeShutdown" | "Terminated" => WarmupCause::NodeNotReady,
        "Preempting" => WarmupCause::NodeFull,
        _ if reason.starts_with("OutOf") => WarmupCause::NodeFull,
        "" if message.is_empty() => {
            WarmupCause::unknown("the Pod has failed, and its status does not say why")
        }
        _ => WarmupCause::unknown(format!("{reason}: {message}").trim_matches([':', ' '])),
    };
    Some(WarmupPodState::Failed { cause, at: created(pod) })
}

/// Returns the state of a Pod of which no container has begun.
fn not_begun(pod: &Pod) -> WarmupPodState {
    match scheduling::cause(pod) {
        Some(cause) => WarmupPodState::Pending { cause: Some(cause) },
        None if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) => WarmupPodState::Pulling,
        None => WarmupPodState::Pending { cause: None },
    }
}
