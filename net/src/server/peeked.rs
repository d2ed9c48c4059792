//! The first bytes of a connection, read to recognize its protocol before a server owns it.

use std::{
    cell::RefCell,
    io,
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, ReadBuf};

/// Bytes per read.
const READ_CHUNK_BYTES: usize = 2048;

/// Bytes that were read before a server owned the connection. The server's reads return them first.
///
/// A slice without spare room: nearly always the first read consumes them all, and from then on it is empty.
#[derive(Debug, Default)]
pub struct PeekedBytes(RefCell<Box<[u8]>>);

impl PeekedBytes {
    /// Reports whether the connection begins with `prefix`: ready on a full match, a difference, or the connection's
    /// end. Calls `on_read` after each read that returned bytes.
    ///
    /// # Errors
    /// The connection broke.
    pub fn poll_starts_with(
        &self,
        stream: &RefCell<impl AsyncRead + Unpin>,
        cx: &mut Context<'_>,
        prefix: &[u8],
        on_read: impl Fn(),
    ) -> Poll<io::Result<bool>> {
        loop {
            {
                let peeked = self.0.borrow();
                let common = peeked.iter().zip(prefix).take_while(|(a, b)| a == b).count();
                if common == prefix.len() {
                    return Poll::Ready(Ok(true));
                }
                if common < peeked.len() {
                    return Poll::Ready(Ok(false));
                }
            }
            match ready!(self.poll_fill(stream, cx))? {
                0 => return Poll::Ready(Ok(false)),
                _ => on_read(),
            }
        }
    }

    /// Serves a read: the peeked bytes come first.
    ///
    /// # Errors
    /// The connection broke.
    #[inline]
    pub fn poll_read(
        &self,
        stream: &RefCell<impl AsyncRead + Unpin>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut peeked = self.0.borrow_mut();
        if peeked.is_empty() {
            drop(peeked);
            return Pin::new(&mut *stream.borrow_mut()).poll_read(cx, buf);
        }
        let length = peeked.len().min(buf.remaining());
        buf.put_slice(peeked.get(..length).unwrap_or_default());
        *peeked = peeked.get(length..).unwrap_or_default().into();
        Poll::Ready(Ok(()))
    }

    fn poll_fill(
        &self,
        stream: &RefCell<impl AsyncRead + Unpin>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        let mut memory = [const { MaybeUninit::uninit() }; READ_CHUNK_BYTES];
        let mut buf = ReadBuf::uninit(&mut memory);
        ready!(Pin::new(&mut *stream.borrow_mut()).poll_read(cx, &mut buf))?;
        let mut peeked = self.0.borrow_mut();
        *peeked = [&**peeked, buf.filled()].concat().into();
        Poll::Ready(Ok(buf.filled().len()))
    }
}
