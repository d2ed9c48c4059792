//! Tests requests whose engine fails, does not answer in time, or must finish a response that has no client.
//!
//! Apart from the requests that wait, because these have been sent to an engine.

use rouse::units::Bytes;
use rouse_config::OnDisconnect;

use super::*;

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
