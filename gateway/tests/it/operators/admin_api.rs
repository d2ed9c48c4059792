//! These tests cover who may use the operators' API, and the API's streams of events and logs.
//!
//! They are not among the tests of the orders, because every route of the API has these rules.

use std::{
    io::{BufRead as _, BufReader},
    process::Stdio,
    time::Duration,
};

use serde_json::{Value, json};

use super::{cli, outcome, text};
use crate::support::{GatewayFixture, SimModel, TestResponse};

#[test]
fn with_a_token_nobody_asks_without_it() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings("admin: {token: secret, metrics: token}")
        .model(&SimModel::new("m"))
        .start();
    let ask = |method: &str, path: &str, headers: &str| {
        gateway.admin().raw(&format!(
            "{method} {path} HTTP/1.1\r\nHost: elsewhere.example\r\nConnection: close\r\n{headers}\r\n"
        ))
    };
    for path in ["/admin/v1/fleet", "/admin/v1/events", "/admin/v1/models/m/explain", "/metrics"] {
        for headers in ["", "Authorization: Bearer secre\r\n", "Authorization: Basic secret\r\n"] {
            let refused = ask("GET", path, headers);
            assert_eq!(
                (refused.status, refused.header("www-authenticate")),
                (401, "Bearer realm=\"admin\""),
                "{path}"
            );
        }
    }
    let wake = "/admin/v1/models/m/wake";
    let none = "Content-Length: 0\r\n";
    assert_eq!(ask("POST", wake, none).status, 401);
    assert_eq!(gateway_state(&ask("GET", "/admin/v1/fleet", "Authorization: Bearer secret\r\n")), "Cold");
    assert_eq!(ask("POST", wake, &format!("Authorization: Bearer secret\r\n{none}")).status, 202);
    assert_eq!(ask("GET", "/metrics", "Authorization: Bearer secret\r\n").status, 200);
    for open in ["/healthz", "/readyz"] {
        assert_eq!(ask("GET", open, "").status, 200);
    }
    let with = |token: Option<&str>| {
        let mut command = cli(&gateway, &["ps"]);
        command.env_remove("ROUSE_ADMIN_TOKEN").envs(token.map(|token| ("ROUSE_ADMIN_TOKEN", token)));
        command.output().unwrap()
    };
    assert_eq!(with(None).status.code(), Some(1));
    assert!(text(&with(None).stderr).contains("ROUSE_ADMIN_TOKEN"), "{}", text(&with(None).stderr));
    assert_eq!(with(Some("secret")).status.code(), Some(0));
}

#[test]
fn without_a_token_only_loopback_names_and_no_foreign_pages() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    let ask = |method: &str, path: &str, headers: &str| {
        let head =
            format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: 0\r\n{headers}\r\n");
        gateway.admin().raw(&head)
    };
    assert_eq!(ask("GET", "/admin/v1/fleet", "Host: rebound.example\r\n").status, 403);
    assert_eq!(ask("GET", "/admin/v1/fleet", "Host: localhost\r\n").status, 200);
    let wake = "/admin/v1/models/m/wake";
    let foreign = ask("POST", wake, "Host: localhost\r\nOrigin: https://evil.example\r\n");
    assert_eq!((foreign.status, &foreign.json()["error"]["code"]), (403, &json!("foreign_origin")));
    assert_eq!(gateway.engine("m#0")["state"], "Cold");
    assert_eq!(ask("POST", wake, "Host: localhost\r\nOrigin: http://localhost:1\r\n").status, 202);
}

#[test]
fn events_are_the_journal_as_it_happens() {
    let gateway =
        GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).model(&SimModel::new("other")).start();
    let get = "GET /admin/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut open = gateway.admin().open(get);
    open.until("text/event-stream");
    let mut printing = cli(&gateway, &["events"]).stdout(Stdio::piped()).spawn().unwrap();
    let printed = BufReader::new(printing.stdout.take().unwrap()).lines().map(Result::unwrap);
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (tell, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || printed.for_each(|line| tell.send(line).unwrap_or_default()));
    // The command's subscription belongs to another process. The subscription exists once the command prints an event
    // of another model.
    gateway.until("the command listens", Duration::from_secs(30), || {
        outcome(&gateway, "other", "stop");
        lines.recv_timeout(Duration::from_millis(20)).is_ok()
    });
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    open.until(r#""event":"ready""#);
    open.until(r#""event":"canary""#);
    // The last event may not be complete.
    let told = open.text();
    let whole = told.rsplit_once("\n\n").map_or("", |(whole, _)| whole);
    let told = whole.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = told.map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(events.iter().all(|turn| turn["at"].is_u64() && turn["events"].is_array()), "{events:?}");
    drop(open);
    assert_eq!(outcome(&gateway, "m", "stop")["state"], "done");
    for words in ["a stream for m", "m#0 is ready", "order ", "m#0 is gone"] {
        let mut printed = std::iter::from_fn(|| lines.recv_timeout(Duration::from_secs(30)).ok());
        assert!(printed.any(|line| line.contains(words)), "{words} in this order");
    }
    printing.kill().unwrap();
    printing.wait().unwrap();
}

#[test]
fn logs_are_the_engines_output_and_can_be_followed() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    assert_eq!(gateway.admin().get("/admin/v1/models/m/logs").status, 404);
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    let logs = gateway.admin().get("/admin/v1/models/m/logs");
    assert!(logs.text().contains("generation 1") && logs.text().contains("listening on"), "{}", logs.text());
    let printed = cli(&gateway, &["logs", "m"]).output().unwrap();
    assert_eq!((printed.status.code(), text(&printed.stdout)), (Some(0), logs.text()));
    let get = "GET /admin/v1/models/m/logs?follow=true HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut following = gateway.admin().open(get);
    following.until("generation 1");
    assert_eq!(outcome(&gateway, "m", "stop")["state"], "done");
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    following.until("generation 2");
}

#[test]
fn each_engine_of_a_model_has_its_output() {
    let gateway = GatewayFixture::new(&["2Gi", "2Gi"])
        .model(&SimModel { keys: "replicas: 2", ..SimModel::new("m") })
        .start();
    assert!(gateway.client().chat("m", true, 1).is_whole_stream());
    // Before the engine is awake, it writes to this file itself.
    gateway
        .until("the second is awake", Duration::from_secs(10), || gateway.engine("m#1")["state"] == "Awake");
    std::fs::write(gateway.dir.join("state/logs/m-1.log"), "the second\n").unwrap();
    let logs = |query: &str| gateway.admin().get(&format!("/admin/v1/models/m/logs{query}"));
    assert!(logs("").text().contains("generation 1"));
    assert_eq!(logs("").text(), logs("?replica=0").text());
    assert_eq!(logs("?replica=1").text(), "the second\n");
    assert_eq!((logs("?replica=2").status, logs("?replica=-1").status), (404, 400));
    let printed = cli(&gateway, &["logs", "m", "--replica", "1"]).output().unwrap();
    assert_eq!(text(&printed.stdout), "the second\n");
}

fn gateway_state(fleet: &TestResponse) -> String {
    fleet.json()["engines"][0]["state"].as_str().unwrap().to_owned()
}
