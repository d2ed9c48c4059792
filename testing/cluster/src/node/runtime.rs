//! Runs containerd with runc, and sets up the Pod network and the images.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, bail};
use nix::sys::statfs::{OVERLAYFS_SUPER_MAGIC, statfs};
use serde_json::json;
use tokio::process::Command;

use super::{machine::NodeEntrance, registry::HOSTS_FOLDER, requirements};
use crate::{
    resources::{ClusterResources, PART_MARK_ENV},
    server::ServerProcess,
};

/// A path in the node, which has its own `/run`.
pub(super) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
/// The program that holds a Pod's network.
pub(super) const PAUSE_PROGRAM: &str = "rouse-pause";

/// The image name of this program, as in `images/build`.
pub(super) fn image_name(program: &str) -> String {
    format!("localhost/{program}:{}", env!("CARGO_PKG_VERSION"))
}

/// Starts containerd and returns when it answers.
pub(super) async fn start(
    resources: &ClusterResources,
    machine: NodeEntrance,
    folder: &Path,
) -> Result<ServerProcess> {
    let config = folder.join("containerd.toml");
    fs::write(&config, configuration(folder)?)?;
    network(resources, folder)?;
    let config = config.display().to_string();
    // The shims inherit this environment and outlive a killed containerd, so they must not carry its mark.
    let command = ["env", "-u", PART_MARK_ENV, "containerd", "--config", &config];
    let mut server =
        ServerProcess::new(resources, "containerd", "nsenter".into(), machine.enter_command(command));
    resume(machine, &mut server).await?;
    Ok(server)
}

/// Starts containerd if it does not run, and returns when it answers.
pub(super) async fn resume(machine: NodeEntrance, server: &mut ServerProcess) -> Result<()> {
    server.start()?;
    server.wait_until_ready(|| async { ctr(machine, &["version"]).await.is_ok() }).await
}

/// Imports this image archive for the kubelet, under the name in the archive.
pub(super) async fn import(machine: NodeEntrance, archives: &Path, name: &str) -> Result<()> {
    let archive = archives.join(format!("{name}.tar"));
    if !archive.exists() {
        bail!("{} does not exist: run `make test-node`, which builds the images first", archive.display());
    }
    ctr(machine, &["images", "import", &archive.display().to_string()]).await
}

async fn ctr(machine: NodeEntrance, args: &[&str]) -> Result<()> {
    // The kubelet uses only this containerd namespace.
    let command =
        ["ctr", "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io"].iter().chain(args).copied();
    let done =
        Command::new("nsenter").args(machine.enter_command(command)).output().await.context("nsenter")?;
    if !done.status.success() {
        bail!("ctr {}: {}", args.join(" "), String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
}

/// Folders have containerd's defaults, since the node has its own `/var/lib` and `/run`.
fn configuration(folder: &Path) -> Result<String> {
    // An overlay cannot stack on another overlay, which `/tmp` is when the tests run in a container. The native
    // snapshotter copies instead.
    let on_overlay = statfs(folder)?.filesystem_type() == OVERLAYFS_SUPER_MAGIC;
    let snapshotter = if on_overlay { "native" } else { "overlayfs" };
    let plugins = requirements::plugin_folder().context("the CNI plugins are missing")?;
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

[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{hosts}"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{net}"
"#,
        pause = image_name(PAUSE_PROGRAM),
        plugins = plugins.display(),
        hosts = folder.join(HOSTS_FOLDER).display(),
        net = net.display(),
    ))
}

/// Configures a bridge in the node's network with an address for each Pod. The node forwards between the bridge and the
/// wire.
fn network(resources: &ClusterResources, folder: &Path) -> Result<()> {
    let net = folder.join("net.d");
    fs::create_dir_all(&net)?;
    let bridge = json!({
        "type": "bridge",
        "bridge": "pods",
        // The bridge has the subnet's first address and is the Pods' gateway.
        "isGateway": true,
        // This machine has a route to the Pods' addresses, so no address translation is needed.
        "ipMasq": false,
        // A Pod that reaches itself through a Service gets its packets back on the same port.
        "hairpinMode": true,
        "ipam": {
            "type": "host-local",
            "ranges": [[{ "subnet": format!("{}/24", resources.pod_subnet()) }]],
            "routes": [{ "dst": "0.0.0.0/0" }],
        },
    });
    let list = json!({ "cniVersion": "1.0.0", "name": "pods", "plugins": [bridge] });
    fs::write(net.join("10-pods.conflist"), list.to_string())?;
    Ok(())
}
