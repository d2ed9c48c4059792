//! The gateway's own share of the time to wake a model, beyond the engine's.

use std::{
    io::{Read as _, Write as _},
    time::Duration,
};

use serde_json::Value;
use tokio::time::Instant;

use crate::support::{
    GatewayFixture, GatewayProcess, SimModel,
    client::{chat_body, request},
};

/// How long an engine takes for its own wake, and for its sleep before another engine's wake.
const MOVE: Duration = Duration::from_millis(50);
/// From the start of the process to its first good health answer.
const START: Duration = Duration::from_millis(100);
const WAKES: usize = 21;
const STARTS: usize = 5;
const READY_TO_FIRST_BYTE: Duration = Duration::from_millis(20);
const BEYOND_A_WAKE: Duration = Duration::from_millis(50);
/// Most of this time creates the process, here from an unoptimised binary.
const BEYOND_A_START: Duration = Duration::from_millis(300);

/// One start of the model of a parked stream.
struct TimedStart {
    /// From the engine's first ready answer to the first byte of the request that the gateway writes to it.
    handed_over: Duration,
    /// From the request's first byte to the answer's first byte.
    whole: Duration,
}

#[test]
fn a_wake_costs_little_beyond_the_engines_own_time() {
    let _alone = crate::lock_timed_tests();
    let gateway = with_room_for_one(&["first"]);
    gateway.client().chat("first", true, 1);
    let mut wakes = 0_usize;
    measure("wake, room is there", WAKES, (MOVE, BEYOND_A_WAKE), || {
        wakes += 1;
        put_to_sleep(&gateway, "first");
        start(&gateway, "first", wakes)
    });
    gateway.until_unused("first#0");
}

#[test]
fn a_wake_that_needs_room_costs_little_beyond_both_engines_own_time() {
    let _alone = crate::lock_timed_tests();
    let gateway = with_room_for_one(&["first", "second"]);
    gateway.client().chat("first", true, 1);
    gateway.client().chat("second", true, 1);
    let mut wakes = 0_usize;
    measure("wake, another sleeps first", WAKES, (MOVE * 2, BEYOND_A_WAKE), || {
        let model = if wakes.is_multiple_of(2) { "first" } else { "second" };
        wakes += 1;
        idle(&gateway);
        start(&gateway, model, wakes.div_ceil(2))
    });
    gateway.until_unused("first#0");
    gateway.until_unused("second#0");
}

#[test]
fn a_cold_start_hands_the_parked_request_over_at_once() {
    let _alone = crate::lock_timed_tests();
    let gateway = with_room_for_one(&["first"]);
    measure("cold start", STARTS, (START, BEYOND_A_START), || {
        gateway.admin().post("/admin/v1/models/first/stop", "");
        gateway.until("stopped", Duration::from_secs(10), || gateway.engine("first#0")["state"] == "Cold");
        start(&gateway, "first", 0)
    });
}

/// Asserts the bounds for the medians of `n` starts. Other processes can take this machine's cores for seconds, so a
/// round that misses the bounds runs again, twice at most. The gateway's own cost is in every round.
fn measure(
    what: &str,
    n: usize,
    (engines, most): (Duration, Duration),
    mut start: impl FnMut() -> TimedStart,
) {
    let mut told = String::new();
    for _ in 0..3 {
        let starts: Vec<TimedStart> = (0..n).map(|_| start()).collect();
        let handed_over = median(starts.iter().map(|s| s.handed_over).collect());
        let whole = median(starts.iter().map(|s| s.whole).collect());
        let beyond = whole.saturating_sub(engines);
        told = format!(
            "{what} (n={n}), medians: first ready answer to the request's first byte {handed_over:.1?}; whole \
             {whole:.1?}, of which beyond the engines' own {engines:?}: {beyond:.1?}"
        );
        println!("{told}");
        if handed_over <= READY_TO_FIRST_BYTE && beyond <= most {
            return;
        }
    }
    panic!("{told}");
}

fn median(mut spans: Vec<Duration>) -> Duration {
    spans.sort_unstable();
    spans.get(spans.len() / 2).copied().unwrap()
}

/// A gateway that evicts each of these models as soon as a request arrives for another.
fn with_room_for_one(models: &[&str]) -> GatewayProcess {
    let turns = "turns: {residency: 1ms, maxTurn: 1s, drain: {deadline: 2s, onDeadline: cut}}";
    let with = |fixture: GatewayFixture, name: &&str| {
        fixture.model(&SimModel { flags: "--ttft 0 --itl 0", ..SimModel::new(name) })
    };
    models.iter().fold(GatewayFixture::new(&["1200Mi"]).settings(turns), with).start()
}

/// Requests a model that is not awake, and measures the start. `wakes` is the engine's expected wake count afterwards:
/// 0 for a cold start.
fn start(gateway: &GatewayProcess, model: &str, wakes: usize) -> TimedStart {
    let asked = Instant::now();
    let mut stream = gateway.client().connect();
    let head = request("/v1/chat/completions", "", &chat_body(model, true, 1));
    stream.write_all(head.as_bytes()).unwrap();
    stream.read_exact(&mut [0]).unwrap();
    let whole = asked.elapsed();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]"), "{rest}");
    let counters = gateway.counters(&format!("{model}#0"));
    assert_eq!(counters["wakes"].as_u64().unwrap() as usize, wakes, "{counters}");
    // The wake ends a little before the first answer that reports the model awake, so its end is the stricter measure.
    let ready = if wakes == 0 { "first_ready_unix_us" } else { "last_wake_unix_us" };
    let ready = counters[ready].as_u64().unwrap();
    let moments = counters["first_request_byte_unix_us"].as_array().unwrap();
    let first = moments.iter().filter_map(Value::as_u64).find(|us| *us >= ready).unwrap();
    TimedStart { handed_over: Duration::from_micros(first - ready), whole }
}

fn put_to_sleep(gateway: &GatewayProcess, model: &str) {
    let answer = gateway.admin().post(&format!("/admin/v1/models/{model}/sleep"), "");
    assert_eq!(answer.status, 202, "{}", answer.text());
    // The gateway has read the engine's memory as free, too, so the wake waits for nothing of the sleep.
    let asleep = || {
        let engine = gateway.engine(&format!("{model}#0"));
        engine["state"] == "Asleep(1)" && engine["reserved"].as_u64() == Some(64 << 20)
    };
    gateway.until("asleep", Duration::from_secs(10), asleep);
}

/// Waits until no engine has a lease and every evicted engine has released its memory.
fn idle(gateway: &GatewayProcess) {
    let quiet = || {
        let fleet = gateway.fleet();
        let engines = fleet["engines"].as_array().unwrap();
        let rests = |e: &Value| {
            e["leases"] == 0 && (e["state"] == "Awake" || e["reserved"].as_u64() == Some(64 << 20))
        };
        engines.iter().all(rests)
    };
    gateway.until("idle", Duration::from_secs(10), quiet);
}
