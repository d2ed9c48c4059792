//! Several engines of one model: how requests are spread, and how the death of one engine affects the others.

use std::{thread, time::Duration};

use nix::sys::signal::Signal;

use crate::{
    live::EngineUnderTest,
    support::{
        GatewayFixture, GatewayProcess, SimModel,
        client::{TestExchange, chat_body, request},
    },
};

const CHAT: &str = "/v1/chat/completions";

/// A gateway with three engines of the model `m`, all awake.
fn three() -> GatewayProcess {
    let gateway = GatewayFixture::new(&["1Gi", "1Gi", "1Gi"])
        .settings("timeouts: {health: {every: 200ms, timeout: 500ms}}")
        .model(&SimModel { keys: "replicas: 3", ..SimModel::new("m") })
        .start();
    assert_eq!(gateway.client().chat("m", false, 1).status, 200);
    gateway.until("three engines are awake", Duration::from_secs(20), || {
        (0..3).all(|n| gateway.engine(&format!("m#{n}"))["state"] == "Awake")
    });
    gateway
}

/// Requests that each engine has received so far.
fn totals(gateway: &GatewayProcess) -> Vec<u64> {
    (0..3).map(|n| gateway.counters(&format!("m#{n}"))["total"].as_u64().unwrap()).collect()
}

/// Counts the engines that receive at least one of the requests that `during` sends.
fn asked(gateway: &GatewayProcess, during: impl FnOnce()) -> usize {
    let before = totals(gateway);
    during();
    totals(gateway).iter().zip(&before).filter(|(after, before)| after > before).count()
}

fn turn(about: usize, turns: usize) -> String {
    let mut messages = vec![serde_json::json!({"role": "user", "content": format!("about {about}")})];
    for _ in 0..turns {
        messages.push(serde_json::json!({"role": "assistant", "content": "yes"}));
        messages.push(serde_json::json!({"role": "user", "content": "go on"}));
    }
    serde_json::json!({"model": "m", "max_tokens": 1, "messages": messages}).to_string()
}

#[test]
fn a_conversation_and_a_session_stay_on_their_engine_and_many_of_them_use_all() {
    let gateway = three();
    let client = gateway.client();
    for conversation in 0..4 {
        let by_beginning = asked(&gateway, || {
            (0..6).for_each(|n| assert_eq!(client.post(CHAT, &turn(conversation, n)).status, 200));
        });
        let by_session = asked(&gateway, || {
            let headers = format!("x-session-id: s{conversation}\r\n");
            (0..6).for_each(|n| {
                let answer = client.post_with(CHAT, &headers, &turn(10 * conversation + n, 0));
                assert_eq!(answer.status, 200);
            });
        });
        assert_eq!((by_beginning, by_session), (1, 1));
    }
    let all = asked(&gateway, || {
        (0..40).for_each(|n| assert_eq!(client.post(CHAT, &turn(1000 + n, 0)).status, 200));
    });
    assert_eq!(all, 3);
}

#[test]
fn one_beginning_for_all_does_not_fill_one_engine() {
    let gateway = three();
    let streams: Vec<_> = (0..30).map(|_| gateway.client().open_stream("m", 100_000)).collect();
    let leases: Vec<u64> =
        (0..3).map(|n| gateway.engine(&format!("m#{n}"))["leases"].as_u64().unwrap()).collect();
    // The limit is a quarter above the mean, plus one.
    assert!(leases.iter().sum::<u64>() == 30 && leases.iter().all(|&l| l <= 13 + 1), "{leases:?}");
    drop(streams);
}

#[test]
fn an_engine_killed_under_load_takes_only_its_own_requests_along() {
    let gateway = three();
    // Every engine has answered: before its first answer an engine gets a single request.
    let mut about = 1000;
    gateway.until("each has answered", Duration::from_secs(10), || {
        about += 1;
        assert_eq!(gateway.client().post(CHAT, &turn(about, 0)).status, 200);
        totals(&gateway).iter().all(|total| *total > 0)
    });
    // The engines stall, so no stream ends before the engine dies.
    (0..3).for_each(|n| gateway.stall(&format!("m#{n}"), true));
    let streams: Vec<TestExchange> = (0..12)
        .map(|n| {
            let body = chat_body("m", true, 400).replace("hello", &format!("hello {n}"));
            gateway.client().open(request(CHAT, "", &body))
        })
        .collect();
    gateway.until("all have an engine", Duration::from_secs(10), || gateway.leases() == 12);
    let held = gateway.engine("m#1")["leases"].as_u64().unwrap();
    assert!(held > 0);
    [0, 2].iter().for_each(|n| gateway.stall(&format!("m#{n}"), false));
    let clients: Vec<_> = (0..4)
        .map(|who| {
            let client = gateway.client();
            thread::spawn(move || {
                (0..25).filter(|n| client.post(CHAT, &turn(100 * who + n, 0)).status != 200).count() as u64
            })
        })
        .collect();
    EngineUnderTest::of(&gateway, "m#1").signal(Signal::SIGKILL);
    // Of the requests that arrive meanwhile, only those fail that had reached the engine when it died.
    let failed: u64 = clients.into_iter().map(|client| client.join().unwrap()).sum();
    assert!(failed <= 4, "{failed}");
    let broken = streams.into_iter().map(TestExchange::rest).filter(|a| !a.is_whole_stream()).count();
    assert_eq!(broken as u64, held);
    (0..20).for_each(|n| assert_eq!(gateway.client().post(CHAT, &turn(n, 0)).status, 200));
}

#[test]
fn an_engine_that_only_fails_is_left_out_and_comes_back() {
    let gateway = three();
    let client = gateway.client();
    EngineUnderTest::of(&gateway, "m#2").faults(r#"{"status": 500}"#);
    let statuses: Vec<u16> = (0..60).map(|n| client.post(CHAT, &turn(n, 0)).status).collect();
    let failed = statuses.iter().filter(|status| **status == 500).count();
    assert!((1..=6).contains(&failed), "{failed}");
    let metrics = gateway.admin().get("/metrics").text();
    for line in ["rouse_engines_ejected{model=\"m\"} 1", "rouse_ejections_total{model=\"m\"} 1"] {
        assert!(metrics.contains(line), "{line}");
    }
    gateway.until_logged("its requests fail");
    EngineUnderTest::of(&gateway, "m#2").faults(r#"{"status": null}"#);
    gateway.until("it is back", Duration::from_secs(30), || {
        (0..10).for_each(|n| assert_eq!(client.post(CHAT, &turn(n, 0)).status, 200));
        gateway.admin().get("/metrics").text().contains("rouse_engines_ejected{model=\"m\"} 0")
    });
}
