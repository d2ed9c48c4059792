//! `POST` and `DELETE /v1/readiness-url`.

use std::{net::TcpListener, time::Duration};

use tokio::time::Instant;

use super::support::{Answer, Setting, Stub, engine::Engine, pause, until};

const URL: &str = "/v1/readiness-url";

fn order(stub: &Stub, url: &str, more: &str) {
    let answer = stub.post(URL, &format!("{{\"url\": \"{url}\"{more}}}"));
    assert_eq!((answer.status, &*answer.body), (200, "OK\n"));
}

fn poller(stub: &Stub) -> serde_json::Value {
    let state: serde_json::Value = serde_json::from_str(&stub.get("debug", "/debug/state").body).unwrap();
    state["readiness"]["poller"].clone()
}

#[test]
fn ready_within_20_ms_of_the_engines_first_good_answer() {
    let stub = Setting::new().start();
    for run in 0..20 {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = held.local_addr().unwrap();
        drop(held);
        order(&stub, &format!("http://{address}/health"), "");
        assert!(!stub.ready());
        until("it was refused", Duration::from_secs(5), || poller(&stub)["failures"].as_u64() > Some(5));
        let listens = Instant::now();
        let engine = Engine::on(TcpListener::bind(address).unwrap(), 200);
        while !stub.ready() {}
        let (seen, good) = (Instant::now(), engine.first_good().unwrap());
        assert!(seen - good <= Duration::from_millis(20), "run {run}: {:?} after the answer", seen - good);
        println!(
            "run {run}: asked {:?} after it listens, seen {:?} after its answer",
            good - listens,
            seen - good
        );
    }
}

#[test]
fn an_engine_that_loads_is_ready_when_it_says_so() {
    let stub = Setting::new().start();
    let engine = Engine::start(503);
    order(&stub, &engine.url(), "");
    pause(Duration::from_millis(300));
    assert!(!stub.ready());
    assert_eq!(poller(&stub)["last"], "status 503");
    engine.set(200);
    until("it is ready", Duration::from_secs(2), || stub.ready());
}

#[test]
fn unready_after_the_threshold_and_not_before() {
    let stub = Setting::new().start();
    let engine = Engine::start(200);
    order(&stub, &engine.url(), ", \"period\": \"200ms\", \"failureThreshold\": 4");
    until("it is ready", Duration::from_secs(2), || stub.ready());
    engine.set(500);
    let began = Instant::now();
    until("it is unready", Duration::from_secs(5), || !stub.ready());
    let took = began.elapsed();
    // Four questions, 200 ms apart.
    assert!(took >= Duration::from_millis(600) && took < Duration::from_millis(1500), "{took:?}");
}

#[test]
fn by_itself_the_period_is_a_second_and_the_threshold_three() {
    let stub = Setting::new().start();
    let engine = Engine::start(200);
    order(&stub, &engine.url(), "");
    until("it is ready", Duration::from_secs(2), || stub.ready());
    let poller = poller(&stub);
    assert_eq!((&poller["period"], &poller["failureThreshold"]), (&1000.into(), &3.into()));
    engine.set(500);
    let began = Instant::now();
    until("it is unready", Duration::from_secs(10), || !stub.ready());
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(2) && took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn a_thousand_flaps_of_the_engine_lose_none() {
    let stub = Setting::new().start();
    let engine = Engine::start(503);
    order(&stub, &engine.url(), ", \"period\": 2, \"failureThreshold\": 2");
    for flap in 1..=1000 {
        let ready = flap % 2 == 1;
        engine.set(if ready { 200 } else { 503 });
        until("it is seen", Duration::from_secs(10), || stub.ready() == ready);
    }
    let metrics = stub.get("metrics", "/metrics").body;
    assert!(metrics.contains("\nrouse_stub_readiness_changes_total 1000\n"), "{metrics}");
}

#[test]
fn a_second_url_replaces_the_first_at_once_and_delete_ends_it() {
    let stub = Setting::new().start();
    let (first, second) = (Engine::start(200), Engine::start(503));
    order(&stub, &first.url(), "");
    until("it is ready", Duration::from_secs(2), || stub.ready());
    order(&stub, &first.url(), "");
    assert!(stub.ready(), "the same place is as ready as it was");
    order(&stub, &second.url(), "");
    assert!(!stub.ready(), "of the other nothing is known yet");
    second.set(200);
    until("it is ready", Duration::from_secs(2), || stub.ready());
    assert_eq!(poller(&stub)["url"], second.url());

    let ended = stub.call("spi", "DELETE", URL, "");
    assert_eq!((ended.status, &*ended.body), (200, "OK\n"));
    assert!(!stub.ready());
    assert!(poller(&stub).is_null());
    assert_eq!(stub.post("/v1/become-ready", "").status, 200);
    assert!(stub.ready());
}

#[test]
fn what_may_not_be_polled_is_refused() {
    let stub = Setting::new().start();
    for (body, why) in [
        ("not json", "the body is not"),
        ("[]", "the body is not"),
        (r#"{"url": 1}"#, "the body is not"),
        (r#"{"url": "https://10.0.0.1/"}"#, "the url must begin with http://"),
        (r#"{"url": "http://metadata.internal/"}"#, "the url must have an IP address"),
        (r#"{"url": "http://169.254.169.254/latest/"}"#, "of one host that can be a Pod's"),
        (r#"{"url": "http://user:pass@10.0.0.1/"}"#, "the url may not name a user"),
        (r#"{"url": "http://10.0.0.1/", "period": 0}"#, "period must be"),
        (r#"{"url": "http://10.0.0.1/", "failureThreshold": 0}"#, "failureThreshold must be"),
    ] {
        let Answer { status, body: text, .. } = stub.post(URL, body);
        assert_eq!(status, 400, "{body}");
        assert!(text.contains(why), "{body}: {text}");
    }
    assert!(poller(&stub).is_null());
    let answer = stub.call("spi", "PUT", URL, "");
    assert_eq!((answer.status, &*answer.headers["allow"]), (405, "POST,DELETE"));
}
