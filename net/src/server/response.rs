//! Writes a response to the client.
//!
//! The next frame is polled only after the last one is written, so a slow client slows its engine. So everything that a
//! body decides (heartbeats, deadlines, the final event of a broken stream, metrics) has a single implementation. What
//! remains is the framing, and it is always ours: the engine's own chunk framing is not forwarded.
//!
//! A frame of an engine is read into the core's memory, framed there and written from there. The head is written
//! together with the first frame if that one is ready.

use std::{
    io::Write as _,
    ops::Range,
    task::{Context, Poll, ready},
};

use bytes::Bytes;

use super::{
    Http1End, ScratchBody, ServerIo,
    response_head::{OutgoingFraming, ResponsePlan},
    unwritten::Unwritten,
    wire::Wire,
};
use crate::relay::ScratchFrame;

const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
const CHUNK_END: &[u8] = b"\r\n";
const LAST_CHUNK_END: &[u8] = b"\r\n0\r\n\r\n";
/// Room for a chunk's framing: its size line in front of the payload, and the line end and the last chunk behind it.
const CHUNK_PREFIX_BYTES: usize = 18;
const CHUNK_SUFFIX_BYTES: usize = LAST_CHUNK_END.len();
/// Largest frame that is copied behind its head or its size line, so that one write suffices.
const MAX_COPIED_FRAME_BYTES: usize = 16 << 10;

/// A response whose head is decided.
#[derive(Debug)]
pub(super) struct ResponseWriter<B> {
    /// `None` once the body has ended.
    body: Option<B>,
    framing: OutgoingFraming,
    /// The connection ends after this response.
    close: bool,
    unwritten: Unwritten,
    unflushed: bool,
}

impl<B: ScratchBody> ResponseWriter<B> {
    /// Writes the head, with the first frame if that is ready. `head` appends the head.
    ///
    /// # Errors
    /// The client's connection broke, or the body failed at once. Nothing of the response is written then.
    pub(super) fn start<P: ServerIo>(
        wire: &Wire<P>,
        plan: &ResponsePlan,
        head: impl FnOnce(&mut Vec<u8>),
        body: B,
        cx: &mut Context<'_>,
    ) -> Result<Self, Http1End> {
        let mut writer = Self {
            body: (plan.framing != OutgoingFraming::Empty).then_some(body),
            framing: plan.framing,
            close: plan.close,
            unwritten: Unwritten::default(),
            unflushed: false,
        };
        wire.pool.with_write_buffer(|out| {
            out.extend_from_slice(wire.take_interim());
            head(out);
            if writer.body.is_none() || writer.poll_forward(wire, out, cx)?.is_pending() {
                writer.write(wire, out, cx)?;
            }
            Ok(writer)
        })
    }

    /// Reports whether a body is left to poll.
    pub(super) const fn has_body(&self) -> bool {
        self.body.is_some()
    }

    /// Reports whether the connection ends after this response.
    pub(super) const fn closes_connection(&self) -> bool {
        self.close
    }

    /// Ready when the client has accepted the whole response.
    ///
    /// # Errors
    /// The client's connection or the body broke.
    pub(super) fn poll<P: ServerIo>(
        &mut self,
        wire: &Wire<P>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Http1End>> {
        loop {
            ready!(self.unwritten.poll_write(&*wire.peer, cx)).map_err(Http1End::Broken)?;
            if self.unflushed {
                ready!(wire.peer.poll_flush(cx)).map_err(Http1End::Broken)?;
                self.unflushed = false;
            }
            if self.body.is_none() {
                return Poll::Ready(Ok(()));
            }
            ready!(wire.pool.with_write_buffer(|out| self.poll_forward(wire, out, cx)))?;
        }
    }

    /// Polls the next frame and writes it behind `head`, which is the head before the first frame, and empty before the
    /// others. When the frame is not ready, `head` is not written. What the socket does not accept is kept.
    fn poll_forward<P: ServerIo>(
        &mut self,
        wire: &Wire<P>,
        head: &mut Vec<u8>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Http1End>> {
        let Some(body) = &mut self.body else { return Poll::Ready(Ok(())) };
        if body.uses_scratch() {
            return wire.pool.with_scratch(|memory| self.poll_forward_scratch(wire, head, memory, cx));
        }
        // A body that still waits for its engine does not read into scratch memory, and may itself need the core's.
        let frame = ready!(body.poll_frame_into(None, cx)).transpose().map_err(|_| Http1End::Truncated)?;
        let frame = frame.map(|frame| frame.into_bytes(&[]));
        Poll::Ready(self.forward_owned(wire, head, frame, cx))
    }

    /// As [`Self::poll_forward`]. `memory` is lent for the frame.
    fn poll_forward_scratch<P: ServerIo>(
        &mut self,
        wire: &Wire<P>,
        head: &mut Vec<u8>,
        memory: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Http1End>> {
        let Some(body) = &mut self.body else { return Poll::Ready(Ok(())) };
        let start = head.len() + CHUNK_PREFIX_BYTES;
        let end = memory.len().saturating_sub(CHUNK_SUFFIX_BYTES);
        // A head that fills the memory leaves none to the frame, which is then owned. A read into no memory would look
        // like the engine's end.
        let room = memory.get_mut(start..end).filter(|room| !room.is_empty());
        let frame = ready!(body.poll_frame_into(room, cx));
        let range = match frame.transpose().map_err(|_| Http1End::Truncated)? {
            Some(ScratchFrame::InScratch(range)) if !range.is_empty() => {
                start + range.start..start + range.end
            }
            other => {
                let bytes = other.map(|frame| frame.into_bytes(&[]));
                return Poll::Ready(self.forward_owned(wire, head, bytes, cx));
            }
        };
        let (length, ends) = self.take_frame(Some(range.len()))?;
        let range = range.start..range.start + length;
        let framed = match self.framing {
            OutgoingFraming::Chunked => frame_chunk(memory, range, ends),
            _ => range,
        };
        let begin = framed.start - head.len();
        if let Some(room) = memory.get_mut(begin..framed.start) {
            room.copy_from_slice(head);
        }
        Poll::Ready(self.write(wire, memory.get(begin..framed.end).unwrap_or_default(), cx))
    }

    /// Writes `out` and behind it a frame, or the end of the body.
    fn forward_owned<P: ServerIo>(
        &mut self,
        wire: &Wire<P>,
        out: &mut Vec<u8>,
        frame: Option<Bytes>,
        cx: &mut Context<'_>,
    ) -> Result<(), Http1End> {
        let (length, ends) = self.take_frame(frame.as_ref().map(Bytes::len))?;
        let mut frame = frame.unwrap_or_default();
        frame.truncate(length);
        let is_chunked = self.framing == OutgoingFraming::Chunked;
        if is_chunked && !frame.is_empty() {
            // Writing to a vector cannot fail.
            drop(write!(out, "{:X}\r\n", frame.len()));
        }
        let tail: &'static [u8] = match (is_chunked, frame.is_empty(), ends) {
            (true, true, true) => LAST_CHUNK,
            (true, false, true) => LAST_CHUNK_END,
            (true, false, false) => CHUNK_END,
            (false, ..) | (true, true, false) => &[],
        };
        if frame.len() > MAX_COPIED_FRAME_BYTES {
            self.write(wire, out, cx)?;
            self.unwritten.set_frame(frame, tail);
            // Without framing there was nothing to write yet.
            self.unflushed = true;
            return Ok(());
        }
        out.extend_from_slice(&frame);
        out.extend_from_slice(tail);
        self.write(wire, out, cx)
    }

    /// Records a frame of this length, or with `None` the end of the body. Returns how much of the frame is written,
    /// and whether the body ends with it.
    fn take_frame(&mut self, length: Option<usize>) -> Result<(usize, bool), Http1End> {
        let mut ends = length.is_none() || self.body.as_ref().is_none_or(http_body::Body::is_end_stream);
        let mut length = length.unwrap_or(0);
        if let OutgoingFraming::Length(left) = &mut self.framing {
            length = length.min(usize::try_from(*left).unwrap_or(usize::MAX));
            *left -= length as u64;
            if ends && *left > 0 {
                return Err(Http1End::Truncated);
            }
            ends = *left == 0;
        }
        if ends {
            self.body = None;
        }
        Ok((length, ends))
    }

    /// Writes `bytes`, and keeps those that the socket does not accept. Nothing may be unwritten before.
    fn write<P: ServerIo>(
        &mut self,
        wire: &Wire<P>,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<(), Http1End> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.unflushed = true;
        let written = match wire.peer.poll_write(cx, bytes) {
            Poll::Ready(written) => written.map_err(Http1End::Broken)?,
            Poll::Pending => 0,
        };
        match bytes.get(written..) {
            None | Some([]) => {}
            Some(rest) => self.unwritten.set_copied(rest),
        }
        Ok(())
    }
}

/// Frames the non-empty `payload` as a chunk, in place, and returns the chunk's range.
#[expect(
    clippy::indexing_slicing,
    reason = "the owner of the memory left CHUNK_PREFIX_BYTES and CHUNK_SUFFIX_BYTES around the payload"
)]
fn frame_chunk(memory: &mut [u8], payload: Range<usize>, ends: bool) -> Range<usize> {
    let Range { mut start, mut end } = payload;
    let mut left = end - start;
    start -= 2;
    memory[start..start + 2].copy_from_slice(b"\r\n");
    while left > 0 {
        start -= 1;
        memory[start] = b"0123456789ABCDEF"[left % 16];
        left /= 16;
    }
    let behind = if ends { LAST_CHUNK_END } else { CHUNK_END };
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
            let chunk = frame_chunk(&mut memory, CHUNK_PREFIX_BYTES..CHUNK_PREFIX_BYTES + length, ends);
            assert_eq!(memory[chunk], *wire.as_bytes());
        }
        let mut memory = vec![b'x'; CHUNK_PREFIX_BYTES + (64 << 10) + CHUNK_SUFFIX_BYTES];
        let chunk = frame_chunk(&mut memory, CHUNK_PREFIX_BYTES..CHUNK_PREFIX_BYTES + (64 << 10), false);
        assert!(memory[chunk].starts_with(b"10000\r\nxx"));
    }
}
