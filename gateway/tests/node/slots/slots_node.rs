//! The node that these tests share: a kubelet with an agent, and a gateway that keeps the slots.

use std::{collections::BTreeMap, path::PathBuf, sync::OnceLock};

use k8s_openapi::{api::core::v1::Node as NodeObject, jiff::Timestamp};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use rouse_cluster::{KubeletNode, TestCluster, wait};
use rouse_controllers::crd::DeviceConfiguration;
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard, OnceCell};

use super::{agent::NodeAgentProcess, device::SharedDevice};
use crate::{
    installation::merge,
    rendered::ChartPart,
    shared_node::{NodeInstallation, archives, start_node},
    support::{FIELD_MANAGER, define_kinds},
};

/// The node's only accelerator. The agent leaves out one GiB as headroom.
pub(super) const ACCELERATOR: &str = "GPU-slots";
const ACCELERATORS: &str = "GPU-slots 81Gi\n";
/// The number of its slots.
pub(super) const SLOTS: u32 = 8;
/// The DeviceConfiguration of accelerators.
pub(super) const ACCELERATOR_CONFIGURATION: &str = "gpu";
/// The folder with programs that are optimised as releases are: the figures promised for releases hold for them.
const OPTIMISED: &str = "ROUSE_OPTIMISED";

pub(super) struct SlotsNode {
    pub(super) ground: NodeInstallation<'static>,
    pub(super) agent: NodeAgentProcess,
    /// Whether gateway, agent and stubs are optimised as releases are.
    pub(super) is_optimised: bool,
}

/// Waits for the turn of this test, and returns the node. The first caller starts it, and it ends with the process.
pub(super) async fn slots_node() -> MutexGuard<'static, SlotsNode> {
    static NODE: OnceCell<Mutex<SlotsNode>> = OnceCell::const_new();
    let start = async || Mutex::new(Box::pin(SlotsNode::start()).await);
    let mut node = NODE.get_or_init(start).await.lock().await;
    node.agent.ensure_running();
    node
}

impl SlotsNode {
    async fn start() -> Self {
        static CLUSTER: OnceLock<TestCluster> = OnceLock::new();
        let cluster = CLUSTER.get_or_init(|| TestCluster::start().unwrap());
        Box::pin(define_kinds(cluster)).await;
        let optimised = std::env::var_os(OPTIMISED).map(PathBuf::from);
        let (program, stub_archives) = match &optimised {
            Some(folder) => (folder.join("rouse-gateway"), folder.join("images")),
            None => (env!("CARGO_BIN_EXE_rouse-gateway").into(), archives()),
        };
        let world = Box::pin(start_node(cluster, "slots", 0, program, &stub_archives)).await;
        world.site.turn_on(ChartPart::Slots).await;
        let agent = NodeAgentProcess::new(&world, ACCELERATORS).await;
        let name = world.name().to_owned();
        let pool = json!({
            "nodeSelector": {"inference-pool": name},
            "resource": kind(ACCELERATOR_CONFIGURATION),
            "slots": SLOTS,
            "sleepingMemory": "8Gi",
            "hostSleepMemory": "256Gi",
        });
        world.pool(&name, pool).await;
        let mark = [cluster.mark()];
        let gateway = world.gateway_in("gateway-0", ", dualPods: {}, slots: {}", &mark);
        let ground = NodeInstallation { installation: world, gateway };
        let mut node = Self { ground, agent, is_optimised: optimised.is_some() };
        let accelerators = json!({"capacity": SLOTS, "discovery": {"accelerators": {}}});
        node.configure(ACCELERATOR_CONFIGURATION, accelerators).await;
        node.agent.start();
        node.until_allocatable(&[(&kind(ACCELERATOR_CONFIGURATION), 1)]).await;
        node
    }

    pub(super) fn runner(&self) -> &KubeletNode {
        &self.ground.installation.runner
    }

    /// The name of the Node.
    pub(super) fn name(&self) -> &str {
        self.runner().name()
    }

    pub(super) fn node_api(&self) -> Api<NodeObject> {
        Api::all(self.ground.installation.site.admin.clone())
    }

    /// Applies a DeviceConfiguration.
    pub(super) async fn configure(&self, name: &str, spec: Value) {
        let object = json!({
            "apiVersion": "rouse.dev/v1alpha1", "kind": "DeviceConfiguration",
            "metadata": {"name": name}, "spec": spec,
        });
        let api: Api<DeviceConfiguration> = Api::all(self.ground.installation.site.admin.clone());
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        api.patch(name, &parameters, &Patch::Apply(&object)).await.unwrap();
    }

    /// Applies a DeviceConfiguration of one listed device, waits until the kubelet offers its slots, and returns it.
    /// The device has the configuration's name as its id.
    pub(super) async fn share(&self, name: &str, capacity: u32, more: Value) -> SharedDevice {
        let mut spec = json!({"capacity": capacity, "discovery": {"static": {"devices": [{"id": name}]}}});
        merge(&mut spec, more);
        self.configure(name, spec).await;
        let device = self.device(name, name, None);
        self.until_allocatable(&[(&kind(name), 1), (&device.resource(), capacity)]).await;
        device
    }

    /// The device with this id, of this node alone or of all nodes.
    pub(super) fn device(&self, configuration: &str, id: &str, node: Option<&str>) -> SharedDevice {
        SharedDevice::new(&self.ground.installation.site.admin, configuration, id, node)
    }

    /// Waits until the kubelet offers this number of each of these resources.
    pub(super) async fn until_allocatable(&self, expected: &[(&str, u32)]) {
        let fits = |node: &Option<NodeObject>| {
            let offered = node.as_ref().map(allocatable).unwrap_or_default();
            expected.iter().all(|(name, count)| offered.get(*name).copied().unwrap_or_default() == *count)
        };
        wait::until(&self.node_api(), self.name(), &format!("{expected:?}"), fits).await.unwrap();
    }

    /// Waits until the kubelet has reported its node this many times from now on.
    pub(super) async fn until_reports(&self, count: usize) {
        let mut reports = Vec::<Timestamp>::new();
        let fits = |node: &Option<NodeObject>| {
            let latest = node.as_ref().and_then(reported_at);
            if latest.is_some() && reports.last() != latest.as_ref() {
                reports.extend(latest);
            }
            reports.len() > count
        };
        wait::until(&self.node_api(), self.name(), &format!("{count} reports"), fits).await.unwrap();
    }
}

/// The resource of any device of this configuration.
pub(super) fn kind(configuration: &str) -> String {
    format!("rouse.dev/{configuration}")
}

/// The numbers of the slots and other whole units that the kubelet offers.
fn allocatable(node: &NodeObject) -> BTreeMap<String, u32> {
    let offered = node.status.iter().flat_map(|status| status.allocatable.iter().flatten());
    offered.filter_map(|(name, count)| Some((name.clone(), count.0.parse().ok()?))).collect()
}

/// When the kubelet last reported whether its node is ready.
fn reported_at(node: &NodeObject) -> Option<Timestamp> {
    let mut conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.find(|condition| condition.type_ == "Ready")?;
    ready.last_heartbeat_time.as_ref().map(|at| at.0)
}
