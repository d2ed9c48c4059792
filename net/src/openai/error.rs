//! The one place that turns a [`Fault`] into a client's view of it.
//!
//! Status, code, type, `Retry-After`, `x-should-retry`, log level and metric label all follow from the fault alone, so
//! the same failure looks the same on every path: before the head as a response, after it as an event in the stream.
//!
//! `x-should-retry` exists because the SDKs retry every 5xx by default. A refusal that cost the engine nothing may be
//! retried. A request that the engine may have begun may not, because a second copy of a long generation is the last
//! thing that an engine in trouble needs. A connection that closed at once and without a byte counts as not begun.
//!
//! An [`ApiSchema`] selects the format. `code` and `details` are the same in all of them, since the SDKs pass on
//! unknown fields.
//!
//! Messages come from the fault. An engine's own message reaches a client only as that engine's own response.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use tracing::Level;

use super::ApiSchema;
use rouse::{
    fault::{BlockingModel, ExchangeTimeout, Fault, MemoryShortage, WaitDetails},
    units::Millis,
};

mod details;
mod engine_error;
mod render;

use render::ErrorObject;

/// Instructs OpenAI's SDKs whether to retry; they follow it above their own rules.
pub const SHOULD_RETRY: &str = "x-should-retry";

/// The code of an engine's own error at the end of a stream: see [`engine_error_event`].
pub const ENGINE_REFUSED: &str = "engine_refused";

/// Another replica, or the same one after a restart, can answer after this time.
const MIN_RETRY_AFTER: Millis = Millis::secs(1);
/// A decision loop that does not reply needs longer than a client's first back-off.
const CONTROL_PLANE_RETRY_AFTER: Millis = Millis::secs(5);

/// The fixed properties of each kind of fault.
struct FaultMapping {
    status: u16,
    code: &'static str,
    retry: bool,
}

#[must_use]
pub fn status(fault: &Fault) -> StatusCode {
    // All statuses in the table are valid; a test checks each of them.
    StatusCode::from_u16(mapping(fault).status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// The envelope's `code`, for programs to branch on.
#[must_use]
pub fn code(fault: &Fault) -> &'static str {
    mapping(fault).code
}

/// The `type` of OpenAI's envelope: the class of the error.
#[must_use]
pub fn error_type(fault: &Fault) -> &'static str {
    match (mapping(fault).status, fault) {
        (401, _) => "authentication_error",
        (403, _) => "permission_error",
        (429, Fault::InsufficientMemory(_)) => "insufficient_memory",
        (429, _) => "rate_limit_error",
        (500.., _) => "server_error",
        _ => "invalid_request_error",
    }
}

#[must_use]
pub fn should_retry(fault: &Fault) -> bool {
    mapping(fault).retry
}

/// Returns how long to wait before a retry: at least a second; `None` where a retry never helps or no time is known.
#[must_use]
pub fn retry_after(fault: &Fault) -> Option<Millis> {
    let retry_after = match fault {
        Fault::ModelNotAwake { .. } => return None,
        Fault::RateLimited { retry_after, .. } => Some(*retry_after),
        Fault::ControlPlaneUnavailable => Some(CONTROL_PLANE_RETRY_AFTER),
        _ => match mapping(fault).status {
            429 | 503 => wait(fault).and_then(expected_end),
            _ => return None,
        },
    };
    Some(retry_after.unwrap_or(MIN_RETRY_AFTER).max(MIN_RETRY_AFTER))
}

/// Log level: low for a client's mistakes, high for an operator's problems.
#[must_use]
pub fn log_level(fault: &Fault) -> Level {
    match fault {
        Fault::Internal => Level::ERROR,
        Fault::ClientDisconnected { .. } | Fault::ShuttingDown => Level::INFO,
        // Any client can trigger this, at any rate.
        Fault::NotImplemented { .. } => Level::DEBUG,
        _ => match mapping(fault).status {
            500.. => Level::WARN,
            422 | 429 => Level::INFO,
            _ => Level::DEBUG,
        },
    }
}

/// Renders the envelope as JSON.
#[must_use]
pub fn body(fault: &Fault, schema: ApiSchema) -> Bytes {
    let mut json = Vec::with_capacity(256);
    render::envelope(&error_object(fault, schema), schema, &mut json);
    json.into()
}

/// Renders the refusal as a whole response.
#[must_use]
pub fn response(fault: &Fault, schema: ApiSchema) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body(fault, schema)));
    *response.status_mut() = status(fault);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let retry = if should_retry(fault) { "true" } else { "false" };
    headers.insert(SHOULD_RETRY, HeaderValue::from_static(retry));
    if let Some(after) = retry_after(fault) {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(after.0.div_ceil(1000)));
    }
    response
}

/// Renders the failure as the end of a stream that had no events. The stream's head was sent already. No `[DONE]`
/// follows.
#[must_use]
pub fn event(fault: &Fault, schema: ApiSchema) -> Bytes {
    event_after(fault, schema, 0)
}

/// As [`event`], after `events` events of the engine. The responses API numbers its events, from 0.
#[must_use]
pub fn event_after(fault: &Fault, schema: ApiSchema, events: u64) -> Bytes {
    let mut out = Vec::with_capacity(512);
    render::write_error_event(&error_object(fault, schema), schema, events, &mut out);
    out.into()
}

/// Renders an engine's own error as the end of a stream whose head was sent: a response with a status other than 2xx,
/// or one that is not an event stream. `body`: the whole body of the engine's refusal; empty when the response was not
/// a refusal.
#[must_use]
pub fn engine_error_event(status: StatusCode, body: &[u8], schema: ApiSchema) -> Bytes {
    engine_error::event(status, body, schema)
}

const fn mapping(fault: &Fault) -> FaultMapping {
    let (status, code, retry) = match fault {
        Fault::InvalidRequest { .. } => (400, "invalid_request", false),
        Fault::MissingApiKey | Fault::InvalidApiKey { .. } => (401, "invalid_api_key", false),
        Fault::ModelForbidden { .. } => (403, "model_forbidden", false),
        Fault::OriginForbidden { .. } => (403, "origin_forbidden", false),
        Fault::ModelNotFound { .. } => (404, "model_not_found", false),
        Fault::RouteNotFound { .. } => (404, "route_not_found", false),
        Fault::MethodNotAllowed { .. } => (405, "method_not_allowed", false),
        Fault::RequestTimeout { .. } => (408, "request_timeout", false),
        Fault::BodyTooLarge { .. } => (413, "body_too_large", false),
        Fault::UnsupportedEncoding { .. } => (415, "unsupported_encoding", false),
        Fault::UnsupportedMedia { .. } => (415, "unsupported_media_type", false),
        Fault::HeadersTooLarge { .. } => (431, "headers_too_large", false),
        Fault::NotImplemented { .. } => (501, "not_implemented", false),
        Fault::InsufficientMemory(shortage) if shortage.permanent => (422, "unplaceable", false),
        Fault::InsufficientMemory(_) => (429, "insufficient_memory", true),
        Fault::QueueFull { .. } => (429, "queue_full", true),
        Fault::RateLimited { .. } => (429, "rate_limited", true),
        Fault::BodyMemoryFull { .. } | Fault::ClientBodyMemoryFull { .. } => (429, "busy", true),
        Fault::ClientDisconnected { .. } => (499, "client_left", false),
        Fault::EngineUnreachable { .. } | Fault::EngineTimeout { timeout: ExchangeTimeout::Connect, .. } => {
            (502, "engine_unreachable", true)
        }
        Fault::EngineClosedConnection { may_have_started, .. } => (502, "engine_closed", !*may_have_started),
        // A fault with a wait was raised while the request was parked; without one, a running exchange failed.
        Fault::EngineFailed { wait, .. } => (503, "engine_failed", wait.is_some()),
        Fault::ModelNotReady { cause, .. } => (503, "model_not_ready", !cause.is_permanent()),
        // A retry wakes the model no more than this request did.
        Fault::ModelNotAwake { .. } => (503, "model_not_ready", false),
        Fault::StubNotServing { .. } => (503, "not_serving", true),
        Fault::ShuttingDown => (503, "shutting_down", true),
        Fault::ControlPlaneUnavailable => (503, "control_plane", true),
        Fault::EngineTimeout { .. } => (504, "engine_timeout", false),
        Fault::TurnEnded { .. } => (503, "turn_over", false),
        Fault::Internal => (500, "internal_error", false),
    };
    FaultMapping { status, code, retry }
}

/// The upper end of the expected wait; without one, when something may change at the earliest.
fn expected_end(wait: &WaitDetails) -> Option<Millis> {
    wait.expected_wait.as_ref().map(|expected| expected.high).or(wait.retry_after)
}

fn wait(fault: &Fault) -> Option<&WaitDetails> {
    match fault {
        Fault::InsufficientMemory(shortage) => Some(&shortage.wait),
        Fault::QueueFull { wait, .. } | Fault::ModelNotReady { wait, .. } => Some(wait),
        Fault::EngineFailed { wait, .. } => wait.as_ref(),
        _ => None,
    }
}

fn error_object(fault: &Fault, schema: ApiSchema) -> ErrorObject<'_> {
    ErrorObject {
        message: fault.to_string(),
        kind: match schema {
            ApiSchema::OpenAi | ApiSchema::Responses => error_type(fault),
            ApiSchema::Anthropic => render::anthropic_error_type(status(fault)),
        },
        param: match fault {
            Fault::InvalidRequest { param, .. } => param.as_deref(),
            Fault::ModelNotFound { .. } | Fault::ModelForbidden { .. } => Some("model"),
            _ => None,
        },
        code: code(fault),
        details: details::of(fault),
    }
}

#[cfg(test)]
mod tests;
