//! Requests that the gateway refuses for the size or the framing of their body.

use std::time::Duration;

use super::refusal;
use crate::support::{GatewayFixture, GatewayProcess, SimModel, client::request};

const CHAT: &str = "/v1/chat/completions";

fn gateway() -> GatewayProcess {
    GatewayFixture::new(&["2Gi"])
        .settings("limits: {body: 64Ki, bodyTotal: 96Ki, bodyRate: 1Mi}")
        .model(&SimModel { flags: "--start-time 1h", ..SimModel::new("small") })
        .start()
}

fn head(framing: &str) -> String {
    format!("POST {CHAT} HTTP/1.1\r\nHost: h\r\n{framing}\r\n\r\n")
}

fn of_size(bytes: usize) -> String {
    let start = r#"{"model":"small","messages":[{"role":"user","content":""#;
    let end = r#""}]}"#;
    format!("{start}{}{end}", "x".repeat(bytes - start.len() - end.len()))
}

#[test]
fn a_body_over_the_limit_is_413_however_it_is_framed_and_the_client_can_read_it() {
    let gateway = gateway();
    let names_the_limit = |error: serde_json::Value| {
        assert_eq!(error["message"], "the body is larger than limits.body (64Ki)");
    };
    // Much more than the sockets' buffers hold: the client is still writing when the gateway refuses the request.
    let whole = gateway.client().post(CHAT, &of_size(8 << 20));
    names_the_limit(refusal(&whole, 413, "body_too_large"));
    assert_eq!(whole.header("connection"), "close");

    let mut chunked = gateway.client().open(head("Transfer-Encoding: chunked"));
    let piece = "x".repeat(16 << 10);
    for _ in 0..5 {
        chunked.write(format!("{:x}\r\n{piece}\r\n", piece.len()));
    }
    chunked.until("limits.body");
    chunked.finish();
    names_the_limit(refusal(&chunked.rest(), 413, "body_too_large"));

    let asked = gateway.client().open(head("Content-Length: 100000\r\nExpect: 100-continue"));
    asked.finish();
    let mut asked = asked;
    asked.until("limits.body");
    assert!(!asked.has("100 Continue"), "{}", asked.text());
    names_the_limit(refusal(&asked.rest(), 413, "body_too_large"));
}

#[test]
fn a_client_that_asks_first_is_told_to_go_on() {
    let gateway = gateway();
    let mut open =
        gateway.client().open(head("Content-Length: 2\r\nExpect: 100-continue\r\nConnection: close"));
    open.until("HTTP/1.1 100 Continue\r\n\r\n");
    open.write("{}");
    refusal(&open.rest(), 400, "invalid_request");
}

#[test]
fn bodies_in_flight_are_counted_together_and_the_newest_is_refused() {
    let gateway = gateway();
    let parked = gateway.client().open(request(CHAT, "", &of_size(60 << 10)));
    gateway.until("parked", Duration::from_secs(5), || waiting(&gateway) == 1);
    let busy = gateway.client().post(CHAT, &of_size(60 << 10));
    let error = refusal(&busy, 429, "busy");
    assert_eq!(error["details"]["waited_for"], "memory for request bodies");
    // The memory of a client that left is released.
    drop(parked);
    gateway.until("left", Duration::from_secs(5), || waiting(&gateway) == 0);
    let again = gateway.client().open(request(CHAT, "", &of_size(60 << 10)));
    gateway.until("parked again", Duration::from_secs(5), || waiting(&gateway) == 1);
    drop(again);
}

#[test]
fn a_body_in_dribs_is_408() {
    let gateway = gateway();
    let mut open = gateway.client().open(head("Content-Length: 1000"));
    open.write("{");
    open.until("limits.bodyRate");
    refusal(&open.rest(), 408, "request_timeout");
    assert_eq!(waiting(&gateway), 0);
}

fn waiting(gateway: &GatewayProcess) -> u64 {
    gateway.fleet()["models"].as_array().unwrap().iter().filter_map(|model| model["waiting"].as_u64()).sum()
}
