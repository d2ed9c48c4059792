//! The machine that a node is: namespaces of mounts, processes, network, host name and IPC, a wire to this machine, a cgroup.
//!
//! What is in it sees an ordinary machine (`/var/lib/kubelet`, `/run/containerd`, its own pid 1), and ends with it: nothing
//! there can outlive its first process, no mount is ever made on this machine, and the wire goes with its other end.

use std::{fs, path::Path, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail};
use rouse_net::process::ProcessGroup;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{ChildStdin, ChildStdout, Command},
    time,
};

use super::cgroup::PodsCgroup;
use crate::resources::{CLUSTER_MARK_ENV, ClusterResources, PART_MARK_ENV};

/// It mounts and sets up an address, and is then done.
const SET_UP_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) struct NodeMachine {
    process: ProcessGroup,
    /// Its end is the machine's.
    stdin: ChildStdin,
    pid: i32,
    veth: String,
    cgroup: PodsCgroup,
}

impl NodeMachine {
    /// Makes one that keeps its things in this folder, and what its Pods say in the other.
    pub(super) async fn start(
        ground: &ClusterResources,
        folder: &Path,
        log: &Path,
        name: &str,
    ) -> Result<Self> {
        for folder in [&folder.join("lib"), &folder.join("settings"), log] {
            fs::create_dir_all(folder)?;
        }
        let (host, own) = (ground.uplink_address(), ground.node_address());
        let part = ground.part_mark("node");
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "--pid", "--fork", "--net", "--uts", "--ipc"])
            .args(["bash", "-c", include_str!("machine.sh"), "node"])
            .args([folder, log])
            .args([name, &own.to_string(), &host.to_string()])
            .env(CLUSTER_MARK_ENV, ground.mark())
            .env(PART_MARK_ENV, &part)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(ground.logs().join("node.log"))?)
            .process_group(0)
            .spawn()
            .context("unshare")?;
        let (stdin, stdout) = child.stdin.take().zip(child.stdout.take()).context("a node without pipes")?;
        let process = ProcessGroup::from_child(child, format!("{PART_MARK_ENV}={part}"))?;
        let mut made =
            Self { process, stdin, pid: 0, veth: ground.veth_name(), cgroup: PodsCgroup::of_cluster(ground) };
        let lines = BufReader::new(stdout).lines();
        let error = match time::timeout(SET_UP_TIMEOUT, made.set_up(lines, ground)).await {
            Ok(Ok(())) => return Ok(made),
            Ok(Err(error)) => error,
            Err(_) => anyhow!("it takes too long"),
        };
        made.end().await;
        let log = fs::read_to_string(ground.logs().join("node.log"))?;
        Err(error.context(format!("no node can be made here: {}", log.trim())))
    }

    async fn set_up(
        &mut self,
        mut says: Lines<BufReader<ChildStdout>>,
        ground: &ClusterResources,
    ) -> Result<()> {
        let mut said = async || says.next_line().await?.context("its first process ended");
        self.pid = said().await?.parse().context("its first process's pid")?;
        let pid = self.pid.to_string();
        let wire = self.veth.as_str();
        ip(&["link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", &pid]).await?;
        ip(&["address", "add", &format!("{}/24", ground.uplink_address()), "dev", wire]).await?;
        ip(&["link", "set", wire, "up"]).await?;
        let (pods, node) = (format!("{}/24", ground.pod_subnet()), ground.node_address().to_string());
        ip(&["route", "add", &pods, "via", &node, "dev", wire]).await?;
        self.stdin.write_all(b"\n").await?;
        let ready = said().await?;
        if ready != "ready" {
            bail!("it says {ready:?}");
        }
        self.cgroup.make().context("no cgroup for Pods")
    }

    /// A command line that runs this one in it.
    pub(super) fn enter_command(&self, command: impl IntoIterator<Item = impl Into<String>>) -> Vec<String> {
        let target = format!("--target={}", self.pid);
        let enter = ["--mount", "--pid", "--net", "--uts", "--ipc", "--"].map(str::to_owned);
        [target].into_iter().chain(enter).chain(command.into_iter().map(Into::into)).collect()
    }

    /// Ends all that is in it, and takes away what it had of this machine.
    pub(super) async fn end(self) {
        self.process.kill_and_reap().await;
        // The other end has gone with the node's network, and the kernel takes this one away in its own time: an error says
        // that it has, or that there never was one.
        ip(&["link", "delete", &self.veth]).await.ok();
        if let Err(error) = self.cgroup.remove() {
            eprintln!("a node's cgroup stays: {error:#}");
        }
    }
}

async fn ip(words: &[&str]) -> Result<()> {
    let done = Command::new("ip").args(words).output().await.context("ip")?;
    if !done.status.success() {
        bail!("ip {}: {}", words.join(" "), String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
}
