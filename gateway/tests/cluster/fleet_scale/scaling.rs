//! Creates and deletes the Pods of Deployments.

use std::{
    collections::{BTreeMap, VecDeque},
    net::Ipv4Addr,
    sync::{Arc, Mutex, MutexGuard, atomic::AtomicU64},
};

use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use rouse_controllers::{
    label,
    workload::{DELETION_COST, TEMPLATE},
};
use tokio::sync::{Semaphore, mpsc, watch};

use super::{
    pods::{AcceleratorSlot, new_pod, running_status, unless_gone},
    stub::{PodReadiness, StubServer},
};
use crate::pairs::is_ready;

/// How many Deployments get or lose Pods at once.
const MAX_CONCURRENT_DEPLOYMENTS: usize = 8;
/// Addresses before this one belong to the servers.
const FIRST_POD_ADDRESS: u32 = 256;

/// Creates and deletes Pods, and remembers those that run.
pub(super) struct WorkloadRunner {
    pub(super) pods: Api<Pod>,
    /// The second number of the cluster's addresses, `127.N.0.0/16`.
    network: u8,
    permits: Semaphore,
    readiness: mpsc::UnboundedSender<PodReadiness>,
    /// Changes of Pods so far.
    pub(super) events: AtomicU64,
    pub(super) state: Mutex<WorkloadState>,
}

pub(super) struct WorkloadState {
    pods_made: u32,
    /// Free accelerators by pool. The one that has been free for longest is next.
    free: BTreeMap<String, VecDeque<AcceleratorSlot>>,
    pub(super) running: BTreeMap<String, RunningPod>,
    pub(super) deployments: BTreeMap<String, watch::Sender<Arc<Deployment>>>,
}

pub(super) struct RunningPod {
    slot: AcceleratorSlot,
    pool: String,
    deployment: String,
    server: Option<StubServer>,
}

impl WorkloadRunner {
    pub(super) fn new(
        pods: Api<Pod>,
        network: u8,
        free: BTreeMap<String, VecDeque<AcceleratorSlot>>,
        readiness: mpsc::UnboundedSender<PodReadiness>,
    ) -> Self {
        let state =
            WorkloadState { pods_made: 0, free, running: BTreeMap::new(), deployments: BTreeMap::new() };
        Self {
            pods,
            network,
            permits: Semaphore::new(MAX_CONCURRENT_DEPLOYMENTS),
            readiness,
            events: AtomicU64::default(),
            state: Mutex::new(state),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, WorkloadState> {
        self.state.lock().unwrap()
    }

    /// Creates or deletes Pods of this Deployment until it has as many as it asks for.
    pub(super) async fn scale(&self, deployment: &Deployment) {
        let _permit = self.permits.acquire().await.unwrap();
        let labelled = |key: &str| format!("{key}={}", deployment.labels()[key]);
        let own = ListParams::default().labels(&format!("{},{}", labelled(label::MODEL), labelled(TEMPLATE)));
        let mut pods = self.pods.list(&own).await.unwrap().items;
        pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
        let replicas = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
        let wanted = usize::try_from(replicas).unwrap();
        for _ in pods.len()..wanted {
            self.create(deployment).await;
        }
        let cost = |pod: &Pod| pod.annotations().get(DELETION_COST).and_then(|cost| cost.parse::<i32>().ok());
        pods.sort_by_key(|pod| (is_ready(pod), cost(pod).unwrap_or(0)));
        for pod in pods.iter().take(pods.len().saturating_sub(wanted)) {
            unless_gone(self.pods.delete(&pod.name_any(), &DeleteParams::default()).await);
        }
    }

    async fn create(&self, deployment: &Deployment) {
        let (pod, slot, pool, address) = {
            let mut state = self.state();
            state.pods_made += 1;
            let number = state.pods_made;
            let [_, _, high, low] = (FIRST_POD_ADDRESS + number).to_be_bytes();
            let (mut pod, pool) = new_pod(deployment, number);
            let free = state.free.get_mut(&pool).unwrap();
            let slot = free.pop_front().unwrap_or_else(|| panic!("{pool} has no free accelerator"));
            pod.spec.as_mut().unwrap().node_name = Some(slot.node.clone());
            (pod, slot, pool, Ipv4Addr::new(127, self.network, high, low))
        };
        let name = pod.name_any();
        let (accelerator, readiness) = (slot.accelerator.clone(), self.readiness.clone());
        let server = StubServer::start(address, name.clone(), accelerator, readiness).await.unwrap();
        let running = RunningPod { slot, pool, deployment: deployment.name_any(), server: Some(server) };
        self.state().running.insert(name.clone(), running);
        self.pods.create(&PostParams::default(), &pod).await.unwrap();
        let patch = Patch::Merge(running_status(&pod, address));
        unless_gone(self.pods.patch_status(&name, &PatchParams::default(), &patch).await);
    }

    /// Ends the Pod's stub at once, and then the object.
    pub(super) async fn end(&self, pod: &str) {
        let server = self.state().running.get_mut(pod).and_then(|running| running.server.take());
        drop(server);
        let now = DeleteParams::default().grace_period(0);
        unless_gone(self.pods.delete(pod, &now).await);
    }

    /// Frees the accelerator, and lets the Deployment replace the Pod if it still wants it.
    pub(super) fn forget(&self, pod: &str) {
        let mut state = self.state();
        let Some(RunningPod { slot, pool, deployment, .. }) = state.running.remove(pod) else { return };
        state.free.entry(pool).or_default().push_back(slot);
        if let Some(desired) = state.deployments.get(&deployment) {
            desired.send_modify(|_| {});
        }
    }
}
