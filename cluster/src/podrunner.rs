//! Scheduler and kubelet for nodes that tests make up: Pods become processes of this machine.
//!
//! A runner looks after the Pods of its namespaces on nodes of its own, so tests do not take each other's devices. It binds
//! Pods as the scheduler does (`schedule`), and then each has a worker that does as a kubelet does (`pod`): volumes, init
//! containers and sidecars in order, probes, restarts with pauses, grace periods, and the status with its conditions. Each Pod
//! has an address of its own in 127.0.0.0/8. Unlike a kubelet it can be told to misbehave: nodes are cut off, Pods frozen,
//! objects deleted under running processes.
//!
//! What it does not have: file systems, users, limits and networks of their own; images (a name stands for a program);
//! Services (nothing may have a loopback address behind a Service); affinity between Pods, spreading, preemption;
//! `resourceFieldRef`, gRPC and HTTPS probes, ephemeral containers, `activeDeadlineSeconds`, volumes that are devices. Where a
//! Pod cannot run without, an event says so and the Pod waits.

use std::{collections::BTreeMap, fs, sync::Arc};

use anyhow::{Context as _, Result};
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

use crate::{Namespace, TestCluster, resources::PART_MARK_ENV};

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

/// Nodes are made before the test begins, and few later.
const COMMAND_QUEUE_LENGTH: usize = 8;

/// How a runner is made.
pub struct PodRunnerBuilder<'a> {
    namespaces: Vec<&'a Namespace>,
    nodes: Vec<NodeSpec>,
    images: BTreeMap<String, PodImage>,
    restart_backoff: RestartBackoff,
}

/// A runner. Dropped, it ends the processes of all its Pods at once, whatever becomes of their objects.
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

    /// Pods of this namespace as well.
    #[must_use]
    pub fn namespace(mut self, namespace: &'a Namespace) -> Self {
        self.namespaces.push(namespace);
        self
    }

    /// What this name of an image stands for.
    #[must_use]
    pub fn image(mut self, name: &str, image: PodImage) -> Self {
        self.images.insert(name.to_owned(), image);
        self
    }

    /// Other pauses before restarts than a kubelet's.
    #[must_use]
    pub fn restart_backoff(mut self, pauses: RestartBackoff) -> Self {
        self.restart_backoff = pauses;
        self
    }

    /// Registers the nodes and begins.
    ///
    /// # Errors
    /// Those of the API server.
    pub async fn start(self) -> Result<PodRunner> {
        let first = self.namespaces.first().context("a runner needs a namespace")?;
        let inner = Arc::clone(first.inner());
        let name = format!("{}-{}", first.name(), inner.next_number()?);
        let namespaces = self.namespaces.iter().map(|namespace| namespace.name().to_owned()).collect();
        let (nodes, images, pauses) = (self.nodes, self.images, self.restart_backoff);
        let home = Arc::clone(&inner);
        let started = async move {
            let shared = Arc::new(RunnerContext::new(inner, name, namespaces, images, pauses).await?);
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
    /// For the Pods of this namespace.
    pub fn builder(namespace: &Namespace) -> PodRunnerBuilder<'_> {
        PodRunnerBuilder {
            namespaces: vec![namespace],
            nodes: Vec::new(),
            images: BTreeMap::new(),
            restart_backoff: RestartBackoff::default(),
        }
    }

    /// One more node.
    ///
    /// # Errors
    /// Those of the API server.
    pub async fn add_node(&self, spec: NodeSpec) -> Result<Arc<RunningNode>> {
        let shared = Arc::clone(&self.context);
        let name = format!("{}-{}", shared.name, spec.name);
        let node = Arc::new(RunningNode::new(name, shared.next_address(), &spec));
        let made = Arc::clone(&node);
        let home = Arc::clone(&shared.inner);
        home.on_cluster_runtime(async move {
            made.register(&shared.client, &shared.name, &spec).await?;
            lock(&shared.nodes).insert(spec.name.clone(), made);
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

    /// The node that the test calls so.
    ///
    /// # Panics
    /// When there is none.
    pub fn node(&self, name: &str) -> Arc<RunningNode> {
        lock(&self.context.nodes).get(name).cloned().unwrap_or_else(|| panic!("there is no node {name}"))
    }

    /// Cuts the node off from the API server: it hears and says nothing, its lease runs out, and its processes go on.
    pub fn partition(&self, node: &str) {
        self.node(node).set_link(NodeLink::Cut);
    }

    /// Has what the node says of Pods come late: all of it at once when it is healed. It hears of Pods, and its lease is renewed.
    pub fn delay_reports(&self, node: &str) {
        self.node(node).set_link(NodeLink::ReportsDelayed);
    }

    /// Ends either.
    pub fn heal(&self, node: &str) {
        self.node(node).set_link(NodeLink::Connected);
    }

    /// What this image's name stands for from the next start of a container on.
    pub fn set_image(&self, name: &str, image: PodImage) {
        lock(&self.context.images).insert(name.to_owned(), image);
    }

    /// Living processes of the Pod with their containers' names.
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

    /// Sends this to all processes of the Pod: `SIGSTOP` freezes it, `SIGKILL` is a crash.
    pub fn signal(&self, pod: &Pod, signal: Signal) {
        for (_, pid) in self.processes(pod) {
            // One that has gone meanwhile has nothing to be told.
            signal::kill(Pid::from_raw(pid), signal).ok();
        }
    }

    /// Deletes the Pod's object at once. Its processes are told to end only then, and its devices are free before they have.
    ///
    /// # Errors
    /// Those of the API server.
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

    /// What this run of a container wrote; the first is 0.
    ///
    /// # Errors
    /// When there was no such run.
    pub fn log(&self, pod: &Pod, container: &str, run: u32) -> Result<String> {
        let folder = self.context.log_folder(&pod.namespace().unwrap_or_default(), &pod.name_any());
        let path = folder.join(format!("{container}.{run}.log"));
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }
}

impl Drop for PodRunner {
    fn drop(&mut self) {
        // With the keeper go the workers, and with each the only ones who could signal its processes, which ends those.
        self.task.abort();
        let shared = Arc::clone(&self.context);
        // Nobody waits for it: a node without a kubelet only gives the controllers something to do.
        self.context.inner.handle.spawn(async move {
            let nodes: Api<Node> = Api::all(shared.client.clone());
            let ours = ListParams::default().labels(&format!("{}={}", node::RUNNER_LABEL, shared.name));
            nodes.delete_collection(&DeleteParams::default(), &ours).await.ok()
        });
    }
}

impl TestCluster {
    /// A Pod runner for this namespace.
    pub fn podrunner<'a>(&self, namespace: &'a Namespace) -> PodRunnerBuilder<'a> {
        PodRunner::builder(namespace)
    }
}
