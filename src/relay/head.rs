//! Heads as they stand on the wire: ours written, the engine's read.

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, uri::PathAndQuery};

use super::decode::Decoder;

/// An engine whose head is larger is not one.
const LARGEST: usize = 64 << 10;
const MOST_HEADERS: usize = 128;

/// An engine's answer, up to its body.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) decoder: Decoder,
    /// The connection can carry another exchange after this one.
    pub(super) keep: bool,
}

/// What came is not an answer to the request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed answer")]
pub(super) struct Malformed;

/// A request's head. `headers` must have passed [`super::headers::to_engine`].
pub(super) fn encode(method: &Method, path: &PathAndQuery, headers: &HeaderMap) -> Bytes {
    let mut out = Vec::with_capacity(512);
    for piece in [method.as_str(), " ", path.as_str(), " HTTP/1.1\r\n"] {
        out.extend_from_slice(piece.as_bytes());
    }
    for (name, value) in headers {
        for piece in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            out.extend_from_slice(piece);
        }
    }
    out.extend_from_slice(b"\r\n");
    out.into()
}

/// Takes a head from the front of `buffer`, when it is all there. Interim answers (1xx) are skipped: they are between
/// two hops, and the client was not asked whether it understands them.
pub(super) fn parse(buffer: &mut BytesMut, method: &Method) -> Result<Option<Head>, Malformed> {
    loop {
        let mut fields = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut answer = httparse::Response::new(&mut fields);
        let length = match answer.parse(buffer) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) if buffer.len() < LARGEST => return Ok(None),
            Ok(httparse::Status::Partial) | Err(_) => return Err(Malformed),
        };
        let status = StatusCode::from_u16(answer.code.unwrap_or(0)).map_err(|_| Malformed)?;
        if status == StatusCode::SWITCHING_PROTOCOLS {
            return Err(Malformed);
        }
        if status.is_informational() {
            drop(buffer.split_to(length));
            continue;
        }
        let keep_by_version = answer.version == Some(1);
        let headers = collect(answer.headers)?;
        drop(buffer.split_to(length));
        let decoder = framing(&headers, status, method)?;
        let keep = !matches!(decoder, Decoder::UntilClose) && keep_alive(&headers, keep_by_version);
        return Ok(Some(Head { status, headers, decoder, keep }));
    }
}

fn collect(fields: &[httparse::Header<'_>]) -> Result<HeaderMap, Malformed> {
    let mut headers = HeaderMap::with_capacity(fields.len());
    for field in fields {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| Malformed)?;
        let value = HeaderValue::from_bytes(field.value).map_err(|_| Malformed)?;
        headers.append(name, value);
    }
    Ok(headers)
}

/// How the body ends (RFC 9112, 6.3). Chunked goes before a length; anything but plain chunked is refused.
fn framing(headers: &HeaderMap, status: StatusCode, method: &Method) -> Result<Decoder, Malformed> {
    if *method == Method::HEAD || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED {
        return Ok(Decoder::Length(0));
    }
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next() {
        let plain = coding.as_bytes().eq_ignore_ascii_case(b"chunked") && codings.next().is_none();
        return if plain { Ok(Decoder::chunked()) } else { Err(Malformed) };
    }
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let Some(length) = lengths.next() else {
        return Ok(Decoder::UntilClose);
    };
    if lengths.any(|other| other != length) {
        return Err(Malformed);
    }
    let digits = length.to_str().map_err(|_| Malformed)?;
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Malformed);
    }
    digits.parse().map(Decoder::Length).map_err(|_| Malformed)
}

fn keep_alive(headers: &HeaderMap, by_version: bool) -> bool {
    let named = |token: &[u8]| {
        headers
            .get_all(header::CONNECTION)
            .iter()
            .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
            .any(|one| one.trim_ascii().eq_ignore_ascii_case(token))
    };
    !named(b"close") && (by_version || named(b"keep-alive"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INTERIM: &[u8] = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n";
    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX-A: 1\r\nx-a: 2\r\n\r\nabc";

    #[test]
    fn a_head_is_written_as_it_was_given() {
        let mut headers = HeaderMap::new();
        headers.append("x-a", HeaderValue::from_static("1"));
        headers.append("x-a", HeaderValue::from_static("2"));
        let head = encode(&Method::POST, &PathAndQuery::from_static("/v1/x?y=z"), &headers);
        assert_eq!(head, "POST /v1/x?y=z HTTP/1.1\r\nx-a: 1\r\nx-a: 2\r\n\r\n");
    }

    #[test]
    fn a_head_without_end_is_given_up() {
        let endless = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(LARGEST));
        assert_eq!(parse(&mut BytesMut::from(endless.as_bytes()), &Method::GET).unwrap_err(), Malformed);
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(MOST_HEADERS + 1));
        assert_eq!(parse(&mut BytesMut::from(many.as_bytes()), &Method::GET).unwrap_err(), Malformed);
    }

    proptest! {
        #[test]
        fn a_head_is_found_whole_however_it_arrives(cut in 0..INTERIM.len() + ANSWER.len() - 3) {
            let wire = [INTERIM, ANSWER].concat();
            let mut buffer = BytesMut::from(&wire[..cut]);
            prop_assert!(parse(&mut buffer, &Method::POST).unwrap().is_none());
            buffer.extend_from_slice(&wire[cut..]);
            let head = parse(&mut buffer, &Method::POST).unwrap().unwrap();
            prop_assert_eq!(head.status, 200);
            prop_assert_eq!(head.headers.get_all("x-a").iter().count(), 2);
            prop_assert!(!head.headers.contains_key("link"));
            prop_assert_eq!(head.decoder.left(), Some(3));
            prop_assert_eq!(&buffer[..], b"abc");
        }

        #[test]
        fn no_bytes_make_it_panic(tail in prop::collection::vec(any::<u8>(), 0..120)) {
            let mut wire = BytesMut::from(&b"HTTP/1.1 "[..]);
            wire.extend_from_slice(&tail);
            drop(parse(&mut wire, &Method::GET));
        }
    }
}
