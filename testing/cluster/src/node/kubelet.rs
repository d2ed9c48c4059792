//! Starts the kubelet.

use std::{fs, net::SocketAddr, path::Path, sync::Arc};

use anyhow::{Context as _, Result};
use k8s_openapi::{api::core::v1::Node as Object, apimachinery::pkg::apis::meta::v1::Time};
use kube::Api;
use serde_json::{Value, json};

use super::{machine::NodeEntrance, runtime};
use crate::{
    ClusterInner, binaries, control_plane::flags, resources::ClusterResources, server::ServerProcess,
    user::ClusterUsers,
};

/// File name of the kubelet's serving certificate, for requests from the API server.
const SERVING_CERTIFICATE: &str = "kubelet";

/// Starts the kubelet and returns when the node is ready. `api_server` is its address for the node.
pub(super) async fn start(
    inner: &Arc<ClusterInner>,
    machine: NodeEntrance,
    folder: &Path,
    name: &str,
    api_server: SocketAddr,
) -> Result<ServerProcess> {
    let (ground, users) = (&inner.resources, &inner.users);
    let program =
        binaries::find("ring2")?.remove("kubelet").context("testing/cluster/build does not list kubelet")?;
    users.issue_server_certificate(SERVING_CERTIFICATE, &[ground.node_address()], &[name])?;
    // The user and group name by which the API server authorizes a node.
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
    resume(inner, &mut server, name).await?;
    Ok(server)
}

/// Starts the kubelet if it does not run, and returns when it has reported the node ready.
pub(super) async fn resume(inner: &ClusterInner, server: &mut ServerProcess, name: &str) -> Result<()> {
    let users = &inner.users;
    let nodes: Api<Object> = Api::all(users.client(users.admin(), inner.api_server).await?);
    // What a stopped kubelet has reported last stays in the object.
    let before = nodes.get_opt(name).await?.as_ref().and_then(ready_at);
    server.start()?;
    let is_new = |node: &Object| {
        let at = ready_at(node);
        at.is_some() && at != before
    };
    server
        .wait_until_ready(|| async {
            nodes.get_opt(name).await.ok().flatten().is_some_and(|node| is_new(&node))
        })
        .await
}

/// When the kubelet last reported the node ready; `None` if its last report says otherwise.
fn ready_at(node: &Object) -> Option<Time> {
    let mut conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.find(|condition| condition.type_ == "Ready" && condition.status == "True")?;
    ready.last_heartbeat_time.clone()
}

/// The kubelet's configuration file. Settings that are not here have their defaults.
fn configuration(resources: &ClusterResources, users: &ClusterUsers) -> Value {
    let file = |name: &str| users.file(name).display().to_string();
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": format!("unix://{}", runtime::CONTAINERD_SOCKET),

        // Test machines may have only cgroup version 1, which newer kubelets refuse by default.
        "failCgroupV1": false,
        // The node has no systemd that could manage cgroups.
        "cgroupDriver": "cgroupfs",
        // Keep all Pod cgroups under one parent that can be found and removed.
        "cgroupRoot": format!("/{}", resources.name()),
        // When memory is short, this machine's other processes matter more than the node.
        "oomScoreAdj": 0,
        // A developer's machine may have swap.
        "failSwapOn": false,
        // Ignore this machine's disk and memory pressure: no evictions, no image garbage collection.
        "evictionHard": {
            "memory.available": "0%",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
            "imagefs.inodesFree": "0%",
        },
        "imageGCHighThresholdPercent": 100,

        // Only the API server calls the kubelet, and it presents a certificate. The kubelet checks each user's rights
        // with the API server.
        "address": resources.node_address().to_string(),
        "tlsCertFile": file(&format!("{SERVING_CERTIFICATE}.pem")),
        "tlsPrivateKeyFile": file(&format!("{SERVING_CERTIFICATE}.key")),
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": file("ca.pem") },
        },
        "authorization": { "mode": "Webhook" },
        // The legacy port without authentication.
        "readOnlyPort": 0,

        // The default is one pull after the other, however many Pods wait.
        "serializeImagePulls": false,

        // Nothing here routes Services, so the kubelet needs no firewall tables.
        "makeIPTablesUtilChains": false,
        // Pods cannot reach this machine's resolvers.
        "resolvConf": "",

        // Tests wait for the node's status.
        "nodeStatusUpdateFrequency": "1s",
        "kubeAPIQPS": 500,
        "kubeAPIBurst": 1000,
        "eventRecordQPS": 0,
        // The longest pause before a container restarts, which also caps the first pauses.
        "featureGates": { "KubeletCrashLoopBackOffMax": true },
        "crashLoopBackOff": { "maxContainerRestartPeriod": "1s" },
    })
}
