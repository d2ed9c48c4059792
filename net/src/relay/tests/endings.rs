//! Exchanges that fail, and how the client can tell.

use std::{io, pin::Pin};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::*;
use rouse::fault::{ExchangeTimeout, FailureCause};

fn died() -> Fault {
    Fault::EngineFailed { model: "m".into(), cause: FailureCause::ConnectionBroken, wait: None }
}

fn closed(begun: bool) -> Fault {
    Fault::EngineClosedConnection { model: "m".into(), may_have_started: begun }
}

fn turn_over() -> Fault {
    Fault::TurnEnded { model: "m".into() }
}

fn event(fault: &Fault) -> String {
    String::from_utf8(crate::openai::error::event_after(fault, ApiSchema::OpenAi, 0).to_vec()).unwrap()
}

/// A response whose body has begun with `script`, and its engine.
async fn begun(
    core: &Core,
    engine: &ListeningEngine,
    observer: &RecordingObserver,
    script: &str,
) -> (RelayBody<RecordingObserver>, Peer) {
    let engine = async {
        let mut peer = engine.accept().await;
        peer.request().await;
        peer.write(script).await;
        peer
    };
    let (answer, peer) = tokio::join!(core.send(true, observer), engine);
    (answer.unwrap().into_body(), peer)
}

/// The ways to inspect a stream.
const INSPECTIONS: [ResponseInspection; 2] = [ResponseInspection::Events, ResponseInspection::StreamEnd];

#[tokio::test]
async fn a_stream_that_ends_by_closing_is_whole_only_with_its_last_event() {
    let until_close = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    let error = format!("data: 1\n\ndata: {{\"error\":{{\"message\":\"{}\"}}}}\n\n", "x".repeat(200));
    for (text, whole) in [
        ("data: 1\n\ndata: [DONE]\n\n", true),
        ("data: {\"error\":{}}\n\n", true),
        (&error, true),
        ("event: error\ndata: {}\n\n", true),
        ("event: transcript.text.done\ndata: {}\n\n", true),
        ("", false),
        (": a comment\n\n", false),
        ("data: 1\n\n", false),
        ("data: {\"half", false),
        ("data: {\"error\":{\"half", false),
    ] {
        for inspection in INSPECTIONS {
            let engine = ListeningEngine::start().await;
            let core = Core { inspection, ..Core::new(engine.address()) };
            let observer = RecordingObserver::default();
            let (mut body, peer) = begun(&core, &engine, &observer, &format!("{until_close}{text}")).await;
            drop(peer);
            let (got, end) = drain(&mut body).await;
            assert_eq!(end.is_ok(), whole, "{text:?} {inspection:?}");
            assert_eq!(observer.ends() == [ExchangeOutcome::Complete], whole, "{text:?} {inspection:?}");
            assert_eq!(got.ends_with(&event(&died())), !whole, "{got:?} {inspection:?}");
            assert!(got.starts_with(text) && (got.len() == text.len() || !whole) && core.is_unused());
        }
    }
}

#[tokio::test]
async fn an_engine_that_dies_mid_stream_leaves_an_error_event_and_an_unclean_end() {
    for text in ["data: 1\n\n", "data: 1\n\ndata: {\"half", "data: 1\n", ""] {
        let engine = ListeningEngine::start().await;
        let core = Core::new(engine.address());
        let observer = RecordingObserver::default();
        let (mut body, mut peer) = begun(&core, &engine, &observer, EVENTS).await;
        if !text.is_empty() {
            peer.chunk(text).await;
        }
        // Cut inside the framing of the next chunk.
        peer.write("5\r\nab").await;
        drop(peer);
        let (got, end) = drain(&mut body).await;
        let expected = format!("{text}ab\n\n{}", event(&died()));
        assert_eq!(got, expected, "{text:?}");
        assert!(!got.contains("[DONE]"));
        assert_eq!(end, Err(died()));
        assert_eq!(observer.ends(), [ExchangeOutcome::Failed(died())]);
        assert!(core.is_unused() && core.pool.is_empty());
    }
}

/// The engine's connections end before its exit is detected.
#[tokio::test]
async fn a_stream_whose_engine_died_says_so_and_not_that_a_connection_broke() {
    let engine = ListeningEngine::start().await;
    let mut core = Core::new(engine.address());
    core.timeouts.exit_wait = LONG.into();
    let observer = RecordingObserver::default();
    let (mut body, mut peer) = begun(&core, &engine, &observer, EVENTS).await;
    peer.chunk("data: 1\n\n").await;
    frame(&mut body).await.unwrap().unwrap();
    drop(peer);
    assert!(timeout(Duration::from_millis(100), body.frame()).await.is_err(), "it has said what it knows");
    let killed = Fault::EngineFailed { model: "m".into(), cause: FailureCause::Killed(9), wait: None };
    core.gate.close();
    core.gate.revoke(killed.clone());
    assert_eq!(drain(&mut body).await, (event(&killed), Err(killed.clone())));
    assert_eq!(observer.ends(), [ExchangeOutcome::Failed(killed)]);
    assert!(core.is_unused());
}

#[tokio::test]
async fn at_a_border_the_error_event_follows_directly() {
    for text in ["data: 1\n\n", "data: 1\r\n\r\n", "data: 1\r\r"] {
        let engine = ListeningEngine::start().await;
        let core = Core::new(engine.address());
        let observer = RecordingObserver::default();
        let (mut body, mut peer) = begun(&core, &engine, &observer, EVENTS).await;
        peer.chunk(text).await;
        drop(peer);
        let (got, end) = drain(&mut body).await;
        assert_eq!(got, format!("{text}{}", event(&died())));
        assert_eq!(end, Err(died()));
    }
}

#[tokio::test]
async fn after_done_or_the_engines_own_error_nothing_is_added() {
    for text in ["data: [DONE]\n\n", "data: {\"error\":{}}\n\n", "event: error\ndata: {}\n\n"] {
        for inspection in INSPECTIONS {
            let engine = ListeningEngine::start().await;
            let core = Core { inspection, ..Core::new(engine.address()) };
            let observer = RecordingObserver::default();
            let (mut body, mut peer) = begun(&core, &engine, &observer, EVENTS).await;
            peer.chunk(text).await;
            drop(peer);
            assert_eq!(drain(&mut body).await, (text.to_owned(), Err(died())), "{inspection:?}");
        }
    }
}

#[tokio::test]
async fn into_a_body_that_is_no_plain_event_stream_nothing_is_written() {
    for head in [
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n",
    ] {
        let engine = ListeningEngine::start().await;
        let core = Core::new(engine.address());
        let observer = RecordingObserver::default();
        let (mut body, mut peer) = begun(&core, &engine, &observer, head).await;
        peer.chunk("data: 1\n\n").await;
        drop(peer);
        assert_eq!(drain(&mut body).await, ("data: 1\n\n".to_owned(), Err(died())), "{head}");
        assert!(core.is_unused());
    }
}

#[tokio::test]
async fn what_is_no_answer_is_a_closed_engine() {
    for script in [
        "",
        "HTTP/1.1 200 O",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        "hello\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
        "HTTP/1.1 200 OK\r\ncontent-length: +1\r\n\r\nx",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        // Detected before the head was reported.
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxx\r\n{}",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\nxx\r\n",
    ] {
        let engine = ListeningEngine::start().await;
        let core = Core::new(engine.address());
        let observer = RecordingObserver::default();
        let engine = async {
            let mut peer = engine.accept().await;
            peer.request().await;
            peer.write(script).await;
        };
        let (answer, ()) = tokio::join!(core.send(false, &observer), engine);
        let failed = answer.unwrap_err();
        // An engine that closed at once without a byte has not begun.
        let begun = !script.is_empty();
        assert_eq!(failed.fault, closed(begun), "{script:?}");
        assert_eq!((failed.reroutable, failed.begun), (false, begun), "the engine saw it");
        assert_eq!(observer.ends(), [ExchangeOutcome::Failed(closed(begun))]);
        assert!(core.is_unused());
    }
}

#[tokio::test]
async fn an_engine_that_is_not_there_costs_nothing_and_the_request_may_go_elsewhere() {
    let address = ListeningEngine::start().await.address();
    let core = Core::new(address);
    let observer = RecordingObserver::default();
    let failed = core.send(true, &observer).await.unwrap_err();
    assert_eq!(failed.fault, Fault::EngineUnreachable { model: "m".into() });
    assert!(failed.reroutable);
    assert!(core.is_unused());
}

/// A full accept queue drops new connections, so the connection is never established.
#[tokio::test]
async fn an_engine_that_lets_nobody_in_is_told_from_one_that_is_not_there() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let engine = socket.listen(1).unwrap();
    let address = engine.local_addr().unwrap();
    let mut queued = Vec::new();
    while let Ok(connected) = timeout(Duration::from_millis(100), TcpStream::connect(address)).await {
        queued.push(connected.unwrap());
    }
    let mut core = Core::new(address);
    core.timeouts.connect = Millis(60);
    let failed = core.send(true, &RecordingObserver::default()).await.unwrap_err();
    let fault =
        Fault::EngineTimeout { model: "m".into(), timeout: ExchangeTimeout::Connect, limit: Millis(60) };
    assert_eq!((failed.fault, failed.reroutable), (fault, true));
}

#[tokio::test]
async fn each_deadline_names_itself() {
    let timer = |timeout, limit| Fault::EngineTimeout { model: "m".into(), timeout, limit: Millis(limit) };
    let engine = ListeningEngine::start().await;
    let mut core = Core::new(engine.address());
    core.timeouts.first_byte = Millis(200);
    core.timeouts.non_stream = Millis(250);
    core.timeouts.idle = Millis(1500);

    // No head.
    for (stream, fault) in
        [(true, timer(ExchangeTimeout::FirstByte, 200)), (false, timer(ExchangeTimeout::NonStream, 250))]
    {
        let observer = RecordingObserver::default();
        let (answer, _peer) = tokio::join!(core.send(stream, &observer), engine.accept());
        let failed = answer.unwrap_err();
        assert_eq!((failed.fault, failed.reroutable), (fault, false));
    }
    // A head, and then no first byte.
    let observer = RecordingObserver::default();
    let (mut body, _peer) = begun(&core, &engine, &observer, EVENTS).await;
    let fault = timer(ExchangeTimeout::FirstByte, 200);
    assert_eq!(drain(&mut body).await, (event(&fault), Err(fault)));
    // Frames further apart than the first-byte limit, and then none.
    let observer = RecordingObserver::default();
    let (mut body, mut peer) = begun(&core, &engine, &observer, EVENTS).await;
    for _ in 0..3 {
        peer.chunk("data: 1\n\n").await;
        frame(&mut body).await.unwrap().unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let fault = timer(ExchangeTimeout::Idle, 1500);
    assert_eq!(drain(&mut body).await, (event(&fault), Err(fault)));
    assert!(core.is_unused());
}

#[tokio::test]
async fn revocation_ends_an_exchange_in_every_phase() {
    // While the exchange waits for the head.
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let engine_side = async {
        let mut peer = engine.accept().await;
        peer.request().await;
        core.gate.close();
        core.gate.revoke(turn_over());
        peer.expect_close().await;
    };
    let (answer, ()) = tokio::join!(core.send(true, &observer), engine_side);
    let failed = answer.unwrap_err();
    assert_eq!((failed.fault, failed.reroutable), (turn_over(), false));
    assert!(core.is_unused());

    // While it streams, with nothing in flight: an event, then an unclean end.
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let (mut body, mut peer) = begun(&core, &engine, &observer, EVENTS).await;
    peer.chunk("data: {\"hal").await;
    frame(&mut body).await.unwrap().unwrap();
    let revoke = async {
        tokio::task::yield_now().await;
        core.gate.close();
        core.gate.revoke(turn_over());
        peer.expect_close().await;
        assert!(core.is_unused(), "the lease is back before the client has read the end");
    };
    let (end, ()) = tokio::join!(drain(&mut body), revoke);
    assert_eq!(end, (format!("\n\n{}", event(&turn_over())), Err(turn_over())));
    assert_eq!(observer.ends(), [ExchangeOutcome::Failed(turn_over())]);
}

#[tokio::test]
async fn a_lease_revoked_before_the_exchange_begins_sends_nothing() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let order = core.exchange_args(true, &observer);
    core.gate.close();
    core.gate.revoke(turn_over());
    let failed = exchange(&core.pool, order).await.unwrap_err();
    assert_eq!((failed.fault, failed.reroutable), (turn_over(), true));
}

/// A server drops unwritten data when a body fails, so the event must be written before.
#[tokio::test]
async fn behind_a_real_server_the_client_reads_the_event_and_no_clean_end() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let server = async {
        let socket = listener.accept().await.unwrap().0;
        let io = hyper_util::rt::TokioIo::new(socket);
        let serve = |_| core.send(true, &observer);
        let service = hyper::service::service_fn(|request: http::Request<hyper::body::Incoming>| async {
            drop(request);
            serve(()).await.map_err(|failed| failed.fault)
        });
        assert!(hyper::server::conn::http1::Builder::new().serve_connection(io, service).await.is_err());
    };
    let engine_side = async {
        let mut peer = engine.accept().await;
        peer.request().await;
        peer.write(EVENTS).await;
        peer.chunk("data: 1\n\n").await;
    };
    let client_side = async {
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut text = String::new();
        timeout(LONG, client.read_to_string(&mut text)).await.unwrap().unwrap();
        text
    };
    let ((), (), text) = tokio::join!(server, engine_side, client_side);
    assert!(text.contains("data: 1\n\n"), "{text}");
    assert!(text.contains(event(&died()).trim()), "{text}");
    assert!(!text.contains("\r\n0\r\n"), "{text}");
}

/// A server's socket that fails a blocked write after revocation.
struct RevocableSocket(TcpStream, Arc<Gate>);

impl AsyncRead for RevocableSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, into)
    }
}

impl AsyncWrite for RevocableSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.0).poll_write(cx, bytes) {
            Poll::Pending if self.1.revoked().is_some() => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            written => written,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[tokio::test]
async fn a_client_that_reads_nothing_cannot_hold_a_revoked_lease() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let server = async {
        let socket = RevocableSocket(listener.accept().await.unwrap().0, Arc::clone(&core.gate));
        let service = hyper::service::service_fn(|request: http::Request<hyper::body::Incoming>| async {
            drop(request);
            core.send(true, &observer).await.map_err(|failed| failed.fault)
        });
        let io = hyper_util::rt::TokioIo::new(socket);
        assert!(hyper::server::conn::http1::Builder::new().serve_connection(io, service).await.is_err());
    };
    let engine_side = async {
        let mut peer = engine.accept().await;
        peer.request().await;
        peer.write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n").await;
        // Until the client side stops reading.
        while let Ok(written) = timeout(Duration::from_millis(200), peer.0.write(&[b'x'; 65536])).await {
            written.unwrap();
        }
        assert_eq!(core.gate.close(), 1);
        core.gate.revoke(turn_over());
        peer.expect_close().await;
    };
    timeout(LONG, Box::pin(async { tokio::join!(server, engine_side) })).await.unwrap();
    assert!(core.is_unused());
    assert_eq!(observer.ends().len(), 1);
    drop(client);
}
