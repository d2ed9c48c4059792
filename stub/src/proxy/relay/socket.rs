//! A client's socket, beside hyper: it is read on while a request is served, and it is known who its present request is
//! with.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    io,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use rouse::client::{Ahead, Peer, Wire};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::Instant,
};

use crate::proxy::gate::Life;

pub(super) struct Socket {
    wire: RefCell<Wire>,
    ahead: Ahead,
    /// Whose lease its present request holds.
    life: RefCell<Option<Arc<Life>>>,
    exchanges: Cell<u32>,
    /// Not all of its present request was read.
    unread: Cell<bool>,
    closes: Cell<bool>,
    task: RefCell<Option<Waker>>,
}

/// What hyper has of it.
pub(super) struct Io(Rc<Socket>);

/// From the beginning of a request until its answer is gone.
pub(super) struct InExchange(Rc<Socket>);

impl Socket {
    pub(super) fn new(stream: TcpStream) -> Rc<Self> {
        Rc::new(Self {
            wire: RefCell::new(Wire::new(stream)),
            ahead: Ahead::default(),
            life: RefCell::default(),
            exchanges: Cell::new(0),
            unread: Cell::new(false),
            closes: Cell::new(false),
            task: RefCell::default(),
        })
    }

    pub(super) fn io(self: &Rc<Self>) -> Io {
        Io(Rc::clone(self))
    }

    pub(super) fn begin(self: &Rc<Self>) -> InExchange {
        self.exchanges.set(self.exchanges.get() + 1);
        InExchange(Rc::clone(self))
    }

    pub(super) fn before_poll(&self) {
        self.ahead.before_poll();
    }

    /// To be called after hyper was polled: true when the client left during an exchange.
    pub(super) fn poll_left(&self, cx: &mut Context<'_>) -> bool {
        self.exchanges.get() > 0 && self.ahead.poll_left(&self.wire, cx)
    }

    /// Since when the client has taken none of the bytes that are ready for it.
    pub(super) fn blocked(&self) -> Option<Instant> {
        self.wire.borrow().blocked()
    }

    /// The gate behind which its request is.
    pub(super) fn life(&self) -> Option<Arc<Life>> {
        self.life.borrow().clone()
    }

    /// To be said of each request before its body is read, and once more at the body's end.
    pub(super) fn set_unread(&self, unread: bool) {
        self.unread.set(unread);
    }

    /// The client may still be sending its present request, or the last one when it was answered before it was read.
    pub(super) fn is_unread(&self) -> bool {
        self.unread.get()
    }

    /// Its connection is to end behind its present request.
    pub(super) fn close(&self) {
        self.closes.set(true);
        if let Some(task) = &*self.task.borrow() {
            task.wake_by_ref();
        }
    }

    /// Whether [`Self::close`] was called; when it is, this task wakes.
    pub(super) fn closes(&self, cx: &Context<'_>) -> bool {
        let mut task = self.task.borrow_mut();
        if !task.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            *task = Some(cx.waker().clone());
        }
        self.closes.get()
    }

    pub(super) async fn shutdown(&self) -> io::Result<()> {
        poll_fn(|cx| Pin::new(&mut *self.wire.borrow_mut()).poll_shutdown(cx)).await
    }

    /// Reads some bytes and forgets them; false at the end.
    pub(super) async fn discard(&self) -> io::Result<bool> {
        poll_fn(|cx| self.ahead.poll_discard(&self.wire, cx)).await
    }
}

impl InExchange {
    pub(super) fn holds(&self, life: &Arc<Life>) {
        *self.0.life.borrow_mut() = Some(Arc::clone(life));
    }
}

impl Drop for InExchange {
    fn drop(&mut self) {
        self.0.exchanges.set(self.0.exchanges.get() - 1);
        *self.0.life.borrow_mut() = None;
    }
}

impl Peer for Socket {
    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.wire.borrow_mut()).poll_write(cx, bytes)
    }

    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.wire.borrow_mut()).poll_flush(cx)
    }

    fn unread(&self, bytes: &[u8]) {
        self.ahead.unread(bytes);
    }

    fn is_blocked(&self) -> bool {
        self.blocked().is_some()
    }
}

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        ready!(self.0.ahead.poll_read(&self.0.wire, cx, buf))?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.wire.borrow_mut()).poll_shutdown(cx)
    }
}
