//! Launchers with answers that a real one does not give on demand. The test target `it` has a real one.

use std::net::SocketAddr;

use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::mpsc::Receiver,
    task::JoinHandle,
};

use super::*;

/// Longer than any step here takes.
const LONG: Duration = Duration::from_secs(30);
const HEAD: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";

/// Serves one connection per text, and is silent after the last; returns the requests.
async fn launcher(answers: Vec<String>) -> (SocketAddr, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (requests_tx, requests) = mpsc::channel(100);
    tokio::spawn(async move {
        let mut open = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = vec![0; 4096];
            let length = stream.read(&mut head).await.unwrap();
            let text = String::from_utf8_lossy(head.get(..length).unwrap()).into_owned();
            requests_tx.send(text).await.unwrap();
            // A client that has read enough hangs up.
            stream.write_all(answer.as_bytes()).await.ok();
            // A stream whose body has not ended stays open.
            if answer.starts_with(HEAD) && !answer.ends_with("0\r\n\r\n") {
                open.push(stream);
            }
        }
        std::future::pending::<()>().await;
    });
    (address, requests)
}

fn whole(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn list(revision: u64, ids: &[&str]) -> String {
    let instances: Vec<_> = ids.iter().map(|id| json!({"instance_id": id, "status": "running"})).collect();
    whole("200 OK", &json!({"revision": revision, "instances": instances}).to_string())
}

fn revision(revision: u64) -> String {
    whole("200 OK", &json!({"revision": revision, "instance_ids": [], "count": 0}).to_string())
}

/// A stream of these lines, which ends if `ends`.
fn stream(lines: &[String], ends: bool) -> String {
    let chunk = |line: &String| format!("{:x}\r\n{line}\n\r\n", line.len() + 1);
    let chunks: String = lines.iter().map(chunk).collect();
    format!("{HEAD}{chunks}{}", if ends { "0\r\n\r\n" } else { "" })
}

fn line(kind: &str, id: &str) -> String {
    let object = json!({"instance_id": id, "status": "stopped", "exit_code": -9});
    json!({"type": kind, "object": object}).to_string()
}

fn watch(address: SocketAddr) -> (Receiver<String>, JoinHandle<()>) {
    let (tx, events) = mpsc::channel(1);
    let task = tokio::spawn(async move {
        let launcher = LauncherClient::new(address, None, 7);
        launcher.watch(tx, |seen| named(&seen)).await;
    });
    (events, task)
}

fn named(seen: &LauncherWatchEvent) -> String {
    match seen {
        LauncherWatchEvent::Listed(all) => {
            let ids: Vec<_> = all.iter().map(|instance| instance.id.as_str()).collect();
            format!("listed {}", ids.join(" "))
        }
        LauncherWatchEvent::Created(instance) => format!("created {}", instance.id),
        LauncherWatchEvent::Updated(instance) => format!("updated {}", instance.id),
        LauncherWatchEvent::Stopped { instance, exit_code } => {
            format!("stopped {} {exit_code:?}", instance.id)
        }
        LauncherWatchEvent::Deleted(instance) => format!("deleted {}", instance.id),
        LauncherWatchEvent::Disconnected => "lost".to_owned(),
    }
}

async fn next<T>(from: &mut Receiver<T>) -> T {
    time::timeout(LONG, from.recv()).await.expect("nothing comes").expect("it has ended")
}

#[tokio::test]
async fn a_stream_begins_with_the_number_of_the_list_and_unknown_news_are_passed_over() {
    let lines = [
        line("CREATED", "b"),
        line("REPAINTED", "b"),
        line("UPDATED", "b"),
        line("STOPPED", "a"),
        line("DELETED", "a"),
    ];
    let (address, mut requests) = launcher(vec![list(17, &["a"]), stream(&lines, false), revision(19)]).await;
    let (mut events, task) = watch(address);
    for expected in ["listed a", "created b", "updated b", "stopped a Some(-9)", "deleted a"] {
        assert_eq!(next(&mut events).await, expected);
    }
    assert!(next(&mut requests).await.starts_with("GET /v2/vllm/instances HTTP/1.1\r\n"));
    let second = next(&mut requests).await;
    assert!(second.starts_with("GET /v2/vllm/instances/watch?since=17&ready=true HTTP/1.1\r\n"), "{second}");
    assert!(second.contains("x-rouse-epoch: 7\r\n"), "{second}");
    // The watch hangs up when its receiver closes, even without events.
    drop(events);
    time::timeout(LONG, task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_number_that_is_not_kept_any_more_leads_to_another_list_and_to_no_loss_that_nobody_saw() {
    let gone = whole("410 Gone", r#"{"detail":"list anew"}"#);
    let answers = vec![
        list(1, &["a"]),
        stream(&[], true),
        revision(1),
        list(1, &["a"]),
        gone,
        list(2000, &["a", "b"]),
        stream(&[line("CREATED", "c")], false),
        revision(2000),
    ];
    let (address, mut requests) = launcher(answers).await;
    let (mut events, _task) = watch(address);
    for expected in ["listed a", "lost", "listed a b", "created c"] {
        assert_eq!(next(&mut events).await, expected);
    }
    for since in ["", "/watch?since=1&", "?detail=false ", "", "/watch?since=1&", "", "/watch?since=2000&"] {
        let asked = next(&mut requests).await;
        assert!(asked.starts_with(&format!("GET /v2/vllm/instances{since}")), "{asked}: {since}");
    }
}

#[tokio::test]
async fn a_launcher_that_is_started_anew_between_its_list_and_its_stream_is_listed_anew() {
    let answers = vec![
        list(17, &["a"]),
        // The restarted launcher would send nothing before its eighteenth event.
        stream(&[], false),
        revision(2),
        list(2, &["b"]),
        stream(&[line("CREATED", "c")], false),
        revision(2),
    ];
    let (address, _asked) = launcher(answers).await;
    let (mut events, _task) = watch(address);
    for expected in ["lost", "listed b", "created c"] {
        assert_eq!(next(&mut events).await, expected);
    }
}

#[tokio::test]
async fn a_launcher_that_is_not_to_be_understood_is_lost_and_nothing_of_it_is_kept() {
    let long = format!("{{\"type\":\"{}\"}}", "x".repeat(MAX_LINE_BYTES));
    for bad in ["junk".to_owned(), r#"{"type":"CREATED"}"#.to_owned(), long] {
        let answers = vec![
            whole("200 OK", "[]"),
            list(1, &["a"]),
            stream(&[bad], false),
            revision(1),
            list(2, &[]),
            stream(&[], false),
            revision(2),
        ];
        let (address, _asked) = launcher(answers).await;
        let (mut events, _task) = watch(address);
        for expected in ["lost", "listed a", "lost", "listed "] {
            assert_eq!(next(&mut events).await, expected);
        }
    }
}

/// The public project's launcher has no `ready`.
#[tokio::test]
async fn an_engine_whose_launcher_does_not_say_so_is_seen_to_answer() {
    let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = engine.local_addr().unwrap().port().to_string();
    let object = |id: &str, status: &str| json!({"instance_id": id, "status": status, "annotations": {"inference-port": port}});
    let came = json!({"type": "CREATED", "object": object("b", "running")}).to_string();
    let instances = json!({"revision": 1, "instances": [object("a", "stopped")]});
    let answers = vec![whole("200 OK", &instances.to_string()), stream(&[came], false), revision(2)];
    let (address, _asked) = launcher(answers).await;
    let (mut events, _task) = watch(address);
    for expected in ["listed a", "created b"] {
        assert_eq!(next(&mut events).await, expected);
    }
    // The engine loads at first.
    for (status, body) in [("503 Loading", ""), ("200 OK", ""), ("200 OK", r#"{"is_sleeping":false}"#)] {
        let (mut stream, _) = engine.accept().await.unwrap();
        assert!(events.try_recv().is_err(), "it has not answered yet");
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
        stream.write_all(whole(status, body).as_bytes()).await.unwrap();
    }
    assert_eq!(next(&mut events).await, "updated b", "and not the one that does not run");
}
