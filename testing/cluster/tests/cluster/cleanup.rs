//! A cluster leaves nothing behind, however its process ends.

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
    time::Duration,
};

use rouse_cluster::{PodRunner, TestCluster, podrunner::NodeSpec, wait::WAIT_TIMEOUT};
use rouse_net::process::table;
use serde_json::json;

use crate::support::{is_ready, pod, script, until};

const ABORTS: &str = "ROUSE_CLUSTER_ABORTS";

/// Started by the test below: a cluster with a Pod, then an abort without clean-up.
#[tokio::test]
async fn aborts() {
    if std::env::var_os(ABORTS).is_none() {
        return;
    }
    let cluster = TestCluster::start().unwrap();
    let namespace = cluster.namespace("aborts").await.unwrap();
    let _runner = PodRunner::builder(&namespace).node(NodeSpec::new("a")).start().await.unwrap();
    let text = "trap '' TERM; setsid sleep 1000 & while :; do sleep 1; done";
    pod(&namespace, "left", script(text, json!({}))).await;
    until(&namespace, "left", "ready", is_ready).await;
    println!("\nlogs in {}", cluster.logs().display());
    std::process::abort();
}

#[tokio::test]
async fn when_the_tests_process_dies_its_servers_and_pods_do() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["cleanup::aborts", "--exact", "--nocapture"])
        .env(ABORTS, "yes")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let logs = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("logs in ").map(str::to_owned));
    let folder = std::path::PathBuf::from(logs.unwrap()).parent().unwrap().to_owned();
    let marked = || {
        let folder = folder.display().to_string();
        let of_it =
            |pid: &i32| table::env_value(*pid, "TEST_CLUSTER").is_some_and(|mark| mark.ends_with(&folder));
        table::pids().filter(of_it).count()
    };
    assert!(!child.wait().unwrap().success());
    let ended = async {
        while marked() > 0 || folder.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, ended)
        .await
        .unwrap_or_else(|_| panic!("{} processes are left", marked()));
}
