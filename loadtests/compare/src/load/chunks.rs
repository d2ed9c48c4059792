//! Decodes a chunked body incrementally.

/// The decoder's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LoadChunkedState {
    /// In a size line: its digits so far, and whether an extension began.
    #[default]
    Start,
    Size {
        size: u64,
        extension: bool,
    },
    Data(u64),
    /// After a chunk's data, until its line ends.
    AfterData,
    /// In the lines after the last chunk, and whether the current line is still empty.
    Trailer {
        empty: bool,
    },
    End,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LoadChunkedDecoder(LoadChunkedState);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MalformedChunks;

impl LoadChunkedDecoder {
    /// Returns the next piece of the body in `bytes` and advances `bytes` past it. `None` when all was read or the body
    /// has ended.
    pub(super) fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Result<Option<&'a [u8]>, MalformedChunks> {
        loop {
            if let LoadChunkedState::Data(remaining) = self.0 {
                let length = bytes.len().min(usize::try_from(remaining).unwrap_or(usize::MAX));
                let (piece, rest) = bytes.split_at(length);
                if piece.is_empty() {
                    return Ok(None);
                }
                *bytes = rest;
                let remaining = remaining - length as u64;
                self.0 = if remaining == 0 {
                    LoadChunkedState::AfterData
                } else {
                    LoadChunkedState::Data(remaining)
                };
                return Ok(Some(piece));
            }
            if self.0 == LoadChunkedState::End {
                return Ok(None);
            }
            let Some((byte, rest)) = bytes.split_first() else { return Ok(None) };
            *bytes = rest;
            self.0 = self.0.after(*byte)?;
        }
    }

    pub(super) fn ended(&self) -> bool {
        self.0 == LoadChunkedState::End
    }
}

impl LoadChunkedState {
    fn after(self, byte: u8) -> Result<Self, MalformedChunks> {
        Ok(match (self, byte) {
            (Self::Start, _) => Self::Size { size: digit(byte)?, extension: false },
            (Self::Size { size: 0, .. }, b'\n') => Self::Trailer { empty: true },
            (Self::Size { size, .. }, b'\n') => Self::Data(size),
            (Self::Size { size, .. }, b';' | b' ') => Self::Size { size, extension: true },
            (Self::Size { .. }, b'\r') | (Self::Size { extension: true, .. }, _) => self,
            (Self::Size { size, .. }, _) if size >> 56 == 0 => {
                Self::Size { size: size << 4 | digit(byte)?, extension: false }
            }
            (Self::AfterData, b'\r') | (Self::Trailer { .. }, b'\r') => self,
            (Self::AfterData, b'\n') => Self::Start,
            (Self::Trailer { empty: true }, b'\n') => Self::End,
            (Self::Trailer { .. }, b'\n') => Self::Trailer { empty: true },
            (Self::Trailer { .. }, _) => Self::Trailer { empty: false },
            (Self::Size { .. } | Self::AfterData | Self::Data(_) | Self::End, _) => {
                return Err(MalformedChunks);
            }
        })
    }
}

fn digit(byte: u8) -> Result<u64, MalformedChunks> {
    char::from(byte).to_digit(16).map(u64::from).ok_or(MalformedChunks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(text: &[u8], step: usize) -> Result<(Vec<u8>, bool), MalformedChunks> {
        let mut chunks = LoadChunkedDecoder::default();
        let mut body = Vec::new();
        for mut bytes in text.chunks(step) {
            while let Some(piece) = chunks.next(&mut bytes)? {
                body.extend_from_slice(piece);
            }
        }
        Ok((body, chunks.ended()))
    }

    #[test]
    fn a_body_is_the_same_in_pieces_of_any_size() {
        let text = b"3\r\nabc\r\n0A;name=value\r\n0123456789\r\n0\r\ntrailer: x\r\n\r\n";
        for step in 1..=text.len() {
            assert_eq!(decoded(text, step), Ok((b"abc0123456789".to_vec(), true)), "steps of {step}");
        }
        assert_eq!(decoded(&text[..text.len() - 2], 9), Ok((b"abc0123456789".to_vec(), false)));
    }

    #[test]
    fn what_is_no_chunk_is_refused() {
        for text in [&b"x\r\n"[..], b"3\r\nabcd\r\n", b"\r\n", b"fffffffffffffffff\r\n"] {
            assert_eq!(decoded(text, 64), Err(MalformedChunks));
        }
    }
}
