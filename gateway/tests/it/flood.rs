//! A crowd of clients that open and drop requests for a cold model delays its start by nearly nothing.
//!
//! The clients take a core themselves, and more beside other work. So each start in the flood is compared with one at
//! the same moment, of another gateway that has no flood: both have the machine's load, and only one the requests.
//! The gateways are optimised programs, as releases are: an unoptimised one needs a core of its own for such a crowd.
//! `make test-bench` has them and runs this test.

use std::{
    env,
    path::PathBuf,
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
/// Starts of each gateway, with the flood at the one and at the other in turn.
const STARTS: usize = 6;
/// Share of those clients that must come: the test's own threads may be slow.
const MIN_SHARE: f64 = 0.5;
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

/// Returns how long a start takes at each of two gateways at the same moment, the first of them in the flood.
///
/// Adds the number of the flood's clients.
fn start_times(
    flooded: &GatewayProcess,
    quiet: &GatewayProcess,
    model: &str,
    count: &AtomicU64,
) -> (Duration, Duration) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| flood(flooded.client(), model, &is_over, count));
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
#[ignore = "needs optimised programs: make test-bench"]
fn two_hundred_clients_that_come_and_go_delay_no_cold_start() {
    let _alone = lock_timed_tests();
    let folder = env::var_os("ROUSE_OPTIMISED").expect("ROUSE_OPTIMISED: the folder with optimised programs");
    let program = PathBuf::from(folder).join("rouse-gateway");
    let names: Vec<String> = (0..STARTS).map(|n| format!("model-{n}")).collect();
    let gateways = [(); 2].map(|()| {
        // Each model has an accelerator of its own, so that a start waits for its engine alone.
        let mut fixture =
            GatewayFixture::new(&["1200Mi"; STARTS]).settings(UNLIMITED_CONNECTIONS).program(program.clone());
        for name in &names {
            fixture = fixture.model(&SimModel { flags: ENGINE, ..SimModel::new(name) });
        }
        fixture.start()
    });
    let clients = AtomicU64::new(0);
    let (mut flooded, mut quiet) = (Vec::new(), Vec::new());
    for (round, model) in names.iter().enumerate() {
        let (in_flood, beside) =
            start_times(&gateways[round % 2], &gateways[(round + 1) % 2], model, &clients);
        flooded.push(in_flood);
        quiet.push(beside);
    }
    let under_way: Duration = quiet.iter().zip(&flooded).map(|(quiet, flooded)| *quiet.max(flooded)).sum();
    let most = CLIENTS as f64 * under_way.div_duration_f64(PATIENCE);
    let (quiet, flooded, clients) = (median(quiet), median(flooded), clients.into_inner());
    println!(
        "medians of {STARTS} starts: {flooded:.1?} with {clients} requests that leave after {PATIENCE:?}, {quiet:.1?} \
         beside them"
    );
    assert!(clients as f64 >= MIN_SHARE * most, "only {clients} clients came, of {most:.0}");
    let delay = flooded.saturating_sub(quiet);
    assert!(delay <= MAX_DELAY, "the flood delays a start by {delay:.1?}: {quiet:.1?}, {flooded:.1?}");
    for gateway in &gateways {
        let idle = || gateway.fleet()["models"].as_array().unwrap().iter().all(|model| model["waiting"] == 0);
        gateway.until("no request waits", Duration::from_secs(10), idle);
    }
}
