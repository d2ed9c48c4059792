//! Follows one JSON document, at whatever byte it is cut, and keeps a few numbers of it.
//!
//! No parser: the engine wrote the document and the client will parse it. This one only has to tell structure from
//! text, so that a `"usage"` somebody wrote to the model is not taken for the engine's. What is not JSON gives
//! nonsense that nobody acts upon, and never more memory.
//!
//! Most of a document is text and deep structure of no interest, and both are skipped as fast as memory can be read.

use memchr::memchr2;

use super::word::{End, Word};
use crate::openai::hash::Hasher;

#[derive(Debug, Default)]
pub(super) struct Json {
    depth: u32,
    text: Text,
    /// The string being read may be a key that matters: a container or comma was before it.
    key_next: bool,
    /// Such a key, or the value of the top-level `type`.
    word: Word,
    /// What the value now being read belongs to.
    slot: Slot,
    /// The digits of a number for a slot.
    number: Option<u64>,
    hasher: Hasher,
    /// Inside the object that is the top-level `response` or `message`.
    in_answer: bool,
    /// How deep the keys of the `usage` object are that is being read; 0 outside.
    usage: u32,
    kind: End,
    /// Every bracket that was opened was closed once.
    pub(super) whole: bool,
    /// It has a top-level `error` that is not `null`.
    pub(super) error: bool,
    pub(super) prompt: Option<u64>,
    pub(super) completion: Option<u64>,
    /// The first that came.
    pub(super) id: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Text {
    #[default]
    Outside,
    Inside,
    /// After a backslash.
    Escaped,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Slot {
    #[default]
    None,
    Error,
    Kind,
    Id,
    Answer,
    Usage,
    Prompt,
    Completion,
}

impl Json {
    /// Of a whole document that says this.
    pub(super) fn of(id: Option<u64>, error: bool, prompt: Option<u64>, completion: Option<u64>) -> Self {
        Self { whole: true, error, prompt, completion, id, ..Self::default() }
    }

    /// Nothing has come yet.
    pub(super) const fn is_fresh(&self) -> bool {
        self.depth == 0 && !self.whole && matches!(self.text, Text::Outside)
    }

    pub(super) fn feed(&mut self, mut bytes: &[u8]) {
        while let Some((&byte, rest)) = bytes.split_first() {
            bytes = match self.text {
                Text::Inside => self.in_text(bytes),
                Text::Escaped => {
                    self.text = Text::Inside;
                    self.escaped(byte);
                    rest
                }
                Text::Outside if self.is_deep() => {
                    let turn = self.skip(bytes);
                    match turn.split_first() {
                        Some((&byte, rest)) => {
                            self.outside(byte);
                            rest
                        }
                        None => turn,
                    }
                }
                Text::Outside => {
                    self.outside(byte);
                    rest
                }
            };
        }
    }

    /// What the top-level `type` says.
    pub(super) const fn end(&self) -> End {
        self.kind
    }

    /// No key here matters, nor any number.
    const fn is_deep(&self) -> bool {
        !self.keys_matter() && matches!(self.slot, Slot::None)
    }

    /// To the next byte that does not stay where nothing matters, or that begins a string which is not all here.
    fn skip<'a>(&mut self, mut bytes: &'a [u8]) -> &'a [u8] {
        while let Some(place) = bytes.iter().position(|byte| turns(*byte)) {
            let (_, turn) = bytes.split_at(place);
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
            2 => self.in_answer || self.usage == 2,
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
            self.text = Text::Escaped;
        } else {
            self.text = Text::Outside;
            self.text_ends();
        }
        rest
    }

    /// A piece of a string.
    fn run(&mut self, run: &[u8]) {
        if self.key_next || self.slot == Slot::Kind {
            self.word.extend(run);
        } else if self.slot == Slot::Id {
            self.hasher.write(run);
        }
    }

    /// The byte after a backslash.
    fn escaped(&mut self, byte: u8) {
        if self.slot == Slot::Id && !self.key_next {
            self.hasher.write(&[b'\\', byte]);
        } else {
            // An escaped key is nobody's habit; it must only not be taken for another.
            self.run(&[0]);
        }
    }

    fn text_ends(&mut self) {
        match self.slot {
            Slot::Kind => self.kind = self.word.end(),
            Slot::Id => self.id = self.id.or_else(|| Some(self.hasher.finish())),
            _ => return,
        }
        self.slot = Slot::None;
    }

    fn outside(&mut self, byte: u8) {
        match byte {
            b'"' => {
                self.value_begins(byte);
                self.text = Text::Inside;
                self.word.clear();
                if self.slot == Slot::Id {
                    self.hasher = Hasher::default();
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
                self.whole |= self.depth == 0;
                self.in_answer &= self.depth >= 2;
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
        match std::mem::take(&mut self.slot) {
            Slot::Usage if object => self.usage = self.depth,
            Slot::Answer if object => self.in_answer = true,
            _ => {}
        }
        self.key_next = object && self.keys_matter();
    }

    fn key_ends(&mut self) {
        let key = if self.key_next { self.word.bytes() } else { b"" };
        self.slot = if self.usage == self.depth {
            match key {
                b"prompt_tokens" | b"input_tokens" => Slot::Prompt,
                b"completion_tokens" | b"output_tokens" => Slot::Completion,
                _ => Slot::None,
            }
        } else {
            match (key, self.depth) {
                (b"error", 1) => Slot::Error,
                (b"type", 1) => Slot::Kind,
                (b"response" | b"message", 1) => Slot::Answer,
                (b"id", _) => Slot::Id,
                (b"usage", _) => Slot::Usage,
                _ => Slot::None,
            }
        };
        self.key_next = false;
        self.number = None;
    }

    fn value_begins(&mut self, byte: u8) {
        match self.slot {
            Slot::Error => self.error |= byte != b'n',
            // Only a string.
            Slot::Kind | Slot::Id if byte == b'"' => return,
            // Only an object, which the caller opens.
            Slot::Answer | Slot::Usage if byte == b'{' => return,
            Slot::Prompt | Slot::Completion | Slot::None => return,
            Slot::Kind | Slot::Id | Slot::Answer | Slot::Usage => {}
        }
        self.slot = Slot::None;
    }

    fn value_ends(&mut self, comma: bool) {
        match self.slot {
            Slot::Prompt => self.prompt = self.number.or(self.prompt),
            Slot::Completion => self.completion = self.number.or(self.completion),
            _ => {}
        }
        self.slot = Slot::None;
        self.number = None;
        self.key_next = comma && self.keys_matter();
        self.word.clear();
    }
}

/// So many bytes of a string are neither its end nor the beginning of an escape.
fn run_length(bytes: &[u8]) -> usize {
    // Most are short, and over before a search for the far end has set out.
    let (near, far) = bytes.split_at(NEAR.min(bytes.len()));
    let turn = |&byte: &u8| byte == b'"' || byte == b'\\';
    near.iter().position(turn).unwrap_or_else(|| near.len() + memchr2(b'"', b'\\', far).unwrap_or(far.len()))
}

const NEAR: usize = 16;

/// What follows the string that `bytes` are in.
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

/// This byte changes something where nothing else matters.
#[inline(always)]
fn turns(byte: u8) -> bool {
    TURNS.get(usize::from(byte)).is_some_and(|turns| *turns)
}

#[expect(clippy::indexing_slicing, reason = "a constant: there is an entry for each byte")]
const TURNS: [bool; 256] = {
    let mut turns = [false; 256];
    turns[b'"' as usize] = true;
    turns[b'{' as usize] = true;
    turns[b'}' as usize] = true;
    turns[b'[' as usize] = true;
    turns[b']' as usize] = true;
    turns
};
