//! All faults of a request, as one closed set.
//!
//! HTTP status, error code, log level and metric label all follow from a [`Fault`]; only `openai::error` in `rouse-net`
//! converts it into what a client sees. Texts inside come from the configuration or from us, never from an engine's
//! log.

use serde::{
    Deserialize, Serialize,
    de::{IntoDeserializer as _, value},
};

use crate::{
    model::ModelName,
    units::{Bytes, Millis},
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "fault")]
pub enum Fault {
    #[error("{message}")]
    InvalidRequest { message: String, param: Option<String> },
    #[error("no API key: send one as 'Authorization: Bearer KEY', or in the header 'x-api-key' or 'api-key'")]
    MissingApiKey,
    /// `header`: the header field that the key came in.
    #[error("invalid API key in the header '{header}': this gateway has no such key")]
    InvalidApiKey { header: String },
    #[error("this key may not use the model '{model}'")]
    ModelForbidden { model: String },
    /// Without keys, only pages from this machine and from the configured origins have access.
    #[error(
        "web pages of '{origin}' may not use this gateway: to allow them, add the origin to api.cors.origins"
    )]
    OriginForbidden { origin: String },
    /// `suggestions`: names that the client may use and may have meant.
    #[error("Model '{model}' not found: {}", model_hint(.suggestions))]
    ModelNotFound { model: String, suggestions: Vec<String> },
    /// `suggested_path`: the path of a route that the client may have meant.
    #[error("no route {method} {path}{}", route_hint(.suggested_path.as_deref()))]
    RouteNotFound { method: String, path: String, suggested_path: Option<String> },
    #[error("{method} is not allowed on {path}")]
    MethodNotAllowed { method: String, path: String },
    #[error("the request was not received in time: {what}")]
    RequestTimeout { what: String },
    #[error("the body is larger than {setting} ({limit})")]
    BodyTooLarge { setting: String, limit: Bytes },
    #[error("Content-Encoding '{encoding}' is not supported: send the body unencoded")]
    UnsupportedEncoding { encoding: String },
    #[error("the body must be {expected}")]
    UnsupportedMedia { expected: String },
    #[error("the request's head is larger than limits.header ({limit}) or has more than 100 fields")]
    HeadersTooLarge { limit: Bytes },
    #[error("{what} is not implemented")]
    NotImplemented { what: String },
    /// The model does not fit. With `permanent`, not even if everything else is evicted.
    #[error("{0}")]
    InsufficientMemory(Box<MemoryShortage>),
    #[error("{message}{}", queue_full_suffix(.message, .wait))]
    QueueFull { message: String, wait: WaitDetails },
    #[error("this key may use {} {} in {}: {} are used, and this request needs {}", .rate.limit, .rate.unit.as_str(), .rate.window, .rate.used, .rate.requested)]
    RateLimited { rate: RateLimitUsage, retry_after: Millis },
    #[error("the request bodies in flight have reached limits.bodyTotal ({limit}): retry later")]
    BodyMemoryFull { limit: Bytes },
    /// One client's bodies fill its share of the limit.
    #[error(
        "this client's bodies in flight have reached {limit}, its share of limits.bodyTotal: retry later"
    )]
    ClientBodyMemoryFull { limit: Bytes },
    #[error("the client disconnected while {}", .phase.as_str())]
    ClientDisconnected { phase: DisconnectPhase },
    #[error("the engine of '{model}' cannot be reached")]
    EngineUnreachable { model: ModelName },
    /// `may_have_started`: the engine had the whole request for long enough to be working on it.
    #[error("the engine of '{model}' closed the connection before it answered{}", .may_have_started.then_some(
        "; it may have started processing the request, so retry only if running the request twice does no harm"
    ).unwrap_or_default())]
    EngineClosedConnection {
        model: ModelName,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        may_have_started: bool,
    },
    /// The engine was hung, died or was stopped during an exchange.
    #[error("the engine of '{model}' failed: {}", .cause.describe())]
    EngineFailed { model: ModelName, cause: FailureCause, wait: Option<WaitDetails> },
    #[error("{}", not_ready_message(.model, .cause, .wait))]
    ModelNotReady { model: ModelName, cause: FailureCause, wait: WaitDetails },
    /// The request does not justify waking the model.
    #[error(
        "Model '{model}' has no free awake engine, and a GET neither wakes an engine nor waits: use a POST"
    )]
    ModelNotAwake { model: ModelName },
    /// The stub's gate is closed, or it has no engine.
    #[error("{why}")]
    StubNotServing { why: String },
    #[error("the gateway is shutting down")]
    ShuttingDown,
    #[error("the control plane does not answer")]
    ControlPlaneUnavailable,
    #[error("the engine of '{model}' did not answer in time ({timeout} after {limit}: {})", .timeout.describe())]
    EngineTimeout { model: ModelName, timeout: ExchangeTimeout, limit: Millis },
    /// The model's turn ended while the stream ran, and the policy is `cut`.
    #[error("the turn of '{model}' is over and its drain deadline has passed")]
    TurnEnded { model: ModelName },
    /// A bug of ours.
    #[error("internal error")]
    Internal,
}

/// Where a request was when its client disconnected; a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DisconnectPhase {
    Parked,
    Connecting,
    Headers,
    Streaming,
}

/// The deadline of an exchange that passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ExchangeTimeout {
    /// A full accept queue drops further connections, so this may be load and no fault.
    Connect,
    FirstByte,
    NonStream,
    Idle,
}

/// Why an engine did not become or stay usable: a class that clients see. Details are in the engine's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCause {
    OutOfMemory,
    PortTaken,
    /// The command does not exist, or it is no program.
    CommandNotFound,
    /// The gateway could not create the process: the machine has no process, descriptor or memory left for it.
    NotLaunched,
    /// The command exists, and the gateway's user may not run it.
    PermissionDenied,
    /// The exit code; -1 if it is unknown.
    Exited(i32),
    /// The signal that ended the process.
    Killed(i32),
    Timeout,
    /// The request's wait ended; nothing failed. Clients see the class of [`Self::Timeout`].
    Deadline,
    /// The engine answers, but not as one that can serve.
    Unhealthy,
    /// The engine makes no progress, and its health check fails.
    Hung,
    /// The engine serves another model than the configured one.
    WrongModel {
        serves: Box<str>,
        /// The name in the configuration. Journals of earlier versions lack it.
        #[serde(default)]
        configured: Box<str>,
    },
    /// The engine listens on every interface, and the configuration does not allow that.
    PublicListener,
    /// The engine refused the call (sleep or wake).
    Refused,
    /// The engine accepted the order to sleep, and reported for [`crate::engine::SLEEP_DENIAL_TIMEOUT`] that it is
    /// awake.
    #[serde(rename = "stays_awake")]
    SleepDenied,
    /// The engine was stopped on purpose; nothing failed.
    Stopped,
    Unreachable,
    /// The connection ended before the answer was complete, or the data was no longer HTTP.
    #[serde(rename = "broke_off")]
    ConnectionBroken,
    AcceleratorLost,
    /// No node accepts the engine's Pod.
    Unschedulable,
    /// The engine's Pod got accelerators that have no room for it.
    #[serde(rename = "misplaced")]
    InsufficientRoom,
    /// The Pod cannot run: the API server refuses the template, or an image is not available.
    #[serde(rename = "unrunnable")]
    PodNotRunnable,
}

/// A limit of a key, and how much of it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RateLimitUsage {
    pub unit: RateLimitUnit,
    pub limit: u64,
    pub used: u64,
    /// Amount that the refused request needs; for tokens an estimate.
    pub requested: u64,
    pub window: Millis,
}

/// The unit of a key's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RateLimitUnit {
    Requests,
    Tokens,
}

/// Details on what a refused or parked request waited for.
///
/// [`Fault::InsufficientMemory`], [`Fault::QueueFull`] and [`Fault::ModelNotReady`] carry them, and
/// [`Fault::EngineFailed`] may.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitDetails {
    /// Text from the plan's report.
    pub waited_for: String,
    /// Every model that the text names.
    ///
    /// The gateway redacts these names for clients that must not know the models. They are the names in the text: the
    /// configuration may have others by the time a client reads it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub named_models: Vec<ModelName>,
    pub waited: Millis,
    /// Place in the model's queue, from 1; 0 if the request was not queued.
    pub position: u32,
    pub holders: Vec<BlockingModel>,
    /// When a retry makes sense at the earliest, from now.
    pub retry_after: Option<Millis>,
    /// The limit that ended the wait, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expired_limit: Option<WaitLimit>,
}

/// The limit of a request's wait for its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitLimit {
    /// The client set a limit, and it is shorter than the queue's.
    Request,
    Queue,
}

/// Numbers on why a model does not fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryShortage {
    pub model: ModelName,
    /// Bytes per accelerator; for a pool, the sum over all that an engine takes of it.
    pub memory: Bytes,
    pub available: Bytes,
    pub permanent: bool,
    pub wait: WaitDetails,
}

fn route_hint(meant: Option<&str>) -> String {
    meant.map(|path| format!(": use {path}")).unwrap_or_default()
}

fn model_hint(near: &[String]) -> String {
    match near {
        [] => "GET /v1/models lists the models".to_owned(),
        near => {
            format!(
                "did you mean {}?",
                near.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(" or ")
            )
        }
    }
}

/// Message of [`Fault::ModelNotReady`]. The wait's text describes the last failed start, if there is one.
fn not_ready_message(model: &ModelName, cause: &FailureCause, wait: &WaitDetails) -> String {
    let WaitDetails { waited_for, waited, expired_limit: over, .. } = wait;
    match cause {
        FailureCause::Deadline => {
            let when = over.map(|over| format!(", when {} expired", over.describe())).unwrap_or_default();
            format!("Model '{model}' was not ready after {waited}{when}: {waited_for}")
        }
        cause => {
            let why = if waited_for.is_empty() { cause.describe() } else { waited_for.clone() };
            format!("Model '{model}' failed to become ready: {why}{}", wait_expired_suffix(wait))
        }
    }
}

/// Text on why the wait ended, to append to what blocked the request.
fn wait_expired_suffix(wait: &WaitDetails) -> String {
    wait.expired_limit
        .map(|over| format!("; {} expired after {}", over.describe(), wait.waited))
        .unwrap_or_default()
}

/// Text on what the queued requests wait for.
fn queue_full_suffix(message: &str, wait: &WaitDetails) -> String {
    let why = Some(&wait.waited_for).filter(|why| !why.is_empty() && *why != message);
    why.map(|why| format!(": {why}")).unwrap_or_default() + &wait_expired_suffix(wait)
}

impl std::fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { model, memory, available, permanent: never, wait } = self;
        let why = &wait.waited_for;
        if *never {
            return write!(f, "Model '{model}' fits nowhere, even with all other models evicted: {why}");
        }
        write!(f, "Cannot schedule {model}: insufficient memory ({memory} needed, {available} free)")?;
        if !why.is_empty() {
            write!(f, ": {why}")?;
        }
        f.write_str(&wait_expired_suffix(wait))
    }
}

/// A model that holds memory that another model waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockingModel {
    pub model: ModelName,
    pub memory: Bytes,
    pub idle_for: Millis,
    pub leases: u32,
    pub pinned: bool,
}

impl WaitLimit {
    const fn describe(self) -> &'static str {
        match self {
            Self::Request => "the request's x-request-timeout",
            Self::Queue => "queue.maxWait",
        }
    }
}

impl DisconnectPhase {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Parked => "parked",
            Self::Connecting => "connecting",
            Self::Headers => "waiting for headers",
            Self::Streaming => "streaming",
        }
    }
}

impl RateLimitUnit {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
        }
    }
}

impl ExchangeTimeout {
    /// Text on what did not arrive in time.
    const fn describe(self) -> &'static str {
        match self {
            Self::Connect => "no connection",
            Self::FirstByte => "no first byte of the stream",
            Self::NonStream => "no complete answer",
            Self::Idle => "no further byte",
        }
    }
}

impl FailureCause {
    /// Whether the same start would fail again, so that only a person can fix it.
    #[must_use]
    pub const fn is_permanent(&self) -> bool {
        matches!(
            self,
            Self::CommandNotFound
                | Self::PermissionDenied
                | Self::PodNotRunnable
                | Self::WrongModel { .. }
                | Self::PublicListener
        )
    }

    /// The class for programs to compare; the name that an engine serves is no part of it.
    #[must_use]
    pub fn class(&self) -> String {
        match self {
            Self::WrongModel { .. } => "wrong_model".to_owned(),
            cause => cause.to_string(),
        }
    }

    /// Text for people, with the class, under which the operators' page explains it.
    #[must_use]
    pub fn describe(&self) -> String {
        let words = match self {
            Self::OutOfMemory => "not enough accelerator memory",
            Self::PortTaken => "the engine's port was already in use",
            Self::CommandNotFound => "the engine's command does not exist",
            Self::PermissionDenied => "no permission to run the engine's command",
            Self::NotLaunched => "the machine has no process, file descriptor or memory left for the engine",
            // A process reports its exit to its parent, which was an earlier gateway.
            Self::Exited(-1) => "the engine ended with an unknown status",
            Self::Exited(code) => return format!("exit status {code} ({self})"),
            Self::Killed(signal) => return format!("killed by signal {signal} ({self})"),
            Self::Timeout => "the engine exceeded its deadline",
            Self::Deadline => "the request's wait expired",
            Self::Unhealthy => "the engine answers, but not like an engine that can serve",
            Self::Hung => "the engine makes no progress, and its health check fails",
            Self::WrongModel { serves, configured } if configured.is_empty() => {
                return format!("the engine serves '{serves}', not the configured name ({})", self.class());
            }
            Self::WrongModel { serves, configured } => {
                let class = self.class();
                return format!(
                    "the engine serves '{serves}', the configuration says '{configured}' ({class})"
                );
            }
            Self::PublicListener => "the engine listens on every interface",
            Self::Refused => "the engine refused the call",
            Self::SleepDenied => "the engine accepted the sleep call, but reports that it is awake",
            Self::Stopped => "the engine was stopped on purpose",
            Self::Unreachable => "the engine cannot be reached",
            Self::ConnectionBroken => "the connection broke in the middle of the answer",
            Self::AcceleratorLost => "the engine's accelerator was lost",
            Self::Unschedulable => "no node accepts the engine's Pod",
            Self::InsufficientRoom => "the engine's Pod was placed on accelerators without room",
            Self::PodNotRunnable => "the engine's Pod cannot run",
        };
        format!("{words} ({self})")
    }
}

impl std::fmt::Display for ExchangeTimeout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Connect => "connect",
            Self::FirstByte => "firstByte",
            Self::NonStream => "nonStream",
            Self::Idle => "idle",
        })
    }
}

impl std::fmt::Display for FailureCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OutOfMemory => f.write_str("out_of_memory"),
            Self::PortTaken => f.write_str("port_taken"),
            Self::CommandNotFound => f.write_str("command_not_found"),
            Self::NotLaunched => f.write_str("not_launched"),
            Self::PermissionDenied => f.write_str("permission_denied"),
            Self::Exited(code) => write!(f, "exited:{code}"),
            Self::Killed(signal) => write!(f, "killed:{signal}"),
            Self::Timeout | Self::Deadline => f.write_str("timeout"),
            Self::Unhealthy => f.write_str("unhealthy"),
            Self::Hung => f.write_str("hung"),
            Self::WrongModel { serves, configured } if configured.is_empty() => {
                write!(f, "wrong_model: the engine serves '{serves}'")
            }
            Self::WrongModel { serves, configured } => {
                write!(f, "wrong_model: the engine serves '{serves}', the configuration says '{configured}'")
            }
            Self::PublicListener => f.write_str("public_listener"),
            Self::Refused => f.write_str("refused"),
            Self::SleepDenied => f.write_str("stays_awake"),
            Self::Stopped => f.write_str("stopped"),
            Self::Unreachable => f.write_str("unreachable"),
            Self::ConnectionBroken => f.write_str("broke_off"),
            Self::AcceleratorLost => f.write_str("accelerator_lost"),
            Self::Unschedulable => f.write_str("unschedulable"),
            Self::InsufficientRoom => f.write_str("misplaced"),
            Self::PodNotRunnable => f.write_str("unrunnable"),
        }
    }
}

impl std::str::FromStr for FailureCause {
    type Err = value::Error;

    /// Parses what `Display` writes.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |class: &str| text.strip_prefix(class).and_then(|number| number.parse().ok());
        if let Some(code) = number("exited:") {
            return Ok(Self::Exited(code));
        }
        if let Some(signal) = number("killed:") {
            return Ok(Self::Killed(signal));
        }
        let names =
            text.strip_prefix("wrong_model: the engine serves '").and_then(|rest| rest.strip_suffix('\''));
        match names.map(|names| names.split_once("', the configuration says '").unwrap_or((names, ""))) {
            Some((serves, configured)) => {
                Ok(Self::WrongModel { serves: serves.into(), configured: configured.into() })
            }
            None => Self::deserialize(text.into_deserializer()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_read_as_it_is_written() {
        let wrong = |configured: &str| FailureCause::WrongModel {
            serves: "it's".into(),
            configured: configured.into(),
        };
        let plain = [
            FailureCause::OutOfMemory,
            FailureCause::CommandNotFound,
            FailureCause::PermissionDenied,
            FailureCause::NotLaunched,
            FailureCause::ConnectionBroken,
            FailureCause::Timeout,
            FailureCause::SleepDenied,
            FailureCause::PodNotRunnable,
        ];
        for cause in plain.into_iter().chain([
            FailureCause::Exited(-3),
            FailureCause::Killed(9),
            wrong(""),
            wrong("its name"),
        ]) {
            assert_eq!(cause.to_string().parse(), Ok(cause));
        }
        assert!("exited:often".parse::<FailureCause>().is_err() && "".parse::<FailureCause>().is_err());
    }
}
