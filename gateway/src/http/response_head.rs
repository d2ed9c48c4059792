//! Heads of the gateway's own responses.

use http::{HeaderMap, HeaderValue, Response, header};
use rouse::{fault::Fault, fleet::quote::WaitRange};
use rouse_net::{openai, relay::headers::REQUEST_ID, server::last_response::last_response_bytes};

use super::{WorkerContext, request_context::RequestContext, response_body::ClientResponseBody};
use crate::driver::{ColdStart, WaitBreakdown};

/// Renders a refusal for a connection on which no request could be read.
pub(crate) fn error_response_bytes(worker: &WorkerContext, fault: &Fault) -> Vec<u8> {
    let body = openai::error::body(fault, openai::ApiSchema::OpenAi);
    let mut response = openai::error::response(fault, openai::ApiSchema::OpenAi).map(|_| body);
    response.headers_mut().insert(REQUEST_ID, worker.ids.keep_or_make(None));
    last_response_bytes(&response)
}

/// The head of a stream that has no data yet.
pub(super) fn event_stream_response(body: ClientResponseBody) -> Response<ClientResponseBody> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Adds headers that split the request's wait into its parts.
pub(super) fn add_wait_headers(head: &mut Response<()>, waited: WaitBreakdown, context: &RequestContext) {
    let headers = head.headers_mut();
    if let Some(cold_start) = waited.cold_start {
        let kind = match cold_start {
            ColdStart::Hot => "hot",
            ColdStart::Cold => "cold",
        };
        headers.insert("x-rouse-cold-start", HeaderValue::from_static(kind));
    }
    let first_byte = context.since_arrival().0.saturating_sub(waited.queue.0);
    let timing =
        format!("queue;dur={}, wake;dur={}, first-byte;dur={first_byte}", waited.queue.0, waited.wake.0);
    if let Ok(timing) = HeaderValue::try_from(timing) {
        headers.insert("server-timing", timing);
    }
}

/// Adds the wait that a parked request was quoted: its ends in whole seconds, rounded outwards, as `12-20`.
pub(super) fn add_expected_wait(headers: &mut HeaderMap, expected: WaitRange) {
    let (low, high) = expected.whole_seconds();
    if let Ok(value) = HeaderValue::try_from(format!("{low}-{high}")) {
        headers.insert("x-rouse-expected-wait", value);
    }
}

/// Sends `connection: close`: the gateway reads no further request on this connection.
pub(super) fn set_connection_close(response: &mut Response<ClientResponseBody>) {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
}
