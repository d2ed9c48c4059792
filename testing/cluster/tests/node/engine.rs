//! An engine with a stub beside it, from its first probe to its last process.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Node as Object, Pod};
use kube::{Api, ResourceExt as _, api::LogParams};
use rouse_cluster::TestCluster;
use rouse_net::process::table;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    http::ask,
    site::{self, ACCELERATORS, ADMIN, ENGINE, RELAY},
    support::{condition, delete, gone, is, is_ready, pod, until},
};

pub(crate) fn address(pod: &Pod) -> IpAddr {
    pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap().parse().unwrap()
}

/// Configures the stub like a controller: the engine's address and its readiness URL.
pub(crate) async fn introduce(ip: IpAddr) {
    let engine = json!({ "address": "127.0.0.1", "port": ENGINE });
    let health = json!({ "url": format!("http://127.0.0.1:{ENGINE}/health") });
    for (method, path, body) in [("PUT", "/v1/proxy/config", engine), ("POST", "/v1/readiness-url", health)] {
        let answer = ask(ip, ADMIN, method, path, &body).await.unwrap();
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    }
}

fn runs(pod: &Pod, container: &str) -> bool {
    let status = pod.status.iter();
    let all =
        status.flat_map(|status| status.init_container_statuses.iter().chain(&status.container_statuses));
    all.flatten()
        .any(|status| status.name == container && status.state.as_ref().is_some_and(|s| s.running.is_some()))
}

#[tokio::test]
async fn an_engine_behind_its_stub_is_probed_asked_and_ended_within_its_grace() {
    let node = site::node().await;
    let namespace = TestCluster::shared().namespace("engine").await.unwrap();
    let made = pod(&namespace, "qwen", site::engine()).await;
    let name = made.name_any();
    let both = |pod: &Pod| runs(pod, "stub") && runs(pod, "engine");
    let running = until(&namespace, &name, "both containers", both).await;
    assert!(!is_ready(&running), "nobody has told the stub of its engine, and it is ready");
    assert_eq!(running.spec.as_ref().unwrap().node_name.as_deref(), Some(node.name()));

    let ip = address(&running);
    introduce(ip).await;
    until(&namespace, &name, "ready", is_ready).await;
    let accelerators = ask(ip, ADMIN, "GET", "/v1/dual-pods/accelerators", &Value::Null).await.unwrap();
    assert_eq!(accelerators.body.trim(), r#"["GPU-a"]"#);
    let chat = json!({ "model": "qwen", "messages": [{ "role": "user", "content": "hello" }] });
    let answer = ask(ip, RELAY, "POST", "/v1/chat/completions", &chat).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let said: Value = serde_json::from_str(&answer.body).unwrap();
    assert!(!said["choices"][0]["message"]["content"].as_str().unwrap().is_empty(), "{said}");
    assert!(
        ask(ip, ENGINE, "GET", "/health", &Value::Null).await.is_err(),
        "the engine is not the stub's alone"
    );

    let listens = format!("listening on 127.0.0.1:{ENGINE}");
    let written = node.log(&running, "engine", 0).unwrap();
    assert!(written.lines().any(|line| line.contains(" stdout F ") && line.ends_with(&listens)), "{written}");
    let log = LogParams { container: Some("engine".to_owned()), ..LogParams::default() };
    let told = namespace.api::<Pod>().logs(&name, &log).await.unwrap();
    assert!(told.lines().any(|line| line == listens), "{told}");

    let processes = node.processes(&running).unwrap();
    assert_eq!(processes.len(), 3, "stub, engine, and what holds the network");
    let lives: Vec<_> = processes.iter().map(|pid| (*pid, table::stat(*pid).unwrap().start)).collect();
    let asked = Instant::now();
    delete(&namespace, &made).await;
    gone(&namespace, &made).await;
    let grace = made.spec.unwrap().termination_grace_period_seconds.unwrap();
    assert!(asked.elapsed().as_secs_f64() < grace as f64, "it took {:?}", asked.elapsed());
    let left = |(pid, start): &&(i32, u64)| {
        table::stat(*pid).is_some_and(|stat| stat.start == *start && !stat.zombie)
    };
    assert_eq!(lives.iter().find(left), None, "a process outlives its Pod");
    assert_eq!(node.processes(&running).unwrap(), Vec::<i32>::new());
}

#[tokio::test]
async fn the_scheduler_counts_the_accelerators_that_the_node_says_it_has() {
    let node = site::node().await;
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("many").await.unwrap();
    let mut spec = site::engine();
    spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = json!(ACCELERATORS + 1);
    pod(&namespace, "greedy", spec).await;
    let refused = until(&namespace, "greedy", "a refusal", |pod| is(pod, "PodScheduled", "False")).await;
    let (_, reason, message) = condition(&refused, "PodScheduled").unwrap();
    assert_eq!(reason, "Unschedulable");
    assert!(message.contains("1 Insufficient nvidia.com/gpu"), "{message}");
    // The kubelet updates its node's status every second and keeps unknown resources as they are.
    let nodes: Api<Object> = Api::all(cluster.client().await.unwrap());
    let status = nodes.get(node.name()).await.unwrap().status.unwrap();
    assert_eq!(status.allocatable.unwrap()["nvidia.com/gpu"].0, ACCELERATORS.to_string());
}
