//! Where one is in a stream of server-sent events, at whatever byte the network cut it.
//!
//! The stream passes by; this looks on. It must know five things: whether the last byte ended an event (only there
//! may a gateway write one of its own), whether the first datum came, whether the stream came to its own end, what its
//! answer is called, and what its usage counted. A frame may be megabytes (one line with a whole tool call), so nothing
//! is kept of it: the line and the JSON in it are followed by a state of fixed size, about two hundred bytes.
//!
//! **Every API at once.** A stream of chat ends with `[DONE]`, one of messages with `message_stop`, one of responses
//! with one of three events, and none of them uses the others' words for anything else. So the scanner need not be told
//! what it follows. Clients go by the event's name on one API and by the `type` in its data on another: either counts.
//!
//! Only what stands at the top of an event's JSON counts: `usage` and `error` inside a message's text are text. A key
//! that is written with escapes is legal JSON, but no engine's habit, and is not recognised.
//!
//! Nearly every event arrives whole and says nothing of interest. One that has none of the words that could matter is
//! only counted; see `dull`. Every other one is followed byte by byte, and only that decides.

use memchr::{memchr, memchr2};

mod document;
mod dull;
mod json;
mod word;

use json::Json;
use word::{End, Word};

/// What a stream has shown so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Events that carried data, `[DONE]` not counted.
    pub events: u64,
    /// It came to its own end: `[DONE]`, or the last event of an API that has one; or the document is whole.
    pub done: bool,
    /// An error event of the engine's own came.
    pub error: bool,
    /// What was counted last of each.
    pub usage: Option<Usage>,
    /// [`hash`](super::hash) of the answer's id: the first `id` at the top, or in its `response` or `message`.
    pub id: Option<u64>,
}

/// Tokens, as the engine counted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: u64,
    pub completion: u64,
}

/// Follows one stream, or one document.
#[derive(Debug, Default)]
pub struct Scanner {
    facts: Facts,
    /// There are no lines: all of it is one JSON document.
    is_document: bool,
    line: Line,
    /// The last byte was a CR: an LF right after it belongs to the same line end.
    after_cr: bool,
    /// The current event has at least one line.
    open: bool,
    /// What the current event's name says.
    named: End,
    data: Data,
    json: Json,
}

/// What the current line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// Still reading its field's name, so many bytes of it, and which names it may become.
    Name {
        at: u8,
        may: u8,
    },
    /// After `data:`, before the optional space.
    DataSpace,
    Data,
    EventSpace,
    /// In the value of `event:`.
    Event(Word),
    /// A comment or a field of no interest.
    Other,
}

/// What is known of the current event's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Data {
    #[default]
    None,
    /// So many bytes of `[DONE]`, and nothing else.
    Done(u8),
    Json,
}

const DATA: &[u8] = b"data";
const EVENT: &[u8] = b"event";
const DONE: &[u8] = b"[DONE]";
const MAY_DATA: u8 = 1;
const MAY_EVENT: u8 = 2;

impl Scanner {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Of an answer that is one JSON document and no stream. It has no events, and nothing may be written into it.
    #[must_use]
    pub fn of_json() -> Self {
        Self { is_document: true, ..Self::default() }
    }

    #[must_use]
    pub const fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Nothing of an event is pending: another one may be written here.
    #[must_use]
    pub const fn at_border(&self) -> bool {
        !self.is_document && !self.open && matches!(self.line, Line::Name { at: 0, .. })
    }

    /// Takes the next bytes, cut anywhere.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        if self.is_document {
            match self.json.is_fresh().then(|| document::read(bytes)).flatten() {
                Some(read) => self.json = read,
                None => self.json.feed(bytes),
            }
            self.facts.done |= self.json.whole;
            return self.learn();
        }
        while let Some((&byte, rest)) = bytes.split_first() {
            if byte != b'\n'
                && self.at_border()
                && let Some(rest) = self.pass_dull(bytes)
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

    /// Takes an event, if `bytes` begin with one that has nothing to tell but that it is one, and returns the rest.
    /// To be called between two events.
    fn pass_dull<'a>(&mut self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let mut rest = bytes;
        if let Some(line) = bytes.strip_prefix(b"event: ") {
            let (name, after) = line.split_at(memchr(b'\n', line)?);
            if word::end(name) != End::No || name.contains(&b'\r') {
                return None;
            }
            rest = after.get(1..)?;
        }
        let datum = rest.strip_prefix(b"data: {")?;
        let (datum, after) = datum.split_at(memchr2(b'\n', b'\r', datum)?);
        let rest = after.strip_prefix(b"\n\n")?;
        if !dull::is_dull(datum, self.facts.id.is_some()) {
            return None;
        }
        self.after_cr = false;
        self.facts.events += 1;
        Some(rest)
    }

    /// Takes some of `bytes`, which begin inside a line, and returns the rest.
    fn in_line<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        // As nearly every line begins, and most arrive whole.
        if let (Line::Name { at: 0, .. }, Some(rest)) = (self.line, bytes.strip_prefix(b"data: ")) {
            self.open = true;
            self.begin_data();
            self.line = Line::Data;
            return rest;
        }
        if !matches!((self.line, self.data), (Line::Other, _) | (Line::Data, Data::Json)) {
            let Some((&byte, rest)) = bytes.split_first() else { return bytes };
            self.byte(byte);
            return rest;
        }
        let (line, rest) = bytes.split_at(memchr2(b'\n', b'\r', bytes).unwrap_or(bytes.len()));
        if self.line == Line::Data {
            self.json.feed(line);
        }
        rest
    }

    fn byte(&mut self, byte: u8) {
        match &mut self.line {
            Line::Name { at, may } => {
                let (at, may) = (*at, *may);
                self.name(byte, at, may);
            }
            Line::DataSpace => {
                self.line = Line::Data;
                if byte != b' ' {
                    self.datum(byte);
                }
            }
            Line::Data => self.datum(byte),
            Line::EventSpace => {
                let mut word = Word::default();
                if byte != b' ' {
                    word.push(byte);
                }
                self.line = Line::Event(word);
            }
            Line::Event(word) => word.push(byte),
            Line::Other => {}
        }
    }

    fn name(&mut self, byte: u8, at: u8, may: u8) {
        self.open = true;
        let place = usize::from(at);
        if byte == b':' {
            self.line = if may & MAY_DATA != 0 && place == DATA.len() {
                self.begin_data();
                Line::DataSpace
            } else if may & MAY_EVENT != 0 && place == EVENT.len() {
                Line::EventSpace
            } else {
                Line::Other
            };
            return;
        }
        let mut left = 0;
        if may & MAY_DATA != 0 && DATA.get(place) == Some(&byte) {
            left |= MAY_DATA;
        }
        if may & MAY_EVENT != 0 && EVENT.get(place) == Some(&byte) {
            left |= MAY_EVENT;
        }
        self.line = if left == 0 { Line::Other } else { Line::Name { at: at + 1, may: left } };
    }

    /// A `data` line begins; a second one goes on after a line end, which is white space to the JSON.
    fn begin_data(&mut self) {
        self.data = match self.data {
            Data::None => Data::Done(0),
            Data::Done(matched) => {
                self.no_done(matched);
                Data::Json
            }
            Data::Json => Data::Json,
        };
    }

    fn datum(&mut self, byte: u8) {
        match self.data {
            Data::Done(matched) if DONE.get(usize::from(matched)) == Some(&byte) => {
                self.data = Data::Done(matched + 1);
            }
            Data::Done(matched) => {
                self.data = Data::Json;
                self.no_done(matched);
                self.json.feed(&[byte]);
            }
            Data::Json => self.json.feed(&[byte]),
            Data::None => {}
        }
    }

    /// What looked like the mark so far was the beginning of an array.
    fn no_done(&mut self, matched: u8) {
        self.json.feed(DONE.get(..usize::from(matched)).unwrap_or_default());
    }

    fn end_line(&mut self) {
        match self.line {
            Line::Name { at: 0, .. } => return self.end_event(),
            // The last one counts.
            Line::Event(word) => self.named = word.end(),
            _ => {}
        }
        self.line = Line::default();
    }

    fn end_event(&mut self) {
        self.open = false;
        let named = std::mem::take(&mut self.named);
        match std::mem::take(&mut self.data) {
            // An error without a word is one nevertheless.
            Data::None if named != End::Failure => return,
            Data::None => {}
            Data::Done(matched) if usize::from(matched) == DONE.len() => {
                self.facts.done = true;
                return;
            }
            Data::Done(_) | Data::Json => self.facts.events += 1,
        }
        self.learn();
        let typed = std::mem::take(&mut self.json).end();
        self.facts.done |= named == End::Whole || typed == End::Whole;
        self.facts.error |= named == End::Failure || typed == End::Failure;
    }

    /// Takes over what the document has said so far.
    fn learn(&mut self) {
        let Json { error, prompt, completion, id, .. } = self.json;
        self.facts.error |= error;
        self.facts.id = self.facts.id.or(id);
        if prompt.or(completion).is_some() {
            let usage = self.facts.usage.get_or_insert_default();
            usage.prompt = prompt.unwrap_or(usage.prompt);
            usage.completion = completion.unwrap_or(usage.completion);
        }
    }
}

impl Default for Line {
    fn default() -> Self {
        Self::Name { at: 0, may: MAY_DATA | MAY_EVENT }
    }
}

#[cfg(test)]
mod tests;
