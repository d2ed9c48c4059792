//! The environment of cluster tests: a real Kubernetes control plane on loopback, and Pods that are processes.
//!
//! Nothing is mocked where real Kubernetes can run. etcd, kube-apiserver and kube-controller-manager are built by
//! `testing/cluster/build` from pinned Go modules and run as child processes. Scheduling and running Pods is our code
//! ([`podrunner`]), because a kubelet needs root, cgroups and a container runtime, and cannot be made to misbehave on
//! command. On machines that have these, [`node`] runs a real kubelet.
//!
//! ```text
//!   test ──▶ TestCluster::shared() ── etcd, kube-apiserver, kube-controller-manager (control_plane, or another's)
//!              ├─ namespace("name")      one of its own for each test               (namespace)
//!              ├─ client(user)           admin, certificates, service accounts      (user)
//!              ├─ link()                 a way to the API server that can be cut    (link)
//!              ├─ calls(account)         what it was asked for, by whom             (audit_log)
//!              ├─ PodRunner              scheduler and kubelet for its own nodes    (podrunner)
//!              └─ KubeletNode            or a real kubelet, with containers         (node)
//!   DeviceManager                       a kubelet's sockets for device plugins      (device_manager)
//! ```
//!
//! A cluster has its own runtime on its own thread: each test has its own runtime, and a blocked test must stop neither
//! the servers nor the Pods. Every process carries the cluster's mark in its environment. A watchdog outside the test's
//! process group kills all marked processes once the test's process has ended, even if it was killed (`resources`).
//!
//! This crate is a test tool: its errors address the reader of the test's output, so they are `anyhow` errors.

use std::{
    env,
    fs::File,
    io::{Read as _, Write as _},
    net::SocketAddr,
    panic,
    path::PathBuf,
    pin::Pin,
    sync::{Arc, OnceLock, mpsc},
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use tokio::{
    runtime::{self, Handle},
    sync::oneshot,
};

use crate::{
    control_plane::ControlPlane, counter::SharedCounter, resources::ClusterResources, user::ClusterUsers,
};

mod audit_log;
mod binaries;
mod control_plane;
mod counter;
pub mod device_manager;
mod link;
mod namespace;
pub mod node;
pub mod podrunner;
mod resources;
mod server;
mod user;
pub mod wait;

pub use crate::{
    audit_log::AuditedCall,
    binaries::kubectl,
    control_plane::ServerRole,
    link::{Link, LinkMode, LinkTraffic},
    namespace::Namespace,
    node::KubeletNode,
    podrunner::PodRunner,
    user::ClusterUser,
};

/// The environment variable with the key of another process's cluster, which [`TestCluster::shared`] then joins.
pub const SHARED_CLUSTER_ENV: &str = "TEST_CLUSTER_SHARED";

/// Starts or joins a cluster on the cluster's runtime.
type SetUpFn = Box<dyn FnOnce(Handle) -> Pin<Box<dyn Future<Output = Result<Arc<ClusterInner>>>>> + Send>;

/// A running cluster. Dropping it ends all processes that it started, and waits for their end.
pub struct TestCluster {
    inner: Arc<ClusterInner>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

pub(crate) struct ClusterInner {
    pub(crate) handle: Handle,
    pub(crate) resources: ClusterResources,
    pub(crate) api_server: SocketAddr,
    /// The servers, if this process owns them.
    control_plane: Option<ControlPlane>,
    pub(crate) users: ClusterUsers,
    counter: SharedCounter,
}

impl TestCluster {
    /// Returns the cluster that all tests share. It joins the cluster that [`SHARED_CLUSTER_ENV`] names; without that
    /// variable the first test of this process starts a cluster that ends with the process.
    ///
    /// # Panics
    /// The cluster cannot be started or joined.
    pub fn shared() -> &'static Self {
        static CLUSTER: OnceLock<TestCluster> = OnceLock::new();
        let shared = || match env::var(SHARED_CLUSTER_ENV) {
            Ok(key) => Self::spawn(move |handle| Box::pin(async move { join(handle, &key) })),
            Err(_) => Self::start(),
        };
        CLUSTER.get_or_init(|| {
            shared().unwrap_or_else(|error| panic!("cannot start or join the test cluster: {error:#}"))
        })
    }

    /// Starts a cluster and returns when its API server is ready.
    ///
    /// # Errors
    /// The binaries are not built (`make cluster`), or a server ends or does not become ready; the error holds the end
    /// of its log.
    pub fn start() -> Result<Self> {
        Self::spawn(|handle| Box::pin(set_up(handle)))
    }

    fn spawn(
        set_up: impl FnOnce(Handle) -> Pin<Box<dyn Future<Output = Result<Arc<ClusterInner>>>>> + Send + 'static,
    ) -> Result<Self> {
        let set_up: SetUpFn = Box::new(set_up);
        #[expect(clippy::disallowed_methods, reason = "a test's channel")]
        let (told, outcome) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new()
            .name("cluster".to_owned())
            .spawn(move || run_cluster_thread(set_up, &told, stopped))?;
        let inner = outcome.recv().context("the cluster's thread ended")??;
        Ok(Self { inner, stop: Some(stop), thread: Some(thread) })
    }

    /// The API server's address, which stays the same across restarts.
    pub fn api_server(&self) -> SocketAddr {
        self.inner.api_server
    }

    /// The value of [`SHARED_CLUSTER_ENV`] that lets other processes use this cluster.
    pub fn key(&self) -> String {
        self.inner.resources.key()
    }

    /// Runs `work` once per cluster. The first caller runs it; other callers wait here until it is done.
    ///
    /// # Errors
    /// The cluster's folder cannot be written.
    pub async fn once(&self, what: &str, work: impl Future<Output = ()>) -> Result<()> {
        let done = async {
            work.await;
            "done".to_owned()
        };
        self.text_once(what, done).await.map(drop)
    }

    /// Returns the text that `work` makes once per cluster. The first caller runs it; other callers wait here until it
    /// is done, and return the same text. An empty text is made again.
    ///
    /// # Errors
    /// The cluster's folder cannot be read or written.
    pub async fn text_once(&self, what: &str, work: impl Future<Output = String>) -> Result<String> {
        let path = self.inner.resources.base_state().join(format!("once-{what}"));
        let lock = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        let waiting = lock.try_clone()?;
        self.inner
            .on_cluster_runtime(async move { tokio::task::spawn_blocking(move || waiting.lock()).await })
            .await??;
        let mut text = String::new();
        (&lock).read_to_string(&mut text)?;
        if text.is_empty() {
            text = work.await;
            (&lock).write_all(text.as_bytes())?;
        }
        lock.unlock()?;
        Ok(text)
    }

    /// Returns this server's pid while it runs.
    pub async fn pid(&self, role: ServerRole) -> Option<i32> {
        self.inner.control_plane().pid(role).await
    }

    /// Stops this server with SIGTERM and waits until it has ended.
    pub async fn stop_server(&self, role: ServerRole) {
        let inner = Arc::clone(&self.inner);
        self.inner.on_cluster_runtime(async move { inner.control_plane().stop(role).await }).await;
    }

    /// Kills this server and waits until it has ended.
    pub async fn kill_server(&self, role: ServerRole) {
        let inner = Arc::clone(&self.inner);
        self.inner.on_cluster_runtime(async move { inner.control_plane().kill(role).await }).await;
    }

    /// Starts this server if it does not run, and waits until it is ready. Its data is still there.
    ///
    /// # Errors
    /// It does not become ready; the error holds the end of its log.
    pub async fn start_server(&self, role: ServerRole) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        self.inner.on_cluster_runtime(async move { inner.control_plane().start_server(role).await }).await
    }

    /// Stops every thread of this server, like a hung machine: its connections stay open without responses.
    pub async fn freeze_server(&self, role: ServerRole) {
        self.inner.control_plane().signal(role, Signal::SIGSTOP).await;
    }

    /// Resumes a frozen server.
    pub async fn thaw_server(&self, role: ServerRole) {
        self.inner.control_plane().signal(role, Signal::SIGCONT).await;
    }

    /// The folder of its logs. They are deleted with the cluster, unless a test of this process panics.
    pub fn logs(&self) -> PathBuf {
        self.inner.resources.logs()
    }

    /// The environment entry that marks a process as part of this cluster. Marked processes end with the cluster,
    /// however the test's process ends.
    pub fn mark(&self) -> (&'static str, String) {
        (resources::CLUSTER_MARK_ENV, self.inner.resources.mark())
    }

    /// Returns every call of this service account that the API server has answered.
    ///
    /// # Errors
    /// The API server's audit log cannot be read.
    pub fn calls(&self, account: &ClusterUser) -> Result<Vec<AuditedCall>> {
        audit_log::calls_of(&self.inner.resources, account)
    }

    /// Creates a user whose certificate names this group, with only the rights that RBAC grants.
    ///
    /// # Errors
    /// The certificate cannot be made.
    pub fn user(&self, name: &str, group: Option<&str>) -> Result<ClusterUser> {
        self.inner.users.issue_user(name, group)
    }

    /// The user with all rights.
    pub fn admin(&self) -> &ClusterUser {
        self.inner.users.admin()
    }

    /// Creates a service account if it is missing, with a token for a day.
    ///
    /// # Errors
    /// Errors of the API server.
    pub async fn service_account(&self, namespace: &str, name: &str) -> Result<ClusterUser> {
        user::service_account(self.client().await?, namespace, name).await
    }

    /// Creates an admin client for the caller's runtime.
    ///
    /// # Errors
    /// The kubeconfig cannot be used.
    pub async fn client(&self) -> Result<kube::Client> {
        self.client_as(self.admin()).await
    }

    /// Creates a client of this user for the caller's runtime.
    ///
    /// # Errors
    /// The kubeconfig cannot be used.
    pub async fn client_as(&self, user: &ClusterUser) -> Result<kube::Client> {
        self.inner.users.client(user, self.inner.api_server).await
    }

    /// Writes a kubeconfig for processes; the file lives as long as the cluster.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn kubeconfig(&self, user: &ClusterUser) -> Result<PathBuf> {
        self.inner.users.kubeconfig(user, self.inner.api_server)
    }

    /// Creates a namespace with this name prefix and its default service account. It is deleted on drop.
    ///
    /// # Errors
    /// Errors of the API server.
    pub async fn namespace(&self, name: &str) -> Result<Namespace> {
        Namespace::create(Arc::clone(&self.inner), name).await
    }

    /// Opens a separate link to the API server, which tests can disturb.
    ///
    /// Tests can hold, slow down and cut it.
    ///
    /// # Errors
    /// No port is free.
    pub async fn link(&self) -> Result<Link> {
        Link::open(Arc::clone(&self.inner), self.inner.resources.server_address()).await
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        if thread::panicking() {
            self.inner.resources.keep_logs();
        }
        drop(self.stop.take());
        // A panicked thread has already reported its panic.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

impl ClusterInner {
    fn new(
        handle: Handle,
        resources: ClusterResources,
        plane: Option<ControlPlane>,
        users: ClusterUsers,
    ) -> Result<Self> {
        let counter = SharedCounter::open(&resources.base_state().join("counter"))?;
        let api_server = control_plane::api_server_of(&resources);
        Ok(Self { handle, resources, api_server, control_plane: plane, users, counter })
    }

    /// Runs `work` on the cluster's runtime, so that its tasks outlive the caller's runtime.
    pub(crate) async fn on_cluster_runtime<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> T {
        match self.handle.spawn(work).await {
            Ok(value) => value,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => panic::resume_unwind(panic),
                Err(error) => panic!("the cluster's runtime has ended: {error}"),
            },
        }
    }

    /// The servers.
    ///
    /// # Panics
    /// They belong to another process: stopping or freezing a server would disturb all other tests.
    fn control_plane(&self) -> &ControlPlane {
        self.control_plane
            .as_ref()
            .expect("a test must not disturb the servers of a shared cluster: use TestCluster::start()")
    }

    /// Returns a new number each time.
    pub(crate) fn next_number(&self) -> Result<u32> {
        self.counter.next()
    }
}

/// The cluster's thread: runs its runtime as long as the cluster lives.
fn run_cluster_thread(
    set_up: SetUpFn,
    ready_tx: &mpsc::Sender<Result<Arc<ClusterInner>>>,
    stopped: oneshot::Receiver<()>,
) {
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("cluster-io")
        .enable_all()
        .build()
        .context("cannot build the cluster's runtime");
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return drop(ready_tx.send(Err(error))),
    };
    runtime.block_on(async {
        match set_up(Handle::current()).await {
            Err(error) => drop(ready_tx.send(Err(error))),
            Ok(inner) => {
                ready_tx.send(Ok(Arc::clone(&inner))).ok();
                // An error means that the sender was dropped, which is the signal.
                stopped.await.ok();
                if let Some(plane) = &inner.control_plane {
                    plane.kill_all().await;
                }
                inner.resources.end();
            }
        }
    });
}

async fn set_up(handle: Handle) -> Result<Arc<ClusterInner>> {
    let resources = ClusterResources::claim()?;
    // A node reaches the API server at the wire's end on this machine.
    let users = ClusterUsers::new(
        resources.state().join("users"),
        &[resources.server_address(), resources.uplink_address()],
    )?;
    let plane = ControlPlane::start(&resources, &users).await.inspect_err(|_| resources.keep_logs())?;
    Ok(Arc::new(ClusterInner::new(handle, resources, Some(plane), users)?))
}

/// Joins the cluster of another process.
fn join(handle: Handle, key: &str) -> Result<Arc<ClusterInner>> {
    let resources = ClusterResources::join(key)?;
    let users = ClusterUsers::join(resources.state().join("users"), &resources.base_state().join("users"))?;
    Ok(Arc::new(ClusterInner::new(handle, resources, None, users)?))
}
