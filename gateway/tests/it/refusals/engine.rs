//! Requests that fail because of the engine: it does not start, does not answer, or stops under the request.

use super::refusal;
use crate::support::{
    GatewayFixture, GatewayProcess, SimModel,
    client::{chat_body, request},
};

const CHAT: &str = "/v1/chat/completions";

fn one(settings: &str, sim: &SimModel<'_>) -> GatewayProcess {
    GatewayFixture::new(&["2Gi"]).settings(settings).model(sim).start()
}

#[test]
fn a_start_that_fails_is_told_by_its_class_and_never_by_its_log() {
    let command = |name: &str, script: &str| {
        format!(
            "  - name: {name}\n    engine: {{kind: custom, command: [{script}, \"${{PORT}}\"]}}\n    memory: {{awake: 64Mi}}\n"
        )
    };
    let gateway = GatewayFixture::new(&["8Gi"])
        // On a busy machine, too, the refusal is a response of its own and no event in a stream.
        .settings("stream: {grace: 1m}")
        .model(&SimModel { flags: "--fault exit-at-start=7", ..SimModel::new("exits") })
        .model(&SimModel { flags: "--fault oom-at-start", ..SimModel::new("greedy") })
        .model(&SimModel { flags: "--fault wrong-model-name", ..SimModel::new("misnamed") })
        .model(&SimModel { flags: "--start-time 1h", engine: "startTimeout: 200ms", ..SimModel::new("late") })
        .model_yaml(&command("absent", "/nowhere/no-such-program"))
        .model_yaml(&command(
            "crowded",
            r#"sh, -c, 'echo "OSError: [Errno 98] Address already in use" >&2; exit 1'"#,
        ))
        .start();
    std::thread::scope(|scope| {
        for (model, cause) in [
            ("exits", "exited:7"),
            ("greedy", "out_of_memory"),
            ("misnamed", "wrong_model"),
            ("late", "timeout"),
            ("absent", "command_not_found"),
            ("crowded", "port_taken"),
        ] {
            let client = gateway.client();
            scope.spawn(move || {
                let answer = client.chat(model, model == "late", 1);
                let error = refusal(&answer, 503, "model_not_ready");
                assert_eq!(error["details"]["cause"], cause, "{error}");
                let message = error["message"].as_str().unwrap();
                assert!(
                    message.starts_with(&format!("Model '{model}' failed to become ready: ")),
                    "{message}"
                );
                assert!(!answer.text().contains("Errno") && !answer.text().contains("Traceback"), "{error}");
                assert_eq!(error["details"]["queue_position"], 1);
            });
        }
    });
    assert_eq!(gateway.leases(), 0);
}

#[test]
fn a_start_that_outlasts_the_request_is_a_timeout_and_goes_on() {
    let gateway = one("", &SimModel { flags: "--start-time 700ms", ..SimModel::new("slow") });
    let headers = "x-request-timeout: 0.2\r\n";
    let answer = gateway.client().post_with(CHAT, headers, &chat_body("slow", true, 1));
    let error = refusal(&answer, 503, "model_not_ready");
    assert_eq!(error["details"]["cause"], "timeout");
    assert!(error["details"]["waited_for"].as_str().unwrap().contains("launched"), "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains(", when the request's x-request-timeout expired: the engine is being launched"),
        "{message}"
    );
    // The header does not name the start timeout, eight minutes on: a client that retries soon takes its place in the
    // queue.
    assert_eq!(answer.header("retry-after"), "1");
    gateway.until_state("slow", "awake");
}

#[test]
fn an_engine_that_does_not_begin_in_time_is_504_and_not_to_be_asked_again() {
    let gateway = one("timeouts: {firstByte: 300ms, nonStream: 500ms}", &SimModel::new("slow"));
    gateway.wake("slow");
    gateway.fault("slow#0", r#"{"long-prefill": "20s"}"#);
    for (stream, says) in [(true, "firstByte after 300ms"), (false, "nonStream after 500ms")] {
        let answer = gateway.client().chat("slow", stream, 1);
        let error = refusal(&answer, 504, "engine_timeout");
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    }
    assert_eq!(gateway.leases(), 0);
    gateway.until("the engine has noticed", std::time::Duration::from_secs(5), || {
        gateway.counters("slow#0")["running"] == 0
    });
}

#[test]
fn a_stream_that_stands_still_ends_with_an_error_event() {
    let gateway = one("timeouts: {idle: 300ms}", &SimModel { flags: "--itl 20ms", ..SimModel::new("slow") });
    gateway.wake("slow");
    let mut open = gateway.client().open(request(CHAT, "", &chat_body("slow", true, 500)));
    open.until("data: ");
    gateway.fault("slow#0", r#"{"stall-streams": true}"#);
    let answer = open.rest();
    let last = answer.events().pop().unwrap();
    assert!(last.contains("engine_timeout") && last.contains("idle after 300ms"), "{last}");
    assert!(!answer.complete && !answer.text().contains("[DONE]"), "{}", answer.text());
    assert_eq!(gateway.leases(), 0);
}

#[test]
fn an_engine_that_closes_without_a_word_is_502_and_asked_no_second_time() {
    let gateway = GatewayFixture::new(&["1Gi"]).echo_model("echo", "").start();
    gateway.wake("echo");
    let answer = gateway.client().post_with(CHAT, "x-behave: close\r\n", &chat_body("echo", false, 1));
    refusal(&answer, 502, "engine_closed");
    assert_eq!(gateway.leases(), 0);
    assert_eq!(gateway.client().chat("echo", false, 1).status, 200);
}

#[test]
fn an_engine_that_nobody_can_connect_to_is_502() {
    let gateway = GatewayFixture::new(&["1Gi"]).echo_model("echo", "").start();
    gateway.wake("echo");
    let deaf = gateway.client().post_with(CHAT, "x-behave: deafen\r\n", &chat_body("echo", false, 1));
    assert_eq!(deaf.status, 200);
    refusal(&gateway.client().chat("echo", true, 1), 502, "engine_unreachable");
    assert_eq!(gateway.leases(), 0);
}

#[test]
fn an_operators_stop_ends_a_request_that_has_no_answer_yet() {
    let gateway = one("", &SimModel::new("slow"));
    gateway.wake("slow");
    gateway.fault("slow#0", r#"{"long-prefill": "20s"}"#);
    let open = gateway.client().open(request(CHAT, "", &chat_body("slow", false, 1)));
    gateway
        .until("running", std::time::Duration::from_secs(5), || gateway.counters("slow#0")["running"] == 1);
    assert_eq!(gateway.admin().post("/admin/v1/models/slow/stop", "").status, 202);
    let error = refusal(&open.rest(), 503, "engine_failed");
    assert_eq!(error["details"]["cause"], "stopped");
}

#[test]
fn refusals_are_counted_by_their_reason() {
    let gateway = GatewayFixture::new(&["1Gi"])
        .settings("queue: {maxWait: 100ms}")
        .model(&SimModel { flags: "--start-time 1h", ..SimModel::new("never") })
        .model(&SimModel { awake: "2Gi", ..SimModel::new("large") })
        .start();
    let client = gateway.client();
    let late = refusal(&client.chat("never", false, 1), 503, "model_not_ready");
    assert!(late["message"].as_str().unwrap().contains(", when queue.maxWait expired: "), "{late}");
    refusal(&client.chat("large", false, 1), 422, "unplaceable");
    refusal(&client.chat("absent", false, 1), 404, "model_not_found");
    refusal(&client.post(CHAT, "{}"), 400, "invalid_request");
    let metrics = gateway.admin().get("/metrics").text();
    let counted = |name: &str, labels: &[&str]| {
        metrics.lines().any(|line| {
            line.starts_with(name) && line.ends_with(" 1") && labels.iter().all(|label| line.contains(label))
        })
    };
    assert!(counted("rouse_requests_total", &["model=\"never\"", "status=\"5xx\""]), "{metrics}");
    assert!(counted("rouse_requests_total", &["model=\"large\"", "status=\"4xx\""]), "{metrics}");
    assert!(counted("rouse_admission_refusals_total", &["unplaceable"]), "{metrics}");
    assert!(counted("rouse_admission_refusals_total", &["model_not_ready"]), "{metrics}");
    assert!(metrics.contains("model=\"other\"") && !metrics.contains("absent"), "{metrics}");
}
