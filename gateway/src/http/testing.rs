//! Test doubles: a gateway without a driver, scripted engines, and clients that write raw bytes.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use arc_swap::{ArcSwap, Guard};
use rouse::{
    fault::{self, DisconnectPhase, Fault},
    fleet::{
        event::{OperationId, OperatorAction},
        quote::WaitRange,
        report::{FleetView, ModelReport, ModelState, Report},
    },
    model::{
        EngineId, EngineMemory, FleetConfig, FleetSettings, ModelName, ModelNameIndex, ModelSpec, SleepLevel,
    },
    sim::simulated_model,
    units::{Bytes, Generation, Millis, Tick},
};
use rouse_config::{Config, EngineKind, OnDisconnect, ProbeTask};
use rouse_net::lease::{Gate, TickClock};
use tokio::{
    sync::{broadcast, mpsc, oneshot, watch},
    time::Instant,
};

use super::{DriverApi, DriverFuture, FinishedRequest, RequestMetricsSink, ServerContext};
use crate::{
    driver::{
        GrantedLease, LiveView, OperationStatus, ParkRequest, ServedTokens, Timeline, WaitBreakdown,
        WaitForecasts,
    },
    metrics::ModelMetrics,
    routing::{CircuitBreaker, Endpoint, ModelRoute, RouteTable},
    serve::{ApiServer, ApiWorkers, ShutdownStage, balance::CoreLoads},
};

mod authority;
mod client;
mod engine;

pub(crate) use authority::{TestCertificateAuthority, connect_tls};
pub(crate) use client::{RawHttpClient, RawHttpResponse, completion_request, raw_request};
pub(crate) use engine::{CannedEngine, json_response, refused_address, sse_response};

pub(crate) const MODEL: &str = "org/m";
/// The engine's own name for [`MODEL`].
pub(crate) const SERVED_NAME: &str = "served-m";
/// The bound on every prompt action. Generous, because the machine may be busy.
pub(crate) const PROMPT_TIMEOUT: Duration = Duration::from_millis(500);

/// A parked request, and the channel that ends its wait.
pub(crate) struct ParkedRequest {
    pub(crate) parking: ParkRequest,
    pub(crate) answer: oneshot::Sender<Result<GrantedLease, Fault>>,
}

/// How a request ended, as reported to the metrics sink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EndedRequest {
    pub(crate) status: u16,
    pub(crate) code: Option<&'static str>,
    pub(crate) left_in_phase: Option<DisconnectPhase>,
    pub(crate) retries: u32,
}

pub(crate) struct InProcessGateway {
    pub(crate) address: SocketAddr,
    pub(crate) clock: TickClock,
    pub(crate) parked: mpsc::UnboundedReceiver<ParkedRequest>,
    pub(crate) ended: mpsc::UnboundedReceiver<EndedRequest>,
    pub(crate) stage: watch::Sender<ShutdownStage>,
    pub(crate) run: tokio::task::JoinHandle<()>,
    pub(crate) driver: Arc<ScriptedDriver>,
    pub(crate) config: Arc<ArcSwap<Config>>,
    pub(crate) loads: Arc<CoreLoads>,
    pub(crate) workers: Arc<ApiWorkers>,
}

/// A driver that does nothing by itself.
pub(crate) struct ScriptedDriver {
    routes: ArcSwap<RouteTable>,
    clock: TickClock,
    parked: mpsc::UnboundedSender<ParkedRequest>,
    pub(crate) journal: broadcast::Sender<Arc<str>>,
    served_tokens: ServedTokens,
    pub(crate) timeline: Arc<Timeline>,
    /// The forecasts of all models, and of those with waiting requests.
    pub(crate) waits: Mutex<WaitForecasts>,
    /// Engines that requests reported as gated by their stub.
    pub(crate) gated: Mutex<Vec<EngineId>>,
}

struct RecordingMetricsSink(mpsc::UnboundedSender<EndedRequest>);

impl InProcessGateway {
    /// Starts a gateway on one core with a changed configuration.
    pub(crate) fn start(change: impl FnOnce(&mut Config)) -> Self {
        let here = "127.0.0.1:0".parse().unwrap();
        Self::start_on(change, |shared| {
            let bound = ApiServer::bind(here, Some(1)).unwrap();
            ApiServer::from_listeners(here, bound.into_listeners().unwrap(), shared).unwrap()
        })
    }

    pub(crate) fn start_on(
        change: impl FnOnce(&mut Config),
        bind: impl FnOnce(Arc<ServerContext>) -> ApiServer,
    ) -> Self {
        let mut config = config();
        change(&mut config);
        let config = Arc::new(ArcSwap::from_pointee(config));
        let clock = TickClock::new(Instant::now(), Tick(1_000_000));
        #[expect(clippy::disallowed_methods, reason = "a test's channel")]
        let (parked_in, parked) = mpsc::unbounded_channel();
        #[expect(clippy::disallowed_methods, reason = "a test's channel")]
        let (ended_in, ended) = mpsc::unbounded_channel();
        let control = Arc::new(ScriptedDriver {
            routes: ArcSwap::default(),
            clock,
            parked: parked_in,
            journal: broadcast::channel(16).0,
            served_tokens: ServedTokens::default(),
            timeline: Arc::default(),
            waits: Mutex::default(),
            gated: Mutex::default(),
        });
        let shared = ServerContext::new(
            Arc::clone(&control) as Arc<dyn DriverApi>,
            Arc::clone(&config),
            Arc::new(RecordingMetricsSink(ended_in)),
        );
        let workers = Arc::<ApiWorkers>::default();
        let api = bind(shared).with_workers(Arc::clone(&workers));
        let (address, loads) = (api.address(), api.loads());
        let (stage, stages) = watch::channel(ShutdownStage::Serving);
        let serving = api.start(stages).unwrap();
        let run = tokio::spawn(async move { serving.join().await.unwrap() });
        let driver = control;
        let gateway = Self { address, clock, parked, ended, stage, run, driver, config, loads, workers };
        gateway.set_endpoints(&[]);
        gateway
    }

    /// Makes these gates and addresses the awake engines of [`MODEL`].
    pub(crate) fn set_endpoints(&self, engines: &[(SocketAddr, &Arc<Gate>)]) {
        let endpoints = engines
            .iter()
            .zip(0..)
            .map(|((address, gate), replica)| Endpoint {
                engine: EngineId::new(MODEL.into(), replica),
                generation: Generation(1),
                fingerprint: 0,
                address: *address,
                gate: Arc::clone(gate),
                circuit_breaker: CircuitBreaker::new(0, Arc::default()),
                activity: Arc::default(),
            })
            .collect();
        let replicas = u32::try_from(engines.len()).unwrap();
        let max_wait = self.config.load().core.models.first().and_then(|spec| spec.queue.max_wait);
        let route = ModelRoute::new(3, ModelState::Awake, None, replicas, max_wait, endpoints, None);
        self.driver.routes.store(Arc::new(RouteTable {
            registry: Arc::new(ModelNameIndex::new([&spec()])),
            models: [(MODEL.into(), Arc::new(route))].into_iter().collect(),
            ready: true,
        }));
    }

    pub(crate) fn open_gate(&self) -> Arc<Gate> {
        let gate = Gate::new(None, self.clock, Arc::default());
        gate.open();
        gate
    }

    pub(crate) fn grant(&self, address: SocketAddr, gate: &Arc<Gate>) -> GrantedLease {
        GrantedLease {
            lease: gate.take().unwrap(),
            engine: EngineId::new(MODEL.into(), 0),
            generation: Generation(2),
            fingerprint: 0,
            address,
            canary: None,
            wait: WaitBreakdown {
                cold_start: Some(crate::driver::ColdStart::Cold),
                queue: Millis(30),
                wake: Millis(20),
            },
        }
    }

    pub(crate) async fn connect(&self) -> RawHttpClient {
        RawHttpClient::connect(self.address).await
    }

    /// Waits until exactly this many clients are connected. By then the gateway has handled every disconnect.
    pub(crate) async fn wait_until_connected(&mut self, clients: u32) {
        let counted = async {
            while self.loads.connections().iter().sum::<u32>() != clients {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PROMPT_TIMEOUT, counted).await.expect("a connection is left, or missing");
        self.wait_until_idle().await;
    }

    /// Waits until the gateway's one core is idle. The core runs tasks in the order of their wakeups, and this request
    /// is one more; no other receiver sees its end.
    pub(crate) async fn wait_until_idle(&mut self) {
        let mut client = self.connect().await;
        client.send(raw_request("GET /v1/models", "", "")).await;
        assert_eq!(client.read_response().await.status, 200);
        self.next_ended().await;
    }

    /// The next request that parks.
    pub(crate) async fn next_parked(&mut self) -> ParkedRequest {
        tokio::time::timeout(Duration::from_secs(5), self.parked.recv()).await.unwrap().unwrap()
    }

    pub(crate) async fn next_ended(&mut self) -> EndedRequest {
        tokio::time::timeout(Duration::from_secs(5), self.ended.recv()).await.unwrap().unwrap()
    }
}

/// Completes when a lease has ended.
pub(crate) async fn wait_until_lease_ended(gate: &Gate) {
    let used = async {
        while gate.last_end() == Tick(0) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PROMPT_TIMEOUT, used).await.expect("no lease has ended");
}

/// Completes when no lease is out. The engine's connection is closed before its lease is released.
pub(crate) async fn wait_until_no_leases(gate: &Gate) {
    let free = async {
        while gate.leases() > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PROMPT_TIMEOUT, free).await.expect("a lease is left");
}

impl Drop for InProcessGateway {
    fn drop(&mut self) {
        self.stage.send_replace(ShutdownStage::Terminating);
    }
}

impl DriverApi for ScriptedDriver {
    fn refresh(&self) -> DriverFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn routes(&self) -> Guard<Arc<RouteTable>> {
        self.routes.load()
    }

    fn clock(&self) -> TickClock {
        self.clock
    }

    fn served_tokens(&self) -> &ServedTokens {
        &self.served_tokens
    }

    fn park(&self, request: ParkRequest) -> DriverFuture<'_, Result<GrantedLease, Fault>> {
        let (answer, reply_rx) = oneshot::channel();
        self.parked.send(ParkedRequest { parking: request, answer }).unwrap_or_default();
        Box::pin(async move { reply_rx.await.unwrap_or(Err(Fault::ControlPlaneUnavailable)) })
    }

    fn expected_wait(&self, model: &ModelName) -> Option<WaitRange> {
        Some(self.waits.lock().unwrap().get(model)?.at(self.clock.now()))
    }

    fn expected_waits(&self) -> DriverFuture<'_, Arc<WaitForecasts>> {
        let waits = Arc::new(self.waits.lock().unwrap().clone());
        Box::pin(std::future::ready(waits))
    }

    fn report_gated(&self, engine: EngineId, _: Generation) {
        self.gated.lock().unwrap().push(engine);
    }

    fn view(&self) -> Arc<FleetView> {
        Arc::default()
    }

    fn report(&self) -> Arc<Report> {
        let line = ModelReport {
            state: ModelState::Asleep,
            waiting: 2,
            remote_waiting: 0,
            leases: 0,
            variants: BTreeMap::new(),
            last_outcome: None,
            reason: "waits for gpu-0".into(),
            wait: fault::WaitDetails::default(),
        };
        Arc::new(Report { models: BTreeMap::from([(MODEL.into(), line)]), ..Report::default() })
    }

    fn live_view(&self) -> DriverFuture<'_, LiveView> {
        Box::pin(std::future::ready(LiveView { fleet: Arc::default(), leads: true }))
    }

    fn turns(&self) -> u64 {
        0
    }

    fn timeline(&self) -> Arc<Timeline> {
        Arc::clone(&self.timeline)
    }

    fn operation(&self, id: OperationId) -> Option<OperationStatus> {
        let outcome = match id.0 {
            1 => None,
            2 => Some(Ok(())),
            3 => Some(Err("pinned".into())),
            _ => return None,
        };
        Some(OperationStatus {
            model: MODEL.into(),
            order: OperatorAction::Wake,
            issued_at: Tick(5),
            outcome,
        })
    }

    fn journal(&self) -> broadcast::Receiver<Arc<str>> {
        self.journal.subscribe()
    }

    fn submit_order(
        &self,
        model: ModelName,
        action: OperatorAction,
    ) -> DriverFuture<'_, Result<OperationId, String>> {
        Box::pin(async move {
            match action {
                OperatorAction::Stop => Err(format!("{model} is pinned")),
                OperatorAction::Sleep { level: Some(SleepLevel::Two) } => Ok(OperationId(2)),
                _ => Ok(OperationId(1)),
            }
        })
    }
}

impl RequestMetricsSink for RecordingMetricsSink {
    fn request_finished(&self, finished: &FinishedRequest<'_>) {
        let ended = EndedRequest {
            status: finished.status,
            code: finished.code,
            left_in_phase: finished.left_in_phase,
            retries: finished.retries,
        };
        self.0.send(ended).unwrap_or_default();
    }

    fn model_resolved(&self, _: &ModelName) -> Option<Arc<ModelMetrics>> {
        None
    }

    fn connection_rejected(&self, _: u16) {}

    fn add_connections(&self, _: i64) {}
}

fn spec() -> ModelSpec {
    ModelSpec {
        aliases: vec!["alias".into()],
        priority: 3,
        fingerprint: 0,
        ..simulated_model(
            MODEL,
            EngineMemory { awake: Bytes::gib(1), asleep: Bytes::ZERO, host: Bytes::ZERO },
        )
    }
}

fn config() -> Config {
    let model = rouse_config::EngineConfig {
        name: MODEL.into(),
        kind: EngineKind::Vllm,
        command: Vec::new(),
        env: BTreeMap::new(),
        served_name: SERVED_NAME.into(),
        task: ProbeTask::Generate,
        on_disconnect: OnDisconnect::Abort,
        api_key: Some("engine-key".into()),
        stub: false,
        allow_public: false,
        passthrough: Vec::new(),
        fingerprint: 0,
        backend_origin: None,
        sleep: rouse_config::SleepApi::None,
    };
    Config {
        api: "127.0.0.1:0".parse().unwrap(),
        threads: None,
        admin: rouse_config::AdminConfig {
            address: "127.0.0.1:0".parse().unwrap(),
            token: None,
            metrics_open: true,
            tls: false,
        },
        proxies: rouse_config::TrustedProxies::default(),
        tls: None,
        cors: rouse_config::CorsConfig::default(),
        core: FleetConfig {
            settings: FleetSettings::default(),
            accelerators: Vec::new(),
            models: vec![spec()],
        },
        engines: BTreeMap::from([(MODEL.into(), Arc::new(model))]),
        former_engines: Vec::new(),
        meters: BTreeMap::new(),
        visible: BTreeMap::new(),
        accelerators_auto: false,
        headroom: Bytes::ZERO,
        stream: rouse_config::StreamConfig {
            grace: Millis(200),
            heartbeat: Millis(100),
            responses_heartbeat_events: false,
        },
        timeouts: rouse_config::RequestTimeouts {
            connect: Millis::secs(2),
            first_byte: Millis::secs(10),
            non_stream: Millis::secs(10),
            idle: Millis::secs(10),
            health_every: Millis::secs(2),
            health_timeout: Millis::secs(2),
        },
        limits: rouse_config::ApiLimits {
            body: Bytes::mib(1),
            body_total: Bytes::mib(4),
            body_rate: Bytes(1024),
            header: Bytes(16 << 10),
            header_read: Millis(700),
            connection_idle: Millis::secs(2),
            connections_per_address: 64,
            offences_per_address: 0,
            client_stall: Millis::secs(1),
        },
        shutdown: rouse_config::ShutdownConfig {
            grace: None,
            default_grace: Millis::secs(1),
            stop_engines: true,
        },
        state: "/nonexistent".into(),
        log_cap: Bytes::mib(1),
        affinity: rouse_config::AffinityPolicy::default(),
        access_log: rouse_config::AccessLogTarget::Off,
        telemetry: rouse_config::TelemetryConfig::default(),
        keys: rouse_config::KeyConfigs::default(),
        kubernetes: None,
        saturation: rouse_config::LocalSaturation::default(),
        keys_none: true,
        key_warnings: Vec::new(),
        blank: false,
        origin: String::new(),
        model_locations: BTreeMap::new(),
    }
}

/// Changes the configuration of [`MODEL`].
pub(crate) fn change_model(config: &mut Config, change: impl FnOnce(&mut rouse_config::EngineConfig)) {
    let model = config.engines.get_mut(MODEL).unwrap();
    change(Arc::make_mut(model));
}
