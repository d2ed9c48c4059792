//! A fleet: its objects, its gateways as real processes, and what plays the rest of the cluster.

use std::{collections::BTreeSet, net::SocketAddr};

use futures_util::StreamExt as _;
use kube::{
    ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use rouse_cluster::{AuditedCall, ServerRole, TestCluster};
use rouse_controllers::crd::{
    InferenceModel,
    inference_model::{EngineState, EngineStatus},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Duration, Instant, timeout},
};

use super::{
    lease::LeaseWatch,
    objects::{self, ENGINES, MODELS_PER_POOL},
    pods::free_accelerators,
    reports::until_reported,
    workloads::Workloads,
};
use crate::{
    client::{TestResponse, chat_body, request},
    installation::{ClusterGateway, Installation},
    runner::TestPrograms,
    scale::memory,
    site::GatewayNamespace,
};

/// Memory of a gateway.
const MEMORY: u64 = 300_000_000;
/// The stubs of all engines share the test's cores, so the leader asks for each engine's health once a minute.
const SETTINGS: &str = "timeouts: {health: {every: 60s}}";

/// How large a fleet is, and for how long it is measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct FleetSize {
    /// Models with [`ENGINES`] engines each, and as many nodes.
    pub(super) models: usize,
    pub(super) gateways: usize,
    /// For how long all engines may take to start, and the leader then to report that.
    pub(super) start_timeout: Duration,
    /// For how long no Event is written once the start is reported.
    pub(super) without_events: Duration,
    /// Pod events whose cost is measured.
    pub(super) pod_events: usize,
    /// Models that are in use while writes are counted.
    pub(super) in_use: usize,
    pub(super) writes_window: Duration,
    /// Pod events per second of the rollout.
    pub(super) rollout_rate: u32,
    pub(super) rollout: Duration,
}

pub(super) struct FleetGateway {
    pub(super) name: String,
    pub(super) process: ClusterGateway,
}

pub(super) struct FleetInstallation<'a> {
    /// Those that still run.
    pub(super) gateways: Vec<FleetGateway>,
    pub(super) lease: LeaseWatch,
    pub(super) world: Installation<'a, Workloads>,
    pub(super) size: FleetSize,
    /// Whether the gateways are optimised programs, which are held to the promised figures.
    pub(super) optimised: bool,
}

impl<'a> FleetInstallation<'a> {
    /// Returns once every engine serves and the leader has reported that.
    pub(super) async fn start(cluster: &'a TestCluster, size: FleetSize) -> Self {
        let programs = TestPrograms::optimised();
        let optimised = programs.are_optimised();
        let site = GatewayNamespace::new(cluster, "fleet").await;
        let own = site.namespace.name().to_owned();
        // It would find all nodes dead. `Workloads` plays its other parts.
        cluster.stop_server(ServerRole::ControllerManager).await;
        objects::create_all(&site.admin, &own, size.models).await;

        let SocketAddr::V4(address) = cluster.api_server() else { panic!("the cluster has IPv4 addresses") };
        let free = free_accelerators(size.models / MODELS_PER_POOL);
        let runner = Workloads::start(&site.namespace, address.ip().octets()[1], free);
        let lease = LeaseWatch::start(site.namespace.api());
        let world = Installation {
            site,
            runner,
            dir: tempfile::tempdir().unwrap(),
            program: programs.gateway,
            stub_image: "example.com/stub".to_owned(),
            watched: own,
        };
        let begun = Instant::now();
        let gateway = |n: usize| {
            let name = format!("gateway-{n}");
            FleetGateway { process: world.gateway(&name, SETTINGS), name }
        };
        let gateways = (0..size.gateways).map(gateway).collect();
        let fleet = Self { gateways, lease, world, size, optimised };
        fleet.until_awake().await;
        for gateway in &fleet.gateways {
            gateway.process.until_ready().await;
        }
        println!(
            "{} models, {} engines, {} gateways (optimised: {optimised}): all engines served after {:.1?}",
            size.models,
            size.models * ENGINES as usize,
            size.gateways,
            begun.elapsed()
        );
        Box::pin(until_reported(&fleet)).await;
        fleet
    }

    /// Waits until every model has all of its engines awake.
    pub(super) async fn until_awake(&self) {
        let mut awake = BTreeSet::new();
        let all = async {
            let models = watcher(self.world.models(), watcher::Config::default()).default_backoff();
            let mut models = models.applied_objects().boxed();
            while awake.len() < self.size.models {
                // An error is one of the connection, from which the watcher recovers.
                let Ok(model) = models.next().await.expect("a watch does not end") else { continue };
                if has_all_engines(&model) {
                    awake.insert(model.name_any());
                } else {
                    awake.remove(&model.name_any());
                }
            }
        };
        let in_time = timeout(self.size.start_timeout, Box::pin(all)).await.is_ok();
        assert!(in_time, "{} of {} models have all engines", awake.len(), self.size.models);
    }

    /// The holder of the Lease, and its place in the list of gateways.
    pub(super) async fn leader(&self) -> (String, usize) {
        let holder = self.lease.holder().await;
        let place = self.gateways.iter().position(|gateway| holder.starts_with(&gateway.name));
        (holder, place.expect("one of the gateways leads"))
    }

    /// The address of this gateway, counted in a circle.
    pub(super) fn api(&self, n: usize) -> SocketAddr {
        self.gateways[n % self.gateways.len()].process.api
    }

    /// All calls of all gateways so far.
    pub(super) fn calls(&self) -> Vec<AuditedCall> {
        self.world.site.cluster.calls(&self.world.site.account).unwrap()
    }

    /// Prints the memory of each gateway and asserts that none has too much.
    pub(super) async fn check_memory(&self, when: &str) {
        let (_, leader) = self.leader().await;
        // An unoptimised program is large itself.
        let what = if self.optimised { "VmRSS" } else { "RssAnon" };
        let all: Vec<u64> = self.gateways.iter().map(|gateway| memory(&gateway.process, what)).collect();
        let followers = (0..all.len()).filter(|n| *n != leader).map(|n| all[n]).max().unwrap_or_default();
        println!(
            "{when}: the leader has {} MB, a follower {} MB",
            all[leader] / 1_000_000,
            followers / 1_000_000
        );
        assert!(all.iter().all(|bytes| *bytes <= MEMORY), "{what} of the gateways: {all:?}");
    }
}

fn has_all_engines(model: &InferenceModel) -> bool {
    let engines = model.status.iter().flat_map(|status| &status.engines);
    let awake = |engine: &&EngineStatus| engine.state == EngineState::Awake;
    engines.filter(awake).count() == ENGINES as usize
}

/// Sends a chat to this gateway and calls `begun` when the first bytes of the response arrive.
pub(super) async fn chat(
    gateway: SocketAddr,
    model: &str,
    tokens: u64,
    begun: impl FnOnce(),
) -> TestResponse {
    let body = chat_body(model, true, u32::try_from(tokens).unwrap());
    let mut stream = TcpStream::connect(gateway).await.unwrap();
    stream.write_all(request("/v1/chat/completions", "", &body).as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    stream.read_buf(&mut bytes).await.unwrap();
    begun();
    stream.read_to_end(&mut bytes).await.unwrap();
    TestResponse::parse(&bytes).unwrap_or_else(|| panic!("no response of {model}: {bytes:?}"))
}
