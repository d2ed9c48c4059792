use std::{sync::Arc, time::Duration};

use rouse::{fault::FailureCause, fault::Fault, units::Generation};
use rouse_net::{lease::Gate, openai::sse::ResponseScanner};
use tokio::{sync::watch, time::Instant};

use super::*;
use crate::{
    driver::GrantedLease,
    http::testing::{
        CannedEngine, InProcessGateway, MODEL, RawHttpResponse, change_model, completion_request,
        json_response, raw_request, refused_address, wait_until_no_leases,
    },
    serve::ShutdownStage,
};

async fn ask(gateway: &InProcessGateway, request: &str) -> RawHttpResponse {
    let mut client = gateway.connect().await;
    client.send(request).await;
    client.read_response().await
}

/// Starts engines with these answers, all routed to, and returns their gates.
async fn engines(gateway: &InProcessGateway, answers: &[String]) -> (Vec<CannedEngine>, Vec<Arc<Gate>>) {
    let (mut engines, mut gates) = (Vec::new(), Vec::new());
    for answer in answers {
        engines.push(CannedEngine::start(answer.as_str()).await);
        gates.push(gateway.open_gate());
    }
    let ends: Vec<_> = engines.iter().zip(&gates).map(|(engine, gate)| (engine.address, gate)).collect();
    gateway.set_endpoints(&ends);
    (engines, gates)
}

fn numbered(count: usize) -> Vec<String> {
    (0..count).map(|n| json_response(&format!("{{\"n\":{n}}}"))).collect()
}

/// A conversation at its nth turn.
fn turn(conversation: usize, turns: usize) -> String {
    let mut messages = vec![serde_json::json!({"role": "user", "content": format!("about {conversation}")})];
    for n in 0..turns {
        messages.push(serde_json::json!({"role": "assistant", "content": format!("{n}")}));
        messages.push(serde_json::json!({"role": "user", "content": "go on"}));
    }
    serde_json::json!({"model": MODEL, "messages": messages}).to_string()
}

#[tokio::test]
async fn the_turns_of_a_conversation_and_of_a_session_come_to_one_engine_unless_that_is_not_wanted() {
    for affinity in [AffinityPolicy::Prefix, AffinityPolicy::Session, AffinityPolicy::None] {
        let gateway = InProcessGateway::start(|config| config.affinity = affinity);
        let (_engines, _gates) = engines(&gateway, &numbered(4)).await;
        let (mut stayed, mut kept) = (true, true);
        for conversation in 0..6 {
            let headers = format!("x-session-id: {conversation}\r\n");
            let (mut turns, mut session) = (Vec::new(), Vec::new());
            for n in 0..5 {
                let of_turn = raw_request("POST /v1/chat/completions", "", &turn(conversation, n));
                turns.push(ask(&gateway, &of_turn).await.body);
                let of_session =
                    raw_request("POST /v1/chat/completions", &headers, &turn(100 * conversation + n, 0));
                session.push(ask(&gateway, &of_session).await.body);
            }
            turns.dedup();
            session.dedup();
            (stayed, kept) = (stayed && turns.len() == 1, kept && session.len() == 1);
        }
        assert_eq!(
            (stayed, kept),
            (affinity == AffinityPolicy::Prefix, affinity != AffinityPolicy::None),
            "{affinity:?}"
        );
    }
}

#[tokio::test]
async fn a_request_that_finds_its_engine_absent_goes_to_another_at_once() {
    let mut gateway = InProcessGateway::start(|_| {});
    let engine = CannedEngine::start(json_response("{}")).await;
    let (dead, gate) = (gateway.open_gate(), gateway.open_gate());
    gateway.set_endpoints(&[(refused_address(), &dead), (engine.address, &gate)]);
    let (mut replayed, begun) = (0, Instant::now());
    for _ in 0..30 {
        assert_eq!(ask(&gateway, &completion_request(false)).await.status, 200);
        replayed += gateway.next_ended().await.retries;
    }
    // Five consecutive failures eject the engine.
    assert_eq!(replayed, 5);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert!(gateway.parked.try_recv().is_err(), "parked");
    wait_until_no_leases(&gate).await;
    wait_until_no_leases(&dead).await;
}

#[tokio::test]
async fn what_an_engine_may_have_begun_is_not_given_to_another_and_its_own_503_passes_on() {
    let gateway = InProcessGateway::start(|_| {});
    let full =
        "HTTP/1.1 503 Service Unavailable\r\nretry-after: 7\r\ncontent-length: 4\r\n\r\nfull".to_owned();
    for (answer, status) in [("connection: close".to_owned(), 502), (full, 503)] {
        let (mut engines, _gates) = engines(&gateway, &[answer, json_response("{}")]).await;
        let mut seen = 0;
        for session in 0..12 {
            let headers = format!("x-session-id: {session}\r\n");
            let answer =
                ask(&gateway, &raw_request("POST /v1/chat/completions", &headers, &turn(0, 0))).await;
            assert!(answer.status == 200 || answer.status == status, "{}", answer.status);
            if answer.status == 503 {
                assert_eq!(
                    (answer.header("retry-after"), answer.body.as_slice()),
                    (Some("7"), b"full".as_slice())
                );
            }
            seen += u32::from(answer.status == status);
        }
        let mut got = [0, 0];
        for (engine, got) in engines.iter_mut().zip(&mut got) {
            while engine.requests.try_recv().is_ok() {
                *got += 1;
            }
        }
        assert!(seen > 0 && got == [seen, 12 - seen], "{got:?} with {seen}");
    }
}

#[tokio::test]
async fn a_dying_engine_takes_only_its_own_requests_along() {
    let mut gateway = InProcessGateway::start(|_| {});
    let (mut engines, gates) = engines(&gateway, &[String::new(), json_response("{}")]).await;
    // The choice goes by load: of two idle engines the first drawn wins, so each gets a request before long. An engine
    // that answers has done so before the next request is sent, so the first engine never has more than one request.
    let mut answered = Vec::new();
    let mut waiting = loop {
        let mut client = gateway.connect().await;
        client.send(completion_request(false)).await;
        tokio::select! {
            answer = client.read_response() => assert_eq!(answer.status, 200),
            seen = engines[0].requests.recv() => {
                seen.unwrap();
                break client;
            }
        }
        answered.push(client);
    };
    gates[0].close();
    gates[0].revoke(Fault::EngineFailed { model: MODEL.into(), cause: FailureCause::Killed(9), wait: None });
    assert_ne!(waiting.read_response().await.status, 200);
    for _ in 0..10 {
        assert_eq!(ask(&gateway, &completion_request(false)).await.status, 200);
    }
    assert!(gateway.parked.try_recv().is_err());
}

#[tokio::test]
async fn a_stub_is_asked_for_the_load_now_and_then_also_that_of_the_only_engine_and_its_report_stays_here() {
    let report = "endpoint-load-metrics: TEXT named_metrics.num_requests_waiting=4";
    let answer = format!("HTTP/1.1 200 OK\r\n{report}\r\ncontent-length: 2\r\n\r\n{{}}");
    for (stub, count) in [(true, 2), (false, 2), (true, 1), (false, 1)] {
        let gateway = InProcessGateway::start(|config| change_model(config, |model| model.stub = stub));
        let answers: Vec<String> = (0..count).map(|_| answer.clone()).collect();
        let (mut engines, _gates) = engines(&gateway, &answers).await;
        for session in 0..40 {
            // A client's own wish ends at the gateway.
            let headers = format!("x-session-id: {session}\r\nendpoint-load-metrics-format: JSON\r\n");
            let request = raw_request("POST /v1/chat/completions", &headers, &turn(0, 0));
            let answer = ask(&gateway, &request).await;
            assert_eq!((answer.status, answer.header("endpoint-load-metrics")), (200, None));
        }
        let routes = crate::http::DriverApi::routes(&*gateway.driver);
        let route = routes.models.get(&MODEL.into()).unwrap();
        for (engine, endpoint) in engines.iter_mut().zip(&route.endpoints) {
            let (mut plain, mut asking) = (0, 0);
            while let Ok(request) = engine.requests.try_recv() {
                let wishes = request.matches("endpoint-load-metrics-format: ").count();
                assert_eq!(wishes, request.matches("endpoint-load-metrics-format: TEXT\r\n").count());
                asking += wishes;
                plain += 1 - wishes;
            }
            // Readings are asked for every two seconds, which is longer than these requests take.
            assert!(plain > asking && (asking > 0) == stub, "{plain} plain, {asking} asking");
            let waiting = endpoint.activity.load().latest().and_then(|(load, _)| load.waiting);
            assert_eq!(waiting, stub.then_some(4.0));
        }
    }
}

/// While an engine is saturated, its requests wait before they reach it.
#[tokio::test]
async fn a_request_that_waited_for_the_only_engine_asks_its_stub_for_the_load() {
    for stub in [true, false] {
        let mut gateway = InProcessGateway::start(|config| change_model(config, |model| model.stub = stub));
        let (mut engines, gates) = engines(&gateway, &[json_response("{}")]).await;
        let (engine, gate) = (&mut engines[0], &gates[0]);
        assert!(gate.set_queued(true), "newcomers wait");
        let mut client = gateway.connect().await;
        client.send(completion_request(false)).await;
        let parked = gateway.next_parked().await;
        gate.set_queued(false);
        let granted = GrantedLease { generation: Generation(1), ..gateway.grant(engine.address, gate) };
        drop(parked.answer.send(Ok(granted)));
        assert_eq!(client.read_response().await.status, 200);
        let seen = engine.requests.recv().await.unwrap();
        assert_eq!(seen.contains("endpoint-load-metrics-format: TEXT\r\n"), stub, "{seen}");
    }
}

#[tokio::test]
async fn what_goes_on_from_a_response_goes_to_the_engine_that_made_it() {
    let gateway = InProcessGateway::start(|_| {});
    let (_engines, _gates) = engines(&gateway, &numbered(4)).await;
    let shared = crate::http::ServerContext::new(
        Arc::clone(&gateway.driver) as Arc<dyn crate::http::DriverApi>,
        Arc::clone(&gateway.config),
        Arc::new(crate::http::NoopMetricsSink),
    );
    let core = WorkerContext::new(shared, watch::channel(ShutdownStage::Serving).1);
    let routes = core.server.driver.routes();
    let route = routes.models.get(&MODEL.into()).unwrap();
    for (n, endpoint) in route.endpoints.iter().enumerate().cycle().take(12) {
        let id = format!("resp_{n}");
        let mut scanner = ResponseScanner::for_json();
        scanner.feed(format!("{{\"id\":\"{id}\",\"output\":[]}}").as_bytes());
        for (path, learns) in [("/v1/chat/completions", false), (RESPONSES_PATH, true)] {
            let path = PathAndQuery::from_static(path);
            let mut attempted = EndpointAttempt::new(&core, route, endpoint, &path).unwrap();
            assert_eq!(attempted.records_response_id(), learns);
            attempted.frame(scanner.facts());
        }
        let body = format!("{{\"model\":\"{MODEL}\",\"input\":\"{n}\",\"previous_response_id\":\"{id}\"}}");
        let body = Bytes::from(body);
        let head = openai::routing_fields::peek(&body).unwrap();
        let ties = AffinityKeys::from_request(&head, &body, true, AffinityPolicy::None).await;
        let (taken, _lease) = ties.take_lease(&core, route, &HeaderMap::new(), None, true).unwrap();
        assert_eq!(taken.engine, endpoint.engine);
    }
}
