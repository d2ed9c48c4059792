//! Tracks the position in a stream of server-sent events, wherever the network cuts it.
//!
//! The scanner only observes the stream. It determines whether the last byte ended an event (only there may a gateway
//! write an event of its own), how many events carried data, whether the stream came to its own end or to an error, the
//! response's id, and its usage. A frame may be megabytes (one line with a whole tool call), so none of it is kept: a
//! state of fixed size, about two hundred bytes, follows the line and its JSON.
//!
//! **Every API at once.** A stream of chat ends with `[DONE]`, one of messages with `message_stop`, one of responses
//! with one of three events, and no API uses another's words for anything else. So the scanner needs no API to be set.
//! Clients use the event's name on one API and the `type` in its data on another: either counts.
//!
//! Only top-level members of an event's JSON count: `usage` and `error` inside a message's text are text. A key that is
//! written with escapes is legal JSON, but no engine writes it, and the scanner does not recognize it.
//!
//! Nearly every event arrives whole and has nothing of interest. An event without any of the relevant words is only
//! counted; see `fast_path`. Every other event is followed byte by byte, and only that decides.

use memchr::{memchr, memchr2};

mod document;
mod fast_path;
mod json;
mod keyword;

use json::JsonScanner;
use keyword::{KeywordBuffer, StreamEnd};

/// The facts that a stream has shown so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseFacts {
    /// Events that carried data, `[DONE]` not counted.
    pub events: u64,
    /// The stream came to its own end: `[DONE]`, or the last event of an API that has one. Or the document is whole.
    pub done: bool,
    /// The engine sent an error event.
    pub error: bool,
    /// The latest count of each kind.
    pub usage: Option<TokenUsage>,
    /// [`stable_hash`](super::stable_hash) of the response's id: the first `id` at the top, or in its `response` or
    /// `message`.
    pub id: Option<u64>,
}

/// Token counts, as the engine reported them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    pub prompt: u64,
    pub completion: u64,
}

/// Follows one stream, or one document.
#[derive(Debug, Default)]
pub struct ResponseScanner {
    facts: ResponseFacts,
    /// The input is a single JSON document and has no lines.
    is_document: bool,
    line: SseLineState,
    /// The last byte was a CR: an LF right after it belongs to the same line end.
    after_cr: bool,
    /// The current event has at least one line.
    in_event: bool,
    /// The meaning of the current event's name.
    name_end: StreamEnd,
    data: EventDataState,
    json: JsonScanner,
}

/// The kind of the current line, as far as read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SseLineState {
    /// In the field's name, after `at` bytes of it. `may` has a bit for each name that it can still become.
    Name {
        at: u8,
        may: u8,
    },
    /// After `data:`, before the optional space.
    DataSpace,
    Data,
    EventSpace,
    /// In the value of `event:`.
    Event(KeywordBuffer),
    /// A comment or a field of no interest.
    Other,
}

/// The state of the current event's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum EventDataState {
    #[default]
    None,
    /// The first bytes of `[DONE]`, this many, and nothing else.
    Done(u8),
    Json,
}

const DATA: &[u8] = b"data";
const EVENT: &[u8] = b"event";
const DONE: &[u8] = b"[DONE]";
const CANDIDATE_DATA: u8 = 1;
const CANDIDATE_EVENT: u8 = 2;

impl ResponseScanner {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A scanner for a response that is one JSON document. It has no events, and no event may be written into it.
    #[must_use]
    pub fn for_json() -> Self {
        Self { is_document: true, ..Self::default() }
    }

    #[must_use]
    pub const fn facts(&self) -> &ResponseFacts {
        &self.facts
    }

    /// Reports whether no event is in progress, so that another one may be written here.
    #[must_use]
    pub const fn at_event_boundary(&self) -> bool {
        !self.is_document && !self.in_event && matches!(self.line, SseLineState::Name { at: 0, .. })
    }

    /// Processes the next bytes, which may be cut anywhere.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        if self.is_document {
            match self.json.is_untouched().then(|| document::read(bytes)).flatten() {
                Some(read) => self.json = read,
                None => self.json.feed(bytes),
            }
            self.facts.done |= self.json.complete;
            return self.merge_json();
        }
        while let Some((&byte, rest)) = bytes.split_first() {
            if byte != b'\n'
                && self.at_event_boundary()
                && let Some(rest) = self.skip_plain_event(bytes)
            {
                bytes = rest;
                continue;
            }
            bytes = match byte {
                b'\n' | b'\r' => {
                    let second = byte == b'\n' && self.after_cr;
                    self.after_cr = byte == b'\r';
                    if !second {
                        self.end_line();
                    }
                    rest
                }
                _ => {
                    self.after_cr = false;
                    self.in_line(bytes)
                }
            };
        }
    }

    /// Skips an event at the beginning of `bytes` that needs only counting, and returns the rest. Call this between two
    /// events.
    fn skip_plain_event<'a>(&mut self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let mut rest = bytes;
        if let Some(line) = bytes.strip_prefix(b"event: ") {
            let (name, after) = line.split_at(memchr(b'\n', line)?);
            if keyword::classify(name) != StreamEnd::NotLast || name.contains(&b'\r') {
                return None;
            }
            rest = after.get(1..)?;
        }
        let datum = rest.strip_prefix(b"data: {")?;
        let (datum, after) = datum.split_at(memchr2(b'\n', b'\r', datum)?);
        let rest = after.strip_prefix(b"\n\n")?;
        if !fast_path::has_nothing_of_interest(datum, self.facts.id.is_some()) {
            return None;
        }
        self.after_cr = false;
        self.facts.events += 1;
        Some(rest)
    }

    /// Consumes some of `bytes`, which begin inside a line, and returns the rest.
    fn in_line<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        // The beginning of nearly every line, and usually the whole line has arrived.
        if let (SseLineState::Name { at: 0, .. }, Some(rest)) = (self.line, bytes.strip_prefix(b"data: ")) {
            self.in_event = true;
            self.begin_data();
            self.line = SseLineState::Data;
            return rest;
        }
        if !matches!(
            (self.line, self.data),
            (SseLineState::Other, _) | (SseLineState::Data, EventDataState::Json)
        ) {
            let Some((&byte, rest)) = bytes.split_first() else { return bytes };
            self.byte(byte);
            return rest;
        }
        let (line, rest) = bytes.split_at(memchr2(b'\n', b'\r', bytes).unwrap_or(bytes.len()));
        if self.line == SseLineState::Data {
            self.json.feed(line);
        }
        rest
    }

    fn byte(&mut self, byte: u8) {
        match &mut self.line {
            SseLineState::Name { at, may } => {
                let (at, may) = (*at, *may);
                self.name(byte, at, may);
            }
            SseLineState::DataSpace => {
                self.line = SseLineState::Data;
                if byte != b' ' {
                    self.feed_data_byte(byte);
                }
            }
            SseLineState::Data => self.feed_data_byte(byte),
            SseLineState::EventSpace => {
                let mut word = KeywordBuffer::default();
                if byte != b' ' {
                    word.push(byte);
                }
                self.line = SseLineState::Event(word);
            }
            SseLineState::Event(word) => word.push(byte),
            SseLineState::Other => {}
        }
    }

    fn name(&mut self, byte: u8, at: u8, may: u8) {
        self.in_event = true;
        let place = usize::from(at);
        if byte == b':' {
            self.line = if may & CANDIDATE_DATA != 0 && place == DATA.len() {
                self.begin_data();
                SseLineState::DataSpace
            } else if may & CANDIDATE_EVENT != 0 && place == EVENT.len() {
                SseLineState::EventSpace
            } else {
                SseLineState::Other
            };
            return;
        }
        let mut left = 0;
        if may & CANDIDATE_DATA != 0 && DATA.get(place) == Some(&byte) {
            left |= CANDIDATE_DATA;
        }
        if may & CANDIDATE_EVENT != 0 && EVENT.get(place) == Some(&byte) {
            left |= CANDIDATE_EVENT;
        }
        self.line =
            if left == 0 { SseLineState::Other } else { SseLineState::Name { at: at + 1, may: left } };
    }

    /// Begins a `data` line. A second one continues the first after a line end, which is white space in JSON.
    fn begin_data(&mut self) {
        self.data = match self.data {
            EventDataState::None => EventDataState::Done(0),
            EventDataState::Done(matched) => {
                self.replay_as_json(matched);
                EventDataState::Json
            }
            EventDataState::Json => EventDataState::Json,
        };
    }

    fn feed_data_byte(&mut self, byte: u8) {
        match self.data {
            EventDataState::Done(matched) if DONE.get(usize::from(matched)) == Some(&byte) => {
                self.data = EventDataState::Done(matched + 1);
            }
            EventDataState::Done(matched) => {
                self.data = EventDataState::Json;
                self.replay_as_json(matched);
                self.json.feed(&[byte]);
            }
            EventDataState::Json => self.json.feed(&[byte]),
            EventDataState::None => {}
        }
    }

    /// Feeds the JSON scanner the bytes that matched `[DONE]` so far: they were the beginning of an array.
    fn replay_as_json(&mut self, matched: u8) {
        self.json.feed(DONE.get(..usize::from(matched)).unwrap_or_default());
    }

    fn end_line(&mut self) {
        match self.line {
            SseLineState::Name { at: 0, .. } => return self.end_event(),
            // The last name counts.
            SseLineState::Event(word) => self.name_end = word.stream_end(),
            _ => {}
        }
        self.line = SseLineState::default();
    }

    fn end_event(&mut self) {
        self.in_event = false;
        let named = std::mem::take(&mut self.name_end);
        match std::mem::take(&mut self.data) {
            // An error event without data is an error nevertheless.
            EventDataState::None if named != StreamEnd::Failure => return,
            EventDataState::None => {}
            EventDataState::Done(matched) if usize::from(matched) == DONE.len() => {
                self.facts.done = true;
                return;
            }
            EventDataState::Done(_) | EventDataState::Json => self.facts.events += 1,
        }
        self.merge_json();
        let typed = std::mem::take(&mut self.json).stream_end();
        self.facts.done |= named == StreamEnd::Complete || typed == StreamEnd::Complete;
        self.facts.error |= named == StreamEnd::Failure || typed == StreamEnd::Failure;
    }

    /// Merges the facts from the current document.
    fn merge_json(&mut self) {
        let JsonScanner { error, prompt, completion, id, .. } = self.json;
        self.facts.error |= error;
        self.facts.id = self.facts.id.or(id);
        if prompt.or(completion).is_some() {
            let usage = self.facts.usage.get_or_insert_default();
            usage.prompt = prompt.unwrap_or(usage.prompt);
            usage.completion = completion.unwrap_or(usage.completion);
        }
    }
}

impl Default for SseLineState {
    fn default() -> Self {
        Self::Name { at: 0, may: CANDIDATE_DATA | CANDIDATE_EVENT }
    }
}

#[cfg(test)]
mod tests;
