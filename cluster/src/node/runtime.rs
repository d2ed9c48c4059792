//! containerd with runc, the network of Pods, and the images that are there.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, bail};
use nix::sys::statfs::{OVERLAYFS_SUPER_MAGIC, statfs};
use serde_json::json;
use tokio::process::Command;

use super::{machine::NodeMachine, requirements};
use crate::{
    resources::{ClusterResources, PART_MARK_ENV},
    server::ServerProcess,
};

/// In the node, whose `/run` is its own.
pub(super) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
/// What holds a Pod's network.
pub(super) const PAUSE_PROGRAM: &str = "rouse-pause";

/// What Pods call the image of this program, as `images/build` does.
pub(super) fn image_name(program: &str) -> String {
    format!("localhost/{program}:{}", env!("CARGO_PKG_VERSION"))
}

/// Starts it; returns when it answers.
pub(super) async fn start(
    ground: &ClusterResources,
    machine: &NodeMachine,
    folder: &Path,
) -> Result<ServerProcess> {
    let config = folder.join("containerd.toml");
    fs::write(&config, configuration(folder)?)?;
    network(ground, folder)?;
    let config = config.display().to_string();
    // Its shims inherit its environment. They outlive a containerd that is killed, so they are no part of it.
    let command = ["env", "-u", PART_MARK_ENV, "containerd", "--config", &config];
    let mut server =
        ServerProcess::new(ground, "containerd", "nsenter".into(), machine.enter_command(command));
    server.start()?;
    server.wait_until_ready(|| async { ctr(machine, &["version"]).await.is_ok() }).await?;
    Ok(server)
}

/// Makes the image of this archive known to the kubelet, by the name that the archive gives it.
pub(super) async fn import(machine: &NodeMachine, archives: &Path, name: &str) -> Result<()> {
    let archive = archives.join(format!("{name}.tar"));
    if !archive.exists() {
        bail!("{} is not there: `make test-node` builds the images first", archive.display());
    }
    ctr(machine, &["images", "import", &archive.display().to_string()]).await
}

async fn ctr(machine: &NodeMachine, words: &[&str]) -> Result<()> {
    // The kubelet sees this namespace of containerd's and no other.
    let command =
        ["ctr", "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io"].iter().chain(words).copied();
    let done =
        Command::new("nsenter").args(machine.enter_command(command)).output().await.context("nsenter")?;
    if !done.status.success() {
        bail!("ctr {}: {}", words.join(" "), String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
}

/// Folders are those of every containerd, since the node's `/var/lib` and `/run` are its own.
fn configuration(folder: &Path) -> Result<String> {
    // An overlay cannot stand on another, which is what `/tmp` is where all this runs in a container. Copies can.
    let on_overlay = statfs(folder)?.filesystem_type() == OVERLAYFS_SUPER_MAGIC;
    let snapshotter = if on_overlay { "native" } else { "overlayfs" };
    let plugins = requirements::plugin_folder().context("CNI's plugins have gone")?;
    let net = folder.join("net.d");
    Ok(format!(
        r#"version = 2
# They would look for devices and file systems, and warn that there are none.
disabled_plugins = [
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
]

[grpc]
address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.grpc.v1.cri"]
# Ours, as all is: containerd's own would be pulled.
sandbox_image = "{pause}"
# Sandboxes are meant to be killed last when memory is short. Root in a container itself may lack CAP_SYS_RESOURCE, which it
# takes to go below what one has, and no test needs it.
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "{snapshotter}"
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

# The kubelet's driver is cgroupfs, and both must agree: no systemd runs in the node.
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{net}"
"#,
        pause = image_name(PAUSE_PROGRAM),
        plugins = plugins.display(),
        net = net.display(),
    ))
}

/// A bridge in the node's network, an address for each Pod; the node forwards between bridge and wire.
fn network(ground: &ClusterResources, folder: &Path) -> Result<()> {
    let net = folder.join("net.d");
    fs::create_dir_all(&net)?;
    let bridge = json!({
        "type": "bridge",
        "bridge": "pods",
        // The bridge has the subnet's first address, and Pods reach all else through it.
        "isGateway": true,
        // Addresses are real to this machine, which has a route to them: nobody's needs to be translated.
        "ipMasq": false,
        // A Pod that asks itself by way of a Service comes back on the wire it left by.
        "hairpinMode": true,
        "ipam": {
            "type": "host-local",
            "ranges": [[{ "subnet": format!("{}/24", ground.pod_subnet()) }]],
            "routes": [{ "dst": "0.0.0.0/0" }],
        },
    });
    let list = json!({ "cniVersion": "1.0.0", "name": "pods", "plugins": [bridge] });
    fs::write(net.join("10-pods.conflist"), list.to_string())?;
    Ok(())
}
