//! Forwards a response to an HTTP/1.1 client without hyper.
//!
//! This polls the same body that hyper would poll, and in the same way: it asks for the next frame only after the last
//! one is written. So everything that a body decides (heartbeats, deadlines, the final event of a broken stream,
//! metrics) has a single implementation. What remains is the framing, and it is always ours: the engine's own chunk
//! framing is not forwarded.

use std::{
    io,
    io::Write as _,
    ops::Range,
    rc::Rc,
    task::{Context, Poll, ready},
};

use bytes::Buf as _;

use super::{DownstreamIo, ScratchBody};
use crate::relay::{ConnectionPool, ScratchFrame};

const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
/// Room for a chunk's framing: its size line in front of the payload, and the line end and the last chunk behind it.
const CHUNK_PREFIX_BYTES: usize = 18;
const CHUNK_SUFFIX_BYTES: usize = 7;

/// A response that bypasses hyper.
#[derive(Debug)]
pub struct RawResponse<P, B> {
    peer: Rc<P>,
    pool: ConnectionPool,
    /// `None` once the body has ended.
    reply: Option<B>,
    /// Bytes that the socket has not accepted yet. Begins with the head.
    unwritten: io::Cursor<Vec<u8>>,
    /// The head is held back. It is written together with the first frame if that is ready.
    head_pending: bool,
    /// The connection closes after this response.
    close_after: bool,
}

/// The client received part of the response, and the rest will not follow.
#[derive(Clone, Copy, Debug)]
pub struct TruncatedResponse;

impl<P: DownstreamIo, B> RawResponse<P, B> {
    /// `head`: the serialized response head.
    pub(super) fn new(
        peer: Rc<P>,
        pool: ConnectionPool,
        (head, reply): (Vec<u8>, B),
        ends: bool,
    ) -> Box<Self> {
        Box::new(Self {
            peer,
            pool,
            reply: Some(reply),
            unwritten: io::Cursor::new(head),
            head_pending: true,
            close_after: ends,
        })
    }

    /// Reports whether the connection closes after this response.
    pub(super) const fn closes_connection(&self) -> bool {
        self.close_after
    }
}

impl<P: DownstreamIo, B: ScratchBody> RawResponse<P, B> {
    /// Ready when the client has received the whole response.
    ///
    /// # Errors
    /// The client's connection or the engine's broke.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), TruncatedResponse>> {
        loop {
            if !std::mem::take(&mut self.head_pending) {
                ready!(self.poll_write(cx)).map_err(|_| TruncatedResponse)?;
            }
            let Some(reply) = &self.reply else {
                return Poll::Ready(Ok(()));
            };
            let passed = if reply.uses_scratch() {
                let pool = self.pool.clone();
                pool.with_scratch(|memory| self.poll_forward(memory, cx))
            } else {
                // A body that still waits for its engine does not read into scratch memory, and may itself need the
                // core's.
                self.poll_forward(&mut [], cx)
            };
            match passed {
                Poll::Pending if self.unwritten.has_remaining() => {}
                passed => ready!(passed)?,
            }
        }
    }

    /// Writes the next frame, and keeps the bytes that the socket does not accept. `memory` is lent for the frame, and
    /// may be empty.
    fn poll_forward(
        &mut self,
        memory: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), TruncatedResponse>> {
        let Some(reply) = &mut self.reply else {
            return Poll::Ready(Ok(()));
        };
        let room = memory.get_mut(CHUNK_PREFIX_BYTES..memory.len().saturating_sub(CHUNK_SUFFIX_BYTES));
        let piece = ready!(reply.poll_frame_into(room, cx)).transpose().map_err(|_| TruncatedResponse)?;
        let ends = piece.is_none() || reply.is_end_stream();
        if ends {
            self.reply = None;
        }
        let framed = match piece {
            Some(ScratchFrame::InScratch(range)) => {
                frame(memory, range.start + CHUNK_PREFIX_BYTES..range.end + CHUNK_PREFIX_BYTES, ends)
            }
            Some(ScratchFrame::Owned(bytes)) => {
                self.add(&bytes, ends);
                return Poll::Ready(Ok(()));
            }
            None => {
                self.add(&[], ends);
                return Poll::Ready(Ok(()));
            }
        };
        let mut framed = memory.get(framed).unwrap_or_default();
        if !self.unwritten.has_remaining() {
            match self.peer.poll_write(cx, framed) {
                Poll::Ready(Ok(written)) => framed = framed.get(written..).unwrap_or_default(),
                Poll::Ready(Err(_)) => return Poll::Ready(Err(TruncatedResponse)),
                Poll::Pending => {}
            }
        }
        self.unwritten.get_mut().extend_from_slice(framed);
        Poll::Ready(Ok(()))
    }

    fn add(&mut self, payload: &[u8], ends: bool) {
        let out = self.unwritten.get_mut();
        if !payload.is_empty() {
            // Writing to a vector cannot fail.
            drop(write!(out, "{:X}\r\n", payload.len()));
            out.extend_from_slice(payload);
            out.extend_from_slice(b"\r\n");
        }
        if ends {
            out.extend_from_slice(LAST_CHUNK);
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.unwritten.has_remaining() {
            let written = ready!(self.peer.poll_write(cx, self.unwritten.chunk()))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unwritten.advance(written);
        }
        // A response that waits for its next event holds no buffer.
        self.unwritten = io::Cursor::default();
        self.peer.poll_flush(cx)
    }
}

/// Frames the non-empty `payload` as a chunk, in place, and returns the chunk's range.
#[expect(
    clippy::indexing_slicing,
    reason = "the owner of the memory left CHUNK_PREFIX_BYTES and CHUNK_SUFFIX_BYTES around the payload"
)]
fn frame(memory: &mut [u8], payload: Range<usize>, ends: bool) -> Range<usize> {
    let Range { mut start, mut end } = payload;
    let mut left = end - start;
    start -= 2;
    memory[start..start + 2].copy_from_slice(b"\r\n");
    while left > 0 {
        start -= 1;
        memory[start] = b"0123456789ABCDEF"[left % 16];
        left /= 16;
    }
    let behind: &[u8] = if ends { b"\r\n0\r\n\r\n" } else { b"\r\n" };
    memory[end..end + behind.len()].copy_from_slice(behind);
    end += behind.len();
    start..end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_becomes_a_chunk_where_it_lies() {
        for (length, ends, wire) in
            [(1, false, "1\r\nx\r\n"), (17, true, "11\r\nxxxxxxxxxxxxxxxxx\r\n0\r\n\r\n")]
        {
            let mut memory = vec![b'?'; CHUNK_PREFIX_BYTES];
            memory.resize(CHUNK_PREFIX_BYTES + length, b'x');
            memory.resize(CHUNK_PREFIX_BYTES + length + CHUNK_SUFFIX_BYTES, b'?');
            let chunk = frame(&mut memory, CHUNK_PREFIX_BYTES..CHUNK_PREFIX_BYTES + length, ends);
            assert_eq!(memory[chunk], *wire.as_bytes());
        }
        let mut memory = vec![b'x'; CHUNK_PREFIX_BYTES + (64 << 10) + CHUNK_SUFFIX_BYTES];
        let chunk = frame(&mut memory, CHUNK_PREFIX_BYTES..CHUNK_PREFIX_BYTES + (64 << 10), false);
        assert!(memory[chunk].starts_with(b"10000\r\nxx"));
    }
}
