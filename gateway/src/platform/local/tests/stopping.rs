//! Tests that an engine counts as gone only when all its processes are.

use nix::{sys::stat::Mode, unistd::mkfifo};

use super::*;

/// Ignores SIGTERM, writes the pid of a grandchild to `$0`, then continues with `rest`.
fn with_worker(folder: &Path, rest: &str) -> EngineConfig {
    let worker =
        "trap '' TERM; (echo $(exec sh -c 'echo $PPID') > $0.new; mv $0.new $0; while :; do sleep 5; done) &";
    let pid = folder.join("worker");
    script("m", &["sh", "-c", &format!("{worker} {rest}"), pid.to_str().unwrap()])
}

async fn worker(folder: &Path) -> i32 {
    loop {
        if let Ok(text) = fs::read_to_string(folder.join("worker")) {
            return text.trim().parse().unwrap();
        }
        time::sleep(Duration::from_millis(5)).await;
    }
}

fn lives(pid: i32) -> bool {
    table::stat(pid).is_some_and(|stat| !stat.zombie)
}

#[tokio::test]
async fn an_engine_that_ignores_the_polite_order_is_killed_after_its_grace_with_all_it_started() {
    let folder = tempfile::tempdir().unwrap();
    let model = with_worker(folder.path(), "while :; do sleep 5; done");
    let mut harness = LocalPlatformHarness::new(vec![model]);
    harness.launch("m");
    let worker = worker(folder.path()).await;
    let asked = time::Instant::now();
    harness.stop("m", Millis(300));
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
    assert!(time::Instant::now() - asked >= Duration::from_millis(300));
    assert!(!lives(worker));
}

#[tokio::test]
async fn a_second_order_to_stop_may_be_less_patient() {
    let folder = tempfile::tempdir().unwrap();
    let mut harness =
        LocalPlatformHarness::new(vec![with_worker(folder.path(), "while :; do sleep 5; done")]);
    harness.launch("m");
    worker(folder.path()).await;
    harness.stop("m", Millis::secs(600));
    harness.stop("m", Millis::ZERO);
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
}

/// The kernel may hold up a launch, and the end of a process, for long. The fleet repeats a stop meanwhile.
#[tokio::test]
async fn an_engine_whose_task_takes_no_command_holds_up_no_other() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", ""), sim("other", "")]);
    assert_eq!(harness.adopted().await, []);
    // To open a pipe that nobody reads takes until somebody does.
    let log = harness.folder.path().join("state/logs/m-0.log");
    mkfifo(&log, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    harness.launch("m");
    (0..1000).for_each(|_| harness.stop("m", Millis::ZERO));
    harness.run("other").await;
    let _reader = fs::File::options().read(true).write(true).open(&log).unwrap();
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
}

#[tokio::test]
async fn workers_that_outlive_their_engine_are_killed_before_it_is_said_to_be_gone() {
    let folder = tempfile::tempdir().unwrap();
    let rest = "while [ ! -e $0 ]; do sleep 0.01; done; exit 3";
    let mut harness = LocalPlatformHarness::new(vec![with_worker(folder.path(), rest)]);
    harness.launch("m");
    assert_eq!(harness.gone("m").await, FailureCause::Exited(3));
    assert!(!lives(worker(folder.path()).await));
}

#[tokio::test]
async fn a_worker_that_left_the_group_is_found_by_its_mark() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("worker");
    let text = "setsid sh -c 'echo $$ > $0.new; mv $0.new $0; exec sleep 1000' $0 & wait";
    let model = script("m", &["sh", "-c", text, pid.to_str().unwrap()]);
    let mut harness = LocalPlatformHarness::new(vec![model]);
    harness.launch("m");
    let worker = worker(folder.path()).await;
    harness.stop("m", Millis::secs(5));
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
    assert!(!lives(worker));
}
