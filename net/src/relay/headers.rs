//! Filters headers between a client and an engine, by name.
//!
//! The two sides are two connections, so headers that belong to a connection are not forwarded. Nor are a client's
//! credentials, its cookies, and its claims about its origin, which must not reach the engine. Names that begin with
//! `x-rouse-` are reserved: from outside they are forged. Load reports (`endpoint-load-metrics`) and the wish for them
//! end at each hop: a gateway asks stubs for itself.

use std::{cell::Cell, collections::hash_map::RandomState, hash::BuildHasher};

use http::{HeaderMap, HeaderName, HeaderValue, header};

use crate::engine_load::orca;

pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const RESERVED_PREFIX: &str = "x-rouse-";
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Belong to one connection, in either direction (RFC 9110, 7.6.1, and older practice).
const HOP_BY_HOP: [HeaderName; 7] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Headers that the gateway sets itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeaderOverrides<'a> {
    /// The engine's address and port, or the backend's host name.
    pub(super) host: &'a str,
    /// Sent instead of the client's key.
    pub(super) authorization: Option<&'a HeaderValue>,
    /// Sent instead of the client's id.
    pub(super) request_id: Option<&'a HeaderValue>,
    /// The body's length in bytes; `None` sends it in chunks.
    pub(super) length: Option<u64>,
    /// The response is inspected on the way, so it must not be compressed.
    pub(super) identity_encoding: bool,
    /// The stub in front of the engine is asked for a load report.
    pub(super) load_report: bool,
}

/// Writes a client's headers for an engine. Drops headers that must not be forwarded, and sets `Host`, the body's
/// framing and the engine's own key. This is one pass, and it copies only the bytes that are sent.
pub(super) fn to_engine(out: &mut Vec<u8>, headers: &HeaderMap, overrides: HeaderOverrides<'_>) {
    let HeaderOverrides { host, authorization, request_id, length, identity_encoding: identity, load_report } =
        overrides;
    let named =
        ConnectionTokens::from_values(headers.get_all(header::CONNECTION).iter().map(HeaderValue::as_bytes));
    let replaced = |name: &HeaderName| {
        (identity && name == header::ACCEPT_ENCODING) || (request_id.is_some() && *name == REQUEST_ID)
    };
    for (name, value) in headers {
        if is_for_engine(name.as_str()) && !named.has(name) && !replaced(name) {
            write_header(out, name.as_str(), value.as_bytes());
        }
    }
    if identity {
        write_header(out, "accept-encoding", b"identity");
    }
    write_header(out, "host", host.as_bytes());
    if let Some(key) = authorization {
        write_header(out, "authorization", key.as_bytes());
    }
    if let Some(id) = request_id {
        write_header(out, "x-request-id", id.as_bytes());
    }
    if load_report {
        write_header(out, orca::FORMAT_HEADER.as_str(), orca::TEXT_FORMAT.as_bytes());
    }
    match length {
        Some(length) => write_header(out, "content-length", decimal(length, &mut [0; 20])),
        None => write_header(out, "transfer-encoding", b"chunked"),
    }
}

fn write_header(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.reserve(name.len() + value.len() + 4);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// Formats `number` in decimal at the end of `digits`. Takes a tenth of the standard library's time.
#[must_use]
#[expect(clippy::indexing_slicing, reason = "no number of 64 bits has more than twenty digits")]
pub fn decimal(mut number: u64, digits: &mut [u8; 20]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b"0123456789"[(number % 10) as usize];
        number /= 10;
        if number == 0 {
            return &digits[at..];
        }
    }
}

/// Reports whether a request header (in lower case) is forwarded. Matches by length first: most names meet one
/// comparison.
fn is_for_engine(name: &str) -> bool {
    let stays = match name.len() {
        2 => name == "te",
        3 => name == "via",
        4 => name == "host",
        // An engine that trusts some origins would judge the gateway's clients by theirs.
        6 => matches!(name, "cookie" | "expect" | "origin"),
        7 => matches!(name, "trailer" | "upgrade" | "api-key"),
        9 => matches!(name, "forwarded" | "x-api-key" | "x-real-ip"),
        10 => matches!(name, "connection" | "keep-alive"),
        13 => name == "authorization",
        14 => name == "content-length",
        17 => name == "transfer-encoding",
        // Each hop asks the next one for its own reason, and only a stub is asked.
        28 => name == "endpoint-load-metrics-format",
        _ => false,
    };
    !(stays
        || name.starts_with(RESERVED_PREFIX)
        || name.starts_with("proxy-")
        || name.starts_with("x-forwarded-"))
}

/// Reports whether a response header (in lower case) is forwarded.
pub(super) fn is_for_client(name: &str) -> bool {
    let stays = match name.len() {
        2 => name == "te",
        7 => matches!(name, "trailer" | "upgrade"),
        10 => matches!(name, "connection" | "keep-alive" | "set-cookie"),
        17 => name == "transfer-encoding",
        // A load report in any of its forms: how loaded one engine is does not concern a client.
        21 | 25 | 26 => name.starts_with("endpoint-load-metrics"),
        _ => false,
    };
    // The gateway, not the engine, decides which pages may use the API and what browsers cache for that: many engines
    // allow every origin.
    !(stays
        || name.starts_with(RESERVED_PREFIX)
        || name.starts_with("proxy-")
        || name.starts_with("access-control-"))
}

/// The headers that a peer's `Connection` header names: they are not forwarded either.
#[derive(Debug, Default)]
pub(super) struct ConnectionTokens(Vec<HeaderName>);

impl ConnectionTokens {
    pub(super) fn from_values<'a>(values: impl Iterator<Item = &'a [u8]>) -> Self {
        let mut named = Self::default();
        for value in values {
            named.add(value);
        }
        named
    }

    pub(super) fn add(&mut self, value: &[u8]) {
        // These two tokens name no header that is forwarded, and are nearly always the only ones.
        let tokens = value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|token| {
            !token.eq_ignore_ascii_case(b"keep-alive") && !token.eq_ignore_ascii_case(b"close")
        });
        self.0.extend(tokens.filter_map(|name| HeaderName::from_bytes(name).ok()));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn has(&self, name: &HeaderName) -> bool {
        self.0.contains(name)
    }

    pub(super) fn remove_from(&self, headers: &mut HeaderMap) {
        for name in &self.0 {
            headers.remove(name);
        }
    }
}

/// Prepares an engine's headers, already filtered by [`is_for_client`], for a client. `events`: the body is an event
/// stream, which proxies must not buffer. `unsized_body`: its length is unknown, whatever the engine's headers claim.
pub(super) fn to_client(headers: &mut HeaderMap, events: bool, unsized_body: bool) {
    if unsized_body {
        headers.remove(header::CONTENT_LENGTH);
    }
    if events {
        let no = HeaderValue::from_static("no");
        headers.entry(ACCEL_BUFFERING).or_insert(no);
        let as_it_comes = HeaderValue::from_static("no-cache, no-transform");
        headers.entry(header::CACHE_CONTROL).or_insert(as_it_comes);
    }
}

/// Reports whether the body is an event stream without encoding: it can be read, and appended to, as it passes.
#[must_use]
pub fn is_readable_stream(headers: &HeaderMap) -> bool {
    is_readable(headers, b"text/event-stream")
}

/// Reports whether the body is one JSON document that can be read as it passes.
pub(super) fn is_readable_json(headers: &HeaderMap) -> bool {
    is_readable(headers, b"application/json")
}

fn is_readable(headers: &HeaderMap, kind: &[u8]) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE) else {
        return false;
    };
    let essence = value.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
    let encoded = headers.get_all(header::CONTENT_ENCODING).iter();
    let encoded = encoded.map(HeaderValue::as_bytes).any(|coding| !coding.eq_ignore_ascii_case(b"identity"));
    essence.trim_ascii().eq_ignore_ascii_case(kind) && !encoded
}

/// Generates request ids. One per core: no two generators share a seed, and none repeats an id.
#[derive(Debug, Default)]
pub struct RequestIdGenerator {
    // The standard library seeds this randomly. An id needs no other randomness: it must be unique, not secret.
    seed: RandomState,
    made: Cell<u64>,
}

impl RequestIdGenerator {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the client's id if it is valid, otherwise a new one. A valid id has 1 to 128 characters of
    /// `[A-Za-z0-9._-]`. Ids are logged and sent to engines, so an id that could forge a log line or a header is
    /// replaced.
    #[must_use]
    pub fn keep_or_make(&self, sent: Option<&HeaderValue>) -> HeaderValue {
        match sent {
            // A copy, since a slice would keep the whole head alive for as long as the request's record is pending.
            Some(id) if is_id(id.as_bytes()) => {
                HeaderValue::from_bytes(id.as_bytes()).unwrap_or_else(|_| self.make())
            }
            _ => self.make(),
        }
    }

    fn make(&self) -> HeaderValue {
        let number = self.made.get();
        self.made.set(number.wrapping_add(1));
        let (high, low) = (self.seed.hash_one((number, 0)), self.seed.hash_one((number, 1)));
        // Formatted as a random UUID, because some engines accept nothing else.
        let id = uuid(u128::from(high) << 64 | u128::from(low));
        // Shares one allocation with its reference count, since it is written into two heads.
        HeaderValue::from_maybe_shared(bytes::Bytes::from_owner(id))
            .unwrap_or_else(|_| HeaderValue::from(number))
    }
}

/// Formats these random bits as a UUID of version 4. Hand-written, because the standard library's formatting took a
/// twentieth of a request's total cost.
#[expect(clippy::indexing_slicing, reason = "there is room for 32 digits and four dashes")]
fn uuid(bits: u128) -> [u8; 36] {
    let bits = bits & !(0xf << 76 | 0x3 << 62) | 4 << 76 | 2 << 62;
    let (mut id, mut at) = ([b'-'; 36], 0);
    for (index, byte) in bits.to_be_bytes().into_iter().enumerate() {
        at += usize::from(matches!(index, 4 | 6 | 8 | 10));
        id[at] = b"0123456789abcdef"[usize::from(byte >> 4)];
        id[at + 1] = b"0123456789abcdef"[usize::from(byte & 0xf)];
        at += 2;
    }
    id
}

/// Reports whether an id has the form of a UUID: 8-4-4-4-12 hexadecimal digits.
#[must_use]
pub fn is_uuid(id: &HeaderValue) -> bool {
    let id = id.as_bytes();
    id.len() == 36
        && id.iter().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

fn is_id(id: &[u8]) -> bool {
    matches!(id.len(), 1..=128)
        && id.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}

/// Removes the headers that belong to one connection, including those that the `Connection` header names. Call this
/// before any of our own headers are added, because a peer may name those too.
pub fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests;
