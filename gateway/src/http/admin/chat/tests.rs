//! Tests the chat: it is a request like any other, with a key of its own.

use std::sync::Arc;

use rouse::{fault::DisconnectPhase, units::Bytes as ByteCount};
use rouse_config::{KeyConfig, ModelAccess, RateLimits};

use super::*;
use crate::{
    http::{
        admin::{openapi::tests::assert_matches_schema, tests::start},
        testing::{
            CannedEngine, InProcessGateway, MODEL, RawHttpClient, RawHttpResponse, completion_request,
            json_response, raw_request, sse_response,
        },
    },
    keys,
    serve::ShutdownStage,
};

async fn open(gateway: &InProcessGateway, body: &str) -> RawHttpClient {
    let mut client = RawHttpClient::connect(start(gateway, None).await).await;
    let request = raw_request(&format!("POST {PATH}"), "connection: close\r\n", body);
    let request = request.replace("host: x", "host: localhost");
    client.send(request).await;
    client
}

async fn ask(gateway: &InProcessGateway, body: &str) -> RawHttpResponse {
    let answer = open(gateway, body).await.read_response().await;
    assert_matches_schema(&format!("POST {PATH}"), &answer);
    answer
}

fn body(stream: bool) -> String {
    format!("{{\"model\":\"{MODEL}\",\"stream\":{stream}}}")
}

/// Starts a gateway that has keys, none of which the operator knows.
fn with_keys() -> InProcessGateway {
    InProcessGateway::start(|config| {
        config.keys = Arc::new([KeyConfig {
            name: "team".into(),
            hash: keys::sha256(b"sk-team"),
            models: ModelAccess::All,
            limits: RateLimits { requests: Some(1), tokens: None },
            priority: 0,
            heartbeat: true,
        }]);
    })
}

#[tokio::test]
async fn an_answer_passes_unchanged_and_needs_no_key_of_the_inference_api() {
    let mut gateway = with_keys();
    let mut engine = CannedEngine::start(json_response("{\"x\":  1}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let mut client = gateway.connect().await;
    client.send(completion_request(false)).await;
    assert_eq!(client.read_response().await.status, 401);
    assert_eq!(gateway.next_ended().await.status, 401);
    for _ in 0..3 {
        let answer = open(&gateway, &body(false)).await.read_to_end().await;
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("{\"x\":  1}"), "{answer}");
        assert!(answer.contains("\r\nx-request-id: "), "{answer}");
        let sent = engine.requests.recv().await.unwrap();
        assert!(sent.starts_with("POST /v1/chat/completions HTTP/1.1\r\n"), "{sent}");
        let ended = gateway.next_ended().await;
        assert_eq!((ended.status, ended.left_in_phase), (200, None), "counted like any other");
    }
}

#[tokio::test]
async fn a_chat_waits_as_the_key_admin_and_is_cancelled_when_its_page_goes() {
    let mut gateway = with_keys();
    let page = open(&gateway, &body(true)).await;
    let parked = gateway.next_parked().await;
    assert_eq!(parked.parking.key, "admin");
    drop(page);
    let ended = gateway.next_ended().await;
    assert_eq!((ended.status, ended.left_in_phase), (499, Some(DisconnectPhase::Parked)));

    let mut page = open(&gateway, &body(true)).await;
    let parked = gateway.next_parked().await;
    let engine = CannedEngine::start(sse_response("{\"a\":1}")).await;
    let gate = gateway.open_gate();
    drop(parked.answer.send(Ok(gateway.grant(engine.address, &gate))));
    let head = page.read_response().await;
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    page.read_until(b"data: {\"a\":1}\n\n").await;
    drop(page);
    let ended = gateway.next_ended().await;
    assert_eq!((ended.status, ended.left_in_phase), (499, Some(DisconnectPhase::Streaming)));
}

#[tokio::test]
async fn refusals_are_those_of_the_inference_api() {
    let gateway = InProcessGateway::start(|config| config.limits.body = ByteCount(100));
    for (body, status, code) in [
        ("", 400, "invalid_request"),
        ("{\"model\":\"nobody\"}", 404, "model_not_found"),
        (&*"x".repeat(200), 413, "body_too_large"),
    ] {
        let answer = ask(&gateway, body).await;
        assert_eq!((answer.status, answer.error()["code"].as_str()), (status, Some(code)));
    }
}

#[tokio::test]
async fn a_gateway_that_shuts_down_serves_no_chat() {
    let mut gateway = InProcessGateway::start(|_| {});
    gateway.stage.send_replace(ShutdownStage::Draining);
    (&mut gateway.run).await.unwrap();
    let answer = ask(&gateway, &body(true)).await;
    assert_eq!((answer.status, answer.error()["code"].as_str()), (503, Some("not_serving")));
}
