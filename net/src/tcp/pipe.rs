//! A connection that may be an in-memory pipe. It has the part of [`TcpStream`]'s API that the data path uses.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Mutex, PoisonError},
    task::{Context, Poll, Waker},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, duplex},
    net::TcpStream,
    sync::mpsc::{Receiver, Sender, channel},
};

/// Bytes that a pipe holds per direction before its writer waits.
pub const PIPE_CAPACITY_BYTES: usize = 256 << 10;

/// Connections that may wait for a listener. Further ones wait for room.
const BACKLOG: usize = 128;

thread_local! {
    /// The listeners of this thread. A connection is made deep inside a request, where no listener can be passed in.
    static LISTENERS: RefCell<BTreeMap<SocketAddr, Sender<DuplexStream>>> = RefCell::default();
}

#[derive(Debug)]
pub enum Tcp {
    Socket(TcpStream),
    /// Behind a lock, so that a shared reference suffices, as it does for a socket.
    Pipe(Mutex<DuplexStream>),
}

/// Turns this thread's later connections to `address` into pipes. The receiver yields their other ends.
#[must_use]
pub fn listen(address: SocketAddr) -> Receiver<DuplexStream> {
    let (tx, rx) = channel(BACKLOG);
    LISTENERS.with_borrow_mut(|listeners| listeners.insert(address, tx));
    rx
}

impl Tcp {
    /// Opens a connection: a pipe where this thread listens, else a socket.
    ///
    /// # Errors
    /// As those of [`TcpStream::connect`].
    pub async fn connect(address: SocketAddr) -> io::Result<Self> {
        let listener = LISTENERS.with_borrow(|listeners| listeners.get(&address).cloned());
        let Some(listener) = listener else {
            return TcpStream::connect(address).await.map(Self::Socket);
        };
        let (near, far) = duplex(PIPE_CAPACITY_BYTES);
        listener.send(far).await.map_err(|_| io::ErrorKind::ConnectionRefused)?;
        Ok(near.into())
    }

    /// Sets `TCP_NODELAY`; a pipe ignores it.
    ///
    /// # Errors
    /// As those of [`TcpStream::set_nodelay`].
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.set_nodelay(nodelay),
            Self::Pipe(_) => Ok(()),
        }
    }

    /// Reads bytes without consuming them.
    ///
    /// # Errors
    /// As those of [`TcpStream::peek`]; a pipe does not support it.
    pub async fn peek(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Socket(socket) => socket.peek(bytes).await,
            Self::Pipe(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Reads the available bytes without waiting.
    ///
    /// # Errors
    /// As those of [`TcpStream::try_read`].
    pub fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Socket(socket) => socket.try_read(bytes),
            Self::Pipe(pipe) => {
                let mut bytes = ReadBuf::new(bytes);
                let mut cx = Context::from_waker(Waker::noop());
                let mut pipe = pipe.lock().unwrap_or_else(PoisonError::into_inner);
                match Pin::new(&mut *pipe).poll_read(&mut cx, &mut bytes) {
                    Poll::Ready(read) => read.map(|()| bytes.filled().len()),
                    Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
                }
            }
        }
    }
}

impl From<TcpStream> for Tcp {
    fn from(socket: TcpStream) -> Self {
        Self::Socket(socket)
    }
}

impl From<DuplexStream> for Tcp {
    fn from(pipe: DuplexStream) -> Self {
        Self::Pipe(Mutex::new(pipe))
    }
}

fn own(pipe: &mut Mutex<DuplexStream>) -> &mut DuplexStream {
    pipe.get_mut().unwrap_or_else(PoisonError::into_inner)
}

impl AsyncRead for Tcp {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Socket(socket) => Pin::new(socket).poll_read(cx, buf),
            Self::Pipe(pipe) => Pin::new(own(pipe)).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Tcp {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Socket(socket) => Pin::new(socket).poll_write(cx, bytes),
            Self::Pipe(pipe) => Pin::new(own(pipe)).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Socket(socket) => Pin::new(socket).poll_write_vectored(cx, slices),
            Self::Pipe(pipe) => Pin::new(own(pipe)).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Socket(socket) => Pin::new(socket).poll_flush(cx),
            Self::Pipe(pipe) => Pin::new(own(pipe)).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Socket(socket) => Pin::new(socket).poll_shutdown(cx),
            Self::Pipe(pipe) => Pin::new(own(pipe)).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_beyond_the_backlog_waits_for_the_listener() {
        let address: SocketAddr = "127.0.0.1:9".parse().unwrap();
        let mut listener = listen(address);
        for _ in 0..BACKLOG {
            Tcp::connect(address).await.unwrap();
        }
        let mut further = Box::pin(Tcp::connect(address));
        assert!(further.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(listener.recv().await.is_some());
        further.await.unwrap();
        drop(listener);
        let refused = Tcp::connect(address).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
}
