//! Runs etcd, kube-apiserver and kube-controller-manager like production, but faster.
//!
//! For speed, etcd does not sync its data to disk. The data is deleted with the cluster.

use std::{fs, net::SocketAddr};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use tokio::sync::Mutex;

use crate::{
    audit_log, binaries,
    resources::ClusterResources,
    server::{self, ServerProcess},
    user::ClusterUsers,
};

const ETCD_PORT: u16 = 12379;
const ETCD_PEER_PORT: u16 = 12380;
const API_SERVER_PORT: u16 = 16443;
const CONTROLLER_MANAGER_PORT: u16 = 20257;
pub(crate) const SCHEDULER_PORT: u16 = 20259;
/// A listener on all addresses at one of these ports would conflict.
pub(crate) const PORTS: [u16; 5] =
    [ETCD_PORT, ETCD_PEER_PORT, API_SERVER_PORT, CONTROLLER_MANAGER_PORT, SCHEDULER_PORT];

/// The servers of a cluster.
pub(crate) struct ControlPlane {
    address: SocketAddr,
    users: ClusterUsers,
    etcd: Mutex<ServerProcess>,
    api_server: Mutex<ServerProcess>,
    controller_manager: Mutex<ServerProcess>,
}

/// The role of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerRole {
    Etcd,
    ApiServer,
    ControllerManager,
}

impl ControlPlane {
    pub(crate) async fn start(resources: &ClusterResources, users: &ClusterUsers) -> Result<Self> {
        let programs = binaries::find("ring1")?;
        let server = |name: &'static str, args| -> Result<Mutex<ServerProcess>> {
            let program =
                programs.get(name).with_context(|| format!("testing/cluster/build does not list {name}"))?;
            Ok(Mutex::new(ServerProcess::new(resources, name, program.clone(), args)))
        };
        let plane = Self {
            address: api_server_of(resources),
            users: users.clone(),
            etcd: server("etcd", etcd_args(resources))?,
            api_server: server("kube-apiserver", api_server_args(resources, users)?)?,
            controller_manager: server(
                "kube-controller-manager",
                controller_manager_args(resources, users)?,
            )?,
        };
        for role in [ServerRole::Etcd, ServerRole::ApiServer, ServerRole::ControllerManager] {
            plane.start_server(role).await?;
        }
        Ok(plane)
    }

    /// Returns this server's pid while it runs.
    pub(crate) async fn pid(&self, role: ServerRole) -> Option<i32> {
        self.server(role).lock().await.pid()
    }

    /// Stops the server with SIGTERM and waits until it has ended.
    pub(crate) async fn stop(&self, role: ServerRole) {
        self.server(role).lock().await.stop().await;
    }

    /// Kills the server and waits until it has ended.
    pub(crate) async fn kill(&self, role: ServerRole) {
        self.server(role).lock().await.kill().await;
    }

    /// Starts the server if it does not run, and waits until it is ready.
    ///
    /// # Errors
    /// It does not become ready; the error holds the end of its log.
    pub(crate) async fn start_server(&self, role: ServerRole) -> Result<()> {
        let mut server = self.server(role).lock().await;
        server.start()?;
        match role {
            ServerRole::Etcd => {
                server.wait_until_ready(|| server::is_listening((self.address.ip(), ETCD_PORT).into())).await
            }
            // Tests wait for the objects that the controller manager creates.
            ServerRole::ControllerManager => Ok(()),
            ServerRole::ApiServer => {
                let client = self.users.client(self.users.admin(), self.address).await?;
                server.wait_until_ready(|| is_api_ready(&client)).await
            }
        }
    }

    pub(crate) async fn signal(&self, role: ServerRole, signal: Signal) {
        self.server(role).lock().await.signal(signal);
    }

    pub(crate) async fn kill_all(&self) {
        for role in [ServerRole::ControllerManager, ServerRole::ApiServer, ServerRole::Etcd] {
            self.kill(role).await;
        }
    }

    fn server(&self, role: ServerRole) -> &Mutex<ServerProcess> {
        match role {
            ServerRole::Etcd => &self.etcd,
            ServerRole::ApiServer => &self.api_server,
            ServerRole::ControllerManager => &self.controller_manager,
        }
    }
}

/// The API server's address, which stays the same across restarts.
pub(crate) fn api_server_of(resources: &ClusterResources) -> SocketAddr {
    (resources.server_address(), API_SERVER_PORT).into()
}

async fn is_api_ready(client: &kube::Client) -> bool {
    match http::Request::get("/readyz").body(Vec::new()) {
        Ok(request) => client.request_text(request).await.is_ok_and(|text| text == "ok"),
        Err(_) => false,
    }
}

fn etcd_args(resources: &ClusterResources) -> Vec<String> {
    let at = |port: u16| format!("http://{}:{port}", resources.server_address());
    flags(&[
        ("name", "test".to_owned()),
        ("data-dir", resources.state().join("etcd").display().to_string()),
        ("listen-client-urls", at(ETCD_PORT)),
        ("advertise-client-urls", at(ETCD_PORT)),
        ("listen-peer-urls", at(ETCD_PEER_PORT)),
        ("initial-advertise-peer-urls", at(ETCD_PEER_PORT)),
        ("initial-cluster", format!("test={}", at(ETCD_PEER_PORT))),
        // A power failure would end the test too.
        ("unsafe-no-fsync", "true".to_owned()),
        ("log-level", "warn".to_owned()),
    ])
}

fn api_server_args(resources: &ClusterResources, users: &ClusterUsers) -> Result<Vec<String>> {
    let scratch = resources.state().join("kube-apiserver");
    fs::create_dir_all(&scratch)?;
    let file = |name: &str| users.file(name).display().to_string();
    let address = resources.server_address().to_string();
    let audit = audit_log::api_server_flags(resources)?;
    let own = [
        ("etcd-servers", format!("http://{address}:{ETCD_PORT}")),
        ("bind-address", address.clone()),
        ("advertise-address", address),
        ("secure-port", API_SERVER_PORT.to_string()),
        // The Service `kubernetes` cannot have a loopback address as its endpoint.
        ("endpoint-reconciler-type", "none".to_owned()),
        ("cert-dir", scratch.display().to_string()),
        ("tls-cert-file", file("server.pem")),
        ("tls-private-key-file", file("server.key")),
        ("client-ca-file", file("ca.pem")),
        // The API server reads container logs from the kubelet.
        ("kubelet-certificate-authority", file("ca.pem")),
        ("kubelet-client-certificate", file("user-admin.pem")),
        ("kubelet-client-key", file("user-admin.key")),
        ("kubelet-preferred-address-types", "InternalIP".to_owned()),
        ("service-account-issuer", "https://kubernetes.default.svc".to_owned()),
        ("service-account-key-file", file("accounts.pub")),
        ("service-account-signing-key-file", file("accounts.key")),
        ("service-cluster-ip-range", "10.96.0.0/16".to_owned()),
        ("authorization-mode", "Node,RBAC".to_owned()),
        // This plugin taints every new node until the controllers have seen it ready, which takes seconds and tests
        // nothing.
        ("disable-admission-plugins", "TaintNodesByCondition".to_owned()),
        ("allow-privileged", "true".to_owned()),
        // Kubernetes 1.35 has this on by default. Without it the API server refuses Pods that mount an image.
        ("feature-gates", "ImageVolume=true".to_owned()),
        ("profiling", "false".to_owned()),
    ];
    Ok(flags(&own.into_iter().chain(audit).collect::<Vec<_>>()))
}

fn controller_manager_args(resources: &ClusterResources, users: &ClusterUsers) -> Result<Vec<String>> {
    let scratch = resources.state().join("kube-controller-manager");
    fs::create_dir_all(&scratch)?;
    let admin = users
        .kubeconfig(users.admin(), (resources.server_address(), API_SERVER_PORT).into())?
        .display()
        .to_string();
    let file = |name: &str| users.file(name).display().to_string();
    Ok(flags(&[
        ("kubeconfig", admin.clone()),
        ("authentication-kubeconfig", admin.clone()),
        ("authorization-kubeconfig", admin),
        ("bind-address", resources.server_address().to_string()),
        ("secure-port", CONTROLLER_MANAGER_PORT.to_string()),
        ("cert-dir", scratch.display().to_string()),
        ("root-ca-file", file("ca.pem")),
        ("service-account-private-key-file", file("accounts.key")),
        // There is only one, and waiting for the lease after a restart would slow the tests.
        ("leader-elect", "false".to_owned()),
        ("kube-api-qps", "500".to_owned()),
        ("kube-api-burst", "1000".to_owned()),
        // An autoscaler of Kubernetes decides every 15 seconds otherwise.
        ("horizontal-pod-autoscaler-sync-period", "1s".to_owned()),
        ("profiling", "false".to_owned()),
    ]))
}

pub(crate) fn flags(pairs: &[(&str, String)]) -> Vec<String> {
    pairs.iter().map(|(name, value)| format!("--{name}={value}")).collect()
}
