//! The node's servers, which tests stop and start again.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::time;

use super::{kubelet, machine::NodeMachine, runtime};
use crate::{ClusterInner, server::ServerProcess};

/// What of a node stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeOutage {
    /// The kubelet. Containers go on.
    Kubelet,
    /// The kubelet and the container runtime. Containers go on.
    Servers,
    /// All processes of the node at once, those of Pods included. Like a machine that starts again, the node then has
    /// an empty `/run`, no mounts or cgroups of Pods, and the other files as they were.
    Power,
}

/// The running processes, in the order in which they end.
pub(super) struct NodeProcesses {
    pub(super) scheduler: ServerProcess,
    pub(super) kubelet: ServerProcess,
    pub(super) containerd: ServerProcess,
    pub(super) machine: NodeMachine,
}

impl NodeProcesses {
    pub(super) async fn stop(&mut self, outage: NodeOutage) -> Result<()> {
        match outage {
            NodeOutage::Kubelet => self.kubelet.stop().await,
            NodeOutage::Servers => {
                self.kubelet.stop().await;
                self.containerd.stop().await;
            }
            NodeOutage::Power => {
                self.kubelet.kill().await;
                self.containerd.kill().await;
                let off = self.machine.entrance().run(POWER_OFF);
                time::timeout(POWER_OFF_TIMEOUT, off).await.context("processes of the node do not end")??;
                self.machine.forget_pods().context("cannot remove the cgroups of the node's Pods")?;
            }
        }
        Ok(())
    }

    /// Starts what does not run, and returns when the kubelet has reported the node ready.
    pub(super) async fn resume(&mut self, inner: &ClusterInner, name: &str) -> Result<()> {
        runtime::resume(self.machine.entrance(), &mut self.containerd).await?;
        kubelet::resume(inner, &mut self.kubelet, name).await
    }

    pub(super) async fn end(mut self) {
        for server in [&mut self.scheduler, &mut self.kubelet, &mut self.containerd] {
            server.kill().await;
        }
        self.machine.end().await;
    }
}

const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(60);

/// Leaves the first process of the node, and this shell.
const POWER_OFF: &str = r#"
alive() {
    local status
    for status in /proc/[0-9]*/status; do
        case $status in /proc/1/status | "/proc/$$/status") continue ;; esac
        # A zombie whose parent is outside stays until that ends.
        if grep -qs '^State:.[^ZX]' "$status"; then return 0; fi
    done
    return 1
}
# An error means that no process is left.
kill -KILL -1 2> /dev/null || true
while alive; do sleep 0.02; done

mapfile -t mounts < <(awk '$2 ~ "^/(run|var/lib/kubelet|var/lib/containerd)/" { print $2 }' /proc/mounts | tac)
for mount in "${mounts[@]}"; do
    # Mounts of this machine are in the list, too. Where the node has mounted over them, nothing is at their paths.
    if mountpoint --quiet "$mount"; then umount --lazy "$mount"; fi
done
find /run -mindepth 1 -delete
"#;
