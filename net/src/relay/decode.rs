//! Extracts the payload from an HTTP/1.1 body's framing, in place.
//!
//! Several chunks that arrive in one read become one frame: their payloads are moved together inside the memory they
//! were read into. That costs a short `memmove`, and saves a wake-up and a write for each chunk.

use std::ops::Range;

use bytes::Bytes;

use super::head::MalformedResponse;

/// The framing of a body, with the part that is still to come.
#[derive(Debug)]
pub(crate) enum BodyDecoder {
    Length(u64),
    Chunked(ChunkedDecoder),
    UntilClose,
}

/// The result of decoding some bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DecodedBytes {
    /// The payload, moved together into one range. The bytes outside it are no longer intact.
    pub(crate) payload: Range<usize>,
    /// How many of the bytes belong to the body: all of them, except at its end.
    pub(crate) used: usize,
}

impl DecodedBytes {
    /// Adds the next `length` unused bytes to the payload, and moves them behind the payload found so far.
    #[inline]
    pub(crate) fn add_payload(&mut self, bytes: &mut [u8], length: usize) {
        let added = self.used..self.used + length;
        self.used = added.end;
        if self.payload.is_empty() {
            self.payload = added;
        } else {
            bytes.copy_within(added, self.payload.end);
            self.payload.end += length;
        }
    }
}

/// The position in a chunked body.
#[derive(Debug)]
pub(crate) struct ChunkedDecoder {
    state: ChunkedState,
    /// Bytes of framing since the last payload. Limited, so that an engine that sends only framing is cut off.
    framing: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkedState {
    /// In the size, after `digits` digits.
    Size {
        value: u64,
        digits: u8,
    },
    /// In a chunk extension, which may follow the size.
    Extension {
        value: u64,
    },
    SizeEnd {
        value: u64,
    },
    Data {
        left: u64,
    },
    DataCr,
    DataLf,
    /// At the beginning of a trailer line, or of the empty line that ends the body.
    Trailer,
    InTrailer,
    LastLf,
    Done,
}

const MAX_FRAMING_BYTES: usize = 64 << 10;
/// Hexadecimal digits of a chunk's size.
const MAX_SIZE_DIGITS: usize = 15;

const CHUNK_START: ChunkedState = ChunkedState::Size { value: 0, digits: 0 };

impl BodyDecoder {
    pub(super) const fn chunked() -> Self {
        Self::Chunked(ChunkedDecoder { state: CHUNK_START, framing: 0 })
    }

    /// Reports whether the framing shows that the body is complete.
    pub(crate) fn is_done(&self) -> bool {
        match self {
            Self::Length(remaining) => *remaining == 0,
            Self::Chunked(chunks) => chunks.state == ChunkedState::Done,
            Self::UntilClose => false,
        }
    }

    /// Payload bytes still to come, where known.
    pub(super) const fn remaining(&self) -> Option<u64> {
        match self {
            Self::Length(remaining) => Some(*remaining),
            Self::Chunked(_) | Self::UntilClose => None,
        }
    }

    /// Reports whether the bytes that arrived with the head cannot begin this body.
    pub(super) fn refuses(&self, buffered: &Bytes) -> bool {
        matches!(self, Self::Chunked(_))
            && !buffered.is_empty()
            && Self::chunked().decode_buffered(&mut buffered.clone()).is_err()
    }

    /// Decodes the next bytes, which may be cut anywhere.
    pub(crate) fn decode(&mut self, bytes: &mut [u8]) -> Result<DecodedBytes, MalformedResponse> {
        match self {
            Self::UntilClose => Ok(DecodedBytes { payload: 0..bytes.len(), used: bytes.len() }),
            Self::Length(remaining) => {
                let length = usize::try_from(*remaining).unwrap_or(usize::MAX).min(bytes.len());
                *remaining -= length as u64;
                Ok(DecodedBytes { payload: 0..length, used: length })
            }
            Self::Chunked(chunks) => chunks.decode(bytes),
        }
    }

    /// As [`Self::decode`], for bytes that arrived with the head. Removes the consumed bytes from `buffered`.
    pub(super) fn decode_buffered(&mut self, buffered: &mut Bytes) -> Result<Bytes, MalformedResponse> {
        if let Self::Chunked(chunks) = self {
            let mut bytes = buffered.to_vec();
            let found = chunks.decode(&mut bytes)?;
            drop(buffered.split_to(found.used));
            return Ok(Bytes::from(bytes).slice(found.payload));
        }
        let length = match self {
            Self::Length(remaining) => usize::try_from(*remaining).unwrap_or(usize::MAX).min(buffered.len()),
            _ => buffered.len(),
        };
        if let Self::Length(remaining) = self {
            *remaining -= length as u64;
        }
        Ok(buffered.split_to(length))
    }
}

impl ChunkedDecoder {
    fn decode(&mut self, bytes: &mut [u8]) -> Result<DecodedBytes, MalformedResponse> {
        let mut found = DecodedBytes { payload: 0..0, used: 0 };
        while found.used < bytes.len() && self.state != ChunkedState::Done {
            if let ChunkedState::Data { left } = self.state {
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len() - found.used);
                found.add_payload(bytes, length);
                self.framing = 0;
                self.state = match left - length as u64 {
                    0 if bytes.get(found.used..found.used + 2).is_some_and(|end| end == b"\r\n") => {
                        found.used += 2;
                        self.framing = 2;
                        CHUNK_START
                    }
                    0 => ChunkedState::DataCr,
                    left => ChunkedState::Data { left },
                };
            } else if let (CHUNK_START, Some((left, length))) =
                (self.state, size_line(bytes.get(found.used..).unwrap_or_default()))
            {
                self.state = ChunkedState::Data { left };
                self.framing += length;
                found.used += length;
            } else {
                self.state = self.state.after(*bytes.get(found.used).ok_or(MalformedResponse)?)?;
                self.framing += 1;
                found.used += 1;
            }
        }
        if self.framing > MAX_FRAMING_BYTES {
            return Err(MalformedResponse);
        }
        Ok(found)
    }
}

/// Parses a size line that is complete and has no extension, as nearly all are; returns the size and the line's length.
/// `None` for all other lines, and for the last chunk.
fn size_line(bytes: &[u8]) -> Option<(u64, usize)> {
    let mut size = 0;
    for (digits, &byte) in bytes.iter().enumerate().take(MAX_SIZE_DIGITS + 1) {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            b'\r' if size > 0 && bytes.get(digits + 1) == Some(&b'\n') => return Some((size, digits + 2)),
            _ => return None,
        };
        size = size << 4 | u64::from(digit);
    }
    None
}

impl ChunkedState {
    /// Advances by one byte of framing.
    fn after(self, byte: u8) -> Result<Self, MalformedResponse> {
        Ok(match (self, byte) {
            (Self::Size { value, digits }, _)
                if byte.is_ascii_hexdigit() && usize::from(digits) < MAX_SIZE_DIGITS =>
            {
                let digit = char::from(byte).to_digit(16).map_or(0, u64::from);
                Self::Size { value: value << 4 | digit, digits: digits + 1 }
            }
            (Self::Size { digits: 0, .. }, _) => return Err(MalformedResponse),
            (Self::Size { value, .. } | Self::Extension { value }, b'\r') => Self::SizeEnd { value },
            (Self::Size { value, .. }, b';' | b' ' | b'\t') => Self::Extension { value },
            (Self::Extension { value }, byte) if byte != b'\n' => Self::Extension { value },
            (Self::SizeEnd { value: 0 }, b'\n') => Self::Trailer,
            (Self::SizeEnd { value }, b'\n') => Self::Data { left: value },
            (Self::DataCr, b'\r') => Self::DataLf,
            (Self::DataLf, b'\n') => CHUNK_START,
            (Self::Trailer, b'\r') => Self::LastLf,
            (Self::LastLf, b'\n') => Self::Done,
            (Self::InTrailer, b'\n') => Self::Trailer,
            (Self::Trailer | Self::InTrailer, _) => Self::InTrailer,
            _ => return Err(MalformedResponse),
        })
    }
}

#[cfg(test)]
mod tests;
