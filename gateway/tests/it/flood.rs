//! A crowd of clients that open and drop requests for a cold model delays its start by nearly nothing.
//!
//! The clients take a core themselves, and more beside other work. So each start in the flood is compared with one at
//! the same moment, of another gateway that has no flood: both have the machine's load, and only one the requests.
//! Where other programs take a share of the cores, the clients come less often. Otherwise only the flooded gateway would
//! lack cores.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    live::UNLIMITED_CONNECTIONS,
    lock_timed_tests,
    machine_load::CoresReading,
    support::{
        GatewayFixture, GatewayProcess, SimModel, TestClient,
        client::{chat_body, request},
        pause,
    },
};

/// Clients of the flood at one time.
const CLIENTS: usize = 200;
const THREADS: usize = 4;
/// How long a client waits before it leaves, if no other programs run. All together come and go about 6,600 times a
/// second at most.
const PATIENCE: Duration = Duration::from_millis(30);
/// For how long the test measures what other programs take.
const LOOK: Duration = Duration::from_millis(500);
/// Starts of each gateway, with the flood at the one and at the other in turn.
const STARTS: usize = 6;
const MAX_DELAY: Duration = Duration::from_millis(50);
/// The engine's own time, longer than in other tests so that the flood has time to do harm.
const ENGINE: &str = "--start-time 400ms";

/// Ends the flood when it is dropped.
struct FloodEnd<'a>(&'a AtomicBool);

/// Returns how long a client waits beside what other programs do now.
fn patience() -> Duration {
    let cores = CoresReading::now();
    pause(LOOK);
    PATIENCE.div_f64(1.0 - cores.others_since().min(0.9))
}

/// Opens and drops requests for the model until `is_over`. Counts them.
fn flood(client: TestClient, model: &str, patience: Duration, is_over: &AtomicBool, count: &AtomicU64) {
    let bytes = request("/v1/chat/completions", "", &chat_body(model, true, 1));
    while !is_over.load(Ordering::Acquire) {
        let clients: Vec<_> = (0..CLIENTS / THREADS).map(|_| client.open(&bytes)).collect();
        count.fetch_add(clients.len() as u64, Ordering::Relaxed);
        pause(patience);
        drop(clients);
    }
}

/// Returns how long a request for this cold model takes.
fn start_time(gateway: &GatewayProcess, model: &str) -> Duration {
    let began = Instant::now();
    let response = gateway.client().chat(model, true, 1);
    assert!(response.is_whole_stream(), "{model}: {}", response.text());
    assert_eq!(response.header("x-rouse-cold-start"), "cold");
    began.elapsed()
}

/// Returns how long a start takes at each of two gateways at the same moment, the first of them in the flood.
///
/// Adds the number of the flood's clients.
fn start_times(
    flooded: &GatewayProcess,
    quiet: &GatewayProcess,
    model: &str,
    patience: Duration,
    count: &AtomicU64,
) -> (Duration, Duration) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| flood(flooded.client(), model, patience, &is_over, count));
        }
        // The flood ends also with a failed assertion.
        let end = FloodEnd(&is_over);
        let beside = scope.spawn(|| start_time(quiet, model));
        let in_flood = start_time(flooded, model);
        // A start in the flood that ends first does not give the other a quiet machine.
        let quiet = beside.join().expect("the start beside the flood");
        drop(end);
        (in_flood, quiet)
    })
}

impl Drop for FloodEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn median(mut spans: Vec<Duration>) -> Duration {
    spans.sort_unstable();
    spans[spans.len() / 2]
}

#[test]
fn two_hundred_clients_that_come_and_go_delay_no_cold_start() {
    let _alone = lock_timed_tests();
    let names: Vec<String> = (0..STARTS).map(|n| format!("model-{n}")).collect();
    let gateways = [(); 2].map(|()| {
        // Each model has an accelerator of its own, so that a start waits for its engine alone.
        let mut fixture = GatewayFixture::new(&["1200Mi"; STARTS]).settings(UNLIMITED_CONNECTIONS);
        for name in &names {
            fixture = fixture.model(&SimModel { flags: ENGINE, ..SimModel::new(name) });
        }
        fixture.start()
    });
    let (patience, clients) = (patience(), AtomicU64::new(0));
    let (mut flooded, mut quiet) = (Vec::new(), Vec::new());
    for (round, model) in names.iter().enumerate() {
        let (in_flood, beside) =
            start_times(&gateways[round % 2], &gateways[(round + 1) % 2], model, patience, &clients);
        flooded.push(in_flood);
        quiet.push(beside);
    }
    let (quiet, flooded, clients) = (median(quiet), median(flooded), clients.into_inner());
    println!(
        "medians of {STARTS} starts: {flooded:.1?} with {clients} requests that leave after {patience:.1?}, {quiet:.1?} \
         beside them"
    );
    assert!(clients >= (CLIENTS * STARTS) as u64, "only {clients} clients came");
    let delay = flooded.saturating_sub(quiet);
    assert!(delay <= MAX_DELAY, "the flood delays a start by {delay:.1?}: {quiet:.1?}, {flooded:.1?}");
    for gateway in &gateways {
        let idle = || gateway.fleet()["models"].as_array().unwrap().iter().all(|model| model["waiting"] == 0);
        gateway.until("no request waits", Duration::from_secs(10), idle);
    }
}
