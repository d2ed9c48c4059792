//! The event stream.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::support::{launcher, until};

#[test]
fn watch_endpoint_content_type() {
    let launcher = launcher();
    let watch = launcher.watch("");
    assert!(
        watch.head.starts_with("HTTP/1.0 200") || watch.head.starts_with("HTTP/1.1 200"),
        "{}",
        watch.head
    );
    assert_eq!(watch.header("content-type"), Some("application/x-ndjson"));
    assert_eq!(watch.header("x-content-type-options"), Some("nosniff"));
}

#[test]
fn watch_without_since_sends_initial_state() {
    let launcher = launcher();
    launcher.run("existing-1", "exec sleep 100");
    launcher.run("existing-2", "exit 3");
    until("the second has ended", || launcher.instance("existing-2")["status"] == "stopped");
    let watch = launcher.watch("");
    let first = watch.event().unwrap();
    assert_eq!(
        first.line,
        concat!(
            r#"{"type":"CREATED","object":{"status":"running","instance_id":"existing-1","revision":1,"#,
            r#""options":"'exec sleep 100'","ready":false}}"#
        )
    );
    let second = watch.event().unwrap();
    assert_eq!(
        (&*second.named(), &second.json()["object"]["status"]),
        ("CREATED existing-2", &json!("stopped"))
    );
    launcher.run("new", "exec sleep 100");
    assert_eq!(watch.next(), "CREATED new");
}

#[test]
fn watch_with_since_streams_events() {
    let launcher = launcher();
    launcher.run("a", "exec sleep 100");
    launcher.run("b", "exec sleep 100");
    launcher.delete("/v2/vllm/instances/a");
    let revision = launcher.get("/v2/vllm/instances").json()["revision"].as_u64().unwrap();
    assert_eq!(revision, 3);
    let watch = launcher.watch("?since=1");
    assert_eq!((watch.next(), watch.next()), ("CREATED b".into(), "DELETED a".into()));
    // A watch from the current revision reports the following events.
    let (here, ahead) = (launcher.watch(&format!("?since={revision}")), launcher.watch("?since=4"));
    launcher.run("c", "exec sleep 100");
    launcher.run("d", "exec sleep 100");
    assert_eq!((here.next(), watch.next()), ("CREATED c".into(), "CREATED c".into()));
    assert_eq!(ahead.next(), "CREATED d");
}

#[test]
fn a_revision_that_is_not_kept_is_gone() {
    let launcher = launcher();
    let answer = launcher.get("/v2/vllm/instances/watch?since=-1");
    assert_eq!(answer.status, 410);
    assert!(answer.json()["detail"].as_str().unwrap().contains("the oldest is 0"), "{}", answer.text());
}

/// Fewer large events are kept than usual ones. A client that was away longer lists again.
#[test]
fn a_revision_that_fell_out_of_the_record_is_gone() {
    let launcher = launcher();
    let body = json!({"options": "'exec sleep 100'", "annotations": {"large": "x".repeat(2_000_000)}});
    for n in 0..6 {
        assert_eq!(launcher.put(&format!("i{n}"), &body).status, 201);
    }
    let path = |since: u64| format!("/v2/vllm/instances/watch?since={since}");
    let refused = |since: u64| {
        let answer = launcher.get(&path(since));
        assert_eq!(answer.status, 410);
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        let (_, oldest) = detail.split_once("the oldest is ").unwrap();
        oldest.split(':').next().unwrap().parse::<u64>().unwrap()
    };
    let oldest = refused(0);
    assert!((1..6).contains(&oldest), "{oldest}");
    assert_eq!(refused(oldest - 1), oldest);
    let watch = launcher.watch(&format!("?since={oldest}"));
    assert_eq!(watch.next(), format!("CREATED i{oldest}"));
    // A watch without a revision starts with all current instances.
    let watch = launcher.watch("");
    assert_eq!([(); 6].map(|()| watch.next()), [0, 1, 2, 3, 4, 5].map(|n| format!("CREATED i{n}")));
}

#[test]
fn sentinel_publishes_stopped_event() {
    let launcher = launcher();
    let watch = launcher.watch("");
    launcher.run("killed", "echo $$; exec sleep 100");
    launcher.run("failed", "exit 3");
    let pid = launcher.until_logged("killed", "\n").trim().parse().unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let mut stopped = Vec::new();
    while stopped.len() < 2 {
        let event = watch.event().unwrap().json();
        if event["type"] == "STOPPED" {
            let object = &event["object"];
            assert_eq!(object["status"], "stopped");
            stopped.push((
                object["instance_id"].as_str().unwrap().to_owned(),
                object["exit_code"].as_i64().unwrap(),
            ));
        }
    }
    stopped.sort();
    assert_eq!(stopped, [("failed".into(), 3), ("killed".into(), -9)]);
    // The instance is listed until it is deleted, and its exit code is reported once.
    let object = launcher.instance("failed");
    assert_eq!((&object["status"], object.get("exit_code")), (&json!("stopped"), None));
    assert_eq!(launcher.delete("/v2/vllm/instances/failed").json()["status"], "stopped");
    assert_eq!(watch.next(), "DELETED failed");
}

#[test]
fn sentinel_cancelled_on_explicit_stop() {
    let launcher = launcher();
    let watch = launcher.watch("");
    launcher.run("a", "exec sleep 100");
    assert_eq!(launcher.delete("/v2/vllm/instances/a").status, 200);
    launcher.run("b", "exec sleep 100");
    assert_eq!([watch.next(), watch.next(), watch.next()], ["CREATED a", "DELETED a", "CREATED b"]);
}

/// The median of several, since other processes use the machine too.
#[test]
fn a_killed_engine_is_told_within_50_ms() {
    let launcher = launcher();
    let watch = launcher.watch("");
    let mut took = Vec::new();
    for n in 0..7 {
        launcher.run(&format!("i{n}"), "echo $$; exec sleep 100");
        assert_eq!(watch.next(), format!("CREATED i{n}"));
        let pid = Pid::from_raw(launcher.until_logged(&format!("i{n}"), "\n").trim().parse().unwrap());
        let killed = tokio::time::Instant::now();
        kill(pid, Signal::SIGKILL).unwrap();
        let event = watch.event().unwrap();
        assert_eq!(event.named(), format!("STOPPED i{n}"));
        took.push((event.received_at - killed).as_millis());
    }
    took.sort_unstable();
    println!("from SIGKILL to the event, ms: {took:?}");
    assert!(took[took.len() / 2] <= 50, "{took:?}");
}
