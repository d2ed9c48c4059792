//! Selects the responses that bypass hyper, and writes their heads.
//!
//! hyper holds two buffers for the lifetime of a connection, and polls both its halves for every frame. For a stream of
//! small events to an HTTP/1.1 client that is most of the stream's cost, and hyper has nothing to do until the stream
//! is over. So the service puts such a response into the [`RawResponseSlot`] and never returns. The connection's task
//! finds the response there, takes the socket back from hyper and forwards the response itself (`hand_off.rs`,
//! `raw_response.rs`).
//!
//! Only responses that hyper would send in chunks bypass it: those of unknown length, to a request whose body was read
//! to its end. hyper serves all others, and all rare cases: HTTP/1.0, HEAD, upgrades.

use std::{cell::RefCell, rc::Rc};

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body::Body;

use super::{DateCache, DownstreamIo, RawResponse};
use crate::relay::ConnectionPool;

/// Holds a response that is ready to bypass hyper, until the connection's task takes it. The response is boxed, since
/// the slot is nearly always empty.
#[derive(Debug)]
pub struct RawResponseSlot<P, B> {
    pub(super) peer: Rc<P>,
    pool: ConnectionPool,
    dates: Rc<DateCache>,
    response: RefCell<Option<Box<RawResponse<P, B>>>>,
}

impl<P: DownstreamIo, B> RawResponseSlot<P, B> {
    /// `pool` lends the memory that responses are read into.
    #[must_use]
    pub fn new(peer: Rc<P>, pool: ConnectionPool, dates: Rc<DateCache>) -> Rc<Self> {
        Rc::new(Self { peer, pool, dates, response: RefCell::default() })
    }

    /// Stores a response. `ends`: the client requested that the connection close after it.
    pub fn put(&self, mut answer: Response<B>, ends: bool) {
        if ends {
            answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        let ends = ends || has_connection_close(answer.headers());
        let (parts, reply) = answer.into_parts();
        let head = head(parts.status, &parts.headers, &self.dates);
        let raw_response = RawResponse::new(Rc::clone(&self.peer), self.pool.clone(), (head, reply), ends);
        *self.response.borrow_mut() = Some(raw_response);
    }

    #[inline]
    pub(super) fn is_filled(&self) -> bool {
        self.response.borrow().is_some()
    }

    pub(super) fn take(&self) -> Option<Box<RawResponse<P, B>>> {
        self.response.borrow_mut().take()
    }
}

/// Reports whether the client of this request can receive a chunked response.
#[must_use]
pub fn accepts_chunked<B>(request: &Request<B>) -> bool {
    let headers = request.headers();
    // hyper closes a connection after a head with both headers, and so do we.
    let twice =
        headers.contains_key(header::TRANSFER_ENCODING) && headers.contains_key(header::CONTENT_LENGTH);
    let rare =
        matches!(*request.method(), Method::HEAD | Method::CONNECT) || headers.contains_key(header::UPGRADE);
    request.version() == Version::HTTP_11 && !twice && !rare
}

/// Reports whether these headers end the connection after the present response. Either side may send them.
#[must_use]
pub fn has_connection_close(headers: &HeaderMap) -> bool {
    let mut tokens = headers
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    tokens.any(|token| token.trim_ascii().eq_ignore_ascii_case(b"close"))
}

/// Reports whether hyper would send the response in chunks. Headers that set its framing rule that out.
#[must_use]
pub fn needs_chunking(answer: &Response<impl Body>) -> bool {
    const FRAMING: [HeaderName; 4] =
        [header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::TRAILER, header::UPGRADE];
    let status = answer.status();
    let has_body =
        !status.is_informational() && !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    has_body
        && !answer.body().is_end_stream()
        && answer.body().size_hint().exact().is_none()
        && FRAMING.iter().all(|name| !answer.headers().contains_key(name))
}

/// Marks a response to an HTTP/1.0 client with `Connection: close` where the connection ends with it: an unchunked
/// response of unknown length ends that way. hyper would announce keep-alive to a client that asked for it.
pub fn mark_http10_close<B: Body>(answer: &mut Response<B>) {
    if needs_chunking(answer) || has_connection_close(answer.headers()) {
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        // hyper adds `keep-alive` to responses of later versions.
        *answer.version_mut() = Version::HTTP_10;
    }
}

/// Writes the head as hyper would.
fn head(status: StatusCode, headers: &HeaderMap, dates: &DateCache) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    let reason = status.canonical_reason().unwrap_or("<none>");
    for piece in ["HTTP/1.1 ", status.as_str(), " ", reason, "\r\n"] {
        out.extend_from_slice(piece.as_bytes());
    }
    for (name, value) in headers {
        for piece in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            out.extend_from_slice(piece);
        }
    }
    out.extend_from_slice(b"transfer-encoding: chunked\r\n");
    if !headers.contains_key(header::DATE) {
        for piece in [&b"date: "[..], &dates.now(), b"\r\n"] {
            out.extend_from_slice(piece);
        }
    }
    out.extend_from_slice(b"\r\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follows(version: Version, method: &str, headers: &[(&str, &str)]) -> bool {
        let request = Request::builder().version(version).method(method).uri("/");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        accepts_chunked(&request.body(()).unwrap())
    }

    #[test]
    fn only_plain_requests_of_clients_that_take_chunks_are_followed() {
        for (version, method, headers, follow) in [
            (Version::HTTP_11, "POST", &[][..], true),
            (Version::HTTP_11, "GET", &[("connection", "keep-alive")], true),
            (Version::HTTP_11, "POST", &[("connection", "close")], true),
            (Version::HTTP_11, "POST", &[("transfer-encoding", "chunked")], true),
            (Version::HTTP_11, "POST", &[("transfer-encoding", "chunked"), ("content-length", "1")], false),
            (Version::HTTP_11, "GET", &[("upgrade", "h2c")], false),
            (Version::HTTP_11, "HEAD", &[], false),
            (Version::HTTP_11, "CONNECT", &[], false),
            (Version::HTTP_10, "POST", &[("connection", "keep-alive")], false),
            (Version::HTTP_2, "POST", &[], false),
        ] {
            assert_eq!(follows(version, method, headers), follow, "{version:?} {method} {headers:?}");
        }
    }

    #[test]
    fn a_connection_ends_with_an_answer_if_any_of_its_tokens_says_so() {
        for (values, ends) in
            [(&["x, Close"][..], true), (&["x", "close"], true), (&["closed, keep-alive"], false)]
        {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::CONNECTION, HeaderValue::from_static(value));
            }
            assert_eq!(has_connection_close(&headers), ends, "{values:?}");
        }
    }

    #[test]
    fn a_head_has_a_date_of_ours_only_where_the_engine_gave_none() {
        let (mut headers, dates) = (HeaderMap::new(), DateCache::default());
        headers.append("x-a", HeaderValue::from_static("1"));
        headers.append("x-a", HeaderValue::from_static("2"));
        let ours = String::from_utf8(head(StatusCode::OK, &headers, &dates)).unwrap();
        let start = "HTTP/1.1 200 OK\r\nx-a: 1\r\nx-a: 2\r\ntransfer-encoding: chunked\r\ndate: ";
        assert!(ours.starts_with(start) && ours.ends_with(" GMT\r\n\r\n"), "{ours}");
        headers.insert(header::DATE, HeaderValue::from_static("today"));
        let theirs = String::from_utf8(head(StatusCode::from_u16(299).unwrap(), &headers, &dates)).unwrap();
        assert!(theirs.starts_with("HTTP/1.1 299 <none>\r\n") && theirs.matches("date: ").count() == 1);
    }
}
