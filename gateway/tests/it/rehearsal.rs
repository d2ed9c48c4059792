//! Rehearsed sleep: the first sleep in use is as fast as the second, although the first one of a process pins memory.

use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use crate::{
    lock_timed_tests,
    support::{GatewayFixture, GatewayProcess, SimModel, client::chat_body},
};

/// The first sleep of an engine pins 16 MiB at this rate, which takes 2 s. Each later one takes 50 ms.
const PINNING: &str = "--pin-rate 8Mi";
const PIN_TIME: Duration = Duration::from_secs(2);
/// A swap with a sleep that pins nothing, and a start or wake. The engines' own times are 300 ms.
const FAST_SWAP: Duration = Duration::from_millis(1500);
const PATIENCE: Duration = Duration::from_secs(15);

/// Two models that do not fit beside each other. The engines of `first` pin memory and rehearse their sleep as given.
fn gateway(rehearse: &str, flags: &str) -> GatewayProcess {
    let idle = format!("idle: {{sleepAfter: never, stopAfter: never, level: 1, rehearse: {rehearse}}}");
    let flags = format!("{PINNING} {flags}");
    let first = SimModel { keys: &idle, flags: &flags, stub: None, ..SimModel::new("first") };
    GatewayFixture::new(&["1200Mi"])
        .settings("turns: {residency: 200ms, maxTurn: 10s}\nhost: {sleepMemory: 1Gi}")
        .model(&first)
        .model(&SimModel { stub: None, ..SimModel::new("second") })
        .start()
}

/// How long a request for this model takes.
fn timed_chat(gateway: &GatewayProcess, model: &str) -> Duration {
    let began = Instant::now();
    let response = gateway.client().chat(model, true, 1);
    assert!(response.is_whole_stream(), "{model}: {}", response.text());
    began.elapsed()
}

/// Waits until the engine of `first` serves after its only sleep.
fn until_rehearsed(gateway: &GatewayProcess) {
    gateway.until("first has rehearsed its sleep", PATIENCE, || {
        let counters = gateway.counters("first#0");
        counters["sleeps"] == 1 && counters["wakes"] == 1 && gateway.engine("first#0")["state"] == "Awake"
    });
}

/// How long the swap to the second model takes for the first time, and for the second time. Prints the row of the table
/// in `docs/operations.md`.
fn swaps(gateway: &GatewayProcess, rehearse: &str, first_request: Duration) -> [Duration; 2] {
    let once = timed_chat(gateway, "second");
    timed_chat(gateway, "first");
    let again = timed_chat(gateway, "second");
    println!(
        "rehearse: {rehearse}: first request {first_request:.2?}, first swap {once:.2?}, second swap {again:.2?}"
    );
    [once, again]
}

#[test]
fn without_a_rehearsal_the_first_swap_waits_until_host_memory_is_pinned() {
    let _alone = lock_timed_tests();
    let gateway = gateway("never", "");
    let first_request = timed_chat(&gateway, "first");
    let [once, again] = swaps(&gateway, "never", first_request);
    assert!(once >= PIN_TIME && again < FAST_SWAP, "{once:?}, {again:?}");
    assert_eq!(gateway.counters("first#0")["sleeps"], 2, "both were in use");
}

#[test]
fn an_idle_engine_rehearses_its_sleep_and_its_first_swap_is_as_fast_as_the_second() {
    let _alone = lock_timed_tests();
    let gateway = gateway("idle", "");
    let first_request = timed_chat(&gateway, "first");
    assert!(first_request < PIN_TIME, "the first request does not wait for a rehearsal");
    until_rehearsed(&gateway);
    let [once, again] = swaps(&gateway, "idle", first_request);
    assert!(once < FAST_SWAP && again < FAST_SWAP, "{once:?}, {again:?}");
    let metrics = gateway.admin().get("/metrics").text();
    for transition in ["sleep", "wake"] {
        let labels = format!(r#"model="first",outcome="done",transition="{transition}"}} 1"#);
        let is_counted = |line: &str| line.contains(r#"cause="rehearsal""#) && line.contains(&labels);
        assert!(metrics.lines().any(is_counted), "{metrics}");
    }
}

#[test]
fn a_new_engine_rehearses_its_sleep_before_its_first_request() {
    let _alone = lock_timed_tests();
    let gateway = gateway("start", "");
    let first_request = timed_chat(&gateway, "first");
    assert!(first_request >= PIN_TIME, "its first request waits for the rehearsal");
    until_rehearsed(&gateway);
    let [once, again] = swaps(&gateway, "start", first_request);
    assert!(once < FAST_SWAP && again < FAST_SWAP, "{once:?}, {again:?}");
}

#[test]
fn a_request_during_a_rehearsal_is_served_right_after_the_wake() {
    let _alone = lock_timed_tests();
    let gateway = gateway("idle", "");
    timed_chat(&gateway, "first");
    let generation = gateway.engine("first#0")["generation"].clone();
    let falls_asleep = || gateway.engine("first#0")["state"] == "FallingAsleep(1)";
    gateway.until("the rehearsal begins", PATIENCE, falls_asleep);
    let response = gateway.client().post("/v1/chat/completions", &chat_body("first", false, 4));
    assert_eq!((response.status, response.header("x-rouse-cold-start")), (200, "hot"), "{}", response.text());
    let counters = gateway.counters("first#0");
    assert_eq!((&counters["sleeps"], &counters["wakes"]), (&json!(1), &json!(1)), "no second sleep");
    assert_eq!((&counters["requests_while_asleep"], &counters["failed"]), (&json!(0), &json!(0)));
    assert_eq!(gateway.engine("first#0")["generation"], generation, "the same process");
}

#[test]
fn an_engine_that_does_not_wake_from_its_rehearsal_starts_anew_and_is_not_rehearsed_again() {
    let _alone = lock_timed_tests();
    let gateway = gateway("start", "--fault refuse-wake");
    timed_chat(&gateway, "first");
    assert_eq!(gateway.counters("first#0")["sleeps"], 0, "the second process serves at once");
    assert_eq!(gateway.engine("first#0")["state"], "Awake");
}
