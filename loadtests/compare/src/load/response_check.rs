//! Checks that received bytes are what the engine sent.

use engine_sim::fast::wire::{DONE, EventStamp, FastResponses};
use memchr::memmem;

use super::ResponseCheck;

/// Whether a non-streaming response's body is the engine's.
pub(super) fn is_expected_body(wire: &FastResponses, check: ResponseCheck, body: &[u8]) -> bool {
    match check {
        ResponseCheck::Bytes => body == wire.answer,
        ResponseCheck::Content => {
            let content_of = |body| {
                serde_json::from_slice(body).ok().and_then(|json: serde_json::Value| {
                    Some(json.pointer("/choices/0/message/content")?.as_str()?.to_owned())
                })
            };
            let content: Option<String> = content_of(body);
            content.is_some_and(|content| {
                memmem::find(&wire.answer, content.as_bytes()).is_some() && content.len() > 100
            })
        }
    }
}

/// Larger than any event; longer data without an end is invalid.
const MAX_EVENT_BYTES: usize = 64 << 10;

/// Checks the events of one stream in order.
#[derive(Clone, Debug)]
pub(super) struct EventChecker {
    check: ResponseCheck,
    expected: u32,
    next: u32,
    done: bool,
    /// The beginning of an incomplete event.
    partial: Vec<u8>,
}

/// The check's result for one event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CheckedEvent {
    /// The expected event, with its send time.
    Event { first: bool, sent_ns: u64 },
    /// An unexpected event.
    Wrong,
}

impl EventChecker {
    pub(super) fn new(check: ResponseCheck, expected: u32) -> Self {
        Self { check, expected, next: 0, done: false, partial: Vec::new() }
    }

    /// Consumes a piece of the body and reports each event that it completes.
    pub(super) fn feed(
        &mut self,
        wire: &FastResponses,
        mut piece: &[u8],
        mut on_event: impl FnMut(CheckedEvent),
    ) {
        while !piece.is_empty() {
            if !self.partial.is_empty() {
                // A delimiter may also be split, so search the combined bytes.
                let partial_length = self.partial.len();
                self.partial.extend_from_slice(piece);
                let Some(end) = memmem::find(&self.partial, b"\n\n") else {
                    if self.partial.len() > MAX_EVENT_BYTES {
                        self.partial.clear();
                        self.next += 1;
                        on_event(CheckedEvent::Wrong);
                    }
                    return;
                };
                let event = std::mem::take(&mut self.partial);
                piece = piece.get(end + 2 - partial_length..).unwrap_or_default();
                self.event(wire, event.get(..end + 2).unwrap_or_default(), &mut on_event);
                continue;
            }
            // Nearly always a complete event of the known length.
            let length = wire.event.len();
            let end = match piece.get(length - 2..length) {
                Some(b"\n\n") if self.check == ResponseCheck::Bytes => Some(length),
                _ => memmem::find(piece, b"\n\n").map(|end| end + 2),
            };
            let Some((event, rest)) = end.and_then(|end| piece.split_at_checked(end)) else {
                self.partial.extend_from_slice(piece);
                return;
            };
            self.event(wire, event, &mut on_event);
            piece = rest;
        }
    }

    fn event(&mut self, wire: &FastResponses, event: &[u8], on_event: &mut impl FnMut(CheckedEvent)) {
        if event == DONE && self.next == self.expected && !self.done {
            self.done = true;
            return;
        }
        // A comment is not an event. Gateways send comments so that clients do not time out during a long wait.
        if event.starts_with(b":") {
            return;
        }
        let stamp = match self.check {
            ResponseCheck::Bytes => wire.event.read(event),
            ResponseCheck::Content => {
                let Some(content) = content(event) else { return };
                EventStamp::read(content)
            }
        };
        match stamp {
            Some(stamp) if stamp.sequence == self.next && !self.done => {
                self.next += 1;
                on_event(CheckedEvent::Event { first: stamp.sequence == 0, sent_ns: stamp.sent_ns });
            }
            Some(stamp) => {
                // Count the gap once: later events are judged by their own position.
                self.next = stamp.sequence + 1;
                on_event(CheckedEvent::Wrong);
            }
            None => {
                self.next += 1;
                on_event(CheckedEvent::Wrong);
            }
        }
    }

    /// Events so far.
    pub(super) fn count(&self) -> u32 {
        self.next
    }

    /// Whether the stream is complete. Unexpected events were already reported.
    pub(super) fn complete(&self) -> bool {
        self.done && self.partial.is_empty() && self.next == self.expected
    }
}

/// An event's text, if it has any.
fn content(event: &[u8]) -> Option<&[u8]> {
    const KEY: &[u8] = b"\"content\":";
    let at = memmem::find(event, KEY)? + KEY.len();
    let text = event.get(at..)?.trim_ascii_start().strip_prefix(b"\"")?;
    (text.first() != Some(&b'"')).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(check: ResponseCheck, pieces: &[&[u8]]) -> (usize, usize, bool) {
        let mut events = EventChecker::new(check, 2);
        let (mut right, mut wrong) = (0, 0);
        for piece in pieces {
            events.feed(&FastResponses::new("m"), piece, |came| match came {
                CheckedEvent::Event { .. } => right += 1,
                CheckedEvent::Wrong => wrong += 1,
            });
        }
        (right, wrong, events.complete())
    }

    fn event(sequence: u32) -> Vec<u8> {
        FastResponses::new("m").event.stamped(EventStamp { sequence, sent_ns: 5 }).to_vec()
    }

    #[test]
    fn comments_are_no_events() {
        let (first, second) = (event(0), event(1));
        let pieces: [&[u8]; 5] = [b": wait\n\n", &first, b":\n\n", &second, DONE];
        assert_eq!(told(ResponseCheck::Bytes, &pieces), (2, 0, true));
    }

    #[test]
    fn json_that_was_written_anew_has_the_same_text() {
        let role = b"data: {\"choices\": [{\"delta\": {\"role\": \"assistant\", \"content\": \"\"}}]}\n\n";
        let [first, second] = [0, 1]
            .map(|nth| format!("data: {{\"delta\": {{\"content\": \"{nth:08} 00000000000000ff..\"}}}}\n\n"));
        let last = b"data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
        let pieces: [&[u8]; 5] = [role, first.as_bytes(), second.as_bytes(), last, DONE];
        assert_eq!(told(ResponseCheck::Content, &pieces), (2, 0, true));
        let pieces: [&[u8]; 3] = [second.as_bytes(), first.as_bytes(), DONE];
        assert_eq!(told(ResponseCheck::Content, &pieces), (0, 2, false));
    }

    #[test]
    fn what_never_ends_is_wrong_and_not_kept() {
        let noise = vec![b'x'; 10_000];
        let pieces: Vec<&[u8]> = (0..20).map(|_| &noise[..]).collect();
        let (right, wrong, complete) = told(ResponseCheck::Bytes, &pieces);
        assert_eq!((right, complete), (0, false));
        assert!(wrong >= 2);
    }

    #[test]
    fn the_end_alone_is_no_stream() {
        assert_eq!(told(ResponseCheck::Bytes, &[DONE]), (0, 1, false));
        let (first, second) = (event(0), event(1));
        assert_eq!(told(ResponseCheck::Bytes, &[&first, &second]), (2, 0, false));
        assert_eq!(told(ResponseCheck::Bytes, &[&first, &second, DONE, &second]), (2, 1, true));
    }

    #[test]
    fn an_answer_written_anew_is_judged_by_its_text() {
        let wire = FastResponses::new("m");
        let mut json: serde_json::Value = serde_json::from_slice(&wire.answer).unwrap();
        json["id"] = "other".into();
        let anew = json.to_string();
        assert!(
            is_expected_body(&wire, ResponseCheck::Bytes, &wire.answer)
                && !is_expected_body(&wire, ResponseCheck::Bytes, anew.as_bytes())
        );
        assert!(is_expected_body(&wire, ResponseCheck::Content, anew.as_bytes()));
        json["choices"][0]["message"]["content"] = "The same words".into();
        assert!(!is_expected_body(&wire, ResponseCheck::Content, json.to_string().as_bytes()));
    }
}
