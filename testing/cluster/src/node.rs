//! A node with a real kubelet and Pods in containers.
//!
//! containerd and runc come from the distribution's packages.
//!
//! ```text
//!   this machine                                  the node: namespaces of its own      (node/machine)
//!   kube-apiserver 127.N.0.1 ◀── Link 198.18.N.1 ══ wire ══ 198.18.N.2 kubelet         (node/kubelet)
//!   kube-scheduler                                             containerd, CNI         (node/runtime)
//!   agent ────── files and sockets (node/sockets) ───────────▶ device plugins
//!   test ───────────────────────── route ──────────▶ 198.19.N.* Pods
//! ```
//!
//! Tests reach Pods at their addresses, and Pods reach listeners on this machine at [`KubeletNode::host_address`].
//! Images are archives of our programs that `images/build` makes; nothing is pulled but from a test's own registry
//! ([`KubeletNode::start_registry`]). Accelerators are only a number in the node's status: the scheduler counts them,
//! and a Pod's own spec must say which ones it has, unless a plugin assigns them
//! ([`KubeletNode::assign_accelerators`]). Other resources come from device plugins that the test runs on this machine.
//! The node's servers can stop and start again ([`KubeletNode::stop`]).
//!
//! A cluster has either one node or Pod runners, because the node's scheduler would also bind Pods to the runners'
//! nodes. A node needs root, cgroups and the packages that `requirements` lists. It leaves nothing behind when it is
//! dropped or the test's process ends.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{Node as Object, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::sync::Mutex;

use crate::{ClusterInner, Link, TestCluster, wait};

mod accelerators;
mod cgroup;
mod kubelet;
mod machine;
mod processes;
mod registry;
mod requirements;
mod runtime;
mod scheduler;
mod sockets;

pub use self::{accelerators::AcceleratorPlugin, processes::NodeOutage, registry::NodeRegistry};
use self::{
    cgroup::PodsCgroup,
    machine::{NodeEntrance, NodeMachine},
    processes::NodeProcesses,
};

/// Returns the image name of one of our programs.
#[must_use]
pub fn image(program: &str) -> String {
    runtime::image_name(program)
}

/// The resource that Pods request.
const ACCELERATOR_RESOURCE: &str = "nvidia.com/gpu";

/// Configures a node.
pub struct NodeBuilder<'a> {
    cluster: &'a TestCluster,
    archives: PathBuf,
    images: Vec<String>,
    accelerators: u32,
}

/// A ready node. Dropping it ends it and all its Pods at once.
pub struct KubeletNode {
    inner: Arc<ClusterInner>,
    name: String,
    link: Link,
    log: PathBuf,
    machine: NodeEntrance,
    /// `None` once the node has ended.
    processes: Arc<Mutex<Option<NodeProcesses>>>,
}

impl NodeBuilder<'_> {
    /// Makes this program's image available to Pods under [`image`]'s name. The archive is `PROGRAM.tar`.
    #[must_use]
    pub fn image(mut self, program: &str) -> Self {
        self.images.push(program.to_owned());
        self
    }

    /// Sets the number of `nvidia.com/gpu` that the node reports.
    #[must_use]
    pub fn accelerators(mut self, count: u32) -> Self {
        self.accelerators = count;
        self
    }

    /// Starts the node and returns when its object is ready.
    ///
    /// # Errors
    /// This machine lacks a requirement, or a server did not start; the error holds the end of its log.
    pub async fn start(self) -> Result<KubeletNode> {
        requirements::check()?;
        let inner = Arc::clone(&self.cluster.inner);
        let Self { archives, images, accelerators, .. } = self;
        let home = Arc::clone(&inner);
        // Servers belong to the runtime that waits for them.
        inner
            .on_cluster_runtime(
                async move { KubeletNode::start(home, &archives, images, accelerators).await },
            )
            .await
    }
}

impl KubeletNode {
    /// A node of this cluster, with image archives from this folder, which must hold `rouse-pause.tar`.
    pub fn builder<'a>(cluster: &'a TestCluster, archives: &Path) -> NodeBuilder<'a> {
        NodeBuilder { cluster, archives: archives.to_owned(), images: Vec::new(), accelerators: 0 }
    }

    async fn start(
        inner: Arc<ClusterInner>,
        archives: &Path,
        images: Vec<String>,
        accelerators: u32,
    ) -> Result<Self> {
        let resources = &inner.resources;
        let (name, folder) = (resources.veth_name(), resources.state().join("node"));
        let log = resources.logs().join("node");
        let machine = NodeMachine::start(resources, &folder, &log, &name).await?;
        let entrance = machine.entrance();
        let started = async {
            let link = Link::open(Arc::clone(&inner), resources.uplink_address()).await?;
            let containerd = runtime::start(resources, entrance, &folder).await?;
            for image in images.iter().map(String::as_str).chain([runtime::PAUSE_PROGRAM]) {
                runtime::import(entrance, archives, image).await?;
            }
            let kubelet = kubelet::start(&inner, entrance, &folder, &name, link.address()).await?;
            set_accelerators(&inner, &name, accelerators).await?;
            // The scheduler starts last, so that it binds no Pod to a node that fails to start.
            let scheduler = scheduler::start(&inner)?;
            anyhow::Ok((link, scheduler, kubelet, containerd))
        };
        match started.await {
            Ok((link, scheduler, kubelet, containerd)) => {
                let processes = Some(NodeProcesses { scheduler, kubelet, containerd, machine });
                let processes = Arc::new(Mutex::new(processes));
                Ok(Self { inner, name, link, log, machine: entrance, processes })
            }
            Err(error) => {
                machine.end().await;
                Err(error)
            }
        }
    }

    /// The name of the node's object.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This machine's address for the node's Pods.
    pub fn host_address(&self) -> Ipv4Addr {
        self.inner.resources.uplink_address()
    }

    /// The kubelet's link to the API server.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Where the node's Pods reach the API server; its certificate covers this address.
    pub fn api_server(&self) -> SocketAddr {
        self.link.address()
    }

    /// Starts a registry for the node's Pods. `users` are lines of an `htpasswd` file with bcrypt hashes; without users,
    /// everybody may pull and push. The name is unique in the cluster.
    ///
    /// # Errors
    /// The program is missing or does not start; the error holds the end of its log.
    pub async fn start_registry(&self, name: &'static str, users: &str) -> Result<NodeRegistry> {
        let (inner, users) = (Arc::clone(&self.inner), users.to_owned());
        let started = async move {
            let folder = inner.resources.state().join("node");
            NodeRegistry::start(&inner, &folder, name, &users).await
        };
        self.inner.on_cluster_runtime(started).await
    }

    /// Runs a bash script on the node, as root. The first command that fails ends it.
    ///
    /// # Errors
    /// A command failed; the error has the script's output.
    pub async fn run(&self, script: &str) -> Result<()> {
        self.machine.run(script).await
    }

    /// Stops servers of the node, or all of it, and waits for their end.
    ///
    /// # Errors
    /// Processes do not end.
    pub async fn stop(&self, outage: NodeOutage) -> Result<()> {
        let processes = Arc::clone(&self.processes);
        let stopped = async move { present(&mut *processes.lock().await)?.stop(outage).await };
        self.inner.on_cluster_runtime(stopped).await
    }

    /// Starts what was stopped, and returns when the kubelet has reported the node ready again.
    ///
    /// # Errors
    /// A server does not start; the error holds the end of its log.
    pub async fn resume(&self) -> Result<()> {
        let (inner, processes) = (Arc::clone(&self.inner), Arc::clone(&self.processes));
        let name = self.name.clone();
        let resumed = async move { present(&mut *processes.lock().await)?.resume(&inner, &name).await };
        self.inner.on_cluster_runtime(resumed).await
    }

    /// Returns the pids on this machine of the Pod's containers, the pause container included.
    ///
    /// # Errors
    /// The cgroups cannot be read.
    pub fn processes(&self, pod: &Pod) -> Result<Vec<i32>> {
        PodsCgroup::of_cluster(&self.inner.resources).processes(&pod.uid().context("the Pod has no uid")?)
    }

    /// Returns the runtime's log of this container after `restart` restarts. Each line has time, stream, `F` (or `P`
    /// for a partial line) and text.
    ///
    /// # Errors
    /// There is no such log.
    pub fn log(&self, pod: &Pod, container: &str, restart: u32) -> Result<String> {
        let (namespace, uid) = (pod.namespace().unwrap_or_default(), pod.uid().unwrap_or_default());
        let of_pod = format!("{namespace}_{}_{uid}", pod.name_any());
        let path = self.log.join("pods").join(of_pod).join(container).join(format!("{restart}.log"));
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }
}

/// Reports the accelerators in the node's status, as a device plugin would; no plugin assigns them to Pods.
async fn set_accelerators(inner: &ClusterInner, name: &str, accelerators: u32) -> Result<()> {
    let nodes: Api<Object> = Api::all(inner.users.client(inner.users.admin(), inner.api_server).await?);
    let status = json!({ "status": { "capacity": { ACCELERATOR_RESOURCE: accelerators.to_string() } } });
    let patch = Patch::Merge(status);
    nodes
        .patch_status(name, &PatchParams::default(), &patch)
        .await
        .context("cannot write the node's accelerators")?;
    until_counted(&nodes, name, &accelerators.to_string()).await
}

/// Waits until the kubelet has counted this many accelerators, so that the scheduler can use them.
async fn until_counted(nodes: &Api<Object>, name: &str, count: &str) -> Result<()> {
    let is_counted = |node: &Object| {
        let status = node.status.iter().flat_map(|status| &status.allocatable);
        status.filter_map(|all| all.get(ACCELERATOR_RESOURCE)).any(|counted| counted.0 == count)
    };
    wait::until(nodes, name, "its accelerators", |node| node.as_ref().is_some_and(is_counted)).await?;
    Ok(())
}

fn present(processes: &mut Option<NodeProcesses>) -> Result<&mut NodeProcesses> {
    processes.as_mut().context("the node has ended")
}

impl Drop for KubeletNode {
    fn drop(&mut self) {
        let processes = Arc::clone(&self.processes);
        let (done_tx, done_rx) = mpsc::sync_channel::<()>(1);
        self.inner.handle.spawn(async move {
            let _told = done_tx;
            if let Some(processes) = processes.lock().await.take() {
                processes.end().await;
            }
        });
        // An error means that the task has ended. If the runtime has ended, the watchdog has run.
        done_rx.recv().ok();
    }
}
