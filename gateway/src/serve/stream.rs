//! The byte stream below HTTP: a client's TCP connection, in cleartext or under TLS.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use rouse_net::{server::StallTrackingTcp, tcp::Tcp};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};
use tokio_rustls::server::TlsStream;

pub(super) enum ClientStream {
    Plain(StallTrackingTcp),
    Tls(Box<TlsStream<StallTrackingTcp>>),
    /// The handshake owns the connection, and may fail.
    InHandshake,
}

impl ClientStream {
    pub(super) fn plain(tcp: impl Into<Tcp>) -> Self {
        Self::Plain(StallTrackingTcp::new(tcp))
    }

    /// Since when the client has read none of the bytes that are ready for it.
    pub(super) fn blocked_since(&self) -> Option<Instant> {
        match self {
            Self::Plain(wire) => wire.blocked_since(),
            Self::Tls(stream) => stream.get_ref().0.blocked_since(),
            Self::InHandshake => None,
        }
    }

    fn inner(&mut self) -> io::Result<Pin<&mut dyn AsyncReadWrite>> {
        match self {
            Self::Plain(wire) => Ok(Pin::new(wire)),
            Self::Tls(stream) => Ok(Pin::new(&mut **stream)),
            Self::InHandshake => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

trait AsyncReadWrite: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncReadWrite for T {}

impl AsyncRead for ClientStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.get_mut().inner()?.poll_read(cx, buf)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().inner()?.poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().inner()?.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().inner()?.poll_shutdown(cx)
    }
}
