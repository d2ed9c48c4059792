//! The backend of load tests.

use std::io::{Read as _, Write as _};

use engine_sim::fast::wire::{self, FastResponses, monotonic_ns};
use tokio::time::Instant;

use crate::support::{
    CHAT, EngineSimProcess, TestResponse, connect, raw, read, request, spawn, wait_until_listening,
};

fn fast() -> EngineSimProcess {
    wait_until_listening(spawn("--fast")).unwrap()
}

fn asks(user: &str, events: u32, stream: bool, text: &str) -> String {
    format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}],"max_tokens":{events},"stream":{stream},"user":"{user}"}}"#
    )
}

#[test]
fn it_is_up_at_once_and_tells_a_gateway_what_it_asks() {
    let engine = fast();
    for path in ["/health", "/version", "/is_sleeping", "/v1/models"] {
        assert_eq!(engine.get(path).status, 200, "{path}");
    }
    assert_eq!(engine.get("/v1/models").json()["data"][0]["id"], "m");
    assert_eq!(engine.get("/is_sleeping").json()["is_sleeping"], false);
    assert_eq!(engine.post("/sleep", "").status, 404);
    engine.kill("-TERM");
    assert_eq!(engine.exit().0.code(), Some(0));
}

#[test]
fn an_answer_is_the_promised_one_however_the_body_comes() {
    let engine = fast();
    let expected = FastResponses::new("m").answer;
    let body = asks("", 5, false, &"x".repeat(300_000));
    let (first, second) = body.split_at(100_000);
    let chunked = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: e\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n\
         {:x}\r\n{first}\r\n{:X};a=b\r\n{second}\r\n0\r\nt: r\r\n\r\n",
        first.len(),
        second.len()
    );
    for answer in [engine.post(CHAT, "{}"), engine.post(CHAT, &body), raw(engine.addr, &chunked)] {
        assert_eq!((answer.status, answer.complete), (200, true));
        assert_eq!(answer.body, expected);
        assert!(answer.find_header("date").is_some_and(|date| date.ends_with(" GMT")));
        assert_eq!(answer.json()["usage"]["completion_tokens"], 64);
    }
}

#[test]
fn requests_on_one_connection_are_answered_in_turn_each_as_it_asks() {
    let engine = fast();
    let mut io = connect(engine.addr);
    let [plain, stream] = [(false, ""), (true, "connection: close\r\n")]
        .map(|(stream, more)| request("POST", CHAT, &asks("", 3, stream, "hi"), more));
    io.write_all(format!("{plain}{plain}{stream}").as_bytes()).unwrap();
    let mut bytes = Vec::new();
    io.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    assert_eq!(
        (text.matches("HTTP/1.1 200 OK").count(), text.matches("chat.completion.chunk").count()),
        (3, 3)
    );
    assert!(text.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"), "{text}");
}

#[test]
fn events_are_stamped_and_come_at_their_interval() {
    let engine = fast();
    let before = monotonic_ns();
    let body = asks("engine=60ms,interval=20ms", 10, true, "hi");
    let answer: TestResponse = engine.post(CHAT, &body);
    let after = monotonic_ns();
    assert!(answer.complete);
    let body = answer.body.strip_suffix(wire::DONE).unwrap();
    assert_eq!(body.len(), 10 * wire::EVENT_BYTES);
    let event = wire::StampedEvent::new("m");
    let stamps: Vec<_> = body.chunks(wire::EVENT_BYTES).map(|bytes| event.read(bytes).unwrap()).collect();
    assert!(stamps.iter().map(|stamp| stamp.sequence).eq(0..10));
    assert!(stamps[0].sent_ns >= before + 60_000_000 && stamps[9].sent_ns <= after);
    assert!(stamps[9].sent_ns - stamps[0].sent_ns >= 175_000_000);
}

#[test]
fn an_answer_takes_the_engines_time_and_no_less() {
    let engine = fast();
    let began = Instant::now();
    assert_eq!(engine.post(CHAT, &asks("engine=80ms", 1, false, "")).status, 200);
    assert!(began.elapsed().as_millis() >= 80);
}

#[test]
fn a_client_that_expects_to_be_told_to_continue_is() {
    let engine = fast();
    let body = asks("", 1, false, "");
    let mut io = connect(engine.addr);
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: e\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    io.write_all(head.as_bytes()).unwrap();
    let mut interim = [0; 25];
    io.read_exact(&mut interim).unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    io.write_all(body.as_bytes()).unwrap();
    assert_eq!(read(&mut io).status, 200);
}

#[test]
fn what_is_no_request_is_refused() {
    let engine = fast();
    assert_eq!(raw(engine.addr, "no request\r\n\r\n").status, 400);
    let unchunked =
        raw(engine.addr, &format!("POST {CHAT} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n"));
    assert_eq!(unchunked.status, 400);
}

#[test]
fn flags_that_it_does_not_heed_are_an_error_that_says_so() {
    for flags in ["--fast --ttft 5ms", "--enable-sleep-mode --fast", "--fast --fault hang"] {
        let (code, text) = wait_until_listening(spawn(flags)).map(|_| ()).unwrap_err();
        assert_eq!(code, Some(2), "{flags}");
        assert!(
            text.contains("'--fast' cannot be used with") || text.contains("cannot be used with '--fast'"),
            "{text}"
        );
    }
}
