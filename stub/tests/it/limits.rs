//! Limits of a client's connection: heads and bodies that stop or trickle, idle connections, and clients that do not
//! read.

use std::{io::Write as _, net::SocketAddr, sync::mpsc, time::Duration};

use rouse_testing::scripted_engine::scripted;
use tokio::time::Instant;

use crate::support::{
    TEST_TIMEOUT, TestExchange, TestResponse,
    client::chat,
    engine::{echo, sim},
    stub_before, until,
};

const PATH: &str = "/v1/chat/completions";

/// Sends this piece again and again until the stub answers, and returns the answer.
fn trickle(mut open: TestExchange, piece: &str) -> TestResponse {
    let end = Instant::now() + TEST_TIMEOUT;
    open.socket().set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    while open.try_more().is_err() {
        assert!(Instant::now() < end, "the stub never answers");
        open.try_write(piece);
    }
    open.socket().set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    open.rest()
}

/// Asserts that the stub gave up the request and closed its connection.
fn is_timed_out(answer: &TestResponse) {
    assert_eq!((answer.status, answer.header("connection")), (408, "close"), "{}", answer.text());
    assert_eq!(answer.json()["error"]["code"], "request_timeout");
}

#[test]
fn a_head_that_trickles_ends_with_408_and_its_connection_with_it() {
    let stub = stub_before(echo(), &["--head-timeout=300ms"]);
    let open = stub.relay().open(format!("POST {PATH} HTTP/1.1\r\nhost: a\r\nx-long: "));
    let answer = trickle(open, "y");
    is_timed_out(&answer);
    assert!(answer.text().contains("--head-timeout"), "{}", answer.text());
    // The same holds for a head behind another request.
    let relay = stub.relay();
    let mut second = relay.open(relay.request("POST", PATH, "", "{}"));
    assert_eq!(second.answer().status, 200);
    assert!(second.try_write("POST"));
    is_timed_out(&second.rest());
}

#[test]
fn a_connection_without_a_request_is_closed() {
    let stub = stub_before(echo(), &["--head-timeout=300ms"]);
    assert!(stub.relay().open("").closes());
}

#[test]
fn an_idle_connection_is_closed_and_a_stream_is_none() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let stub = stub_before(engine.address, &["--idle-timeout=300ms"]);
    let relay = stub.relay();
    let mut kept = relay.open(relay.request("GET", "/v1/models", "", ""));
    assert_eq!(kept.answer().status, 200);
    // The stream lasts longer than the idle connection.
    let stream = relay.stream(60);
    assert!(kept.closes());
    assert!(stream.all().contains("[DONE]"));
}

#[test]
fn a_body_that_trickles_ends_with_408_and_takes_no_lease() {
    let stub = stub_before(echo(), &["--body-timeout=300ms"]);
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n");
    is_timed_out(&trickle(stub.relay().open(head), "1\r\nx\r\n"));
    assert_eq!(stub.leases(), 0);
}

/// The engine has begun to read such a body.
#[test]
fn a_large_body_that_stops_ends_with_408_and_gives_its_lease_back() {
    let stub = stub_before(echo(), &["--body-timeout=300ms"]);
    for framing in ["content-length: 1000000", "transfer-encoding: chunked"] {
        let mut open = stub.relay().open(format!("POST {PATH} HTTP/1.1\r\nhost: a\r\n{framing}\r\n\r\n"));
        // A length of 100,000 bytes in hexadecimal digits; with a content length it is a part of the body.
        assert!(open.try_write(format!("186A0\r\n{}\r\n", "x".repeat(100_000))));
        is_timed_out(&open.rest());
        assert_eq!(stub.leases(), 0, "{framing}");
    }
}

/// Each byte ends a pause, so that only the rate gives the lease back.
#[test]
fn a_large_body_that_trickles_ends_with_408_and_gives_its_lease_back() {
    let stub = stub_before(echo(), &["--body-timeout=2s"]);
    for framing in ["content-length: 1000000", "transfer-encoding: chunked"] {
        let mut open = stub.relay().open(format!("POST {PATH} HTTP/1.1\r\nhost: a\r\n{framing}\r\n\r\n"));
        assert!(open.try_write(format!("186A0\r\n{}\r\n", "x".repeat(100_000))));
        let answer = trickle(open, "1\r\nx\r\n");
        is_timed_out(&answer);
        assert!(answer.text().contains("--body-rate"), "{}", answer.text());
        assert_eq!(stub.leases(), 0, "{framing}");
    }
}

/// An engine that streams without end, and reports when its peer takes no more.
fn endless() -> (SocketAddr, mpsc::Receiver<()>) {
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (tx, rx) = mpsc::channel();
    let address = scripted(move |mut stream, _| {
        let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
        let event = format!("data: {}\n\n", "x".repeat(0x2000 - 8));
        let chunk = format!("2000\r\n{event}\r\n");
        let mut sent = stream.write_all(head.as_bytes());
        while sent.is_ok() {
            sent = stream.write_all(chunk.as_bytes());
        }
        tx.send(()).unwrap();
    });
    (address, rx)
}

#[test]
fn a_client_that_reads_nothing_is_cut_and_one_that_reads_is_not() {
    let (engine, ended) = endless();
    let stub = stub_before(engine, &["--stall-timeout=1s", "--log-level=debug"]);
    let relay = stub.relay();
    let request = relay.request("POST", PATH, "", &chat(1));
    let began = Instant::now();
    let mut reads = relay.open(&request);
    while began.elapsed() < Duration::from_millis(2500) {
        assert!(reads.more(), "a client that reads is cut");
        reads.received.clear();
    }
    assert!(!stub.has_logged(&["the client stopped reading"]));
    drop(reads);
    ended.recv_timeout(TEST_TIMEOUT).expect("the engine hears that the first client left");
    let silent = relay.open(&request);
    ended.recv_timeout(TEST_TIMEOUT).expect("the engine is cut off");
    stub.until_logged(&["the client stopped reading"]);
    until("the lease is given back", || stub.leases() == 0);
    drop(silent);
}

#[test]
fn a_head_that_is_refused_gets_the_reason() {
    let stub = stub_before(echo(), &[]);
    let relay = stub.relay();
    let fields = "x: y\r\n".repeat(140);
    let long = format!("x: {}\r\n", "y".repeat(100 << 10));
    for (headers, status) in [("no field\r\n", 400), (&*fields, 431), (&*long, 431)] {
        let answer = relay.open(format!("GET /v1/models HTTP/1.1\r\nhost: a\r\n{headers}\r\n")).rest();
        assert_eq!((answer.status, answer.header("connection")), (status, "close"));
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
        assert!(answer.json()["error"]["message"].as_str().is_some_and(|message| !message.is_empty()));
    }
}
