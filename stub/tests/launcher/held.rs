//! Engines that cannot be ended.

use std::thread;

use nix::{
    sys::{
        ptrace,
        signal::Signal,
        wait::{WaitStatus, waitpid},
    },
    unistd::Pid,
};
use serde_json::json;

use crate::support::{LauncherProcess, TEST_TIMEOUT, delete_with_long_timeout, first_logged_number, start};

fn launcher() -> LauncherProcess {
    start(&["--command", "sh -c", "--grace", "100ms"])
}

/// Attaches a debugger to an engine. The killed process then stays in the process table until the debugger reaps it,
/// and no other process can remove it: like an engine on a hung driver. The debugger is the calling thread.
fn held(launcher: &LauncherProcess, id: &str) -> Pid {
    launcher.run(id, "echo $$; exec sleep 100");
    let pid = Pid::from_raw(first_logged_number(launcher, id));
    ptrace::seize(pid, ptrace::Options::empty()).unwrap();
    pid
}

fn let_go(pid: Pid) {
    assert_eq!(waitpid(pid, None), Ok(WaitStatus::Signaled(pid, Signal::SIGKILL, false)));
}

#[test]
fn an_engine_that_cannot_be_ended_is_500_and_stays_until_it_can() {
    let launcher = launcher();
    let watch = launcher.watch("");
    let pid = held(&launcher, "held");
    assert_eq!(watch.next(), "CREATED held");
    let address = launcher.address;
    let stop = thread::spawn(move || delete_with_long_timeout(address, "/v2/vllm/instances/held"));
    // No other request waits for it.
    launcher.run("other", "exec sleep 100");
    assert_eq!(launcher.instance("held")["instance_id"], "held");
    assert_eq!(launcher.put("held", &json!({"options": "x"})).status, 409);
    let why = "instance held still has processes 30s after SIGKILL, and stays listed";
    let answer = stop.join().unwrap();
    assert_eq!((answer.status, &answer.json()["detail"]), (500, &json!(why)));
    // From now on the failure is known, and the other instances stop all the same.
    for path in ["/v2/vllm/instances/held", "/v2/vllm/instances"] {
        let answer = launcher.delete(path);
        assert_eq!((answer.status, &answer.json()["detail"]), (500, &json!(why)), "{path}");
    }
    let listed = launcher.get("/v2/vllm/instances?detail=false").json()["instance_ids"].clone();
    assert_eq!(listed, json!(["held"]));
    println!("the launcher's thread was busy for {:?} meanwhile", launcher.cpu_time());
    assert!(launcher.cpu_time() < TEST_TIMEOUT / 30, "it does not wait, it asks again and again");
    let_go(pid);
    assert_eq!(
        [watch.next(), watch.next(), watch.next()],
        ["CREATED other", "DELETED other", "DELETED held"]
    );
    assert_eq!(launcher.get("/v2/vllm/instances/held").status, 404);
    launcher.run("held", "exec sleep 100");
}

#[test]
fn with_an_engine_that_cannot_be_ended_the_launcher_exits_with_1() {
    let mut launcher = launcher();
    let watch = launcher.watch("");
    let pid = held(&launcher, "held");
    launcher.run("other", "exec sleep 100");
    launcher.signal(Signal::SIGTERM);
    assert_eq!(
        [watch.next(), watch.next(), watch.next()],
        ["CREATED held", "CREATED other", "DELETED other"]
    );
    assert_eq!(launcher.get("/health").status, 200);
    assert_eq!(launcher.wait(), Some(1));
    assert_eq!(watch.next(), "end");
    let_go(pid);
}
