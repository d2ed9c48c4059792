//! Parses a request's head strictly.

use bytes::{Buf, BytesMut};

use super::SimConnectionError;

const MAX_HEADERS: usize = 128;

#[derive(Debug)]
pub(crate) struct SimRequestHead {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) http10: bool,
    /// When its first byte was read.
    pub(crate) unix_us: u64,
    pub(crate) bytes: usize,
    pub(super) body: SimRequestFraming,
    headers: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SimRequestFraming {
    Length(u64),
    Chunked,
}

impl SimRequestHead {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    pub(crate) fn has_body(&self) -> bool {
        self.body != SimRequestFraming::Length(0)
    }

    pub(crate) fn keeps_alive(&self) -> bool {
        let says = |word: &str| self.header("connection").is_some_and(|v| list_contains(v, word));
        if self.http10 { says("keep-alive") } else { !says("close") }
    }

    pub(crate) fn accepts_gzip(&self) -> bool {
        self.header("accept-encoding").is_some_and(|v| list_contains(v, "gzip"))
    }

    /// The values of query parameter `name`, in order.
    pub(crate) fn query<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .filter(move |(n, _)| *n == name)
            .map(|(_, v)| v)
    }
}

/// Whether a comma-separated header value names `word`, parameters aside.
fn list_contains(value: &str, word: &str) -> bool {
    value.split(',').any(|item| item.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(word))
}

pub(super) fn parse(buf: &mut BytesMut, unix_us: u64) -> Result<Option<SimRequestHead>, SimConnectionError> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let bytes = match request.parse(buf) {
        Ok(httparse::Status::Complete(bytes)) => bytes,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(SimConnectionError::Malformed("head")),
    };
    let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version) else {
        return Err(SimConnectionError::Malformed("request line"));
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (method, path, query) = (method.to_owned(), path.to_owned(), query.to_owned());
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    let headers: Vec<_> = request.headers.iter().map(|h| (h.name.to_owned(), text(h.value))).collect();
    let body = framing(&headers)?;
    let old = minor == 0;
    if !old && headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case("host")).count() != 1 {
        return Err(SimConnectionError::Malformed("host"));
    }
    buf.advance(bytes);
    Ok(Some(SimRequestHead { method, path, query, http10: old, unix_us, bytes, body, headers }))
}

/// Refuses ambiguous framing, which a proxy must never pass on.
fn framing(headers: &[(String, String)]) -> Result<SimRequestFraming, SimConnectionError> {
    let all = |name: &str| {
        let named = headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name));
        named.map(|(_, v)| v.as_str()).collect::<Vec<_>>()
    };
    match (&all("content-length")[..], &all("transfer-encoding")[..]) {
        ([], []) => Ok(SimRequestFraming::Length(0)),
        ([length], []) => {
            let digits = length.bytes().all(|b| b.is_ascii_digit());
            let length = length.parse().ok().filter(|_| digits);
            length.map(SimRequestFraming::Length).ok_or(SimConnectionError::Malformed("content-length"))
        }
        ([], [coding]) if coding.eq_ignore_ascii_case("chunked") => Ok(SimRequestFraming::Chunked),
        ([], _) => Err(SimConnectionError::Malformed("transfer-encoding")),
        _ => Err(SimConnectionError::Malformed("two lengths")),
    }
}
