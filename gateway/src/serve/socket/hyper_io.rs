//! The socket as hyper reads and writes it: read-ahead bytes come first.

use std::{
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use rouse_net::downstream::DownstreamIo as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::ClientSocket;

/// hyper's view of the socket.
pub(crate) struct HyperIo(pub(super) Rc<ClientSocket>);

impl AsyncRead for HyperIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let socket = &self.0;
        let read = ready!(socket.read_ahead.poll_read(&socket.stream, cx, buf))?;
        if read {
            socket.note_head_started();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for HyperIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let socket = &self.0;
        if let Some(status) = socket.hyper_refusal_status(bytes) {
            socket.hyper_refusal.set(Some(status));
        }
        if socket.hyper_refusal.get().is_some() {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut *socket.stream.borrow_mut()).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.0.hyper_refusal.get().is_some() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut *self.0.stream.borrow_mut()).poll_shutdown(cx)
    }
}
