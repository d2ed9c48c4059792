//! What operators learn of a model: the reason of its state, its last failure, and each step in the log.
//!
//! Apart from the orders, because a reason is there without any order.

use std::time::Duration;

use serde_json::{Value, json};

use super::{cli, outcome, text};
use crate::{
    live::EngineUnderTest,
    support::{GatewayFixture, SimModel},
};

const TURNS: &str = "turns: {residency: 1s, maxTurn: 2s, drain: {deadline: 2s, onDeadline: cut}}";

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
