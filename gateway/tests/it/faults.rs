//! Engines that fail, in every way that engine-sim supports: what their clients see, and where their memory goes.

use std::{path::Path, thread, time::Duration};

use nix::sys::signal::Signal;
use rouse::engine::SLEEP_DENIAL_TIMEOUT;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    live::EngineUnderTest,
    support::{
        GatewayFixture, GatewayProcess, SimModel, TestClient, TestResponse, client::TestExchange, pause, read,
    },
};

const TURNS: &str = "turns: {residency: 200ms, maxTurn: 1s, drain: {deadline: 2s, onDeadline: cut}}";
/// The gateway notices hangs in about three seconds instead of ten.
const QUICK: &str = "timeouts: {progress: 2s, stop: 1s, wake: 1s, health: {every: 200ms, timeout: 300ms}}";

/// Sends a chat request, and sends it again after a 502, as stock clients do. A dying process closes its sockets one
/// after the other, so a request can still reach it and get a 502 that asks for a retry. By then the process no longer
/// listens. If the process dies slowly, it may have begun the request.
fn asked(client: TestClient, stream: bool, tokens: u32) -> TestResponse {
    let answer = client.chat("m", stream, tokens);
    if answer.status != 502 {
        return answer;
    }
    assert_eq!(answer.json()["error"]["code"], "engine_closed");
    let begun = answer.text().contains("may have started processing the request");
    assert_eq!(answer.header("x-should-retry"), (!begun).to_string());
    client.chat("m", stream, tokens)
}

#[test]
fn an_engine_killed_mid_stream_ends_the_stream_with_an_error_event_and_the_next_request_succeeds() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    let stream = gateway.client().open_stream("m", 100_000);
    let engine = EngineUnderTest::of(&gateway, "m#0");
    engine.signal(Signal::SIGKILL);
    let broken = stream.rest();
    assert!(broken.broke_off_with("engine_failed"), "{}", broken.text());
    assert!(
        broken.text().contains("the engine of 'm' failed: killed by signal 9 (killed:9)"),
        "{}",
        broken.text()
    );
    let next = asked(gateway.client(), true, 4);
    assert!(next.is_whole_stream(), "{}", next.text());
    assert_ne!(EngineUnderTest::of(&gateway, "m#0").pid, engine.pid);
}

#[test]
fn an_engine_that_dies_mid_stream_breaks_that_stream_only() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    EngineUnderTest::of(&gateway, "m#0").faults(r#"{"die-mid-stream": 3}"#);
    let broken = gateway.client().chat("m", true, 50);
    assert!(
        broken.broke_off_with("engine_failed") || broken.broke_off_with("engine_closed"),
        "{}",
        broken.text()
    );
    let next = asked(gateway.client(), false, 4);
    assert_eq!(next.status, 200, "{}", next.text());
}

#[test]
fn a_stopped_engine_is_out_of_rotation_in_fifteen_seconds_whether_idle_or_streaming() {
    let gateway = GatewayFixture::new(&["1Gi", "1Gi"])
        .model(&SimModel::new("idle"))
        .model(&SimModel::new("busy"))
        .start();
    assert!(gateway.client().chat("idle", true, 4).is_whole_stream());
    let stream = gateway.client().open_stream("busy", 100_000);
    let engines = ["idle#0", "busy#0"].map(|id| EngineUnderTest::of(&gateway, id));
    engines.iter().for_each(|engine| engine.signal(Signal::SIGSTOP));
    let stopped = Instant::now();
    for id in ["idle#0", "busy#0"] {
        gateway.until("out of rotation", Duration::from_secs(15) - stopped.elapsed(), || {
            gateway.engine(id)["state"] != "Awake"
        });
        println!("{id}: out of rotation after {:?}", stopped.elapsed());
    }
    let broken = stream.rest();
    assert!(broken.broke_off_with("engine_failed"), "{}", broken.text());
    assert!(stopped.elapsed() < Duration::from_secs(15), "{:?}", stopped.elapsed());
    for (id, engine) in ["idle", "busy"].iter().zip(&engines) {
        let again = gateway.client().chat(id, true, 4);
        assert!(again.is_whole_stream(), "{}", again.text());
        assert!(!engine.lives());
    }
    println!("both serve again after {:?}", stopped.elapsed());
}

#[test]
fn a_long_prefill_is_not_taken_for_a_hang() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    let engine = EngineUnderTest::of(&gateway, "m#0");
    engine.faults(r#"{"long-prefill": "13s"}"#);
    let began = Instant::now();
    let long = gateway.client().chat("m", true, 4);
    assert!(long.is_whole_stream(), "{}", long.text());
    assert!(began.elapsed() >= Duration::from_secs(13));
    assert_eq!(EngineUnderTest::of(&gateway, "m#0").pid, engine.pid);
}

#[test]
fn an_engine_that_answers_its_health_probe_and_nothing_else_is_replaced() {
    let timeouts =
        "timeouts: {firstByte: 500ms, progress: 1s, stop: 1s, health: {every: 100ms, timeout: 300ms}}";
    let faults = [("deaf", r#"{"health-while-dead": true}"#), ("mute", r#"{"stall-streams": true}"#)];
    let gateway = GatewayFixture::new(&["1Gi", "1Gi"])
        .settings(timeouts)
        .model(&SimModel::new(faults[0].0))
        .model(&SimModel::new(faults[1].0))
        .start();
    let client = gateway.client();
    let ends = faults.map(|(model, fault)| {
        assert!(client.chat(model, true, 4).is_whole_stream());
        let engine = EngineUnderTest::of(&gateway, &format!("{model}#0"));
        engine.faults(fault);
        let client = gateway.client();
        let asks = thread::spawn(move || (0..30).any(|_| client.chat(model, true, 4).is_whole_stream()));
        (asks, engine)
    });
    for (asks, engine) in ends {
        assert!(asks.join().unwrap() && !engine.lives(), "another one answers");
    }
}

#[test]
fn a_hung_engine_with_open_streams_keeps_its_memory_until_its_process_is_gone() {
    let fixture = GatewayFixture::new(&["1200Mi"]);
    let journal = fixture.dir().join("journal.jsonl");
    let gateway = fixture
        .settings(QUICK)
        .model(&SimModel { flags: "--fault ignore-sigterm", ..SimModel::new("hangs") })
        .model(&SimModel::new("waits"))
        .flag("--journal")
        .flag(journal.to_str().unwrap())
        .start();
    let streams: Vec<TestExchange> = (0..3).map(|_| gateway.client().open_stream("hangs", 100_000)).collect();
    let engine = EngineUnderTest::of(&gateway, "hangs#0");
    engine.faults(r#"{"hang": true}"#);
    let second = gateway.client().open_chat("waits", true, 4);
    while engine.lives() {
        let fleet = gateway.fleet();
        let account = &fleet["accelerators"][0];
        assert!(account["reserved"].as_u64() <= account["capacity"].as_u64(), "{fleet}");
        let state = gateway.engine("waits#0")["state"].clone();
        assert!(state == "Cold" || !engine.lives(), "{state} while the hung process lives");
        let used = meter(&gateway);
        assert!(used.0 <= used.1, "{used:?}");
        pause(Duration::from_millis(20));
    }
    for stream in streams {
        let broken = stream.rest();
        assert!(broken.broke_off_with("engine_failed"), "{}", broken.text());
    }
    let second = second.rest();
    assert!(second.is_whole_stream(), "{}", second.text());
    gateway.until_journaled(&journal, &["\"placed\"", "waits#0"]);
    let order = events(&journal);
    let at = |event: &str, id: &str| order.iter().position(|(e, i)| e == event && i == id);
    let (drained, gone, placed) = (at("drained", "hangs#0"), at("gone", "hangs#0"), at("placed", "waits#0"));
    assert!(drained.is_some() && drained < gone && gone < placed, "{drained:?} {gone:?} {placed:?}");
}

#[test]
fn a_wake_that_is_refused_or_hangs_becomes_a_cold_start_that_the_client_does_not_notice() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings(QUICK)
        .settings("stream: {grace: 30s}")
        .model(&SimModel::new("m"))
        .start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    for fault in [r#"{"refuse-wake": true}"#, r#"{"hang-wake": true}"#] {
        asleep(&gateway, "m", 1);
        let engine = EngineUnderTest::of(&gateway, "m#0");
        engine.faults(fault);
        let answer = gateway.client().chat("m", true, 4);
        assert!(answer.is_whole_stream(), "{fault}: {}", answer.text());
        assert_eq!(answer.header("x-rouse-cold-start"), "cold", "{fault}");
        assert!(!engine.lives(), "{fault}");
    }
}

#[test]
fn an_engine_that_will_not_sleep_is_replaced_and_its_place_is_taken() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings(TURNS)
        .model(&SimModel::new("first"))
        .model(&SimModel::new("second"))
        .start();
    assert!(gateway.client().chat("first", true, 4).is_whole_stream());
    EngineUnderTest::of(&gateway, "first#0").faults(r#"{"refuse-sleep": true}"#);
    for model in ["second", "first"] {
        let answer = gateway.client().chat(model, true, 4);
        assert!(answer.is_whole_stream(), "{}", answer.text());
    }
}

/// A server without sleep mode answers this way. The engine serves the requests that arrive during the order to sleep;
/// without a request the gateway stops it.
#[test]
fn an_engine_that_takes_the_order_to_sleep_and_stays_awake_serves_who_comes_meanwhile() {
    let sim = SimModel {
        flags: "--fault ignore-sleep --fault hang-sleep",
        keys: "idle: {sleepAfter: 300ms}",
        ..SimModel::new("m")
    };
    let gateway = GatewayFixture::new(&["2Gi"]).model(&sim).start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    let engine = EngineUnderTest::of(&gateway, "m#0");
    gateway.until("told to sleep", Duration::from_secs(10), || {
        gateway.engine("m#0")["state"] == "FallingAsleep(1)"
    });
    let comes = gateway.client().open_chat("m", true, 4);
    gateway.until("it waits", Duration::from_secs(10), || gateway.fleet()["models"][0]["waiting"] == 1);
    gateway.fault("m#0", r#"{"hang-sleep": null}"#);
    let began = Instant::now();
    let answer = comes.rest();
    let waited = began.elapsed();
    assert!(answer.is_whole_stream(), "{}", answer.text());
    // A gateway that does not trust the engine would wait as long as a sleep may take, 11 s.
    assert!(waited <= SLEEP_DENIAL_TIMEOUT.duration() + Duration::from_secs(5), "{waited:?}");
    assert!(engine.lives());
    // The next time no request arrives.
    gateway.until("cold", Duration::from_secs(10), || gateway.engine("m#0")["state"] == "Cold");
    assert!(!engine.lives());
    assert_eq!(gateway.fleet()["accelerators"][0]["reserved"], 0);
}

#[test]
fn weights_are_whole_again_after_a_sleep_of_either_level() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    let before = gateway.client().chat("m", false, 8).json()["choices"].clone();
    for level in [1, 2] {
        asleep(&gateway, "m", level);
        let after = gateway.client().chat("m", false, 8);
        assert_eq!(after.header("x-rouse-cold-start"), "hot");
        assert_eq!(after.json()["choices"], before, "level {level}");
    }
}

#[test]
fn a_swap_waits_for_memory_that_comes_back_late() {
    let late = SimModel { flags: "--fault late-memory=1500ms", ..SimModel::new("late") };
    let gateway =
        GatewayFixture::new(&["1200Mi"]).settings(TURNS).model(&late).model(&SimModel::new("next")).start();
    assert!(gateway.client().chat("late", true, 4).is_whole_stream());
    let began = Instant::now();
    let next = gateway.client().chat("next", true, 4);
    assert!(next.is_whole_stream(), "{}", next.text());
    assert!(began.elapsed() >= Duration::from_millis(1500), "{:?}", began.elapsed());
    assert!(gateway.client().chat("late", true, 4).is_whole_stream());
    for model in ["late", "next"] {
        let log = read(&gateway.dir.join(format!("state/logs/{model}-0.log")));
        assert!(!log.contains("OutOfMemory") && log.matches("=== rouse:").count() == 1, "{log}");
    }
}

#[test]
fn an_engine_that_ignores_sigterm_is_killed_after_its_grace() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings(QUICK)
        .model(&SimModel { flags: "--fault ignore-sigterm", ..SimModel::new("m") })
        .start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    let engine = EngineUnderTest::of(&gateway, "m#0");
    let began = Instant::now();
    assert_eq!(gateway.admin().post("/admin/v1/models/m/stop", "").status, 202);
    gateway.until("killed", Duration::from_secs(4), || !engine.lives());
    assert!(began.elapsed() >= Duration::from_secs(1));
    gateway.until("cold", Duration::from_secs(2), || gateway.engine("m#0")["state"] == "Cold");
    assert_eq!(gateway.fleet()["accelerators"][0]["reserved"], 0);
}

#[test]
fn a_command_that_exits_is_told_to_clients_by_its_class_and_tried_again_later() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .model(&SimModel { flags: "--fault exit-at-start=3", ..SimModel::new("m") })
        .start();
    let refused = gateway.client().chat("m", false, 4);
    assert_eq!(refused.status, 503, "{}", refused.text());
    let error = &refused.json()["error"];
    assert_eq!(error["code"], "model_not_ready");
    assert!(error["message"].as_str().unwrap().contains("exited:3"), "{error}");
    assert!(!refused.header("retry-after").is_empty());
    let file = gateway.dir.join("rouse.yaml");
    std::fs::write(&file, read(&file).replace("exit-at-start=3", "slow-start=0")).unwrap();
    gateway.until("it starts again", Duration::from_secs(10), || {
        gateway.client().chat("m", false, 4).status == 200
    });
}

/// A request that reaches the dying process, which may have begun it, gets an answer that asks for a retry. A request
/// that finds no listener waits for the next engine.
#[test]
fn a_request_to_an_engine_that_died_unnoticed_succeeds_or_is_asked_for_again() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    for _ in 0..3 {
        assert!(gateway.client().chat("m", true, 2).is_whole_stream());
        let engine = EngineUnderTest::of(&gateway, "m#0");
        engine.signal(Signal::SIGKILL);
        let clients: Vec<_> = (0..4)
            .map(|_| {
                let client = gateway.client();
                thread::spawn(move || asked(client, true, 2))
            })
            .collect();
        for client in clients {
            let answer = client.join().unwrap();
            assert!(answer.is_whole_stream(), "{}", answer.text());
        }
    }
}

/// Orders a model to sleep, and waits until it is asleep.
fn asleep(gateway: &GatewayProcess, model: &str, level: u8) {
    let path = format!("/admin/v1/models/{model}/sleep?level={level}");
    let order = gateway.admin().post(&path, "");
    assert_eq!(order.status, 202, "{}", order.text());
    let state = format!("Asleep({level})");
    gateway.until(&state, Duration::from_secs(5), || {
        gateway.engine(&format!("{model}#0"))["state"] == json!(state)
    });
}

/// Used and total bytes of the only accelerator, from its own file.
fn meter(gateway: &GatewayProcess) -> (u64, u64) {
    let book = engine_sim::accelerator::AcceleratorFile::open(gateway.dir.join("accelerators.json")).unwrap();
    let usage = book.usage().unwrap();
    let gpu = usage.get("gpu-0").unwrap();
    (gpu.used_total, gpu.capacity)
}

/// Names and engines of all events of a journal, in order.
fn events(journal: &Path) -> Vec<(String, String)> {
    let lines = read(journal);
    // The last line may be incomplete.
    let whole = lines.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let lines = whole.map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines
        .flat_map(|line| line["events"].as_array().cloned().unwrap_or_default())
        .map(|event| {
            let text = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
            (text("event"), text("engine"))
        })
        .collect()
}
