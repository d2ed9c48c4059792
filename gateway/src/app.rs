//! Assembles, reloads and shuts down the application.
//!
//! Every error that the operator can cause (a port, a state directory, an accelerator driver) surfaces here, before an
//! engine is started or adopted. The gateway binds its ports, and on one machine locks the state directory, before it
//! changes anything on disk: if either fails, another gateway is running and may own everything there.

use std::{net::SocketAddr, path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use rouse::{
    fleet::event::Event,
    model::EngineId,
    units::{Bytes, Millis, Tick},
};
use rouse_config::Config;
use rouse_controllers::runtime::{self, ClusterChange};
use rouse_net::lease::TickClock;
use rouse_platform::Platform;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
    time::Instant,
};

use crate::{
    demo,
    driver::{DriverHandle, Journal, JournalFile},
    http::{self, admin::AdminSources},
    local_scaler::LocalScaler,
    metrics::{Metrics, TelemetryDropCounters},
    serve::{AdminServer, ApiServer, ApiWorkers, ShutdownStage},
    telemetry::{Telemetry, WallClock},
};

mod config_source;
mod platform_runtime;
mod reload;
mod signals;

pub use config_source::ConfigSource;

use platform_runtime::{PlatformClaim, PlatformRuntime};
use reload::ConfigReloader;
use signals::{ControlSignal, ControlSignals};

/// Capacity of the platform's event queue to the driver.
///
/// A turn takes up to 256 events in well under a millisecond. A backlog of more than four turns means that something
/// floods the queue, and then the platform waits.
const EVENT_QUEUE_CAPACITY: usize = 1024;
/// How often the platform gets idle clocks and learned values to save.
///
/// A restart must restore the clocks to within five seconds, and the platform writes within one second.
const PERSIST_INTERVAL: Duration = Duration::from_secs(2);

/// Bound on threads for the control side's blocking calls: files, the driver, new processes.
///
/// Without a bound, a stalled disk could take any number of threads.
const MAX_BLOCKING_THREADS: usize = 64;

/// What the command line specifies.
pub struct AppOptions {
    pub config: Config,
    /// Source that a reload reads again.
    pub source: ConfigSource,
    pub journal: Option<PathBuf>,
    /// Counters of dropped telemetry. They exist before [`run`], since the log already counts in them.
    pub drop_counters: TelemetryDropCounters,
}

/// Serves until a signal terminates the gateway. Must be called before any thread starts.
pub fn run(options: AppOptions) -> anyhow::Result<ExitCode> {
    // This is the control side: driver, platform, operators. Requests have runtimes of their own, one per core.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("control")
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let code = runtime.block_on(serve(options));
    runtime.shutdown_timeout(Duration::from_secs(1));
    code
}

async fn serve(
    AppOptions { mut config, source, journal, drop_counters: lost }: AppOptions,
) -> anyhow::Result<ExitCode> {
    if config.accelerators_auto {
        let found = discover(config.headroom)?;
        config.reserve_memory_utilization(&found, config.headroom);
        config.core.accelerators = found;
    }
    let mut signals = ControlSignals::new(source.file.as_deref())
        .context("cannot watch for signals and for changes of the configuration file")?;
    let certificates = config.tls.iter().flat_map(rouse_config::TlsConfig::files).cloned().collect();
    signals.watch(certificates).context("cannot watch the certificate files")?;
    let clock = wall_anchored_clock();
    let shown = config.clone();
    let config = Arc::new(ArcSwap::from_pointee(config));
    let metrics = Arc::new(Metrics::with_drop_counters(&lost));
    metrics.set_certificate_expiry(config.load().tls.as_ref().and_then(rouse_config::TlsConfig::expires));
    let open_journal = || {
        let opened = journal.as_deref().map(|path| JournalFile::open(path, &lost)).transpose();
        opened.context("cannot open the journal")
    };
    let current = config.load_full();
    let operators = AdminServer::listen(current.admin.address)?;
    let mut bound = ApiServer::bind(current.api, current.threads)?;
    // In a cluster, connections are refused until the gateway knows its models.
    if current.kubernetes.is_none() {
        bound.listen()?;
    }
    let claim = PlatformClaim::take(&current)?;
    if source.file.is_none() {
        demo::prepare(&current)?;
    }
    let (events, received) = mpsc::channel(EVENT_QUEUE_CAPACITY);
    let mut runtime = PlatformRuntime::start(claim, &current, events, clock, &metrics).await?;
    let platform = runtime.platform();
    let (handle, driver) =
        DriverHandle::new(Arc::clone(&platform), received, Journal::default(), Arc::clone(&metrics), clock);
    let workers = Arc::<ApiWorkers>::default();
    let sources = admin_sources(&handle, &config, &metrics, &runtime, &workers);
    let admin = AdminServer::from_listener(operators, sources)?;
    let operators = admin.address();
    let (stage, watched) = watch::channel(ShutdownStage::Serving);
    let (mut driver, driver_goes) = spawn_deferred(|journal| driver.run(journal));
    let (mut admin, admin_goes) = spawn_deferred({
        let watched = watched.clone();
        |()| admin.run(watched)
    });
    let mut deferred = Some((driver_goes, admin_goes));
    if current.kubernetes.is_some() {
        // This gateway does not lead until it holds the Lease.
        handle.send_event(Event::LeadershipChanged { leads: false });
        // The cluster's objects take a while to arrive, and operators may ask what the gateway waits for.
        if let Some((driver_goes, admin_goes)) = deferred.take() {
            start_deferred(driver_goes, open_journal()?);
            start_deferred(admin_goes, ());
        }
        tokio::select! {
            () = runtime.wait_until_synced() => {}
            () = signals.terminated() => {
                runtime.close().await;
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
    let base = Config::clone(&current);
    let current = match runtime.compose(&base) {
        Some(composed) => {
            config.store(Arc::new(composed));
            config.load_full()
        }
        None => current,
    };
    platform.reconfigure(Arc::clone(&current));
    handle.send_event(Event::Configured { configuration: Box::new(current.core.clone()) });

    let telemetry = Telemetry::start(&current, &lost)?;
    let meter = Arc::clone(&metrics) as _;
    let control = Arc::new(handle.clone());
    let shared =
        http::ServerContext::with_telemetry(control, Arc::clone(&config), meter, Arc::clone(&telemetry));
    let api = ApiServer::from_listeners(current.api, bound.into_listeners()?, shared)?.with_workers(workers);
    runtime.start_reporting(&handle, api.address());
    print_addresses(&shown, source.file.is_none(), &api, operators);

    let admin_goes = match deferred {
        Some((driver_goes, admin_goes)) => {
            start_deferred(driver_goes, open_journal()?);
            Some(admin_goes)
        }
        None => None,
    };
    let persist_task = tokio::spawn(persist_periodically(handle.clone(), Arc::clone(&platform)));
    let (saturation, reloads) = watch::channel(current.saturation.clone());
    let scaler_task = current.kubernetes.is_none().then(|| {
        let metrics = metrics.controllers().saturation.clone();
        tokio::spawn(LocalScaler::new(handle.clone(), Arc::clone(&platform), metrics, reloads).run())
    });
    // A request before the first turn would fail with an unknown model.
    handle.refresh().await;
    let mut serving = api.start(watched)?;
    // The admin listener comes up next and thereby shows operators that the API is ready.
    serving.wait_until_ready().await;
    let mut api = tokio::spawn(serving.join());
    if let Some(admin_goes) = admin_goes {
        start_deferred(admin_goes, ());
    }
    let mut reload = ConfigReloader {
        source,
        base,
        config: Arc::clone(&config),
        handle: handle.clone(),
        saturation,
        metrics,
        platform,
        certificate_checks: 0,
        last_reload_refused: false,
    };
    let command_lost = runtime.command_lost();
    tokio::pin!(command_lost);
    loop {
        tokio::select! {
            signal = signals.next() => {
                match signal {
                    ControlSignal::Terminate => break,
                    ControlSignal::ReopenLogs => {
                        telemetry.reopen();
                        continue;
                    }
                    ControlSignal::Reload | ControlSignal::CheckCertificates => {}
                }
                // The watch starts before the files are read: a change before the watch goes unnoticed.
                if let Err(error) = signals.watch(reload.certificates()) {
                    tracing::warn!(%error, "cannot watch the certificate files; send SIGHUP to reload them");
                }
                if matches!(signal, ControlSignal::Reload) {
                    reload.reload(&mut runtime);
                } else {
                    reload.check_certificates(&mut runtime);
                }
            }
            next = runtime.next_event() => match next {
                ClusterChange::ObjectsChanged => reload.apply_objects(&mut runtime),
                ClusterChange::TaskEnded => anyhow::bail!("a required cluster task ended (election or object watches)"),
            },
            () = &mut command_lost => {
                // The engine that it concerns would be stuck. Engines live on, and the next start adopts them.
                anyhow::bail!("the engine supervisor did not take a command; the log has the reason")
            }
            ended = &mut driver => {
                // Without the driver no engine wakes. Engines live on, and the next start adopts them.
                return Err(ended.err().map_or_else(|| anyhow::anyhow!("the driver ended unexpectedly"), Into::into));
            }
            ended = &mut api => return Err(listener_error(ended)),
            ended = &mut admin => return Err(listener_error(ended)),
        }
    }
    // A shutdown needs no more engines. The task refers to the platform.
    if let Some(task) = scaler_task {
        task.abort();
        drop(task.await);
    }
    ShutdownSequence { stage, config: config.load_full(), handle, driver, api, admin }
        .run(&mut signals, &mut runtime)
        .await;
    persist_task.abort();
    // Dropping the keeper's task releases its reference to the platform.
    drop(persist_task.await);
    telemetry.close().await;
    drop(reload);
    runtime.close().await;
    Ok(ExitCode::SUCCESS)
}

/// Spawns work that starts when the returned sender sends its input.
fn spawn_deferred<I, F>(
    work: impl FnOnce(I) -> F + Send + 'static,
) -> (JoinHandle<F::Output>, oneshot::Sender<I>)
where
    I: Send + 'static,
    F: Future<Output: Send + 'static> + Send + 'static,
{
    let (input_tx, input_rx) = oneshot::channel();
    let task = tokio::spawn(async move {
        match input_rx.await {
            Ok(with) => work(with).await,
            // The sender was dropped: the work's preconditions never came true.
            Err(_) => std::future::pending().await,
        }
    });
    (task, input_tx)
}

fn start_deferred<I>(tx: oneshot::Sender<I>, input: I) {
    // An error means that the receiver is gone because the runtime ends.
    drop(tx.send(input));
}

fn discover(headroom: Bytes) -> anyhow::Result<Vec<rouse::model::Accelerator>> {
    crate::platform::local::discover(headroom).context("cannot detect the accelerators")
}

/// Returns the clock for decisions: wall time read once, then advanced by a monotonic clock.
pub(crate) fn wall_anchored_clock() -> TickClock {
    let now = Instant::now();
    TickClock::new(now, Tick::default() + Millis::from(WallClock::now().since_epoch(now)))
}

fn admin_sources(
    handle: &DriverHandle,
    config: &Arc<ArcSwap<Config>>,
    metrics: &Arc<Metrics>,
    runtime: &PlatformRuntime,
    workers: &Arc<ApiWorkers>,
) -> AdminSources {
    let traffic = Arc::clone(metrics);
    let (metrics, measured) = (Arc::clone(metrics), handle.clone());
    let platform = Arc::downgrade(&runtime.platform());
    AdminSources {
        driver: Arc::new(handle.clone()),
        config: Arc::clone(config),
        metrics: Arc::new(move || {
            let (handle, metrics) = (measured.clone(), Arc::clone(&metrics));
            Box::pin(async move {
                handle.update_gauges().await;
                metrics.encode()
            })
        }),
        logs: Arc::new(move |model, replica| {
            let engine = EngineId::new(model.clone(), replica);
            platform.upgrade().and_then(|platform| platform.log_path(&engine))
        }),
        not_ready_reason: runtime.not_ready_reason(),
        degraded_reason: runtime.degraded_reason(),
        warmups: runtime.warmups(),
        name: gateway_name(&config.load()),
        workers: Arc::clone(workers),
        traffic: Arc::new(move || traffic.traffic_totals()),
    }
}

/// The gateway's name: in a cluster that of its Pod, on one machine the machine's.
fn gateway_name(config: &Config) -> String {
    let configured = config.kubernetes.as_ref().and_then(|kubernetes| kubernetes.name.clone());
    configured.or_else(|| runtime::hostname().ok()).unwrap_or_else(|| "gateway".to_owned())
}

/// Prints the addresses to standard output, where they show at any log level.
fn print_addresses(config: &Config, demonstration: bool, api: &ApiServer, admin: SocketAddr) {
    let api = api.address();
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    println!("inference API  {scheme}://{api}/v1");
    let scheme = if config.admin.tls { "https" } else { "http" };
    println!("admin          {scheme}://{admin}");
    println!("state          {}", config.state.display());
    if demonstration {
        let program = std::env::args().next().unwrap_or_else(|| "rouse-gateway".to_owned());
        println!("\n{}", crate::demo::welcome(api, admin, &program));
    }
}

/// Periodically hands idle clocks and learned values to the platform, for the next start.
async fn persist_periodically(handle: DriverHandle, platform: Arc<dyn Platform>) {
    let mut every = tokio::time::interval(PERSIST_INTERVAL);
    loop {
        every.tick().await;
        for endpoint in handle.routes().models.values().flat_map(|route| &route.endpoints) {
            // A lease in use counts as used until now, in case the gateway dies before the next tick.
            let used =
                if endpoint.gate.leases() > 0 { handle.clock().now() } else { endpoint.gate.last_end() };
            platform.note_idle(&endpoint.engine, endpoint.generation, used);
        }
        platform.save_learned(handle.learned().await);
    }
}

fn listener_error(result: Result<Result<(), crate::serve::Error>, tokio::task::JoinError>) -> anyhow::Error {
    match result {
        Ok(Ok(())) => anyhow::anyhow!("a listener ended unexpectedly"),
        Ok(Err(error)) => error.into(),
        Err(error) => error.into(),
    }
}

type ListenerTask = JoinHandle<Result<(), crate::serve::Error>>;

/// Shuts down: refuses new connections, drains, then stops or leaves the engines.
struct ShutdownSequence {
    stage: watch::Sender<ShutdownStage>,
    config: Arc<Config>,
    handle: DriverHandle,
    driver: JoinHandle<()>,
    api: ListenerTask,
    admin: ListenerTask,
}

impl ShutdownSequence {
    async fn run(mut self, signals: &mut ControlSignals, runtime: &mut PlatformRuntime) {
        self.stage.send_replace(ShutdownStage::Draining);
        // Stepping down comes first, since other gateways wait for it and this process may be killed early.
        runtime.step_down();
        let grace = runtime.grace(&self.config.shutdown).await;
        tracing::info!(
            %grace,
            "shutting down: no new connections, running requests may finish; send a second signal to skip the wait"
        );
        let mut api_ended = false;
        tokio::select! {
            _ = &mut self.api => api_ended = true,
            () = tokio::time::sleep(grace.duration()) => {}
            () = signals.terminated() => {}
        }
        runtime.withdraw_demand().await;
        // Requests that still hold or await an engine get the fault, in their stream or as a 503.
        // In a cluster the engines belong to all gateways.
        let stop_engines = self.config.shutdown.stop_engines && self.config.kubernetes.is_none();
        self.handle.send_event(Event::Shutdown { stop_engines });
        let stop = self.config.core.settings.timeouts.stop_grace.duration() + Duration::from_secs(10);
        if tokio::time::timeout(stop, &mut self.driver).await.is_err() {
            tracing::error!("engines did not stop in time; the next start adopts or stops them");
            self.driver.abort();
        }
        self.stage.send_replace(ShutdownStage::Terminating);
        if !api_ended {
            drop(tokio::time::timeout(Duration::from_secs(5), self.api).await);
        }
        drop(tokio::time::timeout(Duration::from_secs(1), self.admin).await);
    }
}

/// Describes the settings that a reload could not change.
pub(crate) fn restart_needed(diff: &rouse_config::ConfigDiff) -> Option<String> {
    (!diff.needs_restart.is_empty())
        .then(|| format!("restart the gateway to apply changes of {}", diff.needs_restart.join(", ")))
}
