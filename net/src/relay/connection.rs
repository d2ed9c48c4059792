//! One HTTP/1.1 connection to an engine: a socket and the bytes read from it that nobody has taken yet.

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

/// So many bytes are sent in one turn. No call offers the kernel more: it copies for as long as the engine, on another core,
/// takes what comes, and meanwhile the streams of this one stand still.
const MAX_SEND_BYTES_PER_POLL: usize = 1 << 20;

#[derive(Debug)]
enum UpstreamSocket {
    Plain(Tcp),
    Tls(Box<dyn Duplex>),
}

#[derive(Debug)]
pub(super) struct UpstreamConnection {
    stream: UpstreamSocket,
    /// What was read and nobody has taken yet: a head that is not all there, or what came along with one.
    pub(super) read_buffer: Bytes,
    /// Whom it leads to, as a `Host` names it.
    pub(super) host: Box<str>,
    /// It has carried an exchange before.
    pub(super) reused: bool,
    /// Bytes of an answer to the present request came.
    pub(super) answered: bool,
    /// It can carry no other exchange: the engine no longer reads from it, or said more than was asked.
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

    /// What TLS has taken is sent. A socket keeps nothing back.
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

    /// The engine has neither closed it nor said anything unasked, as far as is known. Asks the kernel only when the
    /// runtime has heard of something: the last read took all there was.
    pub(super) fn is_reusable(&mut self) -> bool {
        match &mut self.stream {
            UpstreamSocket::Plain(stream) => {
                let read = stream.try_read(&mut [0]);
                read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            }
            // TLS may have said something of its own, which is nothing to be read here.
            UpstreamSocket::Tls(stream) => {
                let mut cx = Context::from_waker(Waker::noop());
                Pin::new(stream).poll_read(&mut cx, &mut ReadBuf::new(&mut [0])).is_pending()
            }
        }
    }

    /// Reads what is there into the beginning of `memory`; 0 is the end. No buffer is kept: that is what an idle stream
    /// would hold.
    pub(super) fn poll_read(&mut self, memory: &mut [u8], cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut room = ReadBuf::new(memory);
        ready!(match &mut self.stream {
            UpstreamSocket::Plain(stream) => Pin::new(stream).poll_read(cx, &mut room),
            UpstreamSocket::Tls(stream) => Pin::new(stream).poll_read(cx, &mut room),
        })?;
        Poll::Ready(Ok(room.filled().len()))
    }

    /// Reads what is there, behind what is held already; 0 is the end.
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

    /// Sends head and body as far as the socket takes them at once. A small body is written behind the head in the same
    /// memory: the kernel takes one piece more cheaply than two.
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
        // An error comes again when the rest is sent.
        let sent = if let Poll::Ready(Ok(sent)) = written { sent } else { 0 };
        UnsentRequest::after(sent, head.get(..length).unwrap_or_default(), body)
    }

    /// Sends until nothing is left. A long prompt goes in turns with what else its core has to do, however fast the
    /// engine takes it.
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

    /// Before it waits for its next use.
    pub(super) const fn reset_for_reuse(&mut self) {
        self.reused = true;
        self.answered = false;
    }
}
