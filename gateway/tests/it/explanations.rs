//! Each view explains a model in the same words: operators see all of them, clients see those that concern them.

use std::{fs, os::unix::fs::PermissionsExt as _, time::Duration};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    live::EngineUnderTest,
    operators::cli,
    refusals::refusal,
    support::{GatewayFixture, GatewayProcess, SimModel, client::chat_body, read},
};

const CHAT: &str = "/v1/chat/completions";

fn why(gateway: &GatewayProcess, model: &str) -> String {
    let explained = gateway.admin().get(&format!("/admin/v1/models/{model}/explain")).json();
    explained["reason"].as_str().unwrap().to_owned()
}

/// Asserts that the admin API and the command line show all of these words for the model.
fn everywhere(gateway: &GatewayProcess, model: &str, words: &[&str]) {
    let fleet = gateway.fleet();
    let models = fleet["models"].as_array().unwrap();
    let shown = models.iter().find(|view| view["name"] == model).unwrap();
    let printed = |args: &[&str]| {
        let output = cli(gateway, args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let ps = printed(&["ps"]);
    let line = ps.lines().find(|line| line.starts_with(&format!("{model} "))).unwrap_or_default();
    for (place, text) in [
        ("explain by HTTP", why(gateway, model)),
        ("fleet", shown["reason"].as_str().unwrap().to_owned()),
        ("ps", line.to_owned()),
        ("explain", printed(&["explain", model])),
    ] {
        for word in words {
            assert!(text.contains(word), "{place} has no '{word}': {text}");
        }
    }
}

fn listed(gateway: &GatewayProcess, model: &str) -> Value {
    gateway.client().get(&format!("/v1/models/{model}")).json()
}

#[test]
fn every_view_reports_an_eviction_and_a_death_in_the_same_words() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .model(&SimModel::new("first"))
        .model(&SimModel::new("second"))
        .start();
    for model in ["first", "second"] {
        assert!(gateway.client().chat(model, true, 1).is_whole_stream());
    }
    everywhere(&gateway, "first", &["asleep at level 1; evicted at ", " for second"]);
    assert_eq!(listed(&gateway, "first")["state"], "asleep");
    EngineUnderTest::of(&gateway, "second#0").signal(Signal::SIGKILL);
    let rests = || why(&gateway, "second").starts_with("not running");
    gateway.until("seen dead, and left alone no more", Duration::from_secs(10), rests);
    everywhere(
        &gateway,
        "second",
        &["not running: failed while serving at ", "killed by signal 9 (killed:9)"],
    );
    assert_eq!(listed(&gateway, "second")["last_failure"]["cause"], "killed:9");
}

/// The first gateway is killed: the next one knows what is on disk.
#[test]
fn the_next_gateway_reports_a_failed_start_until_the_model_serves() {
    let fixture = GatewayFixture::new(&["2Gi"]);
    let broken = fixture.dir().join("broken");
    fs::write(&broken, "").unwrap();
    let program = env!("CARGO_BIN_EXE_rouse-gateway");
    let line = format!(
        "test -e {} && exit 3; exec {program} demo-engine --host ${{HOST}} --port ${{PORT}} --model m",
        broken.display()
    );
    let model = format!(
        "  - name: m\n    engine: {{kind: vllm, command: [sh, -c, {line:?}]}}\n    memory: {{awake: 1Gi}}\n"
    );
    let mut gateway = fixture.model_yaml(&model).start();
    let stored = || -> Value {
        let text = read(&gateway.dir.join("state/engines.json"));
        serde_json::from_str::<Value>(&text).unwrap_or_default()["failures"]["m#0"].clone()
    };
    refusal(&gateway.client().chat("m", false, 1), 503, "model_not_ready");
    let failed = || why(&gateway, "m").starts_with("not running: last start failed at ");
    gateway.until("it is left alone no more", Duration::from_secs(10), failed);
    gateway.until("it is on disk", Duration::from_secs(10), || stored()["count"] == 2);
    let words = ["not running: last start failed at ", "exit status 3 (exited:3), 2 failures in a row"];
    everywhere(&gateway, "m", &words);
    let shown = |gateway: &GatewayProcess| {
        let model = listed(gateway, "m");
        (why(gateway, "m"), model["state"].clone(), model["last_failure"].clone())
    };
    let told = shown(&gateway);
    assert_eq!((&told.1, &told.2["count"]), (&json!("failed"), &json!(2)), "{told:?}");
    gateway.signal(Signal::SIGKILL);
    gateway.wait();

    let again = GatewayProcess::spawn(&gateway.dir, &[]);
    everywhere(&again, "m", &words);
    assert_eq!(shown(&again), told, "with its time");
    let explained = again.admin().get("/admin/v1/models/m/explain").json();
    let failed = &explained["lastOutcome"]["failed"];
    assert_eq!((&failed["cause"], &failed["count"]), (&json!({"exited": 3}), &json!(2)), "{explained}");
    fs::remove_file(&broken).unwrap();
    let served = again.client().chat("m", true, 4);
    assert!(served.is_whole_stream(), "{}", served.text());
    assert_eq!(listed(&again, "m")["last_failure"], Value::Null);
    let on_disk = gateway.dir.join("state/engines.json");
    again.until("it is forgotten on disk", Duration::from_secs(10), || !read(&on_disk).contains("failures"));
    assert_eq!(again.terminate(), Some(0));

    let last = GatewayProcess::spawn(&gateway.dir, &[]);
    assert_eq!(why(&last, "m"), "not running; starts on the next request");
}

/// The sleeper got its size at its start, so it ends for the reload. No request has arrived.
#[test]
fn a_reload_to_a_size_that_fits_nowhere_is_reported_before_the_first_request() {
    let gateway =
        GatewayFixture::new(&["2Gi"]).model(&SimModel::new("slept")).model(&SimModel::new("new")).start();
    assert!(gateway.client().chat("slept", true, 1).is_whole_stream());
    assert_eq!(gateway.admin().post("/admin/v1/models/slept/sleep?level=1", "").status, 202);
    gateway.until("asleep", Duration::from_secs(10), || gateway.engine("slept#0")["state"] == "Asleep(1)");
    let file = gateway.dir.join("rouse.yaml");
    let yaml = read(&file).replace("memory: {awake: 1Gi", "memory: {awake: 90Gi");
    fs::write(&file, yaml).unwrap();
    gateway.until_logged("configuration reloaded: ");
    gateway.until("ended", Duration::from_secs(10), || gateway.engine("slept#0")["state"] == "Cold");
    let size = "the model needs 90Gi on each accelerator: the largest has 2Gi";
    for model in ["slept", "new"] {
        everywhere(&gateway, model, &["can never start: ", size]);
        assert_eq!(listed(&gateway, model)["state"], "unplaceable");
        let error = refusal(&gateway.client().chat(model, false, 1), 422, "unplaceable");
        assert!(error["message"].as_str().unwrap().contains(size), "{error}");
    }
}

#[test]
fn an_engine_without_a_health_route_says_so_while_it_loads_and_once_it_has_failed() {
    let sim = SimModel { flags: "--fault no-health", engine: "startTimeout: 5s", ..SimModel::new("m") };
    let gateway = GatewayFixture::new(&["2Gi"]).model(&sim).start();
    let probe = "last probe: GET /health returned status 404";
    let asks = || {
        let body = chat_body("m", false, 1);
        gateway.client().post_with(CHAT, "x-request-timeout: 0.2\r\n", &body)
    };
    refusal(&asks(), 503, "model_not_ready");
    // The engine loads until its timeout, and the gateway does not start it again, because no request waits.
    gateway.until("its probe is told", Duration::from_secs(20), || why(&gateway, "m").contains(probe));
    let loads = why(&gateway, "m");
    assert!(loads.starts_with("Loading since ") || loads.contains("last start failed"), "{loads}");
    let error = refusal(&asks(), 503, "model_not_ready");
    assert!(error["message"].as_str().unwrap().contains(probe), "{error}");
    let failed = || why(&gateway, "m").starts_with("not running: last start failed at ");
    gateway.until("it failed, and is left alone no more", Duration::from_secs(30), failed);
    let logs = "see 'rouse-gateway logs m'";
    let cause = "the engine exceeded its deadline (timeout)";
    everywhere(&gateway, "m", &[cause, probe, "last output: ", logs]);
    let shown = listed(&gateway, "m");
    assert_eq!((&shown["state"], &shown["last_failure"]["cause"]), (&json!("failed"), &json!("timeout")));
    let warned =
        |line: &str| ["WARN", cause, probe, "last output: ", logs].iter().all(|word| line.contains(word));
    gateway.until("it is logged", Duration::from_secs(5), || gateway.log().lines().any(warned));
    gateway.until_logged("engine not ready yet; last probe: GET /health returned status 404");
}

#[test]
fn a_command_that_may_not_be_run_has_a_cause_of_its_own_wherever_one_looks() {
    let fixture = GatewayFixture::new(&["2Gi"]);
    let program = fixture.dir().join("locked");
    fs::write(&program, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o644)).unwrap();
    let model = format!(
        "  - name: locked\n    engine: {{kind: custom, command: [{program:?}, \"${{PORT}}\"]}}\n    memory: {{awake: 64Mi}}\n"
    );
    let gateway = fixture.model_yaml(&model).start();
    let error = refusal(&gateway.client().chat("locked", false, 1), 503, "model_not_ready");
    assert_eq!(error["details"]["cause"], "permission_denied");
    let message = error["message"].as_str().unwrap();
    let cause = "last start failed at ";
    for words in [
        cause,
        "no permission to run the engine's command (permission_denied)",
        "'rouse-gateway logs locked'",
    ] {
        assert!(message.contains(words), "{message}");
    }
    let path = program.to_str().unwrap();
    assert!(!message.contains(path), "the configuration is not for clients: {message}");
    let system = format!("cannot run '{path}': Permission denied");
    let system = system.as_str();
    everywhere(&gateway, "locked", &[cause, "(permission_denied)", system]);
    assert_eq!(listed(&gateway, "locked")["last_failure"]["cause"], "permission_denied");
    let warned = |line: &str| ["WARN", "(permission_denied)", system].iter().all(|word| line.contains(word));
    gateway.until("it is logged", Duration::from_secs(5), || gateway.log().lines().any(warned));
}
