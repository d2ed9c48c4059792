//! Tests an engine that responds before it has read the request, for example to refuse it. Its response arrives, and a
//! client that is still sending is not cut off.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::mpsc,
};

use rouse_testing::scripted_engine::scripted;

use crate::support::{StubTestClient, TestResponse, client::chat, engine::sim, stub_before};

const PATH: &str = "/v1/chat/completions";
const LENGTH: &str = "HTTP/1.1 413 Payload Too Large\r\nContent-Length: 9\r\n\r\ntoo large";
const CHUNKED: &str =
    "HTTP/1.1 413 Payload Too Large\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ntoo large\r\n0\r\n\r\n";
const CLOSES: &str =
    "HTTP/1.1 413 Payload Too Large\r\nConnection: close\r\nContent-Length: 9\r\n\r\ntoo large";

/// Body sizes above and below what all sockets on the way hold, each with its number of tries.
const SIZES: [(usize, usize); 2] = [(24 << 20, 3), (300 << 10, 40)];

/// An engine that reads this much of a body, responds and closes. Its unread bytes make the kernel reset the
/// connection.
fn hasty(says: &'static str, reads: usize) -> SocketAddr {
    scripted(move |mut stream, _| {
        let (mut left, mut buffer) = (reads, [0; 4096]);
        while left > 0 {
            left -= stream.read(&mut buffer).unwrap().min(left);
        }
        stream.write_all(says.as_bytes()).unwrap();
    })
}

/// An engine that responds, reads no further, and keeps the connection until its other end is dropped.
fn patient(says: &'static str) -> (SocketAddr, mpsc::Receiver<TcpStream>) {
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (tx, rx) = mpsc::channel();
    let address = scripted(move |mut stream, _| {
        stream.write_all(says.as_bytes()).unwrap();
        tx.send(stream).unwrap();
    });
    (address, rx)
}

fn request(size: usize, chunked: bool) -> Vec<u8> {
    let framing =
        if chunked { "Transfer-Encoding: chunked".into() } else { format!("Content-Length: {size}") };
    // A small body may arrive in time as a whole, and then only the client can ask to end the connection.
    let close = if size < 1 << 20 { "Connection: close\r\n" } else { "" };
    let mut request = format!("POST {PATH} HTTP/1.1\r\nHost: a\r\n{close}{framing}\r\n\r\n").into_bytes();
    let body = vec![b'x'; size];
    if !chunked {
        request.extend_from_slice(&body);
        return request;
    }
    for chunk in body.chunks(32 << 10) {
        request.extend_from_slice(format!("{:X}\r\n", chunk.len()).as_bytes());
        request.extend_from_slice(chunk);
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"0\r\n\r\n");
    request
}

/// Sends the whole request before it reads, like simple clients. The connection must not break before its end.
fn asked(relay: &StubTestClient, request: &[u8]) -> TestResponse {
    let mut open = relay.open("");
    assert!(open.try_write(request), "the client can send all of it");
    while open.try_more().expect("the connection ends, and is not reset") {}
    open.rest()
}

fn is_refused(relay: &StubTestClient) {
    for (size, times) in SIZES {
        for chunked in [false, true] {
            let request = request(size, chunked);
            for _ in 0..times {
                let answer = asked(relay, &request);
                assert_eq!(
                    (answer.status, answer.text().as_str(), answer.complete),
                    (413, "too large", true)
                );
                // Otherwise a client could reuse the connection for its next request.
                assert_eq!(answer.header("connection"), "close");
            }
        }
    }
}

#[test]
fn an_answer_that_comes_before_the_body_was_read_arrives() {
    for says in [LENGTH, CHUNKED, CLOSES] {
        for reads in [0, 100 << 10] {
            let stub = stub_before(hasty(says, reads), &[]);
            is_refused(&stub.relay());
            assert_eq!(stub.leases(), 0);
        }
    }
}

#[test]
fn an_engine_that_answers_and_listens_no_more_holds_nobody_up() {
    let (address, _kept) = patient(LENGTH);
    let stub = stub_before(address, &[]);
    is_refused(&stub.relay());
    assert_eq!(stub.leases(), 0);
}

#[test]
fn a_large_body_that_was_read_ends_no_connection() {
    let engine = sim("--fixed-ids --ttft 1ms --itl 1ms");
    let stub = stub_before(engine.address, &[]);
    let relay = stub.relay();
    for stream in ["true", "false"] {
        let body = chat(3).replace("hello", &"x".repeat(300 << 10)).replace("true", stream);
        let mut open = relay.open("");
        for times in 1..=3 {
            assert!(open.try_write(relay.request("POST", PATH, "", &body)));
            while open.text().matches("\"finish_reason\":\"length\"").count() < times {
                assert!(open.more(), "{}", open.text());
            }
        }
        assert!(!open.text().to_lowercase().contains("connection: close"), "{}", open.text());
    }
}
