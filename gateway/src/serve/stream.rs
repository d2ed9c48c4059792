//! The bytes below hyper: a client's TCP connection, in the clear or under TLS.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use rouse::{client::Wire, tcp::Tcp};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};
use tokio_rustls::server::TlsStream;

pub(super) enum Stream {
    Plain(Wire),
    Tls(Box<TlsStream<Wire>>),
    /// Its handshake has it, and may fail.
    Away,
}

impl Stream {
    pub(super) fn plain(tcp: impl Into<Tcp>) -> Self {
        Self::Plain(Wire::new(tcp))
    }

    /// Since when the client has taken none of the bytes that are ready for it.
    pub(super) fn blocked(&self) -> Option<Instant> {
        match self {
            Self::Plain(wire) => wire.blocked(),
            Self::Tls(stream) => stream.get_ref().0.blocked(),
            Self::Away => None,
        }
    }

    fn inner(&mut self) -> io::Result<Pin<&mut dyn Both>> {
        match self {
            Self::Plain(wire) => Ok(Pin::new(wire)),
            Self::Tls(stream) => Ok(Pin::new(&mut **stream)),
            Self::Away => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

trait Both: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Both for T {}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.get_mut().inner()?.poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
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
