//! Finds a request's settings by searching its body for keys instead of parsing it.

use std::{str, time::Duration};

use memchr::memmem::Finder;

use crate::units;

/// Bytes at either end of a body that are searched for fields. A long text in the middle costs nothing.
const MAX_SCANNED_BYTES: usize = 4096;

/// A request's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FastRequest {
    pub(super) stream: bool,
    /// Events in a stream.
    pub(super) events: u32,
    /// Interval between two events.
    pub(super) interval: Duration,
    /// Delay before the response, or before a stream's first event.
    pub(super) engine_time: Duration,
}

/// The prepared search keys.
#[derive(Debug)]
pub(super) struct KeyFinders {
    stream: Finder<'static>,
    tokens: [Finder<'static>; 2],
    user: Finder<'static>,
}

impl KeyFinders {
    pub(super) fn new() -> Self {
        Self {
            stream: Finder::new(br#""stream""#),
            tokens: [Finder::new(br#""max_tokens""#), Finder::new(br#""max_completion_tokens""#)],
            user: Finder::new(br#""user""#),
        }
    }

    pub(super) fn parse(&self, ends: &BodyEnds<'_>) -> FastRequest {
        let find = |finder| ends.0.iter().find_map(|text| value(text, finder));
        let stream = find(&self.stream).is_some_and(|value| value.starts_with(b"true"));
        let mut ask =
            FastRequest { stream, events: 16, interval: Duration::ZERO, engine_time: Duration::ZERO };
        if stream && let Some(tokens) = self.tokens.iter().find_map(find).and_then(number) {
            ask.events = tokens;
        }
        if let Some(user) = find(&self.user).and_then(text) {
            ask.apply_user_settings(user);
        }
        ask
    }
}

impl FastRequest {
    /// Parses `interval=20ms,engine=1s`. Other text was not meant for this engine and is ignored.
    fn apply_user_settings(&mut self, user: &str) {
        for (name, value) in user.split(',').filter_map(|pair| pair.split_once('=')) {
            let Ok(value) = units::duration(value) else { continue };
            match name.trim() {
                "interval" => self.interval = value,
                "engine" => self.engine_time = value,
                _ => {}
            }
        }
    }
}

/// The value's first bytes after a real key; `"user"` can also be a value.
fn value<'a>(text: &'a [u8], key: &Finder<'_>) -> Option<&'a [u8]> {
    key.find_iter(text).find_map(|at| {
        let rest = text.get(at + key.needle().len()..)?.trim_ascii_start();
        Some(rest.strip_prefix(b":")?.trim_ascii_start())
    })
}

fn number(value: &[u8]) -> Option<u32> {
    let end = value.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(value.len());
    str::from_utf8(value.get(..end)?).ok()?.parse().ok()
}

fn text(value: &[u8]) -> Option<&str> {
    let rest = value.strip_prefix(b"\"")?;
    let end = memchr::memchr(b'"', rest)?;
    str::from_utf8(rest.get(..end)?).ok()
}

/// The parts of a body that contain its fields.
pub(super) struct BodyEnds<'a>([&'a [u8]; 2]);

impl<'a> BodyEnds<'a> {
    /// The ends of a complete body.
    pub(super) fn of_body(body: &'a [u8]) -> Self {
        match (
            body.get(..MAX_SCANNED_BYTES),
            body.len().checked_sub(MAX_SCANNED_BYTES).and_then(|at| body.get(at..)),
        ) {
            (Some(front), Some(back)) if body.len() > 2 * MAX_SCANNED_BYTES => Self([front, back]),
            _ => Self([body, &[]]),
        }
    }
}

/// The ends of a body that arrives in pieces.
#[derive(Debug, Default)]
pub(super) struct BodyEndsBuffer {
    front: Vec<u8>,
    /// The last bytes, overlapping `front`, so that no field is cut between the two.
    back: Vec<u8>,
}

impl BodyEndsBuffer {
    pub(super) fn add(&mut self, piece: &[u8]) {
        let room = (MAX_SCANNED_BYTES - self.front.len()).min(piece.len());
        self.front.extend_from_slice(piece.get(..room).unwrap_or_default());
        let last = piece.get(piece.len().saturating_sub(MAX_SCANNED_BYTES)..).unwrap_or_default();
        // Truncate occasionally rather than at each piece, since a body may arrive in many small pieces.
        if self.back.len() + last.len() > 4 * MAX_SCANNED_BYTES {
            self.back.drain(..self.back.len().saturating_sub(MAX_SCANNED_BYTES));
        }
        self.back.extend_from_slice(last);
    }

    pub(super) fn ends(&self) -> BodyEnds<'_> {
        BodyEnds([&self.front, &self.back])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAIL: &str = r#""}], "stream" : true,"max_tokens":250, "user":"interval=20ms,engine=1.5s"}"#;

    #[test]
    fn fields_are_found_on_both_sides_of_a_long_text_and_in_pieces() {
        let body =
            format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{}{TAIL}"#, "x".repeat(50_000));
        let expected = FastRequest {
            stream: true,
            events: 250,
            interval: Duration::from_millis(20),
            engine_time: Duration::from_millis(1500),
        };
        let finders = KeyFinders::new();
        assert_eq!(finders.parse(&BodyEnds::of_body(body.as_bytes())), expected);
        for size in [1, 7, 4095, 4096, 4097, 60_000] {
            let mut pieces = BodyEndsBuffer::default();
            body.as_bytes().chunks(size).for_each(|piece| pieces.add(piece));
            assert_eq!(finders.parse(&pieces.ends()), expected, "pieces of {size}");
        }
    }

    #[test]
    fn a_body_without_any_of_it_is_a_plain_request() {
        let ask = KeyFinders::new()
            .parse(&BodyEnds::of_body(br#"{"messages":[{"role":"user","content":"\"stream\":true"}]}"#));
        assert_eq!(
            ask,
            FastRequest { stream: false, events: 16, interval: Duration::ZERO, engine_time: Duration::ZERO }
        );
    }
}
