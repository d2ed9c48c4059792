//! State that the run loop and the workers share: the cluster, images and nodes, events and the log.

use std::{
    collections::{BTreeMap, HashSet},
    fs::{self, File},
    io::Write as _,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::Result;
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{
    Client, Resource as _, ResourceExt as _,
    runtime::events::{Event, EventType, Recorder, Reporter},
};

use super::{container::RestartBackoff, launch::PodImage, node::RunningNode};
use crate::{ClusterInner, ClusterUser, user};

/// One context for each runner.
pub(super) struct RunnerContext {
    pub(super) inner: Arc<ClusterInner>,
    /// For the cluster's runtime.
    pub(super) client: Client,
    pub(super) name: String,
    pub(super) namespaces: Vec<String>,
    /// Holds a folder for each Pod, named by uid.
    pub(super) state: PathBuf,
    pub(super) images: Mutex<BTreeMap<String, PodImage>>,
    pub(super) nodes: Mutex<BTreeMap<String, Arc<RunningNode>>>,
    pub(super) restart_backoff: RestartBackoff,
    /// Label of the Pods whose statuses the test writes.
    played_label: Option<String>,
    recorder: Recorder,
    /// Events already emitted. A kubelet counts repetitions; here they would only be noise.
    complaints: Mutex<HashSet<(String, String)>>,
    log: Mutex<File>,
}

impl RunnerContext {
    pub(super) async fn new(
        inner: Arc<ClusterInner>,
        name: String,
        namespaces: Vec<String>,
        images: BTreeMap<String, PodImage>,
        pauses: RestartBackoff,
        played_label: Option<String>,
    ) -> Result<Self> {
        let client = inner.users.client(inner.users.admin(), inner.api_server).await?;
        let state = inner.resources.state().join("pods").join(&name);
        fs::create_dir_all(&state)?;
        let log =
            File::options().create(true).append(true).open(inner.resources.logs().join("podrunner.log"))?;
        let events = Recorder::new(client.clone(), Reporter::from("podrunner"));
        Ok(Self {
            inner,
            client,
            name,
            namespaces,
            state,
            images: Mutex::new(images),
            nodes: Mutex::default(),
            restart_backoff: pauses,
            played_label,
            recorder: events,
            complaints: Mutex::default(),
            log: Mutex::new(log),
        })
    }

    /// Returns a fresh address. Addresses are reused last, so that connections to a dead Pod's address reach no other
    /// Pod.
    ///
    /// # Panics
    /// The cluster's folder is gone.
    pub(super) fn next_address(&self) -> Ipv4Addr {
        self.inner.resources.next_address().unwrap_or_else(|error| panic!("no address: {error:#}"))
    }

    pub(super) fn image(&self, name: &str) -> Option<PodImage> {
        lock(&self.images).get(name).cloned()
    }

    /// Whether the test writes the Pod's status.
    pub(super) fn is_played(&self, pod: &Pod) -> bool {
        self.played_label.as_ref().is_some_and(|label| pod.labels().contains_key(label))
    }

    pub(super) fn node_of(&self, pod: &Pod) -> Option<Arc<RunningNode>> {
        let name = pod.spec.as_ref()?.node_name.as_ref()?;
        lock(&self.nodes).values().find(|node| node.name() == name).cloned()
    }

    pub(super) fn api_server(&self) -> SocketAddr {
        self.inner.api_server
    }

    pub(super) fn mark(&self) -> String {
        self.inner.resources.mark()
    }

    pub(super) fn part_mark(&self, uid: &str, container: &str, run: u32) -> String {
        self.inner.resources.part_mark(&format!("pod/{uid}/{container}/{run}"))
    }

    pub(super) fn log_folder(&self, namespace: &str, pod: &str) -> PathBuf {
        self.inner.resources.logs().join("pods").join(namespace).join(pod)
    }

    pub(super) fn write_kubeconfig(
        &self,
        namespace: &str,
        account: &str,
        token: &Path,
        path: &Path,
    ) -> Result<()> {
        let user = ClusterUser::with_token_file(user::account_name(namespace, account), token);
        self.inner.users.write_kubeconfig(&user, self.api_server(), namespace, path)
    }

    /// Writes a line to the runners' log.
    pub(super) fn log_line(&self, line: &str) {
        let line = format!("{} {}: {line}\n", Timestamp::now(), self.name);
        // Without the log, tests still report their failures.
        lock(&self.log).write_all(line.as_bytes()).ok();
    }

    /// Emits an event of type Warning and logs it.
    pub(super) fn emit_warning(self: &Arc<Self>, pod: &Pod, reason: &str, message: &str) {
        if !lock(&self.complaints).insert((pod.uid().unwrap_or_default(), message.to_owned())) {
            return;
        }
        self.log_line(&format!("{}: {reason}: {message}", pod.name_any()));
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(message.to_owned()),
            action: reason.to_owned(),
            secondary: None,
        };
        let (shared, about) = (Arc::clone(self), pod.object_ref(&()));
        tokio::spawn(async move {
            if let Err(error) = shared.recorder.publish(&event, &about).await {
                shared.log_line(&format!("an event cannot be made: {error}"));
            }
        });
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
