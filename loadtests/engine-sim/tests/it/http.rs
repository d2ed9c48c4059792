use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use tokio::time::Instant;

use crate::support::*;

#[test]
fn it_does_not_listen_before_its_start_time_has_passed() {
    let began = Instant::now();
    let engine = wait_until_listening(spawn("--start-time 200ms")).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(200));
    assert_eq!(engine.get("/health").status, 200);
    assert!(engine.counter("first_ready_unix_us") > 0);
}

#[test]
fn in_its_load_time_it_listens_and_is_not_healthy() {
    let engine = wait_until_listening(spawn("--start-time 300ms --load-time 250ms")).unwrap();
    assert_eq!(engine.get("/health").status, 503);
    assert_eq!(engine.post(CHAT, &chat("a", 1, false)).status, 503);
    let began = Instant::now();
    while engine.get("/health").status != 200 {
        assert!(began.elapsed() < TEST_TIMEOUT);
    }
    assert_eq!(engine.post(CHAT, &chat("a", 1, false)).status, 200);
}

#[test]
fn a_port_that_is_taken_is_fatal_at_once() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_engine-sim"));
    let output = command.args(["--start-time", "60s", "--port", &port.to_string()]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("address already in use"));
}

#[test]
fn a_connection_serves_many_requests_and_a_stray_crlf_between_them() {
    let engine = start("--itl 0");
    let body = chat("a", 2, false);
    let mut io = connect(engine.addr);
    let first = request("POST", CHAT, &body, "") + "\r\n";
    io.write_all((first + &request("POST", CHAT, &body, "connection: close\r\n")).as_bytes()).unwrap();
    let mut text = String::new();
    io.read_to_string(&mut text).unwrap();
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 2);
    assert_eq!((engine.counter("finished"), engine.counter("malformed")), (2, 0));
}

#[test]
fn a_chunked_body_and_one_that_waits_for_100_are_read() {
    let engine = start("--itl 0");
    let body = chat("a", 1, false);
    let (a, b) = body.split_at(9);
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: e\r\nconnection: close\r\n");
    let chunks = format!("{:x}\r\n{a}\r\n{:X};ext=1\r\n{b}\r\n0\r\nx-trailer: 1\r\n\r\n", a.len(), b.len());
    let answer = raw(engine.addr, &format!("{head}transfer-encoding: chunked\r\n\r\n{chunks}"));
    assert_eq!(answer.status, 200, "{answer:?}");
    let expect = request("POST", CHAT, &body, "expect: 100-continue\r\nconnection: close\r\n");
    assert_eq!(raw(engine.addr, &expect).interim, [100]);
}

#[test]
fn what_two_parsers_could_read_differently_is_refused_and_counted() {
    let engine = start("");
    let bad = [
        "content-length: 2\r\ntransfer-encoding: chunked\r\n",
        "content-length: 2\r\ncontent-length: 2\r\n",
        "content-length: +2\r\n",
        "transfer-encoding: gzip, chunked\r\n",
        "host: again\r\n",
        "bad header : x\r\n",
    ];
    for line in bad {
        let answer = raw(engine.addr, &format!("POST {CHAT} HTTP/1.1\r\nhost: e\r\n{line}\r\n{{}}"));
        assert_eq!(answer.status, 400, "{line}");
    }
    assert_eq!(engine.counter("malformed"), bad.len() as u64);
}

#[test]
fn an_idle_connection_is_closed_as_by_uvicorn() {
    let engine = start("--keep-alive 50ms");
    let mut io = connect(engine.addr);
    io.write_all(b"GET /health HTTP/1.1\r\nhost: e\r\n\r\n").unwrap();
    let began = Instant::now();
    assert_eq!(read(&mut io).status, 200);
    assert!(began.elapsed() >= Duration::from_millis(50));
    // The only open connection is that of the poll itself.
    engine.wait_for_counter("connections_open", 1);
}

#[test]
fn sigterm_ends_it_at_once_whatever_runs() {
    let engine = start("--itl 60s");
    let mut client: TcpStream = open_stream(engine.addr, "a", 10);
    let began = Instant::now();
    engine.kill("-TERM");
    let (status, _) = engine.exit();
    assert_eq!(status.code(), Some(0));
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).ok();
    assert!(!rest.ends_with(b"0\r\n\r\n"));
}

#[test]
fn arrivals_and_bytes_are_counted() {
    let engine = start("--itl 0");
    let body = chat("a", 1, false);
    let wire = request("POST", CHAT, &body, "connection: close\r\nx-request-id: abc\r\n");
    let before = engine.counter("now_unix_us");
    raw(engine.addr, &wire);
    let counters = engine.counters();
    assert_eq!(counters["bytes_in"], wire.len());
    assert!(counters["bytes_out"].as_u64() > Some(100));
    assert!(counters["first_request_byte_unix_us"][0].as_u64() >= Some(before));
    assert_eq!(counters["arrivals"][0]["request_id"], "abc");
}
