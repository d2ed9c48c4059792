//! `rouse-stub launcher`: starts and stops engines inside a provider Pod, as its child processes.
//!
//! It speaks the REST API, version 2, of the public launcher and can stand in its place. Its state is the instances and
//! one record of what happened to them (`registry`, `events`); each engine has a keeper that stays with it to its end
//! (`keeper`), so no request waits for what another one does.

mod accelerators;
mod answer;
mod api;
mod args;
mod body;
mod events;
mod family;
mod fence;
mod keeper;
mod log;
mod range;
mod ready;
mod registry;
mod spawn;
mod spec;

use std::{
    fs,
    io::{self, IsTerminal as _},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use axum::http::StatusCode;
use rouse::{causes, words};
use serde_json::Value;
use tokio::{
    net::TcpListener,
    select,
    signal::unix::{SignalKind, signal},
    sync::watch,
    task,
    time::timeout,
};

pub use args::Args;

use answer::{Problem, Refusal};
use args::Settings;
use family::Family;
use fence::Fence;
use keeper::Keeper;
use log::Log;
use ready::Probe;
use registry::Registry;
use spawn::Plan;
use spec::Spec;

use crate::serve;

/// What `sysexits.h` calls wrong usage.
const USAGE: u8 = 64;
/// For answers that are under way when the last engine is gone.
const FAREWELL: Duration = Duration::from_secs(1);
/// For the kernel to end what was killed.
const PATIENCE: Duration = Duration::from_secs(30);

/// Serves until SIGTERM, and ends its engines.
#[must_use]
pub fn run(args: Args) -> ExitCode {
    tracing_subscriber::fmt()
        .with_max_level(args.level())
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr)
        .init();
    let settings = match args.settings() {
        Ok(settings) => settings,
        Err(error) => {
            tracing::error!("{}", causes::joined(error.as_ref()));
            return ExitCode::from(USAGE);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = runtime.map_err(anyhow::Error::from).and_then(|runtime| {
        let result = runtime.block_on(until_ended(settings));
        // A driver that hangs holds a thread for ever.
        runtime.shutdown_background();
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", causes::joined(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

async fn until_ended(settings: Settings) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let family = Arc::new(Family::new());
    task::spawn(family::reaper(Arc::clone(&family))?);
    let address = format!("{}:{}", settings.host, settings.port);
    let listener = TcpListener::bind((settings.host.as_str(), settings.port)).await;
    let listener = listener.map_err(|error| anyhow::anyhow!("cannot listen on {address}: {error}"))?;
    tracing::info!("listening on {}", listener.local_addr()?);
    let tokens = Arc::clone(&settings.tokens);
    let launcher = Arc::new(Launcher::new(settings, family));
    let (over, ends) = watch::channel(false);
    let mut served = task::spawn(serve::serve(listener, api::router(Arc::clone(&launcher), tokens), ends));
    select! {
        result = &mut served => anyhow::bail!("serving has ended: {result:?}"),
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("ending all engines");
    let end = launcher.end().await;
    over.send_replace(true);
    // Whoever does not take the rest of an answer by then does without.
    drop(timeout(FAREWELL, served).await);
    end
}

/// All that requests share.
#[derive(Debug)]
struct Launcher {
    settings: Settings,
    registry: Arc<Registry>,
    family: Arc<Family>,
    fence: Fence,
}

impl Launcher {
    fn new(settings: Settings, family: Arc<Family>) -> Self {
        Self { settings, registry: Arc::default(), family, fence: Fence::default() }
    }

    /// Starts an engine; the instance. What was begun is done, also when whoever asked for it is gone.
    async fn create(
        self: &Arc<Self>,
        id: String,
        body: &[u8],
        conflict: StatusCode,
    ) -> Result<String, Refusal> {
        let mut spec = Spec::read(body)?;
        self.fence.may_start(&id, spec.life())?;
        let reservation = self.registry.reserve(&id, self.settings.max_instances)?;
        let options = self.options(&spec)?;
        if let Some(uuids) = spec.gpu_uuids.as_deref().filter(|uuids| !uuids.is_empty()) {
            let visible = self.settings.accelerators.visible(uuids).await;
            spec.see_only(visible.map_err(|error| self.no_accelerator(&error, conflict))?);
        }
        let launcher = Arc::clone(self);
        let started = task::spawn(async move { launcher.start(reservation, id, spec, options).await });
        started.await.unwrap_or_else(|error| Err(Refusal::Failed(error.to_string())))
    }

    fn options(&self, spec: &Spec) -> Result<Vec<String>, Refusal> {
        if self.settings.plain_options {
            return Ok(spec.options.split_whitespace().map(str::to_owned).collect());
        }
        words::split(&spec.options).map_err(|error| {
            let input = Value::from(spec.options.as_str());
            Problem::new("value_error", &["body", "options"], error.to_string(), input).into()
        })
    }

    fn no_accelerator(&self, error: &accelerators::Error, conflict: StatusCode) -> Refusal {
        tracing::warn!(%error, "not started");
        match error {
            accelerators::Error::Unknown { .. } if !self.settings.public_conflicts => {
                Refusal::With(StatusCode::UNPROCESSABLE_ENTITY, error.to_string())
            }
            accelerators::Error::Unknown { .. } => Refusal::With(conflict, error.to_string()),
            _ => Refusal::Failed(error.to_string()),
        }
    }

    async fn start(
        &self,
        reservation: registry::Reservation,
        id: String,
        spec: Spec,
        options: Vec<String>,
    ) -> Result<String, Refusal> {
        let failed = |error: String| {
            tracing::error!(instance = id, error, "cannot be started");
            Refusal::Failed(format!("instance {id} cannot be started: {error}"))
        };
        let folder = self.settings.log_dir.clone();
        let words: Vec<String> = self.settings.command.iter().chain(&options).cloned().collect();
        let plan = Plan {
            words: words.clone(),
            mark: format!("{}|{}|{id}", std::process::id(), random_id().map_err(|e| failed(e.to_string()))?),
        };
        let mark = plan.marked();
        let (family, name) = (Arc::clone(&self.family), id.clone());
        let made = task::spawn_blocking(move || {
            let log = Log::create(&folder, &name).map_err(spawn::Error::Log)?;
            let process = plan.carry_out(&spec, &log, &family)?;
            Ok::<_, spawn::Error>((spec, log, process))
        });
        let made = made.await.map_err(|error| failed(error.to_string()))?;
        let (spec, log, process) = made.map_err(|error| failed(error.to_string()))?;
        tracing::info!(instance = id, pid = process.pid(), "started");
        let log = Arc::new(log);
        let (control, orders) = keeper::line();
        let keeper = Keeper {
            id,
            probe: Probe::new(&words, process.pid(), mark),
            process,
            log: Arc::clone(&log),
            log_cap: self.settings.log_cap,
            grace: self.settings.grace,
            registry: Arc::clone(&self.registry),
            family: Arc::clone(&self.family),
            orders,
        };
        // Its end is told after its beginning.
        let created = self.registry.started(reservation, spec, control, log);
        task::spawn(keeper.keep());
        Ok(created)
    }

    /// Stops all instances, side by side; what they were last.
    async fn stop_all(&self) -> Result<Vec<String>, String> {
        let stops: Vec<_> = self.registry.controls().into_iter().map(|c| task::spawn(c.stop())).collect();
        let mut outcomes = Vec::new();
        for stop in stops {
            outcomes.push(stop.await.unwrap_or_else(|error| Err(error.to_string())));
        }
        outcomes.into_iter().collect()
    }

    /// Starts nothing more, and ends all that runs.
    async fn end(&self) -> anyhow::Result<()> {
        self.registry.close();
        let mut news = self.registry.news();
        let gone = async {
            // Some may just be starting.
            while !self.registry.is_empty() {
                self.registry.controls().iter().for_each(|control| control.stop.notify_one());
                // The registry is ours: it cannot go.
                drop(news.changed().await);
            }
        };
        let gone = timeout(self.settings.grace + PATIENCE, gone).await;
        self.registry.finish();
        gone.map_err(|_| anyhow::anyhow!("an engine does not end, although it was killed"))?;
        let family = Arc::clone(&self.family);
        let cleared = timeout(PATIENCE, task::spawn_blocking(move || family.clear())).await;
        cleared.map_err(|_| {
            anyhow::anyhow!("what engines left behind does not end, although it was killed")
        })??;
        Ok(())
    }
}

/// A random UUID, from the kernel.
fn random_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim_end().to_owned())
}
