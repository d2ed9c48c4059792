use std::{
    io::{Read, Write},
    thread,
    time::Duration,
};

use engine_sim::content;
use serde_json::json;
use tokio::time::Instant;

use crate::support::*;

const FAST: &str = "--enable-sleep-mode --sleep-time 5ms --wake-time 5ms --itl 1ms";

fn says(engine: &EngineSimProcess) -> String {
    chat_text(&engine.post(CHAT, &chat("a", 3, true)))
}

fn right() -> String {
    content::text("m", "a", 0, 3)
}

fn corrupt() -> String {
    content::CORRUPT.repeat(3)
}

#[test]
fn level_1_sleeps_and_wakes_unharmed() {
    let engine = start(FAST);
    assert_eq!(engine.post("/sleep?level=1", "").status, 200);
    assert_eq!(engine.get("/is_sleeping").json(), json!({"is_sleeping": true}));
    assert_eq!(engine.get("/health").status, 200);
    assert_eq!(engine.post("/wake_up", "").status, 200);
    assert_eq!(engine.get("/is_sleeping").json(), json!({"is_sleeping": false}));
    assert_eq!(says(&engine), right());
    let counters = engine.counters();
    assert_eq!((&counters["sleeps"], &counters["wakes"]), (&json!(1), &json!(1)));
    assert!(counters["last_wake_unix_us"].as_u64().is_some());
}

#[test]
fn the_first_sleep_at_level_1_pins_host_memory_and_the_second_reuses_it() {
    let engine = start(&format!("{FAST} --memory-host 8Mi --pin-rate 8Mi"));
    let timed = |path: &str| {
        let began = Instant::now();
        assert_eq!(engine.post(path, "").status, 200, "{path}");
        let took = began.elapsed();
        assert_eq!(engine.post("/wake_up", "").status, 200);
        took
    };
    let pin = Duration::from_secs(1);
    assert!(timed("/sleep?level=2") < pin, "level 2 keeps no weights");
    assert!(timed("/sleep?level=1") >= pin);
    assert!(timed("/sleep?level=1") < pin);
}

#[test]
fn level_2_and_a_plain_wake_is_corrupt() {
    let engine = start(FAST);
    engine.post("/sleep?level=2", "");
    engine.post("/wake_up", "");
    assert_eq!(says(&engine), corrupt());
}

#[test]
fn level_2_in_the_right_order_is_not_corrupt() {
    let engine = start(FAST);
    engine.post("/sleep?level=2&mode=wait", "");
    let reload = r#"{"method":"reload_weights"}"#;
    assert_eq!(engine.post("/collective_rpc", reload).status, 500);
    assert_eq!(engine.post("/wake_up?tags=weights", "").status, 200);
    assert_eq!(engine.get("/is_sleeping").json(), json!({"is_sleeping": true}));
    assert_eq!(engine.post("/collective_rpc", reload).json(), json!({"results": [null]}));
    assert_eq!(engine.post("/wake_up?tags=kv_cache", "").status, 200);
    assert_eq!(engine.get("/is_sleeping").json(), json!({"is_sleeping": false}));
    assert_eq!(engine.post("/reset_prefix_cache", "").status, 200);
    assert_eq!(says(&engine), right());
    assert_eq!(engine.counter("wakes"), 1);
}

#[test]
fn level_2_without_a_step_stays_corrupt() {
    for step in ["reload", "reset"] {
        let engine = start(FAST);
        engine.post("/sleep?level=2", "");
        engine.post("/wake_up?tags=weights&tags=kv_cache", "");
        match step {
            "reload" => engine.post("/collective_rpc", r#"{"method":"reload_weights"}"#),
            _ => engine.post("/reset_prefix_cache", ""),
        };
        assert_eq!(says(&engine), corrupt(), "{step} alone");
    }
}

#[test]
fn a_request_to_a_sleeper_fails_and_is_counted() {
    let engine = start(FAST);
    engine.post("/sleep", "");
    assert_eq!(engine.post(CHAT, &chat("a", 1, false)).status, 500);
    assert_eq!(engine.counter("requests_while_asleep"), 1);
}

#[test]
fn a_sleep_that_waits_lets_streams_finish() {
    let engine = start(&format!("{FAST} --itl 20ms"));
    let mut stream = connect(engine.addr);
    let body = chat("a", 10, true);
    stream.write_all(request("POST", CHAT, &body, "connection: close\r\n").as_bytes()).unwrap();
    engine.wait_for_counter("running", 1);
    let addr = engine.addr;
    let sleep = thread::spawn(move || call(addr, "POST", "/sleep?level=1&mode=wait", "").status);
    assert_eq!(chat_text(&read(&mut stream)), content::text("m", "a", 0, 10));
    assert_eq!(sleep.join().unwrap(), 200);
    assert_eq!(engine.counter("aborted_by_sleep"), 0);
}

#[test]
fn a_sleep_that_does_not_wait_aborts_and_counts() {
    let engine = start(&format!("{FAST} --itl 60s"));
    let mut stream = open_stream(engine.addr, "a", 10);
    engine.wait_for_counter("generation_tokens", 1);
    assert_eq!(engine.post("/sleep?level=1", "").status, 200);
    let mut rest = vec![0; 4096];
    let mut text = Vec::new();
    while !text.ends_with(b"0\r\n\r\n") {
        let n = stream.read(&mut rest).unwrap();
        assert!(n > 0);
        text.extend_from_slice(&rest[..n]);
    }
    assert!(String::from_utf8(text).unwrap().contains(r#""finish_reason":"abort""#));
    let counters = engine.counters();
    assert_eq!((&counters["aborted_by_sleep"], &counters["aborts"]), (&json!(1), &json!(0)));
}

#[test]
fn without_sleep_mode_its_routes_do_not_exist() {
    let engine = start("");
    for path in ["/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache"] {
        assert_eq!(engine.post(path, "{}").status, 404, "{path}");
    }
    assert_eq!(engine.get("/is_sleeping").status, 404);
}

#[test]
fn sleep_and_wake_can_be_refused() {
    let engine = start(&format!("{FAST} --fault refuse-sleep --fault refuse-wake"));
    assert_eq!(engine.post("/sleep", "").status, 500);
    assert_eq!(engine.get("/is_sleeping").json(), json!({"is_sleeping": false}));
    engine.set(r#"{"refuse-sleep": null}"#);
    assert_eq!(engine.post("/sleep", "").status, 200);
    assert_eq!(engine.post("/wake_up", "").status, 500);
    assert_eq!(engine.get("/is_sleeping").json(), json!({"is_sleeping": true}));
}

#[test]
fn an_order_to_sleep_can_be_taken_and_ignored() {
    let engine = start(&format!("{FAST} --fault ignore-sleep"));
    assert_eq!(engine.post("/sleep", "").status, 200);
    assert_eq!(engine.get("/is_sleeping").json(), json!({"is_sleeping": false}));
    assert_eq!(says(&engine), right());
    engine.set(r#"{"ignore-sleep": null}"#);
    assert_eq!(engine.post("/sleep", "").status, 200);
    assert_eq!(engine.get("/is_sleeping").json(), json!({"is_sleeping": true}));
}

#[test]
fn sleep_and_wake_can_hang_until_the_fault_is_cleared() {
    for (fault, path) in [("hang-sleep", "/sleep"), ("hang-wake", "/wake_up")] {
        let engine = start(FAST);
        if path == "/wake_up" {
            engine.post("/sleep", "");
        }
        engine.set(&format!(r#"{{"{fault}": true}}"#));
        let mut io = connect(engine.addr);
        io.write_all(request("POST", path, "", "connection: close\r\n").as_bytes()).unwrap();
        let state = path == "/wake_up";
        assert_eq!(engine.get("/is_sleeping").json(), json!({"is_sleeping": state}));
        engine.set(&format!(r#"{{"{fault}": null}}"#));
        assert_eq!(read(&mut io).status, 200);
        assert_eq!(engine.get("/is_sleeping").json(), json!({"is_sleeping": !state}));
    }
}

#[test]
fn a_wake_can_corrupt_even_level_1() {
    let engine = start(&format!("{FAST} --fault corrupt-after-wake"));
    assert_eq!(says(&engine), right());
    engine.post("/sleep?level=1", "");
    engine.post("/wake_up", "");
    assert_eq!(says(&engine), corrupt());
}

#[test]
fn a_client_that_reads_nothing_does_not_hold_up_a_sleep() {
    let engine = start("--enable-sleep-mode --ttft 0 --itl 0");
    let stalled = open_stream(engine.addr, "a", u64::MAX);
    let mut last = 0;
    // Wait until both socket buffers are full.
    while engine.counter("generation_tokens") != last {
        last = engine.counter("generation_tokens");
    }
    assert_eq!(engine.post("/sleep", "").status, 200);
    assert_eq!(engine.counter("aborted_by_sleep"), 1);
    drop(stalled);
}

#[test]
fn a_sleep_aborts_what_waits_as_well_as_what_runs() {
    let engine = start("--enable-sleep-mode --max-running 1 --itl 60s");
    let _running = open_stream(engine.addr, "a", 10);
    engine.wait_for_counter("running", 1);
    let mut waiting = connect(engine.addr);
    waiting
        .write_all(request("POST", CHAT, &chat("b", 5, true), "connection: close\r\n").as_bytes())
        .unwrap();
    engine.wait_for_counter("waiting", 1);
    assert_eq!(engine.post("/sleep?mode=abort", "").status, 200);
    let answer = read(&mut waiting);
    assert!(answer.complete && answer.text().contains(r#""finish_reason":"abort""#), "{answer:?}");
    assert_eq!(engine.counter("aborted_by_sleep"), 2);
}
