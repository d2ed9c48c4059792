//! Tests streamed responses over HTTP/1.1: in any pieces, pipelined, to slow clients, and while the gateway drains.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

use crate::{
    http::testing::{
        InProcessGateway, PROMPT_TIMEOUT, RawHttpClient, completion_request, raw_request,
        wait_until_no_leases,
    },
    serve::ShutdownStage,
};

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ndate: today\r\nx-own: 1\r\n\
                    transfer-encoding: chunked\r\n\r\n";

/// The lines of the head that a client gets, in their order by bytes.
const CLIENT_HEAD: [&str; 8] = [
    "",
    "HTTP/1.1 200 OK",
    "cache-control: no-cache, no-transform",
    "content-type: text/event-stream",
    "date: today",
    "transfer-encoding: chunked",
    "x-accel-buffering: no",
    "x-own: 1",
];

/// Answers each request with these pieces, one write each, and reports each connection.
async fn engine(pieces: Vec<Vec<u8>>) -> (SocketAddr, mpsc::UnboundedReceiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (tell, told) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tell.send(()).unwrap_or_default();
            let pieces = pieces.clone();
            tokio::spawn(async move {
                stream.set_nodelay(true).unwrap();
                while request(&mut stream).await {
                    for piece in &pieces {
                        if stream.write_all(piece).await.is_err() {
                            return;
                        }
                        tokio::task::yield_now().await;
                    }
                }
            });
        }
    });
    (address, told)
}

/// Reads one request; all requests end with the same byte.
async fn request(stream: &mut TcpStream) -> bool {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"}") {
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return false;
        }
    }
    true
}

/// An event whose payload looks like framing.
fn event(number: usize) -> Vec<u8> {
    format!("data: {{\"n\":{number},\"x\":\"{}\"}}\n\n", "0\\r\\n5;\r0".repeat(number % 40)).into_bytes()
}

fn chunk(payload: &[u8], extension: &str) -> Vec<u8> {
    let mut out = format!("{:X}{extension}\r\n", payload.len()).into_bytes();
    out.extend_from_slice(payload);
    out.extend_from_slice(b"\r\n");
    out
}

fn answer(events: usize, extension: &str, trailers: &str) -> Vec<u8> {
    let mut out = HEAD.as_bytes().to_vec();
    (0..events).for_each(|n| out.extend(chunk(&event(n), extension)));
    out.extend(chunk(b"data: [DONE]\n\n", extension));
    out.extend_from_slice(format!("0\r\n{trailers}\r\n").as_bytes());
    out
}

fn payload(events: usize) -> Vec<u8> {
    let mut out: Vec<u8> = (0..events).flat_map(event).collect();
    out.extend_from_slice(b"data: [DONE]\n\n");
    out
}

/// Reads a whole response: its head without the request's id, and its payload. Only sizes may stand between chunks.
async fn whole(client: &mut RawHttpClient) -> (Vec<String>, Vec<u8>) {
    let head = String::from_utf8(client.read_until(b"\r\n\r\n").await).unwrap();
    let mut head: Vec<String> =
        head.lines().filter(|line| !line.contains("request-id")).map(str::to_owned).collect();
    head.sort();
    let mut body = Vec::new();
    loop {
        let size = String::from_utf8(client.read_until(b"\r\n").await).unwrap();
        let size = usize::from_str_radix(size.trim_end(), 16).unwrap();
        let mut piece = Vec::new();
        while piece.len() < size + 2 {
            piece.extend(client.read_until(b"\n").await);
        }
        assert_eq!(piece.split_off(size), b"\r\n");
        body.extend(piece);
        if size == 0 {
            return (head, body);
        }
    }
}

#[tokio::test]
async fn an_answer_is_the_same_however_its_engine_cuts_it() {
    for (extension, trailers) in [("", ""), (";a=\"b\"", "x-t: 1\r\nx-u: 2\r\n")] {
        let wire = answer(60, extension, trailers);
        for size in [1, 2, 3, 7, 64, 1000, 3000, wire.len()] {
            let (address, mut connections) = engine(wire.chunks(size).map(<[u8]>::to_vec).collect()).await;
            let gateway = InProcessGateway::start(|_| {});
            let gate = gateway.open_gate();
            gateway.set_endpoints(&[(address, &gate)]);
            let mut client = gateway.connect().await;
            for _ in 0..2 {
                client.send(completion_request(true)).await;
                let (head, body) = whole(&mut client).await;
                assert_eq!(body, payload(60), "{size}");
                assert_eq!(head, CLIENT_HEAD, "{size}");
                wait_until_no_leases(&gate).await;
            }
            connections.recv().await.unwrap();
            assert!(connections.try_recv().is_err(), "the gateway has reused its one connection");
        }
    }
}

#[tokio::test]
async fn a_hundred_streams_and_what_is_pipelined_behind_them_are_answered_on_one_connection() {
    let mut gateway = InProcessGateway::start(|_| {});
    let (address, mut connections) = engine(vec![answer(5, "", "")]).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(address, &gate)]);
    let mut client = gateway.connect().await;
    for _ in 0..100 {
        client
            .send(completion_request(true) + &raw_request("GET /healthz", "", "") + &completion_request(true))
            .await;
        assert_eq!(whole(&mut client).await.1, payload(5));
        assert_eq!(client.read_response().await.body, b"ok\n");
        assert_eq!(whole(&mut client).await.1, payload(5));
        for _ in 0..3 {
            let ended = gateway.next_ended().await;
            assert_eq!((ended.status, ended.left_in_phase, ended.code), (200, None, None));
        }
    }
    wait_until_no_leases(&gate).await;
    connections.recv().await.unwrap();
    assert!(connections.try_recv().is_err());
}

#[tokio::test]
async fn a_client_that_reads_late_slows_its_engine_and_gets_every_byte() {
    let mut gateway = InProcessGateway::start(|_| {});
    let (address, _connections) =
        engine(answer(40_000, "", "").chunks(9000).map(<[u8]>::to_vec).collect()).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(address, &gate)]);
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(gate.leases(), 1);
    client.send(raw_request("GET /healthz", "", "")).await;
    assert!(whole(&mut client).await.1 == payload(40_000), "bytes were lost");
    assert_eq!(client.read_response().await.body, b"ok\n");
    assert_eq!(gateway.next_ended().await.left_in_phase, None);
    wait_until_no_leases(&gate).await;
}

#[tokio::test]
async fn a_stream_ends_in_order_while_the_gateway_drains() {
    for close in ["", "connection: close\r\n"] {
        let gateway = InProcessGateway::start(|_| {});
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let gate = gateway.open_gate();
        gateway.set_endpoints(&[(listener.local_addr().unwrap(), &gate)]);
        let mut client = gateway.connect().await;
        client.send(completion_request(true).replace("host: x\r\n", &format!("host: x\r\n{close}"))).await;
        let (mut engine, _) = listener.accept().await.unwrap();
        assert!(request(&mut engine).await);
        engine.write_all(HEAD.as_bytes()).await.unwrap();
        engine.write_all(&chunk(b"data: 1\n\n", "")).await.unwrap();
        let head = String::from_utf8(client.read_until(b"data: 1\n\n\r\n").await).unwrap();
        assert_eq!(head.contains("connection: close\r\n"), !close.is_empty(), "{head}");
        if close.is_empty() {
            gateway.stage.send_replace(ShutdownStage::Draining);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        engine.write_all(&chunk(b"data: [DONE]\n\n", "")).await.unwrap();
        engine.write_all(b"0\r\n\r\n").await.unwrap();
        let rest =
            tokio::time::timeout(4 * PROMPT_TIMEOUT, client.read_to_end()).await.expect("it stays open");
        assert_eq!(String::from_utf8(rest).unwrap(), "E\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
        wait_until_no_leases(&gate).await;
    }
}
