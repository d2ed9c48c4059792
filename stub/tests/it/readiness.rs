//! `POST` and `DELETE /v1/readiness-url`.

use std::time::Duration;

use crate::support::{StubBuilder, StubProcess, engine::ProbedHttpServer, until, within};

const URL: &str = "/v1/readiness-url";

fn order(stub: &StubProcess, url: &str, more: &str) {
    let answer = stub.post(URL, &format!("{{\"url\": \"{url}\"{more}}}"));
    assert_eq!((answer.status, &*answer.text()), (200, "OK\n"));
}

fn poller(stub: &StubProcess) -> serde_json::Value {
    stub.get("debug", "/debug/state").json()["readiness"]["poller"].clone()
}

#[test]
fn an_engine_that_loads_is_ready_when_it_says_so() {
    let stub = StubBuilder::new().start();
    let engine = ProbedHttpServer::start(503);
    order(&stub, &engine.url(), "");
    until("it was asked often", || poller(&stub)["failures"].as_u64() > Some(20));
    assert!(!stub.ready());
    assert_eq!(poller(&stub)["last"], "status 503");
    engine.set(200);
    within("it is ready", Duration::from_secs(2), || stub.ready());
}

#[test]
fn a_thousand_flaps_of_the_engine_lose_none() {
    let stub = StubBuilder::new().start();
    let engine = ProbedHttpServer::start(503);
    order(&stub, &engine.url(), ", \"period\": 2, \"failureThreshold\": 2");
    for flap in 1..=1000 {
        let ready = flap % 2 == 1;
        engine.set(if ready { 200 } else { 503 });
        within("it is seen", Duration::from_secs(10), || stub.ready() == ready);
    }
    let metrics = stub.get("metrics", "/metrics").text();
    assert!(metrics.contains("\nrouse_stub_readiness_changes_total 1000\n"), "{metrics}");
}

#[test]
fn a_second_url_replaces_the_first_at_once_and_delete_ends_it() {
    let stub = StubBuilder::new().start();
    let (first, second) = (ProbedHttpServer::start(200), ProbedHttpServer::start(503));
    order(&stub, &first.url(), "");
    within("it is ready", Duration::from_secs(2), || stub.ready());
    order(&stub, &first.url(), "");
    assert!(stub.ready(), "the same place is as ready as it was");
    order(&stub, &second.url(), "");
    assert!(!stub.ready(), "of the other nothing is known yet");
    second.set(200);
    within("it is ready", Duration::from_secs(2), || stub.ready());
    assert_eq!(poller(&stub)["url"], second.url());

    let ended = stub.spi().send("DELETE", URL, "");
    assert_eq!((ended.status, &*ended.text()), (200, "OK\n"));
    assert!(!stub.ready());
    assert!(poller(&stub).is_null());
    assert_eq!(stub.post("/v1/become-ready", "").status, 200);
    assert!(stub.ready());
}

#[test]
fn what_may_not_be_polled_is_refused() {
    let stub = StubBuilder::new().start();
    for (body, why) in [
        ("not json", "the body is not"),
        ("[]", "the body is not"),
        (r#"{"url": 1}"#, "the body is not"),
        (r#"{"url": "https://10.0.0.1/"}"#, "the url must begin with http://"),
        (r#"{"url": "http://metadata.internal/"}"#, "the url must have an IP address"),
        (r#"{"url": "http://169.254.169.254/latest/"}"#, "a unicast address that a Pod can have"),
        (r#"{"url": "http://user:pass@10.0.0.1/"}"#, "the url must not contain a user name"),
        (r#"{"url": "http://10.0.0.1/", "period": 0}"#, "period must be"),
        (r#"{"url": "http://10.0.0.1/", "failureThreshold": 0}"#, "failureThreshold must be"),
    ] {
        let answer = stub.post(URL, body);
        let text = answer.text();
        assert_eq!(answer.status, 400, "{body}");
        assert!(text.contains(why), "{body}: {text}");
    }
    assert!(poller(&stub).is_null());
    let answer = stub.spi().send("PUT", URL, "");
    assert_eq!((answer.status, answer.header("allow")), (405, "POST,DELETE"));
}
