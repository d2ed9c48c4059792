//! What happens after a container ends.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use rouse_cluster::TestCluster;

use crate::{
    engine::{address, introduce},
    site,
    support::{is_ready, pod, restarts, until},
};

fn pid_of(processes: &[i32], program: &str) -> i32 {
    let is = |pid: &&i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).next() == Some(program.as_bytes())
    };
    *processes.iter().find(is).unwrap_or_else(|| panic!("no {program} among {processes:?}"))
}

#[tokio::test]
async fn a_killed_engine_is_started_again_beside_a_stub_that_lives_on() {
    let node = site::node().await;
    let namespace = TestCluster::shared().namespace("killed").await.unwrap();
    let made = pod(&namespace, "qwen", site::engine()).await;
    let name = made.name_any();
    let running = until(&namespace, &name, "its address", |pod| {
        pod.status
            .as_ref()
            .is_some_and(|status| status.pod_ip.is_some() && status.phase.as_deref() == Some("Running"))
    })
    .await;
    introduce(address(&running)).await;
    until(&namespace, &name, "ready", is_ready).await;
    let before = node.processes(&made).unwrap();
    let stub = pid_of(&before, "/rouse-stub");

    signal::kill(Pid::from_raw(pid_of(&before, "/engine-sim")), Signal::SIGKILL).unwrap();
    let again = |pod: &Pod| restarts(pod, "engine") == 1 && is_ready(pod);
    let after = until(&namespace, &name, "another engine, and ready", again).await;
    let status = after.status.as_ref().unwrap().container_statuses.as_ref().unwrap().first().unwrap();
    let last = status.last_state.as_ref().unwrap().terminated.as_ref().unwrap();
    assert_eq!((last.exit_code, last.reason.as_deref()), (137, Some("Error")));
    assert_eq!(address(&after), address(&running));
    let now = node.processes(&made).unwrap();
    assert_eq!(pid_of(&now, "/rouse-stub"), stub);
    assert!(!before.contains(&pid_of(&now, "/engine-sim")));
    for life in [0, 1] {
        assert!(node.log(&made, "engine", life).unwrap().contains("listening on"), "of life {life}");
    }
}
