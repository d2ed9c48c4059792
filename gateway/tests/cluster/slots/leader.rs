//! What the gateway that leads does about slots: lost nodes and agents, the capacity, rejected Pods, deleted
//! configurations.
//!
//! It has a cluster of its own: a leader acts on all instances of its cluster.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use rouse::slots::RESOURCE_DOMAIN;
use rouse_cluster::wait;
use rouse_controllers::crd::{DeviceConfiguration, DeviceInstanceStatus};
use serde_json::json;

use super::{fixture::SlotsFixture, rejections};
use crate::support::own_cluster;

/// The time of a node that is not ready, or has no agent, is short here.
const SETTINGS: &str = ", slots: {nodeTimeout: 2s}";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_frees_slots_of_lost_nodes_follows_the_capacity_and_deletes_rejected_pods() {
    let cluster = own_cluster().await;
    let nodes =
        ["changed", "gone", "left", "running", "idle", "seen", "ended", "occupied", "vacant", "served"];
    let fixture = SlotsFixture::new_in(&cluster, "slots-leader", &nodes).await;
    let gateway = fixture.world.gateway_with("gateway-0", SETTINGS);
    tokio::join!(
        Box::pin(follows_the_capacity(&fixture)),
        Box::pin(frees_the_slots_of_a_deleted_node(&fixture)),
        Box::pin(frees_the_slots_of_an_unready_node_once_it_has_no_pod(&fixture)),
        Box::pin(frees_the_slots_of_a_ready_node_without_an_agent_once_no_pod_may_have_one(&fixture)),
        Box::pin(deletes_the_instance_of_a_deleted_configuration_once_no_slot_is_in_use(&fixture)),
        Box::pin(rejections::are_deleted_with_pauses(&fixture.world, &gateway)),
    );
}

/// A higher capacity adds slots. A lower one removes the free ones at once, and a used one once it is free.
async fn follows_the_capacity(fixture: &SlotsFixture<'_>) {
    let [node] = fixture.reporting_nodes(["changed"]).await;
    let device = fixture.share("changed", 2, json!({})).await;
    node.until_health(&device, [true, true]).await;
    node.kubelet.allocate_ids("worker", &device.resource(), &device.slots([1])).await.unwrap();
    let name = fixture.configuration_name("changed");
    let counted = |configuration: &Option<DeviceConfiguration>| {
        let status = configuration.as_ref().and_then(|configuration| configuration.status.as_ref());
        status.is_some_and(|status| (status.devices, status.slots, status.used_slots) == (1, 2, 1))
    };
    wait::until(&fixture.configurations(), &name, "its slots to be counted", counted).await.unwrap();

    fixture.share("changed", 4, json!({})).await;
    node.until_health(&device, [true; 4]).await;
    device.until_usage(["", &node.name, "", ""]).await;
    fixture.share("changed", 1, json!({})).await;
    // The container keeps its slot, which no new container gets.
    node.until_health(&device, [true, false]).await;
    assert_eq!(device.usage().await, device.map(["", &node.name]), "a slot in use was removed");
    node.kubelet.release("worker");
    device.set(&device.slot(1), &node.name, "").await;
    node.until_health(&device, [true]).await;
    device.until_usage([""]).await;
}

async fn frees_the_slots_of_a_deleted_node(fixture: &SlotsFixture<'_>) {
    let [mut gone, left] = fixture.reporting_nodes(["gone", "left"]).await;
    let device = fixture.share("gone", 1, json!({})).await;
    gone.until_health(&device, [true]).await;
    left.until_health(&device, [true]).await;
    gone.kubelet.allocate("worker", &device.resource(), 1).await.unwrap();
    left.until_health(&device, [false]).await;
    gone.kill(&device).await;
    fixture.node_api().delete(&gone.name, &DeleteParams::default()).await.unwrap();
    left.until_health(&device, [true]).await;
    let status = device.object().await.status.unwrap();
    assert!(!status.nodes.contains(&gone.name) && status.nodes.contains(&left.name), "{:?}", status.nodes);
    assert_eq!(status.device_usage, device.map([""]));
    left.kubelet.allocate("worker", &device.resource(), 1).await.unwrap();
    assert_eq!(device.usage().await, device.map([&left.name]));
}

/// Of two nodes that are not ready, one may still run a Pod with its slot.
async fn frees_the_slots_of_an_unready_node_once_it_has_no_pod(fixture: &SlotsFixture<'_>) {
    let [mut running, mut idle, seen] = fixture.reporting_nodes(["running", "idle", "seen"]).await;
    let device = fixture.share("unready", 2, json!({})).await;
    for node in [&running, &idle, &seen] {
        node.until_health(&device, [true, true]).await;
    }
    let resource = device.resource();
    running.kubelet.allocate_ids("worker", &resource, &device.slots([0])).await.unwrap();
    idle.kubelet.allocate_ids("worker", &resource, &device.slots([1])).await.unwrap();
    seen.until_health(&device, [false, false]).await;
    tokio::join!(running.kill(&device), idle.kill(&device));
    for name in ["running", "idle"] {
        // Its kubelet would report it ready again.
        fixture.world.runner.partition(name);
    }
    let pods = fixture.world.pods();
    pods.create(&PostParams::default(), &worker("worker", &running.name, &resource)).await.unwrap();
    for node in [&running, &idle] {
        mark_unready(fixture, &node.name).await;
    }

    device.until_usage([&running.name, ""]).await;
    seen.until_health(&device, [false, true]).await;
    let is_listed = |status: &DeviceInstanceStatus, name: &String| status.nodes.contains(name);
    let status = device.object().await.status.unwrap();
    assert!(is_listed(&status, &running.name) && !is_listed(&status, &idle.name), "{status:?}");
    pods.delete("worker", &at_once()).await.unwrap();
    device.until_usage(["", ""]).await;
    seen.until_health(&device, [true, true]).await;
}

/// Of two nodes whose agents are gone for good, one may still run a Pod with its slot.
async fn frees_the_slots_of_a_ready_node_without_an_agent_once_no_pod_may_have_one(
    fixture: &SlotsFixture<'_>,
) {
    let [mut occupied, mut vacant, served] = fixture.reporting_nodes(["occupied", "vacant", "served"]).await;
    let device = fixture.share("agentless", 3, json!({})).await;
    for node in [&occupied, &vacant, &served] {
        node.until_health(&device, [true; 3]).await;
    }
    let resource = device.resource();
    for (number, node) in [&occupied, &vacant, &served].into_iter().enumerate() {
        node.kubelet.allocate_ids("worker", &resource, &device.slots([number])).await.unwrap();
    }
    // Its kubelet would reject the Pod, as no plugin gives it a slot once more.
    fixture.world.runner.delay_reports("occupied");
    let pods = fixture.world.pods();
    pods.create(&PostParams::default(), &worker("occupant", &occupied.name, &resource)).await.unwrap();
    tokio::join!(occupied.kill(&device), vacant.kill(&device));
    for node in [&occupied, &vacant] {
        stop_offering(fixture, &node.name, &resource).await;
    }

    device.until_usage([&occupied.name, "", &served.name]).await;
    served.until_health(&device, [false, true, true]).await;
    let nodes = device.object().await.status.unwrap().nodes;
    assert!(nodes.contains(&occupied.name) && !nodes.contains(&vacant.name), "{nodes:?}");
    pods.delete("occupant", &at_once()).await.unwrap();
    device.until_usage(["", "", &served.name]).await;
    served.until_health(&device, [true; 3]).await;
}

/// Half a minute after the configuration's end at the earliest: its watch could be late.
async fn deletes_the_instance_of_a_deleted_configuration_once_no_slot_is_in_use(fixture: &SlotsFixture<'_>) {
    let [node] = fixture.reporting_nodes(["ended"]).await;
    let device = fixture.share("ended", 1, json!({})).await;
    node.until_health(&device, [true]).await;
    node.kubelet.allocate("worker", &device.resource(), 1).await.unwrap();
    let name = fixture.configuration_name("ended");
    fixture.configurations().delete(&name, &DeleteParams::default()).await.unwrap();
    node.until_all(&device, false).await;
    assert_eq!(device.usage().await, device.map([&node.name]), "a container lost its slot");
    node.kubelet.release("worker");
    device.set(&device.slot(0), &node.name, "").await;
    device.until_gone().await;
}

fn at_once() -> DeleteParams {
    DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() }
}

fn worker(name: &str, node: &str, resource: &str) -> Pod {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "nodeName": node,
        "containers": [{
            "name": "main",
            "image": "registry.example.com/worker:1",
            "resources": {"limits": {resource: "1"}},
        }],
    }});
    serde_json::from_value(pod).unwrap()
}

async fn mark_unready(fixture: &SlotsFixture<'_>, node: &str) {
    let condition = json!({"type": "Ready", "status": "False", "reason": "Played", "message": ""});
    let patch = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
    fixture.node_api().patch_status(node, &PatchParams::default(), &patch).await.unwrap();
}

/// Plays what a kubelet does five minutes after the end of a plugin. Before that it reports that no device is healthy.
///
/// The agent has died, and its plugins end one by one. The node reports all of them with each end, so its last report is
/// awaited: a later one would offer the slots again.
async fn stop_offering(fixture: &SlotsFixture<'_>, node: &str, resource: &str) {
    let nodes = fixture.node_api();
    let all_unhealthy = |found: &Option<Node>| {
        let status = found.as_ref().and_then(|node| node.status.as_ref());
        let Some(allocatable) = status.and_then(|status| status.allocatable.as_ref()) else { return false };
        let mut slots = allocatable.iter().filter(|(name, _)| name.starts_with(RESOURCE_DOMAIN));
        allocatable.contains_key(resource) && slots.all(|(_, amount)| amount.0 == "0")
    };
    wait::until(&nodes, node, "no healthy slot", all_unhealthy).await.unwrap();
    let patch = Patch::Strategic(json!({"status": {"capacity": {resource: "0"}}}));
    nodes.patch_status(node, &PatchParams::default(), &patch).await.unwrap();
}
