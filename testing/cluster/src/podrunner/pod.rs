//! One Pod on its node: a kubelet worker's task, from the first volume to the deletion of the object.
//!
//! A worker is one task. It knows the Pod as its node last saw it, and its containers. In each iteration it brings them
//! closer to the desired state, reports their status, and waits for the next event. A partitioned node receives and
//! reports nothing, and its containers go on.

use std::{collections::BTreeMap, fs, io, net::Ipv4Addr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use k8s_openapi::{api::core::v1::Pod as Object, jiff::Timestamp};
use kube::ResourceExt as _;
use tokio::{
    sync::{mpsc, watch},
    time::{self, Instant},
};

use super::{
    RunnerContext,
    container::{ContainerExit, ContainerRole, PodContainer, RunState},
    node::{NodeLink, RunningNode},
    probe::ProbeVerdict,
    schedule::{self, ResourceUnits},
    status::ReportedCondition,
    volume::{self, PreparedPod},
};

mod report;
mod run;

/// Delay before retrying after an error of the API server or a missing dependency.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Bounds the preparation, which takes longer only if the API server hangs. A Pod that is deleted meanwhile must be
/// able to end.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(10);
/// One Pod's containers, probes and hooks send few events; senders wait beyond this.
const EVENT_QUEUE_LENGTH: usize = 64;
/// Minimum time between SIGTERM and SIGKILL, as in a kubelet. It applies even to a Pod deleted without grace.
const MIN_GRACE: Duration = Duration::from_secs(1);

/// An event of a container: its index, the number of its run, and the event.
type ContainerEvent = (usize, u32, ContainerEventKind);

enum ContainerEventKind {
    Exited(ContainerExit),
    Probed(ProbeVerdict),
}

/// A Pod as its node sees it: its object, or `None` once it is deleted.
pub(super) type ObservedPod = Option<Arc<Object>>;

pub(super) struct PodWorker {
    context: Arc<RunnerContext>,
    node: Arc<RunningNode>,
    pod: Arc<Object>,
    uid: String,
    ip: Ipv4Addr,
    folder: PathBuf,
    containers: Vec<PodContainer>,
    devices: BTreeMap<String, Vec<String>>,
    /// What the plugins' answers set in containers, by resource.
    device_env: BTreeMap<String, BTreeMap<String, String>>,
    prepared: Option<PreparedPod>,
    /// Earliest time of the next preparation.
    prepare_at: Instant,
    /// A container lacked a ConfigMap or Secret, which may exist by now.
    missing_config: bool,
    admission_error: Option<(&'static str, String)>,
    termination: Option<PodTermination>,
    deleted: bool,
    started_at: Timestamp,
    conditions: Vec<ReportedCondition>,
    /// The last reported status, and the object version that resulted.
    last_reported: Option<(serde_json::Value, u64)>,
    report_at: Instant,
    event_rx: mpsc::Receiver<ContainerEvent>,
    event_tx: mpsc::Sender<ContainerEvent>,
}

/// The Pod is ending: all containers, the sidecars last.
struct PodTermination {
    started_at: Instant,
    grace: Duration,
}

impl PodWorker {
    pub(super) fn new(shared: Arc<RunnerContext>, node: Arc<RunningNode>, pod: Arc<Object>) -> Self {
        let spec = pod.spec.clone().unwrap_or_default();
        let init = spec.init_containers.into_iter().flatten().map(|container| {
            let role =
                if schedule::is_sidecar(&container) { ContainerRole::Sidecar } else { ContainerRole::Init };
            PodContainer::new(container, role)
        });
        let main =
            spec.containers.into_iter().map(|container| PodContainer::new(container, ContainerRole::Main));
        let ip = if spec.host_network == Some(true) { node.address() } else { shared.next_address() };
        let uid = pod.uid().unwrap_or_default();
        let (happens, events) = mpsc::channel(EVENT_QUEUE_LENGTH);
        let now = Instant::now();
        Self {
            folder: shared.state.join(&uid),
            containers: init.chain(main).collect(),
            devices: BTreeMap::new(),
            device_env: BTreeMap::new(),
            prepared: None,
            prepare_at: now,
            missing_config: false,
            admission_error: None,
            termination: None,
            deleted: false,
            started_at: Timestamp::now(),
            conditions: Vec::new(),
            last_reported: None,
            report_at: now,
            context: shared,
            node,
            pod,
            uid,
            ip,
            event_rx: events,
            event_tx: happens,
        }
    }

    /// Runs the Pod on this node until it has ended.
    pub(super) async fn run(mut self, mut pod_rx: watch::Receiver<ObservedPod>) {
        let mut link = self.node.link();
        // An error means that the node was dropped, and with it this task.
        if link.wait_for(|link| *link != NodeLink::Cut).await.is_err() {
            return;
        }
        self.admit().await;
        self.observe(&pod_rx.borrow_and_update().clone());
        loop {
            self.advance().await;
            let ended = self.has_ended();
            if ended || self.deleted {
                // A kubelet frees the devices as soon as the Pod has ended or its object is gone.
                self.release_devices();
            }
            self.report(ended).await;
            if ended && (self.deleted || self.delete().await) {
                break;
            }
            let cut = *link.borrow() == NodeLink::Cut;
            let alarm = self.next_wakeup();
            let events = &mut self.event_rx;
            tokio::select! {
                event = events.recv() => {
                    if let Some(event) = event {
                        self.handle(event);
                    }
                }
                // No events follow the object's deletion. An error means that the runner was dropped.
                change = pod_rx.changed(), if !cut && !self.deleted => {
                    if change.is_err() {
                        break;
                    }
                    let observed = pod_rx.borrow_and_update().clone();
                    self.observe(&observed);
                }
                _ = link.changed() => {}
                () = time::sleep_until(alarm.unwrap_or_else(Instant::now)), if alarm.is_some() => {}
            }
        }
        // A folder that cannot be removed is deleted with the cluster.
        fs::remove_dir_all(&self.folder).ok();
    }

    /// Allocates the devices that the scheduler counted. Detects that another Pod took them first.
    async fn admit(&mut self) {
        if let Err(message) = self.allocate_devices().await {
            self.admission_error = Some(("UnexpectedAdmissionError", message));
            self.terminate_within(Duration::ZERO);
        }
    }

    async fn allocate_devices(&mut self) -> Result<(), String> {
        let demand = self.pod.spec.as_ref().map(schedule::demand).unwrap_or_default();
        let (of_plugins, own): (ResourceUnits, ResourceUnits) =
            demand.into_iter().partition(|(resource, _)| self.node.device_manager_of(resource).is_some());
        let own = self.node.allocate(&self.uid, &own);
        self.devices = own.ok_or("Allocate failed due to requested number of devices unavailable")?;
        for (resource, count) in of_plugins {
            let Some(manager) = self.node.device_manager_of(&resource) else { continue };
            let count = usize::try_from(count).map_err(|error| error.to_string())?;
            let granted = manager.allocate(&self.namespaced_name(), &resource, count).await;
            let granted =
                granted.map_err(|error| format!("Allocate failed due to {error}, which is unexpected"))?;
            self.devices.insert(resource.clone(), granted.ids);
            self.device_env.insert(resource, granted.allocation.env);
        }
        Ok(())
    }

    fn release_devices(&self) {
        self.node.release(&self.uid);
        for manager in self.device_env.keys().filter_map(|resource| self.node.device_manager_of(resource)) {
            manager.release(&self.namespaced_name());
        }
    }

    fn namespaced_name(&self) -> String {
        format!("{}/{}", self.pod.namespace().unwrap_or_default(), self.pod.name_any())
    }

    /// Applies the Pod's object as the node sees it.
    fn observe(&mut self, observed: &ObservedPod) {
        let Some(pod) = observed else {
            self.deleted = true;
            self.terminate_within(MIN_GRACE);
            return;
        };
        self.pod = Arc::clone(pod);
        if let Some(prepared) = &self.prepared
            && let Err(error) = prepared.update_downward_files(pod)
        {
            self.context.log_line(&format!("cannot write the metadata of {}: {error}", pod.name_any()));
        }
        if pod.metadata.deletion_timestamp.is_some() {
            let grace = pod.metadata.deletion_grace_period_seconds.and_then(|s| u64::try_from(s).ok());
            self.terminate_within(Duration::from_secs(grace.unwrap_or(30)));
        }
        if self.is_overwritten() {
            self.last_reported = None;
        }
    }

    /// Starts the termination, or shortens its grace period.
    fn terminate_within(&mut self, grace: Duration) {
        let grace = grace.max(MIN_GRACE);
        match &mut self.termination {
            Some(ending) => ending.grace = ending.grace.min(grace),
            None => self.termination = Some(PodTermination { started_at: Instant::now(), grace }),
        }
    }

    fn handle(&mut self, (index, run, kind): ContainerEvent) {
        let now = Instant::now();
        let pauses = self.context.restart_backoff;
        let Some(container) = self.containers.get_mut(index).filter(|container| container.runs == run) else {
            return;
        };
        match kind {
            ContainerEventKind::Exited(end) => container.record_exit(end, pauses, now),
            ContainerEventKind::Probed(verdict) => self.handle_verdict(index, verdict),
        }
    }

    async fn advance(&mut self) {
        if self.termination.is_none() && self.prepared.is_none() {
            self.prepare().await;
        }
        if self.termination.is_none() && self.prepared.is_some() {
            self.refetch_missing().await;
            self.start_containers();
        }
        if self.termination.is_some() {
            self.terminate_containers();
        }
        self.kill_overdue();
    }

    async fn prepare(&mut self) {
        if self.prepare_at > Instant::now() {
            return;
        }
        let prepared =
            time::timeout(PREPARE_TIMEOUT, volume::prepare(&self.context.client, &self.pod, &self.folder))
                .await;
        let prepared = prepared.context("no answer").flatten().and_then(|mut prepared| {
            let account = self.pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
            let namespace = self.pod.namespace().unwrap_or_default();
            if let Some(token) = prepared.token() {
                let path = self.folder.join("kubeconfig");
                let account = account.unwrap_or_else(|| "default".to_owned());
                self.context.write_kubeconfig(&namespace, &account, token, &path)?;
                prepared.set_kubeconfig(path);
            }
            Ok(prepared)
        });
        match prepared {
            Ok(prepared) => self.prepared = Some(prepared),
            Err(error) => {
                self.context.emit_warning(&self.pod, "FailedMount", &format!("{error:#}"));
                self.prepare_at = Instant::now() + RETRY_DELAY;
            }
        }
    }

    async fn refetch_missing(&mut self) {
        let Some(prepared) = self.prepared.as_mut().filter(|_| self.missing_config) else { return };
        let fetched = time::timeout(PREPARE_TIMEOUT, prepared.fetch(&self.context.client, &self.pod)).await;
        match fetched.context("no answer").and_then(|fetched| Ok(fetched?)) {
            Ok(()) => self.missing_config = false,
            Err(error) => self.context.log_line(&format!("{}: {error:#}", self.pod.name_any())),
        }
    }

    /// Starts the due containers in order: an init container after the previous one has succeeded, a sidecar after the
    /// previous one serves, then all others.
    fn start_containers(&mut self) {
        let policy = self.restart_policy();
        let initialized = self.containers.iter().any(|c| c.role == ContainerRole::Main && c.runs > 0);
        for index in 0..self.containers.len() {
            let Some(container) = self.containers.get(index) else { return };
            let role = container.role;
            if container.running().is_none()
                && !(role == ContainerRole::Init && (container.is_ready() || initialized))
            {
                if container.runs == 0 || container.should_restart(&policy) {
                    self.start_when_due(index);
                } else if role == ContainerRole::Init {
                    // The Pod fails with its init container.
                    self.terminate_within(self.grace());
                    return;
                }
            }
            let Some(container) = self.containers.get(index) else { return };
            let serves = match role {
                ContainerRole::Init => initialized || container.is_ready(),
                ContainerRole::Sidecar => initialized || (container.running().is_some() && container.started),
                ContainerRole::Main => true,
            };
            if !serves {
                return;
            }
        }
        let mut main = self.containers.iter().filter(|container| container.role == ContainerRole::Main);
        if main.all(|container| {
            container.runs > 0 && container.last_exit().is_some() && !container.should_restart(&policy)
        }) {
            self.terminate_within(self.grace());
        }
    }

    fn start_when_due(&mut self, index: usize) {
        let name = self.pod.name_any();
        let Some(container) = self.containers.get_mut(index) else { return };
        if container.restart_at.is_none_or(|due| due <= Instant::now()) {
            self.start_container(index);
        } else if !matches!(container.state, RunState::Waiting { .. }) {
            container.set_backing_off(&name);
        }
    }

    /// Terminates the containers: first all but the sidecars, then the sidecars, last one first.
    fn terminate_containers(&mut self) {
        let has_others =
            self.containers.iter().any(|c| c.role != ContainerRole::Sidecar && c.running().is_some());
        let Some(ending) = &self.termination else { return };
        let deadline = ending.started_at + ending.grace;
        let chosen: Vec<_> = if has_others {
            let all = self.containers.iter().enumerate();
            all.filter(|(_, c)| c.role != ContainerRole::Sidecar && c.running().is_some())
                .map(|(n, _)| n)
                .collect()
        } else {
            self.containers.iter().rposition(|c| c.running().is_some()).into_iter().collect()
        };
        for index in chosen {
            self.stop_container(index, deadline);
        }
        if !self.containers.iter().any(|container| container.running().is_some()) {
            for container in self.containers.iter_mut().filter(|c| c.last_exit().is_none()) {
                let message = "The container could not be located when the pod was terminated".to_owned();
                container.state =
                    RunState::Exited(ContainerExit::unknown(137, "ContainerStatusUnknown", message));
            }
        }
    }

    fn has_ended(&self) -> bool {
        self.termination.is_some() && self.containers.iter().all(|container| container.running().is_none())
    }

    /// Returns the time of the next due action. Everything due by now has been done.
    fn next_wakeup(&self) -> Option<Instant> {
        let (now, ending) = (Instant::now(), self.termination.is_some());
        let killed = self.containers.iter().filter_map(PodContainer::running).filter_map(|run| run.kill_at);
        let due = self.containers.iter().filter_map(|container| container.restart_at).filter(|_| !ending);
        let prepare = Some(self.prepare_at).filter(|_| !ending);
        let report = Some(self.report_at).filter(|_| !self.deleted);
        killed.chain(due).chain(prepare).chain(report).filter(|at| *at > now).min()
    }

    fn restart_policy(&self) -> String {
        let policy = self.pod.spec.as_ref().and_then(|spec| spec.restart_policy.clone());
        policy.unwrap_or_else(|| "Always".to_owned())
    }

    fn grace(&self) -> Duration {
        let seconds = self.pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
        Duration::from_secs(seconds.and_then(|seconds| u64::try_from(seconds).ok()).unwrap_or(30))
    }

    fn open_log(&self, container: &str, run: u32) -> io::Result<fs::File> {
        let folder = self.context.log_folder(&self.pod.namespace().unwrap_or_default(), &self.pod.name_any());
        fs::create_dir_all(&folder)?;
        fs::File::options().create(true).append(true).open(folder.join(format!("{container}.{run}.log")))
    }
}
