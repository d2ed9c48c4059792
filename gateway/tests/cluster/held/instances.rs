//! The creation of a DeviceInstance, which a node agent sent and which arrives late.
//!
//! The agent follows no leader, so its write has no epoch. The name of the object is its fence: a creation changes
//! nothing where the object exists. One that comes after everything that asked for it is undone by the leader.

use std::fs;

use http::StatusCode;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, api::DeleteParams};
use rouse::slots::instance_name;
use rouse_cluster::{ServerRole, wait};
use rouse_controllers::crd::{DeviceConfiguration, DeviceInstance};
use serde_json::json;

use super::{
    gateway::{HeldWrites, world},
    slots::{create, instance, ready, set_status, until},
    state,
};
use crate::{rendered::ChartPart, slots::agent_process::AgentProcess, support::own_cluster};

/// An instance that no node sees is deleted soon.
const SETTINGS: &str = ", slots: {nodeTimeout: 1s}";
/// The instances of the device of the configurations `taken` and `late`.
const TAKEN: &str = "taken-191349a9dc";
const LATE: &str = "late-191349a9dc";
const DEVICE: &str = "box";
const WRITES: [&str; 2] = ["POST /deviceinstances/taken-191349a9dc", "POST /deviceinstances/late-191349a9dc"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_held_creation_of_an_instance_changes_the_claims_there_and_the_leader_deletes_one_that_is_late() {
    for (configuration, name) in [("taken", TAKEN), ("late", LATE)] {
        assert_eq!(instance_name(&configuration.into(), DEVICE, None).as_str(), name);
    }
    let cluster = own_cluster().await;
    let world = Box::pin(world(&cluster, "held-instances")).await;
    world.site.turn_on(ChartPart::Slots).await;
    let account = world.site.agent_account().await;
    // Its controllers write nodes, too.
    cluster.stop_server(ServerRole::ControllerManager).await;
    let admin = &world.site.admin;
    for (node, offered) in [("other", vec![TAKEN]), ("agents", Vec::new())] {
        create::<Node>(admin, node, json!({})).await;
        set_status::<Node>(admin, node, ready(true, &offered)).await;
    }
    for name in ["taken", "late"] {
        let discovery = json!({"static": {"devices": [{"id": DEVICE}]}});
        create::<DeviceConfiguration>(admin, name, json!({"capacity": 2, "discovery": discovery})).await;
    }

    let held = HeldWrites::start(&world, &account, &WRITES).await;
    let folder = world.dir.path().join("kubelet");
    fs::create_dir_all(folder.join("device-plugins")).unwrap();
    let mut agent = AgentProcess::new(
        env!("CARGO_BIN_EXE_rouse-gateway").into(),
        "agents",
        [&folder, &folder.join("no-runtime.sock")],
        held.kubeconfig(),
        cluster.mark(),
        world.dir.path().join("agent.log"),
    );
    agent.start(&[], &[]);
    held.until_all_arrived().await;
    agent.kill().await;

    // Another agent has created the one meanwhile, and a container of its node has a slot. The other is not needed.
    let usage = json!({format!("{TAKEN}-0"): "other", format!("{TAKEN}-1"): ""});
    instance(admin, TAKEN, ("taken", 2), json!({"nodes": ["other"], "deviceUsage": usage})).await;
    let configurations: Api<DeviceConfiguration> = Api::all(admin.clone());
    configurations.delete("late", &DeleteParams::default()).await.unwrap();
    let _leader = world.gateway_with("gateway-0", SETTINGS);
    let is_counted = |found: &DeviceConfiguration| {
        found.status.as_ref().is_some_and(|status| (status.devices, status.used_slots) == (1, 1))
    };
    until::<DeviceConfiguration>(admin, "taken", "the claim to be counted", is_counted).await;
    let instances: Api<DeviceInstance> = Api::all(admin.clone());
    let before = state(&instances, TAKEN).await;

    let answers = held.deliver().await;
    let of = |name: &str| {
        let of_it = answers.iter().filter(|(write, _)| write.ends_with(name));
        of_it.map(|(_, answer)| *answer).collect::<Vec<StatusCode>>()
    };
    assert!(of(TAKEN).iter().all(|answer| *answer == StatusCode::CONFLICT), "{answers:?}");
    assert!(of(LATE).contains(&StatusCode::CREATED), "{answers:?}");
    wait::until(&instances, LATE, "its end", Option::is_none).await.unwrap();
    assert_eq!(state(&instances, TAKEN).await, before);
}
