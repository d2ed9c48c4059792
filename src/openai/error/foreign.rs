//! An engine's own refusal, when the stream's head has gone out already and there is no status left to give it.
//!
//! What the engine wrote is kept byte for byte where it can stand in an event; the SDKs raise an error for any datum
//! with a top-level `error`, so that is all that is made sure of.

use bytes::Bytes;
use http::StatusCode;
use serde::{Deserialize, de::IgnoredAny};

use super::{Envelope, Error};

#[derive(Deserialize)]
struct Seen {
    error: Option<IgnoredAny>,
}

/// The engine's answer with a status other than 2xx, as the last event of a stream.
pub(super) fn event(status: StatusCode, body: &[u8]) -> Bytes {
    let mut out = Vec::with_capacity(body.len() + 64);
    let is_object = body.trim_ascii_start().starts_with(b"{");
    match serde_json::from_slice::<Seen>(body) {
        Ok(Seen { error: Some(_) }) if is_object => lines(body, &mut out),
        Ok(Seen { error: None }) if is_object => {
            let mut wrapped = b"{\"error\":".to_vec();
            wrapped.extend_from_slice(body);
            wrapped.push(b'}');
            lines(&wrapped, &mut out);
        }
        _ => lines(&unreadable(status), &mut out),
    }
    out.push(b'\n');
    out.into()
}

/// A document over several lines is as many `data` lines.
fn lines(document: &[u8], out: &mut Vec<u8>) {
    let document = document.trim_ascii();
    for line in document.split(|byte| matches!(byte, b'\n' | b'\r')).filter(|line| !line.is_empty()) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(line);
        out.push(b'\n');
    }
}

/// No JSON: its status is all that can be told.
fn unreadable(status: StatusCode) -> Vec<u8> {
    let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
    let envelope = Envelope {
        error: Error {
            message: format!("the engine answered {}", status.as_u16()),
            kind,
            param: None,
            code: super::ENGINE_REFUSED,
            details: None,
        },
    };
    serde_json::to_vec(&envelope).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::openai::sse::Scanner;

    fn datum(body: &str) -> Value {
        let event = event(StatusCode::BAD_REQUEST, body.as_bytes());
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
}
