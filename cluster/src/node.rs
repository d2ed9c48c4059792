//! A node with a real kubelet: containerd and runc of the distribution's packages, and Pods in containers.
//!
//! ```text
//!   this machine                                  the node: namespaces of its own      (node/machine)
//!   kube-apiserver 127.N.0.1 ◀── Link 198.18.N.1 ══ wire ══ 198.18.N.2 kubelet         (node/kubelet)
//!   kube-scheduler                                             containerd, CNI         (node/runtime)
//!   test ───────────────────────── route ──────────▶ 198.19.N.* Pods
//! ```
//!
//! Tests reach Pods at their addresses, and a Pod reaches what listens on this machine at [`KubeletNode::host_address`]. Images are the
//! archives that `images/build` makes of our programs; nothing is ever pulled. Accelerators are a number in the node's status:
//! the scheduler counts them, and which ones a Pod has its own spec must say.
//!
//! A cluster has either one node or Pod runners: the node's scheduler would bind Pods to their nodes as well. It takes root,
//! cgroups and the packages that `requirements` names. Nothing is left of it when it is dropped or the test's process ends.

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

use crate::{ClusterInner, Link, TestCluster, server::ServerProcess, wait};

mod cgroup;
mod kubelet;
mod machine;
mod requirements;
mod runtime;
mod scheduler;

use self::{cgroup::PodsCgroup, machine::NodeMachine};

/// What Pods call the image of this program of ours.
#[must_use]
pub fn image(program: &str) -> String {
    runtime::image_name(program)
}

/// What a Pod asks for.
const ACCELERATOR_RESOURCE: &str = "nvidia.com/gpu";

/// How a node is made.
pub struct NodeBuilder<'a> {
    cluster: &'a TestCluster,
    archives: PathBuf,
    images: Vec<String>,
    accelerators: u32,
}

/// A node that is ready. Dropped, it ends with all its Pods, at once.
pub struct KubeletNode {
    inner: Arc<ClusterInner>,
    name: String,
    link: Link,
    log: PathBuf,
    processes: Option<NodeProcesses>,
}

/// What runs, in the order in which it ends.
struct NodeProcesses {
    scheduler: ServerProcess,
    kubelet: ServerProcess,
    containerd: ServerProcess,
    machine: NodeMachine,
}

impl NodeBuilder<'_> {
    /// Pods can use this program's image, which is `PROGRAM.tar` of the archives, by [`image`]'s name.
    #[must_use]
    pub fn image(mut self, program: &str) -> Self {
        self.images.push(program.to_owned());
        self
    }

    /// The node says that it has so many `nvidia.com/gpu`.
    #[must_use]
    pub fn accelerators(mut self, count: u32) -> Self {
        self.accelerators = count;
        self
    }

    /// Starts it; returns when its object says that it is ready.
    ///
    /// # Errors
    /// Says what this machine lacks; or which server did not start, with the end of its log.
    pub async fn start(self) -> Result<KubeletNode> {
        requirements::check()?;
        let inner = Arc::clone(&self.cluster.inner);
        let Self { archives, images, accelerators, .. } = self;
        let home = Arc::clone(&inner);
        // What is started belongs to the runtime that waits for it.
        inner
            .on_cluster_runtime(
                async move { KubeletNode::start(home, &archives, images, accelerators).await },
            )
            .await
    }
}

impl KubeletNode {
    /// A node for this cluster, with archives of images from this folder. `rouse-pause.tar` must be among them.
    pub fn builder<'a>(cluster: &'a TestCluster, archives: &Path) -> NodeBuilder<'a> {
        NodeBuilder { cluster, archives: archives.to_owned(), images: Vec::new(), accelerators: 0 }
    }

    async fn start(
        inner: Arc<ClusterInner>,
        archives: &Path,
        images: Vec<String>,
        accelerators: u32,
    ) -> Result<Self> {
        let ground = &inner.resources;
        let (name, folder) = (ground.veth_name(), ground.state().join("node"));
        let log = ground.logs().join("node");
        let machine = NodeMachine::start(ground, &folder, &log, &name).await?;
        let started = async {
            let link = Link::open(Arc::clone(&inner), ground.uplink_address()).await?;
            let containerd = runtime::start(ground, &machine, &folder).await?;
            for image in images.iter().map(String::as_str).chain([runtime::PAUSE_PROGRAM]) {
                runtime::import(&machine, archives, image).await?;
            }
            let kubelet = kubelet::start(&inner, &machine, &folder, &name, link.address()).await?;
            set_accelerators(&inner, &name, accelerators).await?;
            // The last, so that it binds no Pod to a node that does not come to be.
            let scheduler = scheduler::start(&inner)?;
            anyhow::Ok((link, scheduler, kubelet, containerd))
        };
        match started.await {
            Ok((link, scheduler, kubelet, containerd)) => {
                let parts = Some(NodeProcesses { scheduler, kubelet, containerd, machine });
                Ok(Self { inner, name, link, log, processes: parts })
            }
            Err(error) => {
                machine.end().await;
                Err(error)
            }
        }
    }

    /// Its object's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This machine, as its Pods know it.
    pub fn host_address(&self) -> Ipv4Addr {
        self.inner.resources.uplink_address()
    }

    /// Its kubelet's way to the API server.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Where Pods on it reach the API server, with a certificate for that address.
    pub fn api_server(&self) -> SocketAddr {
        self.link.address()
    }

    /// The processes of this Pod's containers, as this machine knows them, the one that holds its network included.
    ///
    /// # Errors
    /// When the cgroups cannot be read.
    pub fn processes(&self, pod: &Pod) -> Result<Vec<i32>> {
        PodsCgroup::of_cluster(&self.inner.resources).processes(&pod.uid().context("a Pod without a uid")?)
    }

    /// What the container runtime has written of this container's `restart`th life: a line each of time, stream, `F` (or `P`
    /// for a part of a line) and text.
    ///
    /// # Errors
    /// When there is no such log.
    pub fn log(&self, pod: &Pod, container: &str, restart: u32) -> Result<String> {
        let (namespace, uid) = (pod.namespace().unwrap_or_default(), pod.uid().unwrap_or_default());
        let of_pod = format!("{namespace}_{}_{uid}", pod.name_any());
        let path = self.log.join("pods").join(of_pod).join(container).join(format!("{restart}.log"));
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }
}

/// Says that the node has so many, as a device plugin would; no plugin is there to say which of them a Pod has. Returns when the
/// kubelet has seen it, and so the scheduler can count with it.
async fn set_accelerators(inner: &ClusterInner, name: &str, accelerators: u32) -> Result<()> {
    let nodes: Api<Object> = Api::all(inner.users.client(inner.users.admin(), inner.api_server).await?);
    let status = json!({ "status": { "capacity": { ACCELERATOR_RESOURCE: accelerators.to_string() } } });
    let patch = Patch::Merge(status);
    nodes.patch_status(name, &PatchParams::default(), &patch).await.context("the node's accelerators")?;
    let counted = |node: &Object| {
        let status = node.status.iter().flat_map(|status| &status.allocatable);
        status
            .filter_map(|all| all.get(ACCELERATOR_RESOURCE))
            .any(|count| count.0 == accelerators.to_string())
    };
    wait::until(&nodes, name, "its accelerators", |node| node.as_ref().is_some_and(counted)).await?;
    Ok(())
}

impl Drop for KubeletNode {
    fn drop(&mut self) {
        let Some(mut parts) = self.processes.take() else { return };
        let (told, ended) = mpsc::channel::<()>();
        self.inner.handle.spawn(async move {
            let _told = told;
            for server in [&mut parts.scheduler, &mut parts.kubelet, &mut parts.containerd] {
                server.kill().await;
            }
            parts.machine.end().await;
        });
        // An error is the end of the task, which is what is waited for; a runtime that has ended ran the watchdog.
        ended.recv().ok();
    }
}
