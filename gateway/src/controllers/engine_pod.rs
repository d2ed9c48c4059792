//! What matters of a Pod to whoever runs an engine in it.

use std::{fmt, net::IpAddr};

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::{Client, ResourceExt as _};
use rouse::{
    model::SleepLevel,
    units::{Generation, Tick},
};

use super::{
    condition::tick,
    crd::ledger::ObjectName,
    dual_pods::keys,
    label, model_controller,
    watch::WatchTarget,
    workload::{self, ASLEEP, CONTAINER, FINGERPRINT, GENERATION, OBJECT, REPLICA, STUB, TEMPLATE},
};

/// A Pod of an engine, as it was last seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnginePod {
    pub name: ObjectName,
    pub uid: String,
    /// The model and the Deployment's template, by their labels.
    pub model: String,
    pub template_hash: String,
    pub fingerprint: u64,
    /// Which engine it is, once the leader has said so.
    pub engine: Option<(u32, Generation)>,
    /// Its engine sleeps so deep, or may.
    pub asleep: Option<SleepLevel>,
    pub address: Option<IpAddr>,
    /// The InferenceModel that it is a Pod of.
    pub object: Option<ObjectName>,
    /// The Deployment that it is a Pod of.
    pub deployment: Option<ObjectName>,
    /// The node that it was given.
    pub node: Option<String>,
    pub created: Tick,
    /// The kubelet finds it ready: its stub says that it serves.
    pub ready: bool,
    /// It was told to go.
    pub terminating: bool,
    /// Its containers have ended for good.
    pub finished: bool,
    pub failure: Option<PodFailure>,
}

/// Pods of engines, of this namespace or of all.
#[must_use]
pub fn watch_target(client: &Client, namespace: Option<String>) -> WatchTarget<Pod> {
    let api = model_controller::namespaced(client, namespace.as_deref());
    let slim = |pod: &mut Pod| pod.metadata.managed_fields = None;
    WatchTarget { api, namespace, labels: Some(workload::selector()), fields: None, slim }
}

/// Why a Pod does not get on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodFailure {
    /// No node takes it, since then.
    Unschedulable { since: Tick, message: String },
    /// A container cannot be made: its image, its configuration.
    ContainerWaiting { reason: String, message: String },
    /// Who serves requesters says that what it asks for cannot be made.
    RequesterErrors { message: String },
    /// The engine's container has ended by itself, so often.
    Crashed { code: i32, signal: Option<i32>, times: u32 },
}

/// For people.
impl fmt::Display for PodFailure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unschedulable { message, .. } => write!(out, "no node takes its Pod: {message}"),
            Self::ContainerWaiting { reason, message } if message.is_empty() => {
                write!(out, "a container of its Pod cannot be made: {reason}")
            }
            Self::ContainerWaiting { reason, message } => {
                write!(out, "a container of its Pod cannot be made: {reason}: {message}")
            }
            Self::RequesterErrors { message } => write!(out, "its engine's Pod cannot be made: {message}"),
            Self::Crashed { code, .. } => write!(out, "its engine ended by itself, with exit code {code}"),
        }
    }
}

impl EnginePod {
    /// `None`: what is not a Pod of Rouse's, by its labels.
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
            model: labels.get(label::MODEL)?.clone(),
            template_hash: labels.get(TEMPLATE)?.clone(),
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

    /// It can become an engine that nothing runs in yet.
    #[must_use]
    pub const fn is_free(&self) -> bool {
        self.engine.is_none() && !self.terminating && !self.finished
    }
}

/// A Pod's owner is a ReplicaSet, whose name is the Deployment's and the hash that the Pod has as a label.
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
    // The kubelet starts it again, but that is another engine, of which nothing is known, in memory that is this one's.
    let engine = pod.annotations().get(CONTAINER);
    let mut engines = status.container_statuses.iter().flatten().filter(|it| Some(&it.name) == engine);
    if let Some(crash) = engines.find_map(crashed) {
        return Some(crash);
    }
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let mut stuck = containers.filter_map(|container| Some((container, waiting_reason(container)?)));
    // A stub that ended is started again, and told anew what it is to do.
    stuck.find_map(|(container, (reason, message))| {
        (container.name != STUB || reason != "CrashLoopBackOff")
            .then_some(PodFailure::ContainerWaiting { reason, message })
    })
}

fn crashed(container: &ContainerStatus) -> Option<PodFailure> {
    let states = [&container.state, &container.last_state];
    let ended = states.into_iter().flatten().find_map(|state| state.terminated.as_ref())?;
    let times = u32::try_from(container.restart_count).unwrap_or(0).max(1);
    let signal = ended.signal.filter(|signal| *signal > 0);
    Some(PodFailure::Crashed { code: ended.exit_code, signal, times })
}

/// Why it cannot be made, in a word and in more.
pub(crate) fn waiting_reason(container: &ContainerStatus) -> Option<(String, String)> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.clone().unwrap_or_default();
    // What is only on its way has a reason, too.
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
        let foreign = json!({"metadata": {"name": "x", "namespace": "ns", "uid": "u"}});
        assert_eq!(EnginePod::of(&serde_json::from_value(foreign).unwrap()), None);
    }
}
