//! Writes about slots: to DeviceInstances and DeviceConfigurations, and the deletion of rejected Pods.
//!
//! In a cluster of its own: a leader acts on all instances of its cluster.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams, PostParams},
};
use rouse_cluster::{ServerRole, wait};
use rouse_controllers::crd::{DeviceConfiguration, DeviceInstance};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::{
    gateway::{HeldGateway, world},
    state,
};
use crate::{installation::Installation, rendered::ChartPart, support::own_cluster};

/// The time of a node that is not ready, and of an instance without nodes, is short here.
const SETTINGS: &str = ", slots: {nodeTimeout: 1s}";
const INSTANCES: [&str; 3] = ["freed", "grown", "ended"];
const WRITES: [&str; 6] = [
    "PATCH /deviceinstances/freed/status",
    "PATCH /deviceinstances/grown/status",
    "PATCH /deviceinstances/grown",
    "DELETE /deviceinstances/ended",
    "PATCH /deviceconfigurations/grown/status",
    "DELETE /pods/rejected",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_held_write_about_slots_changes_what_the_next_leader_wrote() {
    let cluster = own_cluster().await;
    let world = Box::pin(world(&cluster, "held-slots")).await;
    world.site.turn_on(ChartPart::Slots).await;
    // Its controllers write nodes, too.
    cluster.stop_server(ServerRole::ControllerManager).await;
    let admin = &world.site.admin;
    Box::pin(create_objects(&world)).await;
    let former = Box::pin(HeldGateway::start(&world, SETTINGS, &WRITES)).await;

    set_capacity(admin, 2).await;
    let _next = world.gateway_with("gateway-1", SETTINGS);
    tokio::join!(
        Box::pin(is_freed_and_claimed_again(admin)),
        Box::pin(grows_and_is_claimed(admin)),
        Box::pin(ends_and_is_found_again(admin)),
        Box::pin(is_deleted_and_created_again(&world)),
    );
    let before = contents(&world).await;
    former.deliver().await;
    assert_eq!(contents(&world).await, before);
}

/// Creates objects about which each of the writes is due: a node that is lost, a capacity that is higher than the
/// number of slots, an instance that no node sees, and a Pod that was rejected.
async fn create_objects(world: &Installation<'_, ()>) {
    let admin = &world.site.admin;
    for (node, is_ready) in [("kept", true), ("lost", false)] {
        create::<Node>(admin, node, json!({})).await;
        set_status::<Node>(admin, node, ready(is_ready, &INSTANCES)).await;
    }
    for (name, capacity) in [("shared", 2), ("grown", 3)] {
        let discovery = json!({"static": {"devices": [{"id": "box"}]}});
        let spec = json!({"capacity": capacity, "discovery": discovery});
        create::<DeviceConfiguration>(admin, name, spec).await;
    }
    let freed = json!({"nodes": ["kept", "lost"], "deviceUsage": {"freed-0": "lost", "freed-1": ""}});
    instance(admin, "freed", ("shared", 2), freed).await;
    let grown = json!({"nodes": ["kept"], "deviceUsage": {"grown-0": ""}});
    instance(admin, "grown", ("grown", 1), grown).await;
    let ended = json!({"deviceUsage": {"ended-0": "", "ended-1": ""}});
    instance(admin, "ended", ("shared", 2), ended).await;
    create_pod(world).await;
    let rejected = json!({"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no slot"});
    let patch = Patch::Merge(json!({"status": rejected}));
    world.pods().patch_status("rejected", &PatchParams::default(), &patch).await.unwrap();
}

/// The lost node is back once the next leader has freed its slot, and claims the slot again.
async fn is_freed_and_claimed_again(admin: &Client) {
    let is_freed = |found: &DeviceInstance| {
        let status = found.status.clone().unwrap_or_default();
        status.nodes == ["kept"] && status.device_usage.values().all(String::is_empty)
    };
    until::<DeviceInstance>(admin, "freed", "free", is_freed).await;
    set_status::<Node>(admin, "lost", ready(true, &INSTANCES)).await;
    let claimed = json!({"nodes": ["kept", "lost"], "deviceUsage": {"freed-0": "lost"}});
    set_status::<DeviceInstance>(admin, "freed", claimed).await;
}

/// The configuration asks for fewer slots than the former leader wants to add. A node claims the one that the next
/// leader adds.
async fn grows_and_is_claimed(admin: &Client) {
    let has_grown = |found: &DeviceInstance| {
        let slots = found.status.as_ref().map(|status| status.device_usage.len());
        (found.spec.capacity, slots) == (2, Some(2))
    };
    until::<DeviceInstance>(admin, "grown", "two slots", has_grown).await;
    set_status::<DeviceInstance>(admin, "grown", json!({"deviceUsage": {"grown-1": "kept"}})).await;
    let is_counted = |found: &DeviceConfiguration| {
        let status = found.status.clone().unwrap_or_default();
        status.observed_generation == found.metadata.generation
            && (status.devices, status.slots, status.used_slots) == (1, 2, 1)
    };
    until::<DeviceConfiguration>(admin, "grown", "its slots to be counted", is_counted).await;
}

/// An agent finds the device again once the next leader has deleted the instance.
async fn ends_and_is_found_again(admin: &Client) {
    let all: Api<DeviceInstance> = Api::all(admin.clone());
    wait::until(&all, "ended", "its end", Option::is_none).await.unwrap();
    let status = json!({"nodes": ["kept"], "deviceUsage": {"ended-0": "kept", "ended-1": ""}});
    instance(admin, "ended", ("shared", 2), status).await;
}

/// The owner creates another Pod of the name once the next leader has deleted the rejected one.
async fn is_deleted_and_created_again(world: &Installation<'_, ()>) {
    wait::until(&world.pods(), "rejected", "its deletion", Option::is_none).await.unwrap();
    create_pod(world).await;
}

/// Everything that the held writes are about.
async fn contents(world: &Installation<'_, ()>) -> Vec<Value> {
    let admin = &world.site.admin;
    let instances: Api<DeviceInstance> = Api::all(admin.clone());
    let mut contents = Vec::new();
    for name in INSTANCES {
        contents.push(state(&instances, name).await);
    }
    contents.push(state(&Api::<DeviceConfiguration>::all(admin.clone()), "grown").await);
    contents.push(state(&world.pods(), "rejected").await);
    contents
}

pub(super) async fn create<K>(admin: &Client, name: &str, spec: Value)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Serialize + Debug,
{
    let (version, kind) = (K::api_version(&()), K::kind(&()));
    let object = json!({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec});
    let object: K = serde_json::from_value(object).unwrap();
    Api::<K>::all(admin.clone()).create(&PostParams::default(), &object).await.unwrap();
}

/// Changes these fields of an object's status.
pub(super) async fn set_status<K>(admin: &Client, name: &str, status: Value)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let patch = Patch::Merge(json!({"status": status}));
    Api::<K>::all(admin.clone()).patch_status(name, &PatchParams::default(), &patch).await.unwrap();
}

/// Creates an instance of this configuration with this capacity.
pub(super) async fn instance(
    admin: &Client,
    name: &str,
    (configuration, capacity): (&str, u32),
    status: Value,
) {
    let spec =
        json!({"configuration": configuration, "capacity": capacity, "shared": true, "deviceId": name});
    create::<DeviceInstance>(admin, name, spec).await;
    set_status::<DeviceInstance>(admin, name, status).await;
}

/// The status of a node whose kubelet is ready or not, and offers slots of these instances.
pub(super) fn ready(is_ready: bool, instances: &[&str]) -> Value {
    let status = if is_ready { "True" } else { "False" };
    let slots = instances.iter().map(|name| (format!("rouse.dev/{name}"), json!("2")));
    let capacity: serde_json::Map<String, Value> = slots.collect();
    json!({"conditions": [{"type": "Ready", "status": status}], "capacity": capacity})
}

/// Changes the capacity of the configuration of one instance alone.
async fn set_capacity(admin: &Client, capacity: u32) {
    let patch = Patch::Merge(json!({"spec": {"capacity": capacity}}));
    let all: Api<DeviceConfiguration> = Api::all(admin.clone());
    all.patch("grown", &PatchParams::default(), &patch).await.unwrap();
}

/// Creates a Pod that asks for a slot. No scheduler takes it.
async fn create_pod(world: &Installation<'_, ()>) {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "owner", "uid": "owner",
        "controller": true});
    let mut pod = super::pod("rejected", json!({"ownerReferences": [owner]}));
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {"rouse.dev/shared": "1"}});
    let pod: Pod = serde_json::from_value(pod).unwrap();
    world.pods().create(&PostParams::default(), &pod).await.unwrap();
}

/// Waits until the object is there and fits.
pub(super) async fn until<K>(admin: &Client, name: &str, what: &str, fits: impl Fn(&K) -> bool)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Serialize + Debug + Send + 'static,
{
    let fits = |found: &Option<K>| found.as_ref().is_some_and(&fits);
    wait::until(&Api::<K>::all(admin.clone()), name, what, fits).await.unwrap();
}
