//! One piece of a response body, in the caller's memory where that saves a copy.
//!
//! Apart from the body, because the servers take such pieces from bodies of other kinds as well.

use std::ops::Range;

use bytes::Bytes;

/// One piece of the body.
#[derive(Debug)]
pub enum ScratchFrame {
    /// A range of the borrowed memory.
    InScratch(Range<usize>),
    /// Owns its memory: it arrived with the head, or is the error event of a broken stream.
    Owned(Bytes),
}

impl ScratchFrame {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::InScratch(range) => range.len(),
            Self::Owned(bytes) => bytes.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes. `memory`: the memory that was lent to the poll.
    #[must_use]
    pub fn bytes<'a>(&'a self, memory: &'a [u8]) -> &'a [u8] {
        match self {
            Self::InScratch(range) => memory.get(range.clone()).unwrap_or_default(),
            Self::Owned(bytes) => bytes,
        }
    }

    /// As [`Self::bytes`], but owned.
    #[must_use]
    pub fn into_bytes(self, memory: &[u8]) -> Bytes {
        match self {
            Self::InScratch(range) => Bytes::copy_from_slice(memory.get(range).unwrap_or_default()),
            Self::Owned(bytes) => bytes,
        }
    }
}
