//! What the loop and the request's body share: the socket, and the bytes that were read from it but not used yet.

use std::{
    cell::{Cell, RefCell},
    io,
    rc::Rc,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BytesMut};
use tokio::io::ReadBuf;

use super::{ServerIo, request_body::RequestBodyState, unwritten::poll_write_some};
use crate::relay::ConnectionPool;

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// The connection, shared.
#[derive(Debug)]
pub(super) struct Wire<P> {
    pub(super) peer: Rc<P>,
    pub(super) pool: ConnectionPool,
    /// Read, and not used yet. Without memory while it is empty.
    buffered: RefCell<BytesMut>,
    pub(super) body: RefCell<RequestBodyState>,
    /// The current request, by number. A body of an earlier one yields none of these bytes.
    pub(super) request: Cell<u64>,
    /// The current request's body exists and was not read to its end, so it may still be polled for more.
    pub(super) body_held: Cell<bool>,
    /// The client closed or reset its side.
    pub(super) client_left: Cell<bool>,
    /// In the present poll a read found the socket empty, and registered a waker there.
    pub(super) read_registered: Cell<bool>,
    /// How many bytes of the interim response are unwritten: the last ones of [`CONTINUE`].
    interim_left: Cell<usize>,
    /// An interim response is not flushed yet.
    interim_unflushed: Cell<bool>,
}

impl<P: ServerIo> Wire<P> {
    pub(super) fn new(peer: Rc<P>, pool: ConnectionPool) -> Self {
        Self {
            peer,
            pool,
            buffered: RefCell::default(),
            body: RefCell::default(),
            request: Cell::new(0),
            body_held: Cell::new(false),
            client_left: Cell::new(false),
            read_registered: Cell::new(false),
            interim_left: Cell::new(0),
            interim_unflushed: Cell::new(false),
        }
    }

    pub(super) fn buffered_bytes(&self) -> usize {
        self.buffered.borrow().len()
    }

    /// Keeps bytes for later.
    pub(super) fn push(&self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.buffered.borrow_mut().extend_from_slice(bytes);
        }
    }

    /// Hands the buffered bytes to `scan`, and removes as many as `scan` reports to have used.
    pub(super) fn scan_buffered<T>(&self, scan: impl FnOnce(&mut [u8]) -> (usize, T)) -> T {
        let mut buffered = self.buffered.borrow_mut();
        let (used, found) = scan(&mut buffered);
        if used >= buffered.len() {
            *buffered = BytesMut::new();
        } else {
            buffered.advance(used);
        }
        found
    }

    /// Takes the first `length` buffered bytes without a copy.
    pub(super) fn take_buffered(&self, length: usize) -> BytesMut {
        let mut buffered = self.buffered.borrow_mut();
        // Splitting off everything would leave both parts sharing one allocation.
        if length >= buffered.len() { std::mem::take(&mut *buffered) } else { buffered.split_to(length) }
    }

    /// Reads once, `max_bytes` at most, and hands the bytes to `with`; none at the end of the client's side.
    pub(super) fn poll_read<T>(
        &self,
        cx: &mut Context<'_>,
        max_bytes: usize,
        with: impl FnOnce(&mut [u8]) -> T,
    ) -> Poll<io::Result<T>> {
        self.pool.with_scratch(|memory| {
            let (memory, _) = memory.split_at_mut(memory.len().min(max_bytes));
            let mut buf = ReadBuf::new(memory);
            let Poll::Ready(read) = self.peer.poll_read(cx, &mut buf) else {
                self.read_registered.set(true);
                return Poll::Pending;
            };
            Poll::Ready(read.map(|()| with(buf.filled_mut())))
        })
    }

    /// Reads ahead, and reports whether the client has closed or reset its side. Registers the task for that event,
    /// unless `max_bytes` are buffered already: then the next write notices it.
    pub(super) fn detect_disconnect(&self, max_bytes: usize, cx: &mut Context<'_>) -> bool {
        while !self.client_left.get() {
            let room = max_bytes.saturating_sub(self.buffered_bytes());
            if room == 0 || self.read_registered.get() {
                return false;
            }
            let read = self.poll_read(cx, room, |bytes| {
                self.push(bytes);
                bytes.len()
            });
            match read {
                Poll::Pending => return false,
                Poll::Ready(read) => self.client_left.set(read.unwrap_or(0) == 0),
            }
            // The body may wait for these bytes with a waker of its own, which this read has replaced at the socket.
            self.wake_body();
        }
        true
    }

    /// Starts an interim response, which [`Self::poll_interim`] writes.
    pub(super) fn begin_interim(&self) {
        self.interim_left.set(CONTINUE.len());
        self.interim_unflushed.set(true);
    }

    /// Writes the interim response, if one is due.
    pub(super) fn poll_interim(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.interim_left.get() > 0 {
            let written =
                ready!(poll_write_some(&*self.peer, cx, last_interim_bytes(self.interim_left.get())))?;
            self.interim_left.set(self.interim_left.get().saturating_sub(written));
        }
        if self.interim_unflushed.get() {
            ready!(self.peer.poll_flush(cx))?;
            self.interim_unflushed.set(false);
        }
        Poll::Ready(Ok(()))
    }

    /// Returns the rest of an interim response that is partly written. One that has not begun is dropped, since the
    /// final response follows.
    pub(super) fn take_interim(&self) -> &'static [u8] {
        self.interim_unflushed.set(false);
        let left = self.interim_left.replace(0);
        if left == CONTINUE.len() { &[] } else { last_interim_bytes(left) }
    }
}

/// Returns the last `left` bytes of the interim response.
fn last_interim_bytes(left: usize) -> &'static [u8] {
    CONTINUE.len().checked_sub(left).and_then(|begin| CONTINUE.get(begin..)).unwrap_or_default()
}
