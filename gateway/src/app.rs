//! The application: put together, reloaded, ended.
//!
//! Everything that can fail for a reason of the operator's (a port, a state directory, an accelerator driver) fails
//! here, before an engine is started or adopted. On one machine the ports are bound and the state directory is locked before
//! anything on disk changes: where that fails, another gateway runs, and all there is may be its own.

use std::{net::SocketAddr, path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use rouse::{
    fleet::event::Event,
    lease::Clock,
    model::EngineId,
    units::{Bytes, Millis, Tick},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
    time::Instant,
};

use crate::{
    config::{self, Config, Source},
    demo,
    driver::{Handle, Journal, JournalFile},
    http::{self, admin::Parts},
    metrics::{Lost, Metrics},
    platform::Platform,
    serve::{Admin, Api, Stage},
    telemetry::{Telemetry, Wall},
};

mod cluster;
mod home;
mod reload;
mod signals;

use home::{Claim, Home, Next};
use reload::Reload;
use signals::{Asked, Signals};

/// Outcomes and observations that may wait for the driver. A turn takes well under a millisecond and takes 256 of
/// them; more than four turns' worth means that something floods, and then the platform waits.
const EVENTS: usize = 1024;
/// How often idle clocks and learned values are given to the platform to keep: a restart must restore the clocks to
/// within five seconds, and the platform writes within one.
const KEEP_EVERY: Duration = Duration::from_secs(2);

/// Threads for the control side's blocking calls: files, the driver, new processes. A bound, so that a disk that stands
/// still cannot take threads without end.
const BESIDE: usize = 64;

/// What the command line asks for.
pub struct Start {
    pub config: Config,
    /// Loaded again at a reload.
    pub source: Source,
    pub journal: Option<PathBuf>,
    /// Counts what telemetry drops, the log included, which is older than anything here.
    pub lost: Lost,
}

/// Serves until told to stop. Called before any thread was started.
pub fn run(start: Start) -> anyhow::Result<ExitCode> {
    // The control side: the driver, the platform, operators. Requests have runtimes of their own, one for each core.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("control")
        .max_blocking_threads(BESIDE)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let code = runtime.block_on(serve(start));
    runtime.shutdown_timeout(Duration::from_secs(1));
    code
}

async fn serve(Start { mut config, source, journal, lost }: Start) -> anyhow::Result<ExitCode> {
    if config.accelerators_auto {
        let found = discover(config.headroom)?;
        config.book_shares(&found, config.headroom);
        config.core.accelerators = found;
    }
    let mut signals = Signals::new(source.file.as_deref()).context("cannot listen to signals")?;
    let certificates = config.tls.iter().flat_map(config::Tls::files).cloned().collect();
    signals.watch(certificates).context("cannot watch the certificates")?;
    let clock = anchored();
    let shown = config.clone();
    let config = Arc::new(ArcSwap::from_pointee(config));
    let metrics = Arc::new(Metrics::with(&lost));
    metrics.certificate_expires(config.load().tls.as_ref().and_then(config::Tls::expires));
    let open_journal = || {
        let opened = journal.as_deref().map(|path| JournalFile::open(path, &lost)).transpose();
        opened.context("cannot open the journal")
    };
    let current = config.load_full();
    let operators = Admin::listen(current.admin.address)?;
    let listen = || Api::listen(current.api, current.threads);
    // The ports of a Pod are its own, and whoever connects to one is refused until it is known what there is to serve.
    let bound = current.kubernetes.is_none().then(listen).transpose()?;
    let claim = Claim::take(&current)?;
    if source.file.is_none() {
        demo::prepare(&current)?;
    }
    let (events, received) = mpsc::channel(EVENTS);
    let mut home = Home::start(claim, &current, events, clock, &metrics).await?;
    let platform = home.platform();
    let (handle, driver) =
        Handle::new(Arc::clone(&platform), received, Journal::default(), Arc::clone(&metrics), clock);
    let admin = Admin::over(operators, parts(&handle, &config, &metrics, &home))?;
    let operators = admin.address();
    let (stage, watched) = watch::channel(Stage::Serving);
    let (mut driver, driver_goes) = held(|journal| driver.run(journal));
    let (mut admin, admin_goes) = held({
        let watched = watched.clone();
        |()| admin.run(watched)
    });
    let mut goes = Some((driver_goes, admin_goes));
    if current.kubernetes.is_some() {
        // Until it has the lease.
        handle.tell(Event::Led { leads: false });
        // A cluster takes its time, and operators may ask for what is waited.
        if let Some((driver_goes, admin_goes)) = goes.take() {
            go(driver_goes, open_journal()?);
            go(admin_goes, ());
        }
        tokio::select! {
            () = home.first() => {}
            () = signals.terminate() => {
                home.close().await;
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
    let base = Config::clone(&current);
    let current = match home.compose(&base) {
        Some(composed) => {
            config.store(Arc::new(composed));
            config.load_full()
        }
        None => current,
    };
    platform.reconfigure(Arc::clone(&current));
    handle.tell(Event::Configured { configuration: Box::new(current.core.clone()) });

    let telemetry = Telemetry::start(&current, &lost)?;
    let meter = Arc::clone(&metrics) as _;
    let control = Arc::new(handle.clone());
    let shared = http::Shared::told(control, Arc::clone(&config), meter, Arc::clone(&telemetry));
    let bound = bound.map_or_else(|| Api::listen(current.api, current.threads), Ok)?;
    let api = Api::over(current.api, bound, shared)?;
    home.speak(&handle, api.address());
    announce(&shown, source.file.is_none(), &api, operators);

    let admin_goes = match goes {
        Some((driver_goes, admin_goes)) => {
            go(driver_goes, open_journal()?);
            Some(admin_goes)
        }
        None => None,
    };
    let keeper = tokio::spawn(keep(handle.clone(), Arc::clone(&platform)));
    // A request that came before the first turn would be told that there is no such model.
    handle.refresh().await;
    let mut serving = api.start(watched)?;
    // Operators are told that it is ready by the listener that comes up next.
    serving.up().await;
    let mut api = tokio::spawn(serving.ended());
    if let Some(admin_goes) = admin_goes {
        go(admin_goes, ());
    }
    let mut reload = Reload {
        source,
        base,
        config: Arc::clone(&config),
        handle: handle.clone(),
        metrics,
        platform,
        looks: 0,
        refused: false,
    };
    loop {
        tokio::select! {
            asked = signals.next() => {
                match asked {
                    Asked::Terminate => break,
                    Asked::Reopen => {
                        telemetry.reopen();
                        continue;
                    }
                    Asked::Reload | Asked::Look => {}
                }
                // Before they are read: what changed until they are watched goes unseen.
                if let Err(error) = signals.watch(reload.certificates()) {
                    tracing::warn!(%error, "certificates are not watched; SIGHUP reloads them");
                }
                if matches!(asked, Asked::Reload) {
                    reload.again(&mut home);
                } else {
                    reload.look(&mut home);
                }
            }
            next = home.next() => match next {
                Next::Objects => reload.objects(&mut home),
                Next::Ended => anyhow::bail!("a task without which this gateway must not go on ended"),
            },
            ended = &mut driver => {
                // Without it nothing wakes any more. Engines live on, and are adopted by the next start.
                return Err(ended.err().map_or_else(|| anyhow::anyhow!("the driver ended"), Into::into));
            }
            ended = &mut api => return Err(ended_early(ended)),
            ended = &mut admin => return Err(ended_early(ended)),
        }
    }
    End { stage, config: config.load_full(), handle, driver, api, admin }.come(&mut signals, &mut home).await;
    keeper.abort();
    // The keeper lets go of the platform when its task is dropped.
    drop(keeper.await);
    telemetry.close().await;
    drop(reload);
    home.close().await;
    Ok(ExitCode::SUCCESS)
}

/// Work that begins when it is told to, with what the other end of this sends.
fn held<I, F>(work: impl FnOnce(I) -> F + Send + 'static) -> (JoinHandle<F::Output>, oneshot::Sender<I>)
where
    I: Send + 'static,
    F: Future<Output: Send + 'static> + Send + 'static,
{
    let (goes, told) = oneshot::channel();
    let task = tokio::spawn(async move {
        match told.await {
            Ok(with) => work(with).await,
            // What had to be there before it is not there.
            Err(_) => std::future::pending().await,
        }
    });
    (task, goes)
}

fn go<I>(work: oneshot::Sender<I>, with: I) {
    // An error is the other end's, which is gone where the runtime ends.
    drop(work.send(with));
}

fn discover(headroom: Bytes) -> anyhow::Result<Vec<rouse::model::Accelerator>> {
    crate::platform::local::discover(headroom).context("no accelerator was found")
}

/// For decisions, wall time is read once; from here on a monotonic clock counts on.
fn anchored() -> Clock {
    let now = Instant::now();
    Clock::new(now, Tick::default() + Millis::from(Wall::now().since_epoch(now)))
}

fn parts(handle: &Handle, config: &Arc<ArcSwap<Config>>, metrics: &Arc<Metrics>, home: &Home) -> Parts {
    let (metrics, measured) = (Arc::clone(metrics), handle.clone());
    let platform = Arc::downgrade(&home.platform());
    Parts {
        control: Arc::new(handle.clone()),
        config: Arc::clone(config),
        metrics: Arc::new(move || {
            let (handle, metrics) = (measured.clone(), Arc::clone(&metrics));
            Box::pin(async move {
                handle.measure().await;
                metrics.encode()
            })
        }),
        logs: Arc::new(move |model, replica| {
            let engine = EngineId::new(model.clone(), replica);
            platform.upgrade().and_then(|platform| platform.log(&engine))
        }),
        waits: home.waits(),
        lacks: home.lacks(),
    }
}

/// What a person needs to try it, on standard output, so that it is seen whatever the log level is.
fn announce(config: &Config, demonstration: bool, api: &Api, admin: SocketAddr) {
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

/// Gives idle clocks and learned values to the platform, for the next start.
async fn keep(handle: Handle, platform: Arc<dyn Platform>) {
    let mut every = tokio::time::interval(KEEP_EVERY);
    loop {
        every.tick().await;
        for endpoint in handle.routes().models.values().flat_map(|route| &route.endpoints) {
            // Somebody who uses it now has used it until now, should the gateway be gone at the next tick.
            let used =
                if endpoint.gate.leases() > 0 { handle.clock().now() } else { endpoint.gate.last_end() };
            platform.note_idle(&endpoint.engine, endpoint.generation, used);
        }
        platform.save_learned(handle.learned().await);
    }
}

fn ended_early(ended: Result<Result<(), crate::serve::Error>, tokio::task::JoinError>) -> anyhow::Error {
    match ended {
        Ok(Ok(())) => anyhow::anyhow!("a listener ended"),
        Ok(Err(error)) => error.into(),
        Err(error) => error.into(),
    }
}

type Listener = JoinHandle<Result<(), crate::serve::Error>>;

/// The end: nothing new, then what runs is given its time, then engines are stopped or left.
struct End {
    stage: watch::Sender<Stage>,
    config: Arc<Config>,
    handle: Handle,
    driver: JoinHandle<()>,
    api: Listener,
    admin: Listener,
}

impl End {
    async fn come(mut self, signals: &mut Signals, home: &mut Home) {
        self.stage.send_replace(Stage::Draining);
        // First what others wait for, should this be killed before its time.
        home.step_down();
        let grace = home.grace(&self.config.shutdown).await;
        tracing::info!(%grace, "shutting down: no new connections; exchanges may finish; a second signal means now");
        let mut api_ended = false;
        tokio::select! {
            _ = &mut self.api => api_ended = true,
            () = tokio::time::sleep(grace.duration()) => {}
            () = signals.terminate() => {}
        }
        home.withdraw().await;
        // Whoever still holds or awaits an engine is told so, in its stream or as a 503.
        // In a cluster they are everybody's.
        let stop_engines = self.config.shutdown.stop_engines && self.config.kubernetes.is_none();
        self.handle.tell(Event::Shutdown { stop_engines });
        let stop = self.config.core.settings.timeouts.stop_grace.duration() + Duration::from_secs(10);
        if tokio::time::timeout(stop, &mut self.driver).await.is_err() {
            tracing::error!("engines did not end in time; they are adopted or ended at the next start");
            self.driver.abort();
        }
        self.stage.send_replace(Stage::Ending);
        if !api_ended {
            drop(tokio::time::timeout(Duration::from_secs(5), self.api).await);
        }
        drop(tokio::time::timeout(Duration::from_secs(1), self.admin).await);
    }
}

/// What a reload could not change, for people who wonder.
pub(crate) fn restart_needed(diff: &config::Diff) -> Option<String> {
    (!diff.needs_restart.is_empty())
        .then(|| format!("{} take effect at the next start", diff.needs_restart.join(", ")))
}
