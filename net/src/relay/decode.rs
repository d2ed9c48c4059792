//! Takes the payload out of an HTTP/1.1 body's framing, in place.
//!
//! Several chunks that arrived in one read become one frame: their payloads are moved together inside the memory they
//! were read into, which costs a short `memmove` and saves a wake-up and a write for each of them.

use std::ops::Range;

use bytes::Bytes;

use super::head::MalformedResponse;

/// What ends a body, and how much is left of it.
#[derive(Debug)]
pub(super) enum BodyDecoder {
    Length(u64),
    Chunked(ChunkedDecoder),
    UntilClose,
}

/// What some bytes turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DecodedBytes {
    /// Where their payload now lies, as one piece. What they held besides it is no longer whole.
    pub(super) payload: Range<usize>,
    /// So many of them belong to the body: all, but at its end.
    pub(super) used: usize,
}

/// Where one is in a chunked body.
#[derive(Debug)]
pub(super) struct ChunkedDecoder {
    state: ChunkedState,
    /// Bytes of framing since the last payload; an engine that sends only framing is cut off.
    framing: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkedState {
    /// In the size, with so many digits read.
    Size {
        value: u64,
        digits: u8,
    },
    /// In what may follow the size on its line.
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
    /// At the beginning of a trailer's line, or of the empty one that ends the body.
    Trailer,
    InTrailer,
    LastLf,
    Done,
}

const MAX_FRAMING_BYTES: usize = 64 << 10;
/// Of a chunk's size.
const MAX_SIZE_DIGITS: usize = 15;

const CHUNK_START: ChunkedState = ChunkedState::Size { value: 0, digits: 0 };

impl BodyDecoder {
    pub(super) const fn chunked() -> Self {
        Self::Chunked(ChunkedDecoder { state: CHUNK_START, framing: 0 })
    }

    /// The body is complete by its own account.
    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(chunks) => chunks.state == ChunkedState::Done,
            Self::UntilClose => false,
        }
    }

    /// Payload bytes still to come, where that is known.
    pub(super) const fn remaining(&self) -> Option<u64> {
        match self {
            Self::Length(left) => Some(*left),
            Self::Chunked(_) | Self::UntilClose => None,
        }
    }

    /// What came along with the head cannot be the beginning of this body.
    pub(super) fn refuses(&self, held: &Bytes) -> bool {
        matches!(self, Self::Chunked(_))
            && !held.is_empty()
            && Self::chunked().decode_buffered(&mut held.clone()).is_err()
    }

    /// Takes the next bytes, cut anywhere.
    pub(super) fn decode(&mut self, bytes: &mut [u8]) -> Result<DecodedBytes, MalformedResponse> {
        match self {
            Self::UntilClose => Ok(DecodedBytes { payload: 0..bytes.len(), used: bytes.len() }),
            Self::Length(left) => {
                let here = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= here as u64;
                Ok(DecodedBytes { payload: 0..here, used: here })
            }
            Self::Chunked(chunks) => chunks.decode(bytes),
        }
    }

    /// The same for what came with the head; the bytes that were looked at are taken from `held`.
    pub(super) fn decode_buffered(&mut self, held: &mut Bytes) -> Result<Bytes, MalformedResponse> {
        if let Self::Chunked(chunks) = self {
            let mut bytes = held.to_vec();
            let found = chunks.decode(&mut bytes)?;
            drop(held.split_to(found.used));
            return Ok(Bytes::from(bytes).slice(found.payload));
        }
        let here = match self {
            Self::Length(left) => usize::try_from(*left).unwrap_or(usize::MAX).min(held.len()),
            _ => held.len(),
        };
        if let Self::Length(left) = self {
            *left -= here as u64;
        }
        Ok(held.split_to(here))
    }
}

impl ChunkedDecoder {
    fn decode(&mut self, bytes: &mut [u8]) -> Result<DecodedBytes, MalformedResponse> {
        // Payload found so far lies at begin..end; everything before `at` has been looked at.
        let (mut begin, mut end, mut at) = (0, 0, 0);
        while at < bytes.len() && self.state != ChunkedState::Done {
            if let ChunkedState::Data { left } = self.state {
                let here = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len() - at);
                if begin == end {
                    (begin, end) = (at, at + here);
                } else {
                    bytes.copy_within(at..at + here, end);
                    end += here;
                }
                at += here;
                self.framing = 0;
                self.state = match left - here as u64 {
                    0 if bytes.get(at..at + 2).is_some_and(|end| end == b"\r\n") => {
                        at += 2;
                        self.framing = 2;
                        CHUNK_START
                    }
                    0 => ChunkedState::DataCr,
                    left => ChunkedState::Data { left },
                };
            } else if let (CHUNK_START, Some((left, length))) =
                (self.state, size_line(bytes.get(at..).unwrap_or_default()))
            {
                self.state = ChunkedState::Data { left };
                self.framing += length;
                at += length;
            } else {
                self.state = self.state.after(*bytes.get(at).ok_or(MalformedResponse)?)?;
                self.framing += 1;
                at += 1;
            }
        }
        if self.framing > MAX_FRAMING_BYTES {
            return Err(MalformedResponse);
        }
        Ok(DecodedBytes { payload: begin..end, used: at })
    }
}

/// The size of a chunk that is not the last, and the length of its line, when `bytes` begin with one that is whole and says
/// nothing else, as nearly all do.
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
    /// One byte of framing.
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
