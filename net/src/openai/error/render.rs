//! Renders one failure in each API's format, before the head and in the stream.
//!
//! The SDKs' behaviour decides the shape. Both of OpenAI's raise an error for any datum with a top-level `error`,
//! before they look at the kind of event. Both of Anthropic's raise for every event named `error`.
//!
//! The responses API differs. Its own error event has no `error` inside, and the SDKs pass it on like any event of the
//! model. Their `stream()` helpers refuse every event before `response.created`, with a message about only that. So the
//! event carries both: the fields of the responses API for clients that read events, and the `error` that makes the
//! SDKs raise with the true message at any place in the stream. `response.failed` follows, as it does from OpenAI
//! itself, for clients that recognize no other end. The SDKs never reach it, so it may precede `response.created` and
//! lack the response's id.

use http::StatusCode;
use serde::Serialize;

use super::details::FaultDetails;
use crate::openai::ApiSchema;

#[derive(Serialize)]
pub(super) struct ErrorObject<'a> {
    pub(super) message: String,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) param: Option<&'a str>,
    pub(super) code: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) details: Option<FaultDetails<'a>>,
}

#[derive(Serialize)]
struct ErrorEnvelope<'a, E> {
    /// Present only in Anthropic's envelope.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    error: &'a E,
}

/// The error event of the responses API, with the `error` that makes its SDKs raise.
#[derive(Serialize)]
pub(super) struct ErrorEvent<'a, E> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u64,
    code: Option<&'a str>,
    message: &'a str,
    param: Option<&'a str>,
    error: &'a E,
}

#[derive(Serialize)]
struct ResponseFailedEvent<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u64,
    response: FailedResponse<'a>,
}

#[derive(Serialize)]
struct FailedResponse<'a> {
    object: &'static str,
    status: &'static str,
    error: FailedResponseError<'a>,
    output: [(); 0],
}

#[derive(Serialize)]
struct FailedResponseError<'a> {
    code: Option<&'a str>,
    message: &'a str,
}

/// The `type` of Anthropic's envelope. It has more kinds than OpenAI's, and users of its SDKs compare them.
pub(super) fn anthropic_error_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

/// Writes the JSON of a refusal.
pub(super) fn envelope<E: Serialize>(error: &E, schema: ApiSchema, out: &mut Vec<u8>) {
    write(&ErrorEnvelope { kind: (schema == ApiSchema::Anthropic).then_some("error"), error }, out);
}

/// Writes the end of a stream that failed after `events` events.
pub(super) fn write_error_event(error: &ErrorObject<'_>, schema: ApiSchema, events: u64, out: &mut Vec<u8>) {
    match schema {
        ApiSchema::OpenAi => {
            out.extend_from_slice(b"data: ");
            envelope(error, schema, out);
            out.extend_from_slice(b"\n\n");
        }
        ApiSchema::Anthropic => {
            out.extend_from_slice(b"event: error\ndata: ");
            envelope(error, schema, out);
            out.extend_from_slice(b"\n\n");
        }
        ApiSchema::Responses => {
            write_responses_error_events(Some(error.code), &error.message, error.param, error, events, out)
        }
    }
}

/// Writes the two events that end a stream of the responses API.
pub(super) fn write_responses_error_events<E: Serialize>(
    code: Option<&str>,
    message: &str,
    param: Option<&str>,
    error: &E,
    events: u64,
    out: &mut Vec<u8>,
) {
    out.extend_from_slice(b"event: error\ndata: ");
    write(&ErrorEvent { kind: "error", sequence_number: events, code, message, param, error }, out);
    out.extend_from_slice(b"\n\nevent: response.failed\ndata: ");
    let response = FailedResponse {
        object: "response",
        status: "failed",
        error: FailedResponseError { code, message },
        output: [],
    };
    let failed =
        ResponseFailedEvent { kind: "response.failed", sequence_number: events.saturating_add(1), response };
    write(&failed, out);
    out.extend_from_slice(b"\n\n");
}

fn write<T: Serialize>(value: &T, out: &mut Vec<u8>) {
    // Serializing plain data into memory cannot fail, and half an envelope is no worse than none.
    drop(serde_json::to_writer(out, value));
}
