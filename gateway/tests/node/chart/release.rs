//! A release of the chart in a cluster of its own, with a node that has one accelerator.

use std::net::SocketAddr;

use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams},
};
use rouse_cluster::{
    KubeletNode, TestCluster,
    node::AcceleratorPlugin,
    wait::{self, WAIT_TIMEOUT},
};
use rouse_controllers::{crd::InferenceModel, label};
use serde_json::{Value, json};
use tokio::time::{Duration, sleep, timeout};

use super::{earlier, shell::PageShell};
use crate::{
    client::{TestClient, TestExchange, TestResponse},
    installation::{blocking, reason},
    pairs::{address, is_ready},
    shared_node::{archives, label_node},
};

/// The pages' namespace of gateways.
pub(super) const NAMESPACE: &str = "rouse";
/// The pages' namespace of models.
pub(super) const CHAT: &str = "chat";
/// The models of the quickstarts, in the order in which the pages request them. The last one is awake at a page's end.
pub(super) const MODELS: [&str; 2] = ["qwen3-8b", "granite-8b"];
/// The model that serves while the release changes.
const MODEL: &str = MODELS[1];
/// The Deployment of gateways, and their label `app.kubernetes.io/name`.
const GATEWAY: &str = "rouse-gateway";
const API_PORT: u16 = 8080;

pub(super) struct HelmRelease {
    client: Client,
    /// Where the gateways' Pods reach the API server.
    api_server: SocketAddr,
    shell: PageShell,
    // The plugin ends before its node, and the node before its cluster.
    _plugin: AcceleratorPlugin,
    node: KubeletNode,
    _cluster: TestCluster,
}

impl HelmRelease {
    /// Starts a cluster without our kinds and without our images, as the quickstarts expect it: NVIDIA's device plugin
    /// and GPU feature discovery have found a GPU of 24 GB.
    pub(super) async fn start() -> Self {
        let cluster = TestCluster::start().unwrap();
        let client = cluster.client().await.unwrap();
        let shell = PageShell::new(cluster.kubeconfig(cluster.admin()).unwrap());
        let node = KubeletNode::builder(&cluster, &archives()).image("engine-sim");
        let node = Box::pin(node.start()).await.unwrap_or_else(|error| panic!("{error:#}"));
        let plugin = Box::pin(node.assign_accelerators(&["GPU-0"])).await;
        let plugin = plugin.unwrap_or_else(|error| panic!("{error:#}"));
        let found = json!({"nvidia.com/gpu.present": "true", "nvidia.com/gpu.memory": "24564"});
        label_node(&client, &node, &found).await;
        let api_server = node.api_server();
        let release = Self { client, api_server, shell, _plugin: plugin, node, _cluster: cluster };
        release.set_values(json!({}));
        release
    }

    pub(super) const fn client(&self) -> &Client {
        &self.client
    }

    pub(super) const fn node(&self) -> &KubeletNode {
        &self.node
    }

    /// Where the commands of the pages are typed.
    pub(super) const fn shell(&self) -> &PageShell {
        &self.shell
    }

    /// Sets the values of the next installation or upgrade, beside those that this machine needs.
    pub(super) fn set_values(&self, values: Value) {
        self.shell.set_values(values, self.api_server);
    }

    /// Waits until the only gateway has the Deployment's present template and is ready, and returns its Pod.
    pub(super) async fn gateway(&self) -> Pod {
        let rolled_out = |deployment: &Option<Deployment>| {
            deployment.as_ref().is_some_and(|deployment| {
                let status = deployment.status.clone().unwrap_or_default();
                status.observed_generation == deployment.metadata.generation
                    && [status.replicas, status.updated_replicas, status.ready_replicas] == [Some(1); 3]
            })
        };
        let deployments = Api::<Deployment>::namespaced(self.client.clone(), NAMESPACE);
        wait::until(&deployments, GATEWAY, "the only gateway", rolled_out).await.unwrap();
        let gateways = self.pods_in(NAMESPACE, &format!("app.kubernetes.io/name={GATEWAY}")).await;
        // A gateway that ends is of no Deployment any more.
        let mut present = gateways.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let gateway = present.next().expect("a gateway");
        assert!(is_ready(&gateway) && present.next().is_none());
        gateway
    }

    /// Waits until a gateway has accepted the model and no engine of it runs.
    pub(super) async fn until_idle(&self, model: &str) {
        let is_idle = |model: &Option<InferenceModel>| {
            model.as_ref().is_some_and(|model| reason(model, "Ready") == "ScaledToZero")
        };
        wait::until(&self.models(), model, "no engine", is_idle).await.unwrap();
    }

    /// Sets the field that the earlier definition lacks, and returns whether the API server keeps it.
    pub(super) async fn keeps_limit(&self) -> bool {
        let patch = Patch::Merge(json!({"spec": {(earlier::MISSING_FIELD): 64}}));
        let model = self.models().patch(MODEL, &PatchParams::default(), &patch).await.unwrap();
        model.spec.max_concurrency == Some(64)
    }

    /// Waits until the API server keeps that field: it takes a changed definition over in its own time.
    pub(super) async fn until_limit_is_kept(&self) {
        let kept = async {
            while !self.keeps_limit().await {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(WAIT_TIMEOUT, kept).await.expect("the upgrade has not changed the definition");
    }

    fn models(&self) -> Api<InferenceModel> {
        Api::namespaced(self.client.clone(), CHAT)
    }

    /// The Pod of the model's only engine.
    pub(super) async fn engine(&self) -> Pod {
        let mut engines = self.pods(&format!("{}={}", label::MODEL, label::value(MODEL))).await;
        assert_eq!(engines.len(), 1, "{engines:?}");
        engines.remove(0)
    }

    /// The Pods with these labels in the namespace of models.
    pub(super) async fn pods(&self, labels: &str) -> Vec<Pod> {
        self.pods_in(CHAT, labels).await
    }

    async fn pods_in(&self, namespace: &str, labels: &str) -> Vec<Pod> {
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        pods.list(&ListParams::default().labels(labels)).await.unwrap().items
    }
}

/// Sends a request for a few tokens to this gateway.
pub(super) async fn chat(gateway: &Pod) -> TestResponse {
    let client = client_of(gateway);
    blocking(move || client.chat(MODEL, false, 8)).await
}

/// Opens a stream of this many tokens through this gateway, and returns once the first has arrived.
pub(super) async fn open_stream(gateway: &Pod, tokens: u32) -> TestExchange {
    let client = client_of(gateway);
    blocking(move || {
        let mut open = client.open_chat(MODEL, true, tokens);
        open.until("\"content\"");
        open
    })
    .await
}

fn client_of(gateway: &Pod) -> TestClient {
    TestClient::new(SocketAddr::new(address(gateway), API_PORT))
}
