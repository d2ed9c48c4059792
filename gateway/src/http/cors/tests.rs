use crate::http::testing::{
    CannedEngine, InProcessGateway, completion_request, json_response, raw_request, sse_response,
};
use rouse_config::CorsConfig;

fn allow(origins: &[&str]) -> impl FnOnce(&mut rouse_config::Config) {
    let any = origins.contains(&"*");
    let origins = origins.iter().filter(|o| **o != "*").map(ToString::to_string).collect();
    move |config| config.cors = CorsConfig { origins, any }
}

fn preflight(origin: &str) -> String {
    raw_request(
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
    let gateway = InProcessGateway::start(allow(&["https://app.example"]));
    let mut client = gateway.connect().await;
    client.send(preflight("https://app.example")).await;
    let answer = client.read_response().await;
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
    // The connection still serves requests.
    client.send(raw_request("GET /healthz", "", "")).await;
    assert_eq!(client.read_response().await.status, 200);
}

#[tokio::test]
async fn errors_and_streams_name_the_origin_and_what_may_be_read() {
    let gateway = InProcessGateway::start(allow(&["https://app.example"]));
    let engine = CannedEngine::start(sse_response("{}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let mut client = gateway.connect().await;
    let origin = "origin: https://app.example\r\n";
    client.send(raw_request("POST /v1/nothing", origin, "")).await;
    let refused = client.read_response().await;
    assert_eq!(refused.status, 404);
    assert_eq!(refused.header("access-control-allow-origin"), Some("https://app.example"));
    let shown = refused.header("access-control-expose-headers").unwrap();
    assert!(shown.contains("x-request-id") && shown.contains("x-should-retry"), "{shown}");
    // The name that Anthropic's SDKs read.
    let mut client = gateway.connect().await;
    client.send(raw_request("POST /v1/messages", origin, "")).await;
    let shown = client.read_response().await;
    let shown = shown.header("access-control-expose-headers").unwrap();
    assert!(shown.split(", ").any(|name| name == "request-id"), "{shown}");
    let mut client = gateway.connect().await;
    client.send(completion_request(true).replacen("\r\n", &format!("\r\n{origin}"), 1)).await;
    let stream = client.read_response().await;
    assert_eq!((stream.status, stream.header("vary")), (200, Some("Origin")), "{}", stream.head);
    assert_eq!(stream.header("access-control-allow-origin"), Some("https://app.example"));
}

#[tokio::test]
async fn other_origins_are_told_nothing_and_caches_that_it_depends() {
    let gateway = InProcessGateway::start(allow(&["https://app.example"]));
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
        let answer = client.read_response().await;
        assert_eq!((answer.status, answer.header("vary")), (405, Some("Origin")), "{origin}");
        assert_eq!(answer.header("access-control-allow-origin"), None, "{origin}");
    }
}

#[tokio::test]
async fn every_origin_is_allowed_by_a_star_and_without_configuration_those_of_this_machine() {
    let gateway = InProcessGateway::start(allow(&["*"]));
    let mut client = gateway.connect().await;
    client.send(preflight("https://whoever.example")).await;
    let answer = client.read_response().await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (204, Some("*")));
    let gateway = InProcessGateway::start(|_| {});
    let engine = CannedEngine::start(json_response("{}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let mut client = gateway.connect().await;
    for origin in ["http://localhost:3000", "http://127.0.0.1:8080", "http://[::1]"] {
        client.send(preflight(origin)).await;
        let answer = client.read_response().await;
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (204, Some(origin)));
        client
            .send(completion_request(false).replacen("\r\n", &format!("\r\norigin: {origin}\r\n"), 1))
            .await;
        let answer = client.read_response().await;
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some(origin)));
        assert_eq!(answer.header("vary"), Some("Origin"));
    }
    for origin in ["https://app.example", "http://localhost.evil.example", "null"] {
        client.send(preflight(origin)).await;
        let answer = client.read_response().await;
        assert_eq!((answer.status, answer.header("vary")), (405, None), "{origin}");
        assert!(!answer.head.contains("access-control"), "{}", answer.head);
    }
    client.send(completion_request(false)).await;
    let answer = client.read_response().await;
    assert!(answer.status == 200 && !answer.head.contains("access-control"), "{}", answer.head);
}

#[tokio::test]
async fn a_page_of_this_machine_is_as_foreign_as_any_where_there_are_keys_or_a_network() {
    let hash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    let keys = rouse_config::parse(&format!("keys: [{{name: k, sha256: {hash}}}]"), "test").unwrap().keys;
    let keyed = InProcessGateway::start(|config| config.keys = keys);
    let wide = InProcessGateway::start(|config| config.api = "0.0.0.0:8080".parse().unwrap());
    for gateway in [keyed, wide] {
        let mut client = gateway.connect().await;
        client.send(preflight("http://localhost:3000")).await;
        let answer = client.read_response().await;
        assert!(answer.status != 204 && !answer.head.contains("access-control"), "{}", answer.head);
    }
}
