//! A client's socket, shared with hyper. The relay reads ahead from it during a request and records the gate generation
//! of that request.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    io,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use rouse_net::downstream::{DownstreamIo, ReadAhead, StallTrackingTcp};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::Instant,
};

use crate::proxy::gate::GateGeneration;

pub(super) struct RelaySocket {
    stream: RefCell<StallTrackingTcp>,
    read_ahead: ReadAhead,
    /// The generation whose lease the current request holds.
    gate_generation: RefCell<Option<Arc<GateGeneration>>>,
    open_exchanges: Cell<u32>,
    /// The current request's body was not read to its end.
    body_unread: Cell<bool>,
    closing: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

/// hyper's handle of the socket.
pub(super) struct RelayIo(Rc<RelaySocket>);

/// Guards an exchange from the beginning of a request until its response is sent.
pub(super) struct RelayExchangeGuard(Rc<RelaySocket>);

impl RelaySocket {
    pub(super) fn new(stream: TcpStream) -> Rc<Self> {
        Rc::new(Self {
            stream: RefCell::new(StallTrackingTcp::new(stream)),
            read_ahead: ReadAhead::default(),
            gate_generation: RefCell::default(),
            open_exchanges: Cell::new(0),
            body_unread: Cell::new(false),
            closing: Cell::new(false),
            waker: RefCell::default(),
        })
    }

    pub(super) fn io(self: &Rc<Self>) -> RelayIo {
        RelayIo(Rc::clone(self))
    }

    pub(super) fn begin_exchange(self: &Rc<Self>) -> RelayExchangeGuard {
        self.open_exchanges.set(self.open_exchanges.get() + 1);
        RelayExchangeGuard(Rc::clone(self))
    }

    pub(super) fn before_poll(&self) {
        self.read_ahead.before_poll();
    }

    /// Call it after polling hyper. Returns whether the client disconnected during an exchange.
    pub(super) fn poll_client_left(&self, cx: &mut Context<'_>) -> bool {
        self.open_exchanges.get() > 0 && self.read_ahead.detect_disconnect(&self.stream, cx)
    }

    /// Since when the client has accepted none of the pending bytes.
    pub(super) fn blocked_since(&self) -> Option<Instant> {
        self.stream.borrow().blocked_since()
    }

    /// The gate generation of the current request.
    pub(super) fn gate_generation(&self) -> Option<Arc<GateGeneration>> {
        self.gate_generation.borrow().clone()
    }

    /// Call it before each request's body is read, and again at the body's end.
    pub(super) fn set_body_unread(&self, unread: bool) {
        self.body_unread.set(unread);
    }

    /// Whether the client may still be sending a request: the current one, or the last one if it was answered early.
    pub(super) fn is_body_unread(&self) -> bool {
        self.body_unread.get()
    }

    /// Closes the connection after its current request.
    pub(super) fn close(&self) {
        self.closing.set(true);
        if let Some(task) = &*self.waker.borrow() {
            task.wake_by_ref();
        }
    }

    /// Whether [`Self::close`] was called. A later call wakes this task.
    pub(super) fn is_closing(&self, cx: &Context<'_>) -> bool {
        let mut task = self.waker.borrow_mut();
        if !task.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            *task = Some(cx.waker().clone());
        }
        self.closing.get()
    }

    pub(super) async fn shutdown(&self) -> io::Result<()> {
        poll_fn(|cx| Pin::new(&mut *self.stream.borrow_mut()).poll_shutdown(cx)).await
    }

    /// Reads and discards some bytes. Returns false at the end.
    pub(super) async fn discard(&self) -> io::Result<bool> {
        poll_fn(|cx| self.read_ahead.poll_discard(&self.stream, cx)).await
    }
}

impl RelayExchangeGuard {
    pub(super) fn set_generation(&self, generation: &Arc<GateGeneration>) {
        *self.0.gate_generation.borrow_mut() = Some(Arc::clone(generation));
    }
}

impl Drop for RelayExchangeGuard {
    fn drop(&mut self) {
        self.0.open_exchanges.set(self.0.open_exchanges.get() - 1);
        *self.0.gate_generation.borrow_mut() = None;
    }
}

impl DownstreamIo for RelaySocket {
    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.stream.borrow_mut()).poll_write(cx, bytes)
    }

    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream.borrow_mut()).poll_flush(cx)
    }

    fn unread(&self, bytes: &[u8]) {
        self.read_ahead.unread(bytes);
    }

    fn is_write_blocked(&self) -> bool {
        self.blocked_since().is_some()
    }
}

impl AsyncRead for RelayIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        ready!(self.0.read_ahead.poll_read(&self.0.stream, cx, buf))?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for RelayIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.stream.borrow_mut()).poll_shutdown(cx)
    }
}
