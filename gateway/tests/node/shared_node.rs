//! The node, the pool and the gateway that all tests share: a node can be in one pool only, and a pool has one leader.
//! Each test has models of its own.

use std::{
    path::{Path, PathBuf},
    sync::LazyLock,
};

use k8s_openapi::api::{apps::v1::Deployment, core::v1::Node as NodeObject, core::v1::Pod};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
};
use rouse_cluster::{KubeletNode, TestCluster, node::image, wait};
use rouse_controllers::{crd::InferenceModel, label, workload::CONTAINER};
use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::OnceCell};

use crate::{
    client::{TestExchange, TestResponse},
    installation::{ClusterGateway, Installation, blocking, reason},
    pages,
    rendered::ChartPart,
    site::GatewayNamespace,
    support::cluster,
    warmup_objects::SETTINGS,
};

/// The number of accelerators that the node reports.
const ACCELERATORS: u32 = 8;

pub(crate) struct NodeInstallation<'a> {
    pub(crate) installation: Installation<'a, KubeletNode>,
    pub(crate) gateway: ClusterGateway,
}

/// Runs a test on the shared runtime, because clients of the API server belong to a runtime.
pub(crate) fn run(test: impl Future<Output = ()>) {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());
    RUNTIME.block_on(test);
}

/// The shared installation: the first caller starts it, and it ends with the process.
pub(crate) async fn shared_node() -> &'static NodeInstallation<'static> {
    static SHARED: OnceCell<NodeInstallation> = OnceCell::const_new();
    let start = async || Box::pin(start(cluster().await, "")).await;
    SHARED.get_or_init(start).await
}

/// Starts an installation in a cluster that serves our kinds. `dual` is the gateway's configuration for dual pods.
pub(crate) async fn start<'a>(cluster: &'a TestCluster, dual: &str) -> NodeInstallation<'a> {
    let program = env!("CARGO_BIN_EXE_rouse-gateway").into();
    let world = Box::pin(start_node(cluster, "node", ACCELERATORS, program, &archives())).await;
    let namespace = world.name().to_owned();
    let memory = json!({"nvidia.com/gpu.memory": "81920"});
    label_node(&world.site.admin, &world.runner, &memory).await;
    let selector = json!({"inference-pool": namespace});
    let pool = json!({"nodeSelector": selector, "sleepingMemory": "8Gi", "hostSleepMemory": "256Gi"});
    world.pool(&namespace, pool).await;
    let settings = format!("{SETTINGS}, anyBackend: true, dualPods: {{{dual}}}");
    let gateway = world.gateway_in("gateway-0", &settings, &[world.site.cluster.mark()]);
    NodeInstallation { installation: world, gateway }
}

/// Starts a namespace with the rights for dual pods, and a node with the label `inference-pool` of the same name.
/// `program` is that of its gateways, and `stub_archives` the folder with the stub's image.
pub(crate) async fn start_node<'a>(
    cluster: &'a TestCluster,
    name: &str,
    accelerators: u32,
    program: PathBuf,
    stub_archives: &Path,
) -> Installation<'a, KubeletNode> {
    let site = GatewayNamespace::with_parts(cluster, name, &[ChartPart::DualPods]).await;
    let namespace = site.namespace.name().to_owned();
    let node = KubeletNode::builder(site.cluster, &archives()).image("engine-sim").accelerators(accelerators);
    let node = node.start().await.unwrap_or_else(|error| panic!("{error:#}"));
    pages::import_stub(&node, stub_archives).await;
    let dir = tempfile::tempdir().unwrap();
    let (stub_image, watched) = (image("rouse-stub"), namespace.clone());
    let world = Installation { site, runner: node, dir, program, stub_image, watched };
    label_node(&world.site.admin, &world.runner, &json!({"inference-pool": namespace})).await;
    world
}

/// Where `make test-node` builds the images: beside cargo's outputs, of which this program is one.
pub(crate) fn archives() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().with_file_name("images")
}

/// Adds labels to the node.
pub(crate) async fn label_node(admin: &Client, node: &KubeletNode, labels: &Value) {
    let nodes: Api<NodeObject> = Api::all(admin.clone());
    let patch = Patch::Merge(json!({"metadata": {"labels": labels}}));
    nodes.patch(node.name(), &PatchParams::default(), &patch).await.unwrap();
}

/// Returns the spec of a model over engine-sim in a container, on nodes with this value of the label `inference-pool`.
/// `flags` are the engine's.
fn engine_sim_spec(name: &str, pool: &str, flags: &str) -> Value {
    let mut args = vec!["--host=$(POD_IP)".to_owned(), "--port=8000".to_owned(), format!("--model={name}")];
    args.extend("--start-time 100ms --ttft 5ms --itl 5ms".split(' ').map(str::to_owned));
    args.extend(flags.split_whitespace().map(str::to_owned));
    json!({
        "modelName": name,
        "memory": "40Gi",
        "nodeSelector": {"inference-pool": pool},
        "engine": {"kind": "vllm"},
        "template": {"spec": {
            "terminationGracePeriodSeconds": 20,
            "containers": [{
                "name": "engine",
                "image": image("engine-sim"),
                "args": args,
                "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
            }],
        }},
    })
}

impl NodeInstallation<'_> {
    /// Creates a model over engine-sim in a container. `flags` are the engine's; `more` changes its spec.
    pub(crate) async fn model(
        &self,
        name: &str,
        flags: &str,
        more: impl FnOnce(&mut Value),
    ) -> InferenceModel {
        let mut spec = engine_sim_spec(name, self.installation.name(), flags);
        more(&mut spec);
        self.installation.apply(name, &spec).await.unwrap();
        self.installation.until(name, "accepted", |model| reason(model, "Accepted") == "Accepted").await
    }

    /// Sends a chat request for a few tokens.
    pub(crate) async fn chat(&self, model: &str, stream: bool) -> TestResponse {
        let (client, model) = (self.gateway.client(), model.to_owned());
        blocking(move || client.chat(&model, stream, 8)).await
    }

    /// Opens a stream of this many tokens, and returns once the first has arrived.
    pub(crate) async fn stream(&self, model: &str, tokens: u32) -> NodeClientStream {
        let (client, model) = (self.gateway.client(), model.to_owned());
        blocking(move || {
            let mut open = client.open_chat(&model, true, tokens);
            open.until("\"content\"");
            NodeClientStream(open)
        })
        .await
    }

    fn list_params(&self, model: &str) -> ListParams {
        ListParams::default().labels(&format!("{}={}", label::MODEL, label::value(model)))
    }

    /// The model's Pods, including those with a deletion timestamp.
    pub(crate) async fn pods(&self, model: &str) -> Vec<Pod> {
        self.installation.pods().list(&self.list_params(model)).await.unwrap().items
    }

    pub(crate) async fn deployments(&self, model: &str) -> Vec<Deployment> {
        self.installation.deployments().list(&self.list_params(model)).await.unwrap().items
    }

    /// Waits until the model's only Pod fits, and returns it.
    pub(crate) async fn pod(&self, model: &str, what: &str, fits: impl Fn(&Pod) -> bool) -> Pod {
        let api = self.installation.pods();
        loop {
            // A Deployment's Pod has a generated name.
            let pods = self.pods(model).await;
            if let [pod] = &pods[..] {
                let fits = |pod: &Option<Pod>| pod.as_ref().is_some_and(&fits);
                return wait::until(&api, &pod.name_any(), what, fits).await.unwrap().unwrap();
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    /// Waits until the Pod and its processes are gone.
    pub(crate) async fn until_gone(&self, pod: &Pod) {
        wait::until(&self.installation.pods(), &pod.name_any(), "its end", Option::is_none).await.unwrap();
        assert_eq!(self.installation.runner.processes(pod).unwrap(), Vec::<i32>::new());
    }

    /// GiB that are reserved for this model.
    pub(crate) async fn reserved_gib(&self, model: &str) -> Vec<u64> {
        let booked = self.installation.reserved_gib().await.into_iter();
        booked.filter(|(of, _)| of == model).map(|(_, bytes)| bytes).collect()
    }
}

/// Sets the model's cooldown.
pub(crate) fn idle_after(cooldown: &'static str) -> impl FnOnce(&mut Value) {
    move |spec| spec["cooldownPeriod"] = json!(cooldown)
}

/// The pid of the process in the engine's container.
pub(crate) fn engine_pid(pod: &Pod, processes: &[i32]) -> i32 {
    assert_eq!(pod.annotations()[CONTAINER], "engine");
    simulator_pid(processes)
}

/// The pid of engine-sim.
pub(crate) fn simulator_pid(processes: &[i32]) -> i32 {
    let found = find_program(processes, "/engine-sim");
    found.unwrap_or_else(|| panic!("no engine among {processes:?}"))
}

/// The pid of the process that runs this program of its image.
pub(crate) fn find_program(processes: &[i32], program: &str) -> Option<i32> {
    let runs = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).next() == Some(program.as_bytes())
    };
    processes.iter().copied().find(runs)
}

/// A stream whose answer the test is still reading.
pub(crate) struct NodeClientStream(TestExchange);

impl NodeClientStream {
    /// Reads to the end and returns the answer. The connection must not be reset.
    pub(crate) async fn ended(mut self) -> TestResponse {
        blocking(move || {
            while self.0.try_more().unwrap() {}
            self.0.rest()
        })
        .await
    }
}
