//! What the message of a failed wait says of Pods and of Events: a whole object is too long to read.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::{Api, ResourceExt as _, api::ListParams};

use crate::{installation::Installation, pairs::is_ready};

/// One line with what a failed wait for a Pod is judged by.
pub(crate) fn of_pod(pod: &Pod) -> String {
    let (meta, status) = (&pod.metadata, pod.status.clone().unwrap_or_default());
    let ours = |all: &BTreeMap<String, String>| {
        let short = all.iter().filter(|(key, value)| key.contains("dual-pods") && value.len() < 80);
        short
            .map(|(key, value)| format!(" {}={value}", key.rsplit('/').next().unwrap_or(key)))
            .collect::<String>()
    };
    format!(
        "{} created {:?}, deleted {:?}, finalizers {:?}, phase {:?} {:?}, ready {}; labels{}; annotations{}\n",
        pod.name_any(),
        meta.creation_timestamp.as_ref().map(|at| at.0),
        meta.deletion_timestamp.as_ref().map(|at| at.0),
        pod.finalizers(),
        status.phase.unwrap_or_default(),
        status.message.unwrap_or_default(),
        is_ready(pod),
        ours(pod.labels()),
        ours(pod.annotations()),
    )
}

/// All Events of the namespace, a line each, for the message of a wait that failed.
pub(crate) async fn of_events<R>(world: &Installation<'_, R>) -> String {
    let api: Api<Event> = world.site.namespace.api();
    let mut events = api.list(&ListParams::default()).await.unwrap().items;
    events.sort_by_key(|event| event.metadata.creation_timestamp.clone().map(|at| at.0));
    let line = |event: Event| {
        let about = event.involved_object.name.unwrap_or_default();
        let at = event.metadata.creation_timestamp.map(|at| at.0);
        let (reason, note) = (event.reason.unwrap_or_default(), event.message.unwrap_or_default());
        format!("{at:?} {about} {reason}: {note}\n")
    };
    events.into_iter().map(line).collect()
}
