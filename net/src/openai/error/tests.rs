use serde_json::{Value, json};

use super::*;
use rouse::{
    fault::{DisconnectPhase, ExchangeTimeout, FailureCause, RateLimitUnit, RateLimitUsage, WaitLimit},
    fleet::quote::WaitRange,
    units::Bytes as Size,
};

fn waited() -> WaitDetails {
    WaitDetails {
        waited_for: "gpu-1: held by qwen".into(),
        named_models: ["qwen".into()].into(),
        waited: Millis(61_500),
        position: 3,
        holders: vec![BlockingModel {
            model: "qwen".into(),
            memory: Size::gib(30),
            idle_for: Millis(330_000),
            leases: 2,
            pinned: true,
        }],
        unlisted_holders: 0,
        retry_after: Some(Millis(2001)),
        expected_wait: None,
        expired_limit: None,
    }
}

#[test]
fn a_refusal_asks_for_a_retry_at_the_upper_end_of_the_expected_wait() {
    let after = |high, fault: fn(WaitDetails) -> Fault| {
        let expected = WaitRange { low: Millis::ZERO, likely: Millis(high / 2), high: Millis(high) };
        let expected_wait = Some(Box::new(expected));
        let refused = response(&fault(WaitDetails { expected_wait, ..waited() }), ApiSchema::OpenAi);
        refused.headers()[header::RETRY_AFTER].to_str().unwrap().to_owned()
    };
    let full = |wait| Fault::QueueFull { message: String::new(), wait };
    let starting = |wait| Fault::ModelNotReady { model: "m".into(), cause: FailureCause::Deadline, wait };
    assert_eq!(after(19_001, full), "20");
    assert_eq!(after(19_000, starting), "19");
    assert_eq!(after(0, full), "1", "the wait may be over, but a client does not retry at once");
}

fn shortage(never: bool) -> Fault {
    Fault::InsufficientMemory(Box::new(MemoryShortage {
        model: "llama".into(),
        memory: Size::gib(40),
        available: Size::gib(10),
        permanent: never,
        wait: waited(),
    }))
}

fn failed(wait: Option<WaitDetails>) -> Fault {
    Fault::EngineFailed { model: "m".into(), cause: FailureCause::Hung, wait }
}

fn limited(after: u64) -> Fault {
    let rate = RateLimitUsage {
        unit: RateLimitUnit::Tokens,
        limit: 1000,
        used: 900,
        requested: 200,
        window: Millis::secs(60),
    };
    Fault::RateLimited { rate, retry_after: Millis(after) }
}

/// A fault with status, type, code, x-should-retry, and Retry-After in seconds.
type Expected = (Fault, u16, &'static str, &'static str, bool, Option<u64>);

/// Every fault with its row.
fn table() -> Vec<Expected> {
    let text = String::new;
    let model = || "m".into();
    let invalid = "invalid_request_error";
    let server = "server_error";
    let param = None;
    let message = text();
    vec![
        (Fault::InvalidRequest { message, param }, 400, invalid, "invalid_request", false, None),
        (Fault::MissingApiKey, 401, "authentication_error", "invalid_api_key", false, None),
        (
            Fault::InvalidApiKey { header: text() },
            401,
            "authentication_error",
            "invalid_api_key",
            false,
            None,
        ),
        (Fault::ModelForbidden { model: text() }, 403, "permission_error", "model_forbidden", false, None),
        (Fault::OriginForbidden { origin: text() }, 403, "permission_error", "origin_forbidden", false, None),
        (
            Fault::ModelNotFound { model: text(), suggestions: Vec::new() },
            404,
            invalid,
            "model_not_found",
            false,
            None,
        ),
        (
            Fault::RouteNotFound { method: text(), path: text(), suggested_path: None },
            404,
            invalid,
            "route_not_found",
            false,
            None,
        ),
        (
            Fault::MethodNotAllowed { method: text(), path: text() },
            405,
            invalid,
            "method_not_allowed",
            false,
            None,
        ),
        (Fault::RequestTimeout { what: text() }, 408, invalid, "request_timeout", false, None),
        (
            Fault::BodyTooLarge { setting: text(), limit: Size(1) },
            413,
            invalid,
            "body_too_large",
            false,
            None,
        ),
        (Fault::UnsupportedEncoding { encoding: text() }, 415, invalid, "unsupported_encoding", false, None),
        (Fault::UnsupportedMedia { expected: text() }, 415, invalid, "unsupported_media_type", false, None),
        (Fault::HeadersTooLarge { limit: Size(1) }, 431, invalid, "headers_too_large", false, None),
        (Fault::NotImplemented { what: text() }, 501, server, "not_implemented", false, None),
        (shortage(false), 429, "insufficient_memory", "insufficient_memory", true, Some(3)),
        (shortage(true), 422, invalid, "unplaceable", false, None),
        (
            Fault::QueueFull { message: text(), wait: waited() },
            429,
            "rate_limit_error",
            "queue_full",
            true,
            Some(3),
        ),
        (limited(12_000), 429, "rate_limit_error", "rate_limited", true, Some(12)),
        (limited(1), 429, "rate_limit_error", "rate_limited", true, Some(1)),
        (Fault::BodyMemoryFull { limit: Size(1) }, 429, "rate_limit_error", "busy", true, Some(1)),
        (Fault::ClientBodyMemoryFull { limit: Size(1) }, 429, "rate_limit_error", "busy", true, Some(1)),
        (
            Fault::ClientDisconnected { phase: DisconnectPhase::Parked },
            499,
            invalid,
            "client_left",
            false,
            None,
        ),
        (Fault::EngineUnreachable { model: model() }, 502, server, "engine_unreachable", true, None),
        (
            Fault::EngineClosedConnection { model: model(), may_have_started: false },
            502,
            server,
            "engine_closed",
            true,
            None,
        ),
        (
            Fault::EngineClosedConnection { model: model(), may_have_started: true },
            502,
            server,
            "engine_closed",
            false,
            None,
        ),
        (failed(Some(waited())), 503, server, "engine_failed", true, Some(3)),
        (failed(None), 503, server, "engine_failed", false, Some(1)),
        (Fault::ModelNotAwake { model: model() }, 503, server, "model_not_ready", false, None),
        (
            Fault::ModelNotReady {
                model: model(),
                cause: FailureCause::Exited(1),
                wait: WaitDetails::default(),
            },
            503,
            server,
            "model_not_ready",
            true,
            Some(1),
        ),
        (
            Fault::ModelNotReady {
                model: model(),
                cause: FailureCause::PermissionDenied,
                wait: WaitDetails::default(),
            },
            503,
            server,
            "model_not_ready",
            false,
            Some(1),
        ),
        (Fault::StubNotServing { why: "closed".into() }, 503, server, "not_serving", true, Some(1)),
        (Fault::ShuttingDown, 503, server, "shutting_down", true, Some(1)),
        (Fault::ControlPlaneUnavailable, 503, server, "control_plane", true, Some(5)),
        (Fault::TurnEnded { model: model() }, 503, server, "turn_over", false, Some(1)),
        (
            Fault::EngineTimeout { model: model(), timeout: ExchangeTimeout::Idle, limit: Millis(1) },
            504,
            server,
            "engine_timeout",
            false,
            None,
        ),
        (Fault::Internal, 500, server, "internal_error", false, None),
    ]
}

fn envelope(fault: &Fault) -> Value {
    serde_json::from_slice(&body(fault, ApiSchema::OpenAi)).unwrap()
}

#[test]
fn every_fault_has_the_row_of_the_documented_table() {
    for (fault, expected, kind, code, retry, after) in table() {
        let response = response(&fault, ApiSchema::OpenAi);
        assert_eq!(response.status(), expected, "{fault:?}");
        let headers = response.headers();
        assert_eq!(headers["content-type"], "application/json");
        assert_eq!(headers[SHOULD_RETRY], retry.to_string(), "{fault:?}");
        let seconds = headers.get("retry-after").map(|value| value.to_str().unwrap().parse().unwrap());
        assert_eq!(seconds, after, "{fault:?}");

        let envelope = envelope(&fault);
        let error = &envelope["error"];
        assert_eq!(error["type"], kind, "{fault:?}");
        assert_eq!(error["code"], code, "{fault:?}");
        assert_eq!(error["message"], fault.to_string());
        assert_eq!(super::code(&fault), code);
        assert!(error.get("param").is_some(), "param is null rather than absent");
        assert_eq!(error.get("details").is_some(), matches!(expected, 422 | 429 | 503), "{fault:?}");
        if let Some(details) = error.get("details") {
            for key in ["waited_for", "waited", "queue_position", "holders"] {
                assert!(details.get(key).is_some(), "{key} of {fault:?}");
            }
        }
    }
}

#[test]
fn a_shortage_says_who_is_in_the_way() {
    let holder = json!({"model": "qwen", "memory": "30Gi", "idle_for": "5m30s", "leases": 2, "pinned": true});
    assert_eq!(
        envelope(&shortage(false)),
        json!({"error": {
            "message": "Cannot schedule llama: insufficient memory (40Gi needed, 10Gi free): gpu-1: held by qwen",
            "type": "insufficient_memory",
            "param": null,
            "code": "insufficient_memory",
            "details": {
                "requested": {"model": "llama", "memory": "40Gi"},
                "available": "10Gi",
                "blocking": [holder],
                "waited_for": "gpu-1: held by qwen",
                "waited": "1m1.5s",
                "queue_position": 3,
                "holders": [holder],
            }
        }})
    );
    let never = &envelope(&shortage(true))["error"];
    assert_eq!(never["details"]["never"], true);
    assert!(
        never["message"].as_str().unwrap().contains("even with all other models evicted: gpu-1"),
        "{never}"
    );
}

#[test]
fn a_refusal_counts_the_holders_that_it_does_not_list() {
    let Fault::InsufficientMemory(mut short) = shortage(false) else { panic!("it is one") };
    short.wait.unlisted_holders = 984;
    let details = &envelope(&Fault::InsufficientMemory(short))["error"]["details"];
    assert_eq!(details["unlisted_holders"], 984);
    assert_eq!(details["holders"].as_array().unwrap().len(), 1);
}

#[test]
fn a_rate_limit_says_which_and_how_far_it_is_used() {
    let error = &envelope(&limited(1))["error"];
    assert_eq!(
        error["message"],
        "this key may use 1000 tokens in 1m: 900 are used, and this request needs 200"
    );
    let details = &error["details"];
    assert_eq!(
        (&details["unit"], &details["limit"], &details["used"], &details["requested"], &details["window"]),
        (&json!("tokens"), &json!(1000), &json!(900), &json!(200), &json!("1m0s"))
    );
}

#[test]
fn a_model_that_does_not_start_shows_the_class_of_the_cause_and_no_text_of_the_engine() {
    let not_ready = |cause| Fault::ModelNotReady { model: "m".into(), cause, wait: WaitDetails::default() };
    for (cause, class) in [
        (FailureCause::OutOfMemory, "out_of_memory"),
        (FailureCause::PortTaken, "port_taken"),
        (FailureCause::Exited(1), "exited:1"),
        (FailureCause::Timeout, "timeout"),
        (FailureCause::WrongModel { serves: "x".into(), configured: "y".into() }, "wrong_model"),
    ] {
        assert_eq!(envelope(&not_ready(cause))["error"]["details"]["cause"], class);
    }
}

#[test]
fn a_message_says_what_happened_why_and_what_to_do() {
    let says = |fault: &Fault, words: &str| assert!(fault.to_string().contains(words), "{fault}");
    says(&Fault::MissingApiKey, "no API key: send one as 'Authorization: Bearer KEY'");
    let header = "x-api-key".to_owned();
    says(&Fault::InvalidApiKey { header }, "invalid API key in the header 'x-api-key'");
    let timeout = Fault::EngineTimeout {
        model: "m".into(),
        timeout: ExchangeTimeout::FirstByte,
        limit: Millis::secs(300),
    };
    says(&timeout, "firstByte after 5m: no first byte of the stream");
    let not_ready = |cause| Fault::ModelNotReady { model: "m".into(), cause, wait: waited() };
    says(&not_ready(FailureCause::Deadline), "was not ready after 1m1.500s: gpu-1: held by qwen");
    for (limit, words) in [
        (WaitLimit::Request, "the request's x-request-timeout expired"),
        (WaitLimit::Queue, "queue.maxWait expired"),
    ] {
        let wait = WaitDetails { expired_limit: Some(limit), ..waited() };
        let expired = |cause| Fault::ModelNotReady { model: "m".into(), cause, wait: wait.clone() };
        says(
            &expired(FailureCause::Deadline),
            &format!("was not ready after 1m1.500s, when {words}: gpu-1: held by qwen"),
        );
        says(&expired(FailureCause::Exited(1)), &format!("gpu-1: held by qwen; {words} after 1m1.500s"));
        let full = Fault::QueueFull { message: "'m' is full".into(), wait: wait.clone() };
        says(&full, &format!("'m' is full: gpu-1: held by qwen; {words} after 1m1.500s"));
        let Fault::InsufficientMemory(mut short) = shortage(false) else { panic!("it is one") };
        short.wait = wait;
        says(&Fault::InsufficientMemory(short), &format!("gpu-1: held by qwen; {words} after 1m1.500s"));
    }
    says(&not_ready(FailureCause::Exited(1)), "failed to become ready: gpu-1: held by qwen");
    let unsaid = Fault::ModelNotReady {
        model: "m".into(),
        cause: FailureCause::Timeout,
        wait: WaitDetails::default(),
    };
    says(&unsaid, "failed to become ready: the engine exceeded its deadline (timeout)");
    let broke_off =
        Fault::EngineFailed { model: "m".into(), cause: FailureCause::ConnectionBroken, wait: None };
    says(&broke_off, "the connection broke in the middle of the answer");
    let route = Fault::RouteNotFound {
        method: "POST".into(),
        path: "/x".into(),
        suggested_path: Some("/v1/x".into()),
    };
    says(&route, "no route POST /x: use /v1/x");
}

#[test]
fn the_parameter_at_fault_is_named() {
    let fault = Fault::InvalidRequest { message: "'model' is required".into(), param: Some("model".into()) };
    assert_eq!(envelope(&fault)["error"]["param"], "model");
    let unknown = |near: &[&str]| {
        let near = near.iter().map(|name| (*name).to_owned()).collect();
        envelope(&Fault::ModelNotFound { model: "x".into(), suggestions: near })
    };
    assert_eq!(unknown(&[])["error"]["param"], "model");
    assert_eq!(unknown(&[])["error"]["message"], "Model 'x' not found: GET /v1/models lists the models");
    assert_eq!(unknown(&["x1", "x2"])["error"]["message"], "Model 'x' not found: did you mean 'x1' or 'x2'?");
    assert_eq!(envelope(&Fault::Internal)["error"]["param"], Value::Null);
}

#[test]
fn in_a_stream_the_envelope_is_one_event_and_nothing_after_it() {
    let fault = Fault::InvalidRequest { message: "a\nb".into(), param: None };
    let event = event(&fault, ApiSchema::OpenAi);
    let text = std::str::from_utf8(&event).unwrap();
    let json = text.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap();
    assert!(!json.contains('\n'));
    assert_eq!(serde_json::from_str::<Value>(json).unwrap(), envelope(&fault));
}

#[test]
fn anthropics_envelope_says_the_same_in_its_own_words() {
    let kinds = [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ];
    for (fault, status, _, code, ..) in table() {
        let openai = envelope(&fault);
        let anthropic: Value = serde_json::from_slice(&body(&fault, ApiSchema::Anthropic)).unwrap();
        assert_eq!(anthropic["type"], "error");
        let expected =
            kinds.iter().find(|(of, _)| *of == status).map_or("invalid_request_error", |(_, kind)| kind);
        let expected = if status == 501 { "api_error" } else { expected };
        assert_eq!(anthropic["error"]["type"], expected, "{fault:?}");
        assert_eq!(anthropic["error"]["code"], code);
        for key in ["message", "param", "details"] {
            assert_eq!(anthropic["error"].get(key), openai["error"].get(key), "{key} of {fault:?}");
        }
        assert_eq!(body(&fault, ApiSchema::Responses), body(&fault, ApiSchema::OpenAi));
        assert_eq!(
            response(&fault, ApiSchema::Anthropic).headers(),
            response(&fault, ApiSchema::OpenAi).headers()
        );
    }
}

/// The events of a stream: name and datum.
fn events(stream: &[u8]) -> Vec<(String, Value)> {
    let text = std::str::from_utf8(stream).unwrap();
    let stream = text.strip_suffix("\n\n").unwrap();
    let read = |event: &str| {
        let (name, datum) = event.split_once("\ndata: ").unwrap();
        (name.strip_prefix("event: ").unwrap().to_owned(), serde_json::from_str(datum).unwrap())
    };
    stream.split("\n\n").map(read).collect()
}

#[test]
fn in_a_stream_of_messages_it_is_the_event_named_error() {
    let fault = shortage(false);
    let expected = serde_json::from_slice::<Value>(&body(&fault, ApiSchema::Anthropic)).unwrap();
    assert_eq!(events(&event(&fault, ApiSchema::Anthropic)), [("error".to_owned(), expected)]);
}

#[test]
fn in_a_stream_of_responses_it_is_an_event_that_the_sdks_raise_and_the_end_that_others_wait_for() {
    let fault = Fault::ModelNotFound { model: "x".into(), suggestions: Vec::new() };
    let message = fault.to_string();
    let error = json!({
        "message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found",
    });
    let expected = [
        (
            "error".to_owned(),
            json!({
                "type": "error", "sequence_number": 5, "code": "model_not_found", "message": message,
                "param": "model", "error": error,
            }),
        ),
        (
            "response.failed".to_owned(),
            json!({
                "type": "response.failed", "sequence_number": 6, "response": {
                    "object": "response", "status": "failed", "output": [],
                    "error": {"code": "model_not_found", "message": message},
                },
            }),
        ),
    ];
    assert_eq!(events(&event_after(&fault, ApiSchema::Responses, 5)), expected);
}

#[test]
fn defects_are_loud_and_mistakes_of_clients_are_not() {
    assert_eq!(log_level(&Fault::Internal), Level::ERROR);
    assert_eq!(log_level(&failed(None)), Level::WARN);
    assert_eq!(log_level(&Fault::ShuttingDown), Level::INFO);
    assert_eq!(log_level(&shortage(true)), Level::INFO);
    assert_eq!(log_level(&Fault::InvalidApiKey { header: String::new() }), Level::DEBUG);
    assert_eq!(log_level(&Fault::NotImplemented { what: String::new() }), Level::DEBUG);
}
