//! Decides how a response is framed, and writes its head.

use std::io::Write as _;

use http::{HeaderMap, StatusCode, header};
use http_body::Body;

use super::{
    DateCache,
    head::{RequestFacts, has_token},
};

/// How the body of a response is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OutgoingFraming {
    /// No body follows.
    Empty,
    /// As many bytes are still to be written.
    Length(u64),
    Chunked,
    /// The connection's end is the body's end, for HTTP/1.0.
    UntilClose,
}

/// The decisions about a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResponsePlan {
    pub(super) framing: OutgoingFraming,
    /// The value of Content-Length.
    length: Option<u64>,
    /// The connection ends after this response.
    pub(super) close: bool,
    is_http10: bool,
}

impl ResponsePlan {
    /// Decides about a response to a request with these facts. `close`: the connection ends after it in any case.
    pub(super) fn new(
        facts: RequestFacts,
        (status, headers): (StatusCode, &HeaderMap),
        body: &impl Body,
        close: bool,
    ) -> Self {
        let is_tunnel = facts.is_connect && status.is_success();
        let (framing, length) = frame(facts, status, headers, body, is_tunnel);
        let asked = headers.get_all(header::CONNECTION).iter().any(|value| has_token(value, "close"));
        let ends = is_tunnel || framing == OutgoingFraming::UntilClose;
        Self {
            framing,
            length,
            close: close || asked || ends || !facts.keep_alive,
            is_http10: facts.is_http10,
        }
    }

    /// Writes the head. The headers about framing and the connection are the server's own.
    pub(super) fn write_head(
        &self,
        out: &mut Vec<u8>,
        status: StatusCode,
        headers: &HeaderMap,
        dates: &DateCache,
    ) {
        let version = if self.is_http10 { "HTTP/1.0 " } else { "HTTP/1.1 " };
        write_status_and_headers(out, version, status, headers);
        if self.close {
            out.extend_from_slice(b"connection: close\r\n");
        } else if self.is_http10 {
            out.extend_from_slice(b"connection: keep-alive\r\n");
        }
        if let Some(length) = self.length {
            // Writing to a vector cannot fail.
            drop(write!(out, "content-length: {length}\r\n"));
        } else if self.framing == OutgoingFraming::Chunked {
            out.extend_from_slice(b"transfer-encoding: chunked\r\n");
        }
        if !headers.contains_key(header::DATE) {
            for piece in [&b"date: "[..], &dates.now(), b"\r\n"] {
                out.extend_from_slice(piece);
            }
        }
        out.extend_from_slice(b"\r\n");
    }
}

/// Writes the status line and the headers, without those about framing and the connection. `version` ends with a space.
#[inline]
pub(super) fn write_status_and_headers(
    out: &mut Vec<u8>,
    version: &str,
    status: StatusCode,
    headers: &HeaderMap,
) {
    let reason = status.canonical_reason().unwrap_or("<none>");
    for piece in [version, status.as_str(), " ", reason, "\r\n"] {
        out.extend_from_slice(piece.as_bytes());
    }
    for (name, value) in headers {
        if matches!(*name, header::CONNECTION | header::TRANSFER_ENCODING | header::CONTENT_LENGTH) {
            continue;
        }
        for piece in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            out.extend_from_slice(piece);
        }
    }
}

/// Returns the framing of a body, and the Content-Length that is sent.
fn frame(
    facts: RequestFacts,
    status: StatusCode,
    headers: &HeaderMap,
    body: &impl Body,
    is_tunnel: bool,
) -> (OutgoingFraming, Option<u64>) {
    if is_tunnel || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
        return (OutgoingFraming::Empty, None);
    }
    let declared = || {
        let value = headers.get(header::CONTENT_LENGTH)?;
        value.to_str().ok()?.parse::<u64>().ok()
    };
    let known = if body.is_end_stream() { Some(0) } else { body.size_hint().exact() };
    if facts.is_head {
        return (OutgoingFraming::Empty, declared().or_else(|| known.filter(|length| *length > 0)));
    }
    match known.or_else(declared) {
        Some(0) => (OutgoingFraming::Empty, Some(0)),
        Some(length) => (OutgoingFraming::Length(length), Some(length)),
        None if facts.is_http10 => (OutgoingFraming::UntilClose, None),
        None => (OutgoingFraming::Chunked, None),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{HeaderValue, Method};
    use http_body_util::{Empty, Full, combinators::BoxBody};

    use super::*;

    /// A body of unknown length.
    struct Endless;

    impl Body for Endless {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
            std::task::Poll::Pending
        }
    }

    fn facts(method: &Method, is_http10: bool, keep_alive: bool) -> RequestFacts {
        RequestFacts {
            is_head: method == Method::HEAD,
            is_connect: method == Method::CONNECT,
            is_http10,
            keep_alive,
        }
    }

    fn head(
        facts: RequestFacts,
        status: u16,
        headers: &[(&'static str, &'static str)],
        body: &impl Body,
    ) -> String {
        let mut map = HeaderMap::new();
        for &(name, value) in headers {
            map.append(name, HeaderValue::from_static(value));
        }
        map.append(header::DATE, HeaderValue::from_static("today"));
        let status = StatusCode::from_u16(status).unwrap();
        let plan = ResponsePlan::new(facts, (status, &map), body, false);
        let mut out = Vec::new();
        plan.write_head(&mut out, status, &map, &DateCache::default());
        let head = String::from_utf8(out).unwrap();
        head.strip_suffix("\r\n\r\n").unwrap().replace("\r\ndate: today", "").replace("\r\n", "|")
    }

    #[test]
    fn the_head_frames_the_body_for_the_client_that_asked() {
        let (get, old) = (facts(&Method::GET, false, true), facts(&Method::GET, true, false));
        let (kept, head_of) = (facts(&Method::GET, true, true), facts(&Method::HEAD, false, true));
        let connect = facts(&Method::CONNECT, false, true);
        let text = Full::new(Bytes::from_static(b"abc"));
        let none: BoxBody<Bytes, std::convert::Infallible> = BoxBody::new(Empty::new());
        for (facts, status, headers, length, expected) in [
            (get, 200, &[][..], Some(3), "HTTP/1.1 200 OK|content-length: 3"),
            (get, 200, &[("content-length", "9")], Some(3), "HTTP/1.1 200 OK|content-length: 3"),
            (get, 200, &[("content-length", "9")], None, "HTTP/1.1 200 OK|content-length: 9"),
            (get, 200, &[("content-length", "9")], Some(0), "HTTP/1.1 200 OK|content-length: 0"),
            (get, 200, &[("transfer-encoding", "gzip")], None, "HTTP/1.1 200 OK|transfer-encoding: chunked"),
            (
                get,
                299,
                &[("x-a", "1"), ("x-a", "2")],
                Some(0),
                "HTTP/1.1 299 <none>|x-a: 1|x-a: 2|content-length: 0",
            ),
            (
                get,
                200,
                &[("connection", "x, Close")],
                Some(0),
                "HTTP/1.1 200 OK|connection: close|content-length: 0",
            ),
            (get, 200, &[("connection", "x-a")], Some(0), "HTTP/1.1 200 OK|content-length: 0"),
            (get, 204, &[("content-length", "9")], None, "HTTP/1.1 204 No Content"),
            (get, 304, &[], Some(3), "HTTP/1.1 304 Not Modified"),
            (old, 200, &[], None, "HTTP/1.0 200 OK|connection: close"),
            (old, 200, &[], Some(3), "HTTP/1.0 200 OK|connection: close|content-length: 3"),
            (kept, 200, &[], Some(3), "HTTP/1.0 200 OK|connection: keep-alive|content-length: 3"),
            (kept, 200, &[], None, "HTTP/1.0 200 OK|connection: close"),
            (head_of, 200, &[("content-length", "9")], Some(0), "HTTP/1.1 200 OK|content-length: 9"),
            (head_of, 200, &[], Some(3), "HTTP/1.1 200 OK|content-length: 3"),
            (head_of, 200, &[], None, "HTTP/1.1 200 OK"),
            (connect, 200, &[], Some(3), "HTTP/1.1 200 OK|connection: close"),
            (connect, 405, &[], Some(3), "HTTP/1.1 405 Method Not Allowed|content-length: 3"),
        ] {
            let written = match length {
                Some(0) => head(facts, status, headers, &none),
                Some(_) => head(facts, status, headers, &text),
                None => head(facts, status, headers, &Endless),
            };
            assert_eq!(written, expected, "{facts:?} {status} {headers:?} {length:?}");
        }
    }

    #[test]
    fn a_head_has_a_date_of_ours_only_where_the_engine_gave_none() {
        let plan = ResponsePlan::new(
            facts(&Method::GET, false, true),
            (StatusCode::OK, &HeaderMap::new()),
            &Endless,
            false,
        );
        let mut out = Vec::new();
        plan.write_head(&mut out, StatusCode::OK, &HeaderMap::new(), &DateCache::default());
        let head = String::from_utf8(out).unwrap();
        let start = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ndate: ";
        assert!(head.starts_with(start) && head.ends_with(" GMT\r\n\r\n"), "{head}");
    }
}
