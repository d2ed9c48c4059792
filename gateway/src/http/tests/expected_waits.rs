//! Where a client learns how long it is expected to wait.

use std::time::Duration;

use rouse::{
    fault::{FailureCause, Fault, WaitDetails},
    fleet::quote::{WaitForecast, WaitRange},
    units::Millis,
};
use rouse_config::{KeyConfig, ModelAccess, RateLimits};

use super::{
    super::testing::{CannedEngine, InProcessGateway, MODEL, completion_request, json_response, raw_request},
    ask,
};
use crate::keys;

const EXPECTED: WaitRange = WaitRange { low: Millis(12_900), likely: Millis(15_000), high: Millis(19_001) };

fn expect(gateway: &InProcessGateway, range: WaitRange) {
    let forecast = WaitForecast { made_at: gateway.clock.now(), range, is_under_way: false };
    gateway.driver.waits.lock().unwrap().insert(MODEL.into(), forecast);
}

#[tokio::test]
async fn a_model_has_its_expected_wait_in_seconds_and_null_while_that_is_unknown() {
    let gateway = InProcessGateway::start(|_| {});
    let path = format!("GET /v1/models/{MODEL}");
    let unknown = ask(&gateway, &raw_request(&path, "", "")).await;
    let object: serde_json::Value = serde_json::from_slice(&unknown.body).unwrap();
    assert_eq!(object.get("expected_wait"), Some(&serde_json::Value::Null), "{object}");
    expect(&gateway, EXPECTED);
    for request in [&*path, "GET /v1/models"] {
        let answer = ask(&gateway, &raw_request(request, "", "")).await;
        let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        let object = body["data"].get(0).unwrap_or(&body);
        let expected = serde_json::json!({"low": 12.9, "likely": 15.0, "high": 19.001});
        assert_eq!(object["expected_wait"], expected, "{body}");
    }
}

#[tokio::test]
async fn a_key_learns_no_wait_of_a_model_that_it_may_not_use() {
    let key = KeyConfig {
        name: "other".into(),
        hash: keys::sha256(b"secret"),
        models: ModelAccess::Only(["else".into()].into()),
        limits: RateLimits { requests: None, tokens: None },
        priority: 0,
        heartbeat: true,
    };
    let gateway = InProcessGateway::start(|config| config.keys = vec![key].into());
    expect(&gateway, EXPECTED);
    for request in ["GET /v1/models", "GET /v1/models/org/m"] {
        let answer = ask(&gateway, &raw_request(request, "authorization: Bearer secret\r\n", "")).await;
        let body = String::from_utf8_lossy(&answer.body);
        assert!(!body.contains("expected_wait"), "{body}");
    }
}

#[tokio::test]
async fn a_request_that_waited_says_what_it_was_quoted_whether_it_is_answered_or_refused() {
    let mut gateway = InProcessGateway::start(|_| {});
    let engine = CannedEngine::start(json_response("{}")).await;
    let gate = gateway.open_gate();
    for is_answered in [true, false] {
        let mut client = gateway.connect().await;
        client.send(completion_request(false)).await;
        let parked = gateway.next_parked().await;
        assert_eq!(*parked.parking.quoted.get_or_init(|| EXPECTED), EXPECTED);
        let wait = WaitDetails { expected_wait: Some(Box::new(EXPECTED)), ..WaitDetails::default() };
        let refusal = Fault::ModelNotReady { model: MODEL.into(), cause: FailureCause::Deadline, wait };
        let granted = if is_answered { Ok(gateway.grant(engine.address, &gate)) } else { Err(refusal) };
        drop(parked.answer.send(granted));
        let answer = client.read_response().await;
        assert_eq!(answer.header("x-rouse-expected-wait"), Some("12-20"));
        assert_eq!(answer.header("retry-after"), (!is_answered).then_some("20"));
    }
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let answer = ask(&gateway, &completion_request(false)).await;
    assert_eq!((answer.status, answer.header("x-rouse-expected-wait")), (200, None), "it did not wait");
}

#[tokio::test]
async fn a_waiting_stream_has_the_quote_in_its_head_and_the_rest_of_the_wait_in_its_comments() {
    let mut gateway = InProcessGateway::start(|config| {
        (config.stream.grace, config.stream.heartbeat) = (Millis(200), Millis(1));
    });
    let body = format!("{{\"model\":\"{MODEL}\",\"stream\":true,\"input\":\"a\"}}");
    let mut client = gateway.connect().await;
    client.send(raw_request("POST /v1/responses", "", &body)).await;
    let parked = gateway.next_parked().await;
    assert_eq!(*parked.parking.quoted.get_or_init(|| EXPECTED), EXPECTED);
    expect(&gateway, WaitRange { low: Millis(2500), ..EXPECTED });
    let comment = b": waiting for org/m, about 2 to 20 s more\n";
    let read = tokio::time::timeout(Duration::from_secs(5), client.read_until(comment)).await.unwrap();
    let head = String::from_utf8_lossy(&read);
    assert!(head.contains("\r\nx-rouse-expected-wait: 12-20\r\n"), "{head}");
    drop(parked);
}
