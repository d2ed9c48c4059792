//! The socket as hyper reads and writes it: what was read ahead comes first.

use std::{
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use rouse::client::Peer as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Socket;

/// What hyper has of it.
pub(crate) struct Io(pub(super) Rc<Socket>);

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let socket = &self.0;
        let read = ready!(socket.ahead.poll_read(&socket.stream, cx, buf))?;
        if read {
            socket.note_head();
        }
        Poll::Ready(Ok(()))
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
