//! Every route of the inference API: requests and answers pass unchanged, and the gateway's own answers have the called
//! API's format.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{
    refusals::refusal,
    support::{GatewayFixture, GatewayProcess, SimModel, TestClient, TestResponse},
};

mod upload;
mod waits;

use upload::{MULTIPART, form, post_form};

pub(crate) const MESSAGES: &str = "/v1/messages";
pub(crate) const RESPONSES: &str = "/v1/responses";
const TRANSCRIPTIONS: &str = "/v1/audio/transcriptions";

/// Every route whose body is JSON, its label, and a body for it.
const JSON: [(&str, &str, &str); 16] = [
    (
        "/v1/chat/completions",
        "chat",
        r#"{"model":"M","messages":[{"role":"user","content":"a"}],"stream":S}"#,
    ),
    ("/v1/completions", "completions", r#"{"model":"M","prompt":"a","stream":S}"#),
    (RESPONSES, "responses", r#"{"model":"M","input":"a","stream":S}"#),
    (
        MESSAGES,
        "messages",
        r#"{"max_tokens":3,"messages":[{"role":"user","content":"a"}],"stream":S,"model":"M"}"#,
    ),
    (
        "/v1/messages/count_tokens",
        "count_tokens",
        r#"{"model":"M","messages":[{"role":"user","content":"a b"}]}"#,
    ),
    ("/v1/embeddings", "embeddings", r#"{ "input" : "a",  "model":"M" }"#),
    ("/v1/rerank", "rerank", r#"{"model":"M","query":"q","documents":["a","b"]}"#),
    ("/v2/rerank", "rerank", r#"{"model":"M","query":"q","documents":["a","b"]}"#),
    ("/rerank", "rerank", r#"{"model":"M","query":"q","documents":["a","b"]}"#),
    ("/v1/score", "score", r#"{"model":"M","text_1":"q","text_2":["a","b"]}"#),
    ("/score", "score", r#"{"model":"M","text_1":"q","text_2":["a","b"]}"#),
    ("/v1/moderations", "moderations", r#"{"model":"M","input":["a"]}"#),
    ("/v1/images/generations", "images", r#"{"model":"M","prompt":"a","n":1}"#),
    ("/v1/audio/speech", "speech", r#"{"model":"M","input":"a","voice":"b"}"#),
    ("/tokenize", "tokenize", r#"{"model":"M","prompt":"a b"}"#),
    ("/detokenize", "detokenize", r#"{"model":"M","tokens":[1,2]}"#),
];

/// A gateway whose engine derives its answers from the request alone and has another model name than clients use.
fn gateway() -> GatewayProcess {
    GatewayFixture::new(&["2Gi"])
        .model(&SimModel {
            flags: "--fixed-ids --model engines-own",
            engine: "servedName: engines-own",
            keys: "aliases: [org/nick]",
            ..SimModel::new("small")
        })
        .start()
}

fn body(template: &str, model: &str, stream: bool) -> String {
    template.replace("\"M\"", &format!("{model:?}")).replace(":S", &format!(":{stream}"))
}

fn ask(client: &TestClient, path: &str, body: &str) -> TestResponse {
    client.post(path, body)
}

#[test]
fn every_route_passes_the_engines_answer_byte_for_byte_under_every_name() {
    let gateway = gateway();
    gateway.wake("small");
    let (client, engine) = (gateway.client(), gateway.engine_client("small#0"));
    for (path, _, template) in JSON {
        for stream in [false, true] {
            if stream && !template.contains(":S") {
                continue;
            }
            let direct = ask(&engine, path, &body(template, "engines-own", stream));
            assert_eq!(direct.status, 200, "{path} {}", direct.text());
            for name in ["small", "org/nick"] {
                let through = ask(&client, path, &body(template, name, stream));
                assert_eq!(through.status, 200, "{path} {}", through.text());
                assert_eq!(through.header("content-type"), direct.header("content-type"), "{path}");
                assert!(through.body == direct.body && through.complete, "{path}: {}", through.text());
            }
        }
    }
    for path in [TRANSCRIPTIONS, "/v1/audio/translations"] {
        for stream in ["false", "true"] {
            let fields = |model| form(&[("model", model), ("stream", stream)], b"RIFF\r\n--not a boundary");
            let direct = post_form(engine, path, MULTIPART, &fields("engines-own"));
            let through = post_form(client, path, MULTIPART, &fields("org/nick"));
            assert_eq!((direct.status, through.status), (200, 200), "{path} {}", through.text());
            assert!(through.body == direct.body, "{path} {}", through.text());
        }
    }
    gateway.until_unused("small#0");
}

#[test]
fn every_route_is_counted_under_its_label() {
    let gateway = gateway();
    gateway.wake("small");
    let client = gateway.client();
    for (path, _, template) in JSON {
        assert_eq!(ask(&client, path, &body(template, "small", false)).status, 200, "{path}");
    }
    post_form(client, TRANSCRIPTIONS, MULTIPART, &form(&[("model", "small")], b"x"));
    post_form(client, "/v1/audio/translations", MULTIPART, &form(&[("model", "small")], b"x"));
    client.get("/engines/small/version");
    let metrics = || gateway.admin().get("/metrics").text();
    let labels = JSON.iter().map(|(_, label, _)| *label).chain(["transcriptions", "translations", "engines"]);
    for label in labels {
        let line = format!(
            "rouse_requests_total{{cold_start=\"none\",model=\"small\",route=\"{label}\",status=\"2xx\"}}"
        );
        gateway.until(&line, Duration::from_secs(5), || metrics().contains(&line));
    }
}

/// Asserts the fields of a refusal that Anthropic's SDKs need.
fn anthropic(answer: &TestResponse, status: u16, kind: &str) {
    let told = format!("{} {:?} {}", answer.status, answer.headers, answer.text());
    let body = answer.json();
    assert_eq!(
        (answer.status, &body["type"], &body["error"]["type"]),
        (status, &json!("error"), &json!(kind)),
        "{told}"
    );
    assert!(body["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{told}");
    assert_eq!(answer.header("request-id"), answer.header("x-request-id"), "{told}");
    assert!(!answer.header("x-should-retry").is_empty(), "{told}");
}

#[test]
fn refusals_are_in_the_words_of_the_api_whenever_they_come() {
    let gateway = gateway();
    let client = gateway.client();
    for path in [MESSAGES, "/v1/messages/count_tokens", "/engines/small/v1/messages"] {
        anthropic(&client.post(path, "not json"), 400, "invalid_request_error");
        anthropic(&client.get(path), 405, "invalid_request_error");
        anthropic(&client.post_with(path, "content-encoding: gzip\r\n", "{}"), 415, "invalid_request_error");
        anthropic(
            &client.post_with(path, "x-api-key: a\r\napi-key: b\r\n", "{}"),
            400,
            "invalid_request_error",
        );
    }
    anthropic(&client.post(MESSAGES, r#"{"model":"nobody"}"#), 404, "not_found_error");
    anthropic(&client.get("/v1/messages/batches"), 404, "not_found_error");
    anthropic(&client.post("/engines/nobody/v1/messages", "{}"), 404, "not_found_error");
    for (path, status, code) in [
        (RESPONSES, 405, "method_not_allowed"),
        ("/v1/responses/resp_1", 404, "route_not_found"),
        ("/v1/responses/resp_1/cancel", 404, "route_not_found"),
        ("/v1/responses/resp_1/input_items", 404, "route_not_found"),
    ] {
        refusal(&client.get(path), status, code);
    }
    let background = client.post(RESPONSES, r#"{"model":"small","input":"a","background":true}"#);
    assert_eq!(refusal(&background, 400, "invalid_request")["param"], "background");
    let passed = client.post("/engines/small/v1/responses", r#"{"input":"a","background":true}"#);
    refusal(&passed, 400, "invalid_request");
    for kind in ["application/json", "multipart/mixed; boundary=b", "text/plain", ""] {
        refusal(&post_form(client, TRANSCRIPTIONS, kind, b"{}"), 415, "unsupported_media_type");
    }
    for (kind, body) in [
        ("multipart/form-data", &b"--b--\r\n"[..]),
        (MULTIPART, b"nonsense"),
        (MULTIPART, &form(&[], b"x")),
        (MULTIPART, &form(&[("model", "small"), ("model", "small")], b"x")),
    ] {
        refusal(&post_form(client, TRANSCRIPTIONS, kind, body), 400, "invalid_request");
    }
    refusal(
        &post_form(client, TRANSCRIPTIONS, MULTIPART, &form(&[("model", "x")], b"x")),
        404,
        "model_not_found",
    );
    assert_eq!(client.get("/v1/models/small").json()["state"], "cold", "nobody was woken");
}

#[test]
fn an_engines_own_refusal_passes_as_it_is() {
    let gateway = gateway();
    gateway.wake("small");
    let (client, engine) = (gateway.client(), gateway.engine_client("small#0"));
    for (path, body) in [
        (MESSAGES, r#"{"model":"engines-own","messages":[]}"#),
        ("/v1/score", r#"{"model":"engines-own","text_2":"a"}"#),
    ] {
        let direct = engine.post(path, body);
        let through = client.post(path, &body.replace("engines-own", "small"));
        assert_eq!((direct.status, &direct.body), (through.status, &through.body), "{path}");
        assert!(direct.status >= 400, "{path}");
    }
    // The gateway passes the engine's 404 for a path that the engine does not have.
    let unserved = client.post("/engines/small/pooling", "{}");
    assert_eq!((unserved.status, unserved.json()["detail"].as_str()), (404, Some("Not Found")));
}

#[test]
fn headers_of_anthropics_clients_reach_the_engine_and_their_key_does_not() {
    let gateway = GatewayFixture::new(&["1Gi"]).echo_model("mirror", "passthrough: [/v1/messages]").start();
    let headers = "anthropic-version: 2023-06-01\r\nanthropic-beta: a,b\r\nx-api-key: secret\r\n";
    let seen = gateway.client().post_with(MESSAGES, headers, r#"{"model":"mirror"}"#).text();
    for line in ["anthropic-version: 2023-06-01", "anthropic-beta: a,b"] {
        assert!(seen.lines().any(|found| found == line), "{line} in {seen}");
    }
    assert!(!seen.contains("secret"), "{seen}");
    let through = gateway.client().post_with("/engines/mirror/v1/messages?beta=true", headers, "{}").text();
    assert!(through.starts_with("POST /v1/messages?beta=true HTTP/1.1\r\n"), "{through}");
}

/// Returns the `event:` and the parsed `data:` of each event.
pub(crate) fn events(text: &str) -> Vec<(String, Value)> {
    let parse = |event: &str| {
        let line = |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        Some((line("event: ").to_owned(), serde_json::from_str(line("data: ")).ok()?))
    };
    text.split("\n\n").filter_map(parse).collect()
}
