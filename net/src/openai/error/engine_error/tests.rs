use serde_json::{Value, json};

use super::*;
use crate::openai::sse::ResponseScanner;

fn datum(body: &str) -> Value {
    let event = event(StatusCode::BAD_REQUEST, body.as_bytes(), ApiSchema::OpenAi);
    let mut scanner = ResponseScanner::new();
    scanner.feed(&event);
    assert!(scanner.facts().error && scanner.at_event_boundary() && scanner.facts().events == 1, "{event:?}");
    let text = std::str::from_utf8(&event).unwrap();
    let data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    serde_json::from_str(&data.join("\n")).unwrap()
}

#[test]
fn an_engines_envelope_is_kept_and_others_are_put_into_one() {
    assert_eq!(datum(r#"{"error":{"message":"x"}}"#), json!({"error": {"message": "x"}}));
    assert_eq!(datum("{\r\n \"error\":\n\n 7}\n"), json!({"error": 7}));
    assert_eq!(
        datum(r#"{"object":"error","message":"x"}"#),
        json!({"error": {"object": "error", "message": "x"}})
    );
    assert_eq!(datum(r#"{"error":null}"#), json!({"error": {"error": null}}));
}

#[test]
fn what_is_no_json_is_told_by_its_status() {
    for body in ["", "Bad Gateway", "[1]", "{\"error\":1"] {
        assert_eq!(datum(body)["error"]["message"], "the engine answered with status 400", "{body}");
    }
}

/// The data of the rendered events, parsed.
fn rendered_events(body: &str, schema: ApiSchema) -> Vec<Value> {
    let event = event(StatusCode::BAD_REQUEST, body.as_bytes(), schema);
    let mut scanner = ResponseScanner::new();
    scanner.feed(&event);
    assert!(scanner.facts().error && scanner.at_event_boundary(), "{event:?}");
    let events = std::str::from_utf8(&event).unwrap().split("\n\n").filter(|event| !event.is_empty());
    let datum = |event: &str| {
        let data: Vec<&str> = event.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        serde_json::from_str(&data.join("\n")).unwrap()
    };
    events.map(datum).collect()
}

#[test]
fn on_the_messages_api_it_stands_in_anthropics_envelope() {
    let theirs = r#"{"type":"error","error":{"type":"x_error","message":"y","z":1}}"#;
    assert_eq!(
        rendered_events(theirs, ApiSchema::Anthropic),
        [serde_json::from_str::<Value>(theirs).unwrap()]
    );
    assert_eq!(
        rendered_events(
            "{\n\"error\":{\r\n\"type\":\"BadRequest\",\"message\":\"y\",\"code\":400}}",
            ApiSchema::Anthropic
        ),
        [json!({"type": "error", "error": {"type": "BadRequest", "message": "y", "code": 400}})]
    );
    assert_eq!(
        rendered_events(r#"{"detail":"Not Found"}"#, ApiSchema::Anthropic),
        [json!({"type": "error", "error": {
            "type": "invalid_request_error", "message": "the engine answered with status 400", "details": {"detail": "Not Found"},
        }})]
    );
    assert_eq!(
        rendered_events(r#"{"error":"no"}"#, ApiSchema::Anthropic),
        [
            json!({"type": "error", "error": {"type": "invalid_request_error", "message": "no", "details": "no"}})
        ]
    );
    assert_eq!(rendered_events("<html>", ApiSchema::Anthropic)[0]["error"]["type"], "invalid_request_error");
}

#[test]
fn on_the_responses_api_its_text_is_in_both_last_events() {
    let events = rendered_events(
        "{\"error\":{\n\"message\":\"y\",\"code\":400,\"param\":\"input\"}}",
        ApiSchema::Responses,
    );
    assert_eq!(
        events[0],
        json!({
            "type": "error", "sequence_number": 0, "code": "400", "message": "y", "param": "input",
            "error": {"message": "y", "code": 400, "param": "input"},
        })
    );
    assert_eq!(events[1]["type"], "response.failed");
    assert_eq!(events[1]["response"]["error"], json!({"code": "400", "message": "y"}));
    assert_eq!(events.len(), 2);
}
