//! Reads from a Pod what the manager of its engine needs.

use std::{fmt, net::IpAddr};

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt as _;
use rouse::{
    model::{SleepLevel, VariantName},
    units::{Generation, Tick},
};

use super::{
    condition::tick,
    crd::ledger::ObjectName,
    dual_pods::keys,
    label,
    workload::{ASLEEP, CONTAINER, FINGERPRINT, GENERATION, MANAGED, OBJECT, REPLICA, ROUSE, STUB, TEMPLATE},
    writer::fence::SeenObject,
};

/// The last known state of an engine's Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnginePod {
    pub name: ObjectName,
    pub uid: String,
    /// For the fences of writes to the Pod.
    pub seen: SeenObject,
    /// The model and the Deployment's template, from the Pod's labels.
    pub model: String,
    pub template_hash: String,
    /// The variant, from the Pod's label; the default variant has none.
    pub variant: VariantName,
    pub fingerprint: u64,
    /// The engine's replica and generation, once the leader has assigned them.
    pub engine: Option<(u32, Generation)>,
    /// Level at which the engine sleeps or may sleep.
    pub asleep: Option<SleepLevel>,
    pub address: Option<IpAddr>,
    /// The InferenceModel that owns the Pod.
    pub object: Option<ObjectName>,
    /// The Deployment that owns the Pod.
    pub deployment: Option<ObjectName>,
    /// The node that the scheduler chose.
    pub node: Option<String>,
    pub created: Tick,
    /// The kubelet reports the Pod as ready: its stub reports that the engine serves.
    pub ready: bool,
    /// The Pod is being deleted.
    pub terminating: bool,
    /// All containers have ended for good.
    pub finished: bool,
    pub failure: Option<PodFailure>,
}

/// Whether the Pod has the labels of an engine's Pod, as in [`crate::workload::selector`].
///
/// A provider of a model's requester has the label of the model, too.
pub(crate) fn is_engine_pod(pod: &Pod) -> bool {
    let labels = pod.labels();
    labels.contains_key(label::MODEL) && labels.get(MANAGED).is_some_and(|by| by == ROUSE)
}

/// Why a Pod makes no progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodFailure {
    /// No node has fitted the Pod since `since`.
    Unschedulable { since: Tick, message: String },
    /// A container cannot be created because of its image or its configuration.
    ContainerWaiting { reason: String, message: String },
    /// The controller of dual pods reports that the requested engine cannot be built.
    RequesterErrors { message: String },
    /// The engine's container has ended on its own, `times` times.
    Crashed { code: i32, signal: Option<i32>, times: u32 },
}

/// Renders the failure for people.
impl fmt::Display for PodFailure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unschedulable { message, .. } => {
                write!(out, "the engine's Pod cannot be scheduled: {message}")
            }
            Self::ContainerWaiting { reason, message } if message.is_empty() => {
                write!(out, "a container of the engine's Pod cannot be created: {reason}")
            }
            Self::ContainerWaiting { reason, message } => {
                write!(out, "a container of the engine's Pod cannot be created: {reason}: {message}")
            }
            Self::RequesterErrors { message } => write!(out, "the engine's Pod cannot be created: {message}"),
            Self::Crashed { code, .. } => write!(out, "the engine exited on its own, with exit code {code}"),
        }
    }
}

impl EnginePod {
    /// Reads the Pod; `None` if its labels are not those of Rouse's engine Pods.
    #[must_use]
    pub fn of(pod: &Pod) -> Option<Self> {
        let labels = pod.labels();
        let annotations = pod.annotations();
        let number = |name: &str| annotations.get(name).and_then(|text| text.parse::<u64>().ok());
        let status = pod.status.clone().unwrap_or_default();
        let replica = number(REPLICA).and_then(|replica| u32::try_from(replica).ok());
        let ready = status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        Some(Self {
            name: ObjectName::new(pod.namespace()?, pod.name_any()),
            uid: pod.uid()?,
            seen: SeenObject::of(&pod.metadata),
            model: labels.get(label::MODEL)?.clone(),
            template_hash: labels.get(TEMPLATE)?.clone(),
            variant: labels.get(label::VARIANT).map(|name| name.as_str().into()).unwrap_or_default(),
            fingerprint: number(FINGERPRINT)?,
            engine: replica.zip(number(GENERATION).map(Generation)),
            asleep: number(ASLEEP).and_then(|level| SleepLevel::from_number(u8::try_from(level).ok()?)),
            address: status.pod_ip.as_ref().and_then(|ip| ip.parse().ok()),
            object: annotations
                .get(OBJECT)
                .map(|name| ObjectName::new(pod.namespace().unwrap_or_default(), name)),
            deployment: deployment(pod),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            created: pod.creation_timestamp().map_or(Tick(0), |time| tick(&time)),
            ready,
            terminating: pod.metadata.deletion_timestamp.is_some(),
            finished: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
            failure: pod_failure(pod),
        })
    }

    /// Whether the Pod can host a new engine.
    #[must_use]
    pub const fn is_free(&self) -> bool {
        self.engine.is_none() && !self.terminating && !self.finished
    }
}

/// Derives the Deployment's name from the owning ReplicaSet: the set's name minus the Pod's hash label.
fn deployment(pod: &Pod) -> Option<ObjectName> {
    let set = pod.owner_references().iter().find(|owner| owner.kind == "ReplicaSet")?;
    let hash = pod.labels().get("pod-template-hash")?;
    let name = set.name.strip_suffix(hash.as_str())?.strip_suffix('-')?;
    Some(ObjectName::new(pod.namespace()?, name))
}

fn pod_failure(pod: &Pod) -> Option<PodFailure> {
    let status = pod.status.as_ref()?;
    let unscheduled = status.conditions.iter().flatten().find(|condition| {
        condition.type_ == "PodScheduled"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
    });
    if let Some(condition) = unscheduled {
        return Some(PodFailure::Unschedulable {
            since: condition.last_transition_time.as_ref().map_or(Tick(0), tick),
            message: condition.message.clone().unwrap_or_default(),
        });
    }
    if let Some(message) = keys::errors(pod) {
        return Some(PodFailure::RequesterErrors { message });
    }
    // The kubelet restarts the container, but that is another engine without known state, in this engine's memory.
    let engine = pod.annotations().get(CONTAINER);
    let mut engines = status.container_statuses.iter().flatten().filter(|it| Some(&it.name) == engine);
    if let Some(crash) = engines.find_map(crashed) {
        return Some(crash);
    }
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let mut stuck = containers.filter_map(|container| Some((container, waiting_reason(container)?)));
    // A stub that ended restarts and gets its orders again, so its crash loop is not a failure.
    stuck.find_map(|(container, (reason, message))| {
        (container.name != STUB || reason != "CrashLoopBackOff")
            .then_some(PodFailure::ContainerWaiting { reason, message })
    })
}

fn crashed(container: &ContainerStatus) -> Option<PodFailure> {
    let states = [&container.state, &container.last_state];
    let terminated = states.into_iter().flatten().find_map(|state| state.terminated.as_ref())?;
    let times = u32::try_from(container.restart_count).unwrap_or(0).max(1);
    let signal = terminated.signal.filter(|signal| *signal > 0);
    Some(PodFailure::Crashed { code: terminated.exit_code, signal, times })
}

/// Returns why a container cannot be created: reason and message.
pub(crate) fn waiting_reason(container: &ContainerStatus) -> Option<(String, String)> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.clone().unwrap_or_default();
    // A container that is still starting has a waiting reason too.
    if matches!(reason.as_str(), "" | "ContainerCreating" | "PodInitializing") {
        return None;
    }
    Some((reason, waiting.message.clone().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn seen(status: Value) -> Option<EnginePod> {
        let pod = json!({
            "metadata": {
                "name": "m-1", "namespace": "ns", "uid": "u",
                "labels": {TEMPLATE: "abcd", label::MODEL: "hash"},
                "annotations": {
                    FINGERPRINT: "7", CONTAINER: "engine", REPLICA: "2", GENERATION: "3", ASLEEP: "2",
                },
            },
            "status": status,
        });
        EnginePod::of(&serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn a_provider_is_no_engine_pod_although_it_has_the_label_of_the_model() {
        let of = |labels: Value| {
            is_engine_pod(&serde_json::from_value(json!({"metadata": {"labels": labels}})).unwrap())
        };
        assert!(of(json!({MANAGED: ROUSE, label::MODEL: "hash"})));
        assert!(!of(json!({label::MODEL: "hash", TEMPLATE: "abcd"})));
        assert!(!of(json!({MANAGED: ROUSE})));
    }

    #[test]
    fn what_is_wrong_with_a_pod_is_told_apart_from_what_takes_time() {
        let waiting = |reason: &str| {
            json!({"containerStatuses": [
                {"name": STUB, "image": "", "imageID": "", "ready": false, "restartCount": 9,
                 "state": {"waiting": {"reason": "CrashLoopBackOff"}}},
                {"name": "engine", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                 "state": {"waiting": {"reason": reason, "message": "why"}}},
            ]})
        };
        assert_eq!(seen(waiting("ContainerCreating")).unwrap().failure, None);
        let image = PodFailure::ContainerWaiting { reason: "ErrImagePull".into(), message: "why".into() };
        assert_eq!(seen(waiting("ErrImagePull")).unwrap().failure, Some(image.clone()));
        let without_stub = json!({"containerStatuses": [
            {"name": STUB, "image": "", "imageID": "", "ready": false, "restartCount": 0,
             "state": {"waiting": {"reason": "ErrImagePull", "message": "why"}}},
        ]});
        assert_eq!(seen(without_stub).unwrap().failure, Some(image));
        let crashed = json!({"containerStatuses": [
            {"name": "engine", "image": "", "imageID": "", "ready": true, "restartCount": 2,
             "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 3}}},
        ]});
        let crash = PodFailure::Crashed { code: 3, signal: None, times: 2 };
        assert_eq!(seen(crashed).unwrap().failure, Some(crash));
        let nowhere = json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/3 nodes", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
        assert!(matches!(seen(nowhere).unwrap().failure, Some(PodFailure::Unschedulable { .. })));
    }

    #[test]
    fn a_pod_is_an_engine_by_its_annotations() {
        let pod = seen(json!({"podIP": "10.0.0.7", "phase": "Running"})).unwrap();
        assert_eq!((pod.engine, pod.asleep), (Some((2, Generation(3))), Some(SleepLevel::Two)));
        assert_eq!((pod.fingerprint, pod.address), (7, Some([10, 0, 0, 7].into())));
        assert!(!pod.is_free() && !pod.finished && !pod.ready);
        assert_eq!(pod.variant, VariantName::default());
        let labels = json!({TEMPLATE: "abcd", label::MODEL: "hash", label::VARIANT: "large"});
        let metadata = json!({"name": "m-2", "namespace": "ns", "uid": "v", "labels": labels,
            "annotations": {FINGERPRINT: "7"}});
        let large = EnginePod::of(&serde_json::from_value(json!({"metadata": metadata})).unwrap()).unwrap();
        assert_eq!(large.variant.as_str(), "large");
        let foreign = json!({"metadata": {"name": "x", "namespace": "ns", "uid": "u"}});
        assert_eq!(EnginePod::of(&serde_json::from_value(foreign).unwrap()), None);
    }
}
