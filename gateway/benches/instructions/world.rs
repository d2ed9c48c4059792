//! A gateway without a network: the real core and driver, and a scripted engine.
//!
//! Everything runs on one thread and every step waits for the previous one, so two runs are identical.

use std::{fmt::Write as _, net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use aws_lc_rs::digest;
use rouse::{
    fleet::{
        command::Command,
        event::{CanaryVerdict, Event},
    },
    units::{Bytes, Tick},
};
use rouse_gateway::{
    driver::{DriverHandle, Journal},
    http,
    metrics::{Metrics, TelemetryDropCounters},
    serve::{ShutdownStage, api::pipe::PipeServer},
    telemetry::Telemetry,
};
use rouse_net::{lease::TickClock, tcp::pipe};
use rouse_platform::Platform;
use tokio::{
    io::DuplexStream,
    sync::{
        mpsc::{self, Receiver},
        watch,
    },
    time::Instant,
};

/// The model's name for clients.
pub(crate) const MODEL: &str = "org/model-7b-instruct";
/// The client's key, one of many.
pub(crate) const KEY: &str = "sk-rouse-key-0500";
const KEYS: usize = 1000;
const ENGINE: &str = "127.0.0.1:9";
const CLIENT: &str = "10.0.0.1:50000";
/// Any time; the driver's clock starts here.
const BEGIN: Tick = Tick(1_800_000_000_000);

pub(crate) struct BenchGateway {
    here: PipeServer,
    engine: Receiver<DuplexStream>,
    _stage: watch::Sender<ShutdownStage>,
}

impl BenchGateway {
    /// Starts on a local runtime. `model` adds a line to the model's configuration.
    pub(crate) fn start(model: &str) -> anyhow::Result<Self> {
        let config = rouse_config::parse(&configuration(model)?, "the count")?;
        let clock = TickClock::new(Instant::now(), BEGIN);
        let drop_counters = TelemetryDropCounters::new();
        let metrics = Arc::new(Metrics::with_drop_counters(&drop_counters));
        let (events, received) = mpsc::channel(1024);
        let platform = Arc::new(ImmediatePlatform { address: ENGINE.parse()?, events });
        let journal = Journal::default();
        let (handle, driver) =
            DriverHandle::new(Arc::clone(&platform) as _, received, journal, Arc::clone(&metrics), clock);
        handle.send_event(Event::Configured { configuration: Box::new(config.core.clone()) });
        platform.events.try_send(Event::AdoptionDone)?;
        let telemetry = Telemetry::start(&config, &drop_counters)?;
        let config = Arc::new(ArcSwap::from_pointee(config));
        let shared = http::ServerContext::with_telemetry(Arc::new(handle), config, metrics, telemetry);
        tokio::task::spawn_local(driver.run(None));
        let (stage, watched) = watch::channel(ShutdownStage::Serving);
        let engine = pipe::listen(ENGINE.parse()?);
        Ok(Self { here: PipeServer::new(shared, watched), engine, _stage: stage })
    }

    pub(crate) fn connect(&self) -> anyhow::Result<DuplexStream> {
        self.here.connect(CLIENT.parse()?).context("refused")
    }

    /// Returns the next connection to the engine.
    pub(crate) async fn accept(&mut self) -> anyhow::Result<DuplexStream> {
        self.engine.recv().await.context("nobody listens")
    }
}

/// Enables everything that a request pays for, except the access log. No limit is ever reached.
fn configuration(model: &str) -> anyhow::Result<String> {
    let mut text = format!(
        "listen: {{api: 127.0.0.1:0, admin: 127.0.0.1:0}}
state: /nonexistent
accelerators: [{{id: gpu-0, memory: 24Gi}}]
host: {{sleepMemory: 0}}
models:
  - name: {MODEL}
    engine: {{kind: custom, command: [engine, \"${{PORT}}\"]}}
    memory: {{awake: 10Gi}}
    pinned: true
    {model}
keys:
"
    );
    for number in 0..KEYS {
        let key = format!("sk-rouse-key-{number:04}");
        let hash = digest::digest(&digest::SHA256, key.as_bytes());
        write!(
            text,
            "  - {{name: key-{number}, requestsPerMinute: 1000000000, tokensPerMinute: 1000000000000, sha256: \""
        )?;
        for byte in hash.as_ref() {
            write!(text, "{byte:02x}")?;
        }
        text.push_str("\"}\n");
    }
    Ok(text)
}

/// Executes every command at once, and runs one engine.
struct ImmediatePlatform {
    address: SocketAddr,
    events: mpsc::Sender<Event>,
}

impl Platform for ImmediatePlatform {
    fn submit(&self, command: Command) {
        let send = |event| drop(self.events.try_send(event));
        match command {
            Command::Reserve { engine, generation, accelerators, .. } => {
                send(Event::Placed { engine, generation, accelerators });
            }
            Command::Launch { engine, generation, .. } => {
                send(Event::Started { engine: engine.clone(), generation, address: self.address });
                send(Event::Profiled { engine: engine.clone(), generation });
                send(Event::Ready { engine, generation });
            }
            Command::Probe { engine, generation } => {
                send(Event::Canary { engine, generation, verdict: CanaryVerdict::Passed });
            }
            Command::ReadMeter { accelerator, .. } => {
                send(Event::MeterRead { accelerator, used: Bytes::ZERO, by_engine: None });
            }
            _ => {}
        }
    }
}
