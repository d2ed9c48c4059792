use std::{ffi::OsString, process::Command};

use super::*;

/// Checks that a real program accepts its configuration. A program that is not installed is reported, not failed.
fn accepted(target: ComparedProxy, name: &str, text: &str, args: &[&str]) {
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
        accepted(ComparedProxy::Nginx, "nginx.conf", &text, &["-e", "stderr", "-t", "-c"]);
    }
}

#[test]
fn haproxy_accepts_its_configuration() {
    let (listen, engine) = addresses();
    for workers in [1, 2] {
        accepted(
            ComparedProxy::Haproxy,
            "haproxy.cfg",
            &config::haproxy(listen, engine, workers),
            &["-c", "-f"],
        );
    }
}

#[test]
fn envoy_accepts_its_configuration() {
    let (listen, engine) = addresses();
    let args = ["--mode", "validate", "--log-level", "error", "-c"];
    accepted(ComparedProxy::Envoy, "envoy.yaml", &config::envoy(listen, engine), &args);
}

#[test]
fn the_stub_takes_its_flags() {
    use clap::Parser as _;

    let (listen, _) = addresses();
    let words = |args| std::iter::once("rouse-stub".into()).chain(args).collect::<Vec<OsString>>();
    for workers in [1, 2] {
        let args = config::stub(listen, std::path::Path::new("/folder/engine"), workers);
        rouse_stub::cli::StubArgs::try_parse_from(words(args)).map(drop).unwrap();
    }
    let unknown = words(vec!["proxy".into(), "--relays".into()]);
    assert!(rouse_stub::cli::StubArgs::try_parse_from(unknown).is_err());
}

#[test]
fn a_stub_that_was_given_must_be_there_and_one_that_was_not_need_not() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, "").unwrap();
        Some(path.canonicalize().unwrap())
    };
    let new = |stub| InstalledPrograms::new(file("gateway"), file("engine"), stub);
    assert_eq!(new(file("stub")).unwrap().find(ComparedProxy::Stub).unwrap(), file("stub").unwrap());
    let error = format!("{:#}", new(Some(folder.path().join("nowhere"))).unwrap_err());
    assert!(error.contains("nowhere is not built: run `make compare`"), "{error}");
    // The stub is not beside this test's program.
    let without = new(None).unwrap();
    assert!(!without.has(ComparedProxy::Stub));
    let error = without.find(ComparedProxy::Stub).unwrap_err().to_string();
    assert!(error.contains("run `make compare`"), "{error}");
}

#[tokio::test]
async fn a_dropped_process_takes_what_it_started_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let command = process::BenchCommand::new("sh").args(["-c", "setsid sleep 600 & wait"]);
    let process = BenchProcess::spawn("parent", command, "0", folder.path()).unwrap();
    let pids = loop {
        let pids = crate::measure::tree(process.pid()).unwrap();
        if pids.len() == 2 {
            break pids;
        }
        tokio::task::yield_now().await;
    };
    drop(process);
    for pid in pids {
        // Gone, or a zombie that is not reaped yet.
        while std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn what_a_crashed_process_leaves_behind_falls_to_us_and_is_known() {
    nix::sys::prctl::set_child_subreaper(true).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let command = process::BenchCommand::new("sh").args(["-c", "setsid sleep 600 & wait"]);
    let process = BenchProcess::spawn("crashes", command, "0", folder.path()).unwrap();
    let left = loop {
        match crate::measure::tree(process.pid()).unwrap()[..] {
            [_, left] => break left,
            _ => tokio::task::yield_now().await,
        }
    };
    assert!(!process::orphans().contains(&left) && !process::orphans().contains(&process.pid()));
    let kill = |pid: u32| {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), nix::sys::signal::SIGKILL)
    };
    kill(process.pid()).unwrap();
    process.wait_success().await.unwrap_err();
    assert!(process::orphans().contains(&left));
    kill(left).unwrap();
}

#[tokio::test]
async fn a_process_that_ends_is_told_with_its_last_words() {
    let folder = tempfile::tempdir().unwrap();
    let command = process::BenchCommand::new("sh").args(["-c", "echo why; exit 3"]);
    let mut process = BenchProcess::spawn("short", command, "0", folder.path()).unwrap();
    let (nobody, _) = addresses();
    let error =
        probe::wait_until_listening(&mut process, nobody, START_TIMEOUT).await.unwrap_err().to_string();
    assert!(error.contains("short ended (exit status: 3): why"), "{error}");
}
