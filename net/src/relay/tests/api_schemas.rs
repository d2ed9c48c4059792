//! The responses of every API: the engine's bytes, the ends of streams, and errors in each schema.

use super::*;
use crate::openai::{
    error,
    sse::{ResponseFacts, TokenUsage},
    stable_hash,
};

const CHAT: &str = "data: {\"id\":\"c\",\"choices\":[{\"delta\":{\"content\":\"\u{e9}\\\"\"}}]}\r\n\r\n: x\n\ndata: [DONE]\n\n";
const RESPONSES: &str = concat!(
    "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\"}}\n\n",
    "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",",
    "\"usage\":{\"input_tokens\":1,\"output_tokens\":2}}}\n\n",
);
const MESSAGES: &str = concat!(
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\"}}\n\n",
    "event: ping\ndata: {\"type\": \"ping\"}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
);
const STREAMS: [(ApiSchema, &str); 3] =
    [(ApiSchema::OpenAi, CHAT), (ApiSchema::Responses, RESPONSES), (ApiSchema::Anthropic, MESSAGES)];

#[derive(Clone, Copy, Debug)]
enum Framing {
    Chunked,
    Length,
    UntilClose,
}

const FRAMINGS: [Framing; 3] = [Framing::Chunked, Framing::Length, Framing::UntilClose];

/// Pseudo-random numbers that are the same on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = stable_hash(&self.0.to_le_bytes());
        (self.0 % most as u64) as usize
    }
}

/// The engine's bytes: a head, and the stream in one of the framings, with chunks cut at random.
fn framed(stream: &[u8], framing: Framing, random: &mut Random) -> Vec<u8> {
    let (field, body) = match framing {
        Framing::UntilClose => (String::new(), stream.to_vec()),
        Framing::Length => (format!("content-length: {}\r\n", stream.len()), stream.to_vec()),
        Framing::Chunked => {
            let mut body = Vec::new();
            let mut rest = stream;
            while !rest.is_empty() {
                let (chunk, after) = rest.split_at(1 + random.below(rest.len().min(700)));
                body.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                body.extend_from_slice(chunk);
                body.extend_from_slice(b"\r\n");
                rest = after;
            }
            body.extend_from_slice(b"0\r\n\r\n");
            ("transfer-encoding: chunked\r\n".to_owned(), body)
        }
    };
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{field}\r\n");
    [head.into_bytes(), body].concat()
}

/// The client's result when the engine writes `pieces` one by one.
async fn through(
    engine: &ListeningEngine,
    form: ApiSchema,
    pieces: &[&[u8]],
) -> (Vec<u8>, Option<ResponseFacts>) {
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let mut order = core.exchange_args(true, &observer);
    order.request.schema = form;
    let engine = async {
        let mut peer = engine.accept().await;
        peer.0.set_nodelay(true).unwrap();
        peer.request().await;
        for piece in pieces {
            peer.0.write_all(piece).await.unwrap();
            // Yield, so that each piece is read before the next one.
            tokio::task::yield_now().await;
        }
        peer.0.shutdown().await.unwrap();
        peer
    };
    let client = async {
        let mut body = exchange(&core.pool, order).await.unwrap().into_body();
        let mut got = Vec::new();
        while let Some(piece) = frame(&mut body).await {
            got.extend_from_slice(&piece.unwrap());
        }
        got
    };
    let (got, _peer) = tokio::join!(client, engine);
    assert!(core.is_unused());
    let facts = observer.0.borrow().facts;
    (got, facts)
}

#[tokio::test]
async fn a_stream_cut_at_any_byte_passes_byte_for_byte() {
    let engine = ListeningEngine::start().await;
    for (form, stream) in STREAMS {
        for framing in FRAMINGS {
            let wire = framed(stream.as_bytes(), framing, &mut Random(3));
            for cut in 1..wire.len() {
                let (got, facts) = through(&engine, form, &[&wire[..cut], &wire[cut..]]).await;
                assert_eq!(String::from_utf8_lossy(&got), stream, "{form:?} {framing:?} cut at {cut}");
                assert!(facts.unwrap().done, "{form:?} {framing:?} cut at {cut}");
            }
        }
    }
}

#[tokio::test]
async fn random_streams_cut_and_glued_at_random_pass_byte_for_byte() {
    let engine = ListeningEngine::start().await;
    let mut random = Random(7);
    for round in 0..90 {
        let (form, end) = STREAMS[round % 3];
        let mut stream = Vec::new();
        for _ in 0..random.below(40) {
            let most = if random.below(12) == 0 { 3000 } else { 9 };
            let text = "x\u{1f600}\\\"{[".repeat(random.below(most));
            let line = ["\n", "\r\n", "\r"][random.below(3)];
            let event = match random.below(4) {
                0 => format!(": {text}{line}"),
                1 => format!("id: 1{line}data: {text}{line}data:{text}{line}{line}"),
                2 => format!("event: content_block_delta{line}data: {{\"delta\":\"{text}\"}}{line}{line}"),
                _ => format!("data: {{\"usage\":{{\"prompt_tokens\":{}}}}}{line}{line}", random.below(99)),
            };
            stream.extend_from_slice(event.as_bytes());
        }
        stream.extend_from_slice(b"\n\n");
        stream.extend_from_slice(end.as_bytes());
        let framing = FRAMINGS[random.below(3)];
        let wire = framed(&stream, framing, &mut random);
        let mut pieces = Vec::new();
        let mut rest = &wire[..];
        while !rest.is_empty() {
            let most = if random.below(3) == 0 { 20_000 } else { 60 };
            let (piece, after) = rest.split_at(1 + random.below(rest.len().min(most)));
            pieces.push(piece);
            rest = after;
        }
        let (got, _) = through(&engine, form, &pieces).await;
        assert_eq!(
            (got.len(), stable_hash(&got)),
            (stream.len(), stable_hash(&stream)),
            "round {round}, {framing:?}"
        );
        assert!(got == stream);
    }
}

#[tokio::test]
async fn a_stream_without_its_own_end_is_ended_by_an_error_in_the_words_of_its_api() {
    for (form, stream) in STREAMS {
        let (first, _) = stream.split_once("\n\n").unwrap();
        let begun = format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n{first}\n\n");
        let engine = ListeningEngine::start().await;
        let core = Core::new(engine.address());
        let observer = RecordingObserver::default();
        let mut order = core.exchange_args(true, &observer);
        order.request.schema = form;
        let engine = async {
            let mut peer = engine.accept().await;
            peer.request().await;
            peer.write(&begun).await;
        };
        let (answer, ()) = tokio::join!(exchange(&core.pool, order), engine);
        let (got, end) = drain(&mut answer.unwrap().into_body()).await;
        let fault = end.unwrap_err();
        let event = error::event_after(&fault, form, 1);
        let event = std::str::from_utf8(&event).unwrap();
        assert!(got.starts_with(first) && got.ends_with(event), "{got}");
        assert_eq!(observer.ends(), [ExchangeOutcome::Failed(fault)]);
        assert_eq!(event.contains("event: response.failed"), form == ApiSchema::Responses);
        assert_eq!(event.contains("\"type\":\"error\",\"error\":"), form == ApiSchema::Anthropic);
    }
}

#[tokio::test]
async fn a_document_is_looked_into_only_when_that_is_wanted_and_never_touched() {
    let document = r#"{"id":"c","choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":3,"completion_tokens":4}}"#;
    let usage = Some(TokenUsage { prompt: 3, completion: 4 });
    let expected =
        Some(ResponseFacts { events: 0, done: true, error: false, usage, id: Some(stable_hash(b"c")) });
    for (kind, watch, facts) in [
        ("application/json", true, expected),
        ("application/json; charset=utf-8", true, expected),
        ("application/json", false, None),
        ("application/json\r\ncontent-encoding: gzip", true, None),
        ("audio/wav", true, None),
    ] {
        let engine = ListeningEngine::start().await;
        let core = Core::new(engine.address());
        let observer = RecordingObserver::default();
        let mut order = core.exchange_args(false, &observer);
        order.request.inspection =
            if watch { ResponseInspection::EventsAndJson } else { ResponseInspection::Events };
        let length = document.len();
        let engine = async {
            let mut peer = engine.accept().await;
            let request = peer.request().await;
            assert_eq!(request.contains("accept-encoding: identity\r\n"), watch);
            let (front, back) = document.split_at(40);
            peer.write(&format!(
                "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n{front}"
            ))
            .await;
            tokio::task::yield_now().await;
            peer.write(back).await;
            peer
        };
        let client = async {
            let answer = exchange(&core.pool, order).await.unwrap();
            assert_eq!(answer.headers()["content-length"], length.to_string());
            drain(&mut answer.into_body()).await
        };
        let (got, _peer) = tokio::join!(client, engine);
        assert_eq!(got, (document.to_owned(), Ok(())));
        assert_eq!(observer.0.borrow().facts, facts, "{kind}");
    }
}

#[tokio::test]
async fn a_document_that_breaks_off_gets_no_event() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let mut order = core.exchange_args(false, &observer);
    order.request.inspection = ResponseInspection::EventsAndJson;
    let engine = async {
        let mut peer = engine.accept().await;
        peer.request().await;
        peer.write("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{\"\r\n").await;
    };
    let (answer, ()) = tokio::join!(exchange(&core.pool, order), engine);
    let (got, end) = drain(&mut answer.unwrap().into_body()).await;
    assert_eq!(got, "{\"");
    assert!(end.is_err());
}
