//! What the proxy's listeners share.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use prometheus::IntCounter;
use rouse::{adapter::Kind, model::ModelName, nvml::Nvml};
use tokio::sync::{Mutex, watch};

use super::{
    accelerators::{Accelerators, Sources},
    args::Args,
    engine::Depth,
    gate::Keeper,
    listen,
    memory::Memory,
    metrics::{Metrics, Outcome},
    readiness::Readiness,
    relay,
    set_log::Log,
};
use crate::{driver::Driver, token::Token};

/// All of it. Made once, and passed down.
pub(crate) struct Proxy {
    pub(crate) settings: Settings,
    pub(crate) keeper: Keeper,
    pub(super) depth: Depth,
    pub(crate) counts: Counts,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) readiness: Arc<Readiness>,
    pub(crate) accelerators: Accelerators,
    pub(crate) memory: Memory,
    pub(crate) log: Log,
    pub(crate) token: Option<Token>,
    /// The process may go after SIGTERM; no longer so when the gate is opened again.
    pub(super) released: watch::Sender<bool>,
    /// The relays' threads, and where the public proxy port listens once it does.
    pub(super) relays: relay::Threads,
    pub(super) listening: Mutex<Option<SocketAddr>>,
}

/// What the flags say.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) host: Option<IpAddr>,
    pub(crate) proxy_port: u16,
    pub(crate) dial: Duration,
    /// In bytes.
    pub(crate) max_body: u64,
    pub(crate) body_timeout: Duration,
    pub(crate) epoch_gate: bool,
    pub(crate) kind: Kind,
    pub(crate) model: ModelName,
}

/// What is counted, from the start of the process on.
#[derive(Debug)]
pub(crate) struct Counts {
    /// Exchanges with the engine, by how they ended.
    pub(crate) complete: Count,
    pub(crate) left: Count,
    pub(crate) failed: Count,
    pub(crate) cut: Count,
    /// Requests that saw no engine.
    pub(crate) gated: Count,
    pub(crate) not_ready: Count,
    pub(crate) refused: Count,
}

/// Grows by one.
#[derive(Debug)]
pub(crate) struct Count(IntCounter);

impl Proxy {
    pub(super) fn new(args: &Args, token: Option<Token>, relays: relay::Threads) -> Arc<Self> {
        let settings = Settings {
            host: args.host,
            proxy_port: args.proxy_port,
            dial: args.proxy_dial_timeout,
            max_body: if args.max_body.0 == 0 { u64::MAX } else { args.max_body.0 },
            body_timeout: args.body_timeout,
            epoch_gate: args.epoch_gate,
            kind: args.engine_kind,
            model: args.model.as_str().into(),
        };
        let metrics = Metrics::new();
        let driver: Arc<dyn Driver> = Arc::new(Nvml::default());
        let sources = Sources::of_environment(args.accelerators_file.clone());
        let accelerators = Accelerators::discover(sources, Arc::clone(&driver));
        Arc::new(Self {
            keeper: Keeper::new(settings.model.clone(), !settings.epoch_gate),
            depth: Depth::default(),
            settings,
            counts: Counts::of(&metrics),
            metrics: Arc::new(metrics),
            readiness: Arc::default(),
            memory: Memory::new(accelerators.clone(), driver),
            accelerators,
            log: Log::new(std::io::stdout()),
            token,
            released: watch::Sender::new(false),
            relays,
            listening: Mutex::new(None),
        })
    }

    /// The public proxy port listens from the first call on; returns where.
    pub(super) async fn listen(&self) -> Result<SocketAddr, listen::Error> {
        let mut listening = self.listening.lock().await;
        if let Some(address) = *listening {
            return Ok(address);
        }
        let listener = listen::bind("proxy", self.settings.host, self.settings.proxy_port)?;
        let address = self.relays.serve(listener)?;
        *listening = Some(address);
        Ok(address)
    }
}

#[cfg(test)]
impl Proxy {
    /// With these flags, and threads that nobody starts.
    pub(super) fn of_flags(flags: &[&str]) -> Arc<Self> {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: Args,
        }
        let words = std::iter::once(&"proxy").chain(flags);
        let args = <Line as clap::Parser>::try_parse_from(words).unwrap().args;
        Self::new(&args, None, relay::Threads::new(1, 1).0)
    }
}

impl Counts {
    fn of(metrics: &Metrics) -> Self {
        let count = |outcome| Count(metrics.requests(outcome));
        Self {
            complete: count(Outcome::Complete),
            left: count(Outcome::Left),
            failed: count(Outcome::Failed),
            cut: count(Outcome::Cut),
            gated: count(Outcome::Gated),
            not_ready: count(Outcome::NotReady),
            refused: count(Outcome::Refused),
        }
    }
}

impl Count {
    pub(crate) fn add(&self) {
        self.0.inc();
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.get()
    }
}
