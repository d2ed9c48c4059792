//! What may pass between a client and an engine, by name.
//!
//! The two sides are two connections: what belongs to a connection stays with it. Beyond that a client's credentials,
//! cookies and claims about where it comes from are nobody's business behind the gateway, and the names that begin
//! with `x-rouse-` are ours: from outside they are a forgery.

use std::{cell::Cell, collections::hash_map::RandomState, hash::BuildHasher};

use http::{HeaderMap, HeaderName, HeaderValue, header};

pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const RESERVED_PREFIX: &str = "x-rouse-";
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Belong to one connection, in either direction (RFC 9110, 7.6.1, and what predates it).
const HOP_BY_HOP: [HeaderName; 7] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// What a request is written with that its client did not say.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeaderOverrides<'a> {
    /// Address and port of the engine.
    pub(super) host: &'a str,
    /// Sent instead of the client's key.
    pub(super) authorization: Option<&'a HeaderValue>,
    /// Sent instead of the client's id.
    pub(super) request_id: Option<&'a HeaderValue>,
    /// Of the body, in bytes; `None` for one that goes in chunks.
    pub(super) length: Option<u64>,
    /// The answer will be read on the way, so it must not be compressed.
    pub(super) identity_encoding: bool,
}

/// Writes a client's headers as they go to an engine: what must not pass is left out, `Host`, `Content-Length` and the
/// engine's own key are set. One pass, and nothing is copied but the bytes that leave.
pub(super) fn to_engine(out: &mut Vec<u8>, headers: &HeaderMap, ours: HeaderOverrides<'_>) {
    let HeaderOverrides { host, authorization, request_id, length, identity_encoding: identity } = ours;
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

/// `number` in decimal digits, at the end of `digits`: a tenth of the time that the standard library's formatting takes.
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

/// A request's header of this name (in lower case) passes on. By length first: most names meet one comparison.
fn is_for_engine(name: &str) -> bool {
    let stays = match name.len() {
        2 => name == "te",
        3 => name == "via",
        4 => name == "host",
        // An engine that trusts some origins would judge the gateway's clients by them.
        6 => matches!(name, "cookie" | "expect" | "origin"),
        7 => matches!(name, "trailer" | "upgrade" | "api-key"),
        9 => matches!(name, "forwarded" | "x-api-key" | "x-real-ip"),
        10 => matches!(name, "connection" | "keep-alive"),
        13 => name == "authorization",
        14 => name == "content-length",
        17 => name == "transfer-encoding",
        _ => false,
    };
    !(stays
        || name.starts_with(RESERVED_PREFIX)
        || name.starts_with("proxy-")
        || name.starts_with("x-forwarded-"))
}

/// An answer's header of this name (in lower case) passes on.
pub(super) fn is_for_client(name: &str) -> bool {
    let stays = match name.len() {
        2 => name == "te",
        7 => matches!(name, "trailer" | "upgrade"),
        10 => matches!(name, "connection" | "keep-alive" | "set-cookie"),
        17 => name == "transfer-encoding",
        _ => false,
    };
    // Which pages may use the API, and what a browser keeps for it, is not for an engine to say: many allow everybody.
    !(stays
        || name.starts_with(RESERVED_PREFIX)
        || name.starts_with("proxy-")
        || name.starts_with("access-control-"))
}

/// What a peer's `UpstreamConnection` names: it goes no further either.
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
        // These two are no headers that pass, and nearly always the only ones.
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

/// Makes an engine's headers, of which [`is_for_client`] was asked, fit for a client. `events`: the body is a stream of
/// events, which no proxy in between may hold back. `unsized_body`: its length is not known, whatever the engine said.
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

/// The body is a stream of events that can be read, and written into, as it passes: it is not encoded.
#[must_use]
pub fn is_readable_stream(headers: &HeaderMap) -> bool {
    is_readable(headers, b"text/event-stream")
}

/// The body is one JSON document that can be read as it passes.
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

/// Makes request ids. One per core: no two makers share a seed, and none repeats itself.
#[derive(Debug, Default)]
pub struct RequestIdGenerator {
    // Randomly seeded by the standard library, and all the randomness an id needs: it must be unique, not secret.
    seed: RandomState,
    made: Cell<u64>,
}

impl RequestIdGenerator {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The client's id if it has 1 to 128 characters of `[A-Za-z0-9._-]`, otherwise one made here. An id is written to
    /// logs and sent to engines, so one that could forge a log line or a header is replaced.
    #[must_use]
    pub fn keep_or_make(&self, sent: Option<&HeaderValue>) -> HeaderValue {
        match sent {
            // A copy: a part of the head would keep all of it for as long as a record of the request waits.
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
        // In the form of a random UUID, since there are engines that take no other.
        let id = uuid(u128::from(high) << 64 | u128::from(low));
        // Shared with its count in one piece of memory: it goes into two heads.
        HeaderValue::from_maybe_shared(bytes::Bytes::from_owner(id))
            .unwrap_or_else(|_| HeaderValue::from(number))
    }
}

/// A UUID of version 4, of these random bits. By hand: the standard library's formatting took a twentieth of all that a
/// request costs.
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

/// 8-4-4-4-12 hexadecimal digits.
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

/// Removes what belongs to one connection, whatever `UpstreamConnection` names included. To be called before anything of ours
/// is added: a peer may name that as well.
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
