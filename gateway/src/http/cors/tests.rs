use super::*;
use crate::http::testing::{Engine, Gateway, events, json, post, raw};

fn allow(origins: &[&str]) -> impl FnOnce(&mut crate::config::Config) {
    let any = origins.contains(&"*");
    let origins = origins.iter().filter(|o| **o != "*").map(ToString::to_string).collect();
    move |config| config.cors = Cors { origins, any }
}

fn preflight(origin: &str) -> String {
    raw(
        "OPTIONS /v1/chat/completions",
        &format!(
            "origin: {origin}\r\naccess-control-request-method: POST\r\naccess-control-request-headers: \
             Authorization,content-type, x-stainless-os,anthropic-version,x-session-id,x-evil\r\n"
        ),
        "",
    )
}

#[tokio::test]
async fn a_preflight_is_answered_without_a_key_and_names_what_may_be_sent() {
    let gateway = Gateway::start(allow(&["https://app.example"]));
    let mut client = gateway.connect().await;
    client.send(preflight("https://app.example")).await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 204, "{}", answer.head);
    for (name, value) in [
        ("access-control-allow-origin", "https://app.example"),
        ("access-control-allow-methods", "GET, HEAD, POST"),
        (
            "access-control-allow-headers",
            "authorization, content-type, x-stainless-os, anthropic-version, x-session-id",
        ),
        ("access-control-max-age", "7200"),
        ("vary", "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"),
    ] {
        assert_eq!(answer.header(name), Some(value), "{}", answer.head);
    }
    assert_eq!(answer.header("access-control-allow-credentials"), None);
    // And the connection serves on.
    client.send(raw("GET /healthz", "", "")).await;
    assert_eq!(client.answer().await.status, 200);
}

#[tokio::test]
async fn errors_and_streams_name_the_origin_and_what_may_be_read() {
    let gateway = Gateway::start(allow(&["https://app.example"]));
    let engine = Engine::start(events("{}")).await;
    let gate = gateway.open_gate();
    gateway.route(&[(engine.address, &gate)]);
    let mut client = gateway.connect().await;
    let origin = "origin: https://app.example\r\n";
    client.send(raw("POST /v1/nothing", origin, "")).await;
    let refused = client.answer().await;
    assert_eq!(refused.status, 404);
    assert_eq!(refused.header("access-control-allow-origin"), Some("https://app.example"));
    let shown = refused.header("access-control-expose-headers").unwrap();
    assert!(shown.contains("x-request-id") && shown.contains("x-should-retry"), "{shown}");
    // As Anthropic's SDKs call it.
    let mut client = gateway.connect().await;
    client.send(raw("POST /v1/messages", origin, "")).await;
    let shown = client.answer().await;
    let shown = shown.header("access-control-expose-headers").unwrap();
    assert!(shown.split(", ").any(|name| name == "request-id"), "{shown}");
    let mut client = gateway.connect().await;
    client.send(post(true).replacen("\r\n", &format!("\r\n{origin}"), 1)).await;
    let stream = client.answer().await;
    assert_eq!((stream.status, stream.header("vary")), (200, Some("Origin")), "{}", stream.head);
    assert_eq!(stream.header("access-control-allow-origin"), Some("https://app.example"));
}

#[tokio::test]
async fn other_origins_are_told_nothing_and_caches_that_it_depends() {
    let gateway = Gateway::start(allow(&["https://app.example"]));
    let foreign = [
        "https://app.example.evil",
        "http://app.example",
        "https://app.example:8443",
        "null",
        "https://app.example\r\norigin: https://evil.example",
    ];
    for origin in foreign {
        let mut client = gateway.connect().await;
        client.send(preflight(origin)).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.header("vary")), (405, Some("Origin")), "{origin}");
        assert_eq!(answer.header("access-control-allow-origin"), None, "{origin}");
    }
}

#[tokio::test]
async fn every_origin_is_allowed_by_a_star_and_none_without_configuration() {
    let gateway = Gateway::start(allow(&["*"]));
    let mut client = gateway.connect().await;
    client.send(preflight("https://whoever.example")).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (204, Some("*")));
    let gateway = Gateway::start(|_| {});
    let engine = Engine::start(json("{}")).await;
    let gate = gateway.open_gate();
    gateway.route(&[(engine.address, &gate)]);
    let mut client = gateway.connect().await;
    client.send(post(false).replacen("\r\n", "\r\norigin: http://localhost:3000\r\n", 1)).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.header("vary")), (200, None));
    assert!(!answer.head.contains("access-control"), "{}", answer.head);
    client.send(preflight("https://app.example")).await;
    assert_eq!(client.answer().await.status, 405);
}
