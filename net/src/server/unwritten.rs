//! The bytes of a response that the client's socket has not accepted yet.

use std::{
    io,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};

use super::ServerIo;

/// Unwritten bytes. Holds no memory while it is empty, since an open stream is nearly always in that state, and has
/// room for a pointer only.
#[derive(Debug, Default)]
pub(super) struct Unwritten(Option<Box<UnwrittenParts>>);

/// Copied bytes, then a large frame in its own memory, then the end of its framing.
#[derive(Debug, Default)]
struct UnwrittenParts {
    copied: Bytes,
    frame: Bytes,
    tail: &'static [u8],
}

impl Unwritten {
    /// Adds a copy of `bytes`. Nothing else may be left.
    pub(super) fn set_copied(&mut self, bytes: &[u8]) {
        self.0.get_or_insert_default().copied = Bytes::copy_from_slice(bytes);
    }

    /// Adds a frame, and the end of its framing, behind the copied bytes.
    pub(super) fn set_frame(&mut self, frame: Bytes, tail: &'static [u8]) {
        let parts = self.0.get_or_insert_default();
        (parts.frame, parts.tail) = (frame, tail);
    }

    /// Ready when nothing is left.
    #[inline]
    pub(super) fn poll_write(&mut self, peer: &impl ServerIo, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(parts) = &mut self.0 {
            ready!(parts.poll_write(peer, cx))?;
            self.0 = None;
        }
        Poll::Ready(Ok(()))
    }
}

impl UnwrittenParts {
    /// Ready when nothing is left.
    fn poll_write(&mut self, peer: &impl ServerIo, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        for part in [&mut self.copied, &mut self.frame] {
            while !part.is_empty() {
                let written = ready!(poll_write_some(peer, cx, part))?;
                part.advance(written);
            }
            *part = Bytes::new();
        }
        while !self.tail.is_empty() {
            let written = ready!(poll_write_some(peer, cx, self.tail))?;
            self.tail = self.tail.get(written..).unwrap_or_default();
        }
        Poll::Ready(Ok(()))
    }
}

/// Writes some of the `bytes`, at least one.
pub(super) fn poll_write_some(
    peer: &impl ServerIo,
    cx: &mut Context<'_>,
    bytes: &[u8],
) -> Poll<io::Result<usize>> {
    match ready!(peer.poll_write(cx, bytes))? {
        0 => Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
        written => Poll::Ready(Ok(written)),
    }
}
