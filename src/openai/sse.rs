//! Where one is in a stream of server-sent events, at whatever byte the network cut it.
//!
//! The stream passes by; this looks on. It must know four things: whether the last byte ended an event (only there
//! may a gateway write one of its own), whether the first datum came, whether the stream came to its own end
//! (`[DONE]` or an error event), and what the usage frame counted. A frame may be megabytes (one line with a whole
//! tool call), so nothing is kept of it: the line and the JSON in it are followed by a state of fixed size, about a
//! hundred bytes.
//!
//! Only what stands at the top of an event's JSON counts: `usage` and `error` inside a message's text are text.

mod json;

use json::{Found, Json};

/// What a stream has shown so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Events that carried data, `[DONE]` not counted.
    pub events: u64,
    /// `data: [DONE]` came.
    pub done: bool,
    /// An error event of the engine's own came.
    pub error: bool,
    /// The last usage frame.
    pub usage: Option<Usage>,
}

/// Tokens, as the engine counted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: u64,
    pub completion: u64,
}

/// Follows one stream.
#[derive(Debug, Default)]
pub struct Scanner {
    facts: Facts,
    line: Line,
    /// The last byte was a CR: an LF right after it belongs to the same line end.
    after_cr: bool,
    /// The current event has at least one line.
    open: bool,
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
    /// In the value of `event:`, so many bytes of `error` matched.
    Event {
        matched: u8,
    },
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
const ERROR: &[u8] = b"error";
const DONE: &[u8] = b"[DONE]";
const MAY_DATA: u8 = 1;
const MAY_EVENT: u8 = 2;

impl Scanner {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    #[must_use]
    pub const fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Nothing of an event is pending: another one may be written here.
    #[must_use]
    pub const fn at_border(&self) -> bool {
        !self.open && matches!(self.line, Line::Name { at: 0, .. })
    }

    /// Takes the next bytes of the stream, cut anywhere.
    pub fn feed(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            match byte {
                b'\n' if self.after_cr => self.after_cr = false,
                b'\n' | b'\r' => {
                    self.after_cr = byte == b'\r';
                    self.end_line();
                }
                _ => {
                    self.after_cr = false;
                    self.byte(byte);
                }
            }
        }
    }

    fn byte(&mut self, byte: u8) {
        match self.line {
            Line::Name { at, may } => self.name(byte, at, may),
            Line::DataSpace => {
                self.line = Line::Data;
                if byte != b' ' {
                    self.datum(byte);
                }
            }
            Line::Data => self.datum(byte),
            Line::EventSpace => {
                self.line = Line::Event { matched: 0 };
                if byte != b' ' {
                    self.byte(byte);
                }
            }
            Line::Event { matched } => {
                self.line = if ERROR.get(usize::from(matched)) == Some(&byte) {
                    Line::Event { matched: matched + 1 }
                } else {
                    Line::Other
                };
            }
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
            Data::Done(_) | Data::Json => Data::Json,
        };
    }

    fn datum(&mut self, byte: u8) {
        match self.data {
            Data::Done(matched) if DONE.get(usize::from(matched)) == Some(&byte) => {
                self.data = Data::Done(matched + 1);
            }
            Data::Done(matched) => {
                self.data = Data::Json;
                // What looked like the mark so far was the beginning of an array.
                for &earlier in DONE.iter().take(usize::from(matched)) {
                    self.json.byte(earlier);
                }
                self.json.byte(byte);
            }
            Data::Json => self.json.byte(byte),
            Data::None => {}
        }
    }

    fn end_line(&mut self) {
        match self.line {
            Line::Name { at: 0, .. } => return self.end_event(),
            Line::Event { matched } if usize::from(matched) == ERROR.len() => self.facts.error = true,
            _ => {}
        }
        self.line = Line::default();
    }

    fn end_event(&mut self) {
        self.open = false;
        let json = std::mem::take(&mut self.json);
        match std::mem::take(&mut self.data) {
            Data::None => return,
            Data::Done(matched) if usize::from(matched) == DONE.len() => {
                self.facts.done = true;
                return;
            }
            Data::Done(_) | Data::Json => self.facts.events += 1,
        }
        let Found { error, usage } = json.found();
        self.facts.error |= error;
        if usage.is_some() {
            self.facts.usage = usage;
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
