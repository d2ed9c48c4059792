//! Tests the listeners against real sockets.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rouse::fault::DisconnectPhase;
use rouse_net::lease::Gate;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::Instant,
};

use super::ShutdownStage;
use crate::http::testing::{
    CannedEngine, InProcessGateway, PROMPT_TIMEOUT, RawHttpClient, completion_request, json_response,
    raw_request, sse_response, wait_until_no_leases,
};

mod http2;

#[tokio::test]
async fn a_client_that_leaves_while_parked_is_noticed_also_behind_a_stray_line_end() {
    let mut gateway = InProcessGateway::start(|_| {});
    for stray in ["", "\r\n", "\n", "\r\n\r\nPOST /v1"] {
        let mut client = gateway.connect().await;
        client.send(completion_request(false) + stray).await;
        let mut parked = gateway.next_parked().await;
        client.send(if stray.is_empty() { "" } else { "\r\n" }).await;
        drop(client);
        tokio::time::timeout(PROMPT_TIMEOUT, parked.answer.closed()).await.expect("still parked");
        let ended = gateway.next_ended().await;
        assert_eq!((ended.status, ended.left_in_phase), (499, Some(DisconnectPhase::Parked)), "{stray:?}");
    }
}

#[tokio::test]
async fn a_client_that_closes_its_sending_half_has_left() {
    let mut gateway = InProcessGateway::start(|_| {});
    let mut client = gateway.connect().await;
    client.send(completion_request(true) + "\r\n").await;
    let mut parked = gateway.next_parked().await;
    client.stream.shutdown().await.unwrap();
    tokio::time::timeout(PROMPT_TIMEOUT, parked.answer.closed()).await.expect("still parked");
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_closes_the_engines_connection() {
    let mut gateway = InProcessGateway::start(|_| {});
    let mut engine = CannedEngine::start(sse_response("{}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    for stray in ["", "\r\n"] {
        let mut client = gateway.connect().await;
        client.send(completion_request(true) + stray).await;
        client.read_until(b"data: {}\n\n").await;
        let left = Instant::now();
        drop(client);
        let closed = engine.closed_at.recv().await.unwrap();
        assert!(closed - left < PROMPT_TIMEOUT, "{:?}", closed - left);
        assert_eq!(gateway.next_ended().await.left_in_phase, Some(DisconnectPhase::Streaming));
        wait_until_no_leases(&gate).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_the_engine_answers_is_noticed() {
    let mut gateway = InProcessGateway::start(|_| {});
    let mut engine = CannedEngine::start("").await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let mut client = gateway.connect().await;
    client.send(completion_request(false) + "\r\n").await;
    engine.requests.recv().await.unwrap();
    drop(client);
    tokio::time::timeout(PROMPT_TIMEOUT, engine.closed_at.recv()).await.unwrap();
    assert_eq!(gateway.next_ended().await.left_in_phase, Some(DisconnectPhase::Headers));
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_its_body_is_counted_as_gone() {
    let mut gateway = InProcessGateway::start(|_| {});
    for framing in ["content-length: 100\r\n\r\n{", "transfer-encoding: chunked\r\n\r\nff\r\n{"] {
        let mut client = gateway.connect().await;
        client.send(format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\n{framing}")).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        drop(client);
        let ended = gateway.next_ended().await;
        assert_eq!((ended.status, ended.left_in_phase), (499, Some(DisconnectPhase::Connecting)));
    }
}

#[tokio::test]
async fn hundreds_of_clients_that_leave_leave_nothing_behind() {
    let mut gateway = InProcessGateway::start(|_| {});
    let mut engine = CannedEngine::start(sse_response("{}")).await;
    let gate = gateway.open_gate();
    let mut took = Vec::new();
    for round in 0..300 {
        let streams = round % 2 == 0;
        let engines = [(engine.address, &gate)];
        gateway.set_endpoints(if streams { &engines } else { &[] });
        let mut client = gateway.connect().await;
        client.send(completion_request(true) + ["", "\r\n", "x"][round % 3]).await;
        let left;
        if streams {
            client.read_until(b"data: {}\n\n").await;
            left = Instant::now();
            drop(client);
            engine.closed_at.recv().await.unwrap();
        } else {
            let mut parked = gateway.next_parked().await;
            left = Instant::now();
            drop(client);
            parked.answer.closed().await;
        }
        took.push(left.elapsed());
        assert_eq!(gateway.next_ended().await.status, 499);
    }
    took.sort_unstable();
    println!("noticed after: median {:?}, 99th percentile {:?}", took[150], took[297]);
    assert!(took[150] < Duration::from_millis(50));
    wait_until_no_leases(&gate).await;
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let mut gateway = InProcessGateway::start(|_| {});
    let engine = CannedEngine::start(json_response("{}")).await;
    let gate = gateway.open_gate();
    let mut client = gateway.connect().await;
    // More data than one read takes, in parts, while the first request is parked.
    let padded = raw_request("GET /v1/models/none", &format!("x-pad: {}\r\n", "p".repeat(6000)), "");
    client.send(completion_request(false)).await;
    let parked = gateway.next_parked().await;
    client.send(&padded).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    client.send(&padded).await;
    client.send("\r\n").await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(parked.answer.send(Ok(gateway.grant(engine.address, &gate))));
    assert_eq!(client.read_response().await.status, 200);
    assert_eq!(client.read_response().await.status, 404);
    assert_eq!(client.read_response().await.status, 404);
    client.send(raw_request("GET /healthz", "", "")).await;
    assert_eq!(client.read_response().await.body, b"ok\n");
}

#[tokio::test]
async fn a_declared_body_that_is_too_large_is_refused_before_it_is_sent() {
    let gateway = InProcessGateway::start(|_| {});
    let mut client = gateway.connect().await;
    client
        .send("POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2000000\r\n\r\n")
        .await;
    let answer = client.read_response().await;
    assert_eq!(answer.status, 413);
    assert_eq!(answer.header("connection"), Some("close"));
    let error = answer.error();
    assert_eq!(error["code"], "body_too_large");
    assert!(error["message"].as_str().unwrap().contains("limits.body"));
}

#[tokio::test]
async fn a_client_that_sends_all_before_it_reads_still_reads_its_refusal() {
    let gateway = InProcessGateway::start(|_| {});
    let megabytes = "x".repeat(12 << 20);
    let mut client = gateway.connect().await;
    client.send(raw_request("POST /v1/embeddings", "", &megabytes)).await;
    assert_eq!(client.read_response().await.status, 413);
    assert!(client.read_to_end().await.is_empty());
    let mut client = gateway.connect().await;
    client.send("POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n").await;
    for _ in 0..96 {
        client.send(format!("20000\r\n{}\r\n", "y".repeat(0x20000))).await;
    }
    assert_eq!(client.read_response().await.status, 413);
}

#[tokio::test]
async fn heads_that_are_too_large_or_broken_get_a_whole_refusal() {
    let gateway = InProcessGateway::start(|_| {});
    let large = raw_request("GET /healthz", &format!("x-large: {}\r\n", "l".repeat(40_000)), "");
    let many: String = (0..300).map(|n| format!("x-{n}: 1\r\n")).collect();
    for (request, status, code) in [
        (large, 431, "headers_too_large"),
        (raw_request("GET /healthz", &many, ""), 431, "headers_too_large"),
        ("nonsense\r\n\r\n".into(), 400, "invalid_request"),
        ("GET / HTTP/1.1\r\nbad header\r\n\r\n".into(), 400, "invalid_request"),
    ] {
        let mut client = gateway.connect().await;
        client.send(&request).await;
        let answer = client.read_response().await;
        assert_eq!(answer.status, status);
        assert_eq!(answer.error()["code"], code);
        assert_eq!(answer.header("x-should-retry"), Some("false"));
        assert!(answer.header("x-request-id").is_some());
        assert!(client.read_to_end().await.is_empty());
    }
}

#[tokio::test]
async fn a_head_in_dribs_is_timed_out_and_silence_is_closed() {
    let gateway = InProcessGateway::start(|_| {});
    let begun = Instant::now();
    let mut slow = gateway.connect().await;
    slow.send("GET /healthz HT").await;
    let mut silent = gateway.connect().await;
    let answer = slow.read_response().await;
    assert_eq!((answer.status, answer.error()["code"].as_str().unwrap()), (408, "request_timeout"));
    assert!(silent.read_to_end().await.is_empty());
    assert!(begun.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn a_body_in_dribs_is_timed_out() {
    let mut gateway = InProcessGateway::start(|_| {});
    let mut client = gateway.connect().await;
    client.send("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{").await;
    let answer = client.read_response().await;
    assert_eq!((answer.status, answer.error()["code"].as_str().unwrap()), (408, "request_timeout"));
    assert_eq!(gateway.next_ended().await.code, Some("request_timeout"));
}

#[tokio::test]
async fn an_idle_connection_is_kept_for_its_time_and_then_closed() {
    let gateway = InProcessGateway::start(|_| {});
    let mut client = gateway.connect().await;
    client.send(raw_request("GET /healthz", "", "")).await;
    assert_eq!(client.read_response().await.status, 200);
    // Longer than a head may take.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    let begun = Instant::now();
    client.send(raw_request("GET /healthz", "", "")).await;
    assert_eq!(client.read_response().await.status, 200);
    assert!(client.read_to_end().await.is_empty());
    assert!((Duration::from_millis(1500)..Duration::from_secs(5)).contains(&begun.elapsed()));
}

/// An engine whose response exceeds any socket's buffers.
async fn endless(gateway: &InProcessGateway) -> (CannedEngine, Arc<Gate>) {
    let chunk = "z".repeat(1 << 20);
    let mut endless =
        "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
    for _ in 0..64 {
        endless += &format!("{:x}\r\n{chunk}\r\n", chunk.len());
    }
    let engine = CannedEngine::start(endless).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    (engine, gate)
}

/// A client that reads none of an endless response.
async fn stall(gateway: &InProcessGateway) -> (CannedEngine, Arc<Gate>, RawHttpClient) {
    let (mut engine, gate) = endless(gateway).await;
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    engine.requests.recv().await.unwrap();
    (engine, gate, client)
}

#[tokio::test]
async fn a_stream_of_http2_that_is_not_taken_is_cut_and_the_others_go_on() {
    let gateway = InProcessGateway::start(|_| {});
    let (mut engine, gate) = endless(&gateway).await;
    let io = TokioIo::new(TcpStream::connect(gateway.address).await.unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), io).await.unwrap();
    let driven = tokio::spawn(connection);
    let stalled = http::Request::post(format!("http://{}/v1/completions", gateway.address));
    let body = Full::from("{\"model\":\"org/m\",\"stream\":true}");
    let stalled = sender.send_request(stalled.body(body).unwrap()).await.unwrap();
    let closed = tokio::time::timeout(Duration::from_secs(6), engine.closed_at.recv()).await;
    closed.expect("the engine still sends");
    wait_until_no_leases(&gate).await;
    let other = http::Request::get(format!("http://{}/healthz", gateway.address));
    let other = sender.send_request(other.body(Full::default()).unwrap()).await.unwrap();
    assert_eq!(other.status(), 200);
    assert!(stalled.into_body().collect().await.is_err(), "half an answer passed for a whole one");
    driven.abort();
}

#[tokio::test]
async fn a_connection_of_http2_whose_streams_get_no_window_is_ended() {
    let gateway = InProcessGateway::start(|_| {});
    let (mut engine, gate) = endless(&gateway).await;
    let io = TokioIo::new(TcpStream::connect(gateway.address).await.unwrap());
    let (mut sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(0)
        .handshake::<_, Full<Bytes>>(io)
        .await
        .unwrap();
    let driven = tokio::spawn(connection);
    let request = http::Request::get(format!("http://{}/healthz", gateway.address));
    let _text = sender.send_request(request.body(Full::default()).unwrap()).await.unwrap();
    let request = http::Request::post(format!("http://{}/v1/completions", gateway.address));
    let body = Full::from("{\"model\":\"org/m\",\"stream\":true}");
    let _stream = sender.send_request(request.body(body).unwrap()).await.unwrap();
    tokio::time::timeout(Duration::from_secs(6), engine.closed_at.recv())
        .await
        .expect("the engine still sends");
    wait_until_no_leases(&gate).await;
    drop(tokio::time::timeout(Duration::from_secs(6), driven).await.expect("the connection is kept"));
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_cut() {
    let mut gateway = InProcessGateway::start(|_| {});
    let (mut engine, gate, _client) = stall(&gateway).await;
    let closed = tokio::time::timeout(Duration::from_secs(6), engine.closed_at.recv()).await;
    closed.expect("the engine still sends");
    wait_until_no_leases(&gate).await;
    let ended = gateway.next_ended().await;
    assert_eq!((ended.status, ended.code, ended.left_in_phase), (200, Some("client_stalled"), None));
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_cut_sooner_when_others_wait_for_its_engine() {
    let gateway =
        InProcessGateway::start(|config| config.limits.client_stall = rouse::units::Millis::secs(60));
    let (mut engine, gate, _client) = stall(&gateway).await;
    gate.close();
    let closed = tokio::time::timeout(Duration::from_secs(9), engine.closed_at.recv()).await;
    closed.expect("the engine still sends");
    wait_until_no_leases(&gate).await;
}

#[tokio::test]
async fn a_drain_finishes_what_runs_and_closes_what_does_not() {
    let mut gateway =
        InProcessGateway::start(|config| config.limits.connection_idle = rouse::units::Millis::secs(60));
    let engine = CannedEngine::start(json_response("{}")).await;
    let gate = gateway.open_gate();
    let mut idle = gateway.connect().await;
    idle.send(raw_request("GET /readyz", "", "")).await;
    assert_eq!(idle.read_response().await.status, 200);
    let mut busy = gateway.connect().await;
    busy.send(completion_request(false)).await;
    let parked = gateway.next_parked().await;
    gateway.stage.send_replace(ShutdownStage::Draining);
    assert!(idle.read_to_end().await.is_empty());
    assert!(TcpStream::connect(gateway.address).await.is_err());
    drop(parked.answer.send(Ok(gateway.grant(engine.address, &gate))));
    let answer = busy.read_response().await;
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    tokio::time::timeout(Duration::from_secs(2), &mut gateway.run).await.unwrap().unwrap();
}

/// A silent close could hit a request that is on its way.
#[tokio::test]
async fn who_keeps_a_connection_is_answered_while_the_gateway_drains_and_told_that_it_ends() {
    let mut gateway =
        InProcessGateway::start(|config| config.limits.connection_idle = rouse::units::Millis::secs(60));
    let mut client = gateway.connect().await;
    client.send(raw_request("GET /healthz", "", "")).await;
    assert_eq!(client.read_response().await.header("connection"), None);
    gateway.stage.send_replace(ShutdownStage::Draining);
    // The listener closes after that.
    while TcpStream::connect(gateway.address).await.is_ok() {}
    client.send(raw_request("GET /healthz", "", "")).await;
    let answer = client.read_response().await;
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    assert!(client.read_to_end().await.is_empty());
    tokio::time::timeout(Duration::from_secs(2), &mut gateway.run).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_drain_is_held_up_neither_by_silence_nor_by_http2() {
    let mut gateway =
        InProcessGateway::start(|config| config.limits.header_read = rouse::units::Millis::secs(60));
    let _silent = gateway.connect().await;
    let io = TokioIo::new(TcpStream::connect(gateway.address).await.unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), io).await.unwrap();
    let driven = tokio::spawn(connection);
    let request = http::Request::get(format!("http://{}/healthz", gateway.address));
    let response = sender.send_request(request.body(Full::default()).unwrap()).await.unwrap();
    assert_eq!(response.status(), 200);
    gateway.stage.send_replace(ShutdownStage::Draining);
    tokio::time::timeout(Duration::from_secs(4), &mut gateway.run).await.unwrap().unwrap();
    driven.await.unwrap().unwrap();
}

#[tokio::test]
async fn the_end_is_not_held_up_by_a_stream() {
    let mut gateway = InProcessGateway::start(|_| {});
    let engine = CannedEngine::start(sse_response("{}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    client.read_until(b"data: {}\n\n").await;
    gateway.stage.send_replace(ShutdownStage::Terminating);
    gate.close();
    gate.revoke(rouse::fault::Fault::ShuttingDown);
    let rest = String::from_utf8(client.read_to_end().await).unwrap();
    assert!(rest.contains("\"code\":\"shutting_down\""), "{rest}");
    assert!(!rest.contains("[DONE]") && !rest.ends_with("0\r\n\r\n"), "{rest}");
    tokio::time::timeout(Duration::from_secs(4), &mut gateway.run).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_address_may_not_hold_every_connection() {
    let gateway = InProcessGateway::start(|config| config.limits.connections_per_address = 2);
    let mut first = gateway.connect().await;
    first.send(raw_request("GET /healthz", "", "")).await;
    assert_eq!(first.read_response().await.status, 200);
    let _second = gateway.connect().await;
    let mut third = gateway.connect().await;
    let refused = third.read_response().await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert_eq!(refused.error()["code"], "queue_full");
    assert!(third.read_to_end().await.is_empty());
    drop(first);
    // The permit is released when the gateway has seen the connection's end.
    let back = async {
        loop {
            let mut again = gateway.connect().await;
            let sent = again
                .stream
                .write_all(raw_request("GET /healthz", "connection: close\r\n", "").as_bytes())
                .await;
            if sent.is_ok() && again.read_to_end().await.starts_with(b"HTTP/1.1 200") {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(3), back).await.expect("no place came back");
}
