//! Tests the responses of the inference API, and its requests to engines.
//!
//! This file has the requests that wait. `requests` has what is read of a request and what an engine gets of it,
//! `engine_failures` engines that fail and clients that leave, `backend` backends that another party runs, and
//! `expected_waits` what clients learn of their waits.

use std::{sync::Arc, time::Duration};

use rouse::{
    fault::{FailureCause, Fault, WaitDetails},
    units::Millis,
};
use tokio::time::Instant;

use super::testing::{
    CannedEngine, InProcessGateway, MODEL, RawHttpResponse, change_model, completion_request, json_response,
    raw_request, refused_address, sse_response, wait_until_lease_ended, wait_until_no_leases,
};
use crate::keys;

mod backend;
mod engine_failures;
mod expected_waits;
mod requests;

async fn ask(gateway: &InProcessGateway, request: &str) -> RawHttpResponse {
    let mut client = gateway.connect().await;
    client.send(request).await;
    client.read_response().await
}

fn not_ready() -> Fault {
    let wait = WaitDetails {
        waited_for: "gpu-0".into(),
        retry_after: Some(Millis::secs(7)),
        ..WaitDetails::default()
    };
    Fault::ModelNotReady { model: MODEL.into(), cause: FailureCause::OutOfMemory, wait }
}

#[tokio::test]
async fn a_refusal_of_the_queue_keeps_its_status_and_details() {
    let mut gateway = InProcessGateway::start(|_| {});
    let mut client = gateway.connect().await;
    client.send(completion_request(false)).await;
    let parked = gateway.next_parked().await;
    drop(parked.answer.send(Err(not_ready())));
    let answer = client.read_response().await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.header("retry-after"), Some("7"));
    assert_eq!(answer.header("x-should-retry"), Some("true"));
    assert_eq!(answer.error()["code"], "model_not_ready");
    assert!(answer.error()["details"].is_object());
}

#[tokio::test]
async fn a_request_that_waited_says_for_what() {
    let mut gateway = InProcessGateway::start(|_| {});
    let engine = CannedEngine::start(json_response("{}")).await;
    let gate = gateway.open_gate();
    let mut client = gateway.connect().await;
    client.send(completion_request(false)).await;
    let parked = gateway.next_parked().await;
    assert_eq!((parked.parking.band, parked.parking.stream), (3, false));
    drop(parked.answer.send(Ok(gateway.grant(engine.address, &gate))));
    let answer = client.read_response().await;
    assert_eq!((answer.status, answer.header("x-rouse-cold-start")), (200, Some("cold")));
    assert!(answer.header("server-timing").is_some_and(|t| t.starts_with("queue;dur=30, wake;dur=20, ")));
}

#[tokio::test]
async fn a_wait_ends_at_the_shorter_of_what_the_client_asks_and_what_is_allowed() {
    let mut gateway =
        InProcessGateway::start(|config| config.core.settings.queue.max_wait = Millis::secs(60));
    for (asked, wait) in [("1.5", 1500), ("3600", 60_000)] {
        let mut client = gateway.connect().await;
        let headers = format!("x-request-timeout: {asked}\r\n");
        client.send(raw_request("POST /v1/completions", &headers, "{\"model\":\"alias\"}")).await;
        let parking = gateway.next_parked().await.parking;
        assert_eq!(parking.deadline.since(parking.arrived), Millis(wait));
    }
}

#[tokio::test]
async fn a_model_has_a_longest_wait_of_its_own() {
    let mut gateway =
        InProcessGateway::start(|config| config.core.models[0].queue.max_wait = Some(Millis::secs(7)));
    for (asked, wait) in [("1.5", 1500), ("3600", 7000)] {
        let mut client = gateway.connect().await;
        let headers = format!("x-request-timeout: {asked}\r\n");
        client.send(raw_request("POST /v1/completions", &headers, "{\"model\":\"alias\"}")).await;
        let parking = gateway.next_parked().await.parking;
        assert_eq!(parking.deadline.since(parking.arrived), Millis(wait));
    }
}

#[tokio::test]
async fn a_queue_that_does_not_answer_does_not_hold_a_request_for_ever() {
    let mut gateway = InProcessGateway::start(|_| {});
    let mut client = gateway.connect().await;
    client
        .send(raw_request("POST /v1/completions", "x-request-timeout: 0.1\r\n", "{\"model\":\"alias\"}"))
        .await;
    let _parked = gateway.next_parked().await;
    let answer = client.read_response().await;
    assert_eq!((answer.status, answer.error()["code"].as_str()), (503, Some("control_plane")));
    assert!(answer.header("retry-after").is_some());
}

#[tokio::test]
async fn a_parked_stream_fails_with_a_status_before_the_grace_and_with_an_event_after_it() {
    let mut gateway = InProcessGateway::start(|_| {});
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    let parked = gateway.next_parked().await;
    assert!(parked.parking.stream);
    drop(parked.answer.send(Err(not_ready())));
    assert_eq!(client.read_response().await.status, 503);

    // The grace begins when the request arrives, which may be noticed late here.
    let begun = Instant::now();
    client.send(completion_request(true)).await;
    let parked = gateway.next_parked().await;
    let head = client.read_response().await;
    assert!(begun.elapsed() >= Duration::from_millis(150));
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream; charset=utf-8")));
    assert_eq!(head.header("x-accel-buffering"), Some("no"));
    client.read_until(b" \n\r\n").await;
    client.read_until(b" \n\r\n").await;
    drop(parked.answer.send(Err(not_ready())));
    let rest = String::from_utf8(client.read_to_end().await).unwrap();
    assert!(rest.contains("data: {\"error\":{"), "{rest}");
    assert!(rest.contains("\"code\":\"model_not_ready\"") && !rest.contains("[DONE]"), "{rest}");
    assert!(!rest.ends_with("0\r\n\r\n"), "a clean end: {rest}");
}

#[tokio::test]
async fn a_parked_stream_goes_on_as_the_engines_after_its_heartbeats() {
    let mut gateway = InProcessGateway::start(|_| {});
    let engine = CannedEngine::start(sse_response("{\"a\":1}") + "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n").await;
    let gate = gateway.open_gate();
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    let parked = gateway.next_parked().await;
    client.read_until(b" \n\r\n").await;
    drop(parked.answer.send(Ok(gateway.grant(engine.address, &gate))));
    client.read_until(b"data: {\"a\":1}\n\n").await;
    client.read_until(b"data: [DONE]\n\n").await;
    client.read_until(b"0\r\n\r\n").await;
    wait_until_no_leases(&gate).await;
    assert_eq!(gateway.next_ended().await.status, 200);
}

#[tokio::test]
async fn a_stream_that_wants_no_heartbeats_is_silent_until_its_first_event() {
    let hash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    let quiet = format!("keys: [{{name: quiet, sha256: {hash}, heartbeat: off}}]");
    let quiet = rouse_config::parse(&quiet, "test").unwrap().keys[0].clone();
    let loud = rouse_config::KeyConfig {
        name: "loud".into(),
        hash: keys::sha256(b"loud"),
        heartbeat: true,
        ..quiet.clone()
    };
    let mut gateway = InProcessGateway::start(|config| config.keys = vec![quiet, loud].into());
    let engine = CannedEngine::start(sse_response("{\"a\":1}")).await;
    let gate = gateway.open_gate();
    let ask =
        |headers: &str| completion_request(true).replacen("host: x\r\n", &format!("host: x\r\n{headers}"), 1);
    let mut silent = Vec::new();
    for headers in ["x-api-key: secret\r\n", "x-api-key: loud\r\nx-rouse-heartbeat: off\r\n"] {
        let mut client = gateway.connect().await;
        client.send(ask(headers)).await;
        let parked = gateway.next_parked().await;
        assert_eq!(client.read_response().await.status, 200, "{headers}");
        silent.push((client, parked));
    }
    let mut beating = gateway.connect().await;
    beating.send(ask("x-api-key: secret\r\nx-rouse-heartbeat: on\r\n")).await;
    beating.read_until(b" \n\r\n").await;
    beating.read_until(b" \n\r\n").await;
    for (mut client, parked) in silent {
        drop(parked.answer.send(Ok(gateway.grant(engine.address, &gate))));
        let read = String::from_utf8(client.read_until(b"data: {\"a\":1}\n\n").await).unwrap();
        assert!(!read.contains(" \n"), "{read:?}");
    }
}

#[tokio::test]
async fn an_engines_refusal_after_the_grace_is_an_event_in_its_own_words() {
    let mut gateway = InProcessGateway::start(|_| {});
    let own = "{\"error\": {\"message\":\n\"too long\"}}";
    let refusal = format!("HTTP/1.1 400 Bad Request\r\ncontent-length: {}\r\n\r\n{own}", own.len());
    let engine = CannedEngine::start(refusal).await;
    let gate = gateway.open_gate();
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    let parked = gateway.next_parked().await;
    client.read_until(b" \n\r\n").await;
    drop(parked.answer.send(Ok(gateway.grant(engine.address, &gate))));
    let rest = String::from_utf8(client.read_to_end().await).unwrap();
    assert!(rest.contains("data: {\"error\": {\"message\":\ndata: \"too long\"}}\n\n"), "{rest}");
    assert!(!rest.contains("[DONE]") && !rest.ends_with("0\r\n\r\n"), "{rest}");
}

#[tokio::test]
async fn after_the_grace_only_readable_events_pass_and_everything_else_is_one_error() {
    let mut gateway = InProcessGateway::start(|_| {});
    let encoded = sse_response("{}").replace("200 OK\r\n", "200 OK\r\ncontent-encoding: gzip\r\n");
    for other in [json_response("{\"id\":1}"), encoded] {
        let engine = CannedEngine::start(other).await;
        let gate = gateway.open_gate();
        let mut client = gateway.connect().await;
        client.send(completion_request(true)).await;
        let parked = gateway.next_parked().await;
        client.read_until(b" \n\r\n").await;
        drop(parked.answer.send(Ok(gateway.grant(engine.address, &gate))));
        let rest = String::from_utf8(client.read_to_end().await).unwrap();
        assert!(rest.contains("\"code\":\"engine_refused\"") && rest.matches("data:").count() == 1, "{rest}");
        assert!(!rest.ends_with("0\r\n\r\n"), "a clean end: {rest}");
        assert_eq!(gateway.next_ended().await.code, Some("engine_refused"));
        wait_until_no_leases(&gate).await;
    }
}

#[tokio::test]
async fn a_request_that_meets_a_dead_engine_queues_again_in_its_old_place() {
    let mut gateway = InProcessGateway::start(|_| {});
    let engine = CannedEngine::start(json_response("{}")).await;
    let (dead, gate) = (gateway.open_gate(), gateway.open_gate());
    gateway.set_endpoints(&[(refused_address(), &dead)]);
    let mut client = gateway.connect().await;
    client.send(completion_request(false)).await;
    let met = Instant::now();
    // The request has found the engine unreachable: its lease is over.
    wait_until_lease_ended(&dead).await;
    gateway.wait_until_idle().await;
    assert!(gateway.parked.try_recv().is_err(), "queued before the dead engine was known to be dead");
    dead.close();
    dead.revoke(Fault::EngineFailed { model: "m".into(), cause: FailureCause::Killed(9), wait: None });
    let parked = gateway.next_parked().await;
    assert!(met.elapsed() < Duration::from_millis(900), "{:?}", met.elapsed());
    assert!(parked.parking.deadline > parked.parking.arrived);
    drop(parked.answer.send(Ok(gateway.grant(engine.address, &gate))));
    assert_eq!(client.read_response().await.status, 200);
    assert_eq!(gateway.next_ended().await.retries, 1);
}

const TURNED_AWAY: [&str; 2] = ["x-rouse-gated", "x-rouse-not-ready"];

fn turned_away(mark: &str) -> String {
    format!("HTTP/1.1 503 Service Unavailable\r\n{mark}: 1\r\ncontent-length: 4\r\n\r\ngate")
}

#[tokio::test]
async fn a_request_that_a_stub_turns_away_waits_in_its_old_place_as_often_as_that_happens() {
    for mark in TURNED_AWAY {
        let mut gateway = InProcessGateway::start(|config| change_model(config, |model| model.stub = true));
        let mut stub = CannedEngine::start(turned_away(mark)).await;
        let engine = CannedEngine::start(json_response("{}")).await;
        let gate = gateway.open_gate();
        gateway.set_endpoints(&[(stub.address, &gate)]);
        let mut client = gateway.connect().await;
        client.send(completion_request(false)).await;
        let mut arrived = None;
        for times in 1..=5 {
            let parked = gateway.next_parked().await;
            let place = (parked.parking.arrived, parked.parking.deadline);
            assert_eq!(*arrived.get_or_insert(place), place);
            assert_eq!(gate.leases(), 0, "a lease is held while its request waits");
            assert_eq!(gateway.driver.gated.lock().unwrap().len(), times);
            let to = if times < 5 { stub.address } else { engine.address };
            drop(parked.answer.send(Ok(gateway.grant(to, &gate))));
        }
        let answer = client.read_response().await;
        assert_eq!((answer.status, answer.header(mark)), (200, None));
        assert_eq!(gateway.next_ended().await.retries, 5);
        let first = stub.requests.recv().await.unwrap();
        assert!(first.ends_with('}') && stub.requests.recv().await.unwrap().ends_with('}'), "{first}");
    }
}

#[tokio::test]
async fn an_engine_without_a_stub_cannot_park_anybody_by_calling_itself_one() {
    for mark in TURNED_AWAY {
        let mut gateway = InProcessGateway::start(|_| {});
        let engine = CannedEngine::start(turned_away(mark)).await;
        let gate = gateway.open_gate();
        gateway.set_endpoints(&[(engine.address, &gate)]);
        let answer = ask(&gateway, &completion_request(false)).await;
        assert_eq!((answer.status, answer.header(mark)), (503, None));
        assert!(gateway.parked.try_recv().is_err() && gateway.driver.gated.lock().unwrap().is_empty());
    }
}
