//! Renders an engine's own refusal as an event, once the stream's head is sent and its status cannot be.
//!
//! The engine's body is kept byte for byte where it can stand in an event of the API that the client called. Engines
//! answer in OpenAI's format whatever the API, so elsewhere the body is wrapped in an event that the API allows.

use bytes::Bytes;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::render::{self, ErrorObject};
use crate::openai::ApiSchema;

/// The top-level fields of a refusal. Each may hold any value.
#[derive(Deserialize)]
struct EngineErrorBody<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

/// The fields of the error object.
#[derive(Default, Deserialize)]
struct EngineErrorFields<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow)]
    message: Option<&'a RawValue>,
    #[serde(borrow)]
    code: Option<&'a RawValue>,
    #[serde(borrow)]
    param: Option<&'a RawValue>,
}

/// An Anthropic error that wraps an error of another format.
#[derive(Serialize)]
struct WrappedEngineError<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    message: &'a str,
    details: &'a RawValue,
}

/// Renders the engine's response with a status other than 2xx as the end of a stream.
pub(super) fn event(status: StatusCode, body: &[u8], schema: ApiSchema) -> Bytes {
    let mut out = Vec::with_capacity(body.len() + 64);
    let document =
        std::str::from_utf8(body).ok().and_then(|text| serde_json::from_str::<&RawValue>(text).ok());
    match document.filter(|document| document.get().starts_with('{')) {
        Some(document) => refusal(status, document, schema, &mut out),
        None => render::write_error_event(&unreadable(status, schema), schema, 0, &mut out),
    }
    out.into()
}

fn refusal(status: StatusCode, document: &RawValue, schema: ApiSchema, out: &mut Vec<u8>) {
    let parsed = serde_json::from_str::<EngineErrorBody<'_>>(document.get()).ok();
    let (kind, error) = parsed.map_or((None, None), |parsed| (parsed.kind, parsed.error));
    // Without an `error` member the whole document is the error, as vLLM's older releases and FastAPI write it.
    let error = error.unwrap_or(document);
    match schema {
        ApiSchema::OpenAi if std::ptr::eq(error.get(), document.get()) => {
            write_data_lines(&openai_envelope(&document), out)
        }
        ApiSchema::OpenAi => write_data_lines(document.get().as_bytes(), out),
        ApiSchema::Responses => {
            let inside = parse_fields(error);
            let message = message(&inside, error, status);
            // Some engines send a number.
            let code = inside.code.map(|code| code.get().trim_matches('"').to_owned());
            let param = text(inside.param);
            // One line: in JSON a line end is white space.
            let error = RawValue::from_string(error.get().replace(['\n', '\r'], " ")).ok();
            render::write_responses_error_events(code.as_deref(), &message, param.as_deref(), &error, 0, out);
            return;
        }
        ApiSchema::Anthropic => {
            out.extend_from_slice(b"event: error\n");
            let inside = parse_fields(error);
            match (text(inside.kind), text(inside.message)) {
                (Some(_), Some(_)) if text(kind).as_deref() == Some("error") => {
                    write_data_lines(document.get().as_bytes(), out);
                }
                (Some(_), Some(_)) => write_data_lines(&anthropic_envelope(&error), out),
                (kind, _) => write_data_lines(
                    &anthropic_envelope(&WrappedEngineError {
                        kind: kind.as_deref().unwrap_or_else(|| render::anthropic_error_type(status)),
                        message: &message(&inside, error, status),
                        details: error,
                    }),
                    out,
                ),
            }
        }
    }
    out.push(b'\n');
}

fn parse_fields(error: &RawValue) -> EngineErrorFields<'_> {
    serde_json::from_str(error.get()).unwrap_or_default()
}

fn message(inside: &EngineErrorFields<'_>, error: &RawValue, status: StatusCode) -> String {
    text(inside.message).or_else(|| text(Some(error))).unwrap_or_else(|| status_message(status))
}

fn text(value: Option<&RawValue>) -> Option<String> {
    serde_json::from_str(value?.get()).ok()
}

fn status_message(status: StatusCode) -> String {
    format!("the engine answered with status {}", status.as_u16())
}

fn openai_envelope<E: Serialize>(error: &E) -> Vec<u8> {
    let mut out = Vec::new();
    render::envelope(error, ApiSchema::OpenAi, &mut out);
    out
}

fn anthropic_envelope<E: Serialize>(error: &E) -> Vec<u8> {
    let mut out = Vec::new();
    render::envelope(error, ApiSchema::Anthropic, &mut out);
    out
}

/// Writes a document of several lines as as many `data` lines.
fn write_data_lines(document: &[u8], out: &mut Vec<u8>) {
    for line in document.split(|byte| matches!(byte, b'\n' | b'\r')).filter(|line| !line.is_empty()) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(line);
        out.push(b'\n');
    }
}

/// An error for a body that is not a JSON object: it reports only the status.
fn unreadable(status: StatusCode, schema: ApiSchema) -> ErrorObject<'static> {
    let kind = match schema {
        ApiSchema::Anthropic => render::anthropic_error_type(status),
        _ if status.is_server_error() => "server_error",
        _ => "invalid_request_error",
    };
    ErrorObject {
        message: status_message(status),
        kind,
        param: None,
        code: super::ENGINE_REFUSED,
        details: None,
    }
}

#[cfg(test)]
mod tests;
