//! A scheduler and kubelet for fake nodes: Pods become processes of this machine.
//!
//! A runner serves the Pods of its namespaces on its own nodes, so tests do not share devices. It binds Pods like the
//! scheduler (`schedule`). Each Pod then has a worker that acts like a kubelet (`pod`): volumes, init containers and
//! sidecars in order, probes, restarts with backoff, grace periods, and the status with its conditions. Each Pod has
//! its own address in 127.0.0.0/8. Unlike a kubelet, a runner can misbehave on command: it partitions nodes, freezes
//! Pods, and deletes objects under running processes. A node may get its devices from real device plugins, through a
//! [`DeviceManager`].
//!
//! Not supported: separate file systems, users, limits and networks; images (a name stands for a program); Services (no
//! loopback address may be a Service's endpoint); required affinity between Pods, spreading, preemption;
//! `resourceFieldRef`, gRPC and HTTPS probes, ephemeral containers, `activeDeadlineSeconds`, volumes that are devices.
//! If a Pod cannot run without one of these, an event says so and the Pod waits.

use std::{collections::BTreeMap, fs, sync::Arc};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams},
};
use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use rouse_net::process::table;
use tokio::{sync::mpsc, task::JoinHandle};

use crate::{Namespace, TestCluster, device_manager::DeviceManager, resources::PART_MARK_ENV};

mod container;
mod context;
mod launch;
mod node;
mod pod;
mod probe;
mod run_loop;
mod schedule;
mod status;
mod volume;

pub use self::{
    container::RestartBackoff,
    launch::PodImage,
    node::{NodeSpec, RunningNode},
};
use self::{
    context::{RunnerContext, lock},
    node::NodeLink,
};

/// Tests create most nodes before they begin.
const COMMAND_QUEUE_LENGTH: usize = 8;

/// Configures a runner.
pub struct PodRunnerBuilder<'a> {
    namespaces: Vec<&'a Namespace>,
    nodes: Vec<NodeSpec>,
    images: BTreeMap<String, PodImage>,
    restart_backoff: RestartBackoff,
    played_label: Option<String>,
}

/// A Pod runner. Dropping it ends the processes of all its Pods at once, whatever becomes of their objects.
pub struct PodRunner {
    context: Arc<RunnerContext>,
    command_tx: mpsc::Sender<run_loop::RunnerCommand>,
    task: JoinHandle<()>,
}

impl<'a> PodRunnerBuilder<'a> {
    #[must_use]
    pub fn node(mut self, node: NodeSpec) -> Self {
        self.nodes.push(node);
        self
    }

    /// Also serves the Pods of this namespace.
    #[must_use]
    pub fn namespace(mut self, namespace: &'a Namespace) -> Self {
        self.namespaces.push(namespace);
        self
    }

    /// Maps an image name to a program.
    #[must_use]
    pub fn image(mut self, name: &str, image: PodImage) -> Self {
        self.images.insert(name.to_owned(), image);
        self
    }

    /// Replaces the kubelet's pauses before restarts.
    #[must_use]
    pub fn restart_backoff(mut self, pauses: RestartBackoff) -> Self {
        self.restart_backoff = pauses;
        self
    }

    /// Binds Pods with this label, and leaves their statuses and their end to the test.
    #[must_use]
    pub fn played(mut self, label: &str) -> Self {
        self.played_label = Some(label.to_owned());
        self
    }

    /// Registers the nodes and starts the runner.
    ///
    /// # Errors
    /// Errors of the API server.
    pub async fn start(self) -> Result<PodRunner> {
        let first = self.namespaces.first().context("a Pod runner needs at least one namespace")?;
        let inner = Arc::clone(first.inner());
        let name = format!("{}-{}", first.name(), inner.next_number()?);
        let namespaces = self.namespaces.iter().map(|namespace| namespace.name().to_owned()).collect();
        let (nodes, images, pauses) = (self.nodes, self.images, self.restart_backoff);
        let played = self.played_label;
        let home = Arc::clone(&inner);
        let started = async move {
            let shared = Arc::new(RunnerContext::new(inner, name, namespaces, images, pauses, played).await?);
            let (orders, received) = mpsc::channel(COMMAND_QUEUE_LENGTH);
            let task = tokio::spawn(run_loop::run(Arc::clone(&shared), received));
            anyhow::Ok(PodRunner { context: shared, command_tx: orders, task })
        };
        let runner = home.on_cluster_runtime(started).await?;
        for node in nodes {
            runner.add_node(node).await?;
        }
        Ok(runner)
    }
}

impl PodRunner {
    /// A runner for the Pods of this namespace.
    pub fn builder(namespace: &Namespace) -> PodRunnerBuilder<'_> {
        PodRunnerBuilder {
            namespaces: vec![namespace],
            nodes: Vec::new(),
            images: BTreeMap::new(),
            restart_backoff: RestartBackoff::default(),
            played_label: None,
        }
    }

    /// Adds a node.
    ///
    /// # Errors
    /// Errors of the API server.
    pub async fn add_node(&self, spec: NodeSpec) -> Result<Arc<RunningNode>> {
        let shared = Arc::clone(&self.context);
        let name = format!("{}-{}", shared.name, spec.name);
        let node = Arc::new(RunningNode::new(name, shared.next_address(), &spec));
        let registered = Arc::clone(&node);
        let home = Arc::clone(&shared.inner);
        home.on_cluster_runtime(async move {
            registered.register(&shared.client, &shared.name, &spec).await?;
            lock(&shared.nodes).insert(spec.name.clone(), registered);
            anyhow::Ok(())
        })
        .await?;
        self.command_tx
            .send(run_loop::RunnerCommand::RenewLease(Arc::clone(&node)))
            .await
            .ok()
            .context("the runner has ended")?;
        Ok(node)
    }

    /// Returns the node with this name in the test.
    ///
    /// # Panics
    /// There is no such node.
    pub fn node(&self, name: &str) -> Arc<RunningNode> {
        lock(&self.context.nodes).get(name).cloned().unwrap_or_else(|| panic!("there is no node {name}"))
    }

    /// Makes the node offer what device plugins register with this device manager, which then allocates it to Pods.
    ///
    /// # Errors
    /// The node has a device manager, or the runner has ended.
    ///
    /// # Panics
    /// There is no such node.
    pub async fn use_device_manager(&self, node: &str, manager: Arc<DeviceManager>) -> Result<()> {
        let node = self.node(node);
        ensure!(node.set_device_manager(manager), "the node {} has a device manager", node.name());
        let command = run_loop::RunnerCommand::ReportDevices(node);
        self.command_tx.send(command).await.ok().context("the runner has ended")
    }

    /// Partitions the node from the API server: it receives and sends nothing, its lease expires, and its processes go
    /// on.
    pub fn partition(&self, node: &str) {
        self.node(node).set_link(NodeLink::Cut);
    }

    /// Delays the node's Pod reports until [`Self::heal`], which sends them all at once. The node still receives Pods
    /// and renews its lease.
    pub fn delay_reports(&self, node: &str) {
        self.node(node).set_link(NodeLink::ReportsDelayed);
    }

    /// Ends a partition or a delay.
    pub fn heal(&self, node: &str) {
        self.node(node).set_link(NodeLink::Connected);
    }

    /// Changes the program of an image name, from the next container start on.
    pub fn set_image(&self, name: &str, image: PodImage) {
        lock(&self.context.images).insert(name.to_owned(), image);
    }

    /// Returns the Pod's live processes with their containers' names.
    pub fn processes(&self, pod: &Pod) -> Vec<(String, i32)> {
        let prefix = self.context.part_mark(&pod.uid().unwrap_or_default(), "", 0);
        let prefix = prefix.trim_end_matches("/0").to_owned();
        let container = |pid| {
            let mark = table::env_value(pid, PART_MARK_ENV)?;
            let (name, _) = mark.strip_prefix(&prefix)?.split_once('/')?;
            Some((name.to_owned(), pid))
        };
        table::pids().filter_map(container).collect()
    }

    /// Sends a signal to all processes of the Pod: `SIGSTOP` freezes it, `SIGKILL` is a crash.
    pub fn signal(&self, pod: &Pod, signal: Signal) {
        for (_, pid) in self.processes(pod) {
            // The process may have ended meanwhile.
            signal::kill(Pid::from_raw(pid), signal).ok();
        }
    }

    /// Deletes the Pod's object at once. Its processes get SIGTERM only afterwards, and its devices are free before
    /// they end.
    ///
    /// # Errors
    /// Errors of the API server.
    pub async fn force_delete(&self, pod: &Pod) -> Result<()> {
        let (client, pod) = (self.context.client.clone(), pod.clone());
        let deleted = async move {
            let pods: Api<Pod> = Api::namespaced(client, &pod.namespace().unwrap_or_default());
            let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
            pods.delete(&pod.name_any(), &at_once).await
        };
        self.context.inner.on_cluster_runtime(deleted).await?;
        Ok(())
    }

    /// Returns the output of this run of a container; the first run is 0.
    ///
    /// # Errors
    /// There was no such run.
    pub fn log(&self, pod: &Pod, container: &str, run: u32) -> Result<String> {
        let folder = self.context.log_folder(&pod.namespace().unwrap_or_default(), &pod.name_any());
        let path = folder.join(format!("{container}.{run}.log"));
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }
}

impl Drop for PodRunner {
    fn drop(&mut self) {
        // The run loop owns the workers. With them go all senders of their processes' signals, which ends the
        // processes.
        self.task.abort();
        let shared = Arc::clone(&self.context);
        // Detached cleanup: a node without a kubelet only gives the controllers work.
        self.context.inner.handle.spawn(async move {
            let nodes: Api<Node> = Api::all(shared.client.clone());
            let own_nodes = ListParams::default().labels(&format!("{}={}", node::RUNNER_LABEL, shared.name));
            nodes.delete_collection(&DeleteParams::default(), &own_nodes).await.ok()
        });
    }
}

impl TestCluster {
    /// Returns a builder of a Pod runner for this namespace.
    pub fn podrunner<'a>(&self, namespace: &'a Namespace) -> PodRunnerBuilder<'a> {
        PodRunner::builder(namespace)
    }
}
