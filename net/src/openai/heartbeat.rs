//! Keeps a waiting stream alive with bytes that no client takes for the model's output.
//!
//! * **Chat, completions and the rest of OpenAI's APIs**: a line of one space. Hand-written readers strip their input
//!   and skip it when nothing remains: sglang's `bench_serving` and llmperf by line, vLLM's `bench serve` by read. They
//!   would parse a comment as JSON, or prepend it to the first event. To parsers of the standard, the line is a field
//!   without a colon and with an unknown name, which they ignore. The line must not be empty: some SDKs dispatch an
//!   event without data for an empty line, and then fail to parse nothing as JSON.
//! * **Responses**: a comment with one newline, which says how long the wait is still expected to take, if that is
//!   known. No hand-written reader of this API is known.
//! * **Messages**: Anthropic's own `ping` event, which its SDKs skip by name.
//! * **Responses, for clients whose parser drops comments before their idle timer sees them**: `response.in_progress`.
//!   This is opt-in, since the `responses.stream()` helpers of both OpenAI SDKs refuse every event before
//!   `response.created`, and an invented `response.created` would make them refuse the engine's own one, whose id
//!   differs. Clients that read raw events (`responses.create(stream=True)`) accept any event: the SDKs choose its
//!   class by `type` and check nothing else, and typed code reads `sequence_number` and `response.status`. The event
//!   has no other content, and in particular no id, since no response exists yet.

use bytes::Bytes;
use rouse::fleet::quote::WaitRange;

use super::ApiSchema;

const BLANK: &[u8] = b" \n";
const COMMENT: &[u8] = b": rouse\n";
const PING: &[u8] = b"event: ping\ndata: {\"type\": \"ping\"}\n\n";
const IN_PROGRESS: &[u8] =
    b"event: response.in_progress\ndata: {\"type\":\"response.in_progress\",\"sequence_number\":0,\
    \"response\":{\"object\":\"response\",\"status\":\"in_progress\",\"error\":null,\"output\":[]}}\n\n";

/// Returns the bytes to write between events while a stream waits. `events`: send an event instead of a comment on the
/// responses API. `waits`: the model and the rest of its expected wait, if that is known; read only for a comment.
pub fn heartbeat(
    schema: ApiSchema,
    events: bool,
    waits: impl FnOnce() -> Option<(String, WaitRange)>,
) -> Bytes {
    match schema {
        ApiSchema::Anthropic => Bytes::from_static(PING),
        ApiSchema::Responses if events => Bytes::from_static(IN_PROGRESS),
        ApiSchema::Responses => {
            waits().map_or(Bytes::from_static(COMMENT), |(model, wait)| comment(&model, wait))
        }
        ApiSchema::OpenAi => Bytes::from_static(BLANK),
    }
}

/// A comment of one line: a line break in the model's name would end it.
fn comment(model: &str, wait: WaitRange) -> Bytes {
    let model = model.replace(char::is_control, "\u{fffd}");
    format!(": waiting for {model}, about {wait} more\n").into()
}

#[cfg(test)]
mod tests {
    use rouse::units::Millis;

    use super::*;
    use crate::openai::sse::ResponseScanner;

    fn known() -> Option<(String, WaitRange)> {
        let wait = WaitRange { low: Millis(12_345), likely: Millis(15_000), high: Millis(19_001) };
        Some(("org/m\n\ndata: x".to_owned(), wait))
    }

    #[test]
    fn no_heartbeat_ends_a_stream_or_gives_it_an_id() {
        for (schema, events, count) in [
            (ApiSchema::OpenAi, false, 0),
            (ApiSchema::OpenAi, true, 0),
            (ApiSchema::Responses, false, 0),
            (ApiSchema::Responses, true, 1),
            (ApiSchema::Anthropic, false, 1),
        ] {
            for beat in [heartbeat(schema, events, || None), heartbeat(schema, events, known)] {
                let mut scanner = ResponseScanner::new();
                scanner.feed(&beat);
                let facts = *scanner.facts();
                assert_eq!(facts.events, count, "{schema:?}");
                assert!(!facts.done && !facts.error && facts.id.is_none(), "{schema:?}");
                // The heartbeat's line has ended, so an error event may follow it.
                scanner.feed(b"\n");
                assert!(scanner.at_event_boundary());
            }
        }
        for (schema, line) in [(ApiSchema::OpenAi, " \n"), (ApiSchema::Responses, ": rouse\n")] {
            assert_eq!(heartbeat(schema, false, || None), line.as_bytes(), "one newline");
        }
    }

    #[test]
    fn only_a_comment_says_how_long_the_wait_is_and_it_has_one_newline() {
        assert_eq!(
            heartbeat(ApiSchema::Responses, false, known),
            ": waiting for org/m\u{fffd}\u{fffd}data: x, about 12 to 20 s more\n".as_bytes()
        );
        assert_eq!(heartbeat(ApiSchema::OpenAi, false, known), BLANK);
        assert_eq!(heartbeat(ApiSchema::Anthropic, false, known), PING);
    }
}
