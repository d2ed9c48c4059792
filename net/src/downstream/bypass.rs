//! Which answers pass without hyper, and their heads.
//!
//! hyper holds two buffers for as long as a connection lives and looks at both its halves for every frame. For a stream of
//! small events to a client of HTTP/1.1 that is most of what the stream costs, and nothing that hyper knows is needed
//! until the stream is over. So the service keeps such an answer back, as an offer, and never returns; the task of the
//! connection finds the offer, takes its socket back and lets the answer pass itself (`passing.rs`).
//!
//! Offered is only what hyper would have sent as chunks: an answer of unknown length to a request whose body was read to its
//! end. All else is left to hyper, with everything that is rare: HTTP/1.0, HEAD, upgrades.

use std::{cell::RefCell, rc::Rc};

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body::Body;

use super::{DateCache, DownstreamIo, RawResponse};
use crate::relay::ConnectionPool;

/// Where an answer to this peer waits to be taken over: ready to pass, and in memory of its own, since nearly always there
/// is none.
#[derive(Debug)]
pub struct RawResponseSlot<P, B> {
    pub(super) peer: Rc<P>,
    pool: ConnectionPool,
    dates: Rc<DateCache>,
    response: RefCell<Option<Box<RawResponse<P, B>>>>,
}

impl<P: DownstreamIo, B> RawResponseSlot<P, B> {
    /// `pool` lends the memory that answers pass in.
    #[must_use]
    pub fn new(peer: Rc<P>, pool: ConnectionPool, dates: Rc<DateCache>) -> Rc<Self> {
        Rc::new(Self { peer, pool, dates, response: RefCell::default() })
    }

    /// `ends`: the client said that it wants no more.
    pub fn put(&self, mut answer: Response<B>, ends: bool) {
        if ends {
            answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        let ends = ends || has_connection_close(answer.headers());
        let (parts, reply) = answer.into_parts();
        let head = head(parts.status, &parts.headers, &self.dates);
        let passing = RawResponse::new(Rc::clone(&self.peer), self.pool.clone(), (head, reply), ends);
        *self.response.borrow_mut() = Some(passing);
    }

    #[inline]
    pub(super) fn is_filled(&self) -> bool {
        self.response.borrow().is_some()
    }

    pub(super) fn take(&self) -> Option<Box<RawResponse<P, B>>> {
        self.response.borrow_mut().take()
    }
}

/// The client is one to whom chunks can be sent.
#[must_use]
pub fn accepts_chunked<B>(request: &Request<B>) -> bool {
    let headers = request.headers();
    // hyper keeps no connection open behind a head with both, and nor do we.
    let twice =
        headers.contains_key(header::TRANSFER_ENCODING) && headers.contains_key(header::CONTENT_LENGTH);
    let rare =
        matches!(*request.method(), Method::HEAD | Method::CONNECT) || headers.contains_key(header::UPGRADE);
    request.version() == Version::HTTP_11 && !twice && !rare
}

/// Said by either side: the connection ends with this answer.
#[must_use]
pub fn has_connection_close(headers: &HeaderMap) -> bool {
    let mut tokens = headers
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    tokens.any(|token| token.trim_ascii().eq_ignore_ascii_case(b"close"))
}

/// The answer would be sent in chunks, and its head says nothing of how it is sent.
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

/// Has the answer to a client of HTTP/1.0 say that its connection ends with it, where it does: without chunks, an answer of
/// unknown length ends so. hyper would tell one that asked for its connection to be kept that it is.
pub fn mark_http10_close<B: Body>(answer: &mut Response<B>) {
    if needs_chunking(answer) || has_connection_close(answer.headers()) {
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        // To one of a later version hyper adds `keep-alive`.
        *answer.version_mut() = Version::HTTP_10;
    }
}

/// The head as hyper would have written it.
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
