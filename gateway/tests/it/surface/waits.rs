//! Waits, failures and disconnects in the format of each API.

use std::time::Duration;

use serde_json::Value;

use super::{
    MESSAGES, RESPONSES, anthropic, events,
    upload::{MULTIPART, form, post_form},
};
use crate::support::{GatewayFixture, GatewayProcess, SimModel, TestResponse, client::request};

const CHAT: &str = "/v1/chat/completions";
const QUICK: &str = "stream: {grace: 50ms, heartbeat: 50ms}";

/// A body for every streaming route.
fn body(model: &str) -> String {
    format!(
        r#"{{"model":"{model}","stream":true,"max_tokens":3,"prompt":"a","input":"a","messages":[{{"role":"user","content":"a"}}]}}"#
    )
}

fn one(settings: &str, flags: &str) -> GatewayProcess {
    GatewayFixture::new(&["2Gi"])
        .settings(settings)
        .model(&SimModel { flags, ..SimModel::new("slow") })
        .start()
}

/// Counts the gateway's heartbeats before the engine's first event, and returns the rest.
fn beats<'a>(answer: &'a TestResponse, beat: &str, text: &'a str) -> (usize, &'a str) {
    let mut rest = text;
    let mut count = 0;
    while let Some(next) = rest.strip_prefix(beat) {
        (rest, count) = (next, count + 1);
    }
    assert_eq!(answer.status, 200);
    (count, rest)
}

#[test]
fn a_parked_stream_beats_in_its_apis_form_and_then_says_what_the_engine_says() {
    let ping = "event: ping\ndata: {\"type\": \"ping\"}\n\n";
    let in_progress = "event: response.in_progress\n";
    for (path, settings, beat) in [
        (CHAT, QUICK, " \n"),
        ("/v1/completions", QUICK, " \n"),
        (MESSAGES, QUICK, ping),
        ("/engines/slow/v1/messages", QUICK, ping),
        (RESPONSES, QUICK, ": rouse\n"),
        (RESPONSES, "stream: {grace: 50ms, heartbeat: 50ms, responsesHeartbeat: event}", in_progress),
    ] {
        let gateway = one(settings, "--start-time 500ms --fixed-ids");
        let waited = gateway.client().post(path, &body("slow"));
        let awake = gateway.client().post(path, &body("slow"));
        let text = waited.text();
        let (count, rest) = if beat == in_progress {
            let count = text.matches(beat).count();
            // The engine sends one such event of its own.
            (count - 1, text.get(text.find("event: response.created").unwrap()..).unwrap())
        } else {
            beats(&waited, beat, &text)
        };
        assert!(count >= 2, "{path}: {text}");
        assert_eq!(rest, awake.text(), "{path}");
        assert!(waited.complete && !text.lines().any(|line| line.starts_with("id:")), "{path}: {text}");
        assert_eq!(waited.header("content-type"), "text/event-stream; charset=utf-8");
    }
}

#[test]
fn an_upload_that_wants_a_stream_waits_as_one() {
    let gateway = one(QUICK, "--start-time 500ms");
    let body = form(&[("stream", "true"), ("model", "slow")], b"sound");
    let answer = post_form(gateway.client(), "/v1/audio/transcriptions", MULTIPART, &body);
    let text = answer.text();
    let (count, rest) = beats(&answer, " \n", &text);
    assert!(count >= 2 && rest.contains("transcript.text.done") && answer.is_whole_stream(), "{text}");
}

/// Returns the only failure event of the stream, in the form that this API's SDKs expect.
fn failure(path: &str, answer: &TestResponse) -> Value {
    let text = answer.text();
    assert!(answer.status == 200 && !answer.complete && !text.contains("[DONE]"), "{path}: {text}");
    let (name, data) = events(&text).pop().unwrap_or_else(|| panic!("{path}: {text}"));
    if path.ends_with(MESSAGES) {
        assert_eq!((name.as_str(), data["type"].as_str()), ("error", Some("error")), "{text}");
        data["error"].clone()
    } else if path.ends_with(RESPONSES) {
        assert!(matches!(name.as_str(), "error" | "response.failed"), "{text}");
        assert_eq!(data["type"].as_str(), Some(name.as_str()), "{text}");
        data
    } else {
        assert!(name.is_empty() && data["error"]["message"].is_string(), "{text}");
        data["error"].clone()
    }
}

#[test]
fn a_failure_after_the_head_is_the_apis_own_error_event() {
    for path in [CHAT, MESSAGES, RESPONSES, "/engines/slow/v1/messages"] {
        // Without a grace: on a slow machine the request may otherwise fail before the stream begins.
        let gateway = one("stream: {grace: 0s}", "--fault slow-start=300ms --fault exit-at-start=3");
        let late = gateway.client().post(path, &body("slow"));
        assert!(failure(path, &late).to_string().contains("model_not_ready"), "{}", late.text());
        let gateway = one("stream: {grace: 0s}", "--start-time 400ms --fault status=418");
        let late = gateway.client().post(path, &body("slow"));
        failure(path, &late);
        assert_eq!(gateway.leases(), 0);
        // With an awake engine the same refusal keeps its status: the default grace is long enough on a busy machine.
        let gateway = one("", "--fault status=418");
        gateway.wake("slow");
        assert_eq!(gateway.client().post(path, &body("slow")).status, 418, "{path}");
        assert_eq!(gateway.leases(), 0);
    }
}

#[test]
fn an_engine_that_cuts_a_stream_is_told_in_the_apis_own_words() {
    for path in [CHAT, MESSAGES, RESPONSES] {
        let gateway = one("", "--fault cut-mid-stream=3");
        gateway.wake("slow");
        let broken = gateway.client().post(path, &body("slow"));
        let failure = failure(path, &broken).to_string();
        assert!(failure.contains("engine_failed"), "{}", broken.text());
        // The engine lives, so the message differs from the one for a dead engine.
        assert!(
            failure.contains("the connection broke in the middle of the answer (broke_off)"),
            "{failure}"
        );
    }
}

#[test]
fn a_refusal_before_the_head_keeps_its_status_in_every_form() {
    let gateway = one("queue: {maxWait: 200ms}", "--start-time 1h");
    anthropic(&gateway.client().post(MESSAGES, &body("slow")), 503, "overloaded_error");
    let own = gateway.client().post_with(MESSAGES, "x-request-timeout: 0.05\r\n", &body("slow"));
    anthropic(&own, 503, "overloaded_error");
    crate::refusals::refusal(&gateway.client().post(RESPONSES, &body("slow")), 503, "model_not_ready");
}

#[test]
fn a_wait_is_told_on_every_api() {
    for path in [MESSAGES, RESPONSES, "/engines/slow/tokenize"] {
        let gateway = one("", "");
        let body = body("slow").replace("true", "false");
        let answer = gateway.client().post(path, &body);
        assert_eq!((answer.status, answer.header("x-rouse-cold-start")), (200, "cold"), "{}", answer.text());
        assert!(answer.header("server-timing").starts_with("queue;dur="), "{:?}", answer.headers);
    }
}

#[test]
fn a_client_that_leaves_is_counted_with_its_phase_and_its_work_ends_on_every_api() {
    let gateway = one("", "--itl 50ms --tokens 1000");
    gateway.wake("slow");
    let body = body("slow").replace("\"max_tokens\":3,", "\"max_tokens\":1000,");
    for path in [CHAT, MESSAGES, RESPONSES, "/engines/slow/v1/messages"] {
        let mut open = gateway.client().open(request(path, "", &body));
        open.until("data: ");
        drop(open);
        gateway.until_unused("slow#0");
    }
    let upload = form(&[("model", "slow"), ("stream", "true")], b"sound");
    let head = format!(
        "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: h\r\nContent-Type: {MULTIPART}\r\nContent-Length: {}\r\n\r\n",
        upload.len()
    );
    let mut open = gateway.client().open([head.as_bytes(), &upload].concat());
    open.until("data: ");
    drop(open);
    gateway.until_unused("slow#0");
    let left = |route: &str| {
        let line = format!("route=\"{route}\",status=\"499\"}} 1");
        gateway.admin().get("/metrics").text().contains(&line)
    };
    for route in ["chat", "messages", "responses", "engines", "transcriptions"] {
        gateway.until(&format!("{route} was left"), Duration::from_secs(5), || left(route));
    }
    assert_eq!(gateway.counters("slow#0")["aborts"], 5);
    let metrics = gateway.admin().get("/metrics").text();
    assert!(metrics.contains("rouse_client_disconnects_total{phase=\"streaming\"} 5"), "{metrics}");
}

#[test]
fn an_engine_that_must_not_be_interrupted_is_read_to_its_end_on_every_api() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .model(&SimModel { flags: "--itl 20ms", engine: "onDisconnect: drain", ..SimModel::new("slow") })
        .start();
    gateway.wake("slow");
    for path in [MESSAGES, RESPONSES, "/engines/slow/v1/messages"] {
        let mut open = gateway.client().open(request(path, "", &body("slow")));
        open.until("data: ");
        drop(open);
    }
    gateway.until_unused("slow#0");
    let counters = gateway.counters("slow#0");
    assert_eq!(
        (&counters["aborts"], counters["finished"].as_u64() >= Some(3)),
        (&0.into(), true),
        "{counters}"
    );
}
