//! Our launcher as a process, with the orders and the watch of a leader.
//!
//! The process is this test binary itself, started with a filter that runs nothing but [`launcher`].

use std::{
    ffi::OsString,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse::{
    model::AcceleratorId,
    pairing::{event::CommandFailure, ids::EngineFingerprint},
};
use rouse_controllers::platform::launcher::{
    self, Error, InstanceRequest, LauncherClient, LauncherInstance, LauncherWatchEvent,
};
use tokio::{sync::mpsc, time};

use crate::support::row::free_port;

/// The variable with the launcher's arguments, one a line.
const WORDS: &str = "LAUNCHER_WORDS";
/// Longer than any step here, also on a busy machine: this only bounds a failure.
const LONG: Duration = Duration::from_secs(30);
/// The leader's epoch.
const EPOCH: u64 = 7;

/// Runs a launcher when another test starts this binary as one. Among the tests it does nothing.
#[test]
fn launcher() {
    let Ok(words) = std::env::var(WORDS) else { return };
    let ended = rouse_stub::cli::run_from(words.lines().map(OsString::from));
    eprintln!("the launcher has ended: {ended:?}");
}

/// A launcher that starts each instance as this command with the instance's options.
struct TestLauncherProcess {
    child: Child,
    address: SocketAddr,
    _logs: tempfile::TempDir,
}

impl TestLauncherProcess {
    fn start(command: &str) -> Self {
        Self::at(free_port(), command)
    }

    fn at(port: u16, command: &str) -> Self {
        let logs = tempfile::tempdir().unwrap();
        let port = port.to_string();
        let words = [
            ["rouse-stub", "launcher"],
            ["--host", "127.0.0.1"],
            ["--port", &port],
            ["--log-dir", logs.path().to_str().unwrap()],
            ["--mock-gpu-count", "2"],
            ["--command", command],
        ];
        let words = [&words.concat()[..], &["--mock-gpus", "--no-token"]].concat().join("\n");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["launchers::launcher", "--exact", "--nocapture"])
            .env(WORDS, words)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let mut text = String::new();
        let address = loop {
            assert!(errors.read_line(&mut text).unwrap() > 0, "it has ended: {text}");
            if let Some((_, address)) = text.split_once("listening on ") {
                break address.trim().parse().unwrap();
            }
        };
        // A failure shows the launcher's later messages, and they must not fill the pipe.
        thread::spawn(move || errors.lines().map_while(Result::ok).for_each(|line| println!("{line}")));
        Self { child, address, _logs: logs }
    }

    fn ordered_by(&self, epoch: u64) -> LauncherClient {
        LauncherClient::new(self.address, None, epoch)
    }

    /// Starts a watch on the launcher and returns its events.
    fn watch(&self) -> mpsc::Receiver<LauncherWatchEvent> {
        let (told, seen) = mpsc::channel(1);
        let launcher = self.ordered_by(EPOCH);
        tokio::spawn(async move { launcher.watch(told, |seen| seen).await });
        seen
    }

    /// Ends the launcher, as the kubelet does.
    fn end(mut self) -> SocketAddr {
        self.terminate();
        self.address
    }

    fn terminate(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), Signal::SIGTERM).unwrap();
            self.child.wait().unwrap();
        }
    }
}

impl Drop for TestLauncherProcess {
    fn drop(&mut self) {
        self.terminate();
    }
}

/// Instances run their options in a shell.
const SHELL: &str = "sh -c";

fn script(script: &str) -> InstanceRequest {
    InstanceRequest { options: format!("'{script}'"), ..InstanceRequest::default() }
}

fn sleeper() -> InstanceRequest {
    script("exec sleep 1000")
}

async fn next(seen: &mut mpsc::Receiver<LauncherWatchEvent>) -> LauncherWatchEvent {
    time::timeout(LONG, seen.recv()).await.expect("nothing is seen").expect("the watch has ended")
}

fn ids(all: &[LauncherInstance]) -> Vec<&str> {
    all.iter().map(|instance| instance.id.as_str()).collect()
}

fn cause<T: std::fmt::Debug>(result: Result<T, Error>) -> (CommandFailure, String) {
    let error = result.unwrap_err();
    (error.cause(), error.to_string())
}

#[tokio::test]
async fn an_engine_is_started_once_shown_and_ended() {
    let process = TestLauncherProcess::start(SHELL);
    let launcher = process.ordered_by(EPOCH);
    assert_eq!(launcher.list().await.unwrap().instances, []);
    let set: [AcceleratorId; 2] = ["GPU-0".into(), "GPU-1".into()];
    let id = launcher::instance_id(EngineFingerprint(7), &set);
    let annotations = [("inference-port".to_owned(), "1234".to_owned())].into();
    let wanted = InstanceRequest { gpu_uuids: set.to_vec(), annotations, ..sleeper() };
    let made = launcher.put(&id, &wanted).await.unwrap();
    assert_eq!((made.running, made.ready, made.port()), (true, Some(false), Some(1234)));
    assert_eq!(made.options, wanted.options);
    let engine = launcher::engine_id(&made).unwrap();
    assert_eq!((engine.fingerprint, &*engine.accelerators), (EngineFingerprint(7), &set[..]));

    let (twice, words) = cause(launcher.put(&id, &wanted).await);
    assert_eq!(twice, CommandFailure::Conflict);
    assert!(words.contains("already exists"), "{words}");

    assert_eq!(launcher.get(&id).await.unwrap(), Some(made.clone()));
    assert_eq!(launcher.list().await.unwrap().instances, [made]);
    let last = launcher.delete(&id).await.unwrap().unwrap();
    assert!(!last.running);
    assert_eq!((launcher.get(&id).await, launcher.delete(&id).await), (Ok(None), Ok(None)));
    assert_eq!(launcher.list().await.unwrap().instances, []);
}

#[tokio::test]
async fn what_a_launcher_will_not_do_is_told_with_its_reason() {
    let process = TestLauncherProcess::start(SHELL);
    let launcher = process.ordered_by(EPOCH);
    let unknown = InstanceRequest { gpu_uuids: vec!["GPU-9".into()], ..sleeper() };
    let (refused, words) = cause(launcher.put("a", &unknown).await);
    assert_eq!(refused, CommandFailure::Refused);
    assert!(words.contains("422") && words.contains("GPU-9"), "{words}");
    let unbalanced = InstanceRequest { options: "'".into(), ..InstanceRequest::default() };
    assert_eq!(cause(launcher.put("a", &unbalanced).await).0, CommandFailure::Refused);
    assert_eq!(launcher.list().await.unwrap().instances, [], "nothing was started");

    // An instance may have any name.
    launcher.put("../odd name?", &sleeper()).await.unwrap();
    assert_eq!(ids(&launcher.list().await.unwrap().instances), ["../odd name?"]);
    assert!(launcher.delete("../odd name?").await.unwrap().is_some());

    let address = process.end();
    let gone = LauncherClient::new(address, None, EPOCH);
    assert_eq!(cause(gone.list().await).0, CommandFailure::Unreachable);
    assert_eq!(cause(gone.put("a", &sleeper()).await).0, CommandFailure::Unreachable);
    assert_eq!(cause(gone.delete("a").await).0, CommandFailure::Unreachable);
}

#[tokio::test]
async fn a_leader_that_was_replaced_orders_nothing_and_may_look() {
    let process = TestLauncherProcess::start(SHELL);
    let (old, new) = (process.ordered_by(EPOCH - 1), process.ordered_by(EPOCH));
    old.put("a", &sleeper()).await.unwrap();
    new.put("b", &sleeper()).await.unwrap();
    let (fenced, words) = cause(old.delete("a").await);
    assert_eq!(fenced, CommandFailure::Conflict);
    assert!(words.contains("another leader"), "{words}");
    assert_eq!(cause(old.put("c", &sleeper()).await).0, CommandFailure::Conflict);
    assert_eq!(ids(&old.list().await.unwrap().instances), ["a", "b"]);
    // A new leader announces its epoch before it sends an order.
    process.ordered_by(EPOCH + 1).announce_epoch().await.unwrap();
    assert_eq!(cause(new.delete("b").await).0, CommandFailure::Conflict);
    assert_eq!(cause(new.announce_epoch().await).0, CommandFailure::Conflict);
}

#[tokio::test]
async fn an_engine_is_seen_to_answer_and_to_end() {
    // The launcher starts the process with the options that follow, as it starts an engine.
    let exe = env!("CARGO_BIN_EXE_rouse-gateway");
    let process = TestLauncherProcess::start(&format!("'{exe}' demo-engine --host 127.0.0.1 --model m"));
    let launcher = process.ordered_by(EPOCH);
    let mut seen = process.watch();
    assert_eq!(next(&mut seen).await, LauncherWatchEvent::Listed(vec![]));
    let wanted = InstanceRequest { options: format!("--port {}", free_port()), ..InstanceRequest::default() };
    let made = launcher.put("a", &wanted).await.unwrap();
    assert_eq!(next(&mut seen).await, LauncherWatchEvent::Created(made));
    let LauncherWatchEvent::Updated(ready) = next(&mut seen).await else { panic!("it does not answer") };
    assert_eq!((ready.id.as_str(), ready.ready, ready.running), ("a", Some(true), true));
    launcher.delete("a").await.unwrap();
    let LauncherWatchEvent::Updated(ending) = next(&mut seen).await else { panic!("it still answers") };
    assert_eq!(ending.ready, Some(false));
    let LauncherWatchEvent::Deleted(gone) = next(&mut seen).await else { panic!("it is still there") };
    assert_eq!((gone.id.as_str(), gone.running), ("a", false));
}

#[tokio::test]
async fn a_killed_engine_is_seen_to_have_stopped_and_stays_listed() {
    let process = TestLauncherProcess::start(SHELL);
    let launcher = process.ordered_by(EPOCH);
    let mut seen = process.watch();
    assert_eq!(next(&mut seen).await, LauncherWatchEvent::Listed(vec![]));
    launcher.put("killed", &script("kill -9 $$")).await.unwrap();
    assert!(matches!(next(&mut seen).await, LauncherWatchEvent::Created(_)));
    let LauncherWatchEvent::Stopped { instance, exit_code } = next(&mut seen).await else {
        panic!("it lives")
    };
    assert_eq!((instance.id.as_str(), instance.running, exit_code), ("killed", false, Some(-9)));
    launcher.put("failed", &script("exit 3")).await.unwrap();
    assert!(matches!(next(&mut seen).await, LauncherWatchEvent::Created(_)));
    assert!(matches!(next(&mut seen).await, LauncherWatchEvent::Stopped { exit_code: Some(3), .. }));
    let all = launcher.list().await.unwrap().instances;
    assert!(all.len() == 2 && all.iter().all(|instance| !instance.running), "{all:?}");
    // A later watch gets the current state of both instances.
    let mut later = process.watch();
    assert_eq!(next(&mut later).await, LauncherWatchEvent::Listed(all));
}

#[tokio::test]
async fn a_launcher_that_is_started_anew_is_lost_once_and_listed_again() {
    let process = TestLauncherProcess::start(SHELL);
    let launcher = process.ordered_by(EPOCH);
    launcher.put("a", &sleeper()).await.unwrap();
    let mut seen = process.watch();
    let LauncherWatchEvent::Listed(all) = next(&mut seen).await else { panic!("it is not listed") };
    assert_eq!(ids(&all), ["a"]);
    let address = process.end();
    // The launcher ends its engines first, and the watch reports that.
    assert!(matches!(next(&mut seen).await, LauncherWatchEvent::Deleted(_)));
    assert_eq!(next(&mut seen).await, LauncherWatchEvent::Disconnected);
    // For a while no launcher listens.
    assert!(time::timeout(Duration::from_millis(300), seen.recv()).await.is_err());
    let process = TestLauncherProcess::at(address.port(), SHELL);
    // The new launcher's revisions are lower than the old one's, and the watch still reports its events.
    assert_eq!(next(&mut seen).await, LauncherWatchEvent::Listed(vec![]));
    process.ordered_by(EPOCH).put("b", &sleeper()).await.unwrap();
    let LauncherWatchEvent::Created(b) = next(&mut seen).await else { panic!("b is not seen") };
    assert_eq!((b.id.as_str(), b.revision), ("b", 1));
}
