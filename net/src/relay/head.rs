//! Writes request heads and parses response heads.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, uri::PathAndQuery};

use super::{
    decode::BodyDecoder,
    headers::{ConnectionTokens, is_for_client},
};
use crate::{
    engine_load::{EngineLoad, orca},
    stub_api::{GATED_HEADER, NOT_READY_HEADER},
};

/// No engine has a larger response head.
const MAX_HEAD_BYTES: usize = 64 << 10;
const MAX_HEADERS: usize = 128;
const TYPICAL_HEADERS: usize = 24;
/// Room for the headers that a server adds. Without it the table grows, and all entries move.
const EXTRA_HEADER_CAPACITY: usize = 8;

/// An engine's response head, with only those headers that may reach a client.
#[derive(Debug)]
pub(crate) struct UpstreamResponseHead {
    pub(crate) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(crate) decoder: BodyDecoder,
    /// The connection can carry another exchange after this one.
    pub(super) keep_alive: bool,
    /// A 503 with a stub's mark: its gate is closed, or it does not know its engine yet.
    pub(crate) gated: bool,
    /// The load report of the engine or its stub. Boxed, because few heads have one.
    pub(super) load: Option<Box<EngineLoad>>,
}

/// The bytes received are not a response to the request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed response")]
pub(crate) struct MalformedResponse;

/// Writes the first line of a request. `prefix` is a prefix of the path.
pub(crate) fn write_request_line(out: &mut Vec<u8>, method: &Method, prefix: &str, path: &PathAndQuery) {
    for piece in [method.as_str(), " ", prefix, path.as_str(), " HTTP/1.1\r\n"] {
        out.extend_from_slice(piece.as_bytes());
    }
}

/// Takes a complete head from the front of `buffered`; `None` while it is incomplete. Interim responses (1xx) are skipped:
/// they concern one hop, and the client may not understand them.
///
/// The values share the memory they were read into, so a head allocates only its table.
pub(crate) fn parse(
    buffered: &mut Bytes,
    method: &Method,
) -> Result<Option<UpstreamResponseHead>, MalformedResponse> {
    loop {
        // Clearing space for many headers takes longer than parsing most heads.
        let parsed = match parse_with(&mut [httparse::EMPTY_HEADER; TYPICAL_HEADERS], buffered, method) {
            Err(httparse::Error::TooManyHeaders) => {
                parse_with(&mut [httparse::EMPTY_HEADER; MAX_HEADERS], buffered, method)
            }
            parsed => parsed,
        };
        match parsed.map_err(|_| MalformedResponse)? {
            httparse::Status::Complete((length, head)) => {
                drop(buffered.split_to(length));
                if let Some(head) = head {
                    return head.map(Some);
                }
            }
            httparse::Status::Partial if buffered.len() < MAX_HEAD_BYTES => return Ok(None),
            httparse::Status::Partial => return Err(MalformedResponse),
        }
    }
}

/// A head and its length in bytes. The head of an interim response is `None`.
type ParsedHead = httparse::Status<(usize, Option<Result<UpstreamResponseHead, MalformedResponse>>)>;

fn parse_with<'a>(
    fields: &mut [httparse::Header<'a>],
    buffered: &'a Bytes,
    method: &Method,
) -> Result<ParsedHead, httparse::Error> {
    let mut answer = httparse::Response::new(fields);
    let httparse::Status::Complete(length) = answer.parse(buffered)? else {
        return Ok(httparse::Status::Partial);
    };
    let code = answer.code.unwrap_or(0);
    let interim = (100..200).contains(&code) && code != 101;
    let head = (!interim).then(|| read(&answer, buffered, method));
    Ok(httparse::Status::Complete((length, head)))
}

/// The headers that determine the framing and the connection's reuse, collected while parsing.
#[derive(Default)]
struct ResponseFraming<'a> {
    connection_tokens: ConnectionTokens,
    close: bool,
    keep_alive: bool,
    coding: Option<&'a [u8]>,
    codings: usize,
    length: Option<&'a [u8]>,
    lengths_differ: bool,
}

fn read(
    answer: &httparse::Response<'_, '_>,
    buffered: &Bytes,
    method: &Method,
) -> Result<UpstreamResponseHead, MalformedResponse> {
    let status = StatusCode::from_u16(answer.code.unwrap_or(0)).map_err(|_| MalformedResponse)?;
    if status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(MalformedResponse);
    }
    let (mut framing, mut load) = (ResponseFraming::default(), None);
    let mut headers = HeaderMap::with_capacity(answer.headers.len() + EXTRA_HEADER_CAPACITY);
    for field in &*answer.headers {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| MalformedResponse)?;
        framing.add_header(&name, field.value);
        if is_for_client(name.as_str()) {
            let value = buffered.slice_ref(field.value);
            headers.append(name, HeaderValue::from_maybe_shared(value).map_err(|_| MalformedResponse)?);
        } else if name == orca::REPORT_HEADER {
            load = orca::from_header(field.value).map(Box::new);
        }
    }
    if !framing.connection_tokens.is_empty() {
        framing.connection_tokens.remove_from(&mut headers);
    }
    let decoder = framing.decoder(status, method)?;
    let gated = status == StatusCode::SERVICE_UNAVAILABLE && is_marked(answer);
    let by_version = answer.version == Some(1);
    let keep = !matches!(decoder, BodyDecoder::UntilClose)
        && !framing.close
        && (by_version || framing.keep_alive)
        && !framing.may_send_stray_body(&decoder, method);
    Ok(UpstreamResponseHead { status, headers, decoder, keep_alive: keep, gated, load })
}

/// Checks for a stub's mark, only on the few responses that may have one: the mark itself is never forwarded.
fn is_marked(answer: &httparse::Response<'_, '_>) -> bool {
    let marks =
        |name: &str| [GATED_HEADER, NOT_READY_HEADER].iter().any(|mark| name.eq_ignore_ascii_case(mark));
    answer.headers.iter().any(|field| marks(field.name) && field.value == b"1")
}

impl<'a> ResponseFraming<'a> {
    fn add_header(&mut self, name: &HeaderName, value: &'a [u8]) {
        if *name == header::CONTENT_LENGTH {
            self.lengths_differ |= self.length.is_some_and(|other| other != value);
            self.length = Some(value);
        } else if *name == header::TRANSFER_ENCODING {
            self.codings += 1;
            self.coding = Some(value);
        } else if *name == header::CONNECTION {
            for token in value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
                self.close |= token.eq_ignore_ascii_case(b"close");
                self.keep_alive |= token.eq_ignore_ascii_case(b"keep-alive");
            }
            self.connection_tokens.add(value);
        }
    }

    /// Reports whether the engine may send a body where none is allowed: after any HEAD request, and when a head that
    /// rules out a body announces one. Such a body would precede the next response on the connection.
    fn may_send_stray_body(&self, decoder: &BodyDecoder, method: &Method) -> bool {
        let speaks = self.coding.is_some() || self.length.is_some_and(|length| length != b"0");
        matches!(decoder, BodyDecoder::Length(0)) && (*method == Method::HEAD || speaks)
    }

    /// Determines how the body ends (RFC 9112, 6.3). Chunked takes precedence over a length; other codings are refused.
    fn decoder(&self, status: StatusCode, method: &Method) -> Result<BodyDecoder, MalformedResponse> {
        if *method == Method::HEAD || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED {
            return Ok(BodyDecoder::Length(0));
        }
        if let Some(coding) = self.coding {
            let plain = coding.eq_ignore_ascii_case(b"chunked") && self.codings == 1;
            return if plain { Ok(BodyDecoder::chunked()) } else { Err(MalformedResponse) };
        }
        let Some(digits) = self.length else {
            return Ok(BodyDecoder::UntilClose);
        };
        if self.lengths_differ || digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
            return Err(MalformedResponse);
        }
        let digits = str::from_utf8(digits).map_err(|_| MalformedResponse)?;
        digits.parse().map(BodyDecoder::Length).map_err(|_| MalformedResponse)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::relay::headers::{HeaderOverrides, to_engine};

    const INTERIM: &[u8] = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n";
    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX-A: 1\r\nx-a: 2\r\n\r\nabc";

    #[test]
    fn a_head_is_written_as_it_was_given() {
        let mut headers = HeaderMap::new();
        headers.append("x-a", HeaderValue::from_static("1"));
        headers.append("x-a", HeaderValue::from_static("2"));
        let mut head = Vec::new();
        write_request_line(&mut head, &Method::POST, "", &PathAndQuery::from_static("/v1/x?y=z"));
        let overrides = HeaderOverrides {
            host: "a:1",
            authorization: None,
            request_id: None,
            length: Some(0),
            identity_encoding: false,
            load_report: false,
        };
        to_engine(&mut head, &headers, overrides);
        let expected = "POST /v1/x?y=z HTTP/1.1\r\nx-a: 1\r\nx-a: 2\r\nhost: a:1\r\ncontent-length: 0\r\n";
        assert_eq!(str::from_utf8(&head), Ok(expected));
    }

    #[test]
    fn a_load_report_is_taken_off_the_head_and_read() {
        let read = |headers: &str| {
            let wire = format!("HTTP/1.1 200 OK\r\n{headers}content-length: 0\r\n\r\n");
            let head = parse(&mut wire.into(), &Method::POST).unwrap().unwrap();
            assert_eq!(head.headers.len(), 1, "{headers}: {:?}", head.headers);
            head.load.map(|load| (load.kv_use, load.waiting))
        };
        let report = "Endpoint-Load-Metrics: TEXT named_metrics.kv_cache_usage_perc=0.5\r\n";
        assert_eq!(read(report), Some((Some(0.5), None)));
        assert_eq!(read("endpoint-load-metrics: JSON {}\r\n"), None);
        assert_eq!(read("endpoint-load-metrics-bin: CZqZmZmZmbk/\r\n"), None);
        assert_eq!(read("endpoint-load-metrics-json: {}\r\n"), None);
        assert_eq!(read(""), None);
    }

    #[test]
    fn a_head_without_end_is_given_up() {
        let endless = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(MAX_HEAD_BYTES));
        assert_eq!(parse(&mut endless.into(), &Method::GET).unwrap_err(), MalformedResponse);
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(MAX_HEADERS + 1));
        assert_eq!(parse(&mut many.into(), &Method::GET).unwrap_err(), MalformedResponse);
    }

    proptest! {
        #[test]
        fn a_head_is_found_whole_however_it_arrives(cut in 0..INTERIM.len() + ANSWER.len() - 3) {
            let wire = [INTERIM, ANSWER].concat();
            let mut buffer = Bytes::copy_from_slice(&wire[..cut]);
            prop_assert!(parse(&mut buffer, &Method::POST).unwrap().is_none());
            buffer = [&buffer, &wire[cut..]].concat().into();
            let head = parse(&mut buffer, &Method::POST).unwrap().unwrap();
            prop_assert_eq!(head.status, 200);
            prop_assert_eq!(head.headers.get_all("x-a").iter().count(), 2);
            prop_assert!(!head.headers.contains_key("link"));
            prop_assert_eq!(head.decoder.remaining(), Some(3));
            prop_assert_eq!(&buffer[..], b"abc");
        }

        #[test]
        fn no_bytes_make_it_panic(tail in prop::collection::vec(any::<u8>(), 0..120)) {
            let wire = [&b"HTTP/1.1 "[..], &tail].concat();
            drop(parse(&mut wire.into(), &Method::GET));
        }
    }
}
