//! Devices: which Pod is scheduled where, which Pod holds them, and when they are free again.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use nix::sys::signal::Signal;
use rouse_cluster::{Namespace, PodRunner, TestCluster, podrunner::NodeSpec};
use serde_json::{Value, json};

use crate::{
    pods::wait_for_log,
    support::{condition, delete, gone, is, is_ready, merge, phase, pod, script, until},
};

/// A Pod that holds this many devices, prints their ids, and exits with 0 on SIGTERM.
fn holder(gpus: u32, more: Value) -> Value {
    let text = "trap 'exit 0' TERM; echo $NVIDIA_VISIBLE_DEVICES; while :; do sleep 0.05; done";
    let limits = json!({ "limits": { "nvidia.com/gpu": gpus.to_string() } });
    let mut spec = script(text, json!({ "resources": limits }));
    spec["restartPolicy"] = json!("Never");
    merge(&mut spec, more);
    spec
}

async fn refused(namespace: &Namespace, name: &str) -> String {
    let refused = until(namespace, name, "a refusal", |pod| is(pod, "PodScheduled", "False")).await;
    let (_, reason, message) = condition(&refused, "PodScheduled").unwrap();
    assert_eq!((reason.as_str(), phase(&refused)), ("Unschedulable", "Pending"));
    message
}

fn holders(runner: &PodRunner, node: &str) -> Vec<Option<String>> {
    runner.node(node).devices().into_iter().map(|(_, holder)| holder).collect()
}

#[tokio::test]
async fn a_pod_waits_until_another_is_terminal_and_gets_its_device() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("devices").await.unwrap();
    let runner = PodRunner::builder(&namespace)
        .node(NodeSpec::new("small").gpus(1).label("pool", "x"))
        .node(NodeSpec::new("other").gpus(8).label("pool", "y"))
        .start()
        .await
        .unwrap();
    let in_x = json!({ "nodeSelector": { "pool": "x" } });
    let first = pod(&namespace, "first", holder(1, in_x.clone())).await;
    let first = until(&namespace, &first.name_any(), "ready", is_ready).await;
    assert_eq!(first.spec.as_ref().unwrap().node_name.as_deref(), Some(runner.node("small").name()));

    let second = pod(&namespace, "second", holder(1, in_x)).await;
    let message = refused(&namespace, "second").await;
    assert_eq!(
        message,
        "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, \
         1 node(s) didn't match Pod's node affinity/selector."
    );
    // The Pod's object remains, so it is its phase that frees the device. Its shell has set the trap before it prints.
    wait_for_log(&runner, &first, "GPU-").await;
    runner.signal(&first, Signal::SIGTERM);
    until(&namespace, "first", "its end", |pod| phase(pod) == "Succeeded").await;
    let second = until(&namespace, &second.name_any(), "ready", is_ready).await;
    wait_for_log(&runner, &second, "GPU-").await;
    let said = |pod: &Pod| runner.log(pod, "main", 0).unwrap().lines().next().map(str::to_owned);
    assert_eq!(said(&first), said(&second));
    assert_eq!(holders(&runner, "small"), [second.uid()]);
}

#[tokio::test]
async fn two_pods_on_one_node_hold_different_devices() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("sharing").await.unwrap();
    let runner = PodRunner::builder(&namespace).node(NodeSpec::new("a").gpus(4)).start().await.unwrap();
    let mut seen = Vec::new();
    for (name, count) in [("one", 1), ("three", 3)] {
        pod(&namespace, name, holder(count, json!({}))).await;
        let made = until(&namespace, name, "ready", is_ready).await;
        wait_for_log(&runner, &made, "GPU-").await;
        let said = runner.log(&made, "main", 0).unwrap();
        let devices: Vec<_> = said.trim().split(',').map(str::to_owned).collect();
        assert_eq!(devices.len(), count as usize);
        seen.extend(devices);
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 4, "{seen:?}");
    let message = {
        pod(&namespace, "more", holder(1, json!({}))).await;
        refused(&namespace, "more").await
    };
    assert!(message.contains("Insufficient nvidia.com/gpu"), "{message}");
}

#[tokio::test]
async fn containers_of_a_pod_have_the_devices_they_asked_for_and_no_others() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("shares").await.unwrap();
    let runner = PodRunner::builder(&namespace).node(NodeSpec::new("a").gpus(3)).start().await.unwrap();
    let mut spec = holder(1, json!({}));
    let mut containers = Vec::new();
    for (name, count) in [("one", 1), ("none", 0), ("two", 2)] {
        let mut container = spec["containers"][0].clone();
        container["name"] = json!(name);
        container["command"] = json!(["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"]);
        container["resources"] = json!({ "limits": { "nvidia.com/gpu": count.to_string() } });
        containers.push(container);
    }
    spec["containers"] = json!(containers);
    let made = pod(&namespace, "shares", spec).await;
    until(&namespace, "shares", "its end", |pod| phase(pod) == "Succeeded").await;
    let log_of = |name: &str| runner.log(&made, name, 0).unwrap().trim().to_owned();
    let all: Vec<_> = runner.node("a").devices().into_iter().map(|(id, _)| id).collect();
    assert_eq!(log_of("one"), all[0]);
    assert_eq!(log_of("none"), "");
    assert_eq!(log_of("two"), all[1..].join(","));
}

/// The race of dual pods: the object is deleted, the next Pod has the device, and the first Pod's process still runs.
#[tokio::test]
async fn a_forced_deletion_frees_the_device_before_the_process_has_ended() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("forced").await.unwrap();
    let runner = PodRunner::builder(&namespace).node(NodeSpec::new("a").gpus(1)).start().await.unwrap();
    // The Pod ignores SIGTERM. SIGKILL follows a second later, and the process keeps its device until then.
    let mut stubborn = holder(1, json!({}));
    stubborn["containers"][0]["command"][2] =
        json!("trap 'echo asked' TERM; echo GPU-$NVIDIA_VISIBLE_DEVICES; while :; do sleep 0.05; done");
    let first = pod(&namespace, "first", stubborn).await;
    let first = until(&namespace, &first.name_any(), "ready", is_ready).await;
    wait_for_log(&runner, &first, "GPU-").await;
    runner.force_delete(&first).await.unwrap();
    gone(&namespace, &first).await;
    wait_for_log(&runner, &first, "asked").await;
    let second = pod(&namespace, "second", holder(1, json!({}))).await;
    let second =
        until(&namespace, &second.name_any(), "its node", |pod| is(pod, "PodScheduled", "True")).await;
    until(&namespace, "second", "ready", is_ready).await;
    assert_eq!(holders(&runner, "a"), [second.uid()]);
    let ended = async {
        while !runner.processes(&first).is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(rouse_cluster::wait::WAIT_TIMEOUT, ended).await.expect("it was never killed");
}

#[tokio::test]
async fn a_node_that_is_cut_off_hears_nothing_and_its_processes_go_on() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("cut").await.unwrap();
    let runner = PodRunner::builder(&namespace).node(NodeSpec::new("a").gpus(1)).start().await.unwrap();
    let first = pod(&namespace, "first", holder(1, json!({}))).await;
    let first = until(&namespace, &first.name_any(), "ready", is_ready).await;
    runner.partition("a");
    delete(&namespace, &first).await;
    let deleted = |pod: &Pod| pod.metadata.deletion_timestamp.is_some();
    until(&namespace, "first", "a deletion", deleted).await;
    // Another Pod is scheduled once this Pod's status allows it, and a partitioned node reports no status.
    pod(&namespace, "second", holder(1, json!({}))).await;
    refused(&namespace, "second").await;
    assert!(!runner.processes(&first).is_empty());
    assert_eq!(holders(&runner, "a"), [first.uid()]);
    runner.heal("a");
    gone(&namespace, &first).await;
    assert_eq!(runner.processes(&first), []);
    until(&namespace, "second", "ready", is_ready).await;
}
