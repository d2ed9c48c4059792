//! Reports of the engine's load, for clients that ask for them.

use std::{
    io::Write as _,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use rouse_net::engine_load::{EngineLoad, orca};
use rouse_testing::{
    scripted_engine::{read_rest_of_request, scripted},
    wait::holds_within,
};

use crate::support::{
    TEST_TIMEOUT,
    client::chat,
    engine::{echo, sim},
    stub_before, until,
};

const PATH: &str = "/v1/chat/completions";
const ASKS: &str = "endpoint-load-metrics-format: TEXT";
/// The engine answers such a request once its metrics have been read: without requests they are not read.
const WAITS: &str = "x-wait: reading";
const REPORT: &str = "endpoint-load-metrics";

/// The engine's own report, which never passes.
const OWN_REPORT: &str = "endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.99\r\n";

/// An engine with this page of metrics, or with none, which also makes a report of its own. Counts the readings.
fn engine(page: Option<&'static str>) -> (SocketAddr, Arc<AtomicUsize>) {
    let readings = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&readings);
    let address = scripted(move |mut stream, came| {
        let Some(request) = read_rest_of_request(&mut stream, came) else { return };
        let request = String::from_utf8_lossy(&request);
        let reads = request.starts_with("GET /metrics ");
        let (status, headers, body) = match page {
            _ if !reads => ("200 OK", OWN_REPORT, "{}"),
            Some(page) => ("200 OK", "", page),
            None => ("404 Not Found", "", ""),
        };
        if reads {
            counted.fetch_add(1, SeqCst);
        } else if request.contains(WAITS) {
            let read = || counted.load(SeqCst) > 0;
            assert!(holds_within(TEST_TIMEOUT, Duration::from_millis(1), read), "never read");
        }
        let length = body.len();
        let framing = format!("connection: close\r\ncontent-length: {length}\r\n\r\n");
        let head = format!("HTTP/1.1 {status}\r\n{headers}{framing}");
        // The stub may have disconnected.
        drop(stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()));
    });
    (address, readings)
}

#[test]
fn a_client_that_asks_gets_the_engines_load_and_no_other_does() {
    let page = "vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_waiting 3\nvllm:num_requests_running 7\n";
    let (engine, readings) = engine(Some(page));
    let stub = stub_before(engine, &[]);
    for client in [stub.relay(), stub.relay().with("endpoint-load-metrics-format: JSON")] {
        let answer = client.post(PATH, &chat(1));
        assert_eq!((answer.status, answer.header(REPORT)), (200, ""));
    }
    assert_eq!(readings.load(SeqCst), 0, "read for no client");
    let asking = stub.relay().with(ASKS).with(WAITS);
    let mut report = String::new();
    until("a report comes", || {
        report = asking.post(PATH, &chat(1)).header(REPORT).to_owned();
        !report.is_empty()
    });
    let load = EngineLoad { kv_use: Some(0.5), waiting: Some(3.0), running: Some(7.0) };
    assert_eq!(orca::from_header(report.as_bytes()), Some(load), "{report}");
    assert_eq!(stub.relay().post(PATH, &chat(1)).header(REPORT), "");
}

#[test]
fn an_engine_without_metrics_has_no_report_and_is_read_seldom() {
    let (engine, readings) = engine(None);
    let stub = stub_before(engine, &[]);
    let asking = stub.relay().with(ASKS).with(WAITS);
    for _ in 0..20 {
        let answer = asking.post(PATH, &chat(1));
        assert_eq!((answer.status, answer.header(REPORT)), (200, ""));
    }
    // Readings without a result are five seconds apart.
    assert!((1..=4).contains(&readings.load(SeqCst)), "{readings:?}");
}

#[test]
fn the_load_of_an_engine_with_a_long_stream_is_reported_while_the_stream_runs() {
    let engine = sim("--itl 5ms");
    let stub = stub_before(engine.address, &[]);
    let _running = stub.relay().stream(100_000);
    let asking = stub.relay().with(ASKS);
    until("the stream is in a report", || {
        let answer = asking.post(PATH, &chat(1));
        let load = orca::from_header(answer.header(REPORT).as_bytes());
        load.is_some_and(|load| load.running >= Some(1.0) && load.kv_use > Some(0.0))
    });
}

#[test]
fn the_wish_for_a_report_ends_at_the_stub() {
    let stub = stub_before(echo(), &[]);
    let received = stub.relay().with(ASKS).with("x-own: 1").post(PATH, &chat(1)).text();
    assert!(received.contains("x-own: 1") && !received.contains("endpoint-load-metrics"), "{received}");
}
