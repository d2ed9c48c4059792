//! A node's machine: mount, process, network, host name and IPC namespaces, a wire to this machine, a cgroup.
//!
//! Processes inside see an ordinary machine (`/var/lib/kubelet`, `/run/containerd`, their own pid 1) and end with it.
//! Nothing inside can outlive its first process, no mount appears on this machine, and the wire disappears with its
//! other end.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use rouse_net::process::ProcessGroup;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{ChildStdin, ChildStdout, Command},
    time,
};

use super::cgroup::PodsCgroup;
use crate::resources::{CLUSTER_MARK_ENV, ClusterResources, PART_MARK_ENV};

/// The setup mounts file systems and configures an address.
const SET_UP_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) struct NodeMachine {
    process: ProcessGroup,
    /// Its close ends the machine.
    stdin: ChildStdin,
    entrance: NodeEntrance,
    veth: String,
    cgroup: PodsCgroup,
}

/// The way into a machine, while it runs.
#[derive(Clone, Copy)]
pub(super) struct NodeEntrance {
    /// Its first process, by the pid on this machine.
    pid: i32,
}

impl NodeEntrance {
    /// Wraps a command line so that it runs inside the machine.
    pub(super) fn enter_command(self, command: impl IntoIterator<Item = impl Into<String>>) -> Vec<String> {
        let target = format!("--target={}", self.pid);
        let enter = ["--mount", "--pid", "--net", "--uts", "--ipc", "--"].map(str::to_owned);
        [target].into_iter().chain(enter).chain(command.into_iter().map(Into::into)).collect()
    }

    /// Runs a bash script inside the machine, as root. The first command that fails ends it.
    pub(super) async fn run(self, script: &str) -> Result<()> {
        let command = self.enter_command(["bash", "-euo", "pipefail", "-c", script]);
        let done = Command::new("nsenter").args(command).output().await.context("nsenter")?;
        if !done.status.success() {
            let output = String::from_utf8_lossy(&done.stdout);
            bail!("{}: {output}{}", done.status, String::from_utf8_lossy(&done.stderr));
        }
        Ok(())
    }

    /// The path on this machine of a path inside, which begins with a slash. It is short enough for a socket's.
    pub(super) fn path(self, inside: &str) -> PathBuf {
        format!("/proc/{}/root{inside}", self.pid).into()
    }
}

impl NodeMachine {
    /// Starts a machine with its files in `folder` and its Pods' output in `log`.
    pub(super) async fn start(
        resources: &ClusterResources,
        folder: &Path,
        log: &Path,
        name: &str,
    ) -> Result<Self> {
        for folder in [&folder.join("lib"), &folder.join("settings"), log] {
            fs::create_dir_all(folder)?;
        }
        let (host_ip, node_ip) = (resources.uplink_address(), resources.node_address());
        let part = resources.part_mark("node");
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "--pid", "--fork", "--net", "--uts", "--ipc"])
            .args(["bash", "-c", include_str!("machine.sh"), "node"])
            .args([folder, log])
            .args([name, &node_ip.to_string(), &host_ip.to_string()])
            .env(CLUSTER_MARK_ENV, resources.mark())
            .env(PART_MARK_ENV, &part)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(resources.logs().join("node.log"))?)
            .process_group(0)
            .spawn()
            .context("unshare")?;
        let (stdin, stdout) =
            child.stdin.take().zip(child.stdout.take()).context("the node's process has no pipes")?;
        let process = ProcessGroup::from_child(child, format!("{PART_MARK_ENV}={part}"))?;
        let mut machine = Self {
            process,
            stdin,
            entrance: NodeEntrance { pid: 0 },
            veth: resources.veth_name(),
            cgroup: PodsCgroup::of_cluster(resources),
        };
        let lines = BufReader::new(stdout).lines();
        let error = match time::timeout(SET_UP_TIMEOUT, machine.set_up(lines, resources)).await {
            Ok(Ok(())) => return Ok(machine),
            Ok(Err(error)) => error,
            Err(_) => anyhow!("the setup timed out"),
        };
        machine.end().await;
        let log = fs::read_to_string(resources.logs().join("node.log"))?;
        Err(error.context(format!("cannot create a node here: {}", log.trim())))
    }

    async fn set_up(
        &mut self,
        mut says: Lines<BufReader<ChildStdout>>,
        resources: &ClusterResources,
    ) -> Result<()> {
        let mut next_line = async || says.next_line().await?.context("the node's first process ended");
        let pid = next_line().await?;
        self.entrance.pid = pid.parse().context("cannot parse the pid of the node's first process")?;
        let wire = self.veth.as_str();
        ip(&["link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", &pid]).await?;
        ip(&["address", "add", &format!("{}/24", resources.uplink_address()), "dev", wire]).await?;
        ip(&["link", "set", wire, "up"]).await?;
        let (pods, node) = (format!("{}/24", resources.pod_subnet()), resources.node_address().to_string());
        ip(&["route", "add", &pods, "via", &node, "dev", wire]).await?;
        self.stdin.write_all(b"\n").await?;
        let ready = next_line().await?;
        if ready != "ready" {
            bail!("the node's first process printed {ready:?}, not \"ready\"");
        }
        self.cgroup.make().context("cannot create the cgroup for Pods")
    }

    /// The way in.
    pub(super) const fn entrance(&self) -> NodeEntrance {
        self.entrance
    }

    /// Removes the cgroups of Pods whose processes have ended, which no machine has after its start. A kubelet that
    /// finds them waits half a minute for their containers.
    pub(super) fn forget_pods(&self) -> Result<()> {
        self.cgroup.remove()?;
        self.cgroup.make()
    }

    /// Ends all processes inside and removes the machine's wire and cgroup from this machine.
    pub(super) async fn end(self) {
        self.process.kill_and_reap().await;
        // The other end of the wire has gone with the node's network, and the kernel removes this end in its own time.
        // An error means that it is already gone or never existed.
        ip(&["link", "delete", &self.veth]).await.ok();
        if let Err(error) = self.cgroup.remove() {
            eprintln!("cannot remove a node's cgroup: {error:#}");
        }
    }
}

async fn ip(args: &[&str]) -> Result<()> {
    let done = Command::new("ip").args(args).output().await.context("ip")?;
    if !done.status.success() {
        bail!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
}
