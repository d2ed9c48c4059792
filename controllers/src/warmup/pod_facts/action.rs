//! State of the Pod of a custom action.

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod};
use rouse::{
    units::Tick,
    warmup::{WarmupCause, WarmupPodState, classify_pull},
};

use super::{containers, created, ended_by_kubelet, init_containers, not_begun, phase, reached_at, waiting};

/// Waiting reasons of a container that cannot be created. The kubelet tries again without end.
const NOT_CREATED: [&str; 2] = ["CreateContainerConfigError", "CreateContainerError"];

/// Restarts of a container, all in vain, that make up a failed attempt. The kubelet waits for 5 minutes in all between
/// them. Without a limit, an action with restart policy OnFailure would never fail.
const MAX_RESTARTS: i32 = 5;
/// Waiting reason of a container whose next restart is far off.
const CRASH_LOOP: &str = "CrashLoopBackOff";

/// The action is done when every container has exited with 0, or is ready by a probe of its own: a kubelet reports a
/// container without a probe as ready as soon as it runs.
pub(super) fn state(pod: &Pod) -> WarmupPodState {
    if let Some(at) = done_at(pod) {
        return WarmupPodState::Done { at };
    }
    if let Some((exit_code, at)) = failure(pod) {
        return WarmupPodState::Failed { cause: WarmupCause::ActionFailed { exit_code }, at };
    }
    if let Some(ended) = ended_by_kubelet(pod) {
        return ended;
    }
    // The kubelet would restart it without end. Such a Pod is deleted, unlike one that has failed and keeps its log.
    if let Some(exit_code) = restarted_in_vain(pod) {
        return WarmupPodState::Pending { cause: Some(WarmupCause::ActionFailed { exit_code }) };
    }
    let all: Vec<&ContainerStatus> = init_containers(pod).iter().chain(containers(pod)).collect();
    if let Some(cause) = all.iter().find_map(|container| stuck(container)) {
        return WarmupPodState::Pending { cause: Some(cause) };
    }
    if all.iter().any(|container| has_begun(container)) {
        return WarmupPodState::Running;
    }
    let is_creating = |container: &&ContainerStatus| waiting(container).is_some();
    if all.iter().any(is_creating) { WarmupPodState::Pulling } else { not_begun(pod) }
}

/// Returns when the last container became ready or ended; `None` if the action is not done.
fn done_at(pod: &Pod) -> Option<Tick> {
    // No container of such a Pod has failed, even if their statuses are missing.
    if phase(pod) == Some("Succeeded") {
        return Some(last(pod));
    }
    let spec = pod.spec.as_ref()?;
    let is_done = |containers: &[ContainerStatus], container: &Container, is_ready_enough: bool| {
        let status = containers.iter().find(|status| status.name == container.name);
        status.is_some_and(|status| status.ready && is_ready_enough || exit_code(status) == Some(0))
    };
    let mut inits = spec.init_containers.iter().flatten();
    // A plain init container counts as ready once it has exited with 0.
    let inits_done = inits.all(|container| is_done(init_containers(pod), container, true));
    let is_main_done =
        |container: &Container| is_done(containers(pod), container, container.readiness_probe.is_some());
    let all_done = inits_done && spec.containers.iter().all(is_main_done);
    (all_done && phase(pod) != Some("Failed")).then(|| last(pod))
}

/// Returns the code of a container that has failed for good, and when it ended.
fn failure(pod: &Pod) -> Option<(i32, Tick)> {
    let restarts = pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()) != Some("Never");
    if restarts && phase(pod) != Some("Failed") {
        return None;
    }
    let mut all = init_containers(pod).iter().chain(containers(pod));
    all.find_map(|container| {
        // A sidecar is restarted under any policy, so its end is not that of the action.
        let code = exit_code(container).filter(|code| *code != 0 && !is_sidecar(pod, container))?;
        Some((code, reached_at(pod, container)))
    })
}

/// Returns the last exit code of a container that has failed at each of its restarts.
///
/// It stays a failure while the container runs again, so that an attempt is not first a failure and then none.
fn restarted_in_vain(pod: &Pod) -> Option<i32> {
    let is_over = |container: &ContainerStatus| {
        let is_looping = waiting(container).is_some_and(|(reason, _)| reason == CRASH_LOOP);
        container.restart_count > MAX_RESTARTS || (container.restart_count == MAX_RESTARTS && is_looping)
    };
    let mut all = init_containers(pod).iter().chain(containers(pod));
    all.find_map(|container| {
        let code = container.last_state.as_ref()?.terminated.as_ref()?.exit_code;
        (code != 0 && is_over(container) && !is_sidecar(pod, container)).then_some(code)
    })
}

fn is_sidecar(pod: &Pod, container: &ContainerStatus) -> bool {
    let inits = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_ref());
    let mut inits = inits.into_iter().flatten();
    inits.any(|init| init.name == container.name && init.restart_policy.as_deref() == Some("Always"))
}

fn exit_code(container: &ContainerStatus) -> Option<i32> {
    Some(container.state.as_ref()?.terminated.as_ref()?.exit_code)
}

/// Returns why the container cannot be created.
fn stuck(container: &ContainerStatus) -> Option<WarmupCause> {
    let (reason, message) = waiting(container)?;
    let not_created = || {
        let text = if message.is_empty() { reason } else { message };
        NOT_CREATED.contains(&reason).then(|| WarmupCause::unknown(text))
    };
    classify_pull(reason, message).or_else(not_created)
}

/// Whether the container has run, perhaps before.
fn has_begun(container: &ContainerStatus) -> bool {
    let mut states = [&container.state, &container.last_state].into_iter().flatten();
    states.any(|state| state.running.is_some() || state.terminated.is_some())
}

fn last(pod: &Pod) -> Tick {
    let all = init_containers(pod).iter().chain(containers(pod));
    all.map(|container| reached_at(pod, container)).max().unwrap_or_else(|| created(pod))
}
