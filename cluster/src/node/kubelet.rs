//! The kubelet.

use std::{fs, net::SocketAddr, path::Path, sync::Arc};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Node as Object;
use kube::Api;
use serde_json::{Value, json};

use super::{machine::NodeMachine, runtime};
use crate::{
    ClusterInner, binaries, control_plane::flags, resources::ClusterResources, server::ServerProcess,
    user::ClusterUsers,
};

/// Files of the certificate that it shows to the API server's questions.
const SERVING_CERTIFICATE: &str = "kubelet";

/// Starts it; returns when the node is ready. `api_server` is where the node finds that.
pub(super) async fn start(
    inner: &Arc<ClusterInner>,
    machine: &NodeMachine,
    folder: &Path,
    name: &str,
    api_server: SocketAddr,
) -> Result<ServerProcess> {
    let (ground, users) = (&inner.resources, &inner.users);
    let program = binaries::find("ring2")?.remove("kubelet").context("cluster/build lists no kubelet")?;
    users.issue_server_certificate(SERVING_CERTIFICATE, &[ground.node_address()], &[name])?;
    // The name and the group by which the API server knows what is a node's business.
    let user = users.issue_user(&format!("system:node:{name}"), Some("system:nodes"))?;
    let config = folder.join("kubelet.json");
    fs::write(&config, configuration(ground, users).to_string())?;
    let args = flags(&[
        ("config", config.display().to_string()),
        ("kubeconfig", users.kubeconfig(&user, api_server)?.display().to_string()),
        ("hostname-override", name.to_owned()),
        ("node-ip", ground.node_address().to_string()),
    ]);
    let command = [program.display().to_string()].into_iter().chain(args);
    let mut server = ServerProcess::new(ground, "kubelet", "nsenter".into(), machine.enter_command(command));
    server.start()?;
    let nodes: Api<Object> = Api::all(users.client(users.admin(), inner.api_server).await?);
    server
        .wait_until_ready(|| async {
            nodes.get_opt(name).await.ok().flatten().is_some_and(|node| is_ready(&node))
        })
        .await?;
    Ok(server)
}

fn is_ready(node: &Object) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Its configuration file; what is not here is as in any cluster.
fn configuration(ground: &ClusterResources, users: &ClusterUsers) -> Value {
    let file = |name: &str| users.file(name).display().to_string();
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": format!("unix://{}", runtime::CONTAINERD_SOCKET),

        // Kernels that are tested on may have version 1 alone, which newer kubelets refuse where nobody says otherwise.
        "failCgroupV1": false,
        // There is no systemd in the node whose cgroups it could ask for.
        "cgroupDriver": "cgroupfs",
        // All its Pods' cgroups are in one that can be found and removed.
        "cgroupRoot": format!("/{}", ground.name()),
        // When memory is short, nothing here is worth more than what else runs on this machine.
        "oomScoreAdj": 0,
        // A developer's machine may swap.
        "failSwapOn": false,
        // How full this machine's disk and memory are is no business of a test's: nothing is evicted, no image collected.
        "evictionHard": {
            "memory.available": "0%",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
            "imagefs.inodesFree": "0%",
        },
        "imageGCHighThresholdPercent": 100,

        // What is asked of it is asked by the API server, which shows a certificate; may its user do that, it asks in turn.
        "address": ground.node_address().to_string(),
        "tlsCertFile": file(&format!("{SERVING_CERTIFICATE}.pem")),
        "tlsPrivateKeyFile": file(&format!("{SERVING_CERTIFICATE}.key")),
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": file("ca.pem") },
        },
        "authorization": { "mode": "Webhook" },
        // The old one that asks for no certificate.
        "readOnlyPort": 0,

        // Services are nobody's task here, so it needs no tables of the firewall.
        "makeIPTablesUtilChains": false,
        // This machine's resolvers are out of a Pod's reach.
        "resolvConf": "",

        // Tests wait for what it tells.
        "nodeStatusUpdateFrequency": "1s",
        "kubeAPIQPS": 500,
        "kubeAPIBurst": 1000,
        "eventRecordQPS": 0,
        // The longest pause before a container is started again, and so the first ones as well.
        "featureGates": { "KubeletCrashLoopBackOffMax": true },
        "crashLoopBackOff": { "maxContainerRestartPeriod": "1s" },
    })
}
