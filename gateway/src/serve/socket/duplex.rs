//! The socket as hyper reads and writes it: what was read ahead comes first.

use std::{
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Socket;

/// What hyper has of it.
pub(crate) struct Io(pub(super) Rc<Socket>);

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let socket = &self.0;
        let mut ahead = socket.ahead.borrow_mut();
        if !ahead.is_empty() {
            let n = ahead.len().min(buf.remaining());
            buf.put_slice(&ahead[..n]);
            ahead.advance(n);
            if ahead.is_empty() {
                // An idle connection keeps no buffer.
                *ahead = BytesMut::new();
            }
            socket.note_head();
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut *socket.stream.borrow_mut()).poll_read(cx, buf);
        match &read {
            Poll::Pending => socket.met_empty.set(true),
            Poll::Ready(Ok(())) if buf.filled().len() > before => socket.note_head(),
            Poll::Ready(_) => {}
        }
        read
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let socket = &self.0;
        if let Some(status) = socket.refuses(bytes) {
            socket.refused.set(Some(status));
        }
        if socket.refused.get().is_some() {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut *socket.stream.borrow_mut()).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.0.refused.get().is_some() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut *self.0.stream.borrow_mut()).poll_shutdown(cx)
    }
}
