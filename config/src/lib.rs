//! The validated configuration: parsed, checked and complete before any port is opened.
//!
//! [`load`] and [`parse`] report all errors of a file at once, each with line and column. [`check()`] finds settings
//! that are legal but will not work as intended, and [`diff()`] lists what a reload changes.

#![warn(clippy::indexing_slicing)]

mod accelerators;
mod api;
mod check;
mod command_options;
mod diff;
mod engine;
mod error;
mod file;
pub mod host;
mod keys;
mod kubernetes;
mod llama_swap;
mod machine;
mod measured_memory;
mod memory_utilization;
mod model;
mod passthrough;
mod policy;
mod proxies;
mod reader;
mod saturation;
mod substitute;
mod telemetry;
mod tls;
mod yaml;
mod yaml_hints;
mod yaml_text;

#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, sync::Arc};

pub use rouse_net::adapter::{EngineKind, ProbeTask, SleepApi};

pub use self::{
    api::CorsConfig,
    check::{CheckFindings, check, unplaceable_models},
    diff::{ConfigDiff, diff},
    error::{ConfigErrors, ConfigProblem, SourceLocation},
    file::{load, parse},
    keys::{KeyConfig, KeyConfigs, KeyHash, ModelAccess, RateLimits},
    kubernetes::{
        DualPodsConfig, ImageVolumes, KubernetesConfig, PlatformKind, PrometheusConfig, SlotsConfig,
        WarmupConfig, WatchedNamespaces,
    },
    passthrough::PassthroughPath,
    proxies::{ForwardedHeader, IpNetwork, IpNetworkError, TrustedProxies},
    saturation::{LoadSource, LocalSaturation, ModelSaturation, SaturationConfig},
    telemetry::{AccessLogTarget, TelemetryConfig},
    tls::{ALPN_HTTP2, TlsConfig, TlsIdentity},
};
pub use self::{
    engine::{
        FingerprintHasher, LORA_AT_LEVEL_2, batch_limits_by_command, has_lora_by_command, kind_name,
        kv_cache_by_command, sets_kv_cache, sleep_api_by_command,
    },
    file::{DEFAULT_ADMIN_ADDRESS, load_with, parse_address, parse_with, port_conflict},
    llama_swap::{ImportMachine, LlamaSwapImport, import_llama_swap},
    machine::{MachineDefaults, default_state_dir},
    measured_memory::{MeasuredMemory, MemoryEditError, set_memory},
    model::{invalid_name_reason, memory_with_defaults},
    telemetry::invalid_collector_reason,
    yaml_text::{yaml_quoted, yaml_scalar},
};

use rouse::{
    model::{AcceleratorId, FleetConfig, ModelName},
    units::{Bytes, Millis},
};
use rouse_net::{adapter::EngineProfile, backend_origin::BackendOrigin};

/// One valid configuration. A reload creates another, and refuses an invalid one as a whole.
#[derive(Clone, Debug)]
pub struct Config {
    pub api: SocketAddr,
    /// Threads that serve the API; `None` means one per core.
    pub threads: Option<usize>,
    pub admin: AdminConfig,
    /// The proxies in front of the API.
    pub proxies: TrustedProxies,
    /// The API's certificates; without them it serves plain HTTP.
    pub tls: Option<TlsConfig>,
    pub cors: CorsConfig,
    /// Input of the fleet's decisions.
    pub core: FleetConfig,
    /// How the platform and the relay use each model's engines.
    pub engines: BTreeMap<ModelName, Arc<EngineConfig>>,
    /// Entries that reloads replaced, the latest last: engines started by them may still run.
    pub former_engines: Vec<Arc<EngineConfig>>,
    /// Meter files of simulated accelerators, by accelerator: an accelerator with a file is metered by reading it.
    pub meters: BTreeMap<AcceleratorId, PathBuf>,
    /// Environment variables by which an engine sees each declared accelerator.
    pub visible: BTreeMap<AcceleratorId, BTreeMap<String, String>>,
    /// Ask NVML for the accelerators (`accelerators: auto`); `core.accelerators` is then filled at the start.
    pub accelerators_auto: bool,
    pub headroom: Bytes,
    pub stream: StreamConfig,
    pub timeouts: RequestTimeouts,
    pub limits: ApiLimits,
    pub affinity: AffinityPolicy,
    pub shutdown: ShutdownConfig,
    /// Directory of the adoption file, learned values and engine logs.
    pub state: PathBuf,
    /// Size limit of each engine's log.
    pub log_cap: Bytes,
    pub access_log: AccessLogTarget,
    pub telemetry: TelemetryConfig,
    /// `platform: kubernetes`; `None` on one machine.
    pub kubernetes: Option<KubernetesConfig>,
    /// How models are scaled by their load, on one machine.
    pub saturation: LocalSaturation,
    /// API keys; if empty, anybody may use the API.
    pub keys: KeyConfigs,
    /// `keys: none`: open access to the API is intended.
    pub keys_none: bool,
    /// Warnings that [`check()`] reports about the keys.
    pub key_warnings: Vec<ConfigProblem>,
    /// The file has no content.
    pub blank: bool,
    /// The file's name, for messages.
    pub origin: String,
    pub model_locations: BTreeMap<ModelName, SourceLocation>,
}

#[derive(Clone)]
pub struct AdminConfig {
    pub address: SocketAddr,
    pub token: Option<String>,
    /// `/metrics` needs no token.
    pub metrics_open: bool,
    /// The admin listener uses TLS too.
    pub tls: bool,
}

/// How to run and call one model's engine.
#[derive(Clone, PartialEq)]
pub struct EngineConfig {
    pub name: ModelName,
    pub kind: EngineKind,
    /// Program and arguments, with the placeholders `${PORT}`, `${HOST}`, `${MEMORY_FRACTION}` and `${KV_CACHE_BYTES}`.
    pub command: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// The engine's own name for the model.
    pub served_name: String,
    pub task: ProbeTask,
    pub on_disconnect: OnDisconnect,
    /// Bearer token for the engine, sent instead of the client's key.
    pub api_key: Option<String>,
    /// The engine is behind a stub, whose gate reports are trusted.
    pub stub: bool,
    /// The engine may listen on every interface.
    pub allow_public: bool,
    /// Calls that put the engine to sleep and wake it.
    pub sleep: SleepApi,
    /// Paths of a custom engine that `/engines/{model}/…` opens. Other kinds have fixed lists.
    pub passthrough: Vec<PassthroughPath>,
    /// Hash of what an engine is started with, the same as in `ModelSpec`.
    pub fingerprint: u64,
    /// Origin of an external backend.
    pub backend_origin: Option<Arc<BackendOrigin>>,
}

impl EngineConfig {
    /// How the gateway calls these engines.
    #[must_use]
    pub fn profile(&self) -> EngineProfile {
        EngineProfile {
            kind: self.kind,
            sleep: self.sleep,
            served_name: self.served_name.clone(),
            task: self.task,
            api_key: self.api_key.clone(),
        }
    }
}

impl Config {
    /// Returns the variables that show these accelerators to an engine and hide all others.
    ///
    /// CUDA knows the UUIDs that NVML reports. The file chooses the names of declared accelerators freely, and a name
    /// unknown to CUDA hides every GPU, so for those only the variables in `visible` are set.
    #[must_use]
    pub fn visible_env(&self, accelerators: &[AcceleratorId]) -> BTreeMap<String, String> {
        if self.accelerators_auto {
            let ids: Vec<_> = accelerators.iter().map(AcceleratorId::as_str).collect();
            return BTreeMap::from([("CUDA_VISIBLE_DEVICES".to_owned(), ids.join(","))]);
        }
        let mut joined = BTreeMap::<String, String>::new();
        for (name, value) in accelerators.iter().filter_map(|id| self.visible.get(id)).flatten() {
            let all = joined.entry(name.clone()).or_default();
            if !all.is_empty() {
                all.push(',');
            }
            all.push_str(value);
        }
        joined
    }

    /// Returns the entry that started a running engine, found by its fingerprint.
    ///
    /// If none matches, because an earlier gateway started the engine or the entry was replaced long ago, returns the
    /// current entry.
    #[must_use]
    pub fn engine_started_with(&self, model: &ModelName, fingerprint: u64) -> Option<&Arc<EngineConfig>> {
        let present = self.engines.get(model);
        let started_so = |spec: &&Arc<EngineConfig>| spec.fingerprint == fingerprint;
        let former = || self.former_engines.iter().rev().filter(|spec| spec.name == *model).find(started_so);
        present.filter(started_so).or_else(former).or(present)
    }
}

/// What happens to a request in its engine when the client disconnects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDisconnect {
    Abort,
    Drain,
}

/// How a request prefers one of a model's engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinityPolicy {
    /// Load only.
    None,
    /// The session that the client names.
    Session,
    /// The session, or else the prefix of the conversation.
    #[default]
    Prefix,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamConfig {
    pub grace: Millis,
    pub heartbeat: Millis,
    /// On `/v1/responses` a heartbeat is an event, for clients that drop comments.
    pub responses_heartbeat_events: bool,
}

/// Timeouts of one exchange, and of probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestTimeouts {
    pub connect: Millis,
    pub first_byte: Millis,
    pub non_stream: Millis,
    pub idle: Millis,
    pub health_every: Millis,
    pub health_timeout: Millis,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiLimits {
    pub body: Bytes,
    pub body_total: Bytes,
    /// Minimum bytes per second of a request's body.
    pub body_rate: Bytes,
    pub header: Bytes,
    pub header_read: Millis,
    pub connection_idle: Millis,
    pub connections_per_address: u32,
    /// In ten seconds; 0 means unlimited.
    pub offences_per_address: u32,
    pub client_stall: Millis,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownConfig {
    /// How long exchanges may continue, if the file sets it.
    pub grace: Option<Millis>,
    /// Grace if neither the file nor a Pod sets one.
    pub default_grace: Millis,
    pub stop_engines: bool,
}

impl ShutdownConfig {
    /// Part of a Pod's grace period that streams may not use.
    ///
    /// The gateway needs it to send clients the reason why their streams end, to release the Lease, and to withdraw its
    /// demand report.
    const SHUTDOWN_RESERVE: Millis = Millis::secs(10);

    /// Returns how long exchanges may continue, if the process is killed `killed_after` the signal.
    ///
    /// `None` means that the kill time is unknown. The grace ends before the kill even if the file sets a longer one.
    #[must_use]
    pub fn effective_grace(&self, killed_after: Option<Millis>) -> Millis {
        let Some(killed) = killed_after else { return self.grace.unwrap_or(self.default_grace) };
        let most = Millis(killed.0.saturating_sub(Self::SHUTDOWN_RESERVE.0).max(killed.0 / 2));
        self.grace.map_or(most, |configured| configured.min(most))
    }
}

/// Omits the token: configurations are logged.
impl fmt::Debug for AdminConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminConfig")
            .field("address", &self.address)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("metrics_open", &self.metrics_open)
            .field("tls", &self.tls)
            .finish()
    }
}

/// Omits the values of `env` and the key.
///
/// The command is shown: every user of the machine can read it in the process table anyway.
impl fmt::Debug for EngineConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineConfig")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .field("command", &self.command)
            .field("env", &self.env.keys())
            .field("served_name", &self.served_name)
            .field("task", &self.task)
            .field("on_disconnect", &self.on_disconnect)
            .field("api_key", &self.api_key.as_ref().map(|_| "…"))
            .field("stub", &self.stub)
            .field("allow_public", &self.allow_public)
            .field("sleep", &self.sleep)
            .field("passthrough", &self.passthrough)
            .finish()
    }
}
