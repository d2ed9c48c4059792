//! The cluster and the node that all tests share, and their Pods.

use std::path::PathBuf;

use rouse_cluster::{KubeletNode, TestCluster, node::image};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

/// The number of accelerators that the shared node reports.
pub(crate) const ACCELERATORS: u32 = 4;
/// The stub's ports in [`engine`].
pub(crate) const RELAY: u16 = 8000;
pub(crate) const ADMIN: u16 = 8001;
const PROBES: u16 = 8080;
/// The engine's port, on the Pod's loopback only.
pub(crate) const ENGINE: u16 = 9000;

/// Starts the shared node on first use. It ends with the process.
pub(crate) async fn node() -> &'static KubeletNode {
    static SHARED: OnceCell<KubeletNode> = OnceCell::const_new();
    let started = SHARED.get_or_try_init(|| start(TestCluster::shared())).await;
    started.unwrap_or_else(|error| panic!("no node: {error:#}"))
}

pub(crate) async fn start(cluster: &TestCluster) -> anyhow::Result<KubeletNode> {
    let images = KubeletNode::builder(cluster, &archives()).image("rouse-stub").image("engine-sim");
    images.accelerators(ACCELERATORS).start().await
}

/// `make test-node` builds the archives beside cargo's output, which includes this program.
fn archives() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    program.parent().unwrap().with_file_name("images")
}

/// The spec of a Pod with an engine on one accelerator and a stub as its sidecar. Only the stub can reach the engine.
pub(crate) fn engine() -> Value {
    let ready = json!({ "path": "/ready", "port": PROBES });
    json!({
        "terminationGracePeriodSeconds": 20,
        "initContainers": [{
            "name": "stub",
            "image": image("rouse-stub"),
            "imagePullPolicy": "Never",
            "restartPolicy": "Always",
            "args": ["proxy", format!("--relay-port-1={RELAY}"), format!("--admin-port={ADMIN}")],
            "env": [{ "name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-a" }],
            "readinessProbe": { "httpGet": ready, "periodSeconds": 1, "failureThreshold": 1 },
        }],
        "containers": [{
            "name": "engine",
            "image": image("engine-sim"),
            "imagePullPolicy": "Never",
            "args": ["--host=127.0.0.1", format!("--port={ENGINE}"), "--model=qwen"],
            "resources": { "limits": { "nvidia.com/gpu": 1 } },
        }],
    })
}
