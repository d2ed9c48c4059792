//! etcd, kube-apiserver and kube-controller-manager, as production runs them, but for their speed: what is stored is not
//! flushed to the disk, and goes with the cluster.

use std::{fs, net::SocketAddr};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use tokio::sync::Mutex;

use crate::{
    binaries, calls,
    ground::Ground,
    server::{self, Server},
    user::Users,
};

const ETCD: u16 = 12379;
const ETCD_PEERS: u16 = 12380;
const API: u16 = 16443;
const CONTROLLERS: u16 = 20257;
pub(crate) const SCHEDULER: u16 = 20259;
/// Somebody who listens there on all addresses would be in the way.
pub(crate) const PORTS: [u16; 5] = [ETCD, ETCD_PEERS, API, CONTROLLERS, SCHEDULER];

/// The servers of a cluster.
pub(crate) struct ControlPlane {
    address: SocketAddr,
    users: Users,
    etcd: Mutex<Server>,
    api_server: Mutex<Server>,
    controller_manager: Mutex<Server>,
}

/// One of the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Etcd,
    ApiServer,
    ControllerManager,
}

impl ControlPlane {
    pub(crate) async fn start(ground: &Ground, users: &Users) -> Result<Self> {
        let programs = binaries::find("ring1")?;
        let made = |name: &'static str, args| -> Result<Mutex<Server>> {
            let program =
                programs.get(name).with_context(|| format!("cluster/build does not list {name}"))?;
            Ok(Mutex::new(Server::new(ground, name, program.clone(), args)))
        };
        let plane = Self {
            address: api_server_of(ground),
            users: users.clone(),
            etcd: made("etcd", etcd(ground))?,
            api_server: made("kube-apiserver", api_server(ground, users)?)?,
            controller_manager: made("kube-controller-manager", controller_manager(ground, users)?)?,
        };
        for role in [Role::Etcd, Role::ApiServer, Role::ControllerManager] {
            plane.start_one(role).await?;
        }
        Ok(plane)
    }

    /// The pid of this server, while it runs.
    pub(crate) async fn pid(&self, role: Role) -> Option<i32> {
        self.server(role).lock().await.pid()
    }

    /// Asks it to end, and returns when it has.
    pub(crate) async fn stop(&self, role: Role) {
        self.server(role).lock().await.stop().await;
    }

    /// Kills it, and returns when it is gone.
    pub(crate) async fn kill(&self, role: Role) {
        self.server(role).lock().await.kill().await;
    }

    /// Starts it where it does not run; returns when it is ready.
    ///
    /// # Errors
    /// With the end of its log when it does not get ready.
    pub(crate) async fn start_one(&self, role: Role) -> Result<()> {
        let mut server = self.server(role).lock().await;
        server.start()?;
        match role {
            Role::Etcd => server.ready(|| server::listens((self.address.ip(), ETCD).into())).await,
            // What waits for it waits for what it makes.
            Role::ControllerManager => Ok(()),
            Role::ApiServer => {
                let client = self.users.client(self.users.admin(), self.address).await?;
                server.ready(|| says_ready(&client)).await
            }
        }
    }

    pub(crate) async fn signal(&self, role: Role, signal: Signal) {
        self.server(role).lock().await.signal(signal);
    }

    pub(crate) async fn end(&self) {
        for role in [Role::ControllerManager, Role::ApiServer, Role::Etcd] {
            self.kill(role).await;
        }
    }

    fn server(&self, role: Role) -> &Mutex<Server> {
        match role {
            Role::Etcd => &self.etcd,
            Role::ApiServer => &self.api_server,
            Role::ControllerManager => &self.controller_manager,
        }
    }
}

/// Where the API server of this ground's cluster listens. It stays the same when that is restarted.
pub(crate) fn api_server_of(ground: &Ground) -> SocketAddr {
    (ground.address(), API).into()
}

async fn says_ready(client: &kube::Client) -> bool {
    match http::Request::get("/readyz").body(Vec::new()) {
        Ok(request) => client.request_text(request).await.is_ok_and(|text| text == "ok"),
        Err(_) => false,
    }
}

fn etcd(ground: &Ground) -> Vec<String> {
    let at = |port: u16| format!("http://{}:{port}", ground.address());
    flags(&[
        ("name", "test".to_owned()),
        ("data-dir", ground.state().join("etcd").display().to_string()),
        ("listen-client-urls", at(ETCD)),
        ("advertise-client-urls", at(ETCD)),
        ("listen-peer-urls", at(ETCD_PEERS)),
        ("initial-advertise-peer-urls", at(ETCD_PEERS)),
        ("initial-cluster", format!("test={}", at(ETCD_PEERS))),
        // A power failure ends the test as well.
        ("unsafe-no-fsync", "true".to_owned()),
        ("log-level", "warn".to_owned()),
    ])
}

fn api_server(ground: &Ground, users: &Users) -> Result<Vec<String>> {
    let scratch = ground.state().join("kube-apiserver");
    fs::create_dir_all(&scratch)?;
    let file = |name: &str| users.file(name).display().to_string();
    let address = ground.address().to_string();
    let audit = calls::flags(ground)?;
    let own = [
        ("etcd-servers", format!("http://{address}:{ETCD}")),
        ("bind-address", address.clone()),
        ("advertise-address", address),
        ("secure-port", API.to_string()),
        // The Service `kubernetes` cannot have a loopback address behind it.
        ("endpoint-reconciler-type", "none".to_owned()),
        ("cert-dir", scratch.display().to_string()),
        ("tls-cert-file", file("server.pem")),
        ("tls-private-key-file", file("server.key")),
        ("client-ca-file", file("ca.pem")),
        // Who reads a container's log through it reads it from the kubelet.
        ("kubelet-certificate-authority", file("ca.pem")),
        ("kubelet-client-certificate", file("user-admin.pem")),
        ("kubelet-client-key", file("user-admin.key")),
        ("kubelet-preferred-address-types", "InternalIP".to_owned()),
        ("service-account-issuer", "https://kubernetes.default.svc".to_owned()),
        ("service-account-key-file", file("accounts.pub")),
        ("service-account-signing-key-file", file("accounts.key")),
        ("service-cluster-ip-range", "10.96.0.0/16".to_owned()),
        ("authorization-mode", "Node,RBAC".to_owned()),
        // It would taint every new node until the controllers have seen it ready, which takes seconds and says nothing.
        ("disable-admission-plugins", "TaintNodesByCondition".to_owned()),
        ("allow-privileged", "true".to_owned()),
        ("profiling", "false".to_owned()),
    ];
    Ok(flags(&own.into_iter().chain(audit).collect::<Vec<_>>()))
}

fn controller_manager(ground: &Ground, users: &Users) -> Result<Vec<String>> {
    let scratch = ground.state().join("kube-controller-manager");
    fs::create_dir_all(&scratch)?;
    let admin = users.kubeconfig(users.admin(), (ground.address(), API).into())?.display().to_string();
    let file = |name: &str| users.file(name).display().to_string();
    Ok(flags(&[
        ("kubeconfig", admin.clone()),
        ("authentication-kubeconfig", admin.clone()),
        ("authorization-kubeconfig", admin),
        ("bind-address", ground.address().to_string()),
        ("secure-port", CONTROLLERS.to_string()),
        ("cert-dir", scratch.display().to_string()),
        ("root-ca-file", file("ca.pem")),
        ("service-account-private-key-file", file("accounts.key")),
        // It is the only one, and one that waits for a lease after a restart makes tests wait.
        ("leader-elect", "false".to_owned()),
        ("kube-api-qps", "500".to_owned()),
        ("kube-api-burst", "1000".to_owned()),
        ("profiling", "false".to_owned()),
    ]))
}

pub(crate) fn flags(pairs: &[(&str, String)]) -> Vec<String> {
    pairs.iter().map(|(name, value)| format!("--{name}={value}")).collect()
}
