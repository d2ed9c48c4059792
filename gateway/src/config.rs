//! The configuration as meant: parsed, checked and complete before any port is opened.
//!
//! [`load`] and [`parse`] report everything that is wrong with a file at once, each with line and column. `check`
//! finds what is legal but will not work as meant, `diff` says what a reload changes.

mod accelerators;
mod api;
mod check;
mod command_options;
mod diff;
mod engine;
mod error;
mod file;
mod keys;
mod kubernetes;
mod machine;
mod memory_utilization;
mod model;
mod passthrough;
mod policy;
mod reader;
mod source;
mod substitute;
mod telemetry;
mod tls;
mod yaml;
mod yaml_hints;

#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, sync::Arc};

pub use rouse_net::adapter::{EngineKind, ProbeTask, SleepApi};

pub use self::{
    api::CorsConfig,
    check::{CheckFindings, check, check_local_machine, unplaceable_models},
    diff::{ConfigDiff, diff},
    error::{ConfigErrors, ConfigProblem, SourceLocation},
    file::{load, parse},
    keys::{KeyConfig, KeyConfigs, KeyHash, ModelAccess},
    kubernetes::{DualPodsConfig, KubernetesConfig, PlatformKind, PrometheusConfig, WatchedNamespaces},
    passthrough::PassthroughPath,
    source::ConfigSource,
    telemetry::{AccessLogTarget, TelemetryConfig},
    tls::TlsConfig,
};
pub(crate) use self::{
    engine::{
        FingerprintHasher, LORA_AT_LEVEL_2, has_lora_by_command, kind_name, kv_cache_by_command,
        sets_kv_cache, sleep_api_by_command,
    },
    file::{DEFAULT_ADMIN_ADDRESS, parse_address},
    model::{invalid_name_reason, memory_with_defaults},
    telemetry::invalid_collector_reason,
};
pub use crate::demo::config as demo;

use rouse::{
    model::{AcceleratorId, FleetConfig, ModelName},
    units::{Bytes, Millis},
};
use rouse_net::{adapter::EngineProfile, backend_origin::BackendOrigin};

/// One valid configuration. A reload makes another and is refused whole when it cannot.
#[derive(Clone, Debug)]
pub struct Config {
    pub api: SocketAddr,
    /// Threads that serve it; `None`: as many as there are cores.
    pub threads: Option<usize>,
    pub admin: AdminConfig,
    /// The API's certificates; without, it speaks plain HTTP.
    pub tls: Option<TlsConfig>,
    pub cors: CorsConfig,
    /// What the decisions need.
    pub core: FleetConfig,
    /// What the platform and the relay need, by model.
    pub engines: BTreeMap<ModelName, Arc<EngineConfig>>,
    /// What reloads have replaced, the latest last: engines that were started by it may still run.
    pub former_engines: Vec<Arc<EngineConfig>>,
    /// Simulated accelerators' meter files, by accelerator: an accelerator with one is metered by reading it.
    pub meters: BTreeMap<AcceleratorId, PathBuf>,
    /// The environment variables by which an engine sees each declared accelerator.
    pub visible: BTreeMap<AcceleratorId, BTreeMap<String, String>>,
    /// Ask NVML which accelerators there are (`accelerators: auto`); `core.accelerators` is then filled at start.
    pub accelerators_auto: bool,
    pub headroom: Bytes,
    pub stream: StreamConfig,
    pub timeouts: RequestTimeouts,
    pub limits: ApiLimits,
    pub affinity: AffinityPolicy,
    pub shutdown: ShutdownConfig,
    /// Adoption file, learned values, engine logs.
    pub state: PathBuf,
    /// Cap of each engine's log.
    pub log_cap: Bytes,
    pub access_log: AccessLogTarget,
    pub telemetry: TelemetryConfig,
    /// `platform: kubernetes`; `None` on one machine.
    pub kubernetes: Option<KubernetesConfig>,
    /// Who may use the API; anybody when it is empty.
    pub keys: KeyConfigs,
    /// `keys: explicitly_none`: that anybody may use the API is meant so.
    pub keys_none: bool,
    /// What `check` warns of in them.
    pub key_warnings: Vec<ConfigProblem>,
    /// The file says nothing at all.
    pub blank: bool,
    /// The file's name, for texts; and where in it each model stands.
    pub origin: String,
    pub model_locations: BTreeMap<ModelName, SourceLocation>,
}

#[derive(Clone)]
pub struct AdminConfig {
    pub address: SocketAddr,
    pub token: Option<String>,
    /// `/metrics` needs no token.
    pub metrics_open: bool,
    /// It speaks TLS, too.
    pub tls: bool,
}

/// How one model's engine is run and spoken to.
#[derive(Clone, PartialEq)]
pub struct EngineConfig {
    pub name: ModelName,
    pub kind: EngineKind,
    /// Program and arguments, with `${PORT}`, `${HOST}`, `${MEMORY_FRACTION}`, `${KV_CACHE_FLAG}` still in them.
    pub command: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// What the engine calls the model.
    pub served_name: String,
    pub task: ProbeTask,
    pub on_disconnect: OnDisconnect,
    /// Sent to the engine as a bearer token instead of the client's key.
    pub api_key: Option<String>,
    /// A stub stands in front of the engine: what it says of its gate is believed.
    pub stub: bool,
    /// The engine may listen on every interface.
    pub allow_public: bool,
    /// Which calls put it to sleep and wake it.
    pub sleep: SleepApi,
    /// What of a custom engine `/engines/{model}/…` opens; other kinds have their own lists.
    pub passthrough: Vec<PassthroughPath>,
    /// Of what an engine is started with: as `ModelSpec` has it.
    pub fingerprint: u64,
    /// Of a backend that somebody else runs.
    pub backend_origin: Option<Arc<BackendOrigin>>,
}

impl EngineConfig {
    /// How its engines are spoken to.
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
    /// The environment variables that show an engine these accelerators and hide all others. CUDA knows the UUIDs that NVML
    /// gives. The name of a declared accelerator is the file's own choice, and a name that CUDA does not know hides every
    /// GPU: so only what `visible` says is set.
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

    /// How an engine of this model is spoken to that was started with this fingerprint. The present entry of the file
    /// where that is not known: of an engine that an earlier gateway started, or of one long replaced.
    #[must_use]
    pub fn engine_started_with(&self, model: &ModelName, fingerprint: u64) -> Option<&Arc<EngineConfig>> {
        let present = self.engines.get(model);
        let started_so = |spec: &&Arc<EngineConfig>| spec.fingerprint == fingerprint;
        let former = || self.former_engines.iter().rev().filter(|spec| spec.name == *model).find(started_so);
        present.filter(started_so).or_else(former).or(present)
    }
}

/// What becomes of an engine's work when its client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDisconnect {
    Abort,
    Drain,
}

/// By what a request prefers one of a model's several engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinityPolicy {
    /// By nothing but load.
    None,
    /// By what its client says it belongs to.
    Session,
    /// By that, or else by how its conversation begins.
    #[default]
    Prefix,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamConfig {
    pub grace: Millis,
    pub heartbeat: Millis,
    /// On `/v1/responses` a heartbeat is an event, for clients that drop comments.
    pub responses_heartbeat_events: bool,
    /// Streams to HTTP/1.1 clients pass without hyper.
    pub bypass_hyper: bool,
}

/// Deadlines of one exchange and of probes.
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
    /// Least bytes per second of a request's body.
    pub body_rate: Bytes,
    pub header: Bytes,
    pub header_read: Millis,
    pub connection_idle: Millis,
    pub connections_per_address: u32,
    /// In ten seconds; 0: any number.
    pub offences_per_address: u32,
    pub client_stall: Millis,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownConfig {
    /// How long exchanges may run on, as the file says it.
    pub grace: Option<Millis>,
    /// The same where neither the file nor a Pod says it.
    pub default_grace: Millis,
    pub stop_engines: bool,
}

impl ShutdownConfig {
    /// Of a Pod's time, for telling clients why their streams end, for the lease, and for what says that this gateway waits.
    const SHUTDOWN_RESERVE: Millis = Millis::secs(10);

    /// How long exchanges may run on where this process is killed so long after it was told to end; `None`: nobody knows of that.
    /// Not until it is killed, whatever the file says.
    #[must_use]
    pub fn effective_grace(&self, killed_after: Option<Millis>) -> Millis {
        let Some(killed) = killed_after else { return self.grace.unwrap_or(self.default_grace) };
        let most = Millis(killed.0.saturating_sub(Self::SHUTDOWN_RESERVE.0).max(killed.0 / 2));
        self.grace.map_or(most, |said| said.min(most))
    }
}

/// Without the token: configurations are logged.
impl fmt::Debug for AdminConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin")
            .field("address", &self.address)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("metrics_open", &self.metrics_open)
            .field("tls", &self.tls)
            .finish()
    }
}

/// Without the values of `env` and without the key. The command is shown: every user of the machine can read it
/// from the process table anyway.
impl fmt::Debug for EngineConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
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
