//! Runs one engine generation on this machine: owns its process and all work on it.
//!
//! Work is a future that this task polls, not a task of its own. A superseding command or the end of the process drops
//! the future, and with it its connection. So no work can report on behalf of a generation that has ended.

use std::{net::SocketAddr, sync::Arc};

use nix::sys::signal::Signal;
use rouse::{
    engine::last_outcome::EngineDiagnostics,
    fault::FailureCause,
    fleet::event::{Event, LearnedMeasurements},
    model::{EngineId, SleepLevel},
    units::{Generation, Millis},
};
use rouse_config::EngineConfig;
use rouse_net::{process::ProcessGroup, timer::sleep_until_some};
use rouse_platform::{engine_client::EngineClient, poll_if_some};
use tokio::{sync::mpsc, time::Instant};

use super::{
    LocalContext, engine_log,
    engine_steps::{self, AfterStep, HealthWatchFuture, LocalStepFuture},
    launch::{self, MARK_VAR},
    state_store::StoredPhase,
};

/// A command to an engine task.
#[derive(Clone, Copy, Debug)]
pub(super) enum LocalEngineCommand {
    Probe,
    Sleep(SleepLevel),
    Wake(SleepLevel),
    /// The gate of the engine's stub is closed: report when it opens.
    AwaitStub,
    Stop(Millis),
}

/// Where an engine task begins under this gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LocalEngineStart {
    /// The engine was not seen ready yet.
    Starting,
    Awake,
    Asleep,
}

/// An engine whose process runs on this machine.
#[derive(Debug)]
pub(super) struct LocalEngine {
    pub(super) shared: Arc<LocalContext>,
    pub(super) client: EngineClient,
}

/// Runs until the process group is gone, or until the gateway exits.
pub(super) async fn run(
    local_engine: Arc<LocalEngine>,
    process: ProcessGroup,
    mut commands: mpsc::UnboundedReceiver<LocalEngineCommand>,
    start: LocalEngineStart,
) {
    // A probe has a slot of its own: the fleet orders it on `Ready`, before the step that sent `Ready` has ended.
    let (mut work, mut probe): (Option<LocalStepFuture>, Option<LocalStepFuture>) = (None, None);
    let mut health: Option<HealthWatchFuture> = None;
    match start {
        LocalEngineStart::Starting => {
            work = Some(Box::pin(engine_steps::become_ready(Arc::clone(&local_engine))))
        }
        LocalEngineStart::Awake => {
            health = Some(Box::pin(engine_steps::watch_health(Arc::clone(&local_engine), false)))
        }
        LocalEngineStart::Asleep => {}
    }
    let mut kill_at: Option<Instant> = None;
    let mut stopping = false;
    // A stop before the engine was ready means a failed or an unwanted start; only the fleet knows which.
    let mut ready = start != LocalEngineStart::Starting;
    // `AwaitStub` arrived before the end of the step after which the health watch begins.
    let mut awaits_stub = false;
    loop {
        tokio::select! {
            biased;
            () = process.leader_exited() => break,
            command = commands.recv() => match command {
                None => return,
                Some(LocalEngineCommand::Stop(grace)) => {
                    (work, probe, health) = (None, None, None);
                    if !stopping {
                        process.signal(Signal::SIGTERM);
                    }
                    // A second stop may have a shorter grace.
                    let at = Instant::now() + grace.duration();
                    kill_at = Some(kill_at.map_or(at, |earlier| earlier.min(at)));
                    stopping = true;
                }
                Some(_) if stopping => {}
                Some(LocalEngineCommand::Probe) => probe = Some(Box::pin(engine_steps::probe(Arc::clone(&local_engine)))),
                Some(LocalEngineCommand::AwaitStub) if work.is_some() => awaits_stub = true,
                Some(LocalEngineCommand::AwaitStub) => {
                    health = Some(Box::pin(engine_steps::watch_health(Arc::clone(&local_engine), true)));
                }
                Some(LocalEngineCommand::Sleep(level)) => {
                    (probe, health, awaits_stub) = (None, None, false);
                    work = Some(Box::pin(engine_steps::sleep(Arc::clone(&local_engine), level)));
                }
                Some(LocalEngineCommand::Wake(level)) => {
                    (probe, health, awaits_stub) = (None, None, false);
                    work = Some(Box::pin(engine_steps::wake(Arc::clone(&local_engine), level)));
                }
            },
            after = poll_if_some(&mut work) => {
                work = None;
                if after == AfterStep::StartHealthWatch {
                    ready = true;
                    let held = std::mem::take(&mut awaits_stub);
                    health = Some(Box::pin(engine_steps::watch_health(Arc::clone(&local_engine), held)));
                }
            }
            _ = poll_if_some(&mut probe) => probe = None,
            () = poll_if_some(&mut health) => health = None,
            () = sleep_until_some(kill_at) => {
                kill_at = None;
                process.signal(Signal::SIGKILL);
            }
        }
    }
    drop((work, probe, health));
    reap(&local_engine, process, commands, stopping, ready).await;
}

/// Kills what is left of the process group, and only then reports the engine gone.
async fn reap(
    local_engine: &LocalEngine,
    process: ProcessGroup,
    commands: mpsc::UnboundedReceiver<LocalEngineCommand>,
    stopping: bool,
    ready: bool,
) {
    let LocalEngine { shared, client } = local_engine;
    let EngineClient { id, generation, .. } = client;
    let status = process.kill_and_reap().await;
    let mut cause = FailureCause::Stopped;
    if !(stopping && ready) {
        let path = shared.log_path(id);
        let launch = engine_log::launch_label(id, *generation);
        let tail = tokio::task::spawn_blocking(move || engine_log::read_tail(&path, &launch))
            .await
            .unwrap_or_default();
        if !stopping {
            cause = engine_log::exit_cause(status, &tail);
        }
        if let Some(line) = engine_log::last_line(&tail) {
            client
                .report_diagnostics(EngineDiagnostics {
                    last_line: Some(line),
                    ..EngineDiagnostics::default()
                })
                .await;
        }
    }
    tracing::debug!(engine = %id, %generation, %cause, "engine gone");
    shared.store.remove(id, *generation).await;
    shared.release_port(client.address.port());
    // From here on the supervisor accepts a new generation; the driver learns that next.
    drop(commands);
    shared.common.send_event(Event::Gone { engine: id.clone(), generation: *generation, cause }).await;
}

impl LocalEngine {
    pub(super) fn new(
        shared: &Arc<LocalContext>,
        id: EngineId,
        generation: Generation,
        address: SocketAddr,
        model: Arc<EngineConfig>,
    ) -> Arc<Self> {
        let client = EngineClient::new(&shared.common, id, generation, address, model);
        Arc::new(Self { shared: Arc::clone(shared), client })
    }

    /// Returns the mark as a variable in the environment of the engine's processes.
    pub(super) fn mark(&self) -> String {
        let mark = launch::mark(&self.shared, &self.client.id, self.client.generation);
        format!("{MARK_VAR}={mark}")
    }

    /// Returns the engine's process group; `None` when it is gone.
    pub(super) fn process_group(&self) -> Option<i32> {
        let engines = self.shared.store.engines();
        engines.get(&self.client.id).map(|entry| entry.pid)
    }

    pub(super) fn learned(&self) -> Option<LearnedMeasurements> {
        self.shared.store.learned().get(&self.client.id.model).copied()
    }

    pub(super) async fn set_phase(&self, phase: StoredPhase) {
        self.shared.store.set_phase(&self.client.id, self.client.generation, phase).await;
    }
}
