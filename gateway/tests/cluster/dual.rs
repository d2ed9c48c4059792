//! Dual pods: requesters that a user creates, and the engines that they get.

mod all_modes;
mod away;
mod crashes;
mod direct;
mod faults;
mod launchers;
mod lost;
mod metered;
mod metrics;
mod models;
mod modes;
mod pod_events;
mod policies;
mod proofs;
mod races;
mod rollouts;
mod sleep_settings;
mod tainted;
mod tokens;
mod uninstalled;
mod unreachable;

use std::{collections::BTreeMap, fs, ops::Deref};

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use nix::sys::signal::Signal;
use rouse_cluster::podrunner::NodeSpec;
use serde_json::{Value, json};

use crate::{
    installation::{ClusterGateway, Installation},
    memory::until_metric,
    pairs,
    rendered::ChartPart,
    runner::TestPrograms,
    site::GatewayNamespace,
    support::{FIELD_MANAGER, cluster},
};

/// Nodes with accelerators of 64 GiB, with a limit for the memory of sleepers.
pub(crate) struct DualPodsFixture {
    pub(crate) world: Installation<'static>,
    pub(crate) gateway: ClusterGateway,
    second: Option<ClusterGateway>,
    /// Further configuration of the gateways.
    more: String,
    provider_kind: all_modes::TestedProviderKind,
    memory: TestedMemory,
    /// Further flags of the requesters' stubs.
    stub_flags: &'static [&'static str],
}

/// The memory of the accelerators and of each engine. No two engines are awake on one accelerator.
#[derive(Clone, Copy)]
struct TestedMemory {
    accelerator_mib: u64,
    awake: &'static str,
    asleep: &'static str,
    host: &'static str,
    /// The limit for all sleepers of an accelerator.
    sleepers: &'static str,
}

const LARGE: TestedMemory =
    TestedMemory { accelerator_mib: 64 << 10, awake: "40Gi", asleep: "1Gi", host: "8Gi", sleepers: "8Gi" };
/// For tests in which an engine hangs: a gateway waits for it one second more for each GiB.
const SMALL: TestedMemory =
    TestedMemory { accelerator_mib: 1536, awake: "1Gi", asleep: "64Mi", host: "512Mi", sleepers: "256Mi" };

impl DualPodsFixture {
    pub(crate) async fn new(name: &str, gpus: u32, sleepers: &'static str, dual: &str) -> Self {
        Self::sized(TestedMemory { sleepers, ..LARGE }, name, gpus, dual).await
    }

    /// A fixture whose accelerators and engines have this memory.
    async fn sized(memory: TestedMemory, name: &str, gpus: u32, dual: &str) -> Self {
        Box::pin(Self::with(TestPrograms::from_cargo(), memory, name, gpus, dual, &[])).await
    }

    /// A fixture with these programs as gateway, stubs and engines.
    pub(crate) async fn of(programs: TestPrograms, name: &str, gpus: u32, sleepers: &'static str) -> Self {
        Box::pin(Self::with(programs, TestedMemory { sleepers, ..LARGE }, name, gpus, "", &[])).await
    }

    /// A fixture whose gateway dies before its write or order of this number. A second gateway takes over, and may die
    /// as well.
    async fn dying(name: &str, point: u32, second: Option<u32>, home: all_modes::TestedProviderKind) -> Self {
        let before = |point: u32| ("ROUSE_TEST_ABORT_BEFORE_WRITE", point.to_string());
        let (programs, env) = (TestPrograms::from_cargo(), [before(point)]);
        let mut duo = Box::pin(Self::with(programs, LARGE, name, 1, home.mode(), &env)).await;
        let env: Vec<_> = second.map(before).into_iter().collect();
        duo.second = Some(duo.world.gateway_in("gateway-1", &duo.more, &env));
        duo
    }

    async fn with(
        programs: TestPrograms,
        memory: TestedMemory,
        name: &str,
        gpus: u32,
        dual: &str,
        env: &[(&str, String)],
    ) -> Self {
        let site = GatewayNamespace::with_parts(cluster().await, name, &[ChartPart::DualPods]).await;
        let namespace = site.namespace.name().to_owned();
        let mib = memory.accelerator_mib.to_string();
        let first = |own: &str| node(own, "a", gpus).label("nvidia.com/gpu.memory", &mib);
        let world = Installation::with_programs(programs, site, "1Ti", first).await;
        let pool = json!({"nodeSelector": {"inference-pool": namespace}, "sleepingMemory": memory.sleepers,
            "hostSleepMemory": "256Gi", "meterLag": "1s"});
        world.pool(&namespace, pool).await;
        let more = format!(", dualPods: {{meterLag: 1s{dual}}}");
        let gateway = world.gateway_in("gateway-0", &more, env);
        let provider_kind = all_modes::TestedProviderKind::Pod;
        let duo = Self { world, gateway, second: None, more, provider_kind, memory, stub_flags: &[] };
        duo.write_accelerator_files(&["a"]);
        duo
    }

    /// Writes the files with the accelerators of these nodes, which engines and launchers read.
    fn write_accelerator_files(&self, nodes: &[&str]) {
        let all = nodes.iter().map(|name| self.world.runner.node(&format!("{}-{name}", self.world.name())));
        let all: Vec<String> = all.flat_map(|node| node.devices()).map(|(id, _)| id).collect();
        let dir = self.world.dir.path();
        fs::write(dir.join("accelerators"), all.join("\n")).unwrap();
        let capacity = self.memory.accelerator_mib << 20;
        let cards: BTreeMap<_, _> = all.into_iter().map(|id| (id, json!({"capacity": capacity}))).collect();
        fs::write(dir.join("cards"), json!({"accelerators": cards}).to_string()).unwrap();
    }

    /// The flags of an engine that takes 40 GiB of each accelerator and keeps 1 GiB asleep, or less where engines are
    /// small. The engine dies where less is free.
    fn card(&self) -> String {
        let cards = self.world.dir.path().join("cards");
        let TestedMemory { awake, asleep, .. } = self.memory;
        format!("--accelerator-file {} --memory-awake {awake} --memory-asleep {asleep}", cards.display())
    }

    /// Kills the gateway and starts another.
    pub(crate) async fn restart(&mut self, name: &str) {
        self.kill().await;
        self.begin(name);
    }

    async fn kill(&mut self) {
        self.gateway.signal(Signal::SIGKILL);
        self.gateway.wait().await;
    }

    fn begin(&mut self, name: &str) {
        self.gateway = self.world.gateway_with(name, &self.more);
    }

    /// Creates requesters with this name. Each asks for `gpus` accelerators, and its engine takes 40 GiB of each and
    /// keeps one. `flags` are the engine's, which dies where less is free.
    pub(crate) async fn ask(&self, name: &str, replicas: u32, gpus: u32, flags: &str) {
        self.ask_with(name, replicas, gpus, &patch(name, &format!("{} {flags}", self.card()))).await;
    }

    pub(crate) async fn ask_with(&self, name: &str, replicas: u32, gpus: u32, patch: &str) {
        self.ask_by(name, replicas, gpus, json!({"dual-pods.llm-d.ai/server-patch": patch})).await;
    }

    /// Creates requesters with these annotations, which define the engine.
    pub(crate) async fn ask_by(&self, name: &str, replicas: u32, gpus: u32, mut annotations: Value) {
        let TestedMemory { awake, asleep, host, .. } = self.memory;
        annotations["rouse.dev/gpu-memory"] = json!(awake);
        annotations["rouse.dev/gpu-memory-asleep"] = json!(asleep);
        annotations["rouse.dev/host-memory"] = json!(host);
        let mut set = self.world.requester_set(name, replicas, gpus, annotations, &[]);
        let args = set["spec"]["template"]["spec"]["containers"][0]["args"].as_array_mut().unwrap();
        args.extend(self.stub_flags.iter().map(|flag| json!(flag)));
        self.world.apply_set(name, &set).await;
    }

    /// Writes the public project's map of accelerators to their numbers.
    pub(crate) async fn map(&self, numbers: &BTreeMap<String, String>) {
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpu-map"}, "data": numbers});
        let maps: Api<ConfigMap> = self.world.site.namespace.api();
        maps.patch("gpu-map", &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&map)).await.unwrap();
    }

    /// Waits until the requesters and the providers fit, and returns them.
    pub(crate) async fn until(
        &self,
        name: &str,
        what: &str,
        fits: impl Fn(&[Pod], &[Pod]) -> bool,
    ) -> (Vec<Pod>, Vec<Pod>) {
        self.until_pair(name, what, fits).await
    }

    /// Waits until the gateway's metrics count this many requesters that got their engines in this way.
    async fn counted(&self, path: &str, config: &str, many: u32) {
        let labels =
            format!("exported_namespace=\"{}\",isc_name=\"{config}\",path=\"{path}\"", self.world.name());
        until_metric(&self.gateway, &format!("fma_actuation_seconds_count{{{labels}}} {many}")).await;
    }

    pub(crate) async fn cordon(&self, node: &str) {
        let nodes: Api<Node> = Api::all(self.world.site.admin.clone());
        let patch = json!({"spec": {"unschedulable": true}});
        nodes.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }
}

fn node(own: &str, name: &str, gpus: u32) -> NodeSpec {
    NodeSpec::new(&format!("{own}-{name}"))
        .gpus(gpus)
        .label("inference-pool", own)
        .label("nvidia.com/gpu.memory", "65536")
}

/// The server patch that makes an engine of a requester.
fn patch(name: &str, flags: &str) -> String {
    pairs::patch(name, "rouse/engine", &format!("demo-engine {} {flags}", pairs::flags(name)))
}

impl Deref for DualPodsFixture {
    type Target = Installation<'static>;

    fn deref(&self) -> &Self::Target {
        &self.world
    }
}
