//! What cluster tests run in: a real Kubernetes control plane on loopback, and Pods that are processes.
//!
//! Nothing about Kubernetes is mocked where the real thing can run. etcd, kube-apiserver and kube-controller-manager are those
//! that `cluster/build` builds from pinned Go modules, as child processes; what schedules Pods and runs them is ours
//! ([`podrunner`]), since a kubelet needs root, cgroups and a container runtime, and cannot be told to misbehave. Where those
//! are, [`node`] has a real one.
//!
//! ```text
//!   test ──▶ Cluster::shared() ── etcd, kube-apiserver, kube-controller-manager     (control_plane, or another process's)
//!              ├─ namespace("name")      one of its own for each test               (namespace)
//!              ├─ client(user)           admin, certificates, service accounts      (user)
//!              ├─ link()                 a way to the API server that can be cut    (link)
//!              ├─ calls(account)         what it was asked for, by whom             (calls)
//!              ├─ PodRunner              scheduler and kubelet for its own nodes    (podrunner)
//!              └─ Node                   or a real kubelet, with containers         (node)
//! ```
//!
//! A cluster has a runtime of its own, in a thread of its own: tests come and go with theirs, and whatever blocks one of them
//! stops neither the servers nor the Pods. Every process carries the cluster's mark in its environment, and a watchdog outside
//! ends all that carry it when the test's process is gone, also when it was killed (`ground`).
//!
//! This is a tool of tests: errors are for the person who reads the test's output, and so are `anyhow`'s.

use std::{
    env,
    fs::File,
    io::Write as _,
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
    control_plane::ServerRole,
    link::{Link, LinkMode, LinkTraffic},
    namespace::Namespace,
    node::KubeletNode,
    podrunner::PodRunner,
    user::ClusterUser,
};

/// The environment variable that names a cluster of another process, which then [`TestCluster::shared`] is.
pub const SHARED_CLUSTER_ENV: &str = "TEST_CLUSTER_SHARED";

/// What makes or joins a cluster, in its own runtime.
type SetUpFn = Box<dyn FnOnce(Handle) -> Pin<Box<dyn Future<Output = Result<Arc<ClusterInner>>>>> + Send>;

/// A cluster that runs. Dropped, it ends all that it started, and waits for that.
pub struct TestCluster {
    inner: Arc<ClusterInner>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

pub(crate) struct ClusterInner {
    pub(crate) handle: Handle,
    pub(crate) resources: ClusterResources,
    pub(crate) api_server: SocketAddr,
    /// The servers, where they belong to this process.
    control_plane: Option<ControlPlane>,
    pub(crate) users: ClusterUsers,
    counter: SharedCounter,
}

impl TestCluster {
    /// The cluster that all tests share: the one that [`SHARED_CLUSTER_ENV`] names, else one that the first test of this process starts,
    /// and that ends with the process.
    ///
    /// # Panics
    /// When there is none.
    pub fn shared() -> &'static Self {
        static CLUSTER: OnceLock<TestCluster> = OnceLock::new();
        let shared = || match env::var(SHARED_CLUSTER_ENV) {
            Ok(key) => Self::spawn(move |handle| Box::pin(async move { join(handle, &key) })),
            Err(_) => Self::start(),
        };
        CLUSTER.get_or_init(|| shared().unwrap_or_else(|error| panic!("no test cluster: {error:#}")))
    }

    /// Starts one; returns when its API server is ready.
    ///
    /// # Errors
    /// When the binaries are not built (`make cluster`), or a server ends or does not get ready; the error has its last words.
    pub fn start() -> Result<Self> {
        Self::spawn(|handle| Box::pin(set_up(handle)))
    }

    fn spawn(
        set_up: impl FnOnce(Handle) -> Pin<Box<dyn Future<Output = Result<Arc<ClusterInner>>>>> + Send + 'static,
    ) -> Result<Self> {
        let set_up: SetUpFn = Box::new(set_up);
        let (told, outcome) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new()
            .name("cluster".to_owned())
            .spawn(move || run_cluster_thread(set_up, &told, stopped))?;
        let inner = outcome.recv().context("the cluster's thread ended")??;
        Ok(Self { inner, stop: Some(stop), thread: Some(thread) })
    }

    /// Where its API server listens. It stays the same when that is restarted.
    pub fn api_server(&self) -> SocketAddr {
        self.inner.api_server
    }

    /// What [`SHARED_CLUSTER_ENV`] must be for other processes to use this cluster.
    pub fn key(&self) -> String {
        self.inner.resources.key()
    }

    /// Whether this is done already in this cluster. If not, whoever asks does it, and others wait here until `work` is done.
    ///
    /// # Errors
    /// When the cluster's folder cannot be written.
    pub async fn once(&self, what: &str, work: impl Future<Output = ()>) -> Result<()> {
        let path = self.inner.resources.base_state().join(format!("once-{what}"));
        let lock = File::options().write(true).create(true).truncate(false).open(&path)?;
        let waiting = lock.try_clone()?;
        self.inner
            .on_cluster_runtime(async move { tokio::task::spawn_blocking(move || waiting.lock()).await })
            .await??;
        if lock.metadata()?.len() == 0 {
            work.await;
            (&lock).write_all(b"done")?;
        }
        Ok(lock.unlock()?)
    }

    /// The pid of this server, while it runs.
    pub async fn pid(&self, role: ServerRole) -> Option<i32> {
        self.inner.control_plane().pid(role).await
    }

    /// Asks this server to end, and returns when it has.
    pub async fn stop_server(&self, role: ServerRole) {
        let inner = Arc::clone(&self.inner);
        self.inner.on_cluster_runtime(async move { inner.control_plane().stop(role).await }).await;
    }

    /// Kills this server, and returns when it is gone.
    pub async fn kill_server(&self, role: ServerRole) {
        let inner = Arc::clone(&self.inner);
        self.inner.on_cluster_runtime(async move { inner.control_plane().kill(role).await }).await;
    }

    /// Starts this server where it does not run; returns when it is ready. What it knew it knows again.
    ///
    /// # Errors
    /// With the end of its log when it does not get ready.
    pub async fn start_server(&self, role: ServerRole) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        self.inner.on_cluster_runtime(async move { inner.control_plane().start_server(role).await }).await
    }

    /// Stops every thread of this server, as a machine does that hangs: connections stay, and nobody answers.
    pub async fn freeze_server(&self, role: ServerRole) {
        self.inner.control_plane().signal(role, Signal::SIGSTOP).await;
    }

    /// Lets it go on.
    pub async fn thaw_server(&self, role: ServerRole) {
        self.inner.control_plane().signal(role, Signal::SIGCONT).await;
    }

    /// Where its logs are. They go when it ends, unless a test of this process panics.
    pub fn logs(&self) -> PathBuf {
        self.inner.resources.logs()
    }

    /// What in its environment says that a process belongs to this cluster: it ends with it, however the test's process ends.
    pub fn mark(&self) -> (&'static str, String) {
        (resources::CLUSTER_MARK_ENV, self.inner.resources.mark())
    }

    /// Every call of this service account that the API server has answered.
    ///
    /// # Errors
    /// When the API server's log of them cannot be read.
    pub fn calls(&self, account: &ClusterUser) -> Result<Vec<AuditedCall>> {
        audit_log::calls_of(&self.inner.resources, account)
    }

    /// A user with a certificate that names this group, and with no rights but what RBAC gives it.
    ///
    /// # Errors
    /// When no certificate can be made.
    pub fn user(&self, name: &str, group: Option<&str>) -> Result<ClusterUser> {
        self.inner.users.issue_user(name, group)
    }

    /// Who may do anything.
    pub fn admin(&self) -> &ClusterUser {
        self.inner.users.admin()
    }

    /// A service account, made where it is missing, with a token for a day.
    ///
    /// # Errors
    /// Those of the API server.
    pub async fn service_account(&self, namespace: &str, name: &str) -> Result<ClusterUser> {
        user::service_account(self.client().await?, namespace, name).await
    }

    /// A client that may do anything, for the runtime that calls.
    ///
    /// # Errors
    /// When the kubeconfig cannot be used.
    pub async fn client(&self) -> Result<kube::Client> {
        self.client_as(self.admin()).await
    }

    /// A client of this user, for the runtime that calls.
    ///
    /// # Errors
    /// When the kubeconfig cannot be used.
    pub async fn client_as(&self, user: &ClusterUser) -> Result<kube::Client> {
        self.inner.users.client(user, self.inner.api_server).await
    }

    /// A kubeconfig for processes, as a file that lives as long as the cluster.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn kubeconfig(&self, user: &ClusterUser) -> Result<PathBuf> {
        self.inner.users.kubeconfig(user, self.inner.api_server)
    }

    /// A new namespace whose name begins like this, with its default service account. Dropped, it is deleted.
    ///
    /// # Errors
    /// Those of the API server.
    pub async fn namespace(&self, name: &str) -> Result<Namespace> {
        Namespace::create(Arc::clone(&self.inner), name).await
    }

    /// A way of its own to the API server, which can be held, slowed and cut.
    ///
    /// # Errors
    /// When no port can be had.
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
        // A thread that panicked has said so.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

impl ClusterInner {
    fn new(
        handle: Handle,
        ground: ClusterResources,
        plane: Option<ControlPlane>,
        users: ClusterUsers,
    ) -> Result<Self> {
        let counter = SharedCounter::open(&ground.base_state().join("counter"))?;
        let api_server = control_plane::api_server_of(&ground);
        Ok(Self { handle, resources: ground, api_server, control_plane: plane, users, counter })
    }

    /// Runs this where the cluster lives: what it starts there outlives the caller's runtime.
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
    /// When they belong to another process: a test that stops or freezes one would do so to all others.
    fn control_plane(&self) -> &ControlPlane {
        self.control_plane
            .as_ref()
            .expect("the servers of a shared cluster are not to be touched: take Cluster::start()")
    }

    /// Another number each time.
    pub(crate) fn next_number(&self) -> Result<u32> {
        self.counter.next()
    }
}

/// The thread of a cluster: its runtime runs as long as the cluster.
fn run_cluster_thread(
    set_up: SetUpFn,
    told: &mpsc::Sender<Result<Arc<ClusterInner>>>,
    stopped: oneshot::Receiver<()>,
) {
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("cluster-io")
        .enable_all()
        .build()
        .context("no runtime for the cluster");
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return drop(told.send(Err(error))),
    };
    runtime.block_on(async {
        match set_up(Handle::current()).await {
            Err(error) => drop(told.send(Err(error))),
            Ok(inner) => {
                told.send(Ok(Arc::clone(&inner))).ok();
                // An error here is the sender's end, which is the signal.
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
    let ground = ClusterResources::claim()?;
    // A node knows the API server by the address of its wire's other end.
    let users =
        ClusterUsers::new(ground.state().join("users"), &[ground.server_address(), ground.uplink_address()])?;
    let plane = ControlPlane::start(&ground, &users).await.inspect_err(|_| ground.keep_logs())?;
    Ok(Arc::new(ClusterInner::new(handle, ground, Some(plane), users)?))
}

/// The cluster of another process.
fn join(handle: Handle, key: &str) -> Result<Arc<ClusterInner>> {
    let ground = ClusterResources::join(key)?;
    let users = ClusterUsers::join(ground.state().join("users"), &ground.base_state().join("users"))?;
    Ok(Arc::new(ClusterInner::new(handle, ground, None, users)?))
}
