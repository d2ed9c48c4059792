//! Follows one JSON document, wherever it is cut, and extracts a few values.
//!
//! This is not a parser: the engine wrote the document, and the client parses it. The scanner only distinguishes
//! structure from text, so that a `"usage"` in a user's message is not taken for the engine's. Invalid JSON yields
//! meaningless values without effect, and never takes more memory.
//!
//! Most of a document is text and deep structure of no interest. Both are skipped at the speed of reading memory.

use memchr::memchr2;

use super::keyword::{KeywordBuffer, StreamEnd};
use crate::openai::hash::StableHasher;

#[derive(Debug, Default)]
pub(super) struct JsonScanner {
    depth: u32,
    text: StringState,
    /// The current string may be a key that matters: a bracket or comma precedes it.
    key_next: bool,
    /// Such a key, or the value of the top-level `type`.
    word: KeywordBuffer,
    /// The field of the current value.
    field: JsonField,
    /// The digits of a token count.
    number: Option<u64>,
    hasher: StableHasher,
    /// Inside the object that is the top-level `response` or `message`.
    in_response: bool,
    /// The depth of the current `usage` object's keys; 0 outside.
    usage: u32,
    type_end: StreamEnd,
    /// Every opened bracket has been closed at least once.
    pub(super) complete: bool,
    /// The document has a top-level `error` that is not `null`.
    pub(super) error: bool,
    pub(super) prompt: Option<u64>,
    pub(super) completion: Option<u64>,
    /// The first id.
    pub(super) id: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StringState {
    #[default]
    Outside,
    Inside,
    /// After a backslash.
    Escaped,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum JsonField {
    #[default]
    None,
    Error,
    Type,
    Id,
    Response,
    Usage,
    Prompt,
    Completion,
}

impl JsonScanner {
    /// The state after a whole document with these values.
    pub(super) fn from_document(
        id: Option<u64>,
        error: bool,
        prompt: Option<u64>,
        completion: Option<u64>,
    ) -> Self {
        Self { complete: true, error, prompt, completion, id, ..Self::default() }
    }

    /// Reports whether the document has not begun yet.
    pub(super) const fn is_untouched(&self) -> bool {
        self.depth == 0 && !self.complete && matches!(self.text, StringState::Outside)
    }

    pub(super) fn feed(&mut self, mut bytes: &[u8]) {
        while let Some((&byte, rest)) = bytes.split_first() {
            bytes = match self.text {
                StringState::Inside => self.in_text(bytes),
                StringState::Escaped => {
                    self.text = StringState::Inside;
                    self.escaped(byte);
                    rest
                }
                StringState::Outside if self.is_skippable() => {
                    let turn = self.skip(bytes);
                    match turn.split_first() {
                        Some((&byte, rest)) => {
                            self.outside(byte);
                            rest
                        }
                        None => turn,
                    }
                }
                StringState::Outside => {
                    self.outside(byte);
                    rest
                }
            };
        }
    }

    /// The meaning of the top-level `type`.
    pub(super) const fn stream_end(&self) -> StreamEnd {
        self.type_end
    }

    /// Reports whether no key and no value at this position matters.
    const fn is_skippable(&self) -> bool {
        !self.keys_matter() && matches!(self.field, JsonField::None)
    }

    /// Skips bytes up to a change of position that may matter, or an incomplete string.
    fn skip<'a>(&mut self, mut bytes: &'a [u8]) -> &'a [u8] {
        while let Some(position) = bytes.iter().position(|byte| is_structural(*byte)) {
            let (_, turn) = bytes.split_at(position);
            let Some((first, after)) = turn.split_first() else { return turn };
            bytes = match first {
                b'"' => match after_string(after) {
                    Some(rest) => rest,
                    None => return turn,
                },
                b'{' | b'[' if self.depth > 1 => {
                    self.depth = self.depth.saturating_add(1);
                    after
                }
                b'}' | b']' if self.depth > 3 && self.usage != self.depth - 1 => {
                    self.depth -= 1;
                    after
                }
                _ => return turn,
            };
        }
        b""
    }

    const fn keys_matter(&self) -> bool {
        match self.depth {
            1 => true,
            2 => self.in_response || self.usage == 2,
            depth => self.usage == depth && depth != 0,
        }
    }

    fn in_text<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let end = run_length(bytes);
        let (run, rest) = bytes.split_at(end);
        self.run(run);
        let Some((&byte, rest)) = rest.split_first() else {
            return rest;
        };
        if byte == b'\\' {
            self.text = StringState::Escaped;
        } else {
            self.text = StringState::Outside;
            self.text_ends();
        }
        rest
    }

    /// Processes a piece of a string.
    fn run(&mut self, run: &[u8]) {
        if self.key_next || self.field == JsonField::Type {
            self.word.extend(run);
        } else if self.field == JsonField::Id {
            self.hasher.write(run);
        }
    }

    /// Processes the byte after a backslash.
    fn escaped(&mut self, byte: u8) {
        if self.field == JsonField::Id && !self.key_next {
            self.hasher.write(&[b'\\', byte]);
        } else {
            // No engine escapes its keys. This byte only keeps an escaped key from matching another one.
            self.run(&[0]);
        }
    }

    fn text_ends(&mut self) {
        match self.field {
            JsonField::Type => self.type_end = self.word.stream_end(),
            JsonField::Id => self.id = self.id.or_else(|| Some(self.hasher.finish())),
            _ => return,
        }
        self.field = JsonField::None;
    }

    fn outside(&mut self, byte: u8) {
        match byte {
            b'"' => {
                self.value_begins(byte);
                self.text = StringState::Inside;
                self.word.clear();
                if self.field == JsonField::Id {
                    self.hasher = StableHasher::default();
                }
            }
            b':' => self.key_ends(),
            b',' => self.value_ends(true),
            b'{' | b'[' => {
                self.value_begins(byte);
                self.opens(byte == b'{');
            }
            b'}' | b']' => {
                self.value_ends(false);
                if self.usage == self.depth {
                    self.usage = 0;
                }
                self.depth = self.depth.saturating_sub(1);
                self.complete |= self.depth == 0;
                self.in_response &= self.depth >= 2;
            }
            b'0'..=b'9' => {
                self.value_begins(byte);
                let digit = u64::from(byte - b'0');
                self.number = Some(self.number.unwrap_or(0).saturating_mul(10).saturating_add(digit));
            }
            b' ' | b'\t' | b'\n' | b'\r' => {}
            _ => self.value_begins(byte),
        }
    }

    fn opens(&mut self, object: bool) {
        self.depth = self.depth.saturating_add(1);
        match std::mem::take(&mut self.field) {
            JsonField::Usage if object => self.usage = self.depth,
            JsonField::Response if object => self.in_response = true,
            _ => {}
        }
        self.key_next = object && self.keys_matter();
    }

    fn key_ends(&mut self) {
        let key = if self.key_next { self.word.bytes() } else { b"" };
        self.field = if self.usage == self.depth {
            match key {
                b"prompt_tokens" | b"input_tokens" => JsonField::Prompt,
                b"completion_tokens" | b"output_tokens" => JsonField::Completion,
                _ => JsonField::None,
            }
        } else {
            match (key, self.depth) {
                (b"error", 1) => JsonField::Error,
                (b"type", 1) => JsonField::Type,
                (b"response" | b"message", 1) => JsonField::Response,
                (b"id", _) => JsonField::Id,
                (b"usage", _) => JsonField::Usage,
                _ => JsonField::None,
            }
        };
        self.key_next = false;
        self.number = None;
    }

    fn value_begins(&mut self, byte: u8) {
        match self.field {
            JsonField::Error => self.error |= byte != b'n',
            // Only a string.
            JsonField::Type | JsonField::Id if byte == b'"' => return,
            // Only an object, which the caller opens.
            JsonField::Response | JsonField::Usage if byte == b'{' => return,
            JsonField::Prompt | JsonField::Completion | JsonField::None => return,
            JsonField::Type | JsonField::Id | JsonField::Response | JsonField::Usage => {}
        }
        self.field = JsonField::None;
    }

    fn value_ends(&mut self, comma: bool) {
        match self.field {
            JsonField::Prompt => self.prompt = self.number.or(self.prompt),
            JsonField::Completion => self.completion = self.number.or(self.completion),
            _ => {}
        }
        self.field = JsonField::None;
        self.number = None;
        self.key_next = comma && self.keys_matter();
        self.word.clear();
    }
}

/// Returns how many bytes of a string come before its end or its next escape.
fn run_length(bytes: &[u8]) -> usize {
    // Most runs are short, and end before a search over the rest would have started.
    let (near, far) = bytes.split_at(SHORT_SCAN_BYTES.min(bytes.len()));
    let turn = |&byte: &u8| byte == b'"' || byte == b'\\';
    near.iter().position(turn).unwrap_or_else(|| near.len() + memchr2(b'"', b'\\', far).unwrap_or(far.len()))
}

const SHORT_SCAN_BYTES: usize = 16;

/// Returns the bytes after the string that `bytes` begin inside of; `None` when its end is missing.
fn after_string(mut bytes: &[u8]) -> Option<&[u8]> {
    loop {
        bytes = bytes.get(run_length(bytes)..)?;
        match bytes {
            [b'"', rest @ ..] => return Some(rest),
            [b'\\', _, rest @ ..] => bytes = rest,
            _ => return None,
        }
    }
}

/// Reports whether this byte can change the state at a position that does not matter.
#[inline(always)]
fn is_structural(byte: u8) -> bool {
    STRUCTURAL_BYTES.get(usize::from(byte)).is_some_and(|turns| *turns)
}

#[expect(clippy::indexing_slicing, reason = "a constant: there is an entry for each byte")]
const STRUCTURAL_BYTES: [bool; 256] = {
    let mut turns = [false; 256];
    turns[b'"' as usize] = true;
    turns[b'{' as usize] = true;
    turns[b'}' as usize] = true;
    turns[b'[' as usize] = true;
    turns[b']' as usize] = true;
    turns
};
