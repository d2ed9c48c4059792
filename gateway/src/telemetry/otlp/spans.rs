//! Turns a request into spans: the gateway's own, and a child for each stay in a phase.
//!
//! ```text
//!   POST /v1/chat/completions      from the head's arrival to the last byte
//!     ├─ parked                    in the queue
//!     ├─ connect                   to the engine; a kept connection takes no time
//!     ├─ wait for first byte       from the request's sending to the answer's head
//!     └─ stream                    until the last byte of the answer
//! ```
//!
//! Attributes have the names of OpenTelemetry's semantic conventions if those define one, and `rouse.` names otherwise.
//! A 4xx is an error of the client and not of the server, so such a span has no error status, as the conventions
//! require.

use std::borrow::Cow;

use http::Version;
use opentelemetry::{
    InstrumentationScope, KeyValue, SpanId, TraceFlags, TraceId,
    trace::{Event, SpanContext, SpanKind, Status, TraceState},
};
use opentelemetry_sdk::trace::{IdGenerator as _, RandomIdGenerator, SpanData, SpanEvents, SpanLinks};
use rouse::fault::DisconnectPhase;
use tokio::time::Instant;

use crate::{
    http::route::InferenceRoute,
    metrics::{cold_start_label, phase_label},
    telemetry::{
        RequestRecord,
        request_recorder::{CLIENT_LEFT, PhaseInterval},
        trace_context::TraceContext,
    },
};

/// Returns the spans of a request that has a span context.
pub(super) fn request_spans(record: &RequestRecord) -> Vec<SpanData> {
    let Some(trace_context) = record.own_context else { return Vec::new() };
    let children = record.phases.iter().map(|step| phase_span(step, trace_context, record));
    std::iter::once(server_span(record, trace_context)).chain(children).collect()
}

fn server_span(record: &RequestRecord, trace_context: TraceContext) -> SpanData {
    let ended = &record.outcome;
    let route = route(ended.route, path(record));
    let method = method(&record.method);
    let name = route.map_or_else(|| method.to_owned(), |route| format!("{method} {route}"));
    let mut events = SpanEvents::default();
    let mut event = |name, at: Option<Instant>, attributes| {
        events
            .events
            .extend(at.map(|at| Event::new(name, record.wall_clock.system_time_of(at), attributes, 0)));
    };
    event("request body received", record.body_received_at, Vec::new());
    event("response head sent", record.head_sent_at, Vec::new());
    let left_in_phase =
        ended.left_in_phase.map(|left_in_phase| KeyValue::new("rouse.phase", phase_label(left_in_phase)));
    event(
        "client left",
        left_in_phase.as_ref().map(|_| record.ended_at),
        left_in_phase.into_iter().collect(),
    );
    let broken = ended.status >= 500 || (ended.status < 400 && ended.code.is_some());
    let status = if broken { Status::error(ended.code.unwrap_or_default()) } else { Status::Unset };
    SpanData {
        span_context: context(trace_context, trace_context.span_id),
        parent_span_id: record.parent.map_or(SpanId::INVALID, |parent| SpanId::from(parent.span_id)),
        parent_span_is_remote: record.parent.is_some(),
        span_kind: SpanKind::Server,
        name: name.into(),
        start_time: record.wall_clock.system_time_of(record.began_at),
        end_time: record.wall_clock.system_time_of(record.ended_at),
        attributes: attributes(record, route, method),
        dropped_attributes_count: 0,
        events,
        links: SpanLinks::default(),
        status,
        instrumentation_scope: scope(),
    }
}

fn attributes(record: &RequestRecord, route: Option<&'static str>, method: &'static str) -> Vec<KeyValue> {
    let ended = &record.outcome;
    let number = |name, value: u64| KeyValue::new(name, i64::try_from(value).unwrap_or(i64::MAX));
    let mut all = vec![
        KeyValue::new("http.request.method", method),
        KeyValue::new("url.path", path(record).to_owned()),
        KeyValue::new("url.scheme", if record.is_tls { "https" } else { "http" }),
        KeyValue::new("http.response.status_code", i64::from(ended.status)),
        KeyValue::new("network.protocol.version", version(record.version)),
        number("http.request.body.size", ended.bytes_in),
        number("http.response.body.size", ended.bytes_out),
    ];
    let id = ended.id.as_ref().and_then(|id| id.to_str().ok());
    let error = ended.left_in_phase.map(|_| CLIENT_LEFT).or(ended.code);
    let error =
        error.map(Cow::from).or_else(|| (ended.status >= 500).then(|| ended.status.to_string().into()));
    all.extend(
        [
            route.map(|route| KeyValue::new("http.route", route)),
            error.map(|error| KeyValue::new("error.type", error)),
            record.client.map(|client| KeyValue::new("client.address", client.to_canonical().to_string())),
            record.user_agent.as_ref().map(|agent| KeyValue::new("user_agent.original", agent.clone())),
            id.map(|id| KeyValue::new("rouse.request_id", id.to_owned())),
            ended.model.as_ref().map(|model| KeyValue::new("gen_ai.request.model", model.to_string())),
            operation(ended.route).map(|name| KeyValue::new("gen_ai.operation.name", name)),
            record.usage.map(|usage| number("gen_ai.usage.input_tokens", usage.prompt)),
            record.usage.map(|usage| number("gen_ai.usage.output_tokens", usage.completion)),
            ended.key.as_ref().map(|key| KeyValue::new("rouse.key", key.to_string())),
            ended.cold_start.map(|kind| KeyValue::new("rouse.cold_start", cold_start_label(Some(kind)).1)),
            record.engine.as_ref().map(|engine| KeyValue::new("rouse.engine", engine.to_string())),
            (ended.retries > 0).then(|| number("rouse.retries", ended.retries.into())),
        ]
        .into_iter()
        .flatten(),
    );
    all
}

fn phase_span(step: &PhaseInterval, trace_context: TraceContext, record: &RequestRecord) -> SpanData {
    let (name, kind) = match step.phase {
        DisconnectPhase::Parked => ("parked", SpanKind::Internal),
        DisconnectPhase::Connecting => ("connect", SpanKind::Client),
        DisconnectPhase::Headers => ("wait for first byte", SpanKind::Client),
        DisconnectPhase::Streaming => ("stream", SpanKind::Client),
    };
    let engine = step.engine.as_ref().map(|engine| KeyValue::new("rouse.engine", engine.to_string()));
    let error = step.error.map(|error| KeyValue::new("error.type", error));
    // A client that disconnects is not a failure of the phase.
    let failed = step.error.filter(|error| *error != CLIENT_LEFT);
    SpanData {
        span_context: context(
            trace_context,
            u64::from_be_bytes(RandomIdGenerator::default().new_span_id().to_bytes()),
        ),
        parent_span_id: SpanId::from(trace_context.span_id),
        parent_span_is_remote: false,
        span_kind: kind,
        name: name.into(),
        start_time: record.wall_clock.system_time_of(step.started_at),
        end_time: record.wall_clock.system_time_of(step.ended_at.unwrap_or(record.ended_at)),
        attributes: engine.into_iter().chain(error).collect(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: failed.map_or(Status::Unset, Status::error),
        instrumentation_scope: scope(),
    }
}

fn context(trace_context: TraceContext, span: u64) -> SpanContext {
    SpanContext::new(
        TraceId::from(trace_context.trace_id),
        SpanId::from(span),
        TraceFlags::SAMPLED,
        false,
        TraceState::default(),
    )
}

fn scope() -> InstrumentationScope {
    InstrumentationScope::builder("rouse-gateway").with_version(env!("CARGO_PKG_VERSION")).build()
}

fn path(record: &RequestRecord) -> &str {
    record.path.split_once('?').map_or(&record.path, |(path, _)| path)
}

/// Returns the route as a pattern; `None` if it is not a route.
///
/// Patterns keep the number of span names independent of the number of models.
fn route(label: &str, path: &str) -> Option<&'static str> {
    const PATTERNS: [(&str, &str); 2] =
        [("/v1/models/", "/v1/models/{id}"), ("/engines/", "/engines/{model}/{rest}")];
    const OTHERS: [&str; 3] = ["/v1/models", "/healthz", "/readyz"];
    if label == "other" {
        return None;
    }
    let pattern = || PATTERNS.iter().find(|(start, _)| path.starts_with(start)).map(|(_, route)| *route);
    let other = || OTHERS.into_iter().find(|other| *other == path);
    InferenceRoute::known_path(path).or_else(other).or_else(pattern)
}

/// Returns the conventions' name of the operation.
fn operation(label: &str) -> Option<&'static str> {
    Some(match label {
        "chat" | "messages" | "responses" => "chat",
        "completions" => "text_completion",
        "embeddings" => "embeddings",
        _ => return None,
    })
}

/// Returns a known method, so that clients cannot invent span names.
fn method(method: &str) -> &'static str {
    const KNOWN: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"];
    KNOWN.into_iter().find(|known| *known == method).unwrap_or("_OTHER")
}

const fn version(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "1.0",
        Version::HTTP_2 => "2",
        _ => "1.1",
    }
}
