//! Requests that the gateway refuses for memory or because too many requests wait.

use std::time::Duration;

use serde_json::json;

use super::refusal;
use crate::support::{
    GatewayFixture, GatewayProcess, SimModel,
    client::{chat_body, request},
};

const CHAT: &str = "/v1/chat/completions";

/// `first` is awake on the only accelerator, which has no room for `second`.
fn full(settings: &str, first: &SimModel<'_>) -> GatewayProcess {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings(settings)
        .model(first)
        .model(&SimModel::new("second"))
        .start();
    gateway.until_state("second", "cold");
    gateway.wake("first");
    gateway
}

#[test]
fn where_waiting_is_off_a_model_that_does_not_fit_is_refused_at_once() {
    let settings = "queue: {policy: reject}\nturns: {protect: always, residency: 1h, maxTurn: 2h}";
    let gateway = full(settings, &SimModel::new("first"));
    // A model that is awake, or only needs a launch, serves as ever.
    assert_eq!(gateway.client().chat("first", false, 1).status, 200);
    for stream in [false, true] {
        let answer = gateway.client().chat("second", stream, 1);
        let error = refusal(&answer, 429, "insufficient_memory");
        let message = error["message"].as_str().unwrap();
        let says = "Cannot schedule second: insufficient memory (1Gi needed, 176Mi free): waiting for gpu-0: held by first";
        assert!(message.starts_with(says) && message.contains("0 leases, evictable at "), "{message}");
        let details = &error["details"];
        assert_eq!(details["requested"], json!({"model": "second", "memory": "1Gi"}));
        assert_eq!(details["available"], "176Mi");
        assert_eq!(details["queue_position"], 1);
        assert!(details["waited_for"].as_str().unwrap().contains("held by first"), "{details}");
        let blocking = &details["blocking"][0];
        assert_eq!(
            (&blocking["model"], &blocking["memory"], &blocking["leases"], &blocking["pinned"]),
            (&json!("first"), &json!("1Gi"), &json!(0), &json!(false))
        );
        assert!(blocking["idle_for"].is_string(), "{details}");
        assert_eq!(details["holders"], details["blocking"]);
        // The first model may be evicted at the end of its residency at the earliest.
        let after: u64 = answer.header("retry-after").parse().unwrap();
        assert!((3500..=3600).contains(&after), "{after}");
    }
    assert_eq!(gateway.engine("first#0")["state"], "Awake");
}

#[test]
fn where_waiting_is_off_a_model_that_may_go_still_makes_room() {
    let gateway = full("queue: {policy: reject}\nturns: {residency: 0s}", &SimModel::new("first"));
    assert!(gateway.client().chat("second", true, 1).is_whole_stream());
    assert_eq!(gateway.engine("first#0")["state"], "Asleep(1)");
}

#[test]
fn a_pinned_model_in_the_way_is_named_when_the_deadline_passes() {
    let gateway = full("", &SimModel { keys: "pinned: true", ..SimModel::new("first") });
    let headers = "x-request-timeout: 0.3\r\n";
    let answer = gateway.client().post_with(CHAT, headers, &chat_body("second", true, 1));
    let error = refusal(&answer, 429, "insufficient_memory");
    let message = error["message"].as_str().unwrap();
    let says = "held by first, 0 leases, pinned; the request's x-request-timeout expired after ";
    assert!(message.contains(says), "{message}");
    let blocking = &error["details"]["blocking"][0];
    assert_eq!((&blocking["model"], &blocking["pinned"]), (&json!("first"), &json!(true)), "{error}");
    assert_eq!(error["details"]["requested"]["memory"], "1Gi");
    assert!(error["details"]["waited"].as_str().unwrap().ends_with("ms"), "{error}");
    assert_eq!(gateway.engine("first#0")["state"], "Awake");
}

/// Most SDKs raise the message alone, so their users do not see the details.
#[test]
fn a_stream_that_has_begun_to_wait_is_told_who_has_the_memory_and_until_when() {
    let settings =
        "stream: {grace: 50ms, heartbeat: 50ms}\nturns: {protect: always, residency: 1h, maxTurn: 2h}";
    let gateway = full(settings, &SimModel::new("first"));
    let body = chat_body("second", true, 1);
    let mut open = gateway.client().open(request(CHAT, "x-request-timeout: 1\r\n", &body));
    open.until(" \n");
    let answer = open.rest();
    let last: serde_json::Value = serde_json::from_str(&answer.events().pop().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "insufficient_memory", "{last}");
    let message = last["error"]["message"].as_str().unwrap();
    assert!(message.contains("waiting for gpu-0: held by first, 0 leases, evictable at "), "{message}");
    assert!(message.contains("; the request's x-request-timeout expired after 1"), "{message}");
}

#[test]
fn a_deadline_that_passes_while_room_is_made_still_says_what_was_asked_for() {
    let turns = "turns: {residency: 100ms, maxTurn: 200ms}";
    let gateway = full(turns, &SimModel { flags: "--fault hang-sleep", ..SimModel::new("first") });
    let headers = "x-request-timeout: 0.6\r\n";
    let answer = gateway.client().post_with(CHAT, headers, &chat_body("second", false, 1));
    let error = refusal(&answer, 429, "insufficient_memory");
    assert_eq!(error["details"]["requested"], json!({"model": "second", "memory": "1Gi"}));
    assert_eq!(error["details"]["available"], "176Mi");
    assert_eq!(error["details"]["blocking"][0]["model"], "first", "{error}");
    gateway.fault("first#0", r#"{"hang-sleep": null}"#);
}

#[test]
fn memory_that_comes_back_late_is_no_reason_to_forget_what_was_asked_for() {
    let turns = "turns: {residency: 50ms, maxTurn: 100ms}";
    let gateway = full(turns, &SimModel { flags: "--fault late-memory=3s", ..SimModel::new("first") });
    let headers = "x-request-timeout: 0.8\r\n";
    let answer = gateway.client().post_with(CHAT, headers, &chat_body("second", false, 1));
    let error = refusal(&answer, 429, "insufficient_memory");
    let details = &error["details"];
    assert!(details["waited_for"].as_str().unwrap().contains("gpu-0"), "{details}");
    assert_eq!(details["requested"], json!({"model": "second", "memory": "1Gi"}));
    assert_eq!(details["holders"][0]["model"], "first", "{details}");
}

#[test]
fn what_fits_nowhere_is_refused_for_good() {
    let gateway = GatewayFixture::new(&["2Gi", "1Gi"])
        .model(&SimModel::new("small"))
        .model(&SimModel { awake: "3Gi", ..SimModel::new("large") })
        .model(&SimModel { awake: "2Gi", accelerators: 2, ..SimModel::new("wide") })
        .model(&SimModel { accelerators: 3, ..SimModel::new("many") })
        .start();
    for (model, memory, why) in [
        ("large", "3Gi", "the model needs 3Gi on each accelerator: the largest has 2Gi"),
        ("wide", "2Gi", "the model needs 2Gi on each accelerator (required: 2, large enough: 1 of 2)"),
        ("many", "1Gi", "the model needs 3 accelerators, and there are 2"),
    ] {
        let answer = gateway.client().chat(model, true, 1);
        let error = refusal(&answer, 422, "unplaceable");
        assert!(error["message"].as_str().unwrap().contains(why), "{error}");
        assert_eq!(gateway.client().get(&format!("/v1/models/{model}")).json()["state"], "unplaceable");
        let details = &error["details"];
        assert_eq!(details["never"], true, "{details}");
        assert_eq!(details["requested"], json!({"model": model, "memory": memory}));
        assert_eq!(details["blocking"], json!([]));
        assert_eq!((answer.header("retry-after"), answer.header("x-should-retry")), ("", "false"));
    }
    assert!(gateway.client().chat("small", true, 1).is_whole_stream());
}

#[test]
fn when_too_many_wait_the_newest_is_refused() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings("queue: {maxWaiting: 2}")
        // The start lasts until the test clears the fault.
        .model(&SimModel { flags: "--fault hang", ..SimModel::new("slow") })
        .start();
    let mut first = gateway.client().open(request(CHAT, "", &chat_body("slow", true, 2)));
    let mut second = gateway.client().open(request(CHAT, "", &chat_body("slow", false, 2)));
    gateway.until_state("slow", "launching");
    gateway.until("both wait", Duration::from_secs(5), || {
        gateway.fleet()["models"].as_array().unwrap().iter().any(|model| model["waiting"] == 2)
    });
    let answer = gateway.client().chat("slow", false, 2);
    let error = refusal(&answer, 429, "queue_full");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.starts_with("too many requests wait (queue.maxWaiting): the engine is being launched"),
        "{message}"
    );
    assert_eq!(error["details"]["queue_position"], 3);
    assert!(error["details"]["waited_for"].as_str().unwrap().contains("launched"), "{error}");
    gateway.fault("slow#0", r#"{"hang": null}"#);
    first.until("[DONE]");
    second.until("200 OK");
}

#[test]
fn at_max_concurrency_requests_park_and_are_refused_when_their_deadline_passes() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .model(&SimModel { keys: "maxConcurrency: 1", flags: "--itl 20ms", ..SimModel::new("one") })
        .start();
    // This answer proves the engine, and its gate opens for all requests.
    assert!(gateway.client().chat("one", true, 1).is_whole_stream());
    // The long request keeps its place until the other request is refused.
    gateway.stall("one#0", true);
    let long = gateway.client().open(request(CHAT, "", &chat_body("one", true, 60)));
    gateway.until("it has the place", Duration::from_secs(5), || gateway.leases() == 1);
    let headers = "x-request-timeout: 0.2\r\n";
    let answer = gateway.client().post_with(CHAT, headers, &chat_body("one", false, 1));
    let error = refusal(&answer, 429, "queue_full");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("maxConcurrency") && message.contains("x-request-timeout expired after"),
        "{message}"
    );
    assert!(error["details"]["waited_for"].as_str().unwrap().contains("maxConcurrency"), "{error}");
    assert_eq!(error["details"]["queue_position"], 1);
    // A request with a longer timeout is served afterwards.
    gateway.stall("one#0", false);
    assert!(gateway.client().chat("one", true, 1).is_whole_stream());
    assert!(long.rest().is_whole_stream());
}
