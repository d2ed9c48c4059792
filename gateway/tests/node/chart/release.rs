//! A release of the chart in a cluster of its own, and somebody who types the commands of the pages.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
};

use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams},
};
use rouse_cluster::{
    KubeletNode, TestCluster,
    wait::{self, WAIT_TIMEOUT},
};
use rouse_controllers::{crd::InferenceModel, label};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{Duration, sleep, timeout};

use super::earlier;
use crate::{
    client::{TestClient, TestExchange, TestResponse},
    installation::{blocking, reason},
    pairs::{address, is_ready},
    shared_node::{archives, engine_sim_spec, label_node},
    support::{FIELD_MANAGER, apply_object},
};

/// The pages' namespace.
pub(super) const NAMESPACE: &str = "rouse";
/// The Deployment of gateways, and their label `app.kubernetes.io/name`.
const GATEWAY: &str = "rouse-gateway";
const API_PORT: u16 = 8080;
/// The pool of the notes.
const POOL: &str = "default";
const MODEL: &str = "greeter";

/// `helm` as its users have it, with their file of values where values are taken.
const HELM: &str = r#"
helm() {
    local values=()
    case $1 in install | upgrade) values=(--values "$VALUES") ;; esac
    "${ROUSE_HELM:?it must be the path of helm: make test-node builds it and sets the variable}" "$@" "${values[@]}"
}
"#;

pub(super) struct HelmRelease {
    client: Client,
    kubeconfig: PathBuf,
    /// Where the gateways' Pods reach the API server.
    api_server: SocketAddr,
    /// The earlier chart, the values, and what helm keeps.
    scratch: TempDir,
    // The node ends before its cluster.
    _node: KubeletNode,
    _cluster: TestCluster,
}

impl HelmRelease {
    /// Starts a cluster without our kinds, and a node with the images and the label of the notes.
    pub(super) async fn start() -> Self {
        let cluster = TestCluster::start().unwrap();
        let client = cluster.client().await.unwrap();
        let kubeconfig = cluster.kubeconfig(cluster.admin()).unwrap();
        let node = KubeletNode::builder(&cluster, &archives())
            .image("engine-sim")
            .image("rouse-stub")
            .image("rouse-gateway")
            .accelerators(1);
        let node = Box::pin(node.start()).await.unwrap_or_else(|error| panic!("{error:#}"));
        label_node(&client, &node, &json!({"inference-pool": POOL, "nvidia.com/gpu.memory": "81920"})).await;
        let (api_server, scratch) = (node.api_server(), tempfile::tempdir().unwrap());
        let release = Self { client, kubeconfig, api_server, scratch, _node: node, _cluster: cluster };
        release.set_config(&json!({}));
        release
    }

    pub(super) const fn client(&self) -> &Client {
        &self.client
    }

    /// Writes the file of values, with this value of `config`.
    pub(super) fn set_config(&self, config: &Value) {
        // Nothing on this node routes Services, and so not the API server's either.
        let env = json!([
            {"name": "KUBERNETES_SERVICE_HOST", "value": self.api_server.ip().to_string()},
            {"name": "KUBERNETES_SERVICE_PORT", "value": self.api_server.port().to_string()},
        ]);
        let gateway = json!({"replicas": 1, "preStopSeconds": 1, "extraEnv": env});
        let values = json!({"gateway": gateway, "config": config});
        fs::write(self.values(), values.to_string()).unwrap();
    }

    fn values(&self) -> PathBuf {
        self.scratch.path().join("values.yaml")
    }

    /// Runs these commands in this folder, and returns what they print.
    pub(super) fn types(&self, folder: &Path, commands: &str) -> String {
        let mut shell = Command::new("bash");
        shell.args(["-c", &format!("set -euo pipefail\n{HELM}\n{commands}\n")]).current_dir(folder);
        shell.env("KUBECONFIG", &self.kubeconfig).env("VALUES", self.values());
        for home in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            shell.env(home, self.scratch.path().join(home));
        }
        let output = shell.output().unwrap();
        let told = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{commands}: {told}{}", String::from_utf8_lossy(&output.stderr));
        told
    }

    /// Makes an earlier version of the chart, and returns the folder in which it is `charts/rouse`.
    pub(super) fn earlier_chart(&self) -> PathBuf {
        let folder = self.scratch.path().join("earlier");
        earlier::write_chart(&folder);
        folder
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
        let gateways = self.pods(&format!("app.kubernetes.io/name={GATEWAY}")).await;
        // A gateway that ends is of no Deployment any more.
        let mut present = gateways.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let gateway = present.next().expect("a gateway");
        assert!(is_ready(&gateway) && present.next().is_none());
        gateway
    }

    /// Creates the pool of the notes and a model, and waits until a gateway has accepted the model.
    pub(super) async fn serve_model(&self) {
        let pool = json!({"nodeSelector": {"inference-pool": POOL}});
        // Slow enough for a stream that lasts longer than an upgrade.
        let model = engine_sim_spec(MODEL, POOL, "--itl 50ms");
        for (kind, name, spec, namespace) in
            [("AcceleratorPool", POOL, pool, None), ("InferenceModel", MODEL, model, Some(NAMESPACE))]
        {
            let object = json!({"apiVersion": "rouse.dev/v1alpha1", "kind": kind,
                "metadata": {"name": name}, "spec": spec});
            let parameters = PatchParams::apply(FIELD_MANAGER);
            apply_object(&self.client, &object, namespace, &parameters).await.unwrap();
        }
        let accepted = |model: &Option<InferenceModel>| {
            model.as_ref().is_some_and(|model| reason(model, "Accepted") == "Accepted")
        };
        wait::until(&self.models(), MODEL, "accepted", accepted).await.unwrap();
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
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// The Pod of the model's only engine.
    pub(super) async fn engine(&self) -> Pod {
        let mut engines = self.pods(&format!("{}={}", label::MODEL, label::value(MODEL))).await;
        assert_eq!(engines.len(), 1, "{engines:?}");
        engines.remove(0)
    }

    async fn pods(&self, labels: &str) -> Vec<Pod> {
        let pods = Api::<Pod>::namespaced(self.client.clone(), NAMESPACE);
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
