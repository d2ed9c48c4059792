//! Measures how long a client has accepted no bytes.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use crate::tcp::Tcp;

/// A TCP connection that records since when its client accepts no bytes. It measures below TLS, because TLS keeps
/// accepting bytes into a buffer of its own.
#[derive(Debug)]
pub struct StallTrackingTcp {
    tcp: Tcp,
    blocked_since: Option<Instant>,
}

impl StallTrackingTcp {
    #[must_use]
    pub fn new(tcp: impl Into<Tcp>) -> Self {
        Self { tcp: tcp.into(), blocked_since: None }
    }

    /// When the client stopped accepting the bytes that are ready for it; `None` while it accepts them.
    #[inline]
    #[must_use]
    pub const fn blocked_since(&self) -> Option<Instant> {
        self.blocked_since
    }

    /// Peeks at the client's first byte; `None` when the client closed without sending one.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn first_byte(&self) -> io::Result<Option<u8>> {
        let mut byte = [0];
        Ok((self.tcp.peek(&mut byte).await? > 0).then_some(byte[0]))
    }
}

impl AsyncRead for StallTrackingTcp {
    #[inline]
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_read(cx, buf)
    }
}

impl AsyncWrite for StallTrackingTcp {
    #[inline]
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let wire = self.get_mut();
        let written = Pin::new(&mut wire.tcp).poll_write(cx, bytes);
        wire.blocked_since = written.is_pending().then(|| wire.blocked_since.unwrap_or_else(Instant::now));
        written
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_shutdown(cx)
    }
}
