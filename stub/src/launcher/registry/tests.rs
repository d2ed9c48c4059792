use super::*;
use crate::launcher::{body, events::MAX_EVENTS, supervisor};

struct RegistryFixture {
    dir: tempfile::TempDir,
    registry: Arc<InstanceRegistry>,
}

impl RegistryFixture {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), registry: Arc::default() }
    }

    fn create(&self, id: &str) -> String {
        let reservation = self.registry.reserve(id, usize::MAX).unwrap();
        let log = Arc::new(InstanceLog::create(self.dir.path(), id).unwrap());
        let spec = InstanceSpec { options: "--model m".into(), ..InstanceSpec::default() };
        self.registry.add_started(reservation, spec, supervisor::stop_channel().0, log)
    }

    fn watched(&self, last_seen: EventRevision, updates: bool) -> Vec<String> {
        match self.registry.events_after(last_seen, updates) {
            WatchStep::Lines(lines, _) => {
                String::from_utf8(lines.to_vec()).unwrap().lines().map(kind).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Renders an event as `CREATED a`.
fn kind(line: &str) -> String {
    let event: serde_json::Value = serde_json::from_str(line).unwrap();
    format!("{} {}", event["type"].as_str().unwrap(), event["object"]["instance_id"].as_str().unwrap())
}

#[test]
fn create_instance_custom_id() {
    let shown =
        r#"{"status":"running","instance_id":"custom-id","revision":1,"options":"--model m","ready":false}"#;
    let fixture = RegistryFixture::new();
    assert_eq!(fixture.create("custom-id"), shown);
    assert_eq!(fixture.registry.status("custom-id").unwrap(), shown);
}

#[test]
fn create_instance_duplicate_id() {
    let fixture = RegistryFixture::new();
    fixture.create("duplicate-id");
    let exists = LauncherRejection::Exists("duplicate-id".into());
    assert_eq!(fixture.registry.reserve("duplicate-id", usize::MAX).unwrap_err(), exists);
    // Two starts cannot reserve the same id either.
    let first = fixture.registry.reserve("x", usize::MAX).unwrap();
    assert_eq!(fixture.registry.reserve("x", usize::MAX).unwrap_err(), LauncherRejection::Exists("x".into()));
    assert!(!fixture.registry.ids().contains("\"x\""));
    drop(first);
    fixture.registry.reserve("x", usize::MAX).unwrap();
}

#[test]
fn stop_nonexistent_instance() {
    let fixture = RegistryFixture::new();
    let unknown = LauncherRejection::Unknown("nonexistent-id".into());
    assert_eq!(fixture.registry.stop_handle("nonexistent-id").unwrap_err(), unknown);
    assert_eq!(fixture.registry.status("nonexistent-id").unwrap_err(), unknown);
    assert_eq!(fixture.registry.log("nonexistent-id").unwrap_err(), unknown);
}

#[test]
fn get_all_instances_status() {
    let fixture = RegistryFixture::new();
    fixture.create("id-2");
    fixture.create("id-1");
    fixture.registry.mark_stopped("id-2", Some(1));
    assert_eq!(
        fixture.registry.list(),
        concat!(
            r#"{"revision":3,"total_instances":2,"running_instances":1,"instances":["#,
            r#"{"status":"stopped","instance_id":"id-2","revision":3,"options":"--model m","ready":false},"#,
            r#"{"status":"running","instance_id":"id-1","revision":2,"options":"--model m","ready":false}]}"#
        )
    );
}

#[test]
fn list_instances() {
    let fixture = RegistryFixture::new();
    assert_eq!(fixture.registry.ids(), r#"{"revision":0,"instance_ids":[],"count":0}"#);
    fixture.create("id-2");
    fixture.create("id-1");
    assert_eq!(fixture.registry.ids(), r#"{"revision":2,"instance_ids":["id-2","id-1"],"count":2}"#);
}

#[test]
fn publish_assigns_sequential_revisions() {
    let fixture = RegistryFixture::new();
    fixture.create("a");
    fixture.registry.set_ready("a", true);
    fixture.registry.set_ready("a", true);
    fixture.registry.mark_stopped("a", Some(-9));
    let last = fixture.registry.remove("a");
    assert_eq!(
        last,
        r#"{"status":"stopped","instance_id":"a","revision":4,"options":"--model m","ready":false}"#
    );
    assert_eq!(fixture.watched(0, false), ["CREATED a", "STOPPED a", "DELETED a"]);
    assert_eq!(fixture.watched(1, true), ["UPDATED a", "STOPPED a", "DELETED a"]);
    assert_eq!(fixture.watched(3, true), ["DELETED a"]);
    assert!(fixture.registry.is_empty());
}

#[test]
fn stopped_events_carry_the_exit_code() {
    let fixture = RegistryFixture::new();
    fixture.create("a");
    fixture.registry.mark_stopped("a", Some(-9));
    let WatchStep::Lines(lines, 2) = fixture.registry.events_after(1, false) else { panic!() };
    assert_eq!(
        String::from_utf8(lines.to_vec()).unwrap(),
        concat!(
            r#"{"type":"STOPPED","object":{"status":"stopped","instance_id":"a","revision":2,"#,
            r#""options":"--model m","exit_code":-9,"ready":false}}"#,
            "\n"
        )
    );
}

#[test]
fn a_snapshot_and_the_watch_from_there_miss_nothing() {
    let fixture = RegistryFixture::new();
    fixture.create("a");
    fixture.create("b");
    fixture.registry.remove("a");
    let (lines, last_seen) = fixture.registry.snapshot();
    assert_eq!(
        String::from_utf8(lines.to_vec()).unwrap().lines().map(kind).collect::<Vec<_>>(),
        ["CREATED b"]
    );
    assert_eq!(fixture.registry.events_after(last_seen, true), WatchStep::Wait);
    fixture.create("c");
    assert_eq!(fixture.watched(last_seen, false), ["CREATED c"]);
}

#[test]
fn what_ends_starts_nothing_more_and_lets_watchers_go() {
    let fixture = RegistryFixture::new();
    fixture.registry.stop_accepting();
    assert_eq!(fixture.registry.reserve("a", usize::MAX).unwrap_err(), LauncherRejection::ShuttingDown);
    assert_eq!(fixture.registry.events_after(0, false), WatchStep::Wait);
    fixture.registry.end_watches();
    assert_eq!(fixture.registry.events_after(0, false), WatchStep::End);
}

#[tokio::test]
async fn multiple_watchers() {
    let fixture = RegistryFixture::new();
    let watch = |updates| body::watch_body(Arc::clone(&fixture.registry), Bytes::new(), (0, updates), None);
    let watchers = [watch(false), watch(true)];
    // Let the watchers block before the first event.
    tokio::task::yield_now().await;
    fixture.create("1");
    fixture.registry.mark_stopped("1", Some(0));
    fixture.registry.end_watches();
    for watcher in watchers {
        let all = http_body_util::BodyExt::collect(watcher).await.unwrap().to_bytes();
        let text = String::from_utf8(all.to_vec()).unwrap();
        assert_eq!(text.lines().map(kind).collect::<Vec<_>>(), ["CREATED 1", "STOPPED 1"]);
    }
}

/// The watcher gets the lines that were already sent, then a normal end of stream.
#[tokio::test]
async fn a_watcher_that_falls_behind_is_closed_silently() {
    let fixture = RegistryFixture::new();
    let watcher = body::watch_body(Arc::clone(&fixture.registry), Bytes::new(), (0, false), None);
    for n in 0..3 {
        // Without a reader, one line waits in the channel and the next is held by the sender.
        fixture.create(&format!("early-{n}"));
        tokio::task::yield_now().await;
    }
    for n in 0..=MAX_EVENTS {
        fixture.create(&format!("{n}"));
    }
    let all = http_body_util::BodyExt::collect(watcher).await.unwrap().to_bytes();
    let text = String::from_utf8(all.to_vec()).unwrap();
    assert_eq!(text.lines().map(kind).collect::<Vec<_>>(), ["CREATED early-0", "CREATED early-1"]);
}
