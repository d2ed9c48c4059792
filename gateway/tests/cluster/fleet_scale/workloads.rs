//! Plays the controllers of Deployments, the scheduler and all kubelets, with objects instead of processes.
//!
//! A Deployment gets as many Pods as it asks for, each on a node and an accelerator of its pool, with an address and a
//! stub.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, atomic::Ordering::Relaxed},
};

use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
    core::PartialObjectMeta,
    runtime::{WatchStreamExt as _, watcher},
};
use rouse_cluster::{Namespace, wait::WAIT_TIMEOUT};
use tokio::{
    sync::{mpsc, watch},
    task::{JoinHandle, JoinSet},
    time::{Instant, timeout},
};

use super::{
    pods::{AcceleratorSlot, status_conditions, unless_gone},
    scaling::WorkloadRunner,
    stub::PodReadiness,
};

/// Reports of stubs that are taken together, and how many of them are written at once.
const REPORTS: usize = 256;
const WRITES_AT_ONCE: usize = 16;

/// Runs until it is dropped.
pub(super) struct Workloads {
    runner: Arc<WorkloadRunner>,
    /// When each Deployment was first seen.
    deployed: watch::Receiver<BTreeMap<String, Instant>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Workloads {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        // The listeners go at once: the next cluster may get these addresses. A lock is poisoned by a test that failed.
        if let Ok(mut state) = self.runner.state.lock() {
            state.running.clear();
        }
    }
}

impl Workloads {
    /// Runs the Deployments of this namespace on these accelerators.
    pub(super) fn start(
        namespace: &Namespace,
        network: u8,
        free: BTreeMap<String, VecDeque<AcceleratorSlot>>,
    ) -> Self {
        #[expect(
            clippy::disallowed_methods,
            reason = "a stub reports from synchronous code, once for each change"
        )]
        let (readiness, reports) = mpsc::unbounded_channel();
        let (seen, deployed) = watch::channel(BTreeMap::new());
        let runner = Arc::new(WorkloadRunner::new(namespace.api(), network, free, readiness));
        let metadata = Api::<PartialObjectMeta<Pod>>::namespaced(namespace.client(), namespace.name());
        let tasks = vec![
            tokio::spawn(follow_deployments(Arc::clone(&runner), namespace.api(), seen)),
            tokio::spawn(follow_pods(Arc::clone(&runner), metadata)),
            tokio::spawn(report_readiness(Arc::clone(&runner), reports)),
        ];
        Self { runner, deployed, tasks }
    }

    /// How many changes of Pods there were so far.
    pub(super) fn pod_events(&self) -> u64 {
        self.runner.events.load(Relaxed)
    }

    /// How many Deployments there have been.
    pub(super) fn deployments(&self) -> usize {
        self.deployed.borrow().len()
    }

    /// Waits until there have been this many Deployments.
    pub(super) async fn until_deployments(&self, count: usize) {
        let mut deployed = self.deployed.clone();
        let seen = timeout(WAIT_TIMEOUT, deployed.wait_for(|all| all.len() >= count)).await;
        assert!(seen.is_ok(), "{} of {count} Deployments", self.deployments());
    }

    /// Waits until this model has a Deployment, and returns when it was seen.
    pub(super) async fn until_deployed(&self, model: &str) -> Instant {
        let beginning = format!("{model}-");
        let find = |all: &BTreeMap<String, Instant>| {
            all.iter().find(|(name, _)| name.starts_with(&beginning)).map(|(_, at)| *at)
        };
        let mut deployed = self.deployed.clone();
        let seen = timeout(WAIT_TIMEOUT, deployed.wait_for(|all| find(all).is_some())).await;
        let all = seen.unwrap_or_else(|_| panic!("{model} has no Deployment")).unwrap().clone();
        find(&all).unwrap()
    }
}

/// Starts a task for each Deployment, and passes on its changes.
async fn follow_deployments(
    runner: Arc<WorkloadRunner>,
    api: Api<Deployment>,
    seen: watch::Sender<BTreeMap<String, Instant>>,
) {
    let mut scalers = JoinSet::new();
    let events = watcher(api, watcher::Config::default()).default_backoff().applied_objects();
    let mut events = events.boxed();
    while let Some(event) = events.next().await {
        // An error is one of the connection, from which the watcher recovers.
        let Ok(deployment) = event else { continue };
        let name = deployment.name_any();
        seen.send_if_modified(|seen| {
            let is_new = !seen.contains_key(&name);
            seen.entry(name.clone()).or_insert_with(Instant::now);
            is_new
        });
        let deployment = Arc::new(deployment);
        let mut state = runner.state();
        if let Some(known) = state.deployments.get(&name) {
            known.send_replace(deployment);
        } else {
            let (desired, desired_rx) = watch::channel(deployment);
            state.deployments.insert(name, desired);
            scalers.spawn(keep_scaled(Arc::clone(&runner), desired_rx));
        }
    }
}

/// Gives one Deployment its Pods.
async fn keep_scaled(runner: Arc<WorkloadRunner>, mut desired: watch::Receiver<Arc<Deployment>>) {
    loop {
        let deployment = desired.borrow_and_update().clone();
        runner.scale(&deployment).await;
        if desired.changed().await.is_err() {
            return;
        }
    }
}

/// Ends Pods that are deleted, as a kubelet does.
async fn follow_pods(runner: Arc<WorkloadRunner>, api: Api<PartialObjectMeta<Pod>>) {
    let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
    while let Some(event) = events.next().await {
        let Ok(event) = event else { continue };
        match event {
            watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) => {
                runner.events.fetch_add(1, Relaxed);
                if pod.metadata.deletion_timestamp.is_some() {
                    runner.end(&pod.name_any()).await;
                }
            }
            watcher::Event::Delete(pod) => {
                runner.events.fetch_add(1, Relaxed);
                runner.forget(&pod.name_any());
            }
            watcher::Event::Init | watcher::Event::InitDone => {}
        }
    }
}

/// Reports what probes of the stubs find, as kubelets do.
async fn report_readiness(runner: Arc<WorkloadRunner>, mut reports: mpsc::UnboundedReceiver<PodReadiness>) {
    let mut taken = Vec::new();
    while reports.recv_many(&mut taken, REPORTS).await > 0 {
        // Each Pod's kubelet reports on its own. Of several reports of one Pod, the last one counts.
        let latest: BTreeMap<String, bool> = taken.drain(..).collect();
        let writes =
            stream::iter(latest).map(|(pod, ready)| write_readiness(Arc::clone(&runner), pod, ready));
        writes.buffer_unordered(WRITES_AT_ONCE).collect::<()>().await;
    }
}

async fn write_readiness(runner: Arc<WorkloadRunner>, pod: String, ready: bool) {
    let patch = Patch::Strategic(status_conditions(ready));
    unless_gone(runner.pods.patch_status(&pod, &PatchParams::default(), &patch).await);
}
