//! `rouse-stub launcher`: starts and stops engines inside a provider Pod, as its child processes.
//!
//! It implements the public launcher's REST API, version 2, and can replace that launcher. Its state is the instances
//! and one log of their events (`registry`, `events`). Each engine has its own supervisor task until the engine ends
//! (`supervisor`), so no request waits for another request's engine.

mod accelerators;
mod api;
mod args;
mod body;
mod children;
mod events;
mod fence;
mod log;
mod range;
mod readiness;
mod registry;
mod rejection;
mod spawn;
mod spec;
mod supervisor;

use std::{
    env, fs,
    io::{self, IsTerminal as _},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use axum::http::StatusCode;
use rouse::{error_chain, shell_words, variables};
use serde_json::Value;
use tokio::{
    net::TcpListener,
    select,
    signal::unix::{SignalKind, signal},
    sync::watch,
    task,
    time::timeout,
};

pub use args::LauncherArgs;

use args::LauncherSettings;
use children::ChildProcesses;
use fence::LauncherFence;
use log::InstanceLog;
use readiness::ReadinessProbe;
use registry::InstanceRegistry;
use rejection::{LauncherRejection, ValidationProblem};
use spawn::SpawnPlan;
use spec::InstanceSpec;
use supervisor::EngineSupervisor;

use crate::serve;

/// `EX_USAGE` of `sysexits.h`.
const EXIT_USAGE: u8 = 64;
/// Time for responses still in flight after the last engine has ended.
const LAST_RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for the kernel to end killed processes.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves until SIGTERM or SIGINT, then ends its engines.
#[must_use]
pub fn run(args: LauncherArgs) -> ExitCode {
    tracing_subscriber::fmt()
        .with_max_level(args.level())
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr)
        .init();
    let settings = match args.settings() {
        Ok(settings) => settings,
        Err(error) => {
            tracing::error!("{}", error_chain::one_line(error.as_ref()));
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = runtime.map_err(anyhow::Error::from).and_then(|runtime| {
        let result = runtime.block_on(serve_until_signal(settings));
        // A hung driver blocks its thread forever.
        runtime.shutdown_background();
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", error_chain::one_line(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

async fn serve_until_signal(settings: LauncherSettings) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let family = Arc::new(ChildProcesses::new());
    task::spawn(children::reaper(Arc::clone(&family))?);
    let address = format!("{}:{}", settings.host, settings.port);
    let listener = TcpListener::bind((settings.host.as_str(), settings.port)).await;
    let listener = listener.map_err(|error| {
        anyhow::anyhow!(
            "cannot listen on {address}: {error}; free it, or choose another with --host and --port"
        )
    })?;
    tracing::info!("listening on {}", listener.local_addr()?);
    let tokens = Arc::clone(&settings.tokens);
    let launcher = Arc::new(Launcher::new(settings, family));
    let (over, ends) = watch::channel(false);
    let mut served = task::spawn(serve::serve(listener, api::router(Arc::clone(&launcher), tokens), ends));
    select! {
        result = &mut served => anyhow::bail!("the HTTP server ended unexpectedly: {result:?}"),
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("shutdown started, stopping all engines");
    let end = launcher.shut_down().await;
    over.send_replace(true);
    // Responses that their clients have not read by then are cut.
    drop(timeout(LAST_RESPONSE_TIMEOUT, served).await);
    end
}

/// State that all requests share.
#[derive(Debug)]
struct Launcher {
    settings: LauncherSettings,
    registry: Arc<InstanceRegistry>,
    children: Arc<ChildProcesses>,
    fence: LauncherFence,
}

impl Launcher {
    fn new(settings: LauncherSettings, family: Arc<ChildProcesses>) -> Self {
        Self { settings, registry: Arc::default(), children: family, fence: LauncherFence::default() }
    }

    /// Starts an engine and returns its instance. The start completes even if the client disconnects.
    async fn create(
        self: &Arc<Self>,
        id: String,
        body: &[u8],
        conflict: StatusCode,
    ) -> Result<String, LauncherRejection> {
        let mut spec = InstanceSpec::parse(body)?;
        self.fence.may_start(&id, spec.generation())?;
        let reservation = self.registry.reserve(&id, self.settings.max_instances)?;
        let options = self.options(&spec)?;
        if let Some(uuids) = spec.gpu_uuids.as_deref().filter(|uuids| !uuids.is_empty()) {
            let visible = self.settings.accelerators.visible_devices(uuids).await;
            spec.set_visible_devices(visible.map_err(|error| self.accelerator_rejection(&error, conflict))?);
        }
        let launcher = Arc::clone(self);
        let started = task::spawn(async move { launcher.start(reservation, id, spec, options).await });
        started.await.unwrap_or_else(|error| Err(LauncherRejection::Failed(error.to_string())))
    }

    fn options(&self, spec: &InstanceSpec) -> Result<Vec<String>, LauncherRejection> {
        if self.settings.plain_options {
            return Ok(spec.options.split_whitespace().map(str::to_owned).collect());
        }
        let words = shell_words::split(&spec.options).map_err(|error| {
            let input = Value::from(spec.options.as_str());
            ValidationProblem::new("value_error", &["body", "options"], error.to_string(), input)
        })?;
        if !self.settings.expand_variables {
            return Ok(words);
        }
        Ok(words.iter().map(|word| variables::expand(word, |name| engine_variable(spec, name))).collect())
    }

    fn accelerator_rejection(&self, error: &accelerators::Error, conflict: StatusCode) -> LauncherRejection {
        tracing::warn!(%error, "instance not started");
        match error {
            accelerators::Error::Unknown { .. } if !self.settings.public_conflicts => {
                LauncherRejection::Status(StatusCode::UNPROCESSABLE_ENTITY, error.to_string())
            }
            accelerators::Error::Unknown { .. } => LauncherRejection::Status(conflict, error.to_string()),
            _ => LauncherRejection::Failed(error.to_string()),
        }
    }

    async fn start(
        &self,
        reservation: registry::InstanceIdReservation,
        id: String,
        spec: InstanceSpec,
        options: Vec<String>,
    ) -> Result<String, LauncherRejection> {
        let failed = |error: String| {
            tracing::error!(instance = id, error, "instance start failed");
            LauncherRejection::Failed(format!("cannot start instance {id}: {error}"))
        };
        let folder = self.settings.log_dir.clone();
        let command_line: Vec<String> = self.settings.command.iter().chain(&options).cloned().collect();
        let plan = SpawnPlan {
            command_line: command_line.clone(),
            mark: format!("{}|{}|{id}", std::process::id(), random_id().map_err(|e| failed(e.to_string()))?),
        };
        let mark = plan.mark_entry();
        let (children, name) = (Arc::clone(&self.children), id.clone());
        let spawned = task::spawn_blocking(move || {
            let log = InstanceLog::create(&folder, &name).map_err(spawn::Error::Log)?;
            let process = plan.spawn(&spec, &log, &children)?;
            Ok::<_, spawn::Error>((spec, log, process))
        });
        let spawned = spawned.await.map_err(|error| failed(error.to_string()))?;
        let (spec, log, process) = spawned.map_err(|error| failed(error.to_string()))?;
        tracing::info!(instance = id, pid = process.pid(), "engine started");
        let log = Arc::new(log);
        let (control, stop_receiver) = supervisor::stop_channel();
        let engine_supervisor = EngineSupervisor {
            id,
            probe: ReadinessProbe::new(&command_line, process.pid(), mark),
            process,
            log: Arc::clone(&log),
            log_cap: self.settings.log_cap,
            grace: self.settings.grace,
            registry: Arc::clone(&self.registry),
            children: Arc::clone(&self.children),
            stop_receiver,
        };
        // The supervisor starts after the registration, so that the engine's end is published after its start.
        let created = self.registry.add_started(reservation, spec, control, log);
        task::spawn(engine_supervisor.run());
        Ok(created)
    }

    /// Stops all instances concurrently and returns their last states.
    async fn stop_all(&self) -> Result<Vec<String>, String> {
        let stops: Vec<_> = self.registry.stop_handles().into_iter().map(|c| task::spawn(c.stop())).collect();
        let mut outcomes = Vec::new();
        for stop in stops {
            outcomes.push(stop.await.unwrap_or_else(|error| Err(error.to_string())));
        }
        outcomes.into_iter().collect()
    }

    /// Refuses new instances and ends all running engines.
    async fn shut_down(&self) -> anyhow::Result<()> {
        self.registry.stop_accepting();
        let mut revisions = self.registry.subscribe();
        let all_removed = async {
            // Some engines may still be starting.
            while !self.registry.is_empty() {
                self.registry.stop_handles().iter().for_each(|control| control.stop.notify_one());
                // `self` holds the registry, so the sender cannot be dropped.
                drop(revisions.changed().await);
            }
        };
        let all_removed = timeout(self.settings.grace + KILL_TIMEOUT, all_removed).await;
        self.registry.end_watches();
        all_removed.map_err(|_| anyhow::anyhow!("an engine still runs after SIGKILL"))?;
        let family = Arc::clone(&self.children);
        let cleared = timeout(KILL_TIMEOUT, task::spawn_blocking(move || family.kill_leftovers())).await;
        cleared
            .map_err(|_| anyhow::anyhow!("processes that engines left behind still run after SIGKILL"))??;
        Ok(())
    }
}

/// Returns the value of this variable in the engine's environment; the engine does not get our own settings.
fn engine_variable(spec: &InstanceSpec, name: &str) -> Option<String> {
    let own = spec.env_vars.as_ref().and_then(|all| all.get(name)).cloned();
    own.or_else(|| env::var(name).ok().filter(|_| !name.starts_with("ROUSE_")))
}

/// Returns a random UUID from the kernel.
fn random_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim_end().to_owned())
}
