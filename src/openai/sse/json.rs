//! Follows one JSON document byte by byte and keeps three numbers of it.
//!
//! No parser: the engine wrote the document and the client will parse it. This one only has to tell structure from
//! text, so that a `"usage"` somebody wrote to the model is not taken for the engine's. What is not JSON gives
//! nonsense that nobody acts upon, and never more memory.

use super::Usage;

/// The longest key that matters is `completion_tokens`; a longer one is cut, and then matches nothing.
const KEY: usize = 18;

#[derive(Debug, Default)]
pub(super) struct Json {
    depth: u32,
    text: Text,
    /// The string being read may be a key: a container or comma was before it.
    key_next: bool,
    key: [u8; KEY],
    key_len: u8,
    /// What the value now being read belongs to.
    slot: Slot,
    /// The digits of a number for a slot.
    number: Option<u64>,
    /// Inside the object that is the value of the top-level `usage`.
    in_usage: bool,
    prompt: Option<u64>,
    completion: Option<u64>,
    error: bool,
}

/// What a document said.
pub(super) struct Found {
    /// It has a top-level `error` that is not `null`.
    pub error: bool,
    pub usage: Option<Usage>,
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
    Usage,
    Prompt,
    Completion,
}

impl Json {
    pub(super) fn byte(&mut self, byte: u8) {
        match self.text {
            Text::Inside => self.in_text(byte),
            Text::Escaped => {
                self.text = Text::Inside;
                // An escaped key is nobody's habit; it must only not be taken for another.
                self.push(0);
            }
            Text::Outside => self.outside(byte),
        }
    }

    pub(super) fn found(&self) -> Found {
        let usage = self
            .prompt
            .or(self.completion)
            .map(|_| Usage { prompt: self.prompt.unwrap_or(0), completion: self.completion.unwrap_or(0) });
        Found { error: self.error, usage }
    }

    fn in_text(&mut self, byte: u8) {
        match byte {
            b'"' => self.text = Text::Outside,
            b'\\' => self.text = Text::Escaped,
            _ => self.push(byte),
        }
    }

    fn push(&mut self, byte: u8) {
        if !self.key_next {
            return;
        }
        match self.key.get_mut(usize::from(self.key_len)) {
            Some(place) => {
                *place = byte;
                self.key_len += 1;
            }
            None => self.key_next = false,
        }
    }

    fn outside(&mut self, byte: u8) {
        match byte {
            b'"' => {
                self.value_begins(byte);
                self.text = Text::Inside;
                self.key_len = 0;
            }
            b':' => self.key_ends(),
            b',' => self.value_ends(true),
            b'{' | b'[' => {
                self.value_begins(byte);
                self.in_usage |= self.slot == Slot::Usage && byte == b'{';
                self.slot = Slot::None;
                self.depth = self.depth.saturating_add(1);
                self.key_next = byte == b'{' && self.depth <= 2;
            }
            b'}' | b']' => {
                self.value_ends(false);
                self.depth = self.depth.saturating_sub(1);
                self.in_usage &= self.depth >= 2;
            }
            b'0'..=b'9' => {
                self.value_begins(byte);
                let digit = u64::from(byte - b'0');
                self.number = Some(self.number.unwrap_or(0).saturating_mul(10).saturating_add(digit));
            }
            b' ' | b'\t' => {}
            _ => self.value_begins(byte),
        }
    }

    fn key_ends(&mut self) {
        let key = self.key.get(..usize::from(self.key_len)).unwrap_or_default();
        self.slot = match (self.key_next, self.depth, key) {
            (true, 1, b"error") => Slot::Error,
            (true, 1, b"usage") => Slot::Usage,
            (true, 2, b"prompt_tokens") if self.in_usage => Slot::Prompt,
            (true, 2, b"completion_tokens") if self.in_usage => Slot::Completion,
            _ => Slot::None,
        };
        self.key_next = false;
        self.key_len = 0;
        self.number = None;
    }

    fn value_begins(&mut self, byte: u8) {
        if self.slot == Slot::Error {
            self.error |= byte != b'n';
            self.slot = Slot::None;
        }
    }

    fn value_ends(&mut self, comma: bool) {
        match self.slot {
            Slot::Prompt => self.prompt = self.number,
            Slot::Completion => self.completion = self.number,
            Slot::None | Slot::Error | Slot::Usage => {}
        }
        self.slot = Slot::None;
        self.number = None;
        self.key_next = comma && self.depth <= 2;
        self.key_len = 0;
    }
}
