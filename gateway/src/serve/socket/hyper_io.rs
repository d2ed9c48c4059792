//! The socket as hyper reads and writes it, for HTTP/2.

use std::{
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use rouse_net::server::ServerIo as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::ClientSocket;

/// hyper's view of the socket.
pub(crate) struct HyperIo(pub(super) Rc<ClientSocket>);

impl AsyncRead for HyperIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.0.poll_read(cx, buf)
    }
}

impl AsyncWrite for HyperIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_shutdown(cx)
    }
}
