//! Reads a client's socket while hyper does not.
//!
//! hyper sees the end of a connection only while its own read buffer is empty: one stray byte after the body (a CRLF,
//! as some clients send) blinds it. So hyper and the task that drives the connection share the socket. When hyper did
//! not read the socket during a poll, the task reads up to [`MAX_READ_AHEAD_BYTES`] bytes in its place. These bytes
//! belong to a pipelined request, and hyper gets them later. An end or a reset means that the client disconnected, even
//! if the client closed only its sending half. A client that pipelines more than [`MAX_READ_AHEAD_BYTES`] bytes is
//! noticed at the next write.

use std::{
    cell::{Cell, RefCell},
    io,
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, ReadBuf};

/// Most bytes that are read ahead of hyper, per connection.
pub const MAX_READ_AHEAD_BYTES: usize = 16 * 1024;

/// Bytes per read.
const READ_CHUNK_BYTES: usize = 2048;

/// The bytes read ahead of hyper.
#[derive(Debug, Default)]
pub struct ReadAhead {
    bytes: RefCell<BytesMut>,
    /// hyper found the socket empty during the present poll. Its waker is registered, so nothing is read ahead.
    hyper_read_pending: Cell<bool>,
}

impl ReadAhead {
    /// Call this before each poll of hyper.
    #[inline]
    pub fn before_poll(&self) {
        self.hyper_read_pending.set(false);
    }

    /// Detects a disconnect: true when the client has closed or reset its side. Call this after each poll of hyper
    /// during an exchange.
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

    /// Reports whether the connection begins with `prefix`: ready on a full match, a difference, or the connection's
    /// end. Used before hyper owns the connection, to recognize HTTP/2 by its preface. Calls `on_read` after each read
    /// that returned bytes.
    pub fn poll_starts_with(
        &self,
        stream: &RefCell<impl AsyncRead + Unpin>,
        cx: &mut Context<'_>,
        prefix: &[u8],
        on_read: impl Fn(),
    ) -> Poll<io::Result<bool>> {
        loop {
            {
                let ahead = self.bytes.borrow();
                let common = ahead.iter().zip(prefix).take_while(|(a, b)| a == b).count();
                if common == prefix.len() {
                    return Poll::Ready(Ok(true));
                }
                if common < ahead.len() {
                    return Poll::Ready(Ok(false));
                }
            }
            match ready!(self.poll_fill(stream, cx, READ_CHUNK_BYTES)) {
                Err(error) => return Poll::Ready(Err(error)),
                Ok(0) => return Poll::Ready(Ok(false)),
                Ok(_) => on_read(),
            }
        }
    }

    /// Puts back the bytes that hyper had read but not used before it was dropped.
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

    /// Reads some bytes and discards them together with all that was read ahead; ready with `false` at the end of the
    /// connection.
    pub fn poll_discard(
        &self,
        stream: &RefCell<impl AsyncRead + Unpin>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<bool>> {
        let read = ready!(self.poll_fill(stream, cx, READ_CHUNK_BYTES))?;
        self.bytes.borrow_mut().clear();
        Poll::Ready(Ok(read > 0))
    }

    /// Serves hyper's read: bytes that were read ahead come first. Ready with whether there were any bytes.
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
