use std::{
    io::{Read, Write},
    time::Duration,
};

use engine_sim::content;
use serde_json::json;
use tokio::time::Instant;

use crate::support::*;

/// Whether no byte arrives on `io` for 100 ms.
fn silent(io: &mut std::net::TcpStream) -> bool {
    io.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let silent = io.read(&mut [0; 64 << 10]).is_err();
    io.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    silent
}

fn send(engine: &EngineSimProcess, wire: &str) -> std::net::TcpStream {
    let mut io = connect(engine.addr);
    io.write_all(wire.as_bytes()).unwrap();
    io
}

const CLOSE: &str = "connection: close\r\n";

#[test]
fn hang_answers_nothing_until_it_is_cleared() {
    let engine = start("--fault hang");
    let mut health = send(&engine, &request("GET", "/health", "", CLOSE));
    let mut stream = send(&engine, &request("POST", CHAT, &chat("a", 1, true), CLOSE));
    assert!(silent(&mut health) && silent(&mut stream));
    engine.set(r#"{"hang": null}"#);
    assert_eq!(read(&mut health).status, 200);
    assert_eq!(chat_text(&read(&mut stream)), content::text("m", "a", 0, 1));
}

#[test]
fn stall_streams_stops_tokens_and_leaves_health() {
    let engine = start("--ttft 0 --itl 5ms");
    let mut stream = open_stream(engine.addr, "a", 100);
    engine.set(r#"{"stall-streams": true}"#);
    while !silent(&mut stream) {}
    let tokens = engine.counter("generation_tokens");
    assert!(silent(&mut stream));
    assert_eq!(engine.counter("generation_tokens"), tokens);
    assert_eq!(engine.get("/health").status, 200);
    engine.set(r#"{"stall-streams": null}"#);
    engine.wait_for_counter("finished", 1);
}

#[test]
fn health_while_dead_is_healthy_and_answers_nothing() {
    let engine = start("--fault health-while-dead");
    assert_eq!(engine.get("/health").status, 200);
    assert!(silent(&mut send(&engine, &request("POST", CHAT, &chat("a", 1, true), ""))));
}

#[test]
fn die_mid_stream_ends_the_process_after_so_many_events() {
    let engine = start("--fault die-mid-stream=3");
    let answer = engine.post(CHAT, &chat("a", 10, true));
    assert_eq!((answer.events().len(), answer.complete), (3, false));
    assert_eq!(engine.exit().0.code(), Some(1));
}

#[test]
fn cut_and_fin_mid_stream_end_that_connection_only() {
    for fault in ["cut-mid-stream", "fin-mid-stream"] {
        let engine = start(&format!("--fault {fault}=2"));
        let mut io = send(&engine, &request("POST", CHAT, &chat("a", 10, true), ""));
        let mut bytes = Vec::new();
        let reset = io.read_to_end(&mut bytes).is_err();
        assert_eq!(reset, fault == "cut-mid-stream");
        let answer = parse(&bytes);
        assert_eq!((answer.events().len(), answer.complete), (2, false));
        let counters = engine.counters();
        assert_eq!((&counters["failed"], &counters["aborts"]), (&json!(1), &json!(0)));
    }
}

#[test]
fn ignore_sigterm_lives_on_until_sigkill() {
    let engine = start("--fault ignore-sigterm");
    engine.kill("-TERM");
    engine.kill("-TERM");
    assert!(silent(&mut connect(engine.addr)));
    assert_eq!(engine.get("/health").status, 200);
    engine.kill("-KILL");
    assert_eq!(engine.exit().0.code(), None);
}

#[test]
fn gzip_is_for_those_who_accept_it_and_gzip_always_for_all() {
    let accept = format!("{CLOSE}accept-encoding: br, gzip;q=0.5\r\n");
    for (fault, more, coded) in
        [("gzip", CLOSE, false), ("gzip", &*accept, true), ("gzip-always", CLOSE, true)]
    {
        let engine = start(&format!("--fault {fault}"));
        for stream in [false, true] {
            let answer = raw(engine.addr, &request("POST", CHAT, &chat("a", 2, stream), more));
            assert_eq!(answer.find_header("content-encoding") == Some("gzip"), coded, "{fault} {more}");
            assert_eq!(answer.body.starts_with(&[0x1f, 0x8b]), coded);
            assert!(answer.complete);
            if coded {
                let plain = gunzip(&answer.body);
                assert!(plain.contains(&content::token(content::key("m", "a", 0), 1)), "{plain}");
            }
        }
    }
}

fn gunzip(bytes: &[u8]) -> String {
    let mut command = std::process::Command::new("gzip");
    let pipe = std::process::Stdio::piped;
    let mut child = command.arg("-dc").stdin(pipe()).stdout(pipe()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn informational_responses_come_before_the_answer() {
    let engine = start("--fault early-hints");
    assert_eq!(engine.post(CHAT, &chat("a", 1, true)).interim, [103]);
    engine.set(r#"{"early-hints": null, "100s": true}"#);
    let answer = engine.post(CHAT, &chat("a", 1, false));
    assert_eq!((answer.interim, answer.status), (vec![100, 102], 200));
}

#[test]
fn trailers_follow_the_last_chunk() {
    let engine = start("--fault trailers");
    for stream in [false, true] {
        let answer = engine.post(CHAT, &chat("a", 1, stream));
        assert_eq!((answer.trailers.as_str(), answer.complete), ("x-sim-trailer: yes\r\n\r\n", true));
    }
}

#[test]
fn an_early_response_does_not_wait_for_the_body() {
    let engine = start("--fault early-response");
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: e\r\ncontent-length: 100000000\r\n\r\n{{");
    let answer = raw(engine.addr, &head);
    assert_eq!((answer.status, answer.find_header("connection")), (400, Some("close")));
}

#[test]
fn close_delimited_has_neither_length_nor_chunks() {
    let engine = start("--fault close-delimited");
    for stream in [false, true] {
        let answer = raw(engine.addr, &request("POST", CHAT, &chat("a", 3, stream), ""));
        assert_eq!(
            (answer.find_header("content-length"), answer.find_header("transfer-encoding")),
            (None, None)
        );
        let last = if stream { "data: [DONE]\n\n" } else { "}" };
        assert!(answer.text().ends_with(last));
    }
}

#[test]
fn stale_keepalive_closes_idle_connections_earlier() {
    let engine = start("--fault stale-keepalive=30ms");
    let mut io = send(&engine, &request("GET", "/health", "", ""));
    let began = Instant::now();
    assert_eq!(read(&mut io).status, 200);
    assert!(began.elapsed() < Duration::from_secs(4));
}

#[test]
fn starts_can_be_slow_or_end_at_once() {
    let began = Instant::now();
    drop(wait_until_listening(spawn("--start-time 10ms --fault slow-start=200ms")).unwrap());
    assert!(began.elapsed() >= Duration::from_millis(210));
    assert_eq!(wait_until_listening(spawn("--fault exit-at-start=7")).err().unwrap().0, Some(7));
    let began = Instant::now();
    assert_eq!(
        wait_until_listening(spawn("--fault exit-at-start=7 --fault slow-start=300ms")).err().unwrap().0,
        Some(7)
    );
    assert!(began.elapsed() >= Duration::from_millis(300), "{:?}", began.elapsed());
}

#[test]
fn a_wrong_name_is_served() {
    let engine = start("--fault wrong-model-name");
    assert_eq!(engine.get("/v1/models").json()["data"][0]["id"], "wrong-m");
    assert_eq!(engine.post(CHAT, &chat("a", 1, false)).status, 404);
}

#[test]
fn answers_can_be_errors_always_or_at_a_rate() {
    let engine = start("--fault 429");
    let status = || engine.post(CHAT, &chat("a", 1, false));
    assert_eq!((status().status, status().find_header("retry-after")), (429, Some("1")));
    engine.set(r#"{"429": null, "status": 503}"#);
    assert_eq!(status().status, 503);
    engine.set(r#"{"status": null, "error-rate": 0.25}"#);
    let failed = (0..40).filter(|_| status().status == 500).count();
    assert_eq!(failed, 10);
    assert_eq!(engine.get("/health").status, 200);
}

#[test]
fn a_long_prefill_sends_no_byte_while_its_counters_move() {
    let engine = start("--fault long-prefill=600ms");
    let mut io = send(&engine, &request("POST", CHAT, &chat("a", 2, true), CLOSE));
    assert!(silent(&mut io));
    let before = engine.counter("prompt_tokens");
    assert!(silent(&mut io));
    assert!(engine.counter("prompt_tokens") > before);
    assert_eq!(chat_text(&read(&mut io)), content::text("m", "a", 0, 2));
}

#[test]
fn faults_with_bad_names_or_values_are_refused() {
    let engine = start("");
    assert_eq!(engine.post("/sim/faults", r#"{"nonsense": true}"#).status, 400);
    assert_eq!(engine.post("/sim/faults", r#"{"status": "often"}"#).status, 400);
    assert_eq!(wait_until_listening(spawn("--fault nonsense")).err().unwrap().0, Some(2));
}
