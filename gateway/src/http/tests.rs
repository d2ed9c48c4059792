//! Tests the responses of the inference API, and its requests to engines.

use std::{sync::Arc, time::Duration};

use rouse::{
    fault::{FailureCause, Fault, WaitDetails},
    units::{Bytes, Millis},
};
use rouse_config::OnDisconnect;
use tokio::time::Instant;

use super::testing::{
    CannedEngine, InProcessGateway, MODEL, RawHttpClient, RawHttpResponse, SERVED_NAME, change_model,
    completion_request, json_response, raw_request, refused_address, sse_response, wait_until_lease_ended,
    wait_until_no_leases,
};
use crate::keys;

mod backend;

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
async fn every_refusal_of_a_request_has_its_status_code_type_and_headers() {
    let gateway = InProcessGateway::start(|_| {});
    let chat = |headers: &str, body: &str| raw_request("POST /v1/chat/completions", headers, body);
    for (request, status, code, kind) in [
        (chat("", "not json"), 400, "invalid_request", "invalid_request_error"),
        (chat("", "{}"), 400, "invalid_request", "invalid_request_error"),
        (chat("", ""), 400, "invalid_request", "invalid_request_error"),
        (chat("", "[]"), 400, "invalid_request", "invalid_request_error"),
        (chat("", r#"{"model":"a","model":"b"}"#), 400, "invalid_request", "invalid_request_error"),
        (chat("x-request-timeout: soon\r\n", "{}"), 400, "invalid_request", "invalid_request_error"),
        (chat("x-rouse-heartbeat: 0\r\n", "{}"), 400, "invalid_request", "invalid_request_error"),
        (chat("api-key: a\r\nx-api-key: b\r\n", "{}"), 400, "invalid_request", "invalid_request_error"),
        (chat("content-encoding: gzip\r\n", "{}"), 415, "unsupported_encoding", "invalid_request_error"),
        (chat("", r#"{"model":"nobody"}"#), 404, "model_not_found", "invalid_request_error"),
        (raw_request("POST /v1/unknown", "", "{}"), 404, "route_not_found", "invalid_request_error"),
        (raw_request("GET /v1/models/nobody", "", ""), 404, "model_not_found", "invalid_request_error"),
        (raw_request("PUT /v1/embeddings", "", "{}"), 405, "method_not_allowed", "invalid_request_error"),
        (raw_request("TRACE /v1/models", "", ""), 405, "method_not_allowed", "invalid_request_error"),
        (
            raw_request("GET /v1/models", "connection: upgrade\r\nupgrade: websocket\r\n", ""),
            501,
            "not_implemented",
            "server_error",
        ),
    ] {
        let answer = ask(&gateway, &request).await;
        let error = answer.error();
        assert_eq!((answer.status, error["code"].as_str()), (status, Some(code)), "{request}");
        assert_eq!(error["type"], kind, "{request}");
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.header("x-should-retry"), Some("false"), "{request}");
        assert!(answer.header("x-request-id").is_some_and(|id| !id.is_empty()));
        assert_eq!(answer.header("allow").is_some(), status == 405, "{request}");
    }
    let connect = ask(&gateway, "CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n").await;
    assert_eq!(connect.status, 405);
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
async fn models_are_listed_with_aliases_and_found_by_escaped_names() {
    let gateway = InProcessGateway::start(|_| {});
    let list = ask(&gateway, &raw_request("GET /v1/models", "", "")).await;
    let list: serde_json::Value = serde_json::from_slice(&list.body).unwrap();
    assert_eq!(list["object"], "list");
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["alias", MODEL]);
    for name in ["org/m", "org%2Fm", "org%2fm"] {
        let one = ask(&gateway, &raw_request(&format!("GET /v1/models/{name}"), "", "")).await;
        let one: serde_json::Value = serde_json::from_slice(&one.body).unwrap();
        assert_eq!((one["id"].as_str(), one["state"].as_str()), (Some(MODEL), Some("awake")));
        assert_eq!((one["object"].as_str(), one["owned_by"].as_str()), (Some("model"), Some("rouse")));
    }
}

#[tokio::test]
async fn the_engine_gets_its_own_name_and_key_and_the_bytes_around_them_unchanged() {
    let gateway = InProcessGateway::start(|_| {});
    let mut engine = CannedEngine::start(json_response("{}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let body = |name: &str| format!("{{ \"n\" : 1.0,\"model\":\"{name}\" ,\"x\":[ ] }}");
    let headers = "authorization: Bearer client\r\nx-request-id: mine.1\r\ntraceparent: 00-a-b-01\r\n\
                   cookie: c\r\nx-rouse-gate: forged\r\n";
    let answer = ask(&gateway, &raw_request("POST /v1/embeddings?q=1", headers, &body("alias"))).await;
    assert_eq!((answer.status, answer.header("x-request-id")), (200, Some("mine.1")));
    let seen = engine.requests.recv().await.unwrap();
    assert!(seen.starts_with("POST /v1/embeddings?q=1 HTTP/1.1\r\n"), "{seen}");
    assert!(seen.ends_with(&body(SERVED_NAME)), "{seen}");
    for has in ["authorization: Bearer engine-key", "x-request-id: mine.1", "traceparent: 00-a-b-01"] {
        assert!(seen.contains(has), "{has} in {seen}");
    }
    for has_not in ["client", "cookie", "x-rouse-gate"] {
        assert!(!seen.contains(has_not), "{has_not} in {seen}");
    }
    wait_until_no_leases(&gate).await;
}

#[tokio::test]
async fn a_request_is_told_to_the_engine_that_it_gets_and_not_to_the_one_that_was_configured_when_it_came() {
    let mut gateway = InProcessGateway::start(|_| {});
    let mut engine = CannedEngine::start(json_response("{}")).await;
    let gate = gateway.open_gate();
    let (first, second) = (gateway.config.load_full(), {
        let mut config = (*gateway.config.load_full()).clone();
        config.former_engines = vec![Arc::clone(&config.engines[MODEL])];
        change_model(&mut config, |model| {
            (model.served_name, model.fingerprint) = ("served-anew".into(), 1);
            model.api_key = Some("other-key".into());
        });
        Arc::new(config)
    });
    // The engine may have been started with the new entry, or run since before.
    for (fingerprint, name, key) in [(1, "served-anew", "other-key"), (0, SERVED_NAME, "engine-key")] {
        gateway.config.store(Arc::clone(&first));
        let mut client = gateway.connect().await;
        client.send(completion_request(false)).await;
        let parked = gateway.next_parked().await;
        gateway.config.store(Arc::clone(&second));
        let granted = crate::driver::GrantedLease { fingerprint, ..gateway.grant(engine.address, &gate) };
        drop(parked.answer.send(Ok(granted)));
        assert_eq!(client.read_response().await.status, 200);
        let seen = engine.requests.recv().await.unwrap();
        assert!(seen.contains(&format!("\"{name}\"")), "{seen}");
        assert!(seen.contains(&format!("authorization: Bearer {key}\r\n")), "{seen}");
        wait_until_no_leases(&gate).await;
    }
}

#[tokio::test]
async fn a_client_cannot_take_away_what_the_gateway_adds() {
    let gateway = InProcessGateway::start(|_| {});
    let mut engine = CannedEngine::start(json_response("{}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let named = "connection: x-request-id, x-hop, content-length, authorization, host\r\nx-request-id: mine\r\nx-hop: 1\r\n";
    let request = completion_request(false).replacen("\r\n", &format!("\r\n{named}"), 1);
    assert_eq!(ask(&gateway, &request).await.status, 200);
    let seen = engine.requests.recv().await.unwrap();
    assert!(seen.contains("x-request-id: mine\r\n") && !seen.contains("x-hop"), "{seen}");
    assert!(seen.contains("authorization: Bearer engine-key\r\n") && seen.contains("host: "), "{seen}");
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

#[tokio::test]
async fn a_request_that_meets_two_dead_engines_is_refused() {
    let mut gateway = InProcessGateway::start(|_| {});
    let (dead, gate) = (gateway.open_gate(), gateway.open_gate());
    let mut client = gateway.connect().await;
    client.send(completion_request(false)).await;
    let parked = gateway.next_parked().await;
    let grant = gateway.grant(refused_address(), &dead);
    dead.close();
    drop(parked.answer.send(Ok(grant)));
    let parked = gateway.next_parked().await;
    drop(parked.answer.send(Ok(gateway.grant(refused_address(), &gate))));
    let answer = client.read_response().await;
    assert_eq!((answer.status, answer.error()["code"].as_str()), (502, Some("engine_unreachable")));
    assert_eq!(answer.header("x-should-retry"), Some("true"));
    wait_until_no_leases(&gate).await;
    wait_until_no_leases(&dead).await;
}

#[tokio::test]
async fn a_request_that_an_engine_may_have_begun_fails_with_it() {
    let mut gateway = InProcessGateway::start(|_| {});
    let mut silent = CannedEngine::start("").await;
    for (cause, status, code) in
        [(FailureCause::Killed(9), 502, "engine_closed"), (FailureCause::Hung, 503, "engine_failed")]
    {
        let dying = gateway.open_gate();
        gateway.set_endpoints(&[(silent.address, &dying)]);
        let mut client = gateway.connect().await;
        client.send(completion_request(false)).await;
        silent.requests.recv().await.unwrap();
        dying.close();
        dying.revoke(Fault::EngineFailed { model: MODEL.into(), cause, wait: None });
        let answer = client.read_response().await;
        assert_eq!((answer.status, answer.error()["code"].as_str()), (status, Some(code)));
        let again = if status == 502 { "true" } else { "false" };
        assert_eq!(answer.header("x-should-retry"), Some(again));
        assert_eq!(gateway.next_ended().await.retries, 0);
    }
    for begun in ["connection: close", "HTTP/1.1 200 OK\r\nconnection: close\r\n"] {
        let mut closing = CannedEngine::start(begun).await;
        let gate = gateway.open_gate();
        gateway.set_endpoints(&[(closing.address, &gate)]);
        let answer = ask(&gateway, &completion_request(false)).await;
        assert_eq!((answer.status, answer.error()["code"].as_str()), (502, Some("engine_closed")));
        closing.requests.recv().await.unwrap();
        assert!(closing.requests.try_recv().is_err(), "sent twice");
    }
}

#[tokio::test]
async fn an_engine_that_does_not_answer_in_time_is_a_timeout_that_is_not_tried_again() {
    let gateway = InProcessGateway::start(|config| config.timeouts.non_stream = Millis(100));
    let engine = CannedEngine::start("").await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let answer = ask(&gateway, &completion_request(false)).await;
    assert_eq!((answer.status, answer.error()["code"].as_str()), (504, Some("engine_timeout")));
    assert_eq!(answer.header("x-should-retry"), Some("false"));
}

#[tokio::test]
async fn the_newest_body_is_refused_when_all_together_are_too_large() {
    let mut gateway = InProcessGateway::start(|config| config.limits.body_total = Bytes(1500));
    let body = format!("{{\"model\":\"{MODEL}\",\"pad\":\"{}\"}}", "p".repeat(1000));
    let request = raw_request("POST /v1/completions", "", &body);
    let mut first = gateway.connect().await;
    first.send(&request).await;
    let parked = gateway.next_parked().await;
    let second = ask(&gateway, &request).await;
    assert_eq!((second.status, second.error()["code"].as_str()), (429, Some("busy")));
    assert!(second.header("retry-after").is_some());
    assert_eq!(second.header("x-should-retry"), Some("true"));
    drop(parked.answer.send(Err(not_ready())));
    assert_eq!(first.read_response().await.status, 503);
    // The first request's charge was released.
    first.send(&request).await;
    gateway.next_parked().await;
}

#[tokio::test]
async fn one_client_may_hold_a_part_of_all_bodies_and_others_are_served() {
    let mut gateway = InProcessGateway::start(|config| {
        (config.limits.body, config.limits.body_total) = (Bytes(1500), Bytes(8000));
    });
    let body = format!("{{\"model\":\"{MODEL}\",\"pad\":\"{}\"}}", "p".repeat(1000));
    let request = raw_request("POST /v1/completions", "", &body);
    let mut first = gateway.connect().await;
    first.send(&request).await;
    let parked = gateway.next_parked().await;
    let refused = ask(&gateway, &request).await;
    assert_eq!((refused.status, refused.error()["code"].as_str()), (429, Some("busy")));
    assert!(refused.error()["message"].as_str().unwrap().contains("this client"), "{refused:?}");
    let mut other = RawHttpClient::connect_from("127.0.0.2:0", gateway.address).await;
    other.send(&request).await;
    gateway.next_parked().await;
    drop(parked.answer.send(Err(not_ready())));
    assert_eq!(first.read_response().await.status, 503);
    first.send(&request).await;
    gateway.next_parked().await;
}

#[tokio::test]
async fn an_engine_that_must_not_be_interrupted_is_read_to_its_end_for_nobody() {
    let mut gateway = InProcessGateway::start(|config| {
        change_model(config, |model| model.on_disconnect = OnDisconnect::Drain);
    });
    let mut engine = CannedEngine::start(sse_response("{}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    client.read_until(b"data: {}\n\n").await;
    drop(client);
    gateway.wait_until_connected(0).await;
    // The response's body owns the lease and the engine's socket.
    assert_eq!(gate.leases(), 1, "interrupted");
    assert!(engine.closed_at.try_recv().is_err(), "interrupted");
    // A request that is still parked has no response to drain.
    gateway.set_endpoints(&[]);
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    let mut parked = gateway.next_parked().await;
    drop(client);
    tokio::time::timeout(Duration::from_millis(500), parked.answer.closed()).await.expect("still parked");
}

#[tokio::test]
async fn a_request_that_outlives_its_client_keeps_its_share_of_the_bodies_and_queues_no_more() {
    let mut gateway = InProcessGateway::start(|config| {
        config.limits.body_total = Bytes(1500);
        change_model(config, |model| model.on_disconnect = OnDisconnect::Drain);
    });
    let mut silent = CannedEngine::start("").await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(silent.address, &gate)]);
    let body = format!("{{\"model\":\"{MODEL}\",\"pad\":\"{}\"}}", "p".repeat(1000));
    let request = raw_request("POST /v1/completions", "", &body);
    let mut client = gateway.connect().await;
    client.send(&request).await;
    silent.requests.recv().await.unwrap();
    drop(client);
    gateway.wait_until_connected(0).await;
    assert_eq!(ask(&gateway, &request).await.status, 429, "the body is held and not counted");
    gate.close();
    gate.revoke(Fault::EngineFailed { model: MODEL.into(), cause: FailureCause::Killed(9), wait: None });
    wait_until_no_leases(&gate).await;
    gateway.set_endpoints(&[]);
    gateway.wait_until_idle().await;
    assert!(gateway.parked.try_recv().is_err(), "queued for nobody");
    let mut client = gateway.connect().await;
    client.send(&request).await;
    gateway.next_parked().await;
}

#[tokio::test]
async fn an_engine_that_dies_in_a_stream_leaves_an_error_event_and_an_unclean_end() {
    let gateway = InProcessGateway::start(|_| {});
    let dies = sse_response("{}").replace("200 OK\r\n", "200 OK\r\nconnection: close\r\n");
    let engine = CannedEngine::start(dies).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    let rest = String::from_utf8(client.read_to_end().await).unwrap();
    assert!(rest.contains("data: {}\n\n") && rest.contains("\"code\":\"engine_failed\""), "{rest}");
    assert!(!rest.contains("[DONE]") && !rest.ends_with("0\r\n\r\n"), "{rest}");
}

#[tokio::test]
async fn a_large_body_is_understood_away_from_the_streams() {
    let gateway = InProcessGateway::start(|config| config.limits.body = Bytes::mib(8));
    let mut engine = CannedEngine::start(json_response("{}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let body = format!("{{\"pad\":\"{}\",\"model\":\"{MODEL}\"}}", "p".repeat(3 << 20));
    let answer = ask(&gateway, &raw_request("POST /v1/completions", "", &body)).await;
    assert_eq!(answer.status, 200);
    let seen = engine.requests.recv().await.unwrap();
    assert!(seen.ends_with(&body.replace(MODEL, SERVED_NAME)));
}
