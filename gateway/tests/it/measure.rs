//! `measure`: what it finds on simulated accelerators, alone and beside a gateway, and what it leaves behind.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use engine_sim::accelerator::AcceleratorFile;
use nix::{sys::signal::Signal, unistd::Pid};
use rouse::units::Bytes;
use rouse_testing::wait::holds_within;
use serde_json::Value;

use crate::{
    live::is_alive,
    operators::cli,
    support::{GatewayFixture, GatewayProcess, SimModel, read},
    terminal::{on_a_terminal, pieces_of, until},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rouse-gateway");

/// It takes 512Mi of weights and 300Mi of cache, whatever its configuration declares (1Gi).
fn model() -> SimModel<'static> {
    SimModel {
        flags: "--kv-cache-memory-bytes 300Mi --memory-asleep 96Mi --memory-host 128Mi",
        ..SimModel::new("m")
    }
}

/// Writes the configuration and the accelerators, and starts no gateway.
fn prepare(fixture: &GatewayFixture) -> PathBuf {
    AcceleratorFile::create(fixture.meter(), &[("gpu-0", Bytes::gib(4).0)]).unwrap();
    let file = fixture.dir().join("rouse.yaml");
    std::fs::write(&file, fixture.yaml()).unwrap();
    file
}

fn measure(file: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["measure", "m", "--config"]).arg(file).args(args).env_remove("ROUSE_ADMIN");
    command
}

fn json(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts that the found sizes are those of the accelerator file, within 2 %.
fn assert_sizes(measured: &Value) {
    let near = |found: &Value, expected: Bytes| {
        let found = found.as_u64().unwrap();
        assert!(found.abs_diff(expected.0) * 50 <= expected.0, "{found} instead of {expected}: {measured}");
    };
    near(&measured["awake"], Bytes::mib(812));
    let levels = measured["levels"].as_array().unwrap();
    assert_eq!(levels.len(), 2, "{measured}");
    for level in levels {
        near(&level["asleep"], Bytes::mib(96));
        assert!(level["sleep"].as_u64() >= Some(40) && level["wake"].as_u64() >= Some(40), "{measured}");
    }
    near(&levels[0]["host"], Bytes::mib(128));
    assert!(measured["start"].as_u64() >= Some(90), "{measured}");
    assert_eq!((&measured["source"], &measured["accelerators"][0]), (&"meter".into(), &"gpu-0".into()));
}

fn in_use(file: &Path) -> u64 {
    AcceleratorFile::open(file).unwrap().usage().unwrap()["gpu-0"].used_total
}

#[test]
fn without_a_gateway_it_runs_the_engine_itself_and_ends_it() {
    let fixture = GatewayFixture::new(&["4Gi"]).model(&model());
    let file = prepare(&fixture);
    let before = read(&file);
    let measured = json(&measure(&file, &["--json"]).output().unwrap());
    assert_sizes(&measured);
    assert_eq!(measured["memory"]["awake"], Bytes::mib(812).0);
    assert_eq!(read(&file), before, "nothing is written without --write");
    assert_eq!(in_use(&fixture.meter()), 0);

    let written = measure(&file, &["--write"]).output().unwrap();
    assert_eq!(written.status.code(), Some(0), "{}", stderr(&written));
    let shown = String::from_utf8_lossy(&written.stdout);
    assert!(shown.contains("memory: {awake: 812Mi, asleep: 96Mi, host: 128Mi}"), "{shown}");
    let expected = before.replace(
        "memory: {awake: 1Gi, asleep: 64Mi, host: 16Mi}",
        "memory: {awake: 812Mi, asleep: 96Mi, host: 128Mi}",
    );
    assert_eq!(read(&file), expected);
    // What was written is enough.
    assert_sizes(&json(&measure(&file, &["--json"]).output().unwrap()));
}

#[test]
fn a_start_that_fails_says_why_and_leaves_nothing_behind() {
    let fixture = GatewayFixture::new(&["4Gi"])
        .model(&SimModel { flags: "--fault exit-at-start=3", ..SimModel::new("m") });
    let file = prepare(&fixture);
    let failed = measure(&file, &[]).output().unwrap();
    assert_eq!(failed.status.code(), Some(1));
    assert!(stderr(&failed).contains("cannot start m: "), "{}", stderr(&failed));
    assert!(stderr(&failed).contains("logs"), "the log is named: {}", stderr(&failed));
    let unknown = Command::new(PROGRAM).args(["measure", "x", "--config"]).arg(&file).output().unwrap();
    assert!(stderr(&unknown).contains("has no model 'x'; its models: m"), "{}", stderr(&unknown));
}

#[test]
fn an_interrupt_ends_the_engine_first() {
    let fixture =
        GatewayFixture::new(&["4Gi"]).model(&SimModel { flags: "--start-time 60s", ..SimModel::new("m") });
    let file = prepare(&fixture);
    let engines = fixture.dir().join("state/engines.json");
    let mut running = measure(&file, &[]).stderr(Stdio::piped()).spawn().unwrap();
    let started = || read(&engines).contains("m#0");
    assert!(holds_within(Duration::from_secs(20), Duration::from_millis(10), started));
    let recorded: Value = serde_json::from_str(&read(&engines)).unwrap();
    let engine = recorded["engines"]["m#0"]["pid"].as_i64().unwrap();
    interrupt(&running);
    assert_eq!(running.wait().unwrap().code(), Some(1));
    assert!(!Path::new(&format!("/proc/{engine}")).exists());
    assert!(!read(&engines).contains("m#0"));
}

#[test]
fn a_second_interrupt_kills_an_engine_that_does_not_end_and_waits_for_its_end() {
    let fixture = GatewayFixture::new(&["4Gi"]).settings("timeouts: {stop: 10m}");
    let marker = fixture.dir().join("ignores-sigterm");
    let script = format!("trap '' TERM; : > {}; while :; do sleep 5; done", marker.display());
    let fixture = fixture.model_yaml(&format!(
        "  - name: m\n    memory: {{awake: 1Gi}}\n    engine: {{kind: custom, command: [sh, -c, {script:?}, \
         \"${{HOST}}:${{PORT}}\"]}}\n"
    ));
    let file = prepare(&fixture);
    let engines = fixture.dir().join("state/engines.json");
    let mut running = measure(&file, &[]).stderr(Stdio::piped()).spawn().unwrap();
    let (noticed, mut notices) = (pieces_of(running.stderr.take().unwrap()), String::new());
    let started = || marker.exists() && read(&engines).contains("m#0");
    assert!(holds_within(Duration::from_secs(20), Duration::from_millis(10), started));
    let recorded: Value = serde_json::from_str(&read(&engines)).unwrap();
    let engine = i32::try_from(recorded["engines"]["m#0"]["pid"].as_i64().unwrap()).unwrap();
    interrupt(&running);
    until(&noticed, &mut notices, "interrupted; the model returns to its former state\n");
    assert!(is_alive(engine), "it ignores the first one");
    interrupt(&running);
    until(&noticed, &mut notices, "interrupted while m#0 ends; killing it\n");
    let mut ended = None;
    let has_ended = || {
        ended = running.try_wait().unwrap();
        ended.is_some()
    };
    assert!(holds_within(Duration::from_secs(20), Duration::from_millis(10), has_ended), "{notices}");
    assert_eq!(ended.unwrap().code(), Some(1));
    assert!(!is_alive(engine), "it is gone before the command is");
    assert!(!read(&engines).contains("m#0"), "no gateway looks for it");
}

#[test]
fn a_step_that_takes_longer_than_a_second_shows_its_progress_on_a_terminal_alone() {
    let fixture = GatewayFixture::new(&["4Gi"]).model(&SimModel {
        flags: "--start-time 1800ms",
        keys: "idle: {level: never}",
        ..SimModel::new("m")
    });
    let file = prepare(&fixture);
    let line = format!("{PROGRAM} measure m --config {}", file.display());
    let shown = on_a_terminal(&line).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(shown.stdout).unwrap();
    assert_eq!(shown.status.code(), Some(0), "{text:?}");
    let (progress, result) = text.rsplit_once("\r\x1b[K").unwrap_or_else(|| panic!("{text:?}"));
    assert!(progress.contains("\rstart: 1.") && !progress.contains("start: 0."), "{text:?}");
    assert!(result.starts_with("m on gpu-0\r\n") && result.contains("memory: {awake: "), "{text:?}");

    let plain = measure(&file, &[]).output().unwrap();
    let out = String::from_utf8_lossy(&plain.stdout);
    assert!(out.starts_with("m on gpu-0\n") && !out.contains(['\r', '\x1b']), "{out:?}");
    assert_eq!((plain.status.code(), stderr(&plain).as_str()), (Some(0), ""));
}

#[test]
fn beside_a_gateway_it_measures_by_orders_and_returns_the_model_to_its_state() {
    let gateway = GatewayFixture::new(&["4Gi"]).model(&model()).start();
    let measured = json(&beside(&gateway, &["--json"]));
    assert_sizes(&measured);
    assert_eq!(gateway.engine("m#0")["state"], "Cold");
    gateway.wake("m");
    assert_sizes(&json(&beside(&gateway, &["--json"])));
    assert_eq!(gateway.engine("m#0")["state"], "Awake");
    assert_eq!(cli(&gateway, &["sleep", "m"]).output().unwrap().status.code(), Some(0));
    assert_sizes(&json(&beside(&gateway, &["--json"])));
    let state = gateway.engine("m#0")["state"].as_str().unwrap().to_owned();
    assert!(state.starts_with("Asleep"), "{state}");
}

#[test]
fn beside_a_gateway_it_takes_nothing_from_clients() {
    let gateway = GatewayFixture::new(&["4Gi"]).model(&model()).model(&SimModel::new("other")).start();
    let stream = gateway.client().open_stream("m", 400);
    let refused = beside(&gateway, &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("m serves requests (1 running, 0 waiting)"), "{}", stderr(&refused));
    assert!(stream.rest().is_whole_stream());
    gateway.until_unused("m#0");

    gateway.wake("other");
    let refused = beside(&gateway, &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("other is awake on gpu-0"), "{}", stderr(&refused));
    assert_eq!(gateway.engine("other#0")["state"], "Awake");
    assert_sizes(&json(&beside(&gateway, &["--evict", "--json"])));
    let state = gateway.engine("other#0")["state"].as_str().unwrap().to_owned();
    assert!(state.starts_with("Asleep"), "{state}");
}

#[test]
fn an_interrupt_beside_a_gateway_returns_the_model_to_its_state() {
    let gateway = GatewayFixture::new(&["4Gi"])
        .model(&SimModel { flags: "--start-time 60s", ..SimModel::new("m") })
        .start();
    let file = gateway.dir.join("rouse.yaml").display().to_string();
    let mut running =
        cli(&gateway, &["measure", "m", "--config", &file]).stderr(Stdio::null()).spawn().unwrap();
    let state = || gateway.engine("m#0")["state"].as_str().unwrap_or_default().to_owned();
    assert!(holds_within(Duration::from_secs(20), Duration::from_millis(10), || state() == "Loading"));
    interrupt(&running);
    assert_eq!(running.wait().unwrap().code(), Some(1));
    assert_eq!(state(), "Cold");
}

fn interrupt(process: &Child) {
    nix::sys::signal::kill(Pid::from_raw(i32::try_from(process.id()).unwrap()), Signal::SIGINT).unwrap();
}

fn beside(gateway: &GatewayProcess, args: &[&str]) -> Output {
    let file = gateway.dir.join("rouse.yaml").display().to_string();
    let all = [&["measure", "m", "--config", &file], args].concat();
    cli(gateway, &all).output().unwrap()
}
