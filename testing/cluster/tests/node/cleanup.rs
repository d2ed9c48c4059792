//! A node leaves nothing behind, however its process ends.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use kube::ResourceExt as _;
use rouse_cluster::{KubeletNode, TestCluster, wait::WAIT_TIMEOUT};
use rouse_net::process::table;

use crate::{
    site,
    support::{phase, pod, until},
};

const ABORTS: &str = "ROUSE_CLUSTER_ABORTS";

/// Traces on this machine of a node with a Pod.
struct NodeTraces {
    folder: PathBuf,
    wire: PathBuf,
    processes: Vec<i32>,
}

impl NodeTraces {
    async fn of(cluster: &TestCluster, node: &KubeletNode) -> Self {
        let namespace = cluster.namespace("traces").await.unwrap();
        let made = pod(&namespace, "left", site::engine()).await;
        until(&namespace, &made.name_any(), "to run", |pod| phase(pod) == "Running").await;
        let folder = cluster.logs().parent().unwrap().to_owned();
        let wire = Path::new("/sys/class/net").join(node.name());
        let traces = Self { folder, wire, processes: node.processes(&made).unwrap() };
        assert_eq!(traces.processes.len(), 3);
        assert!(traces.wire.exists() && !traces.cgroups().is_empty());
        traces
    }

    fn cgroups(&self) -> Vec<PathBuf> {
        let name = self.folder.file_name().unwrap();
        let roots = fs::read_dir("/sys/fs/cgroup").unwrap().map(|entry| entry.unwrap().path());
        let groups = roots.chain(["/sys/fs/cgroup".into()]).map(|root| root.join(name));
        groups.filter(|group| group.exists()).collect()
    }

    /// Returns the traces that still exist.
    fn left(&self) -> Vec<String> {
        let name = self.folder.file_name().unwrap().to_str().unwrap();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mounts = mounts.lines().filter(|line| line.contains(name)).map(str::to_owned);
        let alive = self.processes.iter().filter(|pid| table::stat(**pid).is_some());
        let mut left: Vec<_> = alive.map(|pid| format!("process {pid}")).chain(mounts).collect();
        left.extend(self.cgroups().iter().map(|group| group.display().to_string()));
        left.extend(self.wire.exists().then(|| self.wire.display().to_string()));
        left
    }
}

#[tokio::test]
async fn a_node_that_is_dropped_takes_all_with_it_but_the_cluster() {
    let cluster = TestCluster::start().unwrap();
    let node = site::start(&cluster).await.unwrap();
    let traces = NodeTraces::of(&cluster, &node).await;
    drop(node);
    assert_eq!(traces.left(), Vec::<String>::new());
    assert!(cluster.client().await.unwrap().apiserver_version().await.is_ok());
}

/// Started by the test below: a node with a Pod, then an abort without clean-up.
#[tokio::test]
async fn aborts() {
    if std::env::var_os(ABORTS).is_none() {
        return;
    }
    let cluster = TestCluster::start().unwrap();
    let node = site::start(&cluster).await.unwrap();
    let NodeTraces { folder, wire, processes } = NodeTraces::of(&cluster, &node).await;
    println!("\nleaves {} {} {processes:?}", folder.display(), wire.display());
    std::process::abort();
}

#[tokio::test]
async fn when_the_tests_process_dies_its_node_does() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["cleanup::aborts", "--exact", "--nocapture"])
        .env(ABORTS, "yes")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let said = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("leaves ").map(str::to_owned));
    let said = said.expect("no node was left");
    let mut words = said.splitn(3, ' ');
    let (folder, wire) = (words.next().unwrap().into(), words.next().unwrap().into());
    let processes = serde_json::from_str(words.next().unwrap()).unwrap();
    let traces = NodeTraces { folder, wire, processes };
    assert!(!child.wait().unwrap().success());
    // The kernel removes what ends with the namespaces in its own time, without an event.
    let ended = async {
        while !traces.left().is_empty() || traces.folder.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, ended).await.unwrap_or_else(|_| panic!("left: {:#?}", traces.left()));
}
