//! The client's view of a response, in each shape that an engine may give it.

use super::*;

#[tokio::test]
async fn frames_pass_as_they_come_and_the_lease_lasts_until_the_last_byte() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let (answer, mut peer) = tokio::join!(core.send(true, &observer), async {
        let mut peer = engine.accept().await;
        let request = peer.request().await;
        assert!(request.starts_with("POST /v1/chat/completions?x=1 HTTP/1.1\r\n"), "{request}");
        assert!(request.contains("accept-encoding: identity\r\n"));
        assert!(request.ends_with("\r\n\r\n{\"model\":\"m\"}"));
        peer.write(EVENTS).await;
        peer
    });
    let answer = answer.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()["x-accel-buffering"], "no");
    assert_eq!(answer.headers()["cache-control"], "no-cache, no-transform");
    assert!(!answer.headers().contains_key("transfer-encoding"));
    let mut body = answer.into_body();
    for text in ["data: 1\n\n", "da", "ta: 2\n\n"] {
        peer.chunk(text).await;
        assert_eq!(frame(&mut body).await.unwrap().unwrap(), text);
    }
    assert_eq!(core.gate.leases(), 1);
    peer.write("0\r\n\r\n").await;
    assert!(frame(&mut body).await.is_none());
    assert!(core.is_unused());
    assert_eq!(observer.ends(), [ExchangeOutcome::Complete]);
    let notes = observer.0.borrow();
    assert_eq!((notes.first_bytes, notes.bytes, notes.head), (1, 18, Some(StatusCode::OK)));
    assert_eq!(notes.facts.unwrap().events, 2);
    drop(body);
    assert_eq!(observer.ends().len(), 1, "dropping what has ended ends nothing");
}

#[tokio::test]
async fn a_load_report_goes_to_the_observer_that_asked_and_never_to_the_client() {
    for asks in [false, true] {
        let engine = ListeningEngine::start().await;
        let core = Core { wants_load_report: asks, ..Core::new(engine.address()) };
        let observer = RecordingObserver::default();
        let (answer, request) = tokio::join!(core.send(false, &observer), async {
            let mut peer = engine.accept().await;
            let request = peer.request().await;
            let report = "endpoint-load-metrics: TEXT named_metrics.num_requests_waiting=4";
            peer.write(&format!("HTTP/1.1 200 OK\r\n{report}\r\ncontent-length: 0\r\n\r\n")).await;
            request
        });
        assert_eq!(request.contains("endpoint-load-metrics-format: TEXT\r\n"), asks, "{request}");
        assert!(!answer.unwrap().headers().contains_key("endpoint-load-metrics"));
        let waiting = observer.0.borrow().load.and_then(|load| load.waiting);
        assert_eq!(waiting, asks.then_some(4.0));
    }
}

async fn whole(stream: bool, script: &'static str) -> (Response<String>, Result<(), Fault>, Core, Peer) {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let engine = async {
        let mut peer = engine.accept().await;
        peer.request().await;
        peer.write(script).await;
        peer
    };
    let (answer, mut peer) = tokio::join!(core.send(stream, &observer), engine);
    peer.0.shutdown().await.unwrap();
    let (parts, mut body) = answer.unwrap().into_parts();
    let (text, end) = drain(&mut body).await;
    drop(body);
    assert!(core.is_unused());
    assert_eq!(observer.ends().len(), 1);
    (Response::from_parts(parts, text), end, core, peer)
}

#[tokio::test]
async fn every_framing_ends_where_it_should() {
    let cases = [
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", "hello", true),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
            "hello",
            true,
        ),
        // Trailers are dropped.
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx: y\r\nz: 1\r\n\r\n",
            "hello",
            true,
        ),
        // Ended by the close, in either version.
        ("HTTP/1.1 200 OK\r\n\r\nhello", "hello", false),
        ("HTTP/1.0 200 OK\r\n\r\nhello", "hello", false),
        ("HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 5\r\n\r\nhello", "hello", true),
        ("HTTP/1.1 200 OK\r\nconnection: x, Close\r\ncontent-length: 5\r\n\r\nhello", "hello", false),
        ("HTTP/1.1 204 No Content\r\n\r\n", "", true),
        ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "", true),
        // Unsolicited bytes make the connection unusable.
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello!", "hello", false),
    ];
    for (script, text, kept) in cases {
        let (answer, end, core, _peer) = whole(false, script).await;
        assert_eq!(answer.body(), text, "{script}");
        assert_eq!(end, Ok(()), "{script}");
        assert_eq!(core.pool.len(), usize::from(kept), "{script}");
    }
}

#[tokio::test]
async fn interim_answers_are_dropped() {
    let script = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
    let (answer, end, ..) = whole(false, script).await;
    assert_eq!((answer.status().as_u16(), answer.body().as_str(), end), (200, "ok", Ok(())));
    assert!(!answer.headers().contains_key("link"));
}

#[tokio::test]
async fn an_engines_refusal_passes_with_its_status_and_without_its_hops() {
    let script = "HTTP/1.1 422 No\r\ncontent-length: 2\r\nconnection: x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\nx-rouse-gate: closed\r\nx-kept: 1\r\n\r\n{}";
    let (answer, ..) = whole(true, script).await;
    assert_eq!(answer.status(), 422);
    let names: Vec<&str> = answer.headers().keys().map(|name| name.as_str()).collect();
    assert_eq!(names, ["content-length", "x-kept"]);
}

#[tokio::test]
async fn an_answer_before_the_body_is_read_is_delivered() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let mut order = core.exchange_args(false, &observer);
    order.request.body = Bytes::from(vec![b'x'; 32 << 20]).into();
    let engine = async {
        let mut peer = engine.accept().await;
        assert_ne!(peer.0.read(&mut [0; 64]).await.unwrap(), 0);
        peer.write("HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-length: 4\r\n\r\nfull").await;
        // Closed with megabytes unread: the client's side gets a reset.
    };
    let (answer, ()) = tokio::join!(exchange(&core.pool, order), engine);
    let answer = answer.unwrap();
    assert_eq!(answer.status(), 413);
    assert_eq!(drain(&mut answer.into_body()).await, ("full".to_owned(), Ok(())));
    assert!(core.is_unused() && core.pool.is_empty());
}

#[tokio::test]
async fn a_body_still_on_its_way_when_the_answer_begins_is_sent_to_its_end() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let mut order = core.exchange_args(false, &observer);
    const LENGTH: usize = 16 << 20;
    order.request.body = Bytes::from(vec![b'x'; LENGTH]).into();
    let engine = async {
        let mut peer = engine.accept().await;
        peer.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n").await;
        let mut read = 0;
        while read < LENGTH {
            read += peer.0.read(&mut [0; 65536]).await.unwrap();
        }
        peer.write("ok").await;
    };
    let client = async {
        let answer = exchange(&core.pool, order).await.unwrap();
        drain(&mut answer.into_body()).await
    };
    let (answer, ()) = tokio::join!(client, engine);
    assert_eq!(answer, ("ok".to_owned(), Ok(())));
}

#[tokio::test]
async fn a_spliced_body_arrives_joined() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let body = Bytes::from_static(br#"{"model":"alias","stream":false}"#);
    let head = crate::openai::routing_fields::peek(&body).unwrap();
    let mut order = core.exchange_args(false, &observer);
    order.request.body = crate::openai::routing_fields::splice(&body, &head.model_range, "org/served").into();
    let engine = async {
        let mut peer = engine.accept().await;
        let request = peer.request().await;
        peer.write("HTTP/1.1 204 x\r\n\r\n").await;
        request
    };
    let (answer, request) = tokio::join!(exchange(&core.pool, order), engine);
    assert_eq!(answer.unwrap().status(), 204);
    assert!(request.contains("content-length: 37\r\n"), "{request}");
    assert!(request.ends_with(r#"{"model":"org/served","stream":false}"#), "{request}");
}

#[tokio::test]
async fn a_client_that_does_not_read_stops_its_engine() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let engine = async {
        let mut peer = engine.accept().await;
        peer.request().await;
        peer.write("HTTP/1.1 200 OK\r\n\r\n").await;
        peer
    };
    let (answer, mut peer) = tokio::join!(core.send(false, &observer), engine);
    let body = answer.unwrap().into_body();
    let mut written = 0_usize;
    let flood = async {
        while written < 256 << 20 {
            written += peer.0.write(&[0; 65536]).await.unwrap();
        }
    };
    assert!(
        timeout(Duration::from_millis(300), flood).await.is_err(),
        "{written} bytes were taken from nobody"
    );
    assert_eq!(observer.0.borrow().bytes, 0);
    drop(body);
}

#[tokio::test]
async fn a_stream_whose_client_keeps_up_is_read_into_the_same_memory_again_and_again() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let engine = async {
        let mut peer = engine.accept().await;
        peer.request().await;
        peer.write(EVENTS).await;
        peer
    };
    let (answer, mut peer) = tokio::join!(core.send(true, &observer), engine);
    let mut body = answer.unwrap().into_body();
    let mut places = std::collections::BTreeSet::new();
    for _ in 0..200 {
        peer.chunk(&format!("data: {}\n\n", "x".repeat(300))).await;
        let frame = frame(&mut body).await.unwrap().unwrap();
        places.insert(frame.as_ptr().addr());
    }
    assert!(places.len() <= 3, "{} places for 200 frames", places.len());
}
