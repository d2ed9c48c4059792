//! The operators' API and its command line: orders, reasons, events, logs, metrics.
//!
//! This file has the orders, the command line and the metrics. `admin_api` has access, events and logs, and `reasons`
//! what operators learn of a model.

use std::{
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use rouse_testing::port::ReservedPort;
use serde_json::{Value, json};

use crate::{
    live::EngineUnderTest,
    support::{GatewayFixture, GatewayProcess, SimModel, pause},
};

mod admin_api;
mod page;
mod reasons;

#[test]
fn orders_are_accepted_and_their_outcome_is_found_under_their_id() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    for (order, state) in [
        ("wake", "Awake"),
        ("sleep?level=1", "Asleep(1)"),
        ("wake", "Awake"),
        ("sleep?level=2", "Asleep(2)"),
        ("pin", "Awake"),
        ("unpin", "Awake"),
        ("sleep", "Asleep(1)"),
        ("stop", "Cold"),
        ("stop", "Cold"),
    ] {
        let done = outcome(&gateway, "m", order);
        assert_eq!(
            (done["state"].as_str(), &done["reason"]),
            (Some("done"), &Value::Null),
            "{order}: {done}"
        );
        assert_eq!((&done["model"], done["given"].is_u64()), (&json!("m"), true), "{done}");
        gateway.until(state, Duration::from_secs(5), || gateway.engine("m#0")["state"] == state);
    }
}

#[test]
fn an_order_that_cannot_be_taken_is_refused_with_its_reason() {
    let gateway = GatewayFixture::new(&["4Gi"])
        .model(&SimModel::new("m"))
        .model(&SimModel { keys: "idle: {level: never}", ..SimModel::new("sleepless") })
        .model(&SimModel { keys: "pinned: true", ..SimModel::new("pinned") })
        .start();
    gateway
        .until("pinned is awake", Duration::from_secs(5), || gateway.engine("pinned#0")["state"] == "Awake");
    for (model, order, status, words) in [
        ("m", "sleep", 409, "only an awake engine"),
        ("sleepless", "sleep", 409, "cannot sleep"),
        ("pinned", "sleep", 409, "is pinned"),
        ("pinned", "stop", 409, "is pinned"),
        ("m", "sleep?level=3", 400, "level must be 1 or 2"),
        ("nobody", "wake", 404, "Model 'nobody' not found"),
        ("m", "dance", 404, "no route"),
        ("m", "explain", 405, "does not support the method: use GET"),
    ] {
        let refused = gateway.admin().post(&format!("/admin/v1/models/{model}/{order}"), "");
        let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(
            refused.status == status && message.contains(words),
            "{order} {model}: {} {message}",
            refused.status
        );
    }
    assert_eq!(gateway.admin().get("/admin/v1/models/m/wake").status, 405);
    assert_eq!(gateway.admin().get("/admin/v1/operations/77").status, 404);
    assert_eq!(outcome(&gateway, "pinned", "unpin")["state"], "done");
    assert_eq!(outcome(&gateway, "pinned", "stop")["state"], "done");
}

#[test]
fn an_order_that_comes_to_nothing_says_why() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .model(&SimModel { flags: "--fault exit-at-start=3", ..SimModel::new("m") })
        .start();
    let failed = outcome(&gateway, "m", "wake");
    assert_eq!(failed["state"], "failed", "{failed}");
    assert!(failed["reason"].as_str().unwrap().contains("exit status 3 (exited:3)"), "{failed}");
}

#[test]
fn a_stop_tells_the_streams_that_it_ends() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    let stream = gateway.client().open_stream("m", 100_000);
    assert_eq!(outcome(&gateway, "m", "stop")["state"], "done");
    let told = stream.rest();
    assert!(told.broke_off_with("engine_failed"), "{}", told.text());
}

#[test]
fn the_command_line_shows_the_fleet_and_ends_with_the_right_code() {
    let fixture = GatewayFixture::new(&["4Gi"]);
    let journal = fixture.dir().join("journal.jsonl");
    let gateway = fixture
        .model(&SimModel::new("big/model"))
        .model(&SimModel { keys: "pinned: true", ..SimModel::new("small") })
        .flag("--journal")
        .flag(journal.to_str().unwrap())
        .start();
    assert!(gateway.client().chat("big/model", true, 4).is_whole_stream());
    gateway
        .until("pinned is awake", Duration::from_secs(5), || gateway.engine("small#0")["state"] == "Awake");
    let run = |args: &[&str]| -> Output { cli(&gateway, args).output().unwrap() };

    let ps = run(&["ps"]);
    println!("{}", text(&ps.stdout));
    for words in ["MODEL", "big/model", "awake, pinned", "ENGINE", "small#0", "ACCELERATOR", "gpu-0", "4Gi"] {
        assert!(text(&ps.stdout).contains(words), "{words}: {}", text(&ps.stdout));
    }
    assert_eq!(ps.status.code(), Some(0));
    let json: Value = serde_json::from_slice(&run(&["ps", "--json"]).stdout).unwrap();
    assert_eq!(json["models"].as_array().unwrap().len(), 2);
    let explained = run(&["explain", "big/model"]);
    assert!(text(&explained.stdout).starts_with("big/model: awake"), "{}", text(&explained.stdout));
    assert_eq!(run(&["explain", "nobody"]).status.code(), Some(1));
    assert!(text(&run(&["explain", "nobody"]).stderr).contains("Model 'nobody' not found"));
    assert_eq!(run(&["logs", "big/model"]).status.code(), Some(0));

    for engine in ["big/model#0", "small#0"] {
        gateway.until_journaled(&journal, &["\"ready\"", engine]);
    }
    let replay =
        Command::new(env!("CARGO_BIN_EXE_rouse-gateway")).arg("replay").arg(&journal).output().unwrap();
    let replayed = text(&replay.stdout);
    assert_eq!(replay.status.code(), Some(0), "{}", text(&replay.stderr));
    for words in ["    big/model#0 is ready", "  > ", "  = small: awake"] {
        assert!(replayed.contains(words), "{words}: {replayed}");
    }
    assert_replayed_as_json(&journal);
    let yaml = gateway.dir.join("rouse.yaml");
    let check = Command::new(env!("CARGO_BIN_EXE_rouse-gateway")).arg("check").arg(&yaml).output().unwrap();
    assert!(text(&check.stdout).contains("valid; 2 models"), "{check:?}");
    assert_eq!(check.status.code(), Some(0));
    std::fs::write(gateway.dir.join("bad.yaml"), "models: [{name: a}]\nwhat: 1\n").unwrap();
    for (args, code) in [
        (vec!["check", "bad.yaml"], 64),
        (vec!["replay", "rouse.yaml"], 1),
        (vec!["dance"], 64),
        (vec!["--config", "bad.yaml"], 64),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
        let output = command.args(&args).current_dir(&gateway.dir).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", text(&output.stderr));
        assert!(!output.stderr.is_empty() && output.stdout.is_empty(), "{args:?}");
    }
    let nobody = ReservedPort::bind();
    let gone = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
        .args(["ps", "--admin", &format!("http://{}", nobody.address())])
        .output()
        .unwrap();
    assert_eq!(gone.status.code(), Some(69), "{}", text(&gone.stderr));
}

#[test]
fn an_unused_model_scales_to_zero_and_the_metrics_show_it_under_the_seeds_names() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings("timeouts: {health: {every: 300ms}}")
        .model(&SimModel { keys: "idle: {sleepAfter: 800ms, stopAfter: 3s}", ..SimModel::new("m") })
        .start();
    assert_eq!(metric(&gateway, "inference_budget_total_bytes{node_pool=\"local\"}"), (2_u64 << 30) as f64);
    assert_eq!(of_model(&gateway, "inference_model_ready"), 0.0);
    // A long stream is not idle, and this stream ends once the test has seen that.
    gateway.wake("m");
    gateway.stall("m#0", true);
    let long = gateway.client().open_chat("m", true, 300);
    gateway.until("it streams", Duration::from_secs(5), || gateway.leases() == 1);
    pause(Duration::from_millis(1000));
    assert_eq!(gateway.engine("m#0")["state"], "Awake");
    for (name, value) in [
        ("inference_model_ready", 1.0),
        ("inference_model_replicas", 1.0),
        ("inference_model_memory_declared_bytes", (1_u64 << 30) as f64),
    ] {
        assert_eq!(of_model(&gateway, name), value, "{name}");
    }
    let allocated = || metric(&gateway, "inference_budget_allocated_bytes{node_pool=\"local\"}");
    assert_eq!(allocated(), (1_u64 << 30) as f64);
    let engine = EngineUnderTest::of(&gateway, "m#0");
    gateway.stall("m#0", false);
    assert!(long.rest().is_whole_stream());
    let ready = || of_model(&gateway, "inference_model_ready");
    // The model is asleep for about two seconds, so each round checks all values.
    gateway.until("asleep, with its residue left", Duration::from_secs(5), || {
        (allocated(), ready()) == ((64_u64 << 20) as f64, 0.0)
            && gateway.engine("m#0")["state"] == "Asleep(1)"
    });
    gateway.until("cold", Duration::from_secs(5), || gateway.engine("m#0")["state"] == "Cold");
    assert!(!engine.lives());
    assert_eq!((allocated(), of_model(&gateway, "inference_model_replicas")), (0.0, 0.0));
    assert_eq!(
        metric(&gateway, "inference_budget_available_bytes{node_pool=\"local\"}"),
        metric(&gateway, "inference_budget_total_bytes{node_pool=\"local\"}")
    );
    for name in ["inference_model_memory_observed_peak_bytes", "inference_model_memory_utilization_ratio"] {
        assert!(of_model(&gateway, name) > 0.0, "{name}");
    }
    let answer = gateway.client().chat("m", true, 4);
    assert!(answer.is_whole_stream());
    assert_eq!(answer.header("x-rouse-cold-start"), "cold");
}

/// Sends an order and waits for its outcome.
fn outcome(gateway: &GatewayProcess, model: &str, order: &str) -> Value {
    let given = gateway.admin().post(&format!("/admin/v1/models/{model}/{order}"), "");
    assert_eq!(given.status, 202, "{order}: {}", given.text());
    let path = format!("/admin/v1/operations/{}", given.json()["operation"]);
    let mut last = Value::Null;
    gateway.until(&format!("{order} of {model} is over"), Duration::from_secs(10), || {
        last = gateway.admin().get(&path).json();
        last["state"] != "running"
    });
    last
}

/// Asserts that the JSON of a replay has the decisions and the reports of its text.
fn assert_replayed_as_json(journal: &Path) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
    let output = command.args(["replay", "--json"]).arg(journal).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    let lines: Vec<Value> = printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(
        lines[0]["journal"].is_u64() && lines[0]["at"].is_u64(),
        "it begins as the journal does: {}",
        lines[0]
    );
    let commands = || lines.iter().flat_map(|line| line["commands"].as_array().into_iter().flatten());
    for engine in ["big/model#0", "small#0"] {
        let is_launch = |command: &&Value| command["command"] == "launch" && command["engine"] == engine;
        assert_eq!(commands().filter(is_launch).count(), 1, "{printed}");
    }
    let last = lines.iter().rev().find_map(|line| line.get("report")).unwrap();
    assert_eq!(last["models"]["small"]["state"], "awake", "{last}");
    assert!(lines.iter().skip(1).any(|line| line.get("report").is_none()), "an unchanged report is left out");
}

/// The command line of this build, for this gateway.
pub(crate) fn cli(gateway: &GatewayProcess, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
    command.args(args).arg("--admin").arg(format!("http://{}", gateway.admin));
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns one sample of `/metrics` by its name and labels as printed.
fn metric(gateway: &GatewayProcess, sample: &str) -> f64 {
    let metrics = gateway.admin().get("/metrics").text();
    let line = metrics.lines().find_map(|line| line.strip_prefix(sample));
    line.unwrap_or_else(|| panic!("no {sample} in\n{metrics}")).trim().parse().unwrap()
}

fn of_model(gateway: &GatewayProcess, name: &str) -> f64 {
    metric(gateway, &format!("{name}{{model=\"m\",namespace=\"local\"}}"))
}
