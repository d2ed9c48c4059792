//! SIGTERM, with the hold and without it.

use std::time::Duration;

use tokio::time::Instant;

use crate::world::{Stub, before, client::chat, engine::sim, until};

const SAID: &str = r#"{"epoch":1,"generation":1}"#;

fn held(engine: &crate::world::engine::Sim, hold: &str) -> Stub {
    let stub = before(engine.address, &["--epoch-gate", hold]);
    assert_eq!(stub.spi().send("DELETE", "/v1/gate?epoch=1&generation=1", "").status, 200);
    stub
}

#[test]
fn it_drains_and_stays_until_its_engine_is_put_away_and_it_is_released() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = held(&engine, "--hold=60s");
    let stream = stub.relay().stream(30);
    stub.signal("-TERM");
    stub.says(&["waits to be released"]);
    let refused = stub.relay().post("/v1/completions", "{}");
    assert_eq!((refused.status, refused.header("x-rouse-gated")), (503, "1"));
    let spi = stub.spi();
    let opened = spi.send("DELETE", "/v1/gate?epoch=1&generation=1", "");
    assert_eq!((opened.status, &opened.json()["reason"]), (409, &"the stub is shutting down".into()));
    assert!(stream.all().contains("[DONE]"), "what was under way ends by itself");
    until("it is drained", || stub.leases() == 0);
    assert_eq!(spi.post("/v1/engine/sleep", SAID).status, 200);
    assert!(stub.runs());
    assert_eq!(spi.post("/v1/release", r#"{"epoch":0}"#).status, 409);
    assert_eq!(spi.post("/v1/release", r#"{"epoch":1}"#).status, 200);
    assert_eq!(stub.exits().code(), Some(0));
}

#[test]
fn a_release_waits_for_the_drain_and_may_come_before_the_signal() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = held(&engine, "--hold=60s");
    let stream = stub.relay().stream(40);
    assert_eq!(stub.spi().post("/v1/release", r#"{"epoch":1}"#).status, 200);
    stub.signal("-TERM");
    assert!(stream.all().contains("[DONE]"));
    assert_eq!(stub.exits().code(), Some(0));
}

#[test]
fn nobody_who_opens_the_gate_again_has_released_it() {
    let engine = sim("");
    let mut stub = held(&engine, "--hold=500ms");
    let spi = stub.spi();
    assert_eq!(spi.post("/v1/release", r#"{"epoch":1}"#).status, 200);
    assert_eq!(spi.send("DELETE", "/v1/gate?epoch=1&generation=1", "").status, 200);
    let began = Instant::now();
    stub.signal("-TERM");
    assert_eq!(stub.exits().code(), Some(0));
    assert!(began.elapsed() >= Duration::from_millis(500));
    stub.says(&["not released in time"]);
}

#[test]
fn at_the_end_of_the_hold_what_runs_is_cut_with_an_error() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = held(&engine, "--hold=400ms");
    let stream = stub.relay().stream(100_000);
    stub.signal("-TERM");
    let text = stream.all();
    assert!(text.contains("turn_over") && !text.contains("[DONE]"), "{text}");
    assert_eq!(stub.exits().code(), Some(0));
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let engine = sim("--ttft 1ms --itl 20ms");
    for flags in [&["--epoch-gate", "--hold=60s"][..], &["--shutdown=60s"]] {
        let mut stub = before(engine.address, flags);
        stub.spi().send("DELETE", "/v1/gate?epoch=1&generation=1", "");
        let _stream = stub.relay().stream(100_000);
        stub.signal("-TERM");
        until("it stops taking requests", || {
            flags.len() == 1 || stub.relay().post("/v1/chat/completions", &chat(1)).status == 503
        });
        stub.signal("-TERM");
        let began = Instant::now();
        assert_eq!(stub.exits().code(), Some(0));
        assert!(began.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn without_the_hold_requests_are_finished_and_no_others_accepted() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = before(engine.address, &[]);
    let relay = stub.relay();
    let (stream, _idle) = (relay.stream(40), relay.open(""));
    stub.signal("-TERM");
    until("nobody is accepted", || std::net::TcpStream::connect(relay.address).is_err());
    assert!(stream.all().contains("[DONE]"));
    assert_eq!(stub.exits().code(), Some(0));
}

#[test]
fn without_the_hold_what_takes_too_long_is_cut_off() {
    let engine = sim("--ttft 1ms --itl 20ms");
    let mut stub = before(engine.address, &["--shutdown=300ms"]);
    let stream = stub.relay().stream(100_000);
    stub.signal("-INT");
    assert!(!stream.all().contains("[DONE]"));
    assert_eq!(stub.exits().code(), Some(0));
}
