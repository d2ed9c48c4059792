//! Requests that the gateway refuses because it shuts down.

use nix::sys::signal::Signal;

use super::refusal;
use crate::support::{
    GatewayFixture, SimModel,
    client::{chat_body, request},
};

const CHAT: &str = "/v1/chat/completions";

#[test]
fn those_who_still_wait_when_the_grace_is_over_are_told_that_it_goes() {
    let mut gateway = GatewayFixture::new(&["4Gi"])
        .settings("shutdown: {grace: 300ms}\nstream: {grace: 50ms, heartbeat: 50ms}")
        .model(&SimModel { flags: "--itl 20ms", ..SimModel::new("awake") })
        .model(&SimModel { flags: "--start-time 1h", ..SimModel::new("never") })
        .start();
    gateway.wake("awake");
    let open = |model, stream| gateway.client().open(request(CHAT, "", &chat_body(model, stream, 5000)));
    let parked = open("never", false);
    let mut beating = open("never", true);
    let mut running = open("awake", true);
    beating.until(" \n");
    running.until("data: ");
    gateway.signal(Signal::SIGTERM);
    let error = refusal(&parked.rest(), 503, "shutting_down");
    assert!(error["details"]["waited_for"].as_str().unwrap().contains("shutting down"), "{error}");
    for (open, code) in [(beating, "shutting_down"), (running, "shutting_down")] {
        let answer = open.rest();
        let last = answer.events().pop().unwrap();
        assert!(last.contains(code), "{last}");
        assert!(!answer.complete && !answer.text().contains("[DONE]"), "{}", answer.text());
    }
    assert_eq!(gateway.wait(), Some(0));
}

#[test]
fn what_finishes_within_the_grace_is_not_cut_and_kept_connections_are_closed() {
    let mut gateway = GatewayFixture::new(&["4Gi"])
        .model(&SimModel { flags: "--itl 20ms", ..SimModel::new("awake") })
        .start();
    gateway.wake("awake");
    let mut running = gateway.client().open(request(CHAT, "", &chat_body("awake", true, 30)));
    running.until("data: ");
    let mut idle = gateway.client().open("GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(idle.answer().status, 200);
    gateway.signal(Signal::SIGTERM);
    assert!(idle.closes());
    assert!(running.rest().is_whole_stream());
    assert_eq!(gateway.wait(), Some(0));
}
