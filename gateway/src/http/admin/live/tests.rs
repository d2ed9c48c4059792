//! Tests the stream that feeds the page.

use rouse::{model::EngineId, units::Bytes};
use serde_json::{Value, json};

use super::*;
use crate::{
    driver::{TimelineEntry, TimelineKind},
    http::{
        admin::tests::{sources, start},
        testing::{
            CannedEngine, InProcessGateway, MODEL, PROMPT_TIMEOUT, RawHttpClient, completion_request,
            sse_response,
        },
    },
};

fn entry(at: u64) -> TimelineEntry {
    TimelineEntry {
        at: Tick(at),
        model: MODEL.into(),
        engine: Some(EngineId::new(MODEL.into(), 0)),
        what: TimelineKind::Evicted,
        cause: "for another".to_owned(),
        took: Some(Millis(2100)),
        freed: Some(Bytes::gib(1)),
    }
}

async fn open(gateway: &InProcessGateway) -> RawHttpClient {
    let at = start(gateway, None).await;
    let mut page = RawHttpClient::connect(at).await;
    page.send("GET /admin/v1/live HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    let head = page.read_response().await;
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    page
}

/// The next event, and its data.
async fn next(page: &mut RawHttpClient) -> (String, Value) {
    page.read_until(b"event: ").await;
    let text = String::from_utf8(page.read_until(b"\n\n").await).unwrap();
    let (event, data) = text.trim_end().split_once("\ndata: ").unwrap();
    (event.to_owned(), serde_json::from_str(data).unwrap())
}

/// The next snapshot that this holds for.
async fn snapshot(page: &mut RawHttpClient, holds: impl Fn(&Value) -> bool) -> Value {
    loop {
        let (event, data) = next(page).await;
        if event == "snapshot" && holds(&data) {
            return data;
        }
    }
}

#[tokio::test]
async fn a_page_gets_a_snapshot_then_what_happened_before_then_what_happens() {
    let gateway = InProcessGateway::start(|_| {});
    gateway.driver.timeline.add(entry(5));
    let mut page = open(&gateway).await;
    let (event, first) = next(&mut page).await;
    assert_eq!(event, "snapshot");
    assert!(first["at"].as_u64() >= Some(1_000_000), "{first}");
    assert_eq!((&first["gateway"], &first["leads"]), (&json!("gateway-0"), &json!(true)));
    assert_eq!((&first["requests"], &first["requestsTotal"]), (&json!([]), &json!(0)));
    assert!(first["fleet"]["accelerators"].is_array() && first["rates"].is_array());
    let expected = |at: u64| {
        json!({
            "at": at, "model": MODEL, "engine": "org/m#0", "what": "evicted", "cause": "for another",
            "took": 2100, "freed": 1_073_741_824_u64,
        })
    };
    assert_eq!(next(&mut page).await, ("timeline".to_owned(), expected(5)));
    gateway.driver.timeline.add(entry(6));
    assert_eq!(next(&mut page).await, ("timeline".to_owned(), expected(6)));
}

#[tokio::test]
async fn requests_are_shown_with_their_phase_also_those_that_began_before_the_page() {
    let mut gateway = InProcessGateway::start(|_| {});
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    let parked = gateway.next_parked().await;
    let mut page = open(&gateway).await;
    let waits = snapshot(&mut page, |now| now["requestsTotal"] == 1).await;
    let request = &waits["requests"][0];
    assert_eq!((&request["model"], &request["phase"]), (&json!(MODEL), &json!("parked")));
    assert_eq!((&request["route"], &request["key"]), (&json!("chat"), &Value::Null));
    assert!(request["since"].as_u64() >= request["started"].as_u64(), "{request}");
    let engine = CannedEngine::start(sse_response("{}")).await;
    let gate = gateway.open_gate();
    drop(parked.answer.send(Ok(gateway.grant(engine.address, &gate))));
    client.read_until(b"data: {}\n\n").await;
    let streams = snapshot(&mut page, |now| now["requests"][0]["phase"] == "streaming").await;
    assert_eq!(streams["requests"][0]["id"], request["id"]);
    assert!(streams["requests"][0]["since"].as_u64() >= request["since"].as_u64());
    drop(client);
    let ended = snapshot(&mut page, |now| now["requestsTotal"] == 0).await;
    assert_eq!(ended["requests"], json!([]));
}

#[tokio::test]
async fn without_a_page_nothing_is_computed_and_the_next_page_gets_a_new_snapshot() {
    let gateway = InProcessGateway::start(|_| {});
    let feed = LiveFeed::new(sources(&gateway, None, None));
    let mut reader = feed.subscribe();
    let first = reader.wait_for(|snapshot| snapshot.text.is_some()).await.unwrap().number;
    drop(reader);
    let ended = async {
        while *feed.is_publishing() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(4 * PROMPT_TIMEOUT, ended).await.expect("it still publishes");
    assert!(feed.snapshots.borrow().text.is_none());
    let mut next = feed.subscribe();
    let second = next.wait_for(|snapshot| snapshot.text.is_some()).await.unwrap().number;
    assert_eq!(second, first + 1);
}

#[tokio::test]
async fn a_page_that_comes_later_gets_a_snapshot_of_the_present_time() {
    let gateway = InProcessGateway::start(|_| {});
    let feed = LiveFeed::new(sources(&gateway, None, None));
    let mut numbers = Vec::new();
    let mut pages = Vec::new();
    for _ in 0..2 {
        let mut page = feed.subscribe();
        numbers.push(page.wait_for(|snapshot| snapshot.text.is_some()).await.unwrap().number);
        pages.push(page);
    }
    assert_eq!(numbers, [1, 2], "the second one is new, though nothing has changed");
}

#[tokio::test]
async fn a_snapshot_is_composed_only_when_something_has_changed() {
    let mut gateway = InProcessGateway::start(|_| {});
    let sources = sources(&gateway, None, None);
    let mut composer = SnapshotComposer::default();
    assert!(composer.compose(&sources).await.is_some(), "the first, in any case");
    assert_eq!(composer.compose(&sources).await, None);
    let mut client = gateway.connect().await;
    client.send(completion_request(true)).await;
    let _parked = gateway.next_parked().await;
    let changed = composer.compose(&sources).await.expect("a request waits");
    assert!(changed.contains("\"phase\":\"parked\""), "{changed}");
    assert_eq!(composer.compose(&sources).await, None);
}

#[tokio::test]
async fn a_page_that_is_too_slow_learns_how_much_it_missed() {
    let snapshot = |number: u64| Snapshot { number, text: Some(format!("{{\"n\":{number}}}").into()) };
    let snapshots = watch::Sender::new(snapshot(4));
    let timeline = Arc::<Timeline>::default();
    timeline.add(entry(1));
    let mut reader = LiveReader {
        snapshots: snapshots.subscribe(),
        last_snapshot: None,
        timeline_changes: timeline.changes(),
        timeline: Arc::clone(&timeline),
        next_entry: 0,
        pending: VecDeque::new(),
    };
    let shown = |event: Option<Event>| format!("{:?}", event.unwrap());
    assert!(shown(reader.next().await).contains("{\\\"n\\\":4}"), "the first is new, not missed");
    assert!(shown(reader.next().await).contains("timeline"));
    for number in 5..=8 {
        snapshots.send_replace(snapshot(number));
    }
    let missed = shown(reader.next().await);
    assert!(missed.contains("missed") && missed.contains("data: 3"), "{missed}");
    assert!(shown(reader.next().await).contains("{\\\"n\\\":8}"));
    (0..500).for_each(|at| timeline.add(entry(at)));
    let missed = shown(reader.next().await);
    assert!(missed.contains("missed") && missed.contains("data: 300"), "{missed}");
}
