//! Tests what is read of a request, and what an engine gets of it.
//!
//! Apart from the requests that wait, because nothing here depends on the queue.

use rouse::units::Bytes;

use super::*;
use crate::http::testing::{RawHttpClient, SERVED_NAME};

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
