//! SIGTERM, with and without a hold.

use std::{net::TcpStream, time::Duration};

use nix::sys::signal::Signal;
use tokio::time::Instant;

use crate::support::{
    StubBuilder, StubProcess, TEST_TIMEOUT, TestExchange,
    client::chat,
    engine::{SimEngineProcess, sim},
    stub_before, until, within,
};

const SAID: &str = r#"{"epoch":1,"generation":1}"#;

fn held(engine: &SimEngineProcess, hold: &str) -> StubProcess {
    let stub = stub_before(engine.address, &["--epoch-gate", hold]);
    assert_eq!(stub.spi().send("DELETE", "/v1/gate?epoch=1&generation=1", "").status, 200);
    stub
}

#[test]
fn it_drains_and_stays_until_its_engine_is_put_away_and_it_is_released() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = held(&engine, "--hold=60s");
    let stream = stub.relay().stream(30);
    stub.signal(Signal::SIGTERM);
    stub.until_logged(&["waiting for the release order"]);
    let refused = stub.relay().post("/v1/completions", "{}");
    assert_eq!((refused.status, refused.header("x-rouse-gated")), (503, "1"));
    let spi = stub.spi();
    let opened = spi.send("DELETE", "/v1/gate?epoch=1&generation=1", "");
    assert_eq!((opened.status, &opened.json()["reason"]), (409, &"the stub is shutting down".into()));
    assert!(stream.all().contains("[DONE]"), "what was under way ends by itself");
    until("it is drained", || stub.leases() == 0);
    assert_eq!(spi.post("/v1/engine/sleep", SAID).status, 200);
    assert!(stub.is_running());
    assert_eq!(spi.post("/v1/release", r#"{"epoch":0}"#).status, 409);
    assert_eq!(spi.post("/v1/release", r#"{"epoch":1}"#).status, 200);
    assert_eq!(stub.wait_exit().code(), Some(0));
}

#[test]
fn a_release_waits_for_the_drain_and_may_come_before_the_signal() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = held(&engine, "--hold=60s");
    let stream = stub.relay().stream(40);
    assert_eq!(stub.spi().post("/v1/release", r#"{"epoch":1}"#).status, 200);
    stub.signal(Signal::SIGTERM);
    assert!(stream.all().contains("[DONE]"));
    assert_eq!(stub.wait_exit().code(), Some(0));
}

#[test]
fn nobody_who_opens_the_gate_again_has_released_it() {
    let engine = sim("");
    let mut stub = held(&engine, "--hold=500ms");
    let spi = stub.spi();
    assert_eq!(spi.post("/v1/release", r#"{"epoch":1}"#).status, 200);
    assert_eq!(spi.send("DELETE", "/v1/gate?epoch=1&generation=1", "").status, 200);
    let began = Instant::now();
    stub.signal(Signal::SIGTERM);
    assert_eq!(stub.wait_exit().code(), Some(0));
    assert!(began.elapsed() >= Duration::from_millis(500));
    stub.until_logged(&["hold timed out"]);
}

#[test]
fn at_the_end_of_the_hold_what_runs_is_cut_with_an_error() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = held(&engine, "--hold=400ms");
    let stream = stub.relay().stream(100_000);
    stub.signal(Signal::SIGTERM);
    let text = stream.all();
    assert!(text.contains("turn_over") && !text.contains("[DONE]"), "{text}");
    assert_eq!(stub.wait_exit().code(), Some(0));
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let engine = sim("--ttft 1ms --itl 20ms");
    for flags in [&["--epoch-gate", "--hold=60s"][..], &["--shutdown=60s"]] {
        let mut stub = stub_before(engine.address, flags);
        stub.spi().send("DELETE", "/v1/gate?epoch=1&generation=1", "");
        let _stream = stub.relay().stream(100_000);
        let relay = stub.relay();
        stub.signal(Signal::SIGTERM);
        // Two signals that arrive before the first is handled count as one.
        until("it stops taking requests", || match flags.len() {
            1 => TcpStream::connect(relay.address).is_err(),
            _ => relay.post("/v1/chat/completions", &chat(1)).status == 503,
        });
        stub.signal(Signal::SIGTERM);
        let began = Instant::now();
        assert_eq!(stub.wait_exit().code(), Some(0));
        assert!(began.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn without_the_hold_requests_are_finished_and_no_others_accepted() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = stub_before(engine.address, &[]);
    let relay = stub.relay();
    let (stream, _idle) = (relay.stream(40), relay.open(""));
    stub.signal(Signal::SIGTERM);
    until("nobody is accepted", || TcpStream::connect(relay.address).is_err());
    assert!(stream.all().contains("[DONE]"));
    assert_eq!(stub.wait_exit().code(), Some(0));
}

#[test]
fn without_the_hold_what_takes_too_long_is_cut_off() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = stub_before(engine.address, &["--shutdown=300ms"]);
    let stream = stub.relay().stream(100_000);
    stub.signal(Signal::SIGINT);
    assert!(!stream.all().contains("[DONE]"));
    assert_eq!(stub.wait_exit().code(), Some(0));
}

fn close(stub: &StubProcess, more: &str) {
    let order = format!(r#"{{"epoch":1,"generation":1{more}}}"#);
    let answer = stub.spi().post("/v1/gate", &order);
    assert_eq!(answer.status, 202, "{}", answer.text());
}

/// Asserts that the stream was cut, with an error in it.
fn is_cut(stream: TestExchange) {
    let text = stream.all();
    assert!(text.contains("turn_over") && !text.contains("[DONE]"), "{text}");
}

fn release(mut stub: StubProcess) {
    assert_eq!(stub.spi().post("/v1/release", r#"{"epoch":1}"#).status, 200);
    assert_eq!(stub.wait_exit().code(), Some(0));
    assert!(!stub.has_logged(&["hold timed out"]));
}

#[test]
fn a_drain_that_is_to_cut_keeps_its_deadline_through_the_signal() {
    let engine = sim("--ttft 1ms --itl 20ms");
    // Longer than the test waits.
    let mut stub = held(&engine, "--hold=1h");
    let stream = stub.relay().stream(100_000);
    close(&stub, r#","drainDeadline":500,"onDeadline":"cut""#);
    stub.signal(Signal::SIGTERM);
    stub.until_logged(&["waiting for the release order"]);
    is_cut(stream);
    until("it is drained", || stub.gate()["cut"] == 1);
    assert!(stub.is_running(), "to be drained is not to be released");
    release(stub);
}

#[test]
fn what_a_drain_was_to_keep_is_kept_through_the_signal() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let stub = held(&engine, "--hold=1h");
    let stream = stub.relay().stream(60);
    close(&stub, r#","drainDeadline":300"#);
    stub.signal(Signal::SIGTERM);
    stub.until_logged(&["waiting for the release order"]);
    let text = stream.all();
    assert!(text.contains("[DONE]") && !text.contains("turn_over"), "{text}");
    until("it is drained", || stub.gate()["cut"] == 0);
    release(stub);
}

#[test]
fn what_a_drain_has_kept_beyond_its_deadline_is_cut_at_the_end_of_the_hold() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = held(&engine, "--hold=400ms");
    let stream = stub.relay().stream(100_000);
    let kept = stub.spi().post("/v1/gate?wait=true", r#"{"epoch":1,"generation":1,"drainDeadline":0}"#);
    assert_eq!((kept.status, &kept.json()["leases"]), (200, &1.into()));
    stub.signal(Signal::SIGTERM);
    is_cut(stream);
    assert_eq!(stub.wait_exit().code(), Some(0));
    stub.until_logged(&["hold timed out"]);
}

#[test]
fn who_waits_for_a_drain_is_answered_though_the_process_ends() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let wait = |stub: &StubProcess| {
        let spi = stub.spi();
        let waits = spi.open(spi.request("POST", "/v1/gate?wait=true", "Connection: close\r\n", SAID));
        until("it drains", || stub.gate()["gated"] == true);
        waits
    };
    // A drain that ends by itself during the hold.
    let mut stub = held(&engine, "--hold=1h");
    let stream = stub.relay().stream(40);
    let waits = wait(&stub);
    stub.signal(Signal::SIGTERM);
    let drained = waits.rest();
    assert_eq!(
        (drained.status, &drained.json()["leases"], &drained.json()["cut"]),
        (200, &0.into(), &0.into())
    );
    assert!(stream.all().contains("[DONE]") && stub.is_running());
    release(stub);
    // A drain that the end of the hold cuts.
    let mut stub = held(&engine, "--hold=300ms");
    let stream = stub.relay().stream(100_000);
    let waits = wait(&stub);
    stub.signal(Signal::SIGTERM);
    let cut = waits.rest();
    assert_eq!((cut.status, &cut.json()["leases"], &cut.json()["cut"]), (200, &0.into(), &1.into()));
    is_cut(stream);
    assert_eq!(stub.wait_exit().code(), Some(0));
}

#[test]
fn an_order_after_the_signal_hastens_the_end_and_puts_it_off_in_no_way() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = held(&engine, "--hold=1h");
    let mut stream = stub.relay().stream(100_000);
    stub.signal(Signal::SIGTERM);
    stub.until_logged(&["waiting for the release order"]);
    for more in [r#","drainDeadline":7200000,"onDeadline":"cut""#, r#","drainDeadline":0"#, ""] {
        close(&stub, more);
        let left = stub.gate()["deadline"].as_u64().unwrap();
        assert!(left > 0 && left <= 3_600_000, "{more}: {left} ms are left");
    }
    let seen = stream.received.len();
    while stream.received.len() == seen {
        assert!(stream.more() && !stream.has("turn_over"));
    }
    close(&stub, r#","drainDeadline":0,"onDeadline":"cut""#);
    is_cut(stream);
    assert!(stub.is_running());
    release(stub);
}

#[test]
fn a_drain_that_is_over_when_the_signal_comes_leaves_nothing_but_the_release_to_wait_for() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let stub = held(&engine, "--hold=1h");
    let stream = stub.relay().stream(100_000);
    let order = r#"{"epoch":1,"generation":1,"drainDeadline":0,"onDeadline":"cut"}"#;
    let over = stub.spi().post("/v1/gate?wait=true", order).json();
    is_cut(stream);
    stub.signal(Signal::SIGTERM);
    stub.until_logged(&["waiting for the release order"]);
    assert_eq!(stub.gate(), over);
    release(stub);
}

#[test]
fn without_the_hold_a_drain_keeps_its_deadline_too() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = stub_before(engine.address, &["--shutdown=1h"]);
    let relay = stub.relay();
    let stream = relay.stream(100_000);
    close(&stub, r#","drainDeadline":500,"onDeadline":"cut""#);
    stub.signal(Signal::SIGTERM);
    until("nobody is accepted", || TcpStream::connect(relay.address).is_err());
    is_cut(stream);
    assert_eq!(stub.wait_exit().code(), Some(0));
}

#[test]
fn the_answer_that_is_being_given_is_waited_for() {
    let mut stub = StubBuilder::new().start();
    let head = "POST /v1/set-log?startPos=0 HTTP/1.1\r\nhost: stub\r\nconnection: close\r\ncontent-length: 6\r\n\r\n";
    let mut open = stub.spi().open(format!("{head}one"));
    within("half of it is there", Duration::from_secs(5), || stub.output() == "one");
    stub.signal(Signal::SIGTERM);
    open.write("two");
    while open.try_more().unwrap() {}
    assert!(open.text().starts_with("HTTP/1.1 200 "), "{}", open.text());
    assert_eq!(stub.output(), "onetwo");
    assert_eq!(stub.wait_exit_within(Duration::from_secs(10)).code(), Some(0));
}

/// A request whose body of ten bytes never arrives.
const LATE: &str = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n";

#[test]
fn a_body_that_never_comes_is_not_waited_for_without_end() {
    let engine = sim("");
    let stub = stub_before(engine.address, &["--body-timeout=200ms"]);
    let answer = stub.relay().open(LATE).rest();
    assert_eq!(answer.status, 408, "{}", answer.text());
    assert_eq!(answer.json()["error"]["code"], "request_timeout");
    assert_eq!((answer.header("connection"), stub.leases()), ("close", 0));
}

#[test]
fn a_body_that_never_comes_holds_up_no_end() {
    let engine = sim("");
    let mut stub = stub_before(engine.address, &[]);
    let late = stub.relay().open(LATE);
    until("it is served", || stub.get("debug", "/debug/state").json()["connections"] == 1);
    stub.signal(Signal::SIGTERM);
    assert!(late.all().starts_with("HTTP/1.1 408"), "long before the minute that bodies have else");
    assert_eq!(stub.wait_exit().code(), Some(0));
}

#[test]
fn so_many_clients_are_connected_and_the_next_when_one_has_left() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let stub = stub_before(engine.address, &["--max-connections=1"]);
    let relay = stub.relay();
    let first = relay.stream(100_000);
    let mut second = relay.open(relay.request("POST", "/v1/chat/completions", "", &chat(1)));
    second.socket().set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(second.try_more().is_err(), "two are served");
    drop(first);
    second.socket().set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    assert!(second.try_more().unwrap());
}

#[test]
fn a_body_that_is_half_there_at_the_signal_is_read_and_answered() {
    let engine = sim("--ttft 1ms --itl 1ms");
    let mut stub = stub_before(engine.address, &[]);
    let relay = stub.relay();
    // No `Connection: close`: the stub must end the connection.
    let request = relay.request("POST", "/v1/chat/completions", "", &chat(1));
    let (first, rest) = request.split_at(request.len() - 20);
    let mut open = relay.open(first);
    until("it is served", || stub.get("debug", "/debug/state").json()["connections"] == 1);
    stub.signal(Signal::SIGTERM);
    until("nobody is accepted", || TcpStream::connect(relay.address).is_err());
    open.write(rest);
    let answer = open.rest();
    assert_eq!((answer.status, answer.header("connection")), (200, "close"), "{}", answer.text());
    assert!(answer.complete && answer.text().contains("[DONE]"), "{}", answer.text());
    assert_eq!(stub.wait_exit().code(), Some(0));
}

#[test]
fn every_request_that_waits_for_a_place_at_the_signal_is_answered() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = stub_before(engine.address, &["--max-connections=1"]);
    let relay = stub.relay();
    let first = relay.stream(40);
    let request = relay.request("POST", "/v1/chat/completions", "", &chat(2));
    let waiting: Vec<TestExchange> = (0..30).map(|_| relay.open(&request)).collect();
    stub.signal(Signal::SIGTERM);
    for open in waiting {
        let answer = open.rest();
        assert_eq!((answer.status, answer.header("connection")), (200, "close"), "{}", answer.text());
        assert!(answer.complete && answer.text().contains("[DONE]"), "{}", answer.text());
    }
    assert!(first.all().contains("[DONE]"));
    assert_eq!(stub.wait_exit().code(), Some(0));
}
