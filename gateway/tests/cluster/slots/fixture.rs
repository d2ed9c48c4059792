//! A namespace with nodes whose kubelets are played, and DeviceConfigurations for them alone.

use std::{path::PathBuf, pin::pin, sync::Arc};

use futures_util::{StreamExt as _, future::join_all};
use k8s_openapi::api::core::v1::{Event, Namespace, Node};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
    runtime::{WatchStreamExt as _, watcher},
};
use rouse_cluster::{ClusterUser, TestCluster, podrunner::NodeSpec, wait::WAIT_TIMEOUT};
use rouse_controllers::crd::DeviceConfiguration;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{agent::SlotNodeFixture, device::SharedDevice};
use crate::{
    installation::{Installation, merge},
    rendered::ChartPart,
    site::GatewayNamespace,
    support::{FIELD_MANAGER, cluster},
};

/// The label of all nodes of a fixture; its value is the namespace.
pub(super) const NODES_LABEL: &str = "slots";

pub(super) struct SlotsFixture<'a> {
    pub(super) world: Installation<'a>,
    /// The kubeconfig of the agents' account.
    pub(super) kubeconfig: PathBuf,
    /// Kubernetes deletes the configurations with the namespace: tests share a cluster.
    owner: Value,
}

impl SlotsFixture<'static> {
    /// A fixture in the cluster that all tests share, with nodes of these names.
    pub(super) async fn new(name: &str, nodes: &[&str]) -> Self {
        Self::new_in(cluster().await, name, nodes).await
    }
}

impl<'a> SlotsFixture<'a> {
    /// A fixture in a cluster that serves our kinds.
    pub(super) async fn new_in(cluster: &'a TestCluster, name: &str, nodes: &[&str]) -> Self {
        let site = GatewayNamespace::with_parts(cluster, name, &[ChartPart::Slots]).await;
        let own = site.namespace.name().to_owned();
        let node = |name: &str| NodeSpec::new(name).label(NODES_LABEL, &own);
        let (first, more) = nodes.split_first().unwrap();
        let account = site.agent_account().await;
        let world = Installation::with_node(site, "128Gi", |_| node(first)).await;
        for name in more {
            world.runner.add_node(node(name)).await.unwrap();
        }
        Self::with(world, &account).await
    }

    /// A fixture over an installation whose nodes have [`NODES_LABEL`].
    pub(super) async fn with(world: Installation<'a>, account: &ClusterUser) -> Self {
        let namespaces: Api<Namespace> = Api::all(world.site.admin.clone());
        let uid = namespaces.get(world.name()).await.unwrap().uid();
        let owner = json!({"apiVersion": "v1", "kind": "Namespace", "name": world.name(), "uid": uid});
        let kubeconfig = world.site.cluster.kubeconfig(account).unwrap();
        Self { world, kubeconfig, owner }
    }

    /// Starts the kubelets of these nodes, and their agents.
    pub(super) async fn nodes<const N: usize>(&self, names: [&str; N]) -> [SlotNodeFixture; N] {
        let nodes = join_all(names.map(|name| SlotNodeFixture::new(self, name))).await;
        let Ok(mut nodes) = <[SlotNodeFixture; N]>::try_from(nodes) else { unreachable!() };
        nodes.iter_mut().for_each(SlotNodeFixture::start);
        nodes
    }

    /// Does the same, and has the nodes report their slots, as kubelets do. A leader frees those of a node without any.
    pub(super) async fn reporting_nodes<const N: usize>(&self, names: [&str; N]) -> [SlotNodeFixture; N] {
        let nodes = self.nodes(names).await;
        for (name, node) in names.iter().zip(&nodes) {
            self.world.runner.use_device_manager(name, Arc::clone(&node.kubelet)).await.unwrap();
        }
        nodes
    }

    /// The name of the DeviceConfiguration that has this name in the test.
    pub(super) fn configuration_name(&self, name: &str) -> String {
        format!("{}-{name}", self.world.name())
    }

    /// Applies a DeviceConfiguration for the nodes of this fixture, unless the spec selects others.
    pub(super) async fn configure(&self, name: &str, spec: Value) -> DeviceConfiguration {
        let mut whole = json!({"nodeSelector": {NODES_LABEL: self.world.name()}});
        merge(&mut whole, spec);
        let name = self.configuration_name(name);
        let object = json!({
            "apiVersion": "rouse.dev/v1alpha1", "kind": "DeviceConfiguration",
            "metadata": {"name": name, "ownerReferences": [self.owner]}, "spec": whole,
        });
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        self.configurations().patch(&name, &parameters, &Patch::Apply(&object)).await.unwrap()
    }

    pub(super) fn configurations(&self) -> Api<DeviceConfiguration> {
        Api::all(self.world.site.admin.clone())
    }

    /// Applies a DeviceConfiguration of one listed device, and returns the device.
    pub(super) async fn share(&self, name: &str, capacity: u32, more: Value) -> SharedDevice {
        let mut spec =
            json!({"capacity": capacity, "discovery": {"static": {"devices": [{"id": "appliance"}]}}});
        merge(&mut spec, more);
        self.configure(name, spec).await;
        self.device(name, "appliance", None)
    }

    /// The device with this id, of this node alone or of all nodes.
    pub(super) fn device(&self, configuration: &str, id: &str, node: Option<&str>) -> SharedDevice {
        SharedDevice::new(&self.world.site.admin, &self.configuration_name(configuration), id, node)
    }

    pub(super) fn node_api(&self) -> Api<Node> {
        Api::all(self.world.site.admin.clone())
    }

    /// Waits for an Event with this reason on this node.
    pub(super) async fn until_node_event(&self, node: &str, reason: &str) -> Event {
        let events: Api<Event> = Api::namespaced(self.world.site.admin.clone(), "default");
        let of_node = format!("involvedObject.kind=Node,involvedObject.name={node}");
        let events = watcher(events, watcher::Config::default().fields(&of_node));
        let mut events = pin!(events.default_backoff().applied_objects());
        let found = async {
            loop {
                let event = events.next().await.unwrap().unwrap();
                if event.reason.as_deref() == Some(reason) {
                    return event;
                }
            }
        };
        timeout(WAIT_TIMEOUT, found).await.unwrap_or_else(|_| panic!("{node} has no Event {reason}"))
    }
}
