//! Shared helpers: builders for Pods and Deployments, and waits.

use k8s_openapi::{
    api::{apps::v1::Deployment, core::v1::Pod},
    apimachinery::pkg::apis::meta::v1::Status,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use rouse_cluster::{Namespace, wait};
use serde_json::{Value, json};

/// A Pod's spec with one container `main` that runs this script; `more` is merged into the container.
pub(crate) fn script(text: &str, more: Value) -> Value {
    let mut container = json!({ "name": "main", "image": "none", "command": ["sh", "-c", text] });
    merge(&mut container, more);
    json!({ "containers": [container] })
}

pub(crate) fn merge(into: &mut Value, more: Value) {
    match (into, more) {
        (Value::Object(into), Value::Object(more)) => {
            for (key, value) in more {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, more) => *into = more,
    }
}

pub(crate) async fn pod(namespace: &Namespace, name: &str, spec: Value) -> Pod {
    let pod = json!({ "metadata": { "name": name }, "spec": spec });
    let pod = serde_json::from_value(pod).unwrap();
    namespace.api().create(&PostParams::default(), &pod).await.unwrap()
}

pub(crate) async fn deployment(namespace: &Namespace, name: &str, replicas: u32, spec: Value) -> Deployment {
    let labels = json!({ "app": name });
    let deployment = json!({
        "metadata": { "name": name },
        "spec": {
            "replicas": replicas,
            "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": spec },
        },
    });
    let deployment = serde_json::from_value(deployment).unwrap();
    namespace.api().create(&PostParams::default(), &deployment).await.unwrap()
}

pub(crate) async fn pods(namespace: &Namespace) -> Vec<Pod> {
    namespace.api().list(&ListParams::default()).await.unwrap().items
}

/// Waits until `fits` accepts this Pod.
pub(crate) async fn until(namespace: &Namespace, name: &str, what: &str, fits: impl Fn(&Pod) -> bool) -> Pod {
    let api: Api<Pod> = namespace.api();
    wait::until(&api, name, what, |pod| pod.as_ref().is_some_and(&fits)).await.unwrap().unwrap()
}

/// Waits until the Pod's object is gone.
pub(crate) async fn gone(namespace: &Namespace, pod: &Pod) {
    let api: Api<Pod> = namespace.api();
    let uid = pod.uid();
    let other = |seen: &Option<Pod>| seen.as_ref().is_none_or(|seen| seen.uid() != uid);
    wait::until(&api, &pod.name_any(), "its end", other).await.unwrap();
}

pub(crate) async fn delete(namespace: &Namespace, pod: &Pod) {
    let api: Api<Pod> = namespace.api();
    api.delete(&pod.name_any(), &DeleteParams::default()).await.unwrap();
}

pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

/// Returns a condition's status, reason and message.
pub(crate) fn condition(pod: &Pod, kind: &str) -> Option<(String, String, String)> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let found = conditions.iter().find(|condition| condition.type_ == kind)?.clone();
    Some((found.status, found.reason.unwrap_or_default(), found.message.unwrap_or_default()))
}

pub(crate) fn is(pod: &Pod, kind: &str, status: &str) -> bool {
    condition(pod, kind).is_some_and(|(is, ..)| is == status)
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    is(pod, "Ready", "True")
}

pub(crate) fn restarts(pod: &Pod, container: &str) -> i32 {
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses.filter(|status| status.name == container).map(|status| status.restart_count).sum()
}

/// Returns the status of an API server error.
pub(crate) fn refusal<T: std::fmt::Debug>(outcome: kube::Result<T>) -> Status {
    match outcome.unwrap_err() {
        kube::Error::Api(status) => serde_json::from_value(
            json!({ "code": status.code, "reason": status.reason, "message": status.message }),
        )
        .unwrap(),
        error => panic!("not refused, but failed: {error}"),
    }
}
