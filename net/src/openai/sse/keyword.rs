//! A short word of a stream, gathered byte by byte, and what it says about the stream's end.

/// The longest one that matters is `image_generation.completed`; a longer one is cut, and then matches nothing.
const MAX_KEYWORD_BYTES: usize = 26;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeywordBuffer {
    bytes: [u8; MAX_KEYWORD_BYTES],
    /// One more than fits: it was cut.
    length: u8,
}

/// What an event says about the end of its stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum StreamEnd {
    #[default]
    NotLast,
    /// It is the last one.
    Complete,
    /// It is an error.
    Failure,
}

impl KeywordBuffer {
    pub(super) fn push(&mut self, byte: u8) {
        match self.bytes.get_mut(usize::from(self.length)) {
            Some(place) => {
                *place = byte;
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

    /// Nothing, when it was cut.
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.length)).unwrap_or_default()
    }

    pub(super) fn stream_end(&self) -> StreamEnd {
        classify(self.bytes())
    }
}

/// What `word` says as the name of an event, or as the `type` in its data.
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
