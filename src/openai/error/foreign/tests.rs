use serde_json::{Value, json};

use super::*;
use crate::openai::sse::Scanner;

fn datum(body: &str) -> Value {
    let event = event(StatusCode::BAD_REQUEST, body.as_bytes(), Form::OpenAi);
    let mut scanner = Scanner::new();
    scanner.feed(&event);
    assert!(scanner.facts().error && scanner.at_border() && scanner.facts().events == 1, "{event:?}");
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
        assert_eq!(datum(body)["error"]["message"], "the engine answered 400", "{body}");
    }
}
