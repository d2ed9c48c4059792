//! One HTTP/1.1 connection to an engine: a socket and the bytes read from it that nobody has taken yet.

use std::{
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf},
    net::TcpStream,
};

use super::payload::Unsent;

/// Room for a read to begin with; a stream of tokens never needs more, and this is what an idle stream costs.
const SMALL: usize = 8 << 10;
/// Room for a read of a large answer.
const LARGE: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    pub(super) buffer: BytesMut,
    room: usize,
    /// It has carried an exchange before.
    pub(super) reused: bool,
    /// Bytes of an answer to the present request came.
    pub(super) answered: bool,
    /// The engine no longer reads from it.
    pub(super) spent: bool,
}

impl Connection {
    pub(super) async fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buffer: BytesMut::new(),
            room: SMALL,
            reused: false,
            answered: false,
            spent: false,
        })
    }

    /// The engine has neither closed it nor said anything unasked, as far as is known.
    pub(super) fn is_quiet(&self) -> bool {
        let read = self.stream.try_read(&mut [0]);
        read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Reads what is there into the buffer; 0 is the end. The buffer's memory is used again as soon as the frames cut
    /// from it are gone, so a stream whose client keeps up allocates nothing.
    pub(super) fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.buffer.reserve(self.room);
        let room = self.buffer.capacity() - self.buffer.len();
        let read = ready!(pin!(self.stream.read_buf(&mut self.buffer)).poll(cx))?;
        if read == room {
            self.room = LARGE;
        }
        Poll::Ready(Ok(read))
    }

    /// The next bytes that were read, or are to be read, into the beginning of `memory`; 0 is the end. No buffer is kept:
    /// that is what an idle stream would hold.
    pub(super) fn poll_take(&mut self, memory: &mut [u8], cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if !self.buffer.is_empty() {
            let here = self.buffer.len().min(memory.len());
            self.buffer.copy_to_slice(&mut memory[..here]);
            self.trim();
            return Poll::Ready(Ok(here));
        }
        let mut room = ReadBuf::new(memory);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut room))?;
        Poll::Ready(Ok(room.filled().len()))
    }

    /// Gives back memory in which nothing is left to be taken.
    pub(super) fn trim(&mut self) {
        if self.buffer.is_empty() {
            self.buffer = BytesMut::new();
        }
    }

    /// Sends until nothing is left.
    pub(super) fn poll_send(&mut self, unsent: &mut Unsent, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !unsent.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, &unsent.slices()))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            unsent.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Gives back what a large answer needed, before it waits for its next use.
    pub(super) fn rest(&mut self) {
        self.reused = true;
        self.answered = false;
        self.room = SMALL;
        self.buffer = BytesMut::new();
    }
}
