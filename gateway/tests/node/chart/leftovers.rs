//! What is in a cluster because of a release.

use std::collections::BTreeSet;

use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, ListParams},
    discovery::{ApiGroup, Discovery, verbs},
};
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::label;
use tokio::time::{Duration, sleep, timeout};

use super::release::NAMESPACE;

/// The label with the release's name.
const RELEASE: &str = "app.kubernetes.io/instance";
/// The group of our kinds.
const GROUP: &str = "rouse.dev";

/// Returns all objects of the cluster, with their kinds.
pub(super) async fn all_objects(client: &Client) -> Vec<(ApiResource, DynamicObject)> {
    let discovered = Box::pin(Discovery::new(client.clone()).run()).await.unwrap();
    let mut found = Vec::new();
    for (resource, capabilities) in discovered.groups().flat_map(ApiGroup::recommended_resources) {
        if !capabilities.supports_operation(verbs::LIST) {
            continue;
        }
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
        let objects = api.list(&ListParams::default()).await;
        let objects = objects.unwrap_or_else(|error| panic!("{}: {error}", resource.kind));
        found.extend(objects.items.into_iter().map(|object| (resource.clone(), object)));
    }
    found
}

/// Returns the kinds and names of the objects with the release's label, and of all objects in its namespace; without
/// those that an uninstallation leaves, and those that Kubernetes makes in any namespace.
pub(super) async fn of_release(client: &Client) -> BTreeSet<String> {
    let objects = all_objects(client).await.into_iter();
    let of_release = objects.filter(|(resource, object)| {
        let is_labelled = object.labels().get(RELEASE).is_some_and(|name| name == "rouse");
        (is_labelled || object.namespace().as_deref() == Some(NAMESPACE))
            && !is_left(resource, object)
            && !is_of_any_namespace(resource, object)
    });
    of_release.map(|(resource, object)| format!("{} {}", resource.kind, object.name_any())).collect()
}

/// Waits until nothing is there any more: Pods and what belongs to a Service go in their own time.
pub(super) async fn until_none(client: &Client) {
    let mut left = of_release(client).await;
    let gone = async {
        while !left.is_empty() {
            sleep(Duration::from_millis(100)).await;
            left = of_release(client).await;
        }
    };
    let in_time = timeout(WAIT_TIMEOUT, Box::pin(gone)).await.is_ok();
    assert!(in_time, "the notes do not say that this is left: {left:?}");
}

/// Whether the notes say that an uninstallation leaves it: the definitions, their objects, the engines, the key, and
/// the Lease.
fn is_left(resource: &ApiResource, object: &DynamicObject) -> bool {
    let name = object.name_any();
    match resource.kind.as_str() {
        "CustomResourceDefinition" => name.ends_with(&format!(".{GROUP}")),
        "Deployment" | "ReplicaSet" | "Pod" => object.labels().contains_key(label::MODEL),
        "Secret" => name == "rouse-stub-key",
        "Lease" => name == "rouse-controller",
        _ => resource.group == GROUP,
    }
}

fn is_of_any_namespace(resource: &ApiResource, object: &DynamicObject) -> bool {
    let name = object.name_any();
    match resource.kind.as_str() {
        "ConfigMap" => name == "kube-root-ca.crt",
        "ServiceAccount" => name == "default",
        "Event" => true,
        _ => false,
    }
}
