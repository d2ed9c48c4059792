//! A gateway without a driver, engines that do as they are told, and clients that write raw bytes.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use arc_swap::{ArcSwap, Guard};
use rouse::{
    fault::{self, Fault, Phase},
    fleet::{
        event::{OperationId, Order},
        report::{Line, ModelState, Report, View},
    },
    lease::{Clock, Gate},
    model::{
        Accelerators, Configuration, EngineId, Idle, Level, LevelPolicy, Memory, ModelName, ModelSpec,
        OwnQueue, Registry, Settings,
    },
    units::{Bytes, Generation, Millis, Tick},
};
use tokio::{
    sync::{broadcast, mpsc, oneshot, watch},
    time::Instant,
};

use super::{Asked, Control, Finished, Meter, Shared};
use crate::{
    config::{self, Config, Kind, OnDisconnect, Task},
    driver::{Granted, Operation, Parking, Served, Waited},
    metrics::ModelMetrics,
    routes::{Endpoint, Route, Routes, Standing},
    serve::{Api, Stage, balance::Loads},
};

mod authority;
mod client;
mod engine;

pub(crate) use authority::{Authority, dial};
pub(crate) use client::{Answer, Client, post, raw};
pub(crate) use engine::{Engine, events, json, nobody};

pub(crate) const MODEL: &str = "org/m";
/// What the engine calls it.
pub(crate) const SERVED: &str = "served-m";
/// The bound on everything that must happen promptly. Generous, because the machine may be busy.
pub(crate) const SOON: Duration = Duration::from_millis(500);

/// A request that waits, and the way to end its wait.
pub(crate) struct Parked {
    pub(crate) parking: Parking,
    pub(crate) answer: oneshot::Sender<Result<Granted, Fault>>,
}

/// How a request ended, as the meter heard it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) status: u16,
    pub(crate) code: Option<&'static str>,
    pub(crate) left: Option<Phase>,
    pub(crate) replays: u32,
}

pub(crate) struct Gateway {
    pub(crate) address: SocketAddr,
    pub(crate) clock: Clock,
    pub(crate) parked: mpsc::UnboundedReceiver<Parked>,
    pub(crate) ended: mpsc::UnboundedReceiver<Ended>,
    pub(crate) stage: watch::Sender<Stage>,
    pub(crate) run: tokio::task::JoinHandle<()>,
    pub(crate) control: Arc<Scripted>,
    pub(crate) config: Arc<ArcSwap<Config>>,
    pub(crate) loads: Arc<Loads>,
}

/// A driver that does nothing by itself.
pub(crate) struct Scripted {
    routes: ArcSwap<Routes>,
    clock: Clock,
    parked: mpsc::UnboundedSender<Parked>,
    pub(crate) journal: broadcast::Sender<Arc<str>>,
    served: Served,
    /// Engines that a stub's answer was heard of.
    pub(crate) gated: Mutex<Vec<EngineId>>,
}

struct Heard(mpsc::UnboundedSender<Ended>);

impl Gateway {
    /// With these limits changed, on one core.
    pub(crate) fn start(change: impl FnOnce(&mut Config)) -> Self {
        let here = "127.0.0.1:0".parse().unwrap();
        Self::start_on(change, |shared| Api::over(here, Api::listen(here, Some(1)).unwrap(), shared).unwrap())
    }

    pub(crate) fn start_on(change: impl FnOnce(&mut Config), bind: impl FnOnce(Arc<Shared>) -> Api) -> Self {
        let mut config = config();
        change(&mut config);
        let config = Arc::new(ArcSwap::from_pointee(config));
        let clock = Clock::new(Instant::now(), Tick(1_000_000));
        let (parked_in, parked) = mpsc::unbounded_channel();
        let (ended_in, ended) = mpsc::unbounded_channel();
        let control = Arc::new(Scripted {
            routes: ArcSwap::default(),
            clock,
            parked: parked_in,
            journal: broadcast::channel(16).0,
            served: Served::default(),
            gated: Mutex::default(),
        });
        let shared = Shared::new(
            Arc::clone(&control) as Arc<dyn Control>,
            Arc::clone(&config),
            Arc::new(Heard(ended_in)),
        );
        let api = bind(shared);
        let (address, loads) = (api.address(), api.loads());
        let (stage, stages) = watch::channel(Stage::Serving);
        let run = tokio::spawn(async move { api.start(stages).unwrap().ended().await.unwrap() });
        let gateway = Self { address, clock, parked, ended, stage, run, control, config, loads };
        gateway.route(&[]);
        gateway
    }

    /// Makes these gates and addresses the awake engines of [`MODEL`].
    pub(crate) fn route(&self, engines: &[(SocketAddr, &Arc<Gate>)]) {
        let endpoints = engines
            .iter()
            .zip(0..)
            .map(|((address, gate), replica)| Endpoint {
                engine: EngineId::new(MODEL.into(), replica),
                generation: Generation(1),
                fingerprint: 0,
                address: *address,
                gate: Arc::clone(gate),
                standing: Standing::new(0, Arc::default()),
                reported: Arc::default(),
            })
            .collect();
        let replicas = u32::try_from(engines.len()).unwrap();
        let max_wait = self.config.load().core.models.first().and_then(|spec| spec.queue.max_wait);
        let route = Route::new(3, ModelState::Awake, None, replicas, max_wait, endpoints, None);
        self.control.routes.store(Arc::new(Routes {
            registry: Arc::new(Registry::new([&spec()])),
            models: BTreeMap::from([(MODEL.into(), Arc::new(route))]),
            ready: true,
        }));
    }

    pub(crate) fn open_gate(&self) -> Arc<Gate> {
        let gate = Gate::new(None, self.clock, Arc::default());
        gate.open();
        gate
    }

    pub(crate) fn grant(&self, address: SocketAddr, gate: &Arc<Gate>) -> Granted {
        Granted {
            lease: gate.take().unwrap(),
            engine: EngineId::new(MODEL.into(), 0),
            generation: Generation(2),
            fingerprint: 0,
            address,
            canary: None,
            waited: Waited {
                cold_start: Some(crate::driver::ColdStart::Cold),
                queue: Millis(30),
                wake: Millis(20),
            },
        }
    }

    pub(crate) async fn connect(&self) -> Client {
        Client::connect(self.address).await
    }

    /// Waits until so many clients are connected: what the gateway does about one that left, it does no later than this.
    pub(crate) async fn until_connected(&mut self, clients: u32) {
        let counted = async {
            while self.loads.connections().iter().sum::<u32>() != clients {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(SOON, counted).await.expect("a connection is left, or missing");
        self.caught_up().await;
    }

    /// Waits until its one core has done all that it had to do: it takes up tasks in the order in which they are woken, and this is
    /// one more, of whose end nobody else is told.
    pub(crate) async fn caught_up(&mut self) {
        let mut client = self.connect().await;
        client.send(raw("GET /v1/models", "", "")).await;
        assert_eq!(client.answer().await.status, 200);
        self.next_ended().await;
    }

    /// The next request that parks.
    pub(crate) async fn next_parked(&mut self) -> Parked {
        tokio::time::timeout(Duration::from_secs(5), self.parked.recv()).await.unwrap().unwrap()
    }

    pub(crate) async fn next_ended(&mut self) -> Ended {
        tokio::time::timeout(Duration::from_secs(5), self.ended.recv()).await.unwrap().unwrap()
    }
}

/// Completes when a lease has ended.
pub(crate) async fn until_used(gate: &Gate) {
    let used = async {
        while gate.last_end() == Tick(0) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, used).await.expect("no lease has ended");
}

/// Completes when no lease is out. The engine's connection is closed before its lease is given back.
pub(crate) async fn until_free(gate: &Gate) {
    let free = async {
        while gate.leases() > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, free).await.expect("a lease is left");
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.stage.send_replace(Stage::Ending);
    }
}

impl Control for Scripted {
    fn refresh(&self) -> Asked<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn routes(&self) -> Guard<Arc<Routes>> {
        self.routes.load()
    }

    fn clock(&self) -> Clock {
        self.clock
    }

    fn served(&self) -> &Served {
        &self.served
    }

    fn park(&self, parking: Parking) -> Asked<'_, Result<Granted, Fault>> {
        let (answer, told) = oneshot::channel();
        self.parked.send(Parked { parking, answer }).unwrap_or_default();
        Box::pin(async move { told.await.unwrap_or(Err(Fault::ControlPlane)) })
    }

    fn gated(&self, engine: EngineId, _: Generation) {
        self.gated.lock().unwrap().push(engine);
    }

    fn view(&self) -> Arc<View> {
        Arc::default()
    }

    fn report(&self) -> Arc<Report> {
        let line = Line {
            state: ModelState::Asleep,
            waiting: 2,
            elsewhere: 0,
            leases: 0,
            last: None,
            reason: "waits for gpu-0".into(),
            wait: fault::Wait::default(),
        };
        Arc::new(Report { models: BTreeMap::from([(MODEL.into(), line)]), ..Report::default() })
    }

    fn operation(&self, id: OperationId) -> Option<Operation> {
        let outcome = match id.0 {
            1 => None,
            2 => Some(Ok(())),
            3 => Some(Err("pinned".into())),
            _ => return None,
        };
        Some(Operation { model: MODEL.into(), order: Order::Wake, given: Tick(5), outcome })
    }

    fn journal(&self) -> broadcast::Receiver<Arc<str>> {
        self.journal.subscribe()
    }

    fn order(&self, model: ModelName, order: Order) -> Asked<'_, Result<OperationId, String>> {
        Box::pin(async move {
            match order {
                Order::Stop => Err(format!("{model} is pinned")),
                Order::Sleep { level: Some(Level::Two) } => Ok(OperationId(2)),
                _ => Ok(OperationId(1)),
            }
        })
    }
}

impl Meter for Heard {
    fn finished(&self, finished: &Finished<'_>) {
        let ended = Ended {
            status: finished.status,
            code: finished.code,
            left: finished.left,
            replays: finished.replays,
        };
        self.0.send(ended).unwrap_or_default();
    }

    fn began(&self, _: &ModelName) -> Option<Arc<ModelMetrics>> {
        None
    }

    fn refused(&self, _: u16) {}

    fn connections(&self, _: i64) {}
}

fn spec() -> ModelSpec {
    ModelSpec {
        name: MODEL.into(),
        aliases: vec!["alias".into()],
        accelerators: Accelerators::Count(1),
        memory: Memory { awake: Bytes::gib(1), asleep: Bytes::ZERO, host: Bytes::ZERO },
        idle: Idle { sleep_after: None, stop_after: None, level: LevelPolicy::Auto },
        replicas: 1,
        pinned: false,
        min_replicas: 0,
        dependencies: Vec::new(),
        priority: 3,
        max_concurrency: None,
        start_timeout: Millis::secs(60),
        explicit_memory: false,
        can_sleep: true,
        fingerprint: 0,
        eviction: None,
        queue: OwnQueue::default(),
    }
}

fn config() -> Config {
    let model = config::Model {
        name: MODEL.into(),
        kind: Kind::Vllm,
        command: Vec::new(),
        env: BTreeMap::new(),
        served_name: SERVED.into(),
        task: Task::Generate,
        on_disconnect: OnDisconnect::Abort,
        api_key: Some("engine-key".into()),
        stub: false,
        allow_public: false,
        passage: Vec::new(),
        fingerprint: 0,
        origin: None,
        sleep: config::SleepApi::None,
    };
    Config {
        api: "127.0.0.1:0".parse().unwrap(),
        threads: None,
        admin: config::Admin {
            address: "127.0.0.1:0".parse().unwrap(),
            token: None,
            metrics_open: true,
            tls: false,
        },
        tls: None,
        cors: config::Cors::default(),
        core: Configuration { settings: Settings::default(), accelerators: Vec::new(), models: vec![spec()] },
        models: BTreeMap::from([(MODEL.into(), Arc::new(model))]),
        former: Vec::new(),
        meters: BTreeMap::new(),
        visible: BTreeMap::new(),
        accelerators_auto: false,
        headroom: Bytes::ZERO,
        stream: config::Stream {
            grace: Millis(200),
            heartbeat: Millis(100),
            responses_events: false,
            take_over: take_over(),
        },
        timeouts: config::Timeouts {
            connect: Millis::secs(2),
            first_byte: Millis::secs(10),
            non_stream: Millis::secs(10),
            idle: Millis::secs(10),
            health_every: Millis::secs(2),
            health_timeout: Millis::secs(2),
        },
        limits: config::Limits {
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
        shutdown: config::Shutdown { grace: None, usual_grace: Millis::secs(1), stop_engines: true },
        state: "/nonexistent".into(),
        log_cap: Bytes::mib(1),
        affinity: config::Affinity::default(),
        access_log: config::AccessLog::Off,
        telemetry: config::Telemetry::default(),
        keys: config::Keys::default(),
        kubernetes: None,
        keys_none: true,
        key_doubts: Vec::new(),
        blank: false,
        origin: String::new(),
        places: BTreeMap::new(),
    }
}

/// Changes the configuration of [`MODEL`].
pub(crate) fn change_model(config: &mut Config, change: impl FnOnce(&mut config::Model)) {
    let model = config.models.get_mut(MODEL).unwrap();
    change(Arc::make_mut(model));
}

/// All tests hold either way: `ROUSE_TAKE_OVER=false` and `true` say which, and else what is usual.
fn take_over() -> bool {
    std::env::var("ROUSE_TAKE_OVER").map_or(true, |asked| asked == "true")
}
