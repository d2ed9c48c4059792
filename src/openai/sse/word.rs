//! A short word of a stream, gathered byte by byte, and what it says about the stream's end.

/// The longest one that matters is `image_generation.completed`; a longer one is cut, and then matches nothing.
const LONGEST: usize = 26;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Word {
    bytes: [u8; LONGEST],
    /// One more than fits: it was cut.
    length: u8,
}

/// What an event says about the end of its stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum End {
    #[default]
    No,
    /// It is the last one.
    Whole,
    /// It is an error.
    Failure,
}

impl Word {
    pub(super) fn push(&mut self, byte: u8) {
        match self.bytes.get_mut(usize::from(self.length)) {
            Some(place) => {
                *place = byte;
                self.length += 1;
            }
            None => self.length = LONGEST as u8 + 1,
        }
    }

    pub(super) fn extend(&mut self, bytes: &[u8]) {
        for &byte in bytes.iter().take(LONGEST + 1) {
            self.push(byte);
        }
    }

    pub(super) const fn clear(&mut self) {
        self.length = 0;
    }

    /// Nothing, when it was cut.
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.length)).unwrap_or_default()
    }

    pub(super) fn end(&self) -> End {
        end(self.bytes())
    }
}

/// What `word` says as the name of an event, or as the `type` in its data.
pub(super) fn end(word: &[u8]) -> End {
    match word {
        b"error" | b"response.failed" => End::Failure,
        b"response.completed"
        | b"response.incomplete"
        | b"message_stop"
        | b"transcript.text.done"
        | b"speech.audio.done"
        | b"image_generation.completed"
        | b"image_edit.completed" => End::Whole,
        _ => End::No,
    }
}
