//! Pods keep running without their control plane, and their changes are reported once it is back.

use kube::ResourceExt as _;
use nix::sys::signal::Signal;
use rouse_cluster::{PodRunner, ServerRole, TestCluster, podrunner::NodeSpec};
use serde_json::json;

use crate::{
    pods::wait_for_log,
    support::{is_ready, phase, pod, script, until},
};

#[tokio::test]
async fn what_happened_while_the_api_server_was_away_is_told_when_it_is_back() {
    let cluster = TestCluster::start().unwrap();
    let namespace = cluster.namespace("away").await.unwrap();
    let runner = PodRunner::builder(&namespace).node(NodeSpec::new("a").gpus(1)).start().await.unwrap();
    let mut spec = script("trap 'echo asked; exit 0' TERM; echo up; while :; do sleep 0.05; done", json!({}));
    spec["restartPolicy"] = json!("Never");
    let made = pod(&namespace, "lives", spec).await;
    let made = until(&namespace, &made.name_any(), "ready", is_ready).await;
    wait_for_log(&runner, &made, "up").await;

    cluster.freeze_server(ServerRole::ApiServer).await;
    runner.signal(&made, Signal::SIGTERM);
    wait_for_log(&runner, &made, "asked").await;
    cluster.thaw_server(ServerRole::ApiServer).await;
    let ended = until(&namespace, "lives", "its end", |pod| phase(pod) == "Succeeded").await;
    assert_eq!(ended.uid(), made.uid());

    cluster.kill_server(ServerRole::ApiServer).await;
    cluster.start_server(ServerRole::ApiServer).await.unwrap();
    pod(&namespace, "next", script("sleep 1000", json!({}))).await;
    until(&namespace, "next", "ready", is_ready).await;
}
