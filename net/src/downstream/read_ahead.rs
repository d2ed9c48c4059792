//! Reads on where hyper does not look.
//!
//! hyper sees the end of a connection only while its own read buffer is empty: one stray byte after the body (a CRLF, as
//! some clients send) blinds it. So the socket is shared between hyper and the task that drives the connection. Whenever
//! hyper did not look at the socket during a poll, the task reads on in its place, up to [`MAX_READ_AHEAD_BYTES`] bytes. These belong to
//! a pipelined request and are handed to hyper later; an end or a reset means that the client left, also when only its
//! sending half was closed. A client that pipelines more than [`MAX_READ_AHEAD_BYTES`] bytes is noticed once it is written to.

use std::{
    cell::{Cell, RefCell},
    io,
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, ReadBuf};

/// Bytes read ahead of hyper at most, per connection.
pub const MAX_READ_AHEAD_BYTES: usize = 16 * 1024;

/// So much is read at a time.
const READ_CHUNK_BYTES: usize = 2048;

/// What was read ahead of hyper.
#[derive(Debug, Default)]
pub struct ReadAhead {
    bytes: RefCell<BytesMut>,
    /// hyper met an empty socket during the present poll, so its waker is registered and nothing is to be read ahead.
    hyper_read_pending: Cell<bool>,
}

impl ReadAhead {
    /// To be called before hyper is polled.
    #[inline]
    pub fn before_poll(&self) {
        self.hyper_read_pending.set(false);
    }

    /// To be called after hyper was polled during an exchange: true when the client left.
    #[inline]
    pub fn detect_disconnect(&self, stream: &RefCell<impl AsyncRead + Unpin>, cx: &mut Context<'_>) -> bool {
        !self.hyper_read_pending.get() && self.fill_until_pending(stream, cx)
    }

    fn fill_until_pending(&self, stream: &RefCell<impl AsyncRead + Unpin>, cx: &mut Context<'_>) -> bool {
        loop {
            let room = MAX_READ_AHEAD_BYTES.saturating_sub(self.bytes.borrow().len());
            if room == 0 {
                return false;
            }
            match self.poll_fill(stream, cx, room.min(READ_CHUNK_BYTES)) {
                Poll::Pending => return false,
                Poll::Ready(Ok(0) | Err(_)) => return true,
                Poll::Ready(Ok(_)) => {}
            }
        }
    }

    /// Waits until `wanted` bytes or the end have been read ahead; returns whether what came is the start of `wanted`
    /// in full. Used before hyper owns the connection, to tell HTTP/2 by its preface. `came`: there is something.
    pub fn poll_starts_with(
        &self,
        stream: &RefCell<impl AsyncRead + Unpin>,
        cx: &mut Context<'_>,
        wanted: &[u8],
        came: impl Fn(),
    ) -> Poll<io::Result<bool>> {
        loop {
            {
                let ahead = self.bytes.borrow();
                let common = ahead.iter().zip(wanted).take_while(|(a, b)| a == b).count();
                if common == wanted.len() {
                    return Poll::Ready(Ok(true));
                }
                if common < ahead.len() {
                    return Poll::Ready(Ok(false));
                }
            }
            match ready!(self.poll_fill(stream, cx, READ_CHUNK_BYTES)) {
                Err(error) => return Poll::Ready(Err(error)),
                Ok(0) => return Poll::Ready(Ok(false)),
                Ok(_) => came(),
            }
        }
    }

    /// What hyper had read and not used, before it went.
    pub fn unread(&self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let mut ahead = self.bytes.borrow_mut();
        let mut all = BytesMut::with_capacity(bytes.len() + ahead.len());
        all.extend_from_slice(bytes);
        all.extend_from_slice(&ahead);
        *ahead = all;
    }

    /// Reads some bytes and forgets them; ready with false at the end.
    pub fn poll_discard(
        &self,
        stream: &RefCell<impl AsyncRead + Unpin>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<bool>> {
        let read = ready!(self.poll_fill(stream, cx, READ_CHUNK_BYTES))?;
        self.bytes.borrow_mut().clear();
        Poll::Ready(Ok(read > 0))
    }

    /// As hyper reads: what was read ahead comes first. Ready with whether there was anything.
    #[inline]
    pub fn poll_read(
        &self,
        stream: &RefCell<impl AsyncRead + Unpin>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<bool>> {
        let mut ahead = self.bytes.borrow_mut();
        if !ahead.is_empty() {
            let n = ahead.len().min(buf.remaining());
            buf.put_slice(ahead.get(..n).unwrap_or_default());
            ahead.advance(n);
            if ahead.is_empty() {
                // An idle connection keeps no buffer.
                *ahead = BytesMut::new();
            }
            return Poll::Ready(Ok(true));
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut *stream.borrow_mut()).poll_read(cx, buf);
        self.hyper_read_pending.set(self.hyper_read_pending.get() || read.is_pending());
        read.map_ok(|()| buf.filled().len() > before)
    }

    fn poll_fill(
        &self,
        stream: &RefCell<impl AsyncRead + Unpin>,
        cx: &mut Context<'_>,
        room: usize,
    ) -> Poll<io::Result<usize>> {
        let mut scratch = [const { MaybeUninit::uninit() }; READ_CHUNK_BYTES];
        let (scratch, _) = scratch.split_at_mut(room.min(READ_CHUNK_BYTES));
        let mut buf = ReadBuf::uninit(scratch);
        ready!(Pin::new(&mut *stream.borrow_mut()).poll_read(cx, &mut buf))?;
        self.bytes.borrow_mut().extend_from_slice(buf.filled());
        Poll::Ready(Ok(buf.filled().len()))
    }
}
