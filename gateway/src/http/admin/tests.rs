//! Tests the admin routes over their own listener.

use std::{collections::BTreeMap, io::Write, net::SocketAddr, sync::Arc};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use rouse_controllers::warmup_list::WarmupSummary;
use serde_json::json;

use super::{AdminSources, WarmupSource};
use crate::{
    http::testing::{
        InProcessGateway, MODEL, RawHttpClient, RawHttpResponse, TestCertificateAuthority, raw_request,
    },
    serve::{AdminServer, ShutdownStage},
};

pub(super) async fn start(gateway: &InProcessGateway, logs: Option<std::path::PathBuf>) -> SocketAddr {
    start_with(gateway, logs, Some(lists(Ok(vec![warmup()])))).await
}

/// A Warmup that has every field.
fn warmup() -> WarmupSummary {
    let node = json!({
        "node": "n1", "item": "vllm:1", "state": "Pending", "cause": "Network", "message": "m", "attempts": 2,
        "nextTry": "2026-11-01T00:00:00Z", "bytes": 7, "durationMillis": 9, "digest": "sha256:0",
    });
    let summary = json!({
        "namespace": "chat", "name": "qwen-warmup", "target": "model qwen", "phase": "InProgress",
        "desired": 3, "active": 1, "succeeded": 1, "failed": 0, "message": "2 nodes left",
        "items": {"pending": 1, "pulling": 1, "present": 1, "failed": 0, "skipped": 0},
        "nodes": [node], "moreNodes": 1,
    });
    serde_json::from_value(summary).unwrap()
}

fn lists(answer: Result<Vec<WarmupSummary>, String>) -> Arc<WarmupSource> {
    Arc::new(move || Box::pin(std::future::ready(answer.clone())))
}

/// What the admin API of this gateway reads.
pub(super) fn sources(
    gateway: &InProcessGateway,
    logs: Option<std::path::PathBuf>,
    warmups: Option<Arc<WarmupSource>>,
) -> AdminSources {
    AdminSources {
        driver: Arc::clone(&gateway.driver) as _,
        config: Arc::clone(&gateway.config),
        metrics: Arc::new(|| Box::pin(std::future::ready("rouse_build_info 1\n".to_owned()))),
        logs: Arc::new(move |_, _| logs.clone()),
        not_ready_reason: Arc::new(|| None),
        degraded_reason: Arc::new(|| None),
        warmups,
        name: "gateway-0".to_owned(),
        workers: Arc::clone(&gateway.workers),
        traffic: Arc::new(BTreeMap::new),
    }
}

async fn start_with(
    gateway: &InProcessGateway,
    logs: Option<std::path::PathBuf>,
    warmups: Option<Arc<WarmupSource>>,
) -> SocketAddr {
    let parts = sources(gateway, logs, warmups);
    let admin =
        AdminServer::from_listener(AdminServer::listen("127.0.0.1:0".parse().unwrap()).unwrap(), parts)
            .unwrap();
    let address = admin.address();
    tokio::spawn(admin.run(gateway.stage.subscribe()));
    address
}

pub(super) async fn ask(address: SocketAddr, line: &str, headers: &str) -> RawHttpResponse {
    let mut client = RawHttpClient::connect(address).await;
    client.send(raw_request(line, headers, "").replace("host: x", "host: localhost")).await;
    client.read_response().await
}

fn parsed(answer: &RawHttpResponse) -> serde_json::Value {
    serde_json::from_slice(&answer.body).unwrap()
}

#[tokio::test]
async fn who_comes_beyond_the_connections_that_the_listener_takes_is_told_so_and_served_when_one_ends() {
    let gateway = InProcessGateway::start(|_| {});
    let at = start(&gateway, None).await;
    let events = raw_request("GET /admin/v1/events", "", "").replace("host: x", "host: localhost");
    let mut held = Vec::new();
    let refused = loop {
        let mut client = RawHttpClient::connect(at).await;
        client.send(&events).await;
        let answer = client.read_response().await;
        if answer.status != 200 {
            break answer;
        }
        held.push(client);
        assert!(held.len() <= 128, "no end");
    };
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(refused.error()["code"], "too_many_connections");
    assert_eq!(refused.header("connection"), Some("close"));
    // A probe must not take a full gateway for a dead one.
    for path in ["/healthz", "/readyz"] {
        assert_eq!(ask(at, &format!("GET {path}"), "").await.status, 200, "{path}");
    }
    assert_eq!(ask(at, "GET /admin/v1/fleet", "").await.status, 503);
    held.pop();
    while ask(at, "GET /admin/v1/fleet", "").await.status != 200 {}
}

#[tokio::test]
async fn what_is_read_is_what_the_driver_published() {
    let gateway = InProcessGateway::start(|_| {});
    let at = start(&gateway, None).await;
    for (path, text) in [("/healthz", "ok\n"), ("/readyz", "ok\n"), ("/metrics", "rouse_build_info 1\n")] {
        let answer = ask(at, &format!("GET {path}"), "").await;
        assert_eq!((answer.status, answer.body.as_slice()), (200, text.as_bytes()));
    }
    let fleet = parsed(&ask(at, "GET /admin/v1/fleet", "").await);
    assert!(fleet["accelerators"].is_array() && fleet["engines"].is_array());
    for name in [MODEL, "org%2Fm", "alias"] {
        let line = format!("GET /admin/v1/models/{name}/explain");
        let explained = parsed(&ask(at, &line, "").await);
        assert_eq!((explained["model"].as_str(), explained["state"].as_str()), (Some(MODEL), Some("asleep")));
        assert_eq!(
            (explained["reason"].as_str(), explained["waiting"].as_u64()),
            (Some("waits for gpu-0"), Some(2))
        );
        assert!(explained["wait"].is_object() && explained["at"].as_u64() >= Some(1_000_000));
    }
    for (id, state) in [(1, "running"), (2, "done"), (3, "failed")] {
        let operation = parsed(&ask(at, &format!("GET /admin/v1/operations/{id}"), "").await);
        assert_eq!((operation["state"].as_str(), operation["operation"].as_u64()), (Some(state), Some(id)));
    }
    gateway.stage.send_replace(ShutdownStage::Draining);
    assert_eq!(ask(at, "GET /readyz", "").await.status, 503);
}

#[tokio::test]
async fn warmups_are_listed_in_a_cluster_and_refused_with_the_reason_elsewhere() {
    let gateway = InProcessGateway::start(|_| {});
    let listed = ask(start(&gateway, None).await, "GET /admin/v1/warmups", "").await;
    assert_eq!((listed.status, parsed(&listed)), (200, json!({"warmups": [warmup()]})));
    let refuses = lists(Err("this gateway may not list Warmups".to_owned()));
    for (source, status, code, text) in [
        (None, 404, "no_warmups", "only in a cluster"),
        (Some(refuses), 503, "warmups_unavailable", "may not list Warmups"),
    ] {
        let at = start_with(&gateway, None, source).await;
        let answer = ask(at, "GET /admin/v1/warmups", "").await;
        assert_eq!((answer.status, answer.error()["code"].as_str()), (status, Some(code)));
        assert!(answer.error()["message"].as_str().unwrap().contains(text), "{}", answer.error());
        super::openapi::tests::assert_matches_schema("GET /admin/v1/warmups", &answer);
    }
}

#[tokio::test]
async fn over_tls_nothing_is_said_in_the_clear() {
    let gateway = InProcessGateway::start(|_| {});
    let authority = TestCertificateAuthority::new();
    let mut config = gateway.config.load().as_ref().clone();
    config.tls = authority.tls("");
    config.admin.tls = true;
    gateway.config.store(Arc::new(config));
    let at = start(&gateway, None).await;
    let mut clear = RawHttpClient::connect(at).await;
    clear.send(raw_request("GET /healthz", "", "")).await;
    assert!(clear.read_to_end().await.is_empty());
    let mut client = authority.connect(at).await;
    client.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok\n"), "{answer}");
}

#[tokio::test]
async fn orders_are_taken_with_an_id_or_refused_with_a_reason() {
    let gateway = InProcessGateway::start(|_| {});
    let at = start(&gateway, None).await;
    for (what, id) in [("wake", 1), ("sleep", 1), ("sleep?level=2", 2), ("pin", 1), ("unpin", 1)] {
        let answer = ask(at, &format!("POST /admin/v1/models/{MODEL}/{what}"), "").await;
        assert_eq!((answer.status, parsed(&answer)["operation"].as_u64()), (202, Some(id)), "{what}");
    }
    let refused = ask(at, &format!("POST /admin/v1/models/{MODEL}/stop"), "").await;
    assert_eq!((refused.status, refused.error()["message"].as_str()), (409, Some("org/m is pinned")));
}

#[tokio::test]
async fn what_does_not_exist_or_is_not_allowed_is_said_so() {
    let gateway = InProcessGateway::start(|_| {});
    let at = start(&gateway, None).await;
    for (line, status, code) in [
        ("GET /admin/v1/models/nobody/explain", 404, "model_not_found"),
        ("GET /admin/v1/models/org/m/nothing", 404, "route_not_found"),
        ("GET /admin/v1/models/org", 404, "route_not_found"),
        ("GET /nowhere", 404, "route_not_found"),
        ("GET /admin/v1/operations/99", 404, "operation_not_found"),
        ("GET /admin/v1/operations/x", 404, "operation_not_found"),
        ("GET /admin/v1/models/org/m/logs", 404, "no_logs"),
        ("GET /admin/v1/models/org/m/wake", 405, "method_not_allowed"),
        ("POST /admin/v1/models/org/m/explain", 405, "method_not_allowed"),
        ("POST /admin/v1/models/org/m/sleep?level=3", 400, "invalid_request"),
        ("POST /admin/v1/models/org/m/sleep?level=deep", 400, "invalid_request"),
    ] {
        let answer = ask(at, line, "").await;
        assert_eq!((answer.status, answer.error()["code"].as_str()), (status, Some(code)), "{line}");
    }
    let foreign = ask(at, "POST /admin/v1/models/org/m/wake", "origin: https://evil.example\r\n").await;
    assert_eq!((foreign.status, foreign.error()["code"].as_str()), (403, Some("foreign_origin")));
    assert_eq!(ask(at, "POST /admin/v1/fleet", "").await.status, 405);
}

#[tokio::test]
async fn a_token_opens_what_is_closed_without_one() {
    let gateway = InProcessGateway::start(|config| config.admin.token = Some("t".into()));
    let at = start(&gateway, None).await;
    let closed = ask(at, "GET /admin/v1/fleet", "").await;
    assert_eq!((closed.status, closed.header("www-authenticate")), (401, Some("Bearer realm=\"admin\"")));
    assert_eq!(ask(at, "GET /admin/v1/fleet", "authorization: Bearer t\r\n").await.status, 200);
}

#[tokio::test]
async fn the_journal_is_passed_on_line_by_line() {
    let gateway = InProcessGateway::start(|_| {});
    let at = start(&gateway, None).await;
    let mut client = RawHttpClient::connect(at).await;
    client.send("GET /admin/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    let head = client.read_response().await;
    assert_eq!(head.header("content-type"), Some("text/event-stream"));
    for line in ["{\"n\":1}", "{\"n\":2}"] {
        gateway.driver.journal.send(line.into()).unwrap();
        client.read_until(format!("data: {line}\n\n").as_bytes()).await;
    }
}

#[tokio::test]
async fn the_page_is_served_without_a_token_and_shows_nothing_by_itself() {
    let gateway = InProcessGateway::start(|config| config.admin.token = Some("t".into()));
    let at = start(&gateway, None).await;
    let root = ask(at, "GET /", "").await;
    assert_eq!((root.status, root.header("location")), (303, Some("/ui/")));
    let page = ask(at, "GET /ui/", "").await;
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert!(page.header("content-security-policy").unwrap().contains("frame-ancestors 'none'"));
    let tag = page.header("etag").unwrap();
    let again = ask(at, "GET /ui/", &format!("if-none-match: {tag}\r\n")).await;
    assert_eq!((again.status, again.body.len()), (304, 0));
    // The raw client would read a body by this length.
    let mut client = RawHttpClient::connect(at).await;
    client.send("HEAD /ui/app.js HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await;
    let head = String::from_utf8(client.read_to_end().await).unwrap();
    assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
    let unknown = ask(at, "GET /ui/nothing.js", "").await;
    assert_eq!((unknown.status, unknown.error()["code"].as_str()), (404, Some("route_not_found")));
    assert_eq!(ask(at, "POST /ui/", "").await.status, 405);
    for closed in ["GET /admin/v1/live", "POST /admin/v1/chat", "GET /ui"] {
        assert_eq!(ask(at, closed, "").await.status, 401, "{closed}");
    }
}

#[tokio::test]
async fn a_log_is_followed_and_begun_anew_when_it_was_truncated() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let gateway = InProcessGateway::start(|_| {});
    let at = start(&gateway, Some(file.path().to_owned())).await;
    file.write_all(b"first\n").unwrap();
    let mut client = RawHttpClient::connect(at).await;
    client.send("GET /admin/v1/models/org/m/logs?follow=1 HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    client.read_until(b"first\n").await;
    file.write_all(b"second\n").unwrap();
    client.read_until(b"second\n").await;
    std::fs::write(file.path(), b"anew\n").unwrap();
    client.read_until(b"anew\n").await;
    let mut once = RawHttpClient::connect(at).await;
    once.send("GET /admin/v1/models/org/m/logs HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await;
    let text = String::from_utf8(once.read_to_end().await).unwrap();
    assert!(text.contains("content-type: text/plain") && text.contains("anew\n"), "{text}");
}
