//! Properties that hold for arbitrary bytes, as plain functions. cargo-fuzz's targets and the ordinary tests call the
//! same functions, which panic on a violation.
#![allow(dead_code, reason = "a fuzz target uses one of them")]

use bytes::Bytes;
use rouse::fault::Fault;
use rouse_net::{
    engine_load::{self, orca},
    openai::{
        self, ApiSchema, error, multipart, routing_fields,
        sse::{ResponseFacts, ResponseScanner},
    },
};
use serde_json::Value;

#[path = "bodies/connection.rs"]
mod connection;
#[path = "bodies/readers.rs"]
mod readers;

pub(crate) use connection::connection;

/// A JSON request: the peeked fields match a full parser's, and a splice changes only the model.
pub(crate) fn head(data: &[u8]) {
    let full = serde_json::from_slice::<Value>(data.strip_prefix(b"\xef\xbb\xbf").unwrap_or(data)).ok();
    let head = match routing_fields::peek(data) {
        Ok(head) => head,
        Err(routing_fields::Error::Syntax(_)) => return assert_eq!(full, None, "refused as no JSON"),
        Err(_) => return,
    };
    let raw: String =
        serde_json::from_slice(&data[head.model_range.clone()]).expect("the range holds a JSON string");
    assert_eq!(raw, head.model);
    assert!(!raw.is_empty());
    // The full parser refuses more: deep nesting, numbers out of range.
    if let Some(full) = full {
        assert_eq!(full["model"], raw);
        assert_eq!(head.stream, full["stream"] == true);
        assert_eq!(head.background, !matches!(full["background"], Value::Null | Value::Bool(false)));
        assert_eq!(head.previous_response_hash.is_some(), !full["previous_response_id"].is_null());
        assert_eq!(head.session_hash.is_some(), !full["prompt_cache_key"].is_null());
    }
    let body = Bytes::copy_from_slice(data);
    let spliced = Bytes::from(routing_fields::splice(&body, &head.model_range, "an \"other\"\n").concat());
    let again = routing_fields::peek(&spliced).expect("a spliced body is still one");
    assert_eq!(again.model, "an \"other\"\n");
    assert_eq!(
        (again.stream, again.background, again.session_hash, again.previous_response_hash, again.max_tokens),
        (head.stream, head.background, head.session_hash, head.previous_response_hash, head.max_tokens),
    );
    assert_eq!(again.prefix.key(&spliced), head.prefix.key(&body));
    let back = routing_fields::splice(&spliced, &again.model_range, &head.model).concat();
    assert_eq!(routing_fields::peek(&back).map(|head| head.model.into_owned()), Ok(raw));
}

/// A stream: splitting it changes nothing, observed facts persist, and our error can be appended to it.
pub(crate) fn sse(data: &[u8]) {
    let whole = scan(ResponseScanner::new(), [data]);
    assert_eq!(scan(ResponseScanner::new(), data.chunks(1)), whole);
    assert_eq!(scan(ResponseScanner::for_json(), data.chunks(1)), scan(ResponseScanner::for_json(), [data]));
    let mut seed = openai::stable_hash(data);
    for _ in 0..4 {
        let mut rest = data;
        let pieces = std::iter::from_fn(|| {
            seed = openai::stable_hash(&seed.to_le_bytes());
            let cut = (seed % 24) as usize;
            let (piece, after) = rest.split_at_checked(cut).unwrap_or((rest, b""));
            let more = !rest.is_empty();
            rest = after;
            more.then_some(piece)
        });
        assert_eq!(scan(ResponseScanner::new(), pieces), whole);
    }

    let mut scanner = ResponseScanner::new();
    let mut before = *scanner.facts();
    for piece in data.chunks(7) {
        scanner.feed(piece);
        let after = *scanner.facts();
        assert!(after.events >= before.events && after.done >= before.done && after.error >= before.error);
        assert!(before.id.is_none() || after.id == before.id);
        assert!(before.usage.is_none() || after.usage.is_some());
        before = after;
    }
    for form in [ApiSchema::OpenAi, ApiSchema::Responses, ApiSchema::Anthropic] {
        let mut scanner = ResponseScanner::new();
        scanner.feed(data);
        if !scanner.at_event_boundary() {
            scanner.feed(b"\n\n");
        }
        assert!(scanner.at_event_boundary());
        let before = *scanner.facts();
        scanner.feed(&error::event_after(&Fault::Internal, form, before.events));
        assert!(scanner.at_event_boundary() && scanner.facts().error);
        let events = if form == ApiSchema::Responses { 2 } else { 1 };
        assert_eq!(scanner.facts().events, before.events + events);
    }
}

/// An upload, with its `Content-Type` on the first line: every other reader of an accepted upload finds the same single
/// model, before and after a splice.
pub(crate) fn multipart(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (kind, body) = (&data[..end], data.get(end + 1..).unwrap_or_default());
    let Ok(kind) = http::HeaderValue::from_bytes(kind) else { return };
    let Ok(boundary) = multipart::boundary(&kind) else { return };
    assert!(matches!(boundary.len(), 1..=70));
    let Ok(head) = multipart::peek(body, boundary) else { return };
    assert_eq!(body[head.model_range.clone()], *head.model.as_bytes());
    for (reader, models) in readers::all(kind.as_bytes(), body) {
        assert_eq!(models, [head.model.as_bytes()], "{reader}: {:?}", String::from_utf8_lossy(data));
    }
    let other = "an/other.model";
    let spliced: Bytes =
        multipart::splice(&Bytes::copy_from_slice(body), &head.model_range, other).concat().into();
    let again = multipart::peek(&spliced, boundary).expect("a spliced body is still one");
    assert_eq!((&*again.model, again.stream), (other, head.stream));
    for (reader, models) in readers::all(kind.as_bytes(), &spliced) {
        assert_eq!(models, [other.as_bytes()], "{reader}, spliced");
    }
    assert_eq!(multipart::splice(&spliced, &again.model_range, &head.model).concat(), body);
}

/// An engine's page of metrics, and a load report: each figure can be a load, and a report of it is read back. Line
/// ends and other lines change nothing.
pub(crate) fn load(data: &[u8]) {
    let page = engine_load::parse(data);
    for load in [page, orca::from_header(data).unwrap_or_default()] {
        let figures = [load.kv_use, load.waiting, load.running];
        assert!(figures.iter().flatten().all(|figure| figure.is_finite() && *figure >= 0.0), "{load:?}");
        let report = orca::to_header(&load);
        let back = report.as_ref().and_then(|report| orca::from_header(report.as_bytes()));
        assert_eq!(back, (!load.is_unknown()).then_some(load), "{report:?}");
    }
    let lines: Vec<&[u8]> = data.split(|byte| *byte == b'\n').collect();
    assert_eq!(engine_load::parse(&lines.join(&b"\r\n"[..])), page);
    let among_others = [b"# TYPE x gauge\nx{a=\"}\\\"\"} 1\n", data, b"\ny 2\n"].concat();
    assert_eq!(engine_load::parse(&among_others), page);
}

fn scan<'a>(
    mut scanner: ResponseScanner,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> (ResponseFacts, bool) {
    for piece in pieces {
        scanner.feed(piece);
    }
    (*scanner.facts(), scanner.at_event_boundary())
}
