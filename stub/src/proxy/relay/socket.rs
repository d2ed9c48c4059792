//! A client's socket, shared by the connection loop, the request's body and the connection's deadlines. It also records
//! the gate generation of the current request.

use std::{
    cell::{Cell, RefCell},
    io,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use rouse_net::server::{ServerIo, StallTrackingTcp};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::Instant,
};

use crate::proxy::gate::GateGeneration;

pub(super) struct RelaySocket {
    stream: RefCell<StallTrackingTcp>,
    /// The generation whose lease the current request holds.
    gate_generation: RefCell<Option<Arc<GateGeneration>>>,
    /// The current request's body passes to the engine, and was not read to its end.
    upload_open: Cell<bool>,
    closing: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

/// Guards an exchange from the beginning of a request until its response is sent.
pub(super) struct RelayExchangeGuard(Rc<RelaySocket>);

impl RelaySocket {
    pub(super) fn new(stream: TcpStream) -> Rc<Self> {
        Rc::new(Self {
            stream: RefCell::new(StallTrackingTcp::new(stream)),
            gate_generation: RefCell::default(),
            upload_open: Cell::new(false),
            closing: Cell::new(false),
            waker: RefCell::default(),
        })
    }

    pub(super) fn begin_exchange(self: &Rc<Self>) -> RelayExchangeGuard {
        self.upload_open.set(false);
        RelayExchangeGuard(Rc::clone(self))
    }

    /// Since when the client has accepted none of the pending bytes.
    pub(super) fn blocked_since(&self) -> Option<Instant> {
        self.stream.borrow().blocked_since()
    }

    /// The gate generation of the current request.
    pub(super) fn gate_generation(&self) -> Option<Arc<GateGeneration>> {
        self.gate_generation.borrow().clone()
    }

    /// Call it when a body begins to pass to the engine, and again at the body's end.
    pub(super) fn set_upload_open(&self, open: bool) {
        self.upload_open.set(open);
    }

    /// Whether the client may still be sending the current request to the engine.
    pub(super) fn is_upload_open(&self) -> bool {
        self.upload_open.get()
    }

    /// Ends the connection after its current request, and wakes its task.
    pub(super) fn close(&self) {
        self.closing.set(true);
        if let Some(task) = &*self.waker.borrow() {
            task.wake_by_ref();
        }
    }

    /// Whether [`Self::close`] was called.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.get()
    }

    /// Sets the task that [`Self::close`] wakes. Returns whether the task was already set.
    pub(super) fn set_task(&self, cx: &Context<'_>) -> bool {
        let mut task = self.waker.borrow_mut();
        let same = task.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        if !same {
            *task = Some(cx.waker().clone());
        }
        same
    }
}

impl RelayExchangeGuard {
    pub(super) fn set_generation(&self, generation: &Arc<GateGeneration>) {
        *self.0.gate_generation.borrow_mut() = Some(Arc::clone(generation));
    }
}

impl Drop for RelayExchangeGuard {
    fn drop(&mut self) {
        *self.0.gate_generation.borrow_mut() = None;
    }
}

impl ServerIo for RelaySocket {
    #[inline]
    fn poll_read(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream.borrow_mut()).poll_read(cx, buf)
    }

    #[inline]
    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.stream.borrow_mut()).poll_write(cx, bytes)
    }

    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream.borrow_mut()).poll_flush(cx)
    }

    fn poll_shutdown(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream.borrow_mut()).poll_shutdown(cx)
    }
}
