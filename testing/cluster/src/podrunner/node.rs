//! Fake nodes: an object, an address, devices, and a heartbeat that can be cut.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result};
use k8s_openapi::{
    api::{
        coordination::v1::{Lease, LeaseSpec},
        core::v1::{Node, Taint},
    },
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::{
    sync::{Mutex as AsyncMutex, watch},
    time,
};

use super::schedule::ResourceUnits;
use crate::device_manager::{DeviceCounts, DeviceManager};

/// A kubelet's default. The controllers give a node up after 50 s without a heartbeat.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);
/// Delay before a failed report is repeated.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Duration of the node's lease, as a kubelet's.
const LEASE_SECONDS: i32 = 40;
/// The label of one runner's nodes.
pub(super) const RUNNER_LABEL: &str = "rouse.dev/podrunner";

/// A node as a test describes it.
#[derive(Clone, Debug)]
pub struct NodeSpec {
    pub(super) name: String,
    labels: BTreeMap<String, String>,
    devices: BTreeMap<String, u32>,
    taints: Vec<Taint>,
}

impl NodeSpec {
    /// A node without devices. Its object's name begins with that of the runner's namespace.
    pub fn new(name: &str) -> Self {
        let (labels, devices) = (BTreeMap::new(), BTreeMap::new());
        Self { name: name.to_owned(), labels, devices, taints: Vec::new() }
    }

    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Adds this many `nvidia.com/gpu`.
    #[must_use]
    pub fn gpus(self, count: u32) -> Self {
        self.devices("nvidia.com/gpu", count)
    }

    /// Adds units of this extended resource, each with an id.
    #[must_use]
    pub fn devices(mut self, resource: &str, count: u32) -> Self {
        self.devices.insert(resource.to_owned(), count);
        self
    }

    #[must_use]
    pub fn taint(mut self, key: &str, value: &str, effect: &str) -> Self {
        let (key, effect) = (key.to_owned(), effect.to_owned());
        self.taints.push(Taint { key, effect, value: Some(value.to_owned()), time_added: None });
        self
    }
}

/// The connection of the node's kubelet to the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeLink {
    Connected,
    /// The node receives Pods, but its Pod reports are delayed.
    ReportsDelayed,
    Cut,
}

/// A running node.
pub struct RunningNode {
    name: String,
    address: Ipv4Addr,
    devices: Mutex<Vec<NodeDevice>>,
    /// Allocates what device plugins offer.
    device_manager: OnceLock<Arc<DeviceManager>>,
    link: watch::Sender<NodeLink>,
    /// Held while writing a Pod's status: a kubelet writes one status at a time.
    pub(super) status_write_lock: AsyncMutex<()>,
}

#[derive(Clone, Debug)]
struct NodeDevice {
    resource: String,
    id: String,
    /// Uid of the Pod that holds the device.
    holder: Option<String>,
}

impl RunningNode {
    pub(super) fn new(name: String, address: Ipv4Addr, spec: &NodeSpec) -> Self {
        let device = |(resource, number): (&String, u32)| {
            let id = format!("GPU-{name}-{number}");
            NodeDevice { resource: resource.clone(), id, holder: None }
        };
        let numbered =
            spec.devices.iter().flat_map(|(resource, count)| (0..*count).map(move |n| (resource, n)));
        let devices = Mutex::new(numbered.map(device).collect());
        Self {
            name,
            address,
            devices,
            device_manager: OnceLock::new(),
            link: watch::Sender::new(NodeLink::Connected),
            status_write_lock: AsyncMutex::new(()),
        }
    }

    /// The name of the node's object.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its `InternalIP`, and that of its Pods with `hostNetwork`.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Returns its devices' ids, each with the uid of the Pod that holds it.
    pub fn devices(&self) -> Vec<(String, Option<String>)> {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.iter().map(|device| (device.id.clone(), device.holder.clone())).collect()
    }

    /// Sets the device manager; false if the node has one.
    pub(super) fn set_device_manager(&self, manager: Arc<DeviceManager>) -> bool {
        self.device_manager.set(manager).is_ok()
    }

    /// The device manager, if a plugin has registered this resource there.
    pub(super) fn device_manager_of(&self, resource: &str) -> Option<&Arc<DeviceManager>> {
        self.device_manager.get().filter(|manager| manager.registrations(resource) > 0)
    }

    /// Reports what device plugins offer, until dropped.
    pub(super) async fn report_plugin_devices(&self, client: &Client) {
        let Some(manager) = self.device_manager.get() else { return };
        let mut reported = DeviceCounts::new();
        while let Ok(counts) = manager.until_counts_differ(&reported).await {
            let amounts = |of: fn(&(usize, usize)) -> usize| -> Value {
                counts.iter().map(|(resource, both)| (resource.clone(), of(both).to_string())).collect()
            };
            let (capacity, allocatable) = (amounts(|both| both.0), amounts(|both| both.1));
            let status = json!({ "status": { "capacity": capacity, "allocatable": allocatable } });
            let nodes: Api<Node> = Api::all(client.clone());
            let patched =
                nodes.patch_status(&self.name, &PatchParams::default(), &Patch::Strategic(status)).await;
            match patched {
                Ok(_) => reported = counts,
                Err(_) => time::sleep(RETRY_DELAY).await,
            }
        }
    }

    /// Allocates free devices to this Pod; `None` if too few are free.
    pub(super) fn allocate(
        &self,
        holder: &str,
        units: &ResourceUnits,
    ) -> Option<BTreeMap<String, Vec<String>>> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let mut taken = BTreeMap::new();
        for (resource, count) in units {
            let free = |device: &&mut NodeDevice| device.resource == *resource && device.holder.is_none();
            let chosen: Vec<_> =
                devices.iter_mut().filter(free).take(usize::try_from(*count).ok()?).collect();
            let enough = u64::try_from(chosen.len()).ok() == Some(*count);
            let ids: Vec<_> = chosen
                .into_iter()
                .map(|device| {
                    device.holder = Some(holder.to_owned());
                    device.id.clone()
                })
                .collect();
            if !enough {
                drop(devices);
                self.release(holder);
                return None;
            }
            taken.insert(resource.clone(), ids);
        }
        Some(taken)
    }

    /// Releases this Pod's devices.
    pub(super) fn release(&self, holder: &str) {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        for device in devices.iter_mut().filter(|device| device.holder.as_deref() == Some(holder)) {
            device.holder = None;
        }
    }

    pub(super) fn set_link(&self, link: NodeLink) {
        self.link.send_replace(link);
    }

    /// Whether Pod reports reach the API server.
    pub(super) fn reports_pods(&self) -> bool {
        *self.link.borrow() == NodeLink::Connected
    }

    pub(super) fn link(&self) -> watch::Receiver<NodeLink> {
        self.link.subscribe()
    }

    /// Creates the node's object and its lease.
    pub(super) async fn register(&self, client: &Client, runner: &str, spec: &NodeSpec) -> Result<()> {
        let mut labels = spec.labels.clone();
        labels.insert(RUNNER_LABEL.to_owned(), runner.to_owned());
        labels.insert("kubernetes.io/hostname".to_owned(), self.name.clone());
        labels.insert("kubernetes.io/os".to_owned(), "linux".to_owned());
        let mut capacity: BTreeMap<_, _> =
            spec.devices.iter().map(|(resource, count)| (resource.clone(), count.to_string())).collect();
        for (resource, amount) in [("cpu", "64"), ("memory", "512Gi"), ("pods", "500")] {
            capacity.insert(resource.to_owned(), amount.to_owned());
        }
        let node: Node = serde_json::from_value(json!({
            "metadata": { "name": self.name, "labels": labels },
            "spec": { "taints": spec.taints },
            "status": {
                "capacity": capacity,
                "allocatable": capacity,
                "addresses": [
                    { "type": "InternalIP", "address": self.address },
                    { "type": "Hostname", "address": self.name },
                ],
                "conditions": [self.ready_condition()],
            },
        }))?;
        Api::all(client.clone())
            .create(&PostParams::default(), &node)
            .await
            .context("cannot create the node")?;
        self.write_lease(client).await.context("cannot write the node's lease")
    }

    /// Renews the lease until dropped.
    pub(super) async fn renew_lease(&self, client: &Client) {
        let mut ticks = time::interval(HEARTBEAT_INTERVAL);
        let mut link = self.link();
        loop {
            ticks.tick().await;
            // An error means that the node was dropped.
            if link.wait_for(|link| *link != NodeLink::Cut).await.is_err() {
                return;
            }
            // A failure is retried with the next heartbeat, as a kubelet does.
            drop(self.write_lease(client).await);
        }
    }

    async fn write_lease(&self, client: &Client) -> kube::Result<()> {
        let leases: Api<Lease> = Api::namespaced(client.clone(), "kube-node-lease");
        let spec = LeaseSpec {
            holder_identity: Some(self.name.clone()),
            lease_duration_seconds: Some(LEASE_SECONDS),
            renew_time: Some(MicroTime(Timestamp::now())),
            ..LeaseSpec::default()
        };
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": { "name": self.name },
            "spec": spec,
        });
        let patch_params = PatchParams::apply("podrunner").force();
        leases.patch(&self.name, &patch_params, &Patch::Apply(lease)).await.map(drop)
    }

    /// Reports the node as ready after the controllers marked it otherwise.
    pub(super) async fn recover(&self, client: &Client) -> kube::Result<()> {
        let status = json!({ "status": { "conditions": [self.ready_condition()] } });
        let nodes: Api<Node> = Api::all(client.clone());
        nodes.patch_status(&self.name, &PatchParams::default(), &Patch::Strategic(status)).await.map(drop)
    }

    fn ready_condition(&self) -> serde_json::Value {
        let now = Timestamp::now().to_string();
        json!({
            "type": "Ready",
            "status": "True",
            "reason": "PodRunnerReady",
            "message": "",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        })
    }
}
