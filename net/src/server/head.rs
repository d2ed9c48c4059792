//! Parses the head of a request, and decides how its body is framed.

use std::mem::MaybeUninit;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, Version, header, request};

use super::Http1Limits;

/// Room for the headers that are parsed. [`Http1Limits::max_headers`] is at most this.
const MAX_HEADERS: usize = 128;
/// The longest target that an [`Uri`] can hold.
const MAX_TARGET_BYTES: usize = 65_534;
/// The longest body that a `Content-Length` may announce; hyper's limit.
const MAX_LENGTH: u64 = u64::MAX - 2;

pub(super) const CODING_REFUSED: &str = "the only supported Transfer-Encoding is chunked, given once";
pub(super) const HTTP2_REFUSED: &str = "this connection speaks HTTP/1.1, not HTTP/2";

const BAD_METHOD: HeadRefusal = HeadRefusal::Malformed("the method has an invalid character");
const BAD_TARGET: HeadRefusal = HeadRefusal::Malformed("the target is not a valid URI");
const BAD_NAME: HeadRefusal = HeadRefusal::Malformed("the name of a field has an invalid character");
const BAD_VALUE: HeadRefusal = HeadRefusal::Malformed("the value of a field has an invalid character");
const BAD_LENGTH: HeadRefusal = HeadRefusal::Malformed("the Content-Length is not a length");

/// Why a request's head was refused. Nothing was written for it: the caller answers in its own form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadRefusal {
    #[error("the request's head is too large")]
    TooLarge,
    #[error("the request's head has too many fields")]
    TooManyHeaders,
    #[error("the request's target is too long")]
    TargetTooLong,
    /// With the reason.
    #[error("the request's head is not valid HTTP: {0}")]
    Malformed(&'static str),
}

impl HeadRefusal {
    /// The status of the answer.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        match self {
            Self::TooLarge | Self::TooManyHeaders => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::TargetTooLong => StatusCode::URI_TOO_LONG,
            Self::Malformed(_) => StatusCode::BAD_REQUEST,
        }
    }

    const fn from_parser(error: httparse::Error, has_method: bool) -> Self {
        use httparse::Error;
        match error {
            Error::TooManyHeaders => Self::TooManyHeaders,
            Error::HeaderName => BAD_NAME,
            Error::HeaderValue => BAD_VALUE,
            Error::NewLine => Self::Malformed("a line ends with neither CRLF nor LF"),
            Error::Version => Self::Malformed("the version is neither HTTP/1.1 nor HTTP/1.0"),
            Error::Token if has_method => BAD_TARGET,
            Error::Token | Error::Status => BAD_METHOD,
        }
    }
}

/// How a request's body is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestFraming {
    Empty,
    Length(u64),
    Chunked,
}

/// The facts about a request that decide how its response is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestFacts {
    pub(super) is_head: bool,
    pub(super) is_connect: bool,
    pub(super) is_http10: bool,
    /// The client allows a further request on the connection.
    pub(super) keep_alive: bool,
}

/// A parsed head.
#[derive(Debug)]
pub(super) struct RequestHead {
    pub(super) parts: request::Parts,
    pub(super) framing: RequestFraming,
    pub(super) facts: RequestFacts,
    /// The client waits for `100 Continue` before it sends the body.
    pub(super) expects_continue: bool,
}

/// Parses the head at the front of `bytes`; returns its length too, or `None` while it is incomplete. `max_bytes`: the
/// largest head.
///
/// The fields' values share one copy of the head, so a head costs two allocations beside its table.
pub(super) fn parse(
    bytes: &[u8],
    limits: &Http1Limits,
    max_bytes: usize,
) -> Result<Option<(usize, RequestHead)>, HeadRefusal> {
    // Not initialized: clearing the room takes longer than parsing most heads.
    let mut fields: [MaybeUninit<httparse::Header<'_>>; MAX_HEADERS] =
        [const { MaybeUninit::uninit() }; MAX_HEADERS];
    let (fields, _) = fields.split_at_mut(limits.max_headers.min(MAX_HEADERS));
    let mut parsed = httparse::Request::new(&mut []);
    let length = match parsed.parse_with_uninit_headers(bytes, fields) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::Version) if bytes.starts_with(b"PRI * HTTP/2.0\r\n") => {
            return Err(HeadRefusal::Malformed(HTTP2_REFUSED));
        }
        Err(error) => return Err(HeadRefusal::from_parser(error, parsed.method.is_some())),
    };
    if length > max_bytes {
        return Err(HeadRefusal::TooLarge);
    }
    let copy = HeadCopy::new(bytes, length);
    let target = parsed.path.unwrap_or_default();
    if target.len() > MAX_TARGET_BYTES {
        return Err(HeadRefusal::TargetTooLong);
    }
    let method = Method::from_bytes(parsed.method.unwrap_or_default().as_bytes()).map_err(|_| BAD_METHOD)?;
    let uri = copy.share(target.as_bytes()).and_then(|target| Uri::from_maybe_shared(target).ok());
    let uri = uri.ok_or(BAD_TARGET)?;
    let version = if parsed.version == Some(1) { Version::HTTP_11 } else { Version::HTTP_10 };

    let mut fields = FramingFields::new(version);
    let mut headers = HeaderMap::with_capacity(parsed.headers.len());
    for field in &*parsed.headers {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| BAD_NAME)?;
        let value = copy.share(field.value).and_then(|value| HeaderValue::from_maybe_shared(value).ok());
        let value = value.ok_or(BAD_VALUE)?;
        if fields.add(&name, &value, &mut headers)? {
            headers.append(name, value);
        }
    }
    let framing = fields.framing()?;
    let facts = RequestFacts {
        is_head: method == Method::HEAD,
        is_connect: method == Method::CONNECT,
        is_http10: version == Version::HTTP_10,
        keep_alive: fields.keeps_alive(),
    };
    let expects_continue = fields.expects_continue && !facts.is_http10 && framing != RequestFraming::Empty;
    let (mut parts, ()) = Request::new(()).into_parts();
    (parts.method, parts.uri, parts.version, parts.headers) = (method, uri, version, headers);
    Ok(Some((length, RequestHead { parts, framing, facts, expects_continue })))
}

/// Reports whether a blank line, which ends a head, lies in `bytes`. The first `searched` bytes have none.
pub(super) fn has_blank_line(bytes: &[u8], searched: usize) -> bool {
    let new = bytes.get(searched.saturating_sub(3)..).unwrap_or_default();
    memchr::memchr_iter(b'\n', new).any(|at| {
        let after = new.get(at + 1..).unwrap_or_default();
        after.starts_with(b"\n") || after.starts_with(b"\r\n")
    })
}

/// Returns the length of the empty lines in front of a head. The client may send some after a body.
pub(super) fn leading_empty_lines(bytes: &[u8]) -> usize {
    let mut rest = bytes;
    while let Some(after) = rest.strip_prefix(b"\r\n").or_else(|| rest.strip_prefix(b"\n")) {
        rest = after;
    }
    bytes.len() - rest.len()
}

/// Reports whether a list of tokens has this one.
pub(super) fn has_token(value: &HeaderValue, token: &str) -> bool {
    value.to_str().is_ok_and(|text| text.split(',').any(|one| one.trim().eq_ignore_ascii_case(token)))
}

/// An owned copy of a head, whose parts are found by their place in the original.
struct HeadCopy {
    bytes: Bytes,
    original: usize,
}

impl HeadCopy {
    fn new(bytes: &[u8], length: usize) -> Self {
        let head = bytes.get(..length).unwrap_or(bytes);
        Self { bytes: Bytes::copy_from_slice(head), original: bytes.as_ptr().addr() }
    }

    /// Returns the copy of `part`, a part of the original.
    fn share(&self, part: &[u8]) -> Option<Bytes> {
        if part.is_empty() {
            return Some(Bytes::new());
        }
        let start = part.as_ptr().addr().checked_sub(self.original)?;
        let end = start.checked_add(part.len())?;
        (end <= self.bytes.len()).then(|| self.bytes.slice(start..end))
    }
}

/// The fields that decide about framing and the connection's reuse, collected in their order.
struct FramingFields {
    is_http11: bool,
    codings: u32,
    is_chunked: bool,
    /// There is a Content-Length, although perhaps an overridden one.
    has_length: bool,
    length: Option<u64>,
    close: bool,
    asks_keep_alive: bool,
    expects_continue: bool,
}

impl FramingFields {
    fn new(version: Version) -> Self {
        Self {
            is_http11: version == Version::HTTP_11,
            codings: 0,
            is_chunked: false,
            has_length: false,
            length: None,
            close: false,
            asks_keep_alive: false,
            expects_continue: false,
        }
    }

    /// Records a field. Returns whether the service gets it: not a length that a coding overrides, nor the same length
    /// again.
    fn add(
        &mut self,
        name: &HeaderName,
        value: &HeaderValue,
        headers: &mut HeaderMap,
    ) -> Result<bool, HeadRefusal> {
        if *name == header::TRANSFER_ENCODING {
            if !self.is_http11 {
                return Err(HeadRefusal::Malformed("HTTP/1.0 has no Transfer-Encoding"));
            }
            self.codings += 1;
            self.is_chunked = value.as_bytes().eq_ignore_ascii_case(b"chunked");
            if self.length.take().is_some() {
                headers.remove(header::CONTENT_LENGTH);
            }
        } else if *name == header::CONTENT_LENGTH {
            self.has_length = true;
            return Ok(self.codings == 0 && self.add_length(value)?);
        } else if *name == header::CONNECTION {
            self.close |= has_token(value, "close");
            self.asks_keep_alive |= has_token(value, "keep-alive");
        } else if *name == header::EXPECT {
            self.expects_continue = value.as_bytes().eq_ignore_ascii_case(b"100-continue");
        }
        Ok(true)
    }

    fn add_length(&mut self, value: &HeaderValue) -> Result<bool, HeadRefusal> {
        let digits = value.as_bytes();
        let number = (!digits.is_empty() && digits.iter().all(u8::is_ascii_digit))
            .then(|| value.to_str().ok().and_then(|digits| digits.parse::<u64>().ok()))
            .flatten();
        let number = number.ok_or(BAD_LENGTH)?;
        match self.length {
            Some(other) if other != number => {
                Err(HeadRefusal::Malformed("there are several values of Content-Length"))
            }
            Some(_) => Ok(false),
            None if number > MAX_LENGTH => Err(HeadRefusal::TooLarge),
            None => {
                self.length = Some(number);
                Ok(true)
            }
        }
    }

    /// Decides how the body ends (RFC 9112, 6.3): by chunks, by its length, or at once. Other codings are refused,
    /// since another reader may find another end.
    const fn framing(&self) -> Result<RequestFraming, HeadRefusal> {
        match (self.codings, self.length) {
            (1, _) if self.is_chunked => Ok(RequestFraming::Chunked),
            (0, None | Some(0)) => Ok(RequestFraming::Empty),
            (0, Some(length)) => Ok(RequestFraming::Length(length)),
            _ => Err(HeadRefusal::Malformed(CODING_REFUSED)),
        }
    }

    /// Reports whether the connection may go on. After a head with both a coding and a length it ends, because a reader
    /// before this one may have taken the other for the body's end.
    const fn keeps_alive(&self) -> bool {
        let ambiguous = self.codings > 0 && self.has_length;
        !self.close && !ambiguous && (self.is_http11 || self.asks_keep_alive)
    }
}

#[cfg(test)]
mod tests;
