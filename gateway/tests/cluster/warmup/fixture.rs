//! A gateway with nodes whose kubelets are played.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
};
use rouse_cluster::{TestCluster, podrunner::NodeSpec, wait};
use serde_json::{Value, json};

use super::{
    kubelet::PlayedKubelet,
    objects::{SETTINGS, WARMUP_LABEL},
};
use crate::{
    installation::{ClusterGateway, Installation},
    site::GatewayNamespace,
    support::cluster,
};

/// The label of all nodes of a fixture; its value is the namespace.
pub(super) const NODES_LABEL: &str = "warmed";
/// The image of a custom action. Nothing runs it.
const ACTION_IMAGE: &str = "registry.example.com/action:1";

pub(super) struct WarmupFixture<'a> {
    pub(super) world: Installation<'a>,
    pub(super) kubelet: PlayedKubelet,
    pub(super) gateway: ClusterGateway,
}

impl WarmupFixture<'static> {
    /// A fixture in the cluster that all tests share, with nodes of these names.
    pub(super) async fn new(name: &str, nodes: &[&str]) -> Self {
        let world = Box::pin(world(cluster().await, name, nodes)).await;
        Self::over(world)
    }
}

impl<'a> WarmupFixture<'a> {
    /// Starts the kubelet and a gateway.
    pub(super) fn over(world: Installation<'a>) -> Self {
        Self::with_settings(world, SETTINGS)
    }

    /// Starts the kubelet and a gateway with these settings in its section `kubernetes`.
    pub(super) fn with_settings(world: Installation<'a>, settings: &str) -> Self {
        let kubelet = PlayedKubelet::start(world.pods());
        let gateway = world.gateway_with("gateway-0", settings);
        Self { world, kubelet, gateway }
    }

    /// The name of this node's object.
    pub(super) fn node(&self, name: &str) -> String {
        self.world.runner.node(name).name().to_owned()
    }

    pub(super) fn nodes(&self, names: &[&str]) -> Vec<String> {
        names.iter().map(|name| self.node(name)).collect()
    }

    /// The spec of a Warmup of these images on these nodes.
    pub(super) fn spec(&self, nodes: &[&str], images: &[&str], policies: Value) -> Value {
        let target = json!({"nodeNames": self.nodes(nodes), "imagesPreload": {"items": images}});
        json!({"policies": policies, "targetNodes": target})
    }

    /// The spec of a Warmup with an action on these nodes, in a container with these fields.
    pub(super) fn action_spec(&self, nodes: &[&str], container: Value, policies: Value) -> Value {
        let mut action = json!({"name": "action", "image": ACTION_IMAGE});
        crate::installation::merge(&mut action, container);
        let template = json!({"spec": {"restartPolicy": "Never", "containers": [action]}});
        let target = json!({"nodeNames": self.nodes(nodes), "customizedAction": {"podTemplate": template}});
        json!({"policies": policies, "targetNodes": target})
    }

    fn node_api(&self) -> Api<Node> {
        Api::all(self.world.site.admin.clone())
    }

    /// Changes this node's object.
    pub(super) async fn patch_node(&self, name: &str, change: Value) {
        let (api, patch) = (self.node_api(), Patch::Strategic(change));
        api.patch(&self.node(name), &PatchParams::default(), &patch).await.unwrap();
    }

    pub(super) async fn patch_node_status(&self, name: &str, change: Value) {
        let (api, patch) = (self.node_api(), Patch::Strategic(json!({"status": change})));
        api.patch_status(&self.node(name), &PatchParams::default(), &patch).await.unwrap();
    }

    pub(super) async fn delete_node(&self, name: &str) {
        self.node_api().delete(&self.node(name), &DeleteParams::default()).await.unwrap();
    }

    /// Deletes this node's object, and creates another one of its name, as when a machine is replaced.
    pub(super) async fn replace_node(&self, name: &str) {
        let api = self.node_api();
        let Node { metadata, spec, status } = api.get(&self.node(name)).await.unwrap();
        self.delete_node(name).await;
        let metadata = ObjectMeta { name: metadata.name, labels: metadata.labels, ..ObjectMeta::default() };
        api.create(&PostParams::default(), &Node { metadata, spec, status }).await.unwrap();
    }

    /// Creates a Pod with these labels on this node, or on none.
    pub(super) async fn other_pod(&self, name: &str, labels: Value, node: Option<&str>) {
        let node = node.map(|node| self.node(node));
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels},
        "spec": {
            "nodeName": node,
            "schedulerName": "none",
            "containers": [{"name": "main", "image": "registry.example.com/other:1"}],
        }});
        let pod: Pod = serde_json::from_value(pod).unwrap();
        self.world.pods().create(&PostParams::default(), &pod).await.unwrap();
    }

    /// The Pods of Warmups that are there.
    pub(super) async fn pods(&self) -> Vec<Pod> {
        let only = ListParams::default().labels(WARMUP_LABEL);
        self.world.pods().list(&only).await.unwrap().items
    }

    /// Waits until all Pods of Warmups have nodes, and asserts that there are so many.
    pub(super) async fn bound_pods(&self, number: usize) -> Vec<Pod> {
        loop {
            let pods = self.pods().await;
            assert_eq!(pods.len(), number);
            let is_bound = |pod: &Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
            let Some(unbound) = pods.iter().find(|pod| !is_bound(pod)) else { return pods };
            let name = unbound.name_any();
            wait::until(&self.world.pods(), &name, "a node", |pod| pod.as_ref().is_some_and(is_bound))
                .await
                .unwrap();
        }
    }

    /// Deletes all Pods of Warmups, as a user would.
    pub(super) async fn delete_pods(&self) {
        for pod in self.pods().await {
            self.world.pods().delete(&pod.name_any(), &DeleteParams::default()).await.ok();
        }
    }
}

/// An installation with these nodes. Its gateways may not label nodes.
pub(super) async fn world<'a>(cluster: &'a TestCluster, name: &str, nodes: &[&str]) -> Installation<'a> {
    let site = GatewayNamespace::new(cluster, name).await;
    let own = site.namespace.name().to_owned();
    let node =
        |name: &str| NodeSpec::new(name).gpus(2).label("inference-pool", &own).label(NODES_LABEL, &own);
    let (first, more) = nodes.split_first().unwrap();
    let world = Installation::with_node(site, "128Gi", |_| node(first)).await;
    for name in more {
        world.runner.add_node(node(name)).await.unwrap();
    }
    world
}
