//! A client's socket, and what its connection and its exchanges must know of each other.
//!
//! HTTP/1.1's loop reads and writes the socket through [`ServerIo`], hyper through [`HyperIo`]. The socket records
//! since when its client reads nothing, how many exchanges are open, and since when there is none: the connection's
//! deadlines follow from that.

use std::{
    cell::{Cell, OnceCell, RefCell},
    future::poll_fn,
    io,
    net::SocketAddr,
    pin::Pin,
    rc::{Rc, Weak},
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use rouse_net::{
    server::{PeekedBytes, ServerIo, StallTrackingTcp, deadlines::IdleState},
    tcp::Tcp,
};
use tokio::{
    io::{AsyncWrite, ReadBuf},
    time::Instant,
};

use super::{
    ShutdownStage,
    address_limiter::{AddressLimiter, AddressUsageHandle},
    balance::CoreLoadHandle,
    stream::ClientStream,
};
use crate::{
    http::{BodyByteCounter, response_body::StreamingBody},
    keys::{ApiKey, AuthCache},
};

mod hyper_io;

pub(crate) use hyper_io::HyperIo;

/// State shared by the connection's task and its exchanges.
pub(crate) struct ClientSocket {
    stream: RefCell<ClientStream>,
    /// Bytes that were read to recognise the protocol.
    peeked: PeekedBytes,
    multiplexed: Cell<bool>,
    exchanges: Cell<u32>,
    /// The exchanges that have handed something to the client and were not polled since.
    awaiting_client: Cell<u32>,
    /// When that last changed for any exchange, or some handed bytes were written.
    last_progress: Cell<Instant>,
    idle_state: Cell<IdleState>,
    flush_notifies: RefCell<Vec<Rc<FlushNotify>>>,
    streaming_bodies: RefCell<Vec<Weak<StreamingBody>>>,
    stage: Cell<ShutdownStage>,
    task: RefCell<Option<Waker>>,
    /// The key that the client last presented.
    pub(crate) auth_cache: AuthCache,
    /// The key of all requests of a connection that comes from the admin API.
    operator_key: OnceCell<Arc<ApiKey>>,
    peer: Cell<Option<SocketAddr>>,
    address_usage: OnceCell<AddressUsageHandle>,
    /// Set on a trusted proxy's connection, whose requests count against their own clients.
    proxy_limiter: OnceCell<Arc<AddressLimiter>>,
    /// The core to whose load the exchanges count.
    core_load: OnceCell<Rc<CoreLoadHandle>>,
}

/// Counts an exchange from the call of the service until the response's body is dropped.
pub(crate) struct ConnectionExchangeGuard {
    socket: Rc<ClientSocket>,
    awaiting_client: Cell<bool>,
    /// When the exchange ended, if known at the drop.
    ended_at: Cell<Option<Instant>>,
}

/// Whether an HTTP/2 connection has written everything that it held since the first poll of this value. This covers
/// only data that may be sent: data of a stream without a window is not included, and is lost when the stream is then
/// reset.
#[derive(Debug, Default)]
pub(crate) struct FlushNotify {
    requested: Cell<bool>,
    done: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl FlushNotify {
    /// Returns whether the flush is done. If not, wakes the task when it is.
    pub(crate) fn poll(self: &Rc<Self>, socket: &ClientSocket, cx: &Context<'_>) -> bool {
        if self.done.get() {
            return true;
        }
        *self.waker.borrow_mut() = Some(cx.waker().clone());
        if !self.requested.replace(true) {
            socket.flush_notifies.borrow_mut().push(Rc::clone(self));
            // Everything may be written already, and nothing else would make hyper flush.
            if let Some(task) = &*socket.task.borrow() {
                task.wake_by_ref();
            }
        }
        false
    }
}

impl ClientSocket {
    pub(crate) fn new(stream: impl Into<Tcp>, stage: ShutdownStage) -> Rc<Self> {
        Rc::new(Self {
            stream: RefCell::new(ClientStream::plain(stream)),
            peeked: PeekedBytes::default(),
            multiplexed: Cell::new(false),
            exchanges: Cell::new(0),
            awaiting_client: Cell::new(0),
            last_progress: Cell::new(Instant::now()),
            idle_state: Cell::new(IdleState::NoRequest { since: Instant::now() }),
            flush_notifies: RefCell::default(),
            streaming_bodies: RefCell::default(),
            stage: Cell::new(stage),
            task: RefCell::default(),
            auth_cache: AuthCache::default(),
            operator_key: OnceCell::new(),
            peer: Cell::new(None),
            address_usage: OnceCell::new(),
            proxy_limiter: OnceCell::new(),
            core_load: OnceCell::new(),
        })
    }

    /// The address at the other end, or the one that a trusted proxy named for the connection.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.peer.get()
    }

    pub(super) fn set_peer(&self, peer: SocketAddr) {
        self.peer.set(Some(peer));
    }

    /// Whether the connection uses TLS.
    pub(crate) fn is_secure(&self) -> bool {
        matches!(*self.stream.borrow(), ClientStream::Tls(_))
    }

    /// Makes this key the one of all requests: the connection comes from the admin API, which has let them in.
    pub(super) fn set_operator_key(&self, key: Arc<ApiKey>) {
        self.operator_key.set(key).unwrap_or_default();
    }

    pub(crate) fn operator_key(&self) -> Option<&Arc<ApiKey>> {
        self.operator_key.get()
    }

    /// Sets the address that [`Self::record_offence`] counts against.
    pub(crate) fn set_address_usage(&self, usage: AddressUsageHandle) {
        self.address_usage.set(usage).unwrap_or_default();
    }

    /// Makes the connection that of a trusted proxy: each of its requests counts against its own client.
    pub(super) fn set_proxy_limiter(&self, limiter: Arc<AddressLimiter>) {
        self.proxy_limiter.set(limiter).unwrap_or_default();
    }

    /// The limiter of the requests' clients, on a trusted proxy's connection.
    pub(crate) fn proxy_limiter(&self) -> Option<&Arc<AddressLimiter>> {
        self.proxy_limiter.get()
    }

    /// Sets the core to whose load the exchanges count.
    pub(super) fn set_core_load(&self, core: Rc<CoreLoadHandle>) {
        self.core_load.set(core).unwrap_or_default();
    }

    /// The body bytes held by the client's address.
    pub(crate) fn body_bytes(&self) -> Option<Arc<BodyByteCounter>> {
        self.address_usage.get().map(AddressUsageHandle::body_bytes)
    }

    /// Counts an offence: an action that only a broken or hostile client takes.
    pub(crate) fn record_offence(&self) {
        if let Some(offender) = self.address_usage.get() {
            offender.record_offence();
        }
    }

    /// Takes the connection for its handshake. Reads and writes fail until [`Self::put_stream`] returns it.
    pub(super) fn take_wire(&self) -> Option<StallTrackingTcp> {
        match self.stream.replace(ClientStream::InHandshake) {
            ClientStream::Plain(wire) => Some(wire),
            ClientStream::Tls(_) | ClientStream::InHandshake => None,
        }
    }

    pub(super) fn put_stream(&self, stream: ClientStream) {
        self.stream.replace(stream);
    }

    pub(crate) fn io(self: &Rc<Self>) -> HyperIo {
        HyperIo(Rc::clone(self))
    }

    pub(crate) fn begin_exchange(self: &Rc<Self>, now: Instant) -> ConnectionExchangeGuard {
        self.exchanges.set(self.exchanges.get() + 1);
        self.core_load.get().inspect(|core| core.exchange_started());
        self.last_progress.set(now);
        ConnectionExchangeGuard {
            socket: Rc::clone(self),
            awaiting_client: Cell::new(false),
            ended_at: Cell::new(None),
        }
    }

    pub(crate) fn exchanges(&self) -> u32 {
        self.exchanges.get()
    }

    /// Since when no exchange has progressed, if all open exchanges wait for the client alone. For HTTP/2, where a
    /// stream without a window waits forever and blocks no write.
    pub(crate) fn all_stalled_since(&self) -> Option<Instant> {
        let open = self.exchanges.get();
        (open > 0 && self.awaiting_client.get() == open).then(|| self.last_progress.get())
    }

    /// Records that the client read something, or lost unread data.
    pub(crate) fn note_progress(&self, now: Instant) {
        self.last_progress.set(now);
    }

    /// The state between exchanges. Meaningful while no exchange is open.
    pub(crate) fn idle_state(&self) -> IdleState {
        self.idle_state.get()
    }

    /// Records that a part of a head has arrived. The connection calls this only for a head that did not arrive whole,
    /// so most heads need no clock reading.
    pub(crate) fn note_head_started(&self) {
        if self.exchanges.get() == 0 && !matches!(self.idle_state.get(), IdleState::ReadingHead { .. }) {
            self.idle_state.set(IdleState::ReadingHead { since: Instant::now() });
        }
    }

    /// Since when the client has read none of the bytes that are ready for it.
    pub(crate) fn write_blocked_since(&self) -> Option<Instant> {
        self.stream.borrow().blocked_since()
    }

    pub(crate) fn set_multiplexed(&self) {
        self.multiplexed.set(true);
        self.idle_state.set(IdleState::KeepAlive { since: Instant::now() });
    }

    pub(crate) fn is_multiplexed(&self) -> bool {
        self.multiplexed.get()
    }

    /// Watches this body for stalls while it lasts.
    pub(crate) fn watch_body(&self, streaming_body: &Rc<StreamingBody>) {
        let mut lives = self.streaming_bodies.borrow_mut();
        lives.retain(|streaming_body| streaming_body.strong_count() > 0);
        if lives.is_empty() {
            // HTTP/1.1 never has two.
            lives.reserve_exact(1);
        }
        lives.push(Rc::downgrade(streaming_body));
    }

    pub(crate) fn streaming_bodies(&self) -> Vec<Rc<StreamingBody>> {
        self.streaming_bodies.borrow().iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn any_stalled(&self) -> bool {
        let lives = self.streaming_bodies.borrow();
        lives.iter().filter_map(Weak::upgrade).any(|streaming_body| streaming_body.stalled_since().is_some())
    }

    pub(crate) fn stage(&self) -> ShutdownStage {
        self.stage.get()
    }

    /// Sets the shutdown stage and wakes the connection's task.
    pub(crate) fn set_stage(&self, stage: ShutdownStage) {
        self.stage.set(stage);
        if let Some(task) = &*self.task.borrow() {
            task.wake_by_ref();
        }
    }

    /// Sets the task that [`Self::set_stage`] wakes. Returns whether the task was already set.
    pub(crate) fn set_task(&self, cx: &Context<'_>) -> bool {
        let mut task = self.task.borrow_mut();
        let same = task.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        if !same {
            *task = Some(cx.waker().clone());
        }
        same
    }

    /// Completes at this stage. Only the connection's task may await it.
    pub(crate) async fn wait_for_stage(&self, stage: ShutdownStage) {
        poll_fn(|cx| {
            self.set_task(cx);
            if self.stage() >= stage { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Waits until `wanted.len()` bytes or the end have been read ahead, or the bytes differ. Returns whether they
    /// equal `wanted`. Used once, before the connection's protocol is known, to detect HTTP/2 by its preface.
    pub(crate) fn poll_starts_with(&self, cx: &mut Context<'_>, wanted: &[u8]) -> Poll<io::Result<bool>> {
        self.peeked.poll_starts_with(&self.stream, cx, wanted, || self.note_head_started())
    }
}

impl ServerIo for ClientSocket {
    fn poll_read(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.peeked.poll_read(&self.stream, cx, buf)
    }

    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.stream.borrow_mut()).poll_write(cx, bytes)
    }

    /// Flushes the stream and notifies the waiting [`FlushNotify`]s.
    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut *self.stream.borrow_mut()).poll_flush(cx))?;
        if self.flush_notifies.borrow().is_empty() {
            return Poll::Ready(Ok(()));
        }
        for flushed in self.flush_notifies.take() {
            flushed.done.set(true);
            if let Some(waker) = flushed.waker.take() {
                waker.wake();
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream.borrow_mut()).poll_shutdown(cx)
    }
}

impl ConnectionExchangeGuard {
    /// Records that the client got something and has not asked for more.
    pub(crate) fn note_handed(&self) {
        self.set_awaiting_client(true);
    }

    /// Records that the client can take more.
    pub(crate) fn note_polled(&self) {
        self.set_awaiting_client(false);
    }

    /// Sets the end time that the drop records.
    pub(crate) fn set_ended_at(&self, now: Instant) {
        self.ended_at.set(Some(now));
    }

    fn set_awaiting_client(&self, handed: bool) {
        let before = self.awaiting_client.replace(handed);
        let others = self.socket.awaiting_client.get() - u32::from(before);
        self.socket.awaiting_client.set(others + u32::from(handed));
        // With only one exchange, a stalled client blocks a write.
        if self.socket.is_multiplexed() {
            self.socket.last_progress.set(Instant::now());
        }
    }
}

impl Drop for ConnectionExchangeGuard {
    fn drop(&mut self) {
        self.note_polled();
        let remaining = self.socket.exchanges.get() - 1;
        self.socket.exchanges.set(remaining);
        self.socket.core_load.get().inspect(|core| core.exchange_ended());
        if remaining == 0 {
            let since = self.ended_at.get().unwrap_or_else(Instant::now);
            self.socket.idle_state.set(IdleState::KeepAlive { since });
        }
    }
}
