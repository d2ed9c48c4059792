//! A crowd of clients that open and drop requests for a cold model delays its start by nearly nothing.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    live::UNLIMITED_CONNECTIONS,
    lock_timed_tests,
    support::{
        GatewayFixture, GatewayProcess, SimModel, TestClient,
        client::{chat_body, request},
        pause,
    },
};

/// Clients of the flood at one time.
const CLIENTS: usize = 200;
const THREADS: usize = 4;
/// How long a client waits before it leaves. All together come and go about 6,600 times a second at most.
const PATIENCE: Duration = Duration::from_millis(30);
/// Starts in each of the two runs.
const STARTS: usize = 5;
const MAX_DELAY: Duration = Duration::from_millis(50);
/// The engine's own time, longer than in other tests so that the flood has time to do harm.
const ENGINE: &str = "--start-time 400ms";

/// Ends the flood when it is dropped.
struct FloodEnd<'a>(&'a AtomicBool);

/// Opens and drops requests for the model until `is_over`. Counts them.
fn flood(client: TestClient, model: &str, is_over: &AtomicBool, count: &AtomicU64) {
    let bytes = request("/v1/chat/completions", "", &chat_body(model, true, 1));
    while !is_over.load(Ordering::Acquire) {
        let clients: Vec<_> = (0..CLIENTS / THREADS).map(|_| client.open(&bytes)).collect();
        count.fetch_add(clients.len() as u64, Ordering::Relaxed);
        pause(PATIENCE);
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

/// Returns how long the start takes while other clients come and go, and adds their number.
fn start_time_in_flood(gateway: &GatewayProcess, model: &str, count: &AtomicU64) -> Duration {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| flood(gateway.client(), model, &is_over, count));
        }
        // The flood ends also with a failed assertion.
        let _end = FloodEnd(&is_over);
        start_time(gateway, model)
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
    let names: Vec<String> = (0..2 * STARTS).map(|n| format!("model-{n}")).collect();
    // Each model has an accelerator of its own, so that a start waits for its engine alone.
    let mut fixture = GatewayFixture::new(&["1200Mi"; 2 * STARTS]).settings(UNLIMITED_CONNECTIONS);
    for name in &names {
        fixture = fixture.model(&SimModel { flags: ENGINE, ..SimModel::new(name) });
    }
    let gateway = fixture.start();
    let flooding = AtomicU64::new(0);
    let (mut quiet, mut flooded) = (Vec::new(), Vec::new());
    for pair in names.chunks(2) {
        quiet.push(start_time(&gateway, &pair[0]));
        flooded.push(start_time_in_flood(&gateway, &pair[1], &flooding));
    }
    let (quiet, flooded, clients) = (median(quiet), median(flooded), flooding.into_inner());
    println!(
        "medians of {STARTS} starts: {quiet:.1?} alone, {flooded:.1?} beside {clients} requests that leave"
    );
    assert!(clients >= (CLIENTS * STARTS) as u64, "only {clients} clients came");
    let delay = flooded.saturating_sub(quiet);
    assert!(delay <= MAX_DELAY, "the flood delays a start by {delay:.1?}: {quiet:.1?}, {flooded:.1?}");
    let leases = || gateway.fleet()["models"].as_array().unwrap().iter().all(|model| model["waiting"] == 0);
    gateway.until("no request waits", Duration::from_secs(10), leases);
}
