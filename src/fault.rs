//! All faults of a request, as one closed set.
//!
//! HTTP status, error code, log level and metric label all follow from a [`Fault`]; only `openai::error` in `rouse-net`
//! converts it into what a client sees. Texts inside come from the configuration or from us, never from an engine's
//! log.

mod failure_cause;
mod wait;

use serde::{Deserialize, Serialize};

use self::wait::{not_ready_message, queue_full_suffix};
pub use self::{
    failure_cause::FailureCause,
    wait::{BlockingModel, MemoryShortage, WaitDetails, WaitLimit},
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
    /// The driver did not reply.
    #[error(
        "the gateway's decision loop did not reply in time: retry; if this lasts, see the gateway's log and restart it"
    )]
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

fn route_hint(suggested_path: Option<&str>) -> String {
    suggested_path.map(|path| format!(": use {path}")).unwrap_or_default()
}

fn model_hint(suggestions: &[String]) -> String {
    match suggestions {
        [] => "GET /v1/models lists the models".to_owned(),
        near => {
            format!(
                "did you mean {}?",
                near.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(" or ")
            )
        }
    }
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

impl RateLimitUnit {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
        }
    }
}
