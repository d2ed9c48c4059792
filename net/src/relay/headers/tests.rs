use http::HeaderMap;

use super::*;
use crate::relay::head;

/// The headers of a client as an engine receives them.
fn to_engine(headers: &mut HeaderMap, authorization: Option<HeaderValue>, length: usize, identity: bool) {
    let mut out = Vec::new();
    let (host, authorization) = ("127.0.0.1:8000", authorization.as_ref());
    super::to_engine(
        &mut out,
        headers,
        HeaderOverrides {
            host,
            authorization,
            request_id: None,
            length: Some(length as u64),
            identity_encoding: identity,
            load_report: false,
        },
    );
    *headers = HeaderMap::new();
    for line in std::str::from_utf8(&out).unwrap().split_terminator("\r\n") {
        let (name, value) = line.split_once(": ").unwrap();
        headers.append(HeaderName::try_from(name).unwrap(), HeaderValue::from_str(value).unwrap());
    }
}

/// The headers of an engine as a client receives them.
fn to_client(headers: &mut HeaderMap, events: bool, unsized_body: bool) {
    let mut wire = "HTTP/1.1 200 OK\r\n".to_owned();
    for (name, value) in &*headers {
        wire += &format!("{name}: {}\r\n", value.to_str().unwrap());
    }
    wire += "\r\n";
    *headers = head::parse(&mut wire.into(), &http::Method::GET).unwrap().unwrap().headers;
    super::to_client(headers, events, unsized_body);
}

fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(*name, HeaderValue::from_static(value));
    }
    headers
}

fn sorted(headers: &HeaderMap) -> Vec<(&str, &str)> {
    let mut pairs: Vec<_> =
        headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    pairs.sort_unstable();
    pairs
}

#[test]
fn what_belongs_to_the_clients_connection_or_person_does_not_reach_the_engine() {
    let mut headers = map(&[
        ("host", "gateway"),
        ("connection", "close, X-Hop"),
        ("connection", "x-hop-2"),
        ("x-hop", "1"),
        ("x-hop-2", "1"),
        ("keep-alive", "1"),
        ("te", "trailers"),
        ("trailer", "x"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "h2c"),
        ("proxy-authorization", "x"),
        ("proxy-connection", "x"),
        ("proxy-whatever", "x"),
        ("forwarded", "for=1"),
        ("x-forwarded-for", "1"),
        ("x-real-ip", "1"),
        ("via", "x"),
        ("authorization", "Bearer x"),
        ("x-api-key", "x"),
        ("api-key", "x"),
        ("cookie", "a=b"),
        ("origin", "https://page.example"),
        ("expect", "100-continue"),
        ("content-length", "999"),
        ("x-rouse-gate", "closed"),
        ("endpoint-load-metrics-format", "JSON"),
        ("accept-encoding", "gzip"),
        ("content-type", "application/json"),
        ("traceparent", "00-1-2-01"),
        ("x-request-id", "abc"),
        ("x-custom", "1"),
    ]);
    to_engine(&mut headers, None, 12, true);
    assert_eq!(
        sorted(&headers),
        [
            ("accept-encoding", "identity"),
            ("content-length", "12"),
            ("content-type", "application/json"),
            ("host", "127.0.0.1:8000"),
            ("traceparent", "00-1-2-01"),
            ("x-custom", "1"),
            ("x-request-id", "abc"),
        ]
    );
}

#[test]
fn the_engines_own_key_takes_the_place_of_the_clients() {
    let mut headers = map(&[("authorization", "Bearer client"), ("accept-encoding", "gzip")]);
    to_engine(&mut headers, Some(HeaderValue::from_static("Bearer engine")), 0, false);
    assert_eq!(headers["authorization"], "Bearer engine");
    assert_eq!(headers["accept-encoding"], "gzip");
}

#[test]
fn the_id_that_is_given_takes_the_place_of_the_clients() {
    let headers = map(&[("x-request-id", "a"), ("x-request-id", "b"), ("x-custom", "1")]);
    let id = HeaderValue::from_static("ours");
    let overrides = HeaderOverrides {
        host: "h",
        authorization: None,
        request_id: Some(&id),
        length: Some(0),
        identity_encoding: false,
        load_report: false,
    };
    let mut out = Vec::new();
    super::to_engine(&mut out, &headers, overrides);
    let wanted = "x-custom: 1\r\nhost: h\r\nx-request-id: ours\r\ncontent-length: 0\r\n";
    assert_eq!(std::str::from_utf8(&out), Ok(wanted));
}

#[test]
fn a_stub_is_asked_for_a_load_report_only_by_the_gateway_itself() {
    let headers = map(&[("endpoint-load-metrics-format", "JSON")]);
    let overrides = HeaderOverrides {
        host: "h",
        authorization: None,
        request_id: None,
        length: Some(0),
        identity_encoding: false,
        load_report: true,
    };
    let mut out = Vec::new();
    super::to_engine(&mut out, &headers, overrides);
    let wanted = "host: h\r\nendpoint-load-metrics-format: TEXT\r\ncontent-length: 0\r\n";
    assert_eq!(std::str::from_utf8(&out), Ok(wanted));
}

#[test]
fn an_event_stream_is_marked_unless_the_engine_said_otherwise() {
    let mut headers = map(&[("content-length", "1"), ("x-rouse-cold-start", "hot"), ("connection", "close")]);
    to_client(&mut headers, true, true);
    assert_eq!(sorted(&headers), [("cache-control", "no-cache, no-transform"), ("x-accel-buffering", "no")]);
    let mut headers = map(&[("cache-control", "no-store")]);
    to_client(&mut headers, true, true);
    assert_eq!(headers["cache-control"], "no-store");
    let mut headers = map(&[("content-length", "1")]);
    to_client(&mut headers, false, false);
    assert_eq!(sorted(&headers), [("content-length", "1")]);
}

#[test]
fn an_engine_does_not_speak_for_the_gateway_to_browsers() {
    let mut headers = map(&[
        ("access-control-allow-origin", "*"),
        ("access-control-allow-credentials", "true"),
        ("set-cookie", "a=b"),
        ("set-cookie", "c=d"),
        ("endpoint-load-metrics", "TEXT named_metrics.x=1"),
        ("endpoint-load-metrics-bin", "CZqZmZmZmbk/"),
        ("endpoint-load-metrics-json", "{}"),
        ("x-custom", "1"),
    ]);
    to_client(&mut headers, false, false);
    assert_eq!(sorted(&headers), [("x-custom", "1")]);
}

#[test]
fn a_readable_stream_is_known_by_its_type_and_is_not_encoded() {
    let typed = ("content-type", "text/event-stream");
    assert!(is_readable_stream(&map(&[typed, ("content-encoding", "identity")])));
    assert!(!is_readable_stream(&map(&[typed, ("content-encoding", "gzip")])));
    for (value, is) in [
        ("text/event-stream", true),
        ("Text/Event-Stream; charset=utf-8", true),
        ("text/event-stream-x", false),
        ("application/json", false),
    ] {
        assert_eq!(is_readable_stream(&map(&[("content-type", value)])), is, "{value}");
    }
    assert!(!is_readable_stream(&HeaderMap::new()));
}

#[test]
fn a_request_id_is_kept_when_it_is_harmless_and_else_made() {
    let ids = RequestIdGenerator::new();
    let sent = |id: &str| HeaderValue::from_str(id).unwrap();
    assert_eq!(ids.keep_or_make(Some(&sent("a.B_9-"))), "a.B_9-");
    let head = bytes::Bytes::from(b"an-id and all that stood beside it".to_vec());
    let part = HeaderValue::from_maybe_shared(head.slice(..5)).unwrap();
    let kept = ids.keep_or_make(Some(&part));
    drop(part);
    assert!(kept == "an-id" && head.is_unique(), "without the head that it was a part of");
    let long: &'static str = "a".repeat(129).leak();
    let mut made = std::collections::BTreeSet::new();
    for bad in ["", "a b", "a;b", long] {
        made.insert(ids.keep_or_make(Some(&sent(bad))));
    }
    made.insert(ids.keep_or_make(None));
    made.insert(RequestIdGenerator::new().keep_or_make(None));
    assert_eq!(made.len(), 6, "every one is another");
    assert!(made.iter().all(|id| is_id(id.as_bytes()) && is_uuid(id)), "{made:?}");
    assert!(!is_uuid(&HeaderValue::from_static("a.B_9-")));
}
