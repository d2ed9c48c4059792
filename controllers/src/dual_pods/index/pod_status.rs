//! Reads Pod statuses, which kubelets write.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt as _;
use rouse::{
    pairing::{event::ProviderPhase, ids::Uid},
    units::{Millis, Tick},
};

use crate::{condition::tick, dual_pods::keys, engine_pod};

/// Maximum characters of a kubelet's message.
const MAX_FAILURE_CHARS: usize = 300;

pub(super) fn created(pod: &Pod) -> Tick {
    pod.creation_timestamp().map_or(Tick(0), |time| tick(&time))
}

pub(super) fn address(pod: &Pod) -> Option<IpAddr> {
    pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()
}

/// Returns the status of the engine's or stub's container.
pub(super) fn container(pod: &Pod) -> Option<&ContainerStatus> {
    let all = pod.status.as_ref()?.container_statuses.as_ref()?;
    all.iter().find(|status| status.name == keys::CONTAINER)
}

/// Returns the container's id while it runs.
pub(super) fn running_container_id(status: &ContainerStatus) -> Option<Uid> {
    status.state.as_ref()?.running.as_ref()?;
    status.container_id.as_deref().map(Uid::from)
}

pub(super) fn started_at(status: &ContainerStatus) -> Option<Tick> {
    status.state.as_ref()?.running.as_ref()?.started_at.as_ref().map(tick)
}

pub(super) fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Returns since when the Pod is being deleted. Its object has the deadline, which includes the grace period.
pub(super) fn deleting(pod: &Pod) -> Option<Tick> {
    let until = pod.metadata.deletion_timestamp.as_ref().map(tick)?;
    let grace =
        u64::try_from(pod.metadata.deletion_grace_period_seconds.unwrap_or_default()).unwrap_or_default();
    Some(Tick(until.0.saturating_sub(Millis::secs(grace).0)))
}

/// Returns why that container does not run, or why it ended before.
pub(super) fn container_failure(pod: &Pod) -> Option<String> {
    let status = container(pod)?;
    let ended =
        [&status.state, &status.last_state].into_iter().flatten().find_map(|state| state.terminated.as_ref());
    if let Some(ended) = ended {
        let reason = ended.reason.as_deref().filter(|reason| *reason != "Error");
        let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
        return Some(format!("the container exited with code {}{reason}", ended.exit_code));
    }
    let (reason, message) = engine_pod::waiting_reason(status)?;
    let message = Some(message).filter(|message| !message.is_empty());
    let message = message.map(|message| format!(": {message}")).unwrap_or_default();
    Some(
        format!("the container cannot be created: {reason}{message}")
            .chars()
            .take(MAX_FAILURE_CHARS)
            .collect(),
    )
}

pub(super) fn provider_phase(pod: &Pod) -> ProviderPhase {
    if has_ended(pod) {
        return ProviderPhase::Terminated;
    }
    let Some(status) = container(pod) else { return ProviderPhase::Pending };
    match (running_container_id(status), status.ready) {
        (Some(_), true) => ProviderPhase::Ready,
        (Some(_), false) if status.restart_count == 0 => ProviderPhase::Running,
        (None, _)
            if status.restart_count == 0
                && status.last_state.as_ref().is_none_or(|last| last.terminated.is_none()) =>
        {
            ProviderPhase::Pending
        }
        _ => ProviderPhase::Crashed,
    }
}
