//! The operators' API and its command line: orders, reasons, events, logs, metrics.

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Output, Stdio},
    time::Duration,
};

use rouse_testing::port::ReservedPort;
use serde_json::{Value, json};

use crate::{
    live::EngineUnderTest,
    support::{GatewayFixture, GatewayProcess, SimModel, TestResponse, pause},
};

const TURNS: &str = "turns: {residency: 1s, maxTurn: 2s, drain: {deadline: 2s, onDeadline: cut}}";

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
fn what_became_of_a_model_is_remembered_told_the_same_from_both_sides_and_logged() {
    let broken = "  - name: broken\n    engine: {kind: custom, command: [sh, -c, \"echo No module named llama_cpp >&2; \
                  exit 1\", \"${PORT}\"]}\n    memory: {awake: 64Mi}\n";
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings("turns: {residency: 0s, maxTurn: 1h}")
        .model(&SimModel::new("first"))
        .model(&SimModel::new("second"))
        .model_yaml(broken)
        .start();
    let why = |model: &str| {
        let explained = gateway.admin().get(&format!("/admin/v1/models/{model}/explain")).json();
        explained["reason"].as_str().unwrap().to_owned()
    };
    let model = |name: &str| gateway.client().get(&format!("/v1/models/{name}")).json();
    // A start that fails: clients see its class, and operators see its last lines, until the model serves.
    let refused = gateway.client().chat("broken", false, 1);
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("exit status 1 (exited:1), 2 failures in a row"), "{message}");
    assert!(
        message.contains("'rouse-gateway logs broken'") && !refused.text().contains("llama_cpp"),
        "{message}"
    );
    gateway.until("left alone no more", Duration::from_secs(5), || why("broken").starts_with("not running"));
    let reason = why("broken");
    assert!(reason.contains("last start failed") && reason.contains("No module named llama_cpp"), "{reason}");
    let listed = model("broken");
    assert_eq!((&listed["state"], &listed["last_failure"]["cause"]), (&json!("failed"), &json!("exited:1")));
    assert_eq!(listed["last_failure"]["count"], 2);
    let metrics = gateway.admin().get("/metrics").text();
    let failed_at = format!(
        "rouse_model_last_failure_timestamp_seconds{{cause=\"exited:1\",model=\"broken\"}} {}",
        listed["last_failure"]["at"]
    );
    for line in [
        "rouse_model_state{model=\"broken\",state=\"failed\"} 1",
        "rouse_model_failures{model=\"broken\"} 2",
        &failed_at,
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
    }
    // One model holds the memory that the other waits for.
    let holding = gateway.client().open_stream("first", 100_000);
    let waits = gateway.client().open_chat("second", false, 1);
    gateway.until("held", Duration::from_secs(5), || why("second").contains("held by first"));
    let (held, holds) = (why("second"), why("first"));
    let (_, until) = held.split_once("held by first, ").unwrap();
    assert!(holds.contains(until) && holds.contains("'second' waits for its memory"), "{held}\n{holds}");
    drop(holding);
    assert_eq!(waits.rest().status, 200);
    assert!(why("first").contains("for second"), "{}", why("first"));
    // An engine that dies.
    EngineUnderTest::of(&gateway, "second#0").signal(nix::sys::signal::Signal::SIGKILL);
    gateway.until("dead", Duration::from_secs(5), || why("second").contains("killed by signal 9"));
    assert!(why("second").contains("failed while serving"), "{}", why("second"));
    for (level, words) in [
        ("INFO", "launching engine engine=first#0 accelerators=\"gpu-0\" memory=1Gi"),
        ("INFO", "engine ready engine=first#0 transition=\"launch\" duration="),
        ("INFO", "engine evicted, draining engine=first#0 successor=second#0"),
        ("INFO", "engine asleep engine=first#0 level=1 reason=\"evicted at "),
        ("WARN", "exit status 1 (exited:1), 2 failures in a row; last output: No module named llama_cpp"),
        ("WARN", "No module named llama_cpp; see 'rouse-gateway logs broken'"),
        ("WARN", "killed by signal 9 (killed:9)"),
    ] {
        let logged = || gateway.log().lines().any(|line| line.contains(level) && line.contains(words));
        gateway.until(words, Duration::from_secs(2), logged);
    }
}

#[test]
fn what_waits_for_memory_still_tells_how_its_last_start_failed() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings("turns: {residency: 0s, maxTurn: 1h}")
        .model(&SimModel::new("first"))
        .model(&SimModel { flags: "--fault exit-at-start=3", ..SimModel::new("broken") })
        .start();
    let why = || {
        let explained = gateway.admin().get("/admin/v1/models/broken/explain").json();
        explained["reason"].as_str().unwrap().to_owned()
    };
    assert_eq!(gateway.client().chat("broken", false, 1).status, 503);
    gateway.until("left alone no more", Duration::from_secs(5), || why().starts_with("not running"));
    let holding = gateway.client().open_stream("first", 100_000);
    let waits = gateway.client().open_chat("broken", false, 1);
    gateway.until("it waits", Duration::from_secs(5), || why().contains("held by first"));
    let reason = why();
    assert!(reason.contains("; last start failed at "), "{reason}");
    assert!(reason.contains(": exit status 3 (exited:3), 2 failures in a row"), "{reason}");
    drop((holding, waits));
}

#[test]
fn each_step_of_an_engine_is_one_line_of_the_log_with_why_and_how_long() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .model(&SimModel { keys: "idle: {sleepAfter: 200ms, stopAfter: 1s}", ..SimModel::new("idle") })
        .model(&SimModel { asleep: "600Mi", ..SimModel::new("sleeper") })
        .model(&SimModel::new("next"))
        .start();
    assert!(gateway.client().chat("idle", true, 1).is_whole_stream());
    gateway.until("stopped", Duration::from_secs(10), || gateway.engine("idle#0")["state"] == "Cold");
    for order in ["wake", "sleep", "wake", "sleep"] {
        assert_eq!(outcome(&gateway, "sleeper", order)["state"], "done", "{order}");
    }
    // The next model has no room beside the sleeper's residue.
    assert!(gateway.client().chat("next", true, 1).is_whole_stream());
    for [begins, goes_on] in [
        [
            "launching engine engine=idle#0 accelerators=\"gpu-0\" memory=1Gi",
            " reason=\"1 request waiting for the model\"",
        ],
        ["engine ready engine=idle#0 transition=\"launch\"", " duration="],
        ["engine asleep engine=idle#0 level=1 reason=\"deactivated at ", ", idle\" duration="],
        ["engine stopped engine=idle#0 reason=\"deactivated at ", ", idle\" duration="],
        [
            "launching engine engine=sleeper#0",
            " reason=\"the model needs a ready engine, and no request waits at this gateway\"",
        ],
        ["engine asleep engine=sleeper#0 level=1 reason=\"deactivated at ", " by an operator\" duration="],
        [
            "waking engine engine=sleeper#0 level=1",
            " reason=\"the model needs a ready engine, and no request waits at this gateway\"",
        ],
        ["engine ready engine=sleeper#0 transition=\"wake\"", " duration="],
        ["engine evicted, stopping engine=sleeper#0", " successor=next#0"],
        ["engine stopped engine=sleeper#0 reason=\"evicted at ", " for next\" duration="],
    ] {
        let said = |line: &str| {
            line.contains(" INFO ") && line.split_once(begins).is_some_and(|(_, rest)| rest.contains(goes_on))
        };
        let logged = || gateway.log().lines().any(said);
        gateway.until(&format!("{begins}…{goes_on}"), Duration::from_secs(2), logged);
    }
    let failed = |line: &str| line.contains(" WARN ") && line.contains(" engine=");
    assert!(!gateway.log().lines().any(failed), "nothing has failed: {}", gateway.log());
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

#[test]
fn explain_says_at_each_moment_of_a_swap_why() {
    let slow = "--start-time 400ms --sleep-time 400ms --wake-time 400ms --itl 10ms";
    // The engines' own steps last until the test has seen them.
    let (sleeps, starts) = (format!("{slow} --fault hang-sleep"), format!("{slow} --fault hang"));
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings(TURNS)
        .model(&SimModel { flags: &sleeps, ..SimModel::new("first") })
        .model(&SimModel { flags: &starts, ..SimModel::new("second") })
        .start();
    let explain = || -> Value { gateway.admin().get("/admin/v1/models/second/explain").json() };
    assert_eq!(explain()["state"], "cold");
    let stream = gateway.client().open_stream("first", 100_000);
    let waiter = gateway.client().open_chat("second", true, 4);
    let mut reasons: Vec<String> = Vec::new();
    gateway.until("second is awake", Duration::from_secs(10), || {
        let now = explain();
        let line = format!("{}: {}", now["state"].as_str().unwrap(), now["reason"].as_str().unwrap());
        if now["reason"].as_str().unwrap().contains("held by first") {
            assert_eq!(now["wait"]["holders"][0]["model"], "first", "{now}");
            let printed = cli(&gateway, &["explain", "second"]).output().unwrap();
            assert_eq!(printed.status.code(), Some(0));
            assert!(text(&printed.stdout).starts_with("second: "), "{}", text(&printed.stdout));
        }
        if line.contains("FallingAsleep(1)") {
            gateway.fault("first#0", r#"{"hang-sleep": null}"#);
        } else if line.contains("(Loading)") {
            gateway.fault("second#0", r#"{"hang": null}"#);
        }
        if reasons.last() != Some(&line) {
            reasons.push(line);
        }
        now["state"] == "awake"
    });
    println!("{}", reasons.join("\n"));
    assert!(waiter.rest().is_whole_stream());
    let cut = stream.rest();
    assert!(!cut.is_whole_stream(), "{}", cut.text());
    for words in [
        "cold: waiting for gpu-0: held by first, 1 lease, its turn ends at ",
        "cold: waiting for gpu-0: held by first, 1 lease, drain deadline at ",
        "FallingAsleep(1)",
        "launching: the engine is being launched (Loading)",
    ] {
        assert!(reasons.iter().any(|reason| reason.contains(words)), "{words}: {reasons:?}");
    }
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
        .model(&SimModel { keys: "idle: {sleepAfter: 800ms, stopAfter: 2s}", ..SimModel::new("m") })
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
    // The model is asleep for two seconds, so each round checks all values.
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

fn gateway_state(fleet: &TestResponse) -> String {
    fleet.json()["engines"][0]["state"].as_str().unwrap().to_owned()
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
