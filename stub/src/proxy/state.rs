//! State that the proxy's listeners share.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use prometheus::IntCounter;
use rouse::{model::ModelName, units};
use rouse_net::{adapter::EngineKind, nvml::Nvml};
use tokio::sync::{Mutex, watch};

use super::{
    accelerators::{AcceleratorDiscovery, DiscoverySources},
    actuation::SleepLevelRecord,
    args::ProxyArgs,
    gate::GateController,
    listen,
    load_reporter::LoadReporter,
    memory::MemoryReader,
    metrics::{ProxyMetrics, RelayRequestOutcome},
    readiness::Readiness,
    relay,
    set_log::ContainerLog,
};
use crate::{accelerator_driver::AcceleratorDriver, token::BearerToken};

/// The proxy's state, created once and passed down.
pub(crate) struct Proxy {
    pub(crate) settings: ProxySettings,
    pub(crate) gate: GateController,
    pub(super) sleep_level: SleepLevelRecord,
    pub(crate) counts: RelayCounts,
    pub(crate) load_reporter: LoadReporter,
    pub(crate) metrics: Arc<ProxyMetrics>,
    pub(crate) readiness: Arc<Readiness>,
    pub(crate) accelerators: AcceleratorDiscovery,
    pub(crate) memory: MemoryReader,
    pub(crate) log: ContainerLog,
    pub(crate) token: Option<BearerToken>,
    /// The process may end after SIGTERM. Reset when the gate opens again.
    pub(super) released: watch::Sender<bool>,
    /// The relay threads, and the public proxy port's address once it listens.
    pub(super) relays: relay::RelayThreads,
    pub(super) proxy_port_address: Mutex<Option<SocketAddr>>,
}

/// Settings from the flags.
#[derive(Clone, Debug)]
pub(crate) struct ProxySettings {
    pub(crate) host: Option<IpAddr>,
    pub(crate) proxy_port: u16,
    pub(crate) dial_timeout: Duration,
    /// In bytes.
    pub(crate) max_body: u64,
    pub(crate) body_timeout: Duration,
    /// In bytes a second; 0 for any rate.
    pub(crate) body_rate: units::Bytes,
    pub(crate) head_timeout: Duration,
    pub(crate) idle_timeout: Duration,
    pub(crate) stall_timeout: Duration,
    pub(crate) epoch_gate: bool,
    pub(crate) engine_kind: EngineKind,
    pub(crate) model: ModelName,
}

/// Counters since the start of the process.
#[derive(Debug)]
pub(crate) struct RelayCounts {
    /// Exchanges with the engine, by outcome.
    pub(crate) complete: OutcomeCounter,
    pub(crate) client_left: OutcomeCounter,
    pub(crate) failed: OutcomeCounter,
    pub(crate) cut: OutcomeCounter,
    /// Requests that reached no engine.
    pub(crate) gated: OutcomeCounter,
    pub(crate) not_ready: OutcomeCounter,
    pub(crate) refused: OutcomeCounter,
}

/// A counter of one outcome.
#[derive(Debug)]
pub(crate) struct OutcomeCounter(IntCounter);

impl Proxy {
    pub(super) fn new(
        args: &ProxyArgs,
        token: Option<BearerToken>,
        relays: relay::RelayThreads,
    ) -> Arc<Self> {
        let settings = ProxySettings {
            host: args.host,
            proxy_port: args.proxy_port,
            dial_timeout: args.proxy_dial_timeout,
            max_body: if args.max_body.0 == 0 { u64::MAX } else { args.max_body.0 },
            body_timeout: args.body_timeout,
            body_rate: args.body_rate,
            head_timeout: args.head_timeout,
            idle_timeout: args.idle_timeout,
            stall_timeout: args.stall_timeout,
            epoch_gate: args.epoch_gate,
            engine_kind: args.engine_kind,
            model: args.model.as_str().into(),
        };
        let metrics = ProxyMetrics::new();
        let driver: Arc<dyn AcceleratorDriver> = Arc::new(Nvml::default());
        let sources = DiscoverySources::from_env(args.accelerators_file.clone());
        let accelerators = AcceleratorDiscovery::discover(sources, Arc::clone(&driver));
        Arc::new(Self {
            gate: GateController::new(settings.model.clone(), !settings.epoch_gate),
            sleep_level: SleepLevelRecord::default(),
            settings,
            counts: RelayCounts::new(&metrics),
            load_reporter: LoadReporter::default(),
            metrics: Arc::new(metrics),
            readiness: Arc::default(),
            memory: MemoryReader::new(accelerators.clone(), driver),
            accelerators,
            log: ContainerLog::new(std::io::stdout()),
            token,
            released: watch::Sender::new(false),
            relays,
            proxy_port_address: Mutex::new(None),
        })
    }

    /// Binds the public proxy port at the first call, and returns its address.
    pub(super) async fn listen_proxy_port(&self) -> Result<SocketAddr, listen::Error> {
        let mut listening = self.proxy_port_address.lock().await;
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
    /// Builds a proxy with these flags and without running relay threads.
    pub(super) fn from_flags(flags: &[&str]) -> Arc<Self> {
        #[derive(clap::Parser)]
        struct ProxyCommandLine {
            #[command(flatten)]
            args: ProxyArgs,
        }
        let words = std::iter::once(&"proxy").chain(flags);
        let args = <ProxyCommandLine as clap::Parser>::try_parse_from(words).unwrap().args;
        Self::new(&args, None, relay::RelayThreads::new(1, 1, 1).0)
    }
}

impl RelayCounts {
    fn new(metrics: &ProxyMetrics) -> Self {
        let count = |outcome| OutcomeCounter(metrics.request_counter(outcome));
        Self {
            complete: count(RelayRequestOutcome::Complete),
            client_left: count(RelayRequestOutcome::ClientLeft),
            failed: count(RelayRequestOutcome::Failed),
            cut: count(RelayRequestOutcome::Cut),
            gated: count(RelayRequestOutcome::Gated),
            not_ready: count(RelayRequestOutcome::NotReady),
            refused: count(RelayRequestOutcome::Refused),
        }
    }
}

impl OutcomeCounter {
    pub(crate) fn add(&self) {
        self.0.inc();
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.get()
    }
}
