//! Whether what came is what the engine sent.

use engine_sim::fast::wire::{DONE, Stamp, Wire};
use memchr::memmem;

use super::Check;

/// Whether a non-streaming answer's body is the engine's.
pub(super) fn whole(wire: &Wire, check: Check, body: &[u8]) -> bool {
    match check {
        Check::Bytes => body == wire.answer,
        Check::Content => {
            let said = |body| {
                serde_json::from_slice(body).ok().and_then(|json: serde_json::Value| {
                    Some(json.pointer("/choices/0/message/content")?.as_str()?.to_owned())
                })
            };
            let said: Option<String> = said(body);
            said.is_some_and(|said| memmem::find(&wire.answer, said.as_bytes()).is_some() && said.len() > 100)
        }
    }
}

/// The events of one stream, one after the other.
#[derive(Clone, Debug)]
pub(super) struct Events {
    check: Check,
    expected: u32,
    next: u32,
    done: bool,
    /// The part of an event that came without its end.
    partial: Vec<u8>,
}

/// What an event was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    /// The one expected, sent then.
    Event { first: bool, sent_ns: u64 },
    /// Not what belongs there.
    Wrong,
}

impl Events {
    pub(super) fn new(check: Check, expected: u32) -> Self {
        Self { check, expected, next: 0, done: false, partial: Vec::new() }
    }

    /// Takes a piece of the body, and tells of each event that it completed.
    pub(super) fn take(&mut self, wire: &Wire, mut piece: &[u8], mut tell: impl FnMut(Came)) {
        while !piece.is_empty() {
            if !self.partial.is_empty() {
                // An end may be cut in two as well, so it is sought in what both make.
                let had = self.partial.len();
                self.partial.extend_from_slice(piece);
                let Some(end) = memmem::find(&self.partial, b"\n\n") else {
                    return;
                };
                let event = std::mem::take(&mut self.partial);
                piece = piece.get(end + 2 - had..).unwrap_or_default();
                self.event(wire, event.get(..end + 2).unwrap_or_default(), &mut tell);
                continue;
            }
            // Nearly always an event of the known length comes whole.
            let length = wire.event.len();
            let end = match piece.get(length - 2..length) {
                Some(b"\n\n") if self.check == Check::Bytes => Some(length),
                _ => memmem::find(piece, b"\n\n").map(|end| end + 2),
            };
            let Some((event, rest)) = end.and_then(|end| piece.split_at_checked(end)) else {
                self.partial.extend_from_slice(piece);
                return;
            };
            self.event(wire, event, &mut tell);
            piece = rest;
        }
    }

    fn event(&mut self, wire: &Wire, event: &[u8], tell: &mut impl FnMut(Came)) {
        if event == DONE && self.next == self.expected && !self.done {
            self.done = true;
            return;
        }
        // A comment is no event: gateways send them so that nobody takes a long wait for an end.
        if event.starts_with(b":") {
            return;
        }
        let stamp = match self.check {
            Check::Bytes => wire.event.read(event),
            Check::Content => {
                let Some(content) = content(event) else { return };
                Stamp::read(content)
            }
        };
        match stamp {
            Some(stamp) if stamp.sequence == self.next && !self.done => {
                self.next += 1;
                tell(Came::Event { first: stamp.sequence == 0, sent_ns: stamp.sent_ns });
            }
            Some(stamp) => {
                // Counted once: what follows is judged by its own place.
                self.next = stamp.sequence + 1;
                tell(Came::Wrong);
            }
            None => {
                self.next += 1;
                tell(Came::Wrong);
            }
        }
    }

    /// Events so far.
    pub(super) fn came(&self) -> u32 {
        self.next
    }

    /// Whether all of the stream came, and nothing else.
    pub(super) fn complete(&self) -> bool {
        self.done && self.partial.is_empty() && self.next == self.expected
    }
}

/// An event's text, when it has any.
fn content(event: &[u8]) -> Option<&[u8]> {
    const KEY: &[u8] = b"\"content\":";
    let at = memmem::find(event, KEY)? + KEY.len();
    let text = event.get(at..)?.trim_ascii_start().strip_prefix(b"\"")?;
    (text.first() != Some(&b'"')).then_some(text)
}
