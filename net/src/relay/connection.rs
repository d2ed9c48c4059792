//! One HTTP/1.1 connection to an engine: a socket, and the bytes that were read from it and not consumed yet.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, Waker, ready},
};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{
    ConnectionPool, Payload, RelayTarget,
    payload::{self, UnsentRequest},
};
use crate::{backend_origin::Duplex, tcp::Tcp, yield_to_reactor};

/// Most bytes sent per poll, and per write. The kernel copies for as long as an engine on another core keeps reading,
/// and meanwhile the streams of this core stall.
const MAX_SEND_BYTES_PER_POLL: usize = 1 << 20;

#[derive(Debug)]
enum UpstreamSocket {
    Plain(Tcp),
    Tls(Box<dyn Duplex>),
}

#[derive(Debug)]
pub(super) struct UpstreamConnection {
    stream: UpstreamSocket,
    /// Bytes that were read and not consumed: an incomplete head, or the bytes that arrived with one.
    pub(super) read_buffer: Bytes,
    /// Value of the `Host` header.
    pub(super) host: Box<str>,
    /// The connection has carried an exchange before.
    pub(super) reused: bool,
    /// The present request has received response bytes.
    pub(super) answered: bool,
    /// The connection cannot be reused: the engine no longer reads from it, or sent more than one response.
    pub(super) must_close: bool,
}

impl UpstreamSocket {
    fn poll_write(&mut self, slices: &[IoSlice<'_>], cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        match (self, slices) {
            (Self::Plain(stream), [one]) => Pin::new(stream).poll_write(cx, one),
            (Self::Plain(stream), slices) => Pin::new(stream).poll_write_vectored(cx, slices),
            (Self::Tls(stream), slices) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }

    /// Sends the bytes that TLS has buffered. A plain socket buffers nothing.
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(_) => Poll::Ready(Ok(())),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }
}

impl UpstreamConnection {
    pub(super) async fn connect(target: &RelayTarget) -> io::Result<Self> {
        let stream = Tcp::connect(target.address).await?;
        stream.set_nodelay(true)?;
        let origin = target.origin.as_ref();
        let stream = match origin.and_then(|origin| origin.tls.as_ref()) {
            Some(tls) => UpstreamSocket::Tls(tls.handshake(stream).await?),
            None => UpstreamSocket::Plain(stream),
        };
        let host = origin.map_or_else(|| target.address.to_string().into(), |origin| origin.host.clone());
        Ok(Self {
            stream,
            read_buffer: Bytes::new(),
            host,
            reused: false,
            answered: false,
            must_close: false,
        })
    }

    /// Reports whether the connection is open and idle: no close and no unsolicited bytes, as far as known. This makes
    /// a system call only when the runtime has seen an event, since the last read emptied the socket.
    pub(super) fn is_reusable(&mut self) -> bool {
        match &mut self.stream {
            UpstreamSocket::Plain(stream) => {
                let read = stream.try_read(&mut [0]);
                read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            }
            // TLS may have received records of its own, which carry no data for this layer.
            UpstreamSocket::Tls(stream) => {
                let mut cx = Context::from_waker(Waker::noop());
                Pin::new(stream).poll_read(&mut cx, &mut ReadBuf::new(&mut [0])).is_pending()
            }
        }
    }

    /// Reads the available bytes into the beginning of `memory`; 0 is the end. Keeps no buffer, so an idle stream holds
    /// none.
    pub(super) fn poll_read(&mut self, memory: &mut [u8], cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut room = ReadBuf::new(memory);
        ready!(match &mut self.stream {
            UpstreamSocket::Plain(stream) => Pin::new(stream).poll_read(cx, &mut room),
            UpstreamSocket::Tls(stream) => Pin::new(stream).poll_read(cx, &mut room),
        })?;
        Poll::Ready(Ok(room.filled().len()))
    }

    /// Reads the available bytes and appends them to `read_buffer`; 0 is the end.
    pub(super) fn poll_fill(
        &mut self,
        pool: &ConnectionPool,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        pool.with_scratch(|scratch| {
            let length = ready!(self.poll_read(scratch, cx))?;
            let read = scratch.get(..length).unwrap_or_default();
            self.read_buffer = if self.read_buffer.is_empty() {
                Bytes::copy_from_slice(read)
            } else {
                [&self.read_buffer, read].concat().into()
            };
            Poll::Ready(Ok(length))
        })
    }

    /// Sends as much of head and body as the socket accepts at once. A small body is copied behind the head: the kernel
    /// takes one slice more cheaply than two.
    pub(super) fn start_send(
        &mut self,
        head: &mut Vec<u8>,
        body: &Payload,
        cx: &mut Context<'_>,
    ) -> UnsentRequest {
        let length = head.len();
        let written = if body.len() <= payload::MAX_COPIED_BODY_BYTES {
            body.append_to(head);
            self.stream.poll_write(&[IoSlice::new(head)], cx)
        } else {
            self.stream.poll_write(&body.slices_after(head, MAX_SEND_BYTES_PER_POLL), cx)
        };
        // An error recurs when the rest is sent.
        let sent = if let Poll::Ready(Ok(sent)) = written { sent } else { 0 };
        UnsentRequest::after(sent, head.get(..length).unwrap_or_default(), body)
    }

    /// Sends until nothing is left. A long prompt is sent in turns with the core's other work, however fast the engine
    /// reads it.
    pub(super) fn poll_send(
        &mut self,
        unsent: &mut UnsentRequest,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let mut sent = 0;
        while !unsent.is_empty() {
            if sent >= MAX_SEND_BYTES_PER_POLL {
                yield_to_reactor::defer_wake(cx);
                return Poll::Pending;
            }
            ready!(unsent.poll_more(cx))?;
            if unsent.is_empty() {
                break;
            }
            let written = ready!(self.stream.poll_write(&unsent.slices(MAX_SEND_BYTES_PER_POLL - sent), cx))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            unsent.advance(written);
            sent += written;
        }
        self.stream.poll_flush(cx)
    }

    /// Sends the bytes that TLS has buffered.
    #[inline]
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_flush(cx)
    }

    /// Resets the state of the last exchange before the connection waits for its next one.
    pub(super) const fn reset_for_reuse(&mut self) {
        self.reused = true;
        self.answered = false;
    }
}
