//! The run loop: watches Pods and nodes, binds unscheduled Pods, and hands the others to their workers.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Binding, Node, ObjectReference, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event, watcher},
    },
};
use serde_json::json;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{self, Instant},
};

use super::{
    RunnerContext,
    node::{NodeLink, RUNNER_LABEL, RunningNode},
    pod::{ObservedPod, PodWorker},
    schedule,
};

/// Delay before a failed binding is retried.
const RETRY_DELAY: Duration = Duration::from_secs(1);

pub(super) enum RunnerCommand {
    /// Renews this node's lease.
    RenewLease(Arc<RunningNode>),
    /// Reports what this node's device plugins offer.
    ReportDevices(Arc<RunningNode>),
}

struct RunLoop {
    context: Arc<RunnerContext>,
    /// By uid.
    pods: BTreeMap<String, Arc<Pod>>,
    /// While a watch restarts: the uids seen so far in each namespace.
    listed: BTreeMap<String, Vec<String>>,
    nodes: BTreeMap<String, Node>,
    /// Nodes of bound Pods, by uid, until their objects show the binding.
    bound: BTreeMap<String, String>,
    worker_txs: BTreeMap<String, watch::Sender<ObservedPod>>,
    tasks: JoinSet<()>,
    retry_at: Option<Instant>,
}

/// Runs until aborted; its workers end with it.
pub(super) async fn run(shared: Arc<RunnerContext>, mut orders: mpsc::Receiver<RunnerCommand>) {
    let client = shared.client.clone();
    let pods = shared.namespaces.clone().into_iter().map(|namespace| {
        let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
        let events = watcher(pods, watcher::Config::default()).default_backoff();
        events.map_ok(move |event| (namespace.clone(), event)).boxed()
    });
    let own_nodes = watcher::Config::default().labels(&format!("{RUNNER_LABEL}={}", shared.name));
    let mut nodes = watcher(Api::<Node>::all(client.clone()), own_nodes).default_backoff().boxed();
    let mut pods = stream::select_all(pods);
    let mut run_loop = RunLoop {
        context: shared,
        pods: BTreeMap::new(),
        listed: BTreeMap::new(),
        nodes: BTreeMap::new(),
        bound: BTreeMap::new(),
        worker_txs: BTreeMap::new(),
        tasks: JoinSet::new(),
        retry_at: None,
    };
    loop {
        let again = run_loop.retry_at;
        tokio::select! {
            // Watches recover by themselves.
            Some(event) = pods.next() => match event {
                Ok((namespace, event)) => run_loop.on_pod(&namespace, event),
                Err(error) => run_loop.context.log_line(&format!("watching Pods failed: {error}")),
            },
            Some(event) = nodes.next() => match event {
                Ok(event) => run_loop.on_node(event),
                Err(error) => run_loop.context.log_line(&format!("watching nodes failed: {error}")),
            },
            Some(command) = orders.recv() => run_loop.execute(command),
            Some(finished) = run_loop.tasks.join_next() => {
                if let Err(error) = finished {
                    run_loop.context.log_line(&format!("a worker failed: {error}"));
                }
            }
            () = time::sleep_until(again.unwrap_or_else(Instant::now)), if again.is_some() => {}
        }
        run_loop.schedule().await;
    }
}

impl RunLoop {
    fn execute(&mut self, command: RunnerCommand) {
        let client = self.context.client.clone();
        match command {
            RunnerCommand::RenewLease(node) => {
                self.tasks.spawn(async move { node.renew_lease(&client).await });
            }
            RunnerCommand::ReportDevices(node) => {
                self.tasks.spawn(async move { node.report_plugin_devices(&client).await });
            }
        }
    }

    fn on_pod(&mut self, namespace: &str, event: Event<Pod>) {
        match event {
            Event::Apply(pod) => self.apply_pod(pod),
            Event::Delete(pod) => self.forget_pod(&pod.uid().unwrap_or_default()),
            Event::Init => drop(self.listed.insert(namespace.to_owned(), Vec::new())),
            Event::InitApply(pod) => {
                self.listed.entry(namespace.to_owned()).or_default().extend(pod.uid());
                self.apply_pod(pod);
            }
            Event::InitDone => {
                let listed = self.listed.remove(namespace).unwrap_or_default();
                let pods_here =
                    self.pods.iter().filter(|(_, pod)| pod.namespace().as_deref() == Some(namespace));
                let missing: Vec<_> =
                    pods_here.map(|(uid, _)| uid.clone()).filter(|uid| !listed.contains(uid)).collect();
                for uid in missing {
                    self.forget_pod(&uid);
                }
            }
        }
    }

    fn on_node(&mut self, event: Event<Node>) {
        match event {
            Event::Apply(node) | Event::InitApply(node) => {
                self.recover(&node);
                self.nodes.insert(node.name_any(), node);
            }
            Event::Delete(node) => drop(self.nodes.remove(&node.name_any())),
            Event::Init | Event::InitDone => {}
        }
    }

    fn apply_pod(&mut self, mut pod: Pod) {
        let uid = pod.uid().unwrap_or_default();
        let spec = pod.spec.get_or_insert_default();
        match &spec.node_name {
            Some(_) => drop(self.bound.remove(&uid)),
            None => spec.node_name = self.bound.get(&uid).cloned(),
        }
        let pod = Arc::new(pod);
        self.pods.insert(uid.clone(), Arc::clone(&pod));
        if let Some(worker_tx) = self.worker_txs.get(&uid) {
            worker_tx.send_replace(Some(pod));
            return;
        }
        if self.context.is_played(&pod) {
            return;
        }
        // A Pod that has ended and is not deleted needs no worker.
        let over = schedule::is_terminal(&pod) && pod.metadata.deletion_timestamp.is_none();
        let Some(node) = self.context.node_of(&pod).filter(|_| !over && !self.bound.contains_key(&uid))
        else {
            return;
        };
        let (worker_tx, pod_rx) = watch::channel(Some(Arc::clone(&pod)));
        self.worker_txs.insert(uid, worker_tx);
        self.tasks.spawn(PodWorker::new(Arc::clone(&self.context), node, pod).run(pod_rx));
    }

    fn forget_pod(&mut self, uid: &str) {
        self.pods.remove(uid);
        self.bound.remove(uid);
        if let Some(worker_tx) = self.worker_txs.remove(uid) {
            // A worker that has ended receives nothing.
            worker_tx.send_replace(None);
        }
    }

    /// The controllers gave this node up although it runs.
    fn recover(&mut self, node: &Node) {
        let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let ready = conditions
            .filter(|condition| condition.type_ == "Ready")
            .any(|condition| condition.status == "True");
        let name = node.name_any();
        let own_node =
            super::lock(&self.context.nodes).values().find(|own_node| own_node.name() == name).cloned();
        let Some(own_node) = own_node.filter(|_| !ready) else { return };
        let shared = Arc::clone(&self.context);
        let mut link = own_node.link();
        self.tasks.spawn(async move {
            if link.wait_for(|link| *link != NodeLink::Cut).await.is_ok()
                && let Err(error) = own_node.recover(&shared.client).await
            {
                shared.log_line(&format!("cannot report {} ready: {error}", own_node.name()));
            }
        });
    }

    /// Binds the Pods that fit, and reports why the others do not.
    async fn schedule(&mut self) {
        self.retry_at = None;
        let mut waiting: Vec<_> = self.pods.values().filter(|pod| is_waiting(pod)).cloned().collect();
        waiting.sort_by_key(|pod| (pod.metadata.creation_timestamp.clone(), pod.name_any()));
        for pod in waiting {
            let placed: Vec<&Pod> =
                self.pods.values().map(AsRef::as_ref).filter(|pod| !is_waiting(pod)).collect();
            let done = match schedule::choose_node(&pod, self.nodes.values(), &placed) {
                Ok(node) => self.bind(&pod, &node).await,
                Err(reason) => self.mark_unschedulable(&pod, &reason).await,
            };
            match done {
                Ok(()) => {}
                // The Pod is gone, or another scheduler bound it; the watch will report it.
                Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
                Err(error) => {
                    self.context.log_line(&format!("cannot schedule {}: {error}", pod.name_any()));
                    self.retry_at = Some(Instant::now() + RETRY_DELAY);
                }
            }
        }
    }

    async fn bind(&mut self, pod: &Arc<Pod>, node: &str) -> kube::Result<()> {
        let (uid, name) = (pod.uid().unwrap_or_default(), pod.name_any());
        let binding = Binding {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                uid: Some(uid.clone()),
                ..ObjectMeta::default()
            },
            target: ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(node.to_owned()),
                ..ObjectReference::default()
            },
        };
        let pods: Api<Pod> =
            Api::namespaced(self.context.client.clone(), &pod.namespace().unwrap_or_default());
        let status: kube::core::Status =
            pods.create_subresource("binding", &name, &PostParams::default(), &binding).await?;
        if status.is_failure() {
            return Err(kube::Error::Api(Box::new(status)));
        }
        // Recorded before the watch reports it, so that the next Pod of this pass does not get the same devices.
        let mut bound = Pod::clone(pod);
        bound.spec.get_or_insert_default().node_name = Some(node.to_owned());
        self.pods.insert(uid.clone(), Arc::new(bound));
        self.bound.insert(uid, node.to_owned());
        Ok(())
    }

    async fn mark_unschedulable(&mut self, pod: &Pod, reason: &str) -> kube::Result<()> {
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let mut before = conditions.filter(|condition| condition.type_ == "PodScheduled");
        if before.any(|condition| condition.status == "False" && condition.message.as_deref() == Some(reason))
        {
            return Ok(());
        }
        let now = k8s_openapi::jiff::Timestamp::now().to_string();
        let condition = json!({
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": reason,
            "lastTransitionTime": now,
        });
        let patch = json!({ "metadata": { "uid": pod.uid() }, "status": { "conditions": [condition] } });
        let pods: Api<Pod> =
            Api::namespaced(self.context.client.clone(), &pod.namespace().unwrap_or_default());
        let updated =
            pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Strategic(patch)).await?;
        // Recorded at once, so that it is not reported again before the watch shows it.
        self.pods.insert(pod.uid().unwrap_or_default(), Arc::new(updated));
        self.context.emit_warning(pod, "FailedScheduling", reason);
        Ok(())
    }
}

/// Whether the Pod is unscheduled and waits for our scheduler.
fn is_waiting(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    let by_default =
        spec.and_then(|spec| spec.scheduler_name.as_deref()).is_none_or(|name| name == "default-scheduler");
    let gated = spec.and_then(|spec| spec.scheduling_gates.as_ref()).is_some_and(|gates| !gates.is_empty());
    let placed = spec.and_then(|spec| spec.node_name.as_ref()).is_some();
    by_default
        && !gated
        && !placed
        && pod.metadata.deletion_timestamp.is_none()
        && !schedule::is_terminal(pod)
}
