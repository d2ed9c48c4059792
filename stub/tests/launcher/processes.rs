//! Processes: how they start and end, and that none is left.

use std::{collections::BTreeMap, fs, io::Write as _, net::TcpStream, thread};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse_net::process::table;
use serde_json::json;
use tokio::time::Instant;

use crate::support::{LauncherProcess, first_logged_number, request, start, until};

/// Prints once the trap is set, so that no test stops it earlier.
const STUBBORN: &str = "trap \"\" TERM; echo deaf; while :; do sleep 0.1; done";

fn launcher(grace: &str) -> LauncherProcess {
    start(&["--command", "sh -c", "--mock-gpus", "--grace", grace])
}

fn path(id: &str) -> String {
    format!("/v2/vllm/instances/{id}")
}

#[test]
fn instance_force_kill() {
    let launcher = launcher("200ms");
    launcher.run("a", STUBBORN);
    launcher.until_logged("a", "deaf");
    let answer = launcher.delete(&path("a"));
    assert_eq!((answer.status, &answer.json()["status"]), (200, &json!("stopped")));
    assert_eq!(launcher.descendants(), Vec::<i32>::new());
}

#[test]
fn a_stop_continues_after_its_client_left_and_several_calls_share_one() {
    let launcher = launcher("1s");
    launcher.run("a", STUBBORN);
    launcher.until_logged("a", "deaf");
    let mut stream = TcpStream::connect(launcher.address).unwrap();
    write!(stream, "DELETE {} HTTP/1.1\r\nhost: localhost\r\n\r\n", path("a")).unwrap();
    drop(stream);
    until("it is gone", || launcher.get(&path("a")).status == 404);
    launcher.run("b", STUBBORN);
    launcher.until_logged("b", "deaf");
    let last: Vec<_> = thread::scope(|scope| {
        let stops = [(); 3].map(|()| scope.spawn(|| launcher.delete(&path("b"))));
        stops.map(|stop| stop.join().unwrap()).iter().map(|answer| (answer.status, answer.text())).collect()
    });
    assert!(last.iter().all(|answer| *answer == last[0] && answer.0 == 200), "{last:?}");
}

#[test]
fn a_worker_ends_with_its_engine_whichever_way_that_goes() {
    let launcher = launcher("10s");
    // One worker in the process group, and one that has left it.
    let script = "sleep 100 & setsid sleep 100 & echo $$; wait";
    launcher.run("deleted", script);
    first_logged_number(&launcher, "deleted");
    until("both workers run", || launcher.descendants().len() == 3);
    assert_eq!(launcher.delete(&path("deleted")).status, 200);
    assert_eq!(launcher.descendants(), Vec::<i32>::new());
    launcher.run("killed", script);
    let pid = first_logged_number(&launcher, "killed");
    until("both workers run", || launcher.descendants().len() == 3);
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    until("no worker is left", || launcher.descendants().is_empty());
    assert_eq!(launcher.instance("killed")["status"], "stopped");
    until("no zombie is left", || launcher.zombies().is_empty());
}

#[test]
fn an_orphan_that_ends_is_reaped() {
    let launcher = launcher("10s");
    launcher.run("a", "(sleep 0.2 & echo $!); exec sleep 100");
    let orphan = first_logged_number(&launcher, "a");
    until("the orphan has ended and is reaped", || table::stat(orphan).is_none());
    assert_eq!(launcher.instance("a")["status"], "running");
}

#[test]
fn an_engine_sees_its_own_environment_and_no_socket() {
    let launcher = launcher("10s");
    let script = "env; ls -l /proc/self/fd; echo done; exec sleep 100";
    let body = json!({
        "options": format!("'{script}'"),
        "gpu_uuids": ["GPU-3", "GPU-1"],
        "env_vars": {"CUDA_VISIBLE_DEVICES": "0", "TEST_VAR": "test value"},
    });
    assert_eq!(launcher.put("a", &body).status, 201);
    let said = launcher.until_logged("a", "done");
    let lines: Vec<&str> = said.lines().collect();
    for expected in ["CUDA_VISIBLE_DEVICES=3,1", "CUDA_DEVICE_ORDER=PCI_BUS_ID", "TEST_VAR=test value"] {
        assert!(lines.contains(&expected), "{said}");
    }
    assert!(!said.contains("ROUSE_SECRET") && !said.contains("socket:"), "{said}");
    assert!(said.contains("/dev/null"), "{said}");
    // Without its own accelerators the engine sees those of the launcher.
    launcher.run("b", script);
    assert!(launcher.until_logged("b", "done").lines().any(|line| line == "CUDA_VISIBLE_DEVICES=7"));
}

#[test]
fn others_are_answered_while_a_stop_waits() {
    let launcher = launcher("3s");
    launcher.run("stubborn", STUBBORN);
    launcher.until_logged("stubborn", "deaf");
    let address = launcher.address;
    let stop = thread::spawn(move || {
        let answer = request(address, "DELETE", "/v2/vllm/instances/stubborn", "", "");
        (answer.status, Instant::now())
    });
    let mut answered = 0;
    let mut last = Instant::now();
    while !stop.is_finished() {
        assert_eq!(launcher.get("/health").status, 200);
        let id = format!("other-{answered}");
        launcher.run(&id, "exec sleep 100");
        assert_eq!(launcher.delete(&path(&id)).status, 200);
        if answered == 0 {
            // A stopping instance exists until its processes are gone.
            assert_eq!(launcher.instance("stubborn")["status"], "running");
            assert_eq!(launcher.put("stubborn", &json!({"options": "x"})).status, 409);
        }
        if !stop.is_finished() {
            (answered, last) = (answered + 1, Instant::now());
        }
    }
    let (status, stopped) = stop.join().unwrap();
    assert_eq!(status, 200);
    println!("{answered} engines started and stopped while a stop waited");
    assert!(answered >= 3 && last < stopped, "{answered}");
}

#[test]
fn twenty_engines_start_and_stop_side_by_side_and_a_stubborn_one_delays_no_other() {
    let launcher = launcher("5s");
    let watch = launcher.watch("");
    let ids: Vec<String> = (0..20).map(|n| format!("i{n}")).collect();
    thread::scope(|scope| {
        for id in &ids {
            let script = if id == "i7" { STUBBORN } else { "echo up; exec sleep 100" };
            scope.spawn(|| launcher.run(id, script));
        }
    });
    launcher.until_logged("i7", "deaf");
    assert_eq!(launcher.get("/v2/vllm/instances").json()["running_instances"], 20);
    let asked = Instant::now();
    let answer = launcher.delete("/v2/vllm/instances");
    assert_eq!((answer.status, &answer.json()["total_stopped"]), (200, &json!(20)));
    let mut deleted = BTreeMap::new();
    let mut last = String::new();
    while deleted.len() < 20 {
        let event = watch.event().unwrap();
        if event.json()["type"] == "DELETED" {
            last = event.json()["object"]["instance_id"].as_str().unwrap().to_owned();
            deleted.insert(last.clone(), event.received_at - asked);
        }
    }
    assert_eq!(last, "i7");
    let stubborn = deleted.remove("i7").unwrap();
    let slowest = deleted.values().max().unwrap();
    println!("19 engines stopped within {slowest:?}, the stubborn one after {stubborn:?}");
    assert!(*slowest * 2 < stubborn, "{slowest:?} {stubborn:?}");
    assert_eq!(launcher.descendants(), Vec::<i32>::new());
    until("no zombie is left", || launcher.zombies().is_empty());
}

#[test]
fn sigterm_ends_all_engines_side_by_side_and_leaves_nothing_behind() {
    let mut launcher = launcher("2s");
    let watch = launcher.watch("");
    for n in 0..4 {
        launcher.run(&format!("i{n}"), "setsid sleep 100 & echo up; exec sleep 100");
    }
    launcher.run("stubborn", STUBBORN);
    launcher.until_logged("stubborn", "deaf");
    // This process hides as well as it can: another session, an empty environment, an exited parent.
    launcher.run("hidden", "(env -i setsid sleep 100 & echo $!); exec sleep 100");
    let hidden = first_logged_number(&launcher, "hidden");
    until("it hides", || {
        fs::read(format!("/proc/{hidden}/environ")).is_ok_and(|environment| environment.is_empty())
    });
    let asked = Instant::now();
    launcher.signal(Signal::SIGTERM);
    let deleted = |event: &crate::support::WatchedEvent| event.named().starts_with("DELETED");
    let ends: Vec<_> = std::iter::from_fn(|| watch.event()).filter(deleted).collect();
    assert_eq!(ends.len(), 6);
    assert_eq!(ends.last().unwrap().named(), "DELETED stubborn");
    println!(
        "the last of the others after {:?}, the stubborn one after {:?}",
        ends[4].received_at - asked,
        ends[5].received_at - asked
    );
    assert_eq!(launcher.wait(), Some(0));
    assert_eq!(launcher.descendants(), Vec::<i32>::new());
    assert!(table::stat(hidden).is_none_or(|stat| stat.zombie), "the hidden one lives");
    assert_eq!(fs::read_dir(launcher.dir.path().join("logs")).unwrap().count(), 0, "logs are left");
}

#[test]
fn nothing_is_started_any_more_once_it_ends() {
    let mut launcher = launcher("2s");
    launcher.run("stubborn", STUBBORN);
    launcher.until_logged("stubborn", "deaf");
    launcher.signal(Signal::SIGTERM);
    until("it refuses", || launcher.put("late", &json!({"options": "'exec sleep 100'"})).status == 503);
    assert_eq!(launcher.get("/health").status, 200);
    assert_eq!(launcher.wait(), Some(0));
}
