//! From a model's configuration to a running process.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    sync::Arc,
};

use rouse::{
    fault::Cause,
    fleet::event::Event,
    model::{AcceleratorId, EngineId, ModelSpec},
    units::{Bytes, Generation},
};

use super::{
    Shared,
    life::Contact,
    log, proc,
    process::Process,
    store::{Entry, Phase},
};
use crate::config::Model;

/// The variable that marks every process of an engine.
pub(super) const MARK: &str = "ROUSE_ENGINE";

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the model is not configured any more")]
    NotConfigured,
    #[error("the command is empty")]
    Empty,
    #[error("no free port: {0}")]
    Port(io::Error),
    #[error("the log cannot be written: {0}")]
    Log(io::Error),
    #[error("'{program}' cannot be run: {source}")]
    Spawn { program: String, source: io::Error },
}

/// Starts the engine, notes it and sends `Started`; or sends `Gone` with the reason.
pub(super) async fn launch(
    shared: &Arc<Shared>,
    engine: EngineId,
    generation: Generation,
    accelerators: Vec<AcceleratorId>,
) -> Option<(Arc<Contact>, Process)> {
    match start(shared, &engine, generation, &accelerators).await {
        Ok((contact, process)) => {
            let address = contact.address;
            let started = Event::Started { engine, generation, address };
            shared.tell(started).await;
            Some((contact, process))
        }
        Err(error) => {
            tracing::error!(%engine, %error, "cannot launch");
            let gone = Event::Gone { engine, generation, cause: Cause::CommandNotFound };
            shared.tell(gone).await;
            None
        }
    }
}

async fn start(
    shared: &Arc<Shared>,
    engine: &EngineId,
    generation: Generation,
    accelerators: &[AcceleratorId],
) -> Result<(Arc<Contact>, Process), Error> {
    let config = shared.config.load_full();
    let model = config.models.get(&engine.model).ok_or(Error::NotConfigured)?;
    let spec = config.core.models.iter().find(|spec| spec.name == engine.model);
    let spec = spec.ok_or(Error::NotConfigured)?;
    let address = free_address(shared).map_err(Error::Port)?;
    let total = total(shared, accelerators).await;
    let values = Values::new(address, spec, accelerators.len(), total);
    let mark = mark(shared, engine, generation);
    let now = shared.clock.now();
    let path = shared.log(engine);
    let process = log::begin(&path, engine, generation, now)
        .map_err(Error::Log)
        .and_then(|log| spawn(model, &values, accelerators, &mark, log))
        .inspect_err(|_| shared.release_port(address.port()))?;
    let entry = Entry {
        generation,
        pid: process.pid(),
        start: proc::stat(process.pid()).map_or(0, |stat| stat.start),
        address,
        accelerators: accelerators.to_vec(),
        fingerprint: spec.fingerprint,
        phase: Phase::Starting,
        started: now,
        last_end: now,
    };
    shared.store.add(engine.clone(), entry).await;
    let contact = Contact::new(shared, engine.clone(), generation, address, Arc::clone(model));
    Ok((contact, process))
}

/// What a process of this engine's life has in its environment as [`MARK`]. Begins with the state directory, so that
/// two gateways never take each other's engines for left-overs.
pub(super) fn mark(shared: &Shared, engine: &EngineId, generation: Generation) -> String {
    format!("{}|{engine}|{generation}", shared.store.folder().display())
}

/// A loopback port that nobody has. It is given up just before the engine takes it; should somebody else be quicker,
/// the engine says so and the next start takes another.
fn free_address(shared: &Shared) -> io::Result<SocketAddr> {
    loop {
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        // The kernel may offer a port again that a starting engine has not yet taken.
        if shared.keep_port(address.port()) {
            return Ok(address);
        }
    }
}

/// All the memory of the largest accelerator, by its meter, or as configured.
async fn total(shared: &Shared, accelerators: &[AcceleratorId]) -> Bytes {
    let config = shared.config.load_full();
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

/// What stands for the placeholders of a command.
struct Values(Vec<(&'static str, String)>);

impl Values {
    fn new(address: SocketAddr, spec: &ModelSpec, accelerators: usize, total: Bytes) -> Self {
        Self(vec![
            ("${PORT}", address.port().to_string()),
            ("${HOST}", address.ip().to_string()),
            ("${MEMORY_FRACTION}", fraction(spec.memory.awake, total)),
            ("${KV_CACHE_BYTES}", kv_cache(spec, accelerators).to_string()),
        ])
    }

    fn fill(&self, text: &str) -> String {
        let fill = |text: String, (name, value): &(&str, String)| text.replace(name, value);
        self.0.iter().fold(text.to_owned(), fill)
    }
}

/// Four decimals, rounded down: an engine must not take more than was granted.
fn fraction(awake: Bytes, total: Bytes) -> String {
    let total = u128::from(total.0.max(1));
    let parts = (u128::from(awake.0) * 10_000 / total).min(10_000);
    format!("{}.{:04}", parts / 10_000, parts % 10_000)
}

/// What of the memory is left for the cache, per accelerator: without the weights (known by what they take in host
/// RAM) and a tenth of the whole for activations and graphs.
fn kv_cache(spec: &ModelSpec, accelerators: usize) -> u64 {
    let awake = spec.memory.awake.0;
    let weights = spec.memory.host.0 / accelerators.max(1) as u64;
    awake.saturating_sub(weights).saturating_sub(awake / 10).max(awake / 10)
}

fn spawn(
    model: &Model,
    values: &Values,
    accelerators: &[AcceleratorId],
    mark: &str,
    log: std::fs::File,
) -> Result<Process, Error> {
    let command: Vec<String> = model.command.iter().map(|part| values.fill(part)).collect();
    let (program, arguments) = command.split_first().ok_or(Error::Empty)?;
    let failed = |source| Error::Spawn { program: program.clone(), source };
    let ids: Vec<&str> = accelerators.iter().map(AcceleratorId::as_str).collect();
    let mut command = Command::new(program);
    // Our own secrets and settings are none of an engine's business.
    let ours = std::env::vars_os().map(|(name, _)| name);
    for name in ours.filter(|name| name.as_encoded_bytes().starts_with(b"ROUSE_")) {
        command.env_remove(name);
    }
    command
        .args(arguments)
        .env("CUDA_VISIBLE_DEVICES", ids.join(","))
        .envs(model.env.iter().map(|(name, value)| (name, values.fill(value))))
        .env(MARK, mark)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(Error::Log)?)
        .stderr(log);
    let child = tokio::process::Command::from(command).spawn().map_err(failed)?;
    Process::ours(child, format!("{MARK}={mark}")).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_an_accelerator_is_rounded_down_and_never_above_one() {
        assert_eq!(fraction(Bytes::gib(30), Bytes::gib(80)), "0.3750");
        assert_eq!(fraction(Bytes(2), Bytes(3)), "0.6666");
        assert_eq!(fraction(Bytes(3), Bytes(2)), "1.0000");
        assert_eq!(fraction(Bytes(3), Bytes(0)), "1.0000");
    }
}
