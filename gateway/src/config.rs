//! The configuration as meant: parsed, checked and complete before any port is opened.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, sync::Arc};

use rouse::{
    model::{AcceleratorId, Configuration, ModelName},
    units::{Bytes, Millis},
};

/// One valid configuration. A reload makes another and is refused whole when it cannot.
#[derive(Clone, Debug)]
pub struct Config {
    pub api: SocketAddr,
    pub admin: Admin,
    /// What the decisions need.
    pub core: Configuration,
    /// What the platform and the relay need, by model.
    pub models: BTreeMap<ModelName, Arc<Model>>,
    /// Simulated accelerators' meter files, by accelerator: an accelerator with one is metered by reading it.
    pub meters: BTreeMap<AcceleratorId, PathBuf>,
    /// Ask NVML which accelerators there are (`accelerators: auto`); `core.accelerators` is then filled at start.
    pub accelerators_auto: bool,
    pub headroom: Bytes,
    pub stream: Stream,
    pub timeouts: Timeouts,
    pub limits: Limits,
    pub shutdown: Shutdown,
    /// Adoption file, learned values, engine logs.
    pub state: PathBuf,
    /// Cap of each engine's log.
    pub log_cap: Bytes,
}

#[derive(Clone, Debug)]
pub struct Admin {
    pub address: SocketAddr,
    pub token: Option<String>,
    /// `/metrics` needs no token.
    pub metrics_open: bool,
}

/// How one model's engine is run and spoken to.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    pub name: ModelName,
    pub kind: Kind,
    /// Program and arguments, with `${PORT}`, `${HOST}`, `${MEMORY_FRACTION}`, `${KV_CACHE_BYTES}` still in them.
    pub command: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// What the engine calls the model.
    pub served_name: String,
    pub task: Task,
    pub on_disconnect: OnDisconnect,
    /// Sent to the engine as a bearer token instead of the client's key.
    pub api_key: Option<String>,
    /// The engine may listen on every interface.
    pub allow_public: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Vllm,
    Sglang,
    LlamaCpp,
    Custom,
}

/// What the readiness probe asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    Generate,
    Embed,
    Score,
    Transcribe,
    None,
}

/// What becomes of an engine's work when its client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDisconnect {
    Abort,
    Drain,
}

#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub grace: Millis,
    pub heartbeat: Millis,
}

/// Deadlines of one exchange and of probes.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    pub connect: Millis,
    pub first_byte: Millis,
    pub non_stream: Millis,
    pub idle: Millis,
    pub health_every: Millis,
    pub health_timeout: Millis,
}

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub body: Bytes,
    pub body_total: Bytes,
    /// Least bytes per second of a request's body.
    pub body_rate: Bytes,
    pub header: Bytes,
    pub header_read: Millis,
    pub connection_idle: Millis,
    pub connections_per_address: u32,
    pub client_stall: Millis,
}

#[derive(Clone, Copy, Debug)]
pub struct Shutdown {
    pub grace: Millis,
    pub stop_engines: bool,
}
