//! Collects a short word of a stream, and classifies it: does it end the stream?

/// The length of `image_generation.completed`, the longest keyword. A longer word is truncated and matches nothing.
const MAX_KEYWORD_BYTES: usize = 26;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeywordBuffer {
    bytes: [u8; MAX_KEYWORD_BYTES],
    /// `MAX_KEYWORD_BYTES + 1` marks a truncated word.
    length: u8,
}

/// The meaning of an event for the end of its stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum StreamEnd {
    #[default]
    NotLast,
    /// The event is the last one.
    Complete,
    /// The event is an error.
    Failure,
}

impl KeywordBuffer {
    pub(super) fn push(&mut self, byte: u8) {
        match self.bytes.get_mut(usize::from(self.length)) {
            Some(slot) => {
                *slot = byte;
                self.length += 1;
            }
            None => self.length = MAX_KEYWORD_BYTES as u8 + 1,
        }
    }

    pub(super) fn extend(&mut self, bytes: &[u8]) {
        for &byte in bytes.iter().take(MAX_KEYWORD_BYTES + 1) {
            self.push(byte);
        }
    }

    pub(super) const fn clear(&mut self) {
        self.length = 0;
    }

    /// The word; empty when it was truncated.
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.length)).unwrap_or_default()
    }

    pub(super) fn stream_end(&self) -> StreamEnd {
        classify(self.bytes())
    }
}

/// Classifies `word` as the name of an event, or as the `type` in its data.
pub(super) fn classify(word: &[u8]) -> StreamEnd {
    match word {
        b"error" | b"response.failed" => StreamEnd::Failure,
        b"response.completed"
        | b"response.incomplete"
        | b"message_stop"
        | b"transcript.text.done"
        | b"speech.audio.done"
        | b"image_generation.completed"
        | b"image_edit.completed" => StreamEnd::Complete,
        _ => StreamEnd::NotLast,
    }
}
