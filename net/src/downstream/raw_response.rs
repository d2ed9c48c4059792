//! An answer on its way to a client of HTTP/1.1, without hyper.
//!
//! It is the same body that hyper would have asked, asked in the same way: for the next frame only when the last one is
//! written. So everything that a body decides (heartbeats, deadlines, the last word of a broken stream, what is counted)
//! is decided once, here and there. What is left is the framing, which is always ours: what an engine puts between its
//! chunks stays with us.

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
/// The size of a chunk and its line end, and what stands behind its payload, with the last chunk.
const CHUNK_PREFIX_BYTES: usize = 18;
const CHUNK_SUFFIX_BYTES: usize = 7;

/// An answer that passes.
#[derive(Debug)]
pub struct RawResponse<P, B> {
    peer: Rc<P>,
    pool: ConnectionPool,
    /// `None` when all of it was given to us.
    reply: Option<B>,
    /// What the socket did not take yet; begins with the head.
    unwritten: io::Cursor<Vec<u8>>,
    /// The head waits for what is ready to follow it.
    head_pending: bool,
    /// The connection ends with it.
    close_after: bool,
}

/// The client has a part of the answer, and no more will come.
#[derive(Clone, Copy, Debug)]
pub struct TruncatedResponse;

impl<P: DownstreamIo, B> RawResponse<P, B> {
    /// `head`: as it is written.
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

    /// The connection ends with it.
    pub(super) const fn closes_connection(&self) -> bool {
        self.close_after
    }
}

impl<P: DownstreamIo, B: ScratchBody> RawResponse<P, B> {
    /// Ready when the client was given all.
    ///
    /// # Errors
    /// Either side broke.
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
                // What still waits for its engine reads nothing into it, and may need the core's memory itself.
                self.poll_forward(&mut [], cx)
            };
            match passed {
                Poll::Pending if self.unwritten.has_remaining() => {}
                passed => ready!(passed)?,
            }
        }
    }

    /// The next frame is written, or what of it is not taken is kept. `memory`: lent for it, if any is.
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
            // A vector takes all.
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
        // What waits for its next event holds no memory.
        self.unwritten = io::Cursor::default();
        self.peer.poll_flush(cx)
    }
}

/// Makes a chunk of `payload` where it lies, which must not be empty; tells where the chunk does.
#[expect(
    clippy::indexing_slicing,
    reason = "whoever lent the memory left BEFORE and BEHIND bytes around the payload"
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
