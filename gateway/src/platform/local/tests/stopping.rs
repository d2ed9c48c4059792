//! Tests that an engine counts as gone only when all its processes are.

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

#[tokio::test]
async fn commands_beyond_the_room_of_an_engine_s_task_wait_and_are_executed() {
    let folder = tempfile::tempdir().unwrap();
    let mut harness =
        LocalPlatformHarness::new(vec![with_worker(folder.path(), "while :; do sleep 5; done")]);
    harness.launch("m");
    // The task takes none before the process is launched.
    for _ in 0..10 * supervisor::MAX_PENDING_ENGINE_COMMANDS {
        harness.local.submit(Command::AwaitStub { engine: engine("m"), generation: FIRST });
    }
    harness.stop("m", Millis::ZERO);
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
