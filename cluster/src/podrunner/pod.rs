//! One Pod on its node: what a kubelet's worker does with it, from the first volume to the deletion of its object.
//!
//! A worker is one task. It knows the Pod as its node last saw it, and its containers; each turn it brings them closer to what
//! they should be, reports what they are, and waits for the next thing that happens. A node that is cut off hears and reports
//! nothing, and its containers go on.

use std::{collections::BTreeMap, fs, io, net::Ipv4Addr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use k8s_openapi::{api::core::v1::Pod as Object, jiff::Timestamp};
use kube::ResourceExt as _;
use tokio::{
    sync::{mpsc, watch},
    time::{self, Instant},
};

use super::{
    Shared,
    container::{Container, End, Role, State},
    node::{Link, RunningNode},
    probe::Verdict,
    schedule,
    status::Condition,
    volume::{self, Prepared},
};

mod report;
mod run;

/// After a failure of the API server, or of what a Pod needs, it is tried again so much later.
const AGAIN: Duration = Duration::from_secs(1);
/// All that a Pod needs is there sooner, unless the API server hangs; and a Pod that is deleted meanwhile wants to end.
const PREPARED: Duration = Duration::from_secs(10);
/// Containers, probes and hooks of one Pod have little to say; more than this waits for its turn.
const EVENTS: usize = 64;
/// The least time between SIGTERM and SIGKILL, as in a kubelet, even for a Pod that was deleted with none.
const LEAST_GRACE: Duration = Duration::from_secs(1);

/// What happened to a Pod's container: its place, the number of its run, and what.
type Event = (usize, u32, Happening);

enum Happening {
    Exited(End),
    Probed(Verdict),
}

/// What a node is told of a Pod: its object, or that it is gone.
pub(super) type Wanted = Option<Arc<Object>>;

pub(super) struct Worker {
    shared: Arc<Shared>,
    node: Arc<RunningNode>,
    pod: Arc<Object>,
    uid: String,
    ip: Ipv4Addr,
    folder: PathBuf,
    containers: Vec<Container>,
    devices: BTreeMap<String, Vec<String>>,
    prepared: Option<Prepared>,
    /// Not before then.
    prepare_at: Instant,
    /// A container lacked a ConfigMap or Secret, which may be there by now.
    lacking: bool,
    refused: Option<(&'static str, String)>,
    ending: Option<Ending>,
    gone: bool,
    since: Timestamp,
    conditions: Vec<Condition>,
    /// What the API server was told last, and the version of the object that came of it.
    told: Option<(serde_json::Value, u64)>,
    tell_at: Instant,
    events: mpsc::Receiver<Event>,
    happens: mpsc::Sender<Event>,
}

/// All containers are ended, the sidecars last.
struct Ending {
    began: Instant,
    grace: Duration,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, node: Arc<RunningNode>, pod: Arc<Object>) -> Self {
        let spec = pod.spec.clone().unwrap_or_default();
        let init = spec.init_containers.into_iter().flatten().map(|container| {
            let role = if schedule::is_sidecar(&container) { Role::Sidecar } else { Role::Init };
            Container::new(container, role)
        });
        let main = spec.containers.into_iter().map(|container| Container::new(container, Role::Main));
        let ip = if spec.host_network == Some(true) { node.address() } else { shared.next_address() };
        let uid = pod.uid().unwrap_or_default();
        let (happens, events) = mpsc::channel(EVENTS);
        let now = Instant::now();
        Self {
            folder: shared.state.join(&uid),
            containers: init.chain(main).collect(),
            devices: BTreeMap::new(),
            prepared: None,
            prepare_at: now,
            lacking: false,
            refused: None,
            ending: None,
            gone: false,
            since: Timestamp::now(),
            conditions: Vec::new(),
            told: None,
            tell_at: now,
            shared,
            node,
            pod,
            uid,
            ip,
            events,
            happens,
        }
    }

    /// The whole life of the Pod on this node.
    pub(super) async fn run(mut self, mut wanted: watch::Receiver<Wanted>) {
        let mut link = self.node.link();
        // An error is the end of the node, and of this task.
        if link.wait_for(|link| *link != Link::Cut).await.is_err() {
            return;
        }
        self.admit();
        self.hear(&wanted.borrow_and_update().clone());
        loop {
            self.advance().await;
            let ended = self.has_ended();
            if ended || self.gone {
                // A kubelet forgets whose devices they were as soon as the Pod has ended or its object is gone.
                self.node.release(&self.uid);
            }
            self.report(ended).await;
            if ended && (self.gone || self.delete().await) {
                break;
            }
            let cut = *link.borrow() == Link::Cut;
            let alarm = self.alarm();
            let events = &mut self.events;
            tokio::select! {
                event = events.recv() => {
                    if let Some(event) = event {
                        self.on(event);
                    }
                }
                // Once the object is gone nothing more is heard of it, and an error is the runner's end.
                heard = wanted.changed(), if !cut && !self.gone => {
                    if heard.is_err() {
                        break;
                    }
                    let seen = wanted.borrow_and_update().clone();
                    self.hear(&seen);
                }
                _ = link.changed() => {}
                () = time::sleep_until(alarm.unwrap_or_else(Instant::now)), if alarm.is_some() => {}
            }
        }
        // What cannot be removed goes with the cluster.
        fs::remove_dir_all(&self.folder).ok();
    }

    /// Takes the devices that the scheduler counted; another that was quicker is found out here.
    fn admit(&mut self) {
        let demand = self.pod.spec.as_ref().map(schedule::demand).unwrap_or_default();
        match self.node.take(&self.uid, &demand) {
            Some(devices) => self.devices = devices,
            None => {
                let message = "Allocate failed due to requested number of devices unavailable".to_owned();
                self.refused = Some(("UnexpectedAdmissionError", message));
                self.end_within(Duration::ZERO);
            }
        }
    }

    /// Takes in what the node sees of the Pod's object.
    fn hear(&mut self, seen: &Wanted) {
        let Some(pod) = seen else {
            self.gone = true;
            self.end_within(LEAST_GRACE);
            return;
        };
        self.pod = Arc::clone(pod);
        if let Some(prepared) = &self.prepared
            && let Err(error) = prepared.follow(pod)
        {
            self.shared.note(&format!("{}: its metadata cannot be written: {error}", pod.name_any()));
        }
        if pod.metadata.deletion_timestamp.is_some() {
            let grace = pod.metadata.deletion_grace_period_seconds.and_then(|s| u64::try_from(s).ok());
            self.end_within(Duration::from_secs(grace.unwrap_or(30)));
        }
        if self.is_contradicted() {
            self.told = None;
        }
    }

    /// Begins to end, or ends sooner than it was going to.
    fn end_within(&mut self, grace: Duration) {
        let grace = grace.max(LEAST_GRACE);
        match &mut self.ending {
            Some(ending) => ending.grace = ending.grace.min(grace),
            None => self.ending = Some(Ending { began: Instant::now(), grace }),
        }
    }

    fn on(&mut self, (place, run, happening): Event) {
        let now = Instant::now();
        let pauses = self.shared.pauses;
        let Some(container) = self.containers.get_mut(place).filter(|container| container.runs == run) else {
            return;
        };
        match happening {
            Happening::Exited(end) => container.ended(end, pauses, now),
            Happening::Probed(verdict) => self.probed(place, verdict),
        }
    }

    async fn advance(&mut self) {
        if self.ending.is_none() && self.prepared.is_none() {
            self.prepare().await;
        }
        if self.ending.is_none() && self.prepared.is_some() {
            self.look_again().await;
            self.start();
        }
        if self.ending.is_some() {
            self.end();
        }
        self.kill_overdue();
    }

    async fn prepare(&mut self) {
        if self.prepare_at > Instant::now() {
            return;
        }
        let made =
            time::timeout(PREPARED, volume::prepare(&self.shared.client, &self.pod, &self.folder)).await;
        let made = made.context("no answer").flatten().and_then(|mut prepared| {
            let account = self.pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
            let namespace = self.pod.namespace().unwrap_or_default();
            if let Some(token) = prepared.token() {
                let path = self.folder.join("kubeconfig");
                let account = account.unwrap_or_else(|| "default".to_owned());
                self.shared.write_kubeconfig(&namespace, &account, token, &path)?;
                prepared.set_kubeconfig(path);
            }
            Ok(prepared)
        });
        match made {
            Ok(prepared) => self.prepared = Some(prepared),
            Err(error) => {
                self.shared.complain(&self.pod, "FailedMount", &format!("{error:#}"));
                self.prepare_at = Instant::now() + AGAIN;
            }
        }
    }

    async fn look_again(&mut self) {
        let Some(prepared) = self.prepared.as_mut().filter(|_| self.lacking) else { return };
        let fetched = time::timeout(PREPARED, prepared.fetch(&self.shared.client, &self.pod)).await;
        match fetched.context("no answer").and_then(|fetched| Ok(fetched?)) {
            Ok(()) => self.lacking = false,
            Err(error) => self.shared.note(&format!("{}: {error:#}", self.pod.name_any())),
        }
    }

    /// Starts what is due, in order: each init container when the one before has ended well, each sidecar when the one before
    /// serves, then all others.
    fn start(&mut self) {
        let policy = self.policy();
        let initialized = self.containers.iter().any(|c| c.role == Role::Main && c.runs > 0);
        for place in 0..self.containers.len() {
            let Some(container) = self.containers.get(place) else { return };
            let role = container.role;
            if container.running().is_none() && !(role == Role::Init && (container.is_ready() || initialized))
            {
                if container.runs == 0 || container.comes_back(&policy) {
                    self.start_when_due(place);
                } else if role == Role::Init {
                    // Its failure is the Pod's.
                    self.end_within(self.grace());
                    return;
                }
            }
            let Some(container) = self.containers.get(place) else { return };
            let serves = match role {
                Role::Init => initialized || container.is_ready(),
                Role::Sidecar => initialized || (container.running().is_some() && container.started),
                Role::Main => true,
            };
            if !serves {
                return;
            }
        }
        let mut main = self.containers.iter().filter(|container| container.role == Role::Main);
        if main.all(|container| {
            container.runs > 0 && container.end().is_some() && !container.comes_back(&policy)
        }) {
            self.end_within(self.grace());
        }
    }

    fn start_when_due(&mut self, place: usize) {
        let name = self.pod.name_any();
        let Some(container) = self.containers.get_mut(place) else { return };
        if container.due.is_none_or(|due| due <= Instant::now()) {
            self.begin(place);
        } else if !matches!(container.state, State::Waiting { .. }) {
            container.backs_off(&name);
        }
    }

    /// Tells everything to end: first all but the sidecars, then those, the last first.
    fn end(&mut self) {
        let others = self.containers.iter().any(|c| c.role != Role::Sidecar && c.running().is_some());
        let Some(ending) = &self.ending else { return };
        let deadline = ending.began + ending.grace;
        let chosen: Vec<_> = if others {
            let all = self.containers.iter().enumerate();
            all.filter(|(_, c)| c.role != Role::Sidecar && c.running().is_some()).map(|(n, _)| n).collect()
        } else {
            self.containers.iter().rposition(|c| c.running().is_some()).into_iter().collect()
        };
        for place in chosen {
            self.tell_to_end(place, deadline);
        }
        if !self.containers.iter().any(|container| container.running().is_some()) {
            for container in self.containers.iter_mut().filter(|c| c.end().is_none()) {
                let message = "The container could not be located when the pod was terminated".to_owned();
                container.state = State::Ended(End::unknown(137, "ContainerStatusUnknown", message));
            }
        }
    }

    fn has_ended(&self) -> bool {
        self.ending.is_some() && self.containers.iter().all(|container| container.running().is_none())
    }

    /// When something is due even if nothing happens. What was due by now has been done.
    fn alarm(&self) -> Option<Instant> {
        let (now, ending) = (Instant::now(), self.ending.is_some());
        let killed = self.containers.iter().filter_map(Container::running).filter_map(|run| run.killed_at);
        let due = self.containers.iter().filter_map(|container| container.due).filter(|_| !ending);
        let prepare = Some(self.prepare_at).filter(|_| !ending);
        let tell = Some(self.tell_at).filter(|_| !self.gone);
        killed.chain(due).chain(prepare).chain(tell).filter(|at| *at > now).min()
    }

    fn policy(&self) -> String {
        let policy = self.pod.spec.as_ref().and_then(|spec| spec.restart_policy.clone());
        policy.unwrap_or_else(|| "Always".to_owned())
    }

    fn grace(&self) -> Duration {
        let seconds = self.pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
        Duration::from_secs(seconds.and_then(|seconds| u64::try_from(seconds).ok()).unwrap_or(30))
    }

    fn log(&self, container: &str, run: u32) -> io::Result<fs::File> {
        let folder = self.shared.logs_of(&self.pod.namespace().unwrap_or_default(), &self.pod.name_any());
        fs::create_dir_all(&folder)?;
        fs::File::options().create(true).append(true).open(folder.join(format!("{container}.{run}.log")))
    }
}
