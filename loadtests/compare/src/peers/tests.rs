use std::process::Command;

use super::*;

/// The real programs read what is written for them. Whether they are there is the machine's affair, so a missing one is
/// said, not failed.
fn accepted(target: Target, name: &str, text: &str, args: &[&str]) {
    let Some(program) = install::locate(target) else {
        println!("not checked: {target} is not installed (loadtests/compare/install does that)");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    let output = Command::new(program).args(args).arg(&path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn addresses() -> (SocketAddr, SocketAddr) {
    (free_address().unwrap(), free_address().unwrap())
}

#[test]
fn nginx_accepts_its_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let (listen, engine) = addresses();
    for workers in [1, 2] {
        let text = config::nginx(listen, engine, workers, folder.path());
        accepted(Target::Nginx, "nginx.conf", &text, &["-e", "stderr", "-t", "-c"]);
    }
}

#[test]
fn haproxy_accepts_its_configuration() {
    let (listen, engine) = addresses();
    for workers in [1, 2] {
        accepted(Target::Haproxy, "haproxy.cfg", &config::haproxy(listen, engine, workers), &["-c", "-f"]);
    }
}

#[test]
fn envoy_accepts_its_configuration() {
    let (listen, engine) = addresses();
    let args = ["--mode", "validate", "--log-level", "error", "-c"];
    accepted(Target::Envoy, "envoy.yaml", &config::envoy(listen, engine), &args);
}

#[tokio::test]
async fn a_dropped_process_takes_what_it_started_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let command = process::Command::new("sh").args(["-c", "setsid sleep 600 & wait"]);
    let process = Process::spawn("parent", command, "0", folder.path()).unwrap();
    let pids = loop {
        let pids = crate::measure::tree(process.pid()).unwrap();
        if pids.len() == 2 {
            break pids;
        }
        tokio::task::yield_now().await;
    };
    drop(process);
    for pid in pids {
        // Gone, or a zombie that nobody has waited for yet.
        while std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn a_process_that_ends_is_told_with_its_last_words() {
    let folder = tempfile::tempdir().unwrap();
    let command = process::Command::new("sh").args(["-c", "echo why; exit 3"]);
    let mut process = Process::spawn("short", command, "0", folder.path()).unwrap();
    let (nobody, _) = addresses();
    let error = probe::listens(&mut process, nobody, START).await.unwrap_err().to_string();
    assert!(error.contains("short ended (exit status: 3): why"), "{error}");
}
