//! Makes requests, and writes them as servers read them.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, header};
use serde_json::Value;

use super::HttpClientError;
use crate::{
    relay::write_request_line,
    stub_api::{EPOCH_HEADER, Epoch},
};

const TYPICAL_HEAD_BYTES: usize = 256;

/// Makes a request whose body, if any, is JSON.
pub(super) fn json(
    method: Method,
    path: &str,
    body: Option<&Value>,
    epoch: Option<Epoch>,
) -> Result<Request<Bytes>, HttpClientError> {
    let mut request = Request::builder().method(method).uri(path);
    if let Some(epoch) = epoch {
        request = request.header(EPOCH_HEADER, epoch);
    }
    if body.is_some() {
        request = request.header(header::CONTENT_TYPE, "application/json");
    }
    let body = body.map(Value::to_string).unwrap_or_default();
    request.body(body.into()).map_err(|_| HttpClientError::InvalidRequest("its path is not one of a URL"))
}

/// Returns the bytes of a request.
///
/// The headers of the connection and of the body's framing are written here; those that the caller set are left out.
pub(super) fn to_wire(
    request: &Request<Bytes>,
    host: &str,
    path_prefix: &str,
    token: Option<&str>,
) -> Result<Bytes, HttpClientError> {
    let (method, body) = (request.method(), request.body());
    let Some(path) = request.uri().path_and_query() else {
        return Err(HttpClientError::InvalidRequest("its URL has no path"));
    };
    let mut wire = Vec::with_capacity(TYPICAL_HEAD_BYTES + body.len());
    write_request_line(&mut wire, method, path_prefix, path);
    let host = HeaderValue::from_str(host)
        .map_err(|_| HttpClientError::InvalidRequest("its host has a character that no header can have"))?;
    write_header(&mut wire, &header::HOST, &host);
    write_header(&mut wire, &header::CONNECTION, &HeaderValue::from_static("close"));
    if let Some(token) = token {
        let bearer = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| {
            HttpClientError::InvalidRequest("its token has a character that no header can have")
        })?;
        write_header(&mut wire, &header::AUTHORIZATION, &bearer);
    }
    for (name, value) in request.headers().iter().filter(|(name, _)| !is_written_here(name)) {
        write_header(&mut wire, name, value);
    }
    if !body.is_empty() || *method != Method::GET {
        write_header(&mut wire, &header::CONTENT_LENGTH, &HeaderValue::from(body.len()));
    }
    wire.extend_from_slice(b"\r\n");
    wire.extend_from_slice(body);
    Ok(wire.into())
}

fn is_written_here(name: &HeaderName) -> bool {
    let own = [&header::HOST, &header::CONNECTION, &header::CONTENT_LENGTH, &header::TRANSFER_ENCODING];
    own.contains(&name)
}

fn write_header(wire: &mut Vec<u8>, name: &HeaderName, value: &HeaderValue) {
    for piece in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
        wire.extend_from_slice(piece);
    }
}
