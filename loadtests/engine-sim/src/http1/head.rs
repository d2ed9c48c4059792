//! A request's head, parsed strictly.

use bytes::{Buf, BytesMut};

use super::Broken;

const HEADERS: usize = 128;

#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) old: bool,
    /// When its first byte was read.
    pub(crate) unix_us: u64,
    pub(crate) bytes: usize,
    pub(super) body: Framing,
    headers: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Length(u64),
    Chunked,
}

impl Head {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    pub(crate) fn has_body(&self) -> bool {
        self.body != Framing::Length(0)
    }

    pub(crate) fn keeps_alive(&self) -> bool {
        let says = |word: &str| self.header("connection").is_some_and(|v| lists(v, word));
        if self.old { says("keep-alive") } else { !says("close") }
    }

    pub(crate) fn accepts_gzip(&self) -> bool {
        self.header("accept-encoding").is_some_and(|v| lists(v, "gzip"))
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
fn lists(value: &str, word: &str) -> bool {
    value.split(',').any(|item| item.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(word))
}

pub(super) fn parse(buf: &mut BytesMut, unix_us: u64) -> Result<Option<Head>, Broken> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let bytes = match request.parse(buf) {
        Ok(httparse::Status::Complete(bytes)) => bytes,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(Broken::Malformed("head")),
    };
    let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version) else {
        return Err(Broken::Malformed("request line"));
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (method, path, query) = (method.to_owned(), path.to_owned(), query.to_owned());
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    let headers: Vec<_> = request.headers.iter().map(|h| (h.name.to_owned(), text(h.value))).collect();
    let body = framing(&headers)?;
    let old = minor == 0;
    if !old && headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case("host")).count() != 1 {
        return Err(Broken::Malformed("host"));
    }
    buf.advance(bytes);
    Ok(Some(Head { method, path, query, old, unix_us, bytes, body, headers }))
}

/// Refuses whatever two parsers could read differently: a proxy must never pass it on.
fn framing(headers: &[(String, String)]) -> Result<Framing, Broken> {
    let all = |name: &str| {
        let named = headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name));
        named.map(|(_, v)| v.as_str()).collect::<Vec<_>>()
    };
    match (&all("content-length")[..], &all("transfer-encoding")[..]) {
        ([], []) => Ok(Framing::Length(0)),
        ([length], []) => {
            let digits = length.bytes().all(|b| b.is_ascii_digit());
            let length = length.parse().ok().filter(|_| digits);
            length.map(Framing::Length).ok_or(Broken::Malformed("content-length"))
        }
        ([], [coding]) if coding.eq_ignore_ascii_case("chunked") => Ok(Framing::Chunked),
        ([], _) => Err(Broken::Malformed("transfer-encoding")),
        _ => Err(Broken::Malformed("two lengths")),
    }
}
