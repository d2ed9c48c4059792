//! Requests that the gateway refuses on their head, before it reads their body.

use super::refusal;
use crate::support::{GatewayFixture, GatewayProcess, SimModel, client::chat_body};

const CHAT: &str = "/v1/chat/completions";

/// A gateway with one model that stays cold.
fn gateway() -> GatewayProcess {
    GatewayFixture::new(&["2Gi"])
        .settings("limits: {header: 8Ki, headerRead: 400ms}")
        .model(&SimModel::new("small"))
        .start()
}

#[test]
fn what_is_wrong_with_a_body_is_said_and_the_key_is_named() {
    let gateway = gateway();
    for (body, param, says) in [
        (r#"{"model":"#, None, "not valid JSON"),
        ("", None, "not valid JSON"),
        ("hello", None, "not valid JSON"),
        (r#"{"model":"small"} x"#, None, "not valid JSON"),
        (r#"["model"]"#, None, "must be a JSON object"),
        ("{}", Some("model"), "'model' is required"),
        (r#"{"model":7}"#, Some("model"), "'model' must be a string"),
        (r#"{"model":""}"#, Some("model"), "'model' must not be empty"),
        (r#"{"model":"small","model":"small"}"#, Some("model"), "more than once"),
        (r#"{"model":"small","stream":true,"stream":false}"#, Some("stream"), "more than once"),
        (r#"{"model":"small","mod\u0065l":"other"}"#, Some("model"), "more than once"),
    ] {
        let error = refusal(&gateway.client().post(CHAT, body), 400, "invalid_request");
        assert_eq!(error["param"].as_str(), param, "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{body}: {error}");
    }
    assert_eq!(gateway.leases(), 0);
    assert_eq!(gateway.engine("small#0")["state"], "Cold");
}

#[test]
fn headers_that_contradict_or_mean_nothing_are_refused() {
    let gateway = gateway();
    let post = |headers: &str| gateway.client().post_with(CHAT, headers, &chat_body("small", false, 1));
    let error = refusal(&post("Authorization: Bearer a\r\nx-api-key: b\r\n"), 400, "invalid_request");
    assert!(error["message"].as_str().unwrap().contains("conflicting keys"), "{error}");
    for timeout in ["soon", "-1", "0", "inf"] {
        let error = refusal(&post(&format!("x-request-timeout: {timeout}\r\n")), 400, "invalid_request");
        assert_eq!(error["param"], "x-request-timeout");
    }
    let error = refusal(&post("Content-Encoding: gzip\r\n"), 415, "unsupported_encoding");
    assert!(error["message"].as_str().unwrap().contains("'gzip'"), "{error}");
    let big = post(&format!("x-big: {}\r\n", "a".repeat(12 << 10)));
    let error = refusal(&big, 431, "headers_too_large");
    assert!(error["message"].as_str().unwrap().contains("8Ki"), "{error}");
    // The gateway does not invite a body that it will not read.
    let expect = "Content-Encoding: br\r\nExpect: 100-continue\r\nContent-Length: 9\r\nConnection: close\r\n";
    let mut open = gateway.client().open(format!("POST {CHAT} HTTP/1.1\r\nHost: h\r\n{expect}\r\n"));
    open.until("unsupported_encoding");
    assert!(!open.has("100 Continue"), "{}", open.text());
    let many: String = (0..300).map(|n| format!("x-{n}: 1\r\n")).collect();
    refusal(&post(&many), 431, "headers_too_large");
}

#[test]
fn models_and_routes_that_are_not_there_are_404() {
    let gateway = gateway();
    let client = gateway.client();
    let error = refusal(&client.chat("absent", false, 1), 404, "model_not_found");
    let says = "Model 'absent' not found: GET /v1/models lists the models";
    assert_eq!((&error["message"], &error["param"]), (&says.into(), &"model".into()));
    let error = refusal(&client.chat(&format!("a\r\nb{}", "x".repeat(999)), true, 1), 404, "model_not_found");
    let message = error["message"].as_str().unwrap();
    assert!(message.len() < 350 && message.contains("a\\r\\nb"), "{message}");
    refusal(&client.get("/v1/models/absent"), 404, "model_not_found");
    for answer in [client.chat("smal", true, 1), client.get("/v1/models/sma%6C")] {
        let near = refusal(&answer, 404, "model_not_found");
        assert_eq!(near["message"], "Model 'smal' not found: did you mean 'small'?");
    }
    for (path, says) in [
        ("/", "no route GET /"),
        ("/v1/models/", "no route GET /v1/models/: use /v1/models"),
        ("/chat/completions", "no route GET /chat/completions: use /v1/chat/completions"),
        ("/models/small", "no route GET /models/small: use /v1/models/small"),
        ("/v1/v1/models", "no route GET /v1/v1/models: use /v1/models"),
    ] {
        let error = refusal(&client.get(path), 404, "route_not_found");
        assert_eq!((&error["message"], &error["param"]), (&says.into(), &serde_json::Value::Null));
    }
    refusal(&client.post("/sleep", "{}"), 404, "route_not_found");
    refusal(&client.post("/v1/chat/completions/", "{}"), 404, "route_not_found");
}

#[test]
fn methods_that_do_not_fit_say_which_would() {
    let gateway = gateway();
    for (line, allow) in [
        ("GET /v1/chat/completions", "POST"),
        ("PUT /v1/embeddings", "POST"),
        ("DELETE /v1/models", "GET, HEAD"),
        ("POST /v1/models/small", "GET, HEAD"),
        ("TRACE /v1/completions", "POST"),
        ("CONNECT localhost:443", "GET, HEAD"),
    ] {
        let answer =
            gateway.client().raw(&format!("{line} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
        refusal(&answer, 405, "method_not_allowed");
        assert_eq!(answer.header("allow"), allow, "{line}");
    }
    let upgrade = "GET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
    let mut open = gateway.client().open(upgrade);
    refusal(&open.answer(), 501, "not_implemented");
}

#[test]
fn a_head_that_is_no_http_is_400_and_one_that_does_not_come_is_408() {
    let gateway = gateway();
    for broken in ["GARBAGE\r\n\r\n", "GET / HTTP/1.1\r\nno colon\r\n\r\n", "\u{1}\u{2}\r\n\r\n"] {
        let answer = gateway.client().raw(broken);
        refusal(&answer, 400, "invalid_request");
        assert_eq!(answer.header("connection"), "close");
    }
    let slow = gateway.client().open("POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n").rest();
    let error = refusal(&slow, 408, "request_timeout");
    assert!(error["message"].as_str().unwrap().contains("limits.headerRead"), "{error}");
    // Framing that two readers could understand differently never reaches an engine.
    for framing in ["Content-Length: 5\r\nContent-Length: 6\r\n", "Transfer-Encoding: gzip\r\n"] {
        let request = format!("POST {CHAT} HTTP/1.1\r\nHost: h\r\n{framing}\r\n{{}}");
        assert_eq!(gateway.client().raw(&request).status, 400, "{framing}");
    }
}
