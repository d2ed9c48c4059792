//! Launches an engine's process from its model's configuration.

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddr},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

use rouse::{
    engine::last_outcome::EngineDiagnostics,
    fault::FailureCause,
    fleet::event::Event,
    model::{AcceleratorId, EngineId, ModelSpec},
    units::{Bytes, Generation},
};
use rouse_net::process::{ProcessGroup, table};
use tokio::task;

use super::{
    LocalContext, engine_log,
    engine_task::LocalEngine,
    state_store::{StoredEngine, StoredPhase},
};

/// Environment variable that marks every process of an engine.
pub(super) const MARK_VAR: &str = "ROUSE_ENGINE";

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the model is no longer configured")]
    NotConfigured,
    #[error("the engine's command is empty")]
    Empty,
    #[error("the gateway is shutting down")]
    Interrupted,
    #[error("no free port: {0}")]
    Port(io::Error),
    #[error("cannot run '{program}': {source}")]
    Spawn { program: String, source: io::Error },
}

impl Error {
    /// Returns the failure's cause.
    ///
    /// Only a command that cannot run is hopeless, and refuses its waiters. A machine that is out of processes may have
    /// some again in a minute.
    fn cause(&self) -> FailureCause {
        match self {
            Self::Empty => FailureCause::CommandNotFound,
            Self::Spawn { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                FailureCause::PermissionDenied
            }
            Self::Spawn { source, .. }
                if source.kind() == io::ErrorKind::NotFound
                    || source.raw_os_error() == Some(nix::libc::ENOEXEC) =>
            {
                FailureCause::CommandNotFound
            }
            Self::Port(_) => FailureCause::PortTaken,
            Self::Spawn { .. } | Self::NotConfigured | Self::Interrupted => FailureCause::NotLaunched,
        }
    }
}

/// Starts the engine, records it and sends `Started`; or sends `Gone` with the reason.
pub(super) async fn launch(
    shared: &Arc<LocalContext>,
    engine: EngineId,
    generation: Generation,
    accelerators: Vec<AcceleratorId>,
) -> Option<(Arc<LocalEngine>, ProcessGroup)> {
    match start(shared, &engine, generation, &accelerators).await {
        Ok((local_engine, process)) => {
            let address = local_engine.client.address;
            let started = Event::Started { engine, generation, address };
            shared.common.send_event(started).await;
            Some((local_engine, process))
        }
        Err(error) => {
            let diagnostics = EngineDiagnostics::from_system(&error.to_string());
            shared
                .common
                .send_event(Event::Diagnostics { engine: engine.clone(), generation, diagnostics })
                .await;
            let gone = Event::Gone { engine, generation, cause: error.cause() };
            shared.common.send_event(gone).await;
            None
        }
    }
}

async fn start(
    shared: &Arc<LocalContext>,
    engine: &EngineId,
    generation: Generation,
    accelerators: &[AcceleratorId],
) -> Result<(Arc<LocalEngine>, ProcessGroup), Error> {
    let config = shared.common.config.load_full();
    let model = config.engines.get(&engine.model).ok_or(Error::NotConfigured)?;
    let spec = config.core.models.iter().find(|spec| spec.name == engine.model);
    let spec = spec.ok_or(Error::NotConfigured)?;
    let total = total(shared, accelerators).await;
    let fraction = spec.memory.awake.0 as f64 / total.0.max(1) as f64;
    let kv_cache = kv_cache(spec);
    let address = free_address(shared).map_err(Error::Port)?;
    let (host, port) = (address.ip(), address.port());
    let now = shared.common.clock.now();
    let plan = LaunchPlan {
        command: model.command_line(port, host, fraction, kv_cache),
        environment: model.environment(port, host, fraction, kv_cache),
        visible: config.visible_env(accelerators),
        mark: mark(shared, engine, generation),
        log: shared.log_path(engine),
        header: format!("{} at {now} UTC", engine_log::launch_label(engine, generation)),
        log_cap: config.log_cap,
    };
    let process = task::spawn_blocking(|| plan.spawn()).await;
    let process = process.unwrap_or(Err(Error::Interrupted)).inspect_err(|_| shared.release_port(port))?;
    let entry = StoredEngine {
        generation,
        pid: process.pid(),
        process_start_ticks: table::stat(process.pid()).map_or(0, |stat| stat.start),
        address,
        accelerators: accelerators.to_vec(),
        fingerprint: spec.fingerprint,
        phase: StoredPhase::Starting,
        started: now,
        last_lease_end: now,
    };
    shared.store.add(engine.clone(), entry).await;
    let local_engine = LocalEngine::new(shared, engine.clone(), generation, address, Arc::clone(model));
    Ok((local_engine, process))
}

/// Returns the value of [`MARK_VAR`] for the processes of this engine generation.
///
/// It begins with the state directory, so that two gateways never take each other's engines for left-overs.
pub(super) fn mark(shared: &LocalContext, engine: &EngineId, generation: Generation) -> String {
    mark_in(shared.store.folder(), engine, generation)
}

/// As [`mark`], for the gateway of this state directory, given by its canonical path.
pub(super) fn mark_in(folder: &Path, engine: &EngineId, generation: Generation) -> String {
    format!("{}|{engine}|{generation}", folder.display())
}

/// Reserves a free loopback port, which no other gateway of this machine chooses meanwhile.
///
/// If another program takes the port before the engine does, the engine's start fails with that cause, and the next
/// start takes another port.
fn free_address(shared: &LocalContext) -> io::Result<SocketAddr> {
    loop {
        let claimed = rouse_net::port::claim()?;
        let port = claimed.number();
        // An adopted engine that still starts may have neither a claim nor bound its port.
        if shared.reserve_port(port, Some(claimed)) {
            return Ok((Ipv4Addr::LOCALHOST, port).into());
        }
    }
}

/// Returns the total memory of the largest accelerator, by its meter or as configured.
async fn total(shared: &LocalContext, accelerators: &[AcceleratorId]) -> Bytes {
    let config = shared.common.config.load_full();
    let mut largest = Bytes::ZERO;
    for id in accelerators {
        let Some(known) = config.core.accelerators.iter().find(|a| a.id == *id) else {
            continue;
        };
        let metered = if known.metered {
            let file = config.meters.get(id).cloned();
            shared.meters.read(id.clone(), file).await.ok()
        } else {
            None
        };
        let total = metered.map_or(known.capacity + config.headroom, |reading| reading.total);
        largest = largest.max(total);
    }
    largest
}

/// Returns the memory left for the cache, per accelerator.
///
/// Subtracts the weights (as large as their copy in host RAM) and a tenth of the whole for activations and graphs.
fn kv_cache(spec: &ModelSpec) -> Bytes {
    let awake = spec.memory.awake.0;
    let remaining = awake.saturating_sub(spec.memory.host.0).saturating_sub(awake / 10);
    Bytes(remaining.max(awake / 10))
}

/// All inputs of a process launch.
struct LaunchPlan {
    command: Vec<String>,
    environment: BTreeMap<String, String>,
    /// Environment variables that show the engine its accelerators.
    visible: BTreeMap<String, String>,
    mark: String,
    log: PathBuf,
    header: String,
    log_cap: Bytes,
}

impl LaunchPlan {
    /// Spawns the process. Blocks while it trims the log and creates the process.
    fn spawn(self) -> Result<ProcessGroup, Error> {
        let (stdout, stderr) = self.output();
        let (program, arguments) = self.command.split_first().ok_or(Error::Empty)?;
        let failed = |source| Error::Spawn { program: program.clone(), source };
        let mut command = Command::new(program);
        // Engines must not see the gateway's own secrets and settings.
        let own_vars = std::env::vars_os().map(|(name, _)| name);
        for name in own_vars.filter(|name| name.as_encoded_bytes().starts_with(b"ROUSE_")) {
            command.env_remove(name);
        }
        command
            .args(arguments)
            .envs(self.visible)
            .envs(self.environment)
            .env(MARK_VAR, &self.mark)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr);
        let child = tokio::process::Command::from(command).spawn().map_err(failed)?;
        ProcessGroup::from_child(child, format!("{MARK_VAR}={}", self.mark)).map_err(failed)
    }

    /// Opens the output for the engine; `/dev/null` if its log cannot be written.
    ///
    /// A disk may be full for days, and an engine that serves is worth more than its log.
    fn output(&self) -> (Stdio, Stdio) {
        let log = engine_log::trim(&self.log, self.log_cap).and_then(|_| {
            let log = engine_log::open_for_launch(&self.log, &self.header)?;
            Ok((log.try_clone()?.into(), log.into()))
        });
        log.unwrap_or_else(|error| {
            let path = self.log.display();
            tracing::warn!(
                launch = self.header, log = %path, %error,
                "cannot write the engine log, so the engine's output is lost: make the state directory writable"
            );
            (Stdio::null(), Stdio::null())
        })
    }
}

#[cfg(test)]
mod tests {
    use rouse::{
        model::{AcceleratorRequirement, EngineMemory},
        sim::simulated_model,
        units::Millis,
    };

    use super::*;

    #[test]
    fn a_process_that_cannot_be_made_is_no_engine_that_exited() {
        let spawn = |code| Error::Spawn { program: "p".into(), source: io::Error::from_raw_os_error(code) };
        assert_eq!(spawn(nix::libc::EAGAIN).cause(), FailureCause::NotLaunched);
        assert_eq!(spawn(nix::libc::ENOENT).cause(), FailureCause::CommandNotFound);
    }

    #[test]
    fn the_cache_gets_what_the_weights_and_a_tenth_leave_and_never_nothing() {
        let spec = |awake, host| ModelSpec {
            accelerators: AcceleratorRequirement::Count(2),
            start_timeout: Millis::secs(1),
            explicit_memory: true,
            fingerprint: 0,
            ..simulated_model(
                "m",
                EngineMemory { awake: Bytes::gib(awake), asleep: Bytes::ZERO, host: Bytes::gib(host) },
            )
        };
        assert_eq!(kv_cache(&spec(30, 16)), Bytes::gib(30 - 16 - 3));
        assert_eq!(kv_cache(&spec(10, 40)), Bytes::gib(1));
    }
}
