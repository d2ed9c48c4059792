//! Plays the kubelets of nodes: reports what a script says about each Pod of a Warmup, and ends deleted Pods.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions},
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event, watcher},
    },
};
use rouse_cluster::wait::WAIT_TIMEOUT;
use serde_json::json;
use tokio::{
    sync::watch,
    task::{JoinHandle, JoinSet},
    time::timeout,
};

use super::{
    objects::{ITEM_ANNOTATION, NODE_ANNOTATION, WARMUP_LABEL},
    report::{PodReport, status},
};

/// Stands for every item of a node in a script.
pub(super) const ANY_ITEM: &str = "*";
/// One Pod that a Warmup had.
#[derive(Clone, Debug)]
pub(super) struct PlayedPod {
    pub(super) name: String,
    pub(super) node: String,
    pub(super) item: String,
    pub(super) exists: bool,
    /// When its object was created, in whole seconds of Unix time.
    created: i64,
    uid: String,
    /// The report of the script has been written.
    is_reported: bool,
    /// Succeeded or failed.
    ended: bool,
}

impl PlayedPod {
    /// Whether the Pod keeps its node active.
    fn is_active(&self) -> bool {
        self.exists && !self.ended
    }

    pub(super) fn is_of(&self, node: &str, item: &str) -> bool {
        self.node == node && (item == ANY_ITEM || self.item == item)
    }
}

/// All Pods so far, and what is reported about the next ones.
#[derive(Debug, Default)]
pub(super) struct PlayedPods {
    /// By node and item. The last report of a script stays.
    scripts: BTreeMap<(String, String), VecDeque<PodReport>>,
    pub(super) all: Vec<PlayedPod>,
    /// By uid.
    reported: BTreeSet<String>,
    ending: BTreeSet<String>,
    /// Deleted Pods keep running.
    holds_deleted: bool,
    max_active_nodes: usize,
}

/// What the kubelet does about one event.
enum KubeletWork {
    Report(PodReport),
    End,
}

/// The played kubelets of a namespace. The drop stops them.
pub(super) struct PlayedKubelet {
    pods: Api<Pod>,
    state: Arc<watch::Sender<PlayedPods>>,
    task: JoinHandle<()>,
}

impl PlayedKubelet {
    /// Plays for the Pods that a scheduler has bound.
    pub(super) fn start(pods: Api<Pod>) -> Self {
        Self::new(pods, true)
    }

    /// Plays in a cluster without a scheduler.
    pub(super) fn without_scheduler(pods: Api<Pod>) -> Self {
        Self::new(pods, false)
    }

    fn new(pods: Api<Pod>, only_bound: bool) -> Self {
        let state = Arc::new(watch::Sender::new(PlayedPods::default()));
        let task = tokio::spawn(run(pods.clone(), Arc::clone(&state), only_bound));
        Self { pods, state, task }
    }

    /// Sets what is reported about the next Pods for this item on this node, one report for each Pod. The last one
    /// stays. Without a script every image is present, and every action exits with 0.
    pub(super) fn script(&self, node: &str, item: &str, reports: impl IntoIterator<Item = PodReport>) {
        let key = (node.to_owned(), item.to_owned());
        self.state.send_modify(|state| drop(state.scripts.insert(key, reports.into_iter().collect())));
    }

    /// Waits until a Pod for this item on this node has the report of its script, and reports this about it.
    pub(super) async fn report(&self, node: &str, item: &str, report: PodReport) {
        // The script's report would replace this one if it came later.
        let found = |state: &PlayedPods| state.existing(node, item).any(|played| played.is_reported);
        self.until(&format!("a reported Pod for {item} on {node}"), found).await;
        self.report_now(node, item, report).await;
    }

    /// Reports this about the Pods for this item on this node that exist now.
    pub(super) async fn report_now(&self, node: &str, item: &str, report: PodReport) {
        let names: Vec<String> =
            self.state.borrow().existing(node, item).map(|played| played.name.clone()).collect();
        for name in names {
            if let Some(pod) = self.pods.get_opt(&name).await.unwrap() {
                write(&self.pods, &pod, &report).await;
            }
        }
    }

    /// Whether deleted Pods keep running from now on. At the end of this, they end.
    pub(super) async fn hold_deleted(&self, holds: bool) {
        self.state.send_modify(|state| state.holds_deleted = holds);
        if !holds {
            let only = ListParams::default().labels(WARMUP_LABEL);
            for pod in self.pods.list(&only).await.unwrap().items {
                if pod.metadata.deletion_timestamp.is_some() {
                    end(&self.pods, &pod).await;
                }
            }
        }
    }

    /// Waits until the Pods so far fit.
    pub(super) async fn until(&self, what: &str, fits: impl FnMut(&PlayedPods) -> bool) {
        let mut seen = self.state.subscribe();
        let in_time = timeout(WAIT_TIMEOUT, seen.wait_for(fits)).await.is_ok_and(|seen| seen.is_ok());
        assert!(in_time, "waited for {what}; the Pods are {:#?}", self.state.borrow().all);
    }

    /// Waits until this item on this node has had this many Pods.
    pub(super) async fn until_count(&self, node: &str, item: &str, count: usize) {
        let had =
            |pods: &PlayedPods| pods.all.iter().filter(|played| played.is_of(node, item)).count() >= count;
        self.until(&format!("{count} Pods for {item} on {node}"), had).await;
    }

    /// Waits until no Pod for this item is left on this node.
    pub(super) async fn until_gone_from(&self, node: &str, item: &str) {
        let is_left = |played: &PlayedPod| played.exists && played.is_of(node, item);
        let gone = |pods: &PlayedPods| !pods.all.iter().any(is_left);
        self.until(&format!("the end of the Pods for {item} on {node}"), gone).await;
    }

    /// Waits until no Pod is left.
    pub(super) async fn until_gone(&self) {
        self.until("the end of all Pods", |state| state.all.iter().all(|played| !played.exists)).await;
    }

    /// Number of Pods that this item of this node has had.
    pub(super) fn count(&self, node: &str, item: &str) -> usize {
        self.state.borrow().all.iter().filter(|played| played.is_of(node, item)).count()
    }

    /// Seconds between the creations of the first and the last Pod that this item of this node has had, rounded to
    /// whole ones by up to one.
    pub(super) fn seconds_of_tries(&self, node: &str, item: &str) -> i64 {
        let pods = self.state.borrow();
        let created =
            || pods.all.iter().filter(|played| played.is_of(node, item)).map(|played| played.created);
        created().max().unwrap_or_default() - created().min().unwrap_or_default()
    }

    /// Number of Pods for each node and item.
    pub(super) fn counts(&self) -> BTreeMap<(String, String), usize> {
        let mut counts = BTreeMap::new();
        for played in &self.state.borrow().all {
            *counts.entry((played.node.clone(), played.item.clone())).or_default() += 1;
        }
        counts
    }

    /// The largest number of nodes that had Pods at a time that had not ended.
    pub(super) fn max_active_nodes(&self) -> usize {
        self.state.borrow().max_active_nodes
    }
}

impl Drop for PlayedKubelet {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PlayedPods {
    /// The Pods for this item on this node that exist and have not ended.
    pub(super) fn existing<'a>(
        &'a self,
        node: &'a str,
        item: &'a str,
    ) -> impl Iterator<Item = &'a PlayedPod> {
        self.all.iter().filter(move |played| played.is_active() && played.is_of(node, item))
    }

    /// Records a Pod as it is now, and returns what is to be done about it.
    fn observe(&mut self, pod: &Pod, only_bound: bool) -> Option<KubeletWork> {
        let uid = pod.uid().unwrap_or_default();
        let annotation = |key: &str| pod.annotations().get(key).cloned().unwrap_or_default();
        let (node, item) = (annotation(NODE_ANNOTATION), annotation(ITEM_ANNOTATION));
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let ended = matches!(phase, Some("Succeeded" | "Failed"));
        match self.all.iter_mut().rev().find(|played| played.uid == uid) {
            Some(played) => played.ended = ended,
            None => {
                let (name, uid) = (pod.name_any(), uid.clone());
                let created = pod.creation_timestamp().map_or(0, |at| at.0.as_second());
                let (node, item) = (node.clone(), item.clone());
                let (exists, is_reported) = (true, false);
                self.all.push(PlayedPod { name, node, item, exists, created, uid, is_reported, ended });
            }
        }
        let active: BTreeSet<&str> =
            self.all.iter().filter(|played| played.is_active()).map(|played| played.node.as_str()).collect();
        self.max_active_nodes = self.max_active_nodes.max(active.len());
        if pod.metadata.deletion_timestamp.is_some() {
            return (!self.holds_deleted && self.ending.insert(uid)).then_some(KubeletWork::End);
        }
        let bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        let due = (bound || !only_bound) && self.reported.insert(uid);
        due.then(|| KubeletWork::Report(self.next_report(node, item)))
    }

    fn next_report(&mut self, node: String, item: String) -> PodReport {
        let any = (node.clone(), ANY_ITEM.to_owned());
        let key = (node, item);
        let key = if self.scripts.contains_key(&key) { key } else { any };
        match self.scripts.get_mut(&key) {
            Some(reports) if reports.len() > 1 => reports.pop_front(),
            Some(reports) => reports.front().cloned(),
            None => None,
        }
        .unwrap_or(PodReport::Present)
    }

    /// The record of this Pod.
    fn played(&mut self, pod: &Pod) -> Option<&mut PlayedPod> {
        let uid = pod.uid().unwrap_or_default();
        self.all.iter_mut().rev().find(|played| played.uid == uid)
    }

    fn mark_reported(&mut self, pod: &Pod) {
        if let Some(played) = self.played(pod) {
            played.is_reported = true;
        }
    }

    fn forget(&mut self, pod: &Pod) {
        if let Some(played) = self.played(pod) {
            played.exists = false;
        }
    }

    /// Records that no Pods exist beside these, which have been listed.
    fn forget_all_but(&mut self, listed: &BTreeSet<String>) {
        for played in self.all.iter_mut().filter(|played| !listed.contains(&played.uid)) {
            played.exists = false;
        }
    }
}

async fn run(pods: Api<Pod>, state: Arc<watch::Sender<PlayedPods>>, only_bound: bool) {
    let only = watcher::Config::default().labels(WARMUP_LABEL);
    let mut events = watcher(pods.clone(), only).default_backoff().boxed();
    let mut works = JoinSet::new();
    // The uids of a list that is under way.
    let mut listed = BTreeSet::<String>::new();
    loop {
        let event = tokio::select! {
            Some(event) = events.next() => event,
            Some(done) = works.join_next() => {
                done.unwrap();
                continue;
            }
        };
        if let Ok(Event::InitApply(pod)) = &event {
            listed.extend(pod.uid());
        }
        match event {
            Ok(Event::Apply(pod) | Event::InitApply(pod)) => {
                let mut work = None;
                state.send_modify(|state| work = state.observe(&pod, only_bound));
                let pods = pods.clone();
                match work {
                    Some(KubeletWork::Report(report)) => {
                        let state = Arc::clone(&state);
                        drop(works.spawn(async move {
                            write(&pods, &pod, &report).await;
                            state.send_modify(|state| state.mark_reported(&pod));
                        }));
                    }
                    Some(KubeletWork::End) => drop(works.spawn(async move { end(&pods, &pod).await })),
                    None => {}
                }
            }
            Ok(Event::Delete(pod)) => state.send_modify(|state| state.forget(&pod)),
            Ok(Event::Init) => listed.clear(),
            // No event tells of a Pod that ended while the watch was interrupted.
            Ok(Event::InitDone) => state.send_modify(|state| state.forget_all_but(&listed)),
            // An error is one of the connection, from which the watcher recovers.
            Err(_) => {}
        }
    }
}

async fn write(pods: &Api<Pod>, pod: &Pod, report: &PodReport) {
    let patch = Patch::Merge(json!({"metadata": {"uid": pod.uid()}, "status": status(pod, report)}));
    unless_gone(pods.patch_status(&pod.name_any(), &PatchParams::default(), &patch).await);
}

/// Deletes the object of a Pod whose processes have ended.
async fn end(pods: &Api<Pod>, pod: &Pod) {
    let preconditions = Some(Preconditions { uid: pod.uid(), ..Preconditions::default() });
    let at_once = DeleteParams { preconditions, ..DeleteParams::default().grace_period(0) };
    unless_gone(pods.delete(&pod.name_any(), &at_once).await);
}

/// Accepts that a Pod is gone, or that another has its name: the leader deletes Pods at any time.
fn unless_gone<T>(outcome: kube::Result<T>) {
    match outcome {
        Ok(_) => {}
        Err(kube::Error::Api(gone)) if gone.code == 404 || gone.code == 409 => {}
        // The test has reported the end of a container before its script reported the beginning.
        Err(kube::Error::Api(late)) if late.message.contains("may not be transitioned to non-terminated") => {
        }
        Err(error) => panic!("a Pod cannot be changed: {error}"),
    }
}
