//! The page's side of the operators' API: its files, the live stream and the chat.

use std::time::Duration;

use rouse_testing::raw_client::TestExchange;
use serde_json::{Value, json};

use crate::{
    keys::key,
    support::{GatewayFixture, SimModel, client::chat_body},
};

const TURNS: &str = "turns: {residency: 200ms, maxTurn: 1s, drain: {deadline: 2s, onDeadline: cut}}";
const LIVE: &str = "GET /admin/v1/live HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// The data of all events of this name that have come.
fn events(live: &TestExchange, name: &str) -> Vec<Value> {
    let text = live.text();
    // The last event may not be complete.
    let whole = text.rsplit_once("\n\n").map_or("", |(whole, _)| whole);
    let lines: Vec<&str> = whole.lines().collect();
    let named = lines.windows(2).filter(|pair| pair[0] == format!("event: {name}"));
    named
        .filter_map(|pair| pair[1].strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

#[test]
fn a_swap_is_seen_live_with_what_it_cost() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings(TURNS)
        .model(&SimModel::new("first"))
        .model(&SimModel::new("second"))
        .start();
    let mut live = gateway.admin().open(LIVE);
    live.until("event: snapshot");
    assert!(gateway.client().chat("first", true, 4).is_whole_stream());
    live.until(r#""what":"launched""#);
    assert!(gateway.client().chat("second", true, 4).is_whole_stream());
    live.until(r#""what":"evicted""#);
    assert!(gateway.client().chat("first", true, 4).is_whole_stream());
    live.until(r#""what":"woke""#);
    live.until(r#""tokensPerSecond""#);
    let timeline = events(&live, "timeline");
    let of = |what: &str| timeline.iter().find(|entry| entry["what"] == what).unwrap();
    let evicted = of("evicted");
    assert_eq!((&evicted["model"], &evicted["engine"]), (&json!("first"), &json!("first#0")));
    assert!(evicted["took"].as_u64() >= Some(50), "its sleep takes so long: {evicted}");
    assert_eq!(evicted["freed"].as_u64(), Some((1024 - 64) << 20), "{evicted}");
    assert!(evicted["cause"].as_str().unwrap().contains("second"), "{evicted}");
    assert!(of("launched")["took"].as_u64() >= Some(100), "{timeline:?}");
    let snapshots = events(&live, "snapshot");
    let states: Vec<&str> =
        snapshots.iter().filter_map(|now| now["fleet"]["models"][0]["state"].as_str()).collect();
    for state in ["cold", "awake"] {
        assert!(states.contains(&state), "{state}: {states:?}");
    }
    let fleet = gateway.fleet();
    let shown = snapshots.last().unwrap()["fleet"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert!(fleet.as_object().unwrap().keys().eq(&shown), "as /admin/v1/fleet has it: {shown:?}");

    // A second page gets what happened before it.
    let mut late = gateway.admin().open(LIVE);
    late.until(r#""what":"woke""#);
    assert_eq!(events(&late, "timeline").first(), timeline.first());
}

#[test]
fn a_request_is_seen_while_it_streams_and_is_gone_after_it() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    let stream = gateway.client().open_stream("m", 100_000);
    let mut live = gateway.admin().open(LIVE);
    live.until(r#""phase":"streaming""#);
    live.until(r#""tokensPerSecond""#);
    let shown = events(&live, "snapshot").pop().unwrap();
    let request = &shown["requests"][0];
    assert_eq!((&request["model"], &request["route"]), (&json!("m"), &json!("chat")), "{shown}");
    drop(stream);
    live.until(r#""requestsTotal":0"#);
}

#[test]
fn an_operator_chats_without_a_key_of_the_inference_api() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings(&format!("admin: {{token: secret}}\nkeys:{}", key("team", ", models: [other]")))
        .model(&SimModel::new("m"))
        .model(&SimModel::new("other"))
        .start();
    let chat = |headers: &str| gateway.admin().post_with("/admin/v1/chat", headers, &chat_body("m", true, 4));
    assert_eq!(chat("").status, 401);
    assert_eq!(gateway.client().chat("m", true, 4).status, 401);
    let answer = chat("Authorization: Bearer secret\r\n");
    assert!(answer.is_whole_stream(), "{}", answer.text());
    assert_eq!(answer.header("x-rouse-cold-start"), "cold");
    let counted = || {
        let metrics = gateway.admin().get("/metrics").text();
        let mut requests = metrics.lines().filter(|line| line.starts_with("rouse_requests_total{"));
        requests.any(|line| line.contains("model=\"m\"") && line.contains("\"2xx\""))
    };
    gateway.until("the chat is counted", Duration::from_secs(5), counted);
}

#[test]
fn the_page_is_there_without_a_token_and_its_data_is_not() {
    let gateway =
        GatewayFixture::new(&["2Gi"]).settings("admin: {token: secret}").model(&SimModel::new("m")).start();
    let get = |path: &str| {
        gateway.admin().raw(&format!("GET {path} HTTP/1.1\r\nHost: any.example\r\nConnection: close\r\n\r\n"))
    };
    assert_eq!((get("/").status, get("/").header("location")), (303, "/ui/"));
    let page = get("/ui/");
    assert_eq!(page.status, 200);
    for (header, value) in [
        ("content-type", "text/html; charset=utf-8"),
        ("cache-control", "no-cache"),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
    ] {
        assert_eq!(page.header(header), value);
    }
    // Whatever the page loads exists.
    let html = page.text();
    let loaded: Vec<&str> = html
        .split(['"', '\''])
        .filter(|text| text.ends_with(".js") || text.ends_with(".css") || text.ends_with(".svg"))
        .collect();
    assert!(loaded.len() >= 2, "{html}");
    for name in loaded {
        let path = format!("/ui/{}", name.trim_start_matches("./").trim_start_matches("/ui/"));
        assert_eq!(get(&path).status, 200, "{path}");
    }
    assert_eq!((get("/ui/none.js").status, get("/admin/v1/live").status), (404, 401));
}
