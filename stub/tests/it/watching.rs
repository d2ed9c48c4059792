//! The metrics port and the debug port.

use std::{
    io::Write as _,
    sync::{Arc, Mutex, mpsc},
};

use rouse_testing::scripted_engine::scripted;

use crate::support::{
    StubBuilder,
    client::chat,
    engine::{ProbedHttpServer, sim},
    stub_before, until,
};

#[test]
fn metrics_are_prometheus_text_and_every_family_is_there() {
    let stub = StubBuilder::new().flag("--epoch-gate").start();
    let answer = stub.get("metrics", "/metrics");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    let text = answer.text();
    for family in [
        "rouse_stub_build_info{version=\"",
        "rouse_stub_requests_total{outcome=\"complete\"} 0",
        "rouse_stub_requests_total{outcome=\"left\"} 0",
        "rouse_stub_requests_total{outcome=\"failed\"} 0",
        "rouse_stub_requests_total{outcome=\"cut\"} 0",
        "rouse_stub_requests_total{outcome=\"gated\"} 0",
        "rouse_stub_requests_total{outcome=\"not_ready\"} 0",
        "rouse_stub_requests_total{outcome=\"refused\"} 0",
        "rouse_stub_relayed_bytes_total{direction=\"to_client\"} 0",
        "rouse_stub_relayed_bytes_total{direction=\"to_engine\"} 0",
        "rouse_stub_connections 0",
        "rouse_stub_open_streams 0",
        "rouse_stub_leases 0",
        "rouse_stub_gated 1",
        "rouse_stub_epoch 0",
        "rouse_stub_generation 0",
        "rouse_stub_ready 0",
        "rouse_stub_readiness_changes_total 0",
        "rouse_stub_log_bytes_total 0",
        "process_cpu_seconds_total ",
        "process_open_fds ",
        "process_resident_memory_bytes ",
        "process_start_time_seconds ",
    ] {
        assert!(text.lines().any(|line| line.starts_with(family)), "{family}\n{text}");
    }
    let open = stub.spi().send("DELETE", "/v1/gate", r#"{"epoch": 9, "generation": 2}"#);
    assert_eq!(open.status, 200, "{open:?}");
    assert_eq!(stub.post("/v1/become-ready", "").status, 200);
    let text = stub.get("metrics", "/metrics").text();
    for line in ["rouse_stub_gated 0", "rouse_stub_epoch 9", "rouse_stub_generation 2", "rouse_stub_ready 1"]
    {
        assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
    }
    let other = stub.port("metrics").post("/metrics", "");
    assert_eq!((other.status, other.header("allow")), (405, "GET,HEAD"));
    assert_eq!(stub.get("metrics", "/debug/state").status, 404);
}

#[test]
fn the_state_shows_everything_that_is_believed() {
    let stub = StubBuilder::new().env("ROUSE_ACCELERATORS", "a,b").flag("--model=small").start();
    let engine = ProbedHttpServer::start(503);
    let order = format!("{{\"url\": \"{}\", \"period\": 50}}", engine.url());
    assert_eq!(stub.post("/v1/readiness-url", &order).status, 200);
    let target = format!("{{\"address\": \"127.0.0.1\", \"port\": {}}}", engine.address.port());
    assert_eq!(stub.spi().send("PUT", "/v1/proxy/config", &target).status, 200);
    assert_eq!(stub.post("/v1/set-log?startPos=0", "four").status, 200);

    let answer = stub.get("debug", "/debug/state");
    assert_eq!((answer.status, answer.header("content-type")), (200, "application/json"));
    let state = answer.json();
    assert_eq!(state["gate"]["gated"], false);
    assert_eq!(state["gate"]["leases"], 0);
    assert_eq!(state["target"], engine.address.to_string());
    assert!(state["proxyPort"].is_string());
    assert_eq!(state["readiness"]["ready"], false);
    assert_eq!(state["readiness"]["poller"]["url"], engine.url());
    assert_eq!(state["readiness"]["poller"]["period"], 50);
    assert_eq!(state["accelerators"]["ids"], serde_json::json!(["a", "b"]));
    assert_eq!(state["accelerators"]["source"], "plugin");
    assert_eq!(state["log"], 4);
    assert_eq!(state["connections"], 0);
    assert_eq!(state["requests"]["gated"], 0);
    assert_eq!(state["epochGate"], false);
    assert_eq!(state["model"], "small");
}

#[test]
fn the_heap_is_told_in_bytes() {
    let stub = StubBuilder::new().start();
    let answer = stub.get("debug", "/debug/heap");
    assert_eq!(answer.status, 200);
    let heap = answer.json();
    let resident = heap["status"]["VmRSS"].as_u64().unwrap();
    assert!(resident > 1 << 20 && resident < 256 << 20, "{resident}");
    assert!(heap["rollup"]["Private_Dirty"].as_u64() > Some(0));
    assert!(heap["brk"]["Rss"].as_u64() > Some(0));
    for path in ["/debug/heap", "/debug/state"] {
        let other = stub.port("debug").post(path, "");
        assert_eq!((other.status, other.header("allow")), (405, "GET,HEAD"));
    }
}

#[test]
fn the_debug_port_is_on_loopback_wherever_the_others_are() {
    let stub = StubBuilder::new().host("127.0.0.2").start();
    assert!(stub.address("spi").to_string().starts_with("127.0.0.2:"));
    assert!(stub.address("debug").to_string().starts_with("127.0.0.1:"));
}

/// A stream may last an hour, and its bytes show while it runs.
#[test]
fn bytes_are_counted_as_they_pass() {
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (more, goes) = mpsc::channel();
    let goes = Arc::new(Mutex::new(goes));
    let engine = scripted(move |mut stream, _| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n").unwrap();
        while let Ok(()) = goes.lock().unwrap().recv() {
            stream.write_all(&[b'x'; 5000]).unwrap();
        }
    });
    let stub = stub_before(engine, &["--relay-threads=2"]);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n";
    // The streams may be on any of the threads.
    let _open: Vec<_> = (0..4).map(|_| stub.relay().open(head)).collect();
    let shown = || stub.port("metrics").get("/metrics").text();
    for pieces in 1..=20 {
        more.send(()).unwrap();
        let line = format!("direction=\"to_client\"}} {}\n", 5000 * pieces);
        until("the piece is counted", || shown().contains(&line));
    }
    assert!(shown().contains("outcome=\"complete\"} 0\n"), "all of them run on");
}

#[test]
fn what_is_relayed_is_counted() {
    let engine = sim("--ttft 1ms --itl 1ms");
    let stub = stub_before(engine.address, &[]);
    let shown = || stub.port("metrics").get("/metrics").text();
    let (stream, large) = (chat(20), "x".repeat(300_000));

    let mut open = stub.relay().stream(100_000);
    open.until("data: ");
    until("it is counted as open", || shown().contains("\nrouse_stub_open_streams 1\n"));
    assert!(shown().contains("\nrouse_stub_connections 1\n") && shown().contains("\nrouse_stub_leases 1\n"));
    drop(open);
    until("it has left", || shown().contains("\nrouse_stub_requests_total{outcome=\"left\"} 1\n"));
    let counted = |direction: &str| -> usize {
        let (text, key) = (shown(), format!("direction=\"{direction}\"}} "));
        text.lines().find_map(|line| line.split_once(&key)?.1.parse().ok()).unwrap()
    };
    let before = (counted("to_engine"), counted("to_client"));
    assert!(before.0 > 0 && before.1 > 0);

    let answer = stub.relay().post("/v1/chat/completions", &stream);
    let refused = stub.relay().post("/v1/chat/completions", &large);
    assert_eq!((answer.status, answer.complete), (200, true));
    until("all is over", || shown().contains("\nrouse_stub_connections 0\n"));
    let text = shown();
    assert!(text.contains("\nrouse_stub_requests_total{outcome=\"complete\"} 2\n"), "{text}");
    assert!(text.contains("\nrouse_stub_open_streams 0\n"), "{text}");
    assert_eq!(counted("to_engine") - before.0, stream.len() + large.len());
    assert_eq!(counted("to_client") - before.1, answer.body.len() + refused.body.len());
}
