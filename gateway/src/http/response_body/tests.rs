//! Tests an engine's response that its client does not read to the end, and the last event of a broken response.

use std::{cell::RefCell, future::poll_fn, time::Duration};

use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rouse_config::OnDisconnect;
use rouse_net::openai::ApiSchema;
use tokio::{
    io::AsyncWrite,
    net::{TcpListener, TcpStream},
};

use super::*;
use crate::{
    http::{
        request_context::RequestEnvironment,
        testing::{CannedEngine, InProcessGateway, change_model, completion_request, sse_response},
    },
    serve::{LocalExecutor, ShutdownStage, socket::ClientSocket},
};

fn draining() -> InProcessGateway {
    InProcessGateway::start(|config| change_model(config, |model| model.on_disconnect = OnDisconnect::Drain))
}

/// Asserts that the engine continues a response that no client reads any more.
async fn goes_on(engine: &mut CannedEngine, gate: &Gate) {
    let closed = tokio::time::timeout(Duration::from_millis(300), engine.closed_at.recv()).await;
    assert!(closed.is_err() && gate.leases() == 1, "interrupted");
}

/// The response to an HTTP/2 client with room for 200 bytes of it, and its connection.
async fn narrow(
    gateway: &InProcessGateway,
) -> (hyper::body::Incoming, tokio::task::JoinHandle<hyper::Result<()>>) {
    let io = TokioIo::new(TcpStream::connect(gateway.address).await.unwrap());
    let (mut sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(200)
        .handshake::<_, Full<Bytes>>(io)
        .await
        .unwrap();
    let driven = tokio::spawn(connection);
    let request = http::Request::post(format!("http://{}/v1/completions", gateway.address));
    let body = Full::from("{\"model\":\"org/m\",\"stream\":true}");
    (sender.send_request(request.body(body).unwrap()).await.unwrap().into_body(), driven)
}

#[tokio::test]
async fn a_stream_of_http2_that_is_cut_does_not_interrupt_an_engine_that_must_not_be() {
    let gateway = draining();
    let piece = format!("{:x}\r\n{}\r\n", 1 << 20, "z".repeat(1 << 20));
    let much = sse_response("{}") + &piece.repeat(4);
    let mut engine = CannedEngine::start(much).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let (_untaken, driven) = narrow(&gateway).await;
    drop(tokio::time::timeout(Duration::from_secs(6), driven).await.expect("the connection is kept"));
    goes_on(&mut engine, &gate).await;
}

#[tokio::test]
async fn a_refusal_whose_client_left_does_not_interrupt_an_engine_that_must_not_be() {
    let mut gateway = draining();
    let mut engine = CannedEngine::start("HTTP/1.1 500 Oh\r\ncontent-length: 100\r\n\r\npart").await;
    let gate = gateway.open_gate();
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    let parked = gateway.next_parked().await;
    client.read_until(b" \n\r\n").await;
    drop(parked.answer.send(Ok(gateway.grant(engine.address, &gate))));
    engine.requests.recv().await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(client);
    goes_on(&mut engine, &gate).await;
}

#[tokio::test]
async fn a_client_of_http2_that_reads_late_still_reads_why_its_stream_broke() {
    let gateway = InProcessGateway::start(|_| {});
    let dies = sse_response(&"z".repeat(1000)).replace("200 OK\r\n", "200 OK\r\nconnection: close\r\n");
    let engine = CannedEngine::start(dies).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let (mut body, _driven) = narrow(&gateway).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    let mut read = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        read.extend_from_slice(frame.data_ref().unwrap());
    }
    let read = String::from_utf8(read).unwrap();
    assert!(read.contains("\"code\":\"engine_failed\"") && read.ends_with("}\n\n"), "{read}");
}

/// An HTTP/2 connection's socket, and a body on it whose last event was just handed over.
async fn failing(patience: Duration) -> (TcpStream, Rc<ClientSocket>, Rc<StreamingBody>) {
    let (client, socket, streaming_body) = waiting(patience).await;
    socket.set_multiplexed();
    // The event's last byte is a frame of its own.
    for _ in 0..2 {
        assert!(matches!(poll_fn(|cx| streaming_body.poll(None, cx)).await, Some(Ok(_))));
    }
    (client, socket, streaming_body)
}

/// A connection's socket, and a body on it whose request is refused when the body is polled.
async fn waiting(patience: Duration) -> (TcpStream, Rc<ClientSocket>, Rc<StreamingBody>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let socket = ClientSocket::new(listener.accept().await.unwrap().0, ShutdownStage::Serving);
    let environment = RequestEnvironment::uncounted(rouse::units::Tick(0));
    let parts = StreamingBodyContext {
        socket: Rc::clone(&socket),
        context: RequestContext::new(
            &environment,
            Instant::now(),
            http::HeaderValue::from_static("id"),
            "chat",
        ),
        on_disconnect: OnDisconnect::Abort,
        form: ApiSchema::OpenAi,
        stall_timeout: patience,
    };
    let response: EngineResponseFuture = Box::pin(std::future::ready(Err(Fault::ShuttingDown)));
    let stream = rouse_config::StreamConfig {
        grace: rouse::units::Millis(0),
        heartbeat: rouse::units::Millis::secs(9),
        responses_heartbeat_events: false,
    };
    let live = StreamingBody::waiting(response, Some((&stream, Box::new(|| None))), parts);
    (client, socket, live)
}

fn poll(live: &StreamingBody) -> ResponseFramePoll {
    live.poll(None, &mut Context::from_waker(std::task::Waker::noop()))
}

#[tokio::test]
async fn a_broken_answer_ends_when_its_last_event_is_written_and_not_when_it_is_asked_again() {
    let (_client, socket, streaming_body) = failing(Duration::from_secs(60)).await;
    for _ in 0..3 {
        assert!(poll(&streaming_body).is_pending());
    }
    let mut io = Box::pin(socket.io());
    poll_fn(|cx| io.as_mut().poll_flush(cx)).await.unwrap();
    assert!(matches!(poll(&streaming_body), Poll::Ready(Some(Err(ResponseAborted)))));
}

/// HTTP/1.1's connection asks for the next frame only when the last one is out.
#[tokio::test]
async fn a_broken_answer_over_http1_ends_when_it_is_asked_again() {
    let (_client, _socket, streaming_body) = waiting(Duration::from_secs(60)).await;
    assert!(matches!(poll(&streaming_body), Poll::Ready(Some(Ok(_)))));
    assert!(matches!(poll(&streaming_body), Poll::Ready(Some(Err(ResponseAborted)))));
}

#[tokio::test]
async fn a_broken_answer_does_not_wait_for_ever_to_be_written() {
    let (_client, _socket, streaming_body) = failing(Duration::from_millis(200)).await;
    let since = Instant::now();
    assert!(matches!(poll_fn(|cx| streaming_body.poll(None, cx)).await, Some(Err(ResponseAborted))));
    assert!(since.elapsed() >= Duration::from_millis(200));
}

/// Beside its connection, a stream has these, the engine's connection, and its key's charge.
#[test]
fn an_open_stream_is_small() {
    // With the counts, an allocation of 512 bytes.
    assert!(size_of::<StreamingBody>() <= 496, "{}", size_of::<StreamingBody>());
    // With the counts, an allocation of 256 bytes.
    assert!(size_of::<RequestContext>() <= 240, "{}", size_of::<RequestContext>());
}

#[tokio::test]
async fn the_memory_of_a_body_that_has_ended_is_free_while_its_connection_is_idle() {
    for multiplexed in [false, true] {
        let (_client, socket, streaming_body) = waiting(Duration::from_secs(60)).await;
        if multiplexed {
            socket.set_multiplexed();
            socket.unwatch_body(&streaming_body);
            socket.watch_body(&streaming_body);
        }
        assert_eq!(socket.watched_bodies(), 1, "{multiplexed}");
        drop(streaming_body);
        assert_eq!(socket.watched_bodies(), 0, "{multiplexed}");
    }
}

#[tokio::test]
async fn a_client_of_http2_that_takes_a_part_of_what_it_was_handed_does_not_stall() {
    let (_client, socket, streaming_body) = waiting(Duration::from_secs(60)).await;
    socket.set_multiplexed();
    let reply = RefCell::new(Some(ClientResponseBody::streaming(
        Rc::clone(&streaming_body),
        socket.begin_exchange(Instant::now()),
    )));
    let answer = hyper::service::service_fn(|_| {
        let response = Response::new(reply.take().expect("one request"));
        std::future::ready(Ok::<_, std::convert::Infallible>(response))
    });
    let (client, server) = tokio::io::duplex(1 << 16);
    let served = hyper::server::conn::http2::Builder::new(LocalExecutor)
        .serve_connection(TokioIo::new(server), answer);
    let reads = async {
        let (mut sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(16)
            .handshake::<_, Full<Bytes>>(TokioIo::new(client))
            .await
            .unwrap();
        let _driven = tokio::spawn(connection);
        let request = http::Request::post("http://x/").body(Full::default()).unwrap();
        let mut body = sender.send_request(request).await.unwrap().into_body();
        // The whole body was handed over at once.
        for _ in 0..10 {
            let before = Instant::now();
            body.frame().await.unwrap().unwrap();
            let moves = |since: Option<Instant>| since.is_some_and(|since| since > before);
            let counted = async {
                while !moves(streaming_body.stalled_since()) || !moves(socket.all_stalled_since()) {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(5), counted)
                .await
                .expect("it stalls while it takes bytes");
        }
    };
    let both = async {
        tokio::select! {
            _ = served => panic!("the connection ended"),
            () = reads => {}
        }
    };
    tokio::task::LocalSet::new().run_until(Box::pin(both)).await;
}
