//! Readiness, in the instance object and on watches that request it.

use std::net::SocketAddr;

use clap::Parser;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::support::{LauncherProcess, launcher, request, until};

#[derive(Parser)]
struct LaunchedEngineCli {
    #[command(flatten)]
    args: engine_sim::EngineSimArgs,
}

/// Runs an engine when another test starts this binary as one; otherwise it does nothing.
#[test]
fn engine() {
    let Ok(arguments) = std::env::var("ENGINE_ARGS") else { return };
    let engine = LaunchedEngineCli::parse_from(std::iter::once("engine").chain(arguments.split(' ')));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(engine_sim::run(engine.args)).unwrap();
}

fn free_port() -> u16 {
    rouse_net::port::claim_for_process().unwrap()
}

/// The options end like a real engine's.
fn run_engine(launcher: &LauncherProcess, id: &str, port: u16) {
    let exe = std::env::current_exe().unwrap();
    let script = format!(
        "ENGINE_ARGS=\"--enable-sleep-mode --port $1\" exec {} readiness::engine --exact --nocapture",
        exe.display()
    );
    let answer = launcher.put(id, &json!({"options": format!("'{script}' --port {port}")}));
    assert_eq!(answer.status, 201, "{}", answer.text());
    assert_eq!(answer.json()["ready"], false);
}

#[test]
fn an_instance_is_ready_while_its_engine_is_awake() {
    let launcher = launcher();
    let (plain, asking) = (launcher.watch(""), launcher.watch("?ready=true"));
    let port = free_port();
    let engine = SocketAddr::from(([127, 0, 0, 1], port));
    run_engine(&launcher, "a", port);
    assert_eq!(asking.next(), "CREATED a");
    let update = |ready: bool| {
        let event = asking.event().unwrap();
        assert_eq!(
            (&*event.named(), &event.json()["object"]["ready"]),
            ("UPDATED a", &json!(ready)),
            "{}",
            event.line
        );
        assert_eq!(launcher.instance("a")["ready"], ready);
    };
    update(true);
    assert_eq!(request(engine, "POST", "/sleep?level=1", "", "").status, 200);
    update(false);
    assert_eq!(request(engine, "POST", "/wake_up", "", "").status, 200);
    update(true);
    // A killed engine becomes unready at once.
    let pid = launcher.descendants()[0];
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let stopped = asking.event().unwrap();
    assert_eq!((&*stopped.named(), &stopped.json()["object"]["ready"]), ("STOPPED a", &json!(false)));
    // A watcher that did not request updates sees none.
    assert_eq!([plain.next(), plain.next()], ["CREATED a", "STOPPED a"]);
}

/// A response on a port may come from another engine than the one configured for it.
#[test]
fn an_instance_is_not_ready_by_another_ones_engine() {
    let launcher = launcher();
    let port = free_port();
    run_engine(&launcher, "first", port);
    until("the first is ready", || launcher.instance("first")["ready"] == true);
    let answer =
        launcher.put("second", &json!({"options": format!("'echo up; exec sleep 100' --port {port}")}));
    assert_eq!(answer.status, 201);
    launcher.until_logged("second", "up");
    let watch = launcher.watch("?ready=true");
    assert_eq!([watch.next(), watch.next()], ["CREATED first", "CREATED second"]);
    // It is still unready several probes later: the first engine has changed twice meanwhile, and nothing else has.
    let engine = SocketAddr::from(([127, 0, 0, 1], port));
    for path in ["/sleep?level=1", "/wake_up"] {
        assert_eq!(request(engine, "POST", path, "", "").status, 200);
        assert_eq!(watch.next(), "UPDATED first");
    }
    assert_eq!(launcher.instance("second")["ready"], false);
}
