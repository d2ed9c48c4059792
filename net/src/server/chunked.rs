//! Extracts the payload from the chunks of a request's body, in place.
//!
//! This one refuses all that two readers could understand differently, because proxies may stand before the gateway.
//! hyper is slightly more lenient: see `server/tests/differential.rs`.
//!
//! The relay has a decoder of its own for engines' responses (`relay/decode.rs`), which accepts what engines send. The
//! two share [`DecodedBytes`], and no more. One decoder with limits would carry these limits and the held trailers in
//! each open stream, where the relay's holds a state and one counter. And limits would not be enough: the two differ in
//! what may follow a size, in how extensions are counted (over the body here, since the last payload there), in bare
//! line ends of trailers and in their errors, so that nearly every step would depend on the side.

use super::Http1Limits;
use crate::relay::DecodedBytes;

/// Most bytes of chunk extensions in one body.
const MAX_EXTENSION_BYTES: usize = 16 << 10;
/// Hexadecimal digits of a chunk's size, with leading zeros.
const MAX_SIZE_DIGITS: u8 = 16;

pub(super) const SIZE_TOO_LONG: &str = "the size of a chunk has more than 16 digits";
pub(super) const BARE_LINE_END: &str = "a trailer has a bare line end";
const BAD_SIZE: &str = "the size of a chunk is not a hexadecimal number";
const BAD_EXTENSION: &str = "a chunk extension has a bare line end";
const LONG_EXTENSIONS: &str = "the chunk extensions are too long";
const BAD_CHUNK_END: &str = "a chunk is longer than its size";
const BAD_TRAILER: &str = "a trailer is not a valid field";
const LONG_TRAILERS: &str = "the trailers are too long or too many";

/// The position in a chunked body.
#[derive(Debug)]
pub(super) struct RequestChunkDecoder {
    state: RequestChunkState,
    size: u64,
    digits: u8,
    extension_bytes: usize,
    /// The lines after the last chunk, with the empty one that ends them. Held for the check at the end.
    trailers: Vec<u8>,
    trailer_lines: usize,
    max_trailer_bytes: usize,
    max_trailers: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestChunkState {
    /// Before the first digit.
    Size,
    MoreSize,
    /// In the spaces after the size.
    Spaces,
    Extension,
    SizeLf,
    /// In the payload: `size` bytes are left.
    Data,
    DataCr,
    DataLf,
    /// At the beginning of a trailer line, or of the empty line that ends the body.
    Line,
    Trailer,
    TrailerLf,
    LastLf,
    Done,
}

impl RequestChunkDecoder {
    pub(super) const fn new(limits: &Http1Limits) -> Self {
        Self {
            state: RequestChunkState::Size,
            size: 0,
            digits: 0,
            extension_bytes: 0,
            trailers: Vec::new(),
            trailer_lines: 0,
            max_trailer_bytes: limits.max_head_bytes,
            max_trailers: limits.max_headers,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.state == RequestChunkState::Done
    }

    /// Decodes the next bytes, which may be cut anywhere.
    ///
    /// # Errors
    /// The reason why the framing is refused.
    pub(super) fn decode(&mut self, bytes: &mut [u8]) -> Result<DecodedBytes, &'static str> {
        let mut found = DecodedBytes { payload: 0..0, used: 0 };
        while let Some(&byte) = bytes.get(found.used) {
            match self.state {
                RequestChunkState::Done => break,
                RequestChunkState::Data => {
                    let unused = bytes.len() - found.used;
                    let length = usize::try_from(self.size).unwrap_or(usize::MAX).min(unused);
                    found.add_payload(bytes, length);
                    self.size -= length as u64;
                    if self.size == 0 {
                        self.state = RequestChunkState::DataCr;
                    }
                }
                _ => {
                    self.state = self.after(byte)?;
                    found.used += 1;
                    if self.is_done() {
                        self.check_trailers()?;
                    }
                }
            }
        }
        Ok(found)
    }

    /// Advances by one byte of framing.
    fn after(&mut self, byte: u8) -> Result<RequestChunkState, &'static str> {
        use RequestChunkState::{
            Data, DataCr, DataLf, Done, Extension, LastLf, Line, MoreSize, Size, SizeLf, Spaces, Trailer,
            TrailerLf,
        };
        Ok(match (self.state, byte) {
            (Size | MoreSize, _) if byte.is_ascii_hexdigit() => self.add_digit(byte)?,
            (Size, _) => return Err(BAD_SIZE),
            (MoreSize | Spaces, b' ' | b'\t') => Spaces,
            (MoreSize | Spaces, b';') => Extension,
            (MoreSize | Spaces | Extension, b'\r') => SizeLf,
            (MoreSize | Spaces, _) => return Err(BAD_SIZE),
            (Extension, b'\n') => return Err(BAD_EXTENSION),
            (Extension, _) => {
                self.extension_bytes += 1;
                if self.extension_bytes >= MAX_EXTENSION_BYTES {
                    return Err(LONG_EXTENSIONS);
                }
                Extension
            }
            (SizeLf, b'\n') if self.size == 0 => Line,
            (SizeLf, b'\n') => Data,
            (SizeLf, _) => return Err(BAD_SIZE),
            (DataCr, b'\r') => DataLf,
            (DataLf, b'\n') => {
                self.digits = 0;
                Size
            }
            (DataCr | DataLf, _) => return Err(BAD_CHUNK_END),
            (Line, b'\r') => LastLf,
            (Line | Trailer, b'\n') => return Err(BARE_LINE_END),
            (Line | Trailer, _) => self.add_trailer_byte(byte)?,
            (TrailerLf, b'\n') => self.end_trailer()?,
            (LastLf, b'\n') => Done,
            (TrailerLf | LastLf, _) => return Err(BARE_LINE_END),
            (Data | Done, _) => self.state,
        })
    }

    fn add_digit(&mut self, byte: u8) -> Result<RequestChunkState, &'static str> {
        if self.digits == MAX_SIZE_DIGITS {
            return Err(SIZE_TOO_LONG);
        }
        let digit = char::from(byte).to_digit(16).map_or(0, u64::from);
        self.size = if self.digits == 0 { digit } else { self.size << 4 | digit };
        self.digits += 1;
        Ok(RequestChunkState::MoreSize)
    }

    fn add_trailer_byte(&mut self, byte: u8) -> Result<RequestChunkState, &'static str> {
        self.trailers.push(byte);
        // The line that ends them counts too.
        if self.trailers.len() + 2 >= self.max_trailer_bytes {
            return Err(LONG_TRAILERS);
        }
        Ok(if byte == b'\r' { RequestChunkState::TrailerLf } else { RequestChunkState::Trailer })
    }

    fn end_trailer(&mut self) -> Result<RequestChunkState, &'static str> {
        self.trailers.push(b'\n');
        self.trailer_lines += 1;
        if self.trailer_lines > self.max_trailers || self.trailers.len() + 2 >= self.max_trailer_bytes {
            return Err(LONG_TRAILERS);
        }
        Ok(RequestChunkState::Line)
    }

    /// Checks the trailers, and drops them: no service reads them.
    fn check_trailers(&mut self) -> Result<(), &'static str> {
        if self.trailers.is_empty() {
            return Ok(());
        }
        let mut lines = std::mem::take(&mut self.trailers);
        lines.extend_from_slice(b"\r\n");
        let mut fields = vec![httparse::EMPTY_HEADER; self.trailer_lines];
        match httparse::parse_headers(&lines, &mut fields) {
            Ok(httparse::Status::Complete((length, _))) if length == lines.len() => Ok(()),
            _ => Err(BAD_TRAILER),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(wire: &[u8], cut: usize) -> Result<(Vec<u8>, usize), &'static str> {
        let limits = Http1Limits { max_head_bytes: 64, max_headers: 2, ..Http1Limits::default() };
        let mut decoder = RequestChunkDecoder::new(&limits);
        let (mut body, mut used) = (Vec::new(), 0);
        for piece in wire.chunks(cut) {
            let mut piece = piece.to_vec();
            let found = decoder.decode(&mut piece)?;
            body.extend_from_slice(&piece[found.payload]);
            used += found.used;
        }
        if decoder.is_done() { Ok((body, used)) } else { Err("incomplete") }
    }

    #[test]
    fn a_body_is_the_same_wherever_it_is_cut() {
        for (wire, body, behind) in [
            ("0\r\n\r\n", "", 0),
            ("3\r\nabc\r\n0\r\n\r\n", "abc", 0),
            ("3\r\nabc\r\n00a \t;x=y\r\n0123456789\r\n000;z\r\n\r\nGET /", "abc0123456789", 5),
            (
                "1\r\na\r\n1\r\nb\r\nB\r\nc\r\nd\r\n 1234\r\n0\r\nX-A: 1\r\nX-B: 2\r\n\r\n",
                "abc\r\nd\r\n 1234",
                0,
            ),
        ] {
            for cut in 1..=wire.len() {
                let used = wire.len() - behind;
                assert_eq!(
                    decode(wire.as_bytes(), cut),
                    Ok((body.as_bytes().to_vec(), used)),
                    "{wire:?} {cut}"
                );
            }
        }
    }

    #[test]
    fn framing_that_two_readers_could_understand_differently_is_refused() {
        let trailers = "X: y\r\n".repeat(3);
        for (wire, why) in [
            ("\r\n", BAD_SIZE),
            ("x\r\n", BAD_SIZE),
            ("+1\r\na\r\n", BAD_SIZE),
            ("1 1\r\na\r\n", BAD_SIZE),
            ("1\na\r\n", BAD_SIZE),
            ("1\rxa\r\n", BAD_SIZE),
            ("00000000000000001\r\na\r\n", SIZE_TOO_LONG),
            ("1;x\ny\r\na\r\n", BAD_EXTENSION),
            ("1\r\nab\r\n", BAD_CHUNK_END),
            ("1\r\na\rb", BAD_CHUNK_END),
            ("0\r\n\n", BARE_LINE_END),
            ("0\r\nX: a\n\r\n", BARE_LINE_END),
            ("0\r\nX: a\rb\r\n\r\n", BARE_LINE_END),
            ("0\r\n\rX", BARE_LINE_END),
            ("0\r\nX a\r\n\r\n", BAD_TRAILER),
            ("0\r\nX: a\r\n b\r\n\r\n", BAD_TRAILER),
            ("0\r\nX: \0\r\n\r\n", BAD_TRAILER),
            (&format!("0\r\n{trailers}\r\n"), LONG_TRAILERS),
            (&format!("0\r\nX: {}\r\n\r\n", "y".repeat(64)), LONG_TRAILERS),
            (&format!("1;{}\r\n", "x".repeat(MAX_EXTENSION_BYTES)), LONG_EXTENSIONS),
        ] {
            for cut in [1, 2, 3, wire.len()] {
                assert_eq!(decode(wire.as_bytes(), cut).unwrap_err(), why, "{wire:?} by {cut}");
            }
        }
    }
}
