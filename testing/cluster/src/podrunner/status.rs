//! Builds a Pod's status like a kubelet: phase, conditions and container statuses.

use std::net::Ipv4Addr;

use k8s_openapi::{
    api::core::v1::{ContainerStatus, Pod},
    jiff::Timestamp,
};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::container::{ContainerRole, PodContainer, RunState};

/// The inputs of a Pod's status besides its containers.
pub(super) struct PodStatusInputs<'a> {
    pub(super) pod: &'a Pod,
    pub(super) policy: &'a str,
    pub(super) pod_ip: Ipv4Addr,
    pub(super) host_ip: Ipv4Addr,
    pub(super) started_at: Timestamp,
    /// The volumes exist and containers may start.
    pub(super) prepared: bool,
    /// All containers have ended and none will restart.
    pub(super) ended: bool,
    /// Why the node refused the Pod, with a message.
    pub(super) admission_error: Option<&'a (&'static str, String)>,
}

/// One condition as last reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReportedCondition {
    kind: &'static str,
    is_true: bool,
    reason: Option<&'static str>,
    message: Option<String>,
    last_transition: Timestamp,
}

impl ReportedCondition {
    /// Whether the Pod's object has this status; a controller may have overwritten it.
    pub(super) fn matches(&self, pod: &Pod) -> bool {
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let status = if self.is_true { "True" } else { "False" };
        conditions
            .filter(|condition| condition.type_ == self.kind)
            .any(|condition| condition.status == status)
    }

    /// Absent fields are null, because a merge patch would keep their previous values.
    fn json(&self) -> Value {
        json!({
            "type": self.kind,
            "status": if self.is_true { "True" } else { "False" },
            "reason": self.reason,
            "message": self.message,
            "lastProbeTime": null,
            "lastTransitionTime": self.last_transition.to_string(),
        })
    }
}

pub(super) fn phase(facts: &PodStatusInputs<'_>, containers: &[PodContainer]) -> &'static str {
    if facts.admission_error.is_some() {
        return "Failed";
    }
    let of = |role: ContainerRole| containers.iter().filter(move |container| container.role == role);
    let done = |container: &&PodContainer| container.last_exit().is_some();
    let once_failed =
        of(ContainerRole::Init).any(|container| container.last_exit().is_some_and(|end| end.code != 0));
    if once_failed && facts.policy == "Never" {
        return "Failed";
    }
    let initialized = is_initialized(containers);
    let begun = |container: &PodContainer| container.runs > 0;
    let waiting =
        of(ContainerRole::Main).any(|container| !begun(container) && container.last_exit().is_none());
    if !facts.ended && (!initialized || waiting) {
        return "Pending";
    }
    if containers.iter().any(|container| container.running().is_some()) {
        return "Running";
    }
    let succeeded =
        of(ContainerRole::Main).all(|container| container.last_exit().is_some_and(|end| end.code == 0));
    let comes_back =
        of(ContainerRole::Main).filter(done).any(|container| container.should_restart(facts.policy));
    match (facts.ended, comes_back, succeeded) {
        (false, true, _) => "Running",
        (_, _, true) => "Succeeded",
        (..) => "Failed",
    }
}

/// Whether all init containers and sidecars are ready, or a main container has already started.
fn is_initialized(containers: &[PodContainer]) -> bool {
    let begun =
        containers.iter().any(|container| container.role == ContainerRole::Main && container.runs > 0);
    begun
        || containers.iter().all(|container| match container.role {
            ContainerRole::Init => container.is_ready(),
            ContainerRole::Sidecar => container.running().is_some() && container.started,
            ContainerRole::Main => true,
        })
}

/// Returns the kubelet's conditions; unchanged ones keep their transition time.
pub(super) fn conditions(
    facts: &PodStatusInputs<'_>,
    containers: &[PodContainer],
    before: &[ReportedCondition],
    now: Timestamp,
) -> Vec<ReportedCondition> {
    let phase = phase(facts, containers);
    let unready: Vec<_> = containers
        .iter()
        .filter(|container| container.role != ContainerRole::Init && !container.is_ready())
        .map(|container| container.spec.name.as_str())
        .collect();
    let ready = match phase {
        "Succeeded" => (false, Some("PodCompleted"), None),
        "Failed" => (false, Some("PodFailed"), None),
        _ if !unready.is_empty() => {
            let names = unready.join(" ");
            (false, Some("ContainersNotReady"), Some(format!("containers with unready status: [{names}]")))
        }
        _ => (true, None, None),
    };
    let gates = unready_gates(facts.pod);
    let pod_ready = if ready.0 && !gates.is_empty() {
        (false, Some("ReadinessGatesNotReady"), Some(gates.join(", ")))
    } else {
        ready.clone()
    };
    let initialized = match phase {
        "Succeeded" => (true, Some("PodCompleted"), None),
        _ if is_initialized(containers) => (true, None, None),
        _ => {
            let open = containers.iter().filter(|container| match container.role {
                ContainerRole::Init => !container.is_ready(),
                ContainerRole::Sidecar => !container.started,
                ContainerRole::Main => false,
            });
            let names: Vec<_> = open.map(|container| container.spec.name.as_str()).collect();
            let message = format!("containers with incomplete status: [{}]", names.join(" "));
            (false, Some("ContainersNotInitialized"), Some(message))
        }
    };
    [
        ("PodReadyToStartContainers", (facts.prepared && !facts.ended, None, None)),
        ("Initialized", initialized),
        ("Ready", pod_ready),
        ("ContainersReady", ready),
        ("PodScheduled", (true, None, None)),
    ]
    .into_iter()
    .map(|(kind, (holds, reason, message))| {
        let same = before.iter().find(|condition| condition.kind == kind && condition.is_true == holds);
        let since = same.map_or(now, |condition| condition.last_transition);
        ReportedCondition { kind, is_true: holds, reason, message, last_transition: since }
    })
    .collect()
}

fn unready_gates(pod: &Pod) -> Vec<String> {
    let gates = pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    gates
        .filter_map(|gate| {
            let kind = &gate.condition_type;
            match conditions.iter().find(|condition| condition.type_ == *kind) {
                None => {
                    Some(format!("corresponding condition of pod readiness gate {kind:?} does not exist."))
                }
                Some(found) if found.status == "True" => None,
                Some(found) => Some(format!(
                    "the status of pod readiness gate {kind:?} is not \"True\", but {}",
                    found.status
                )),
            }
        })
        .collect()
}

/// Returns the status patch. It names the Pod's uid, so that it cannot hit a successor of the same name.
pub(super) fn patch(
    facts: &PodStatusInputs<'_>,
    containers: &[PodContainer],
    conditions: &[ReportedCondition],
) -> Value {
    let uid = facts.pod.uid().unwrap_or_default();
    let of = |init: bool| -> Vec<ContainerStatus> {
        let chosen = containers.iter().filter(|container| (container.role != ContainerRole::Main) == init);
        chosen.map(|container| container.status(&uid)).collect()
    };
    let conditions: Vec<_> = conditions.iter().map(ReportedCondition::json).collect();
    let addressed = facts.prepared
        || containers.iter().any(|container| !matches!(container.state, RunState::Waiting { .. }));
    let pod_ip = addressed.then_some(facts.pod_ip);
    json!({
        "metadata": { "uid": uid },
        "status": {
            "phase": phase(facts, containers),
            "reason": facts.admission_error.map(|(reason, _)| reason),
            "message": facts.admission_error.map(|(_, message)| message),
            "conditions": conditions,
            "hostIP": facts.host_ip,
            "hostIPs": [{ "ip": facts.host_ip }],
            "podIP": pod_ip,
            "podIPs": pod_ip.map(|ip| vec![json!({ "ip": ip })]),
            "startTime": facts.started_at.to_string(),
            "initContainerStatuses": of(true),
            "containerStatuses": of(false),
        },
    })
}
