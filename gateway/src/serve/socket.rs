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
    ptr,
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
    address_limiter::{AddressLimiter, ConnectionPermit},
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
    /// Set over HTTP/2.
    multiplexed: OnceCell<Box<MultiplexedState>>,
    exchanges: Cell<u32>,
    /// The exchanges that have handed something to the client and were not polled since.
    awaiting_client: Cell<u32>,
    idle_state: Cell<IdleState>,
    /// The streaming body of HTTP/1.1, which has at most one.
    streaming_body: RefCell<Weak<StreamingBody>>,
    stage: Cell<ShutdownStage>,
    task: RefCell<Option<Waker>>,
    /// The key that the client last presented.
    pub(crate) auth_cache: AuthCache,
    peer: Cell<Option<SocketAddr>>,
    account: OnceCell<ConnectionAccount>,
    /// The core to whose load the exchanges count.
    core_load: OnceCell<Rc<CoreLoadHandle>>,
}

/// State of a connection that may have several exchanges at a time.
struct MultiplexedState {
    flush_notifies: RefCell<Vec<Rc<FlushNotify>>>,
    streaming_bodies: RefCell<Vec<Weak<StreamingBody>>>,
    /// When [`ClientSocket::awaiting_client`] last changed for any exchange, or some handed bytes were written.
    last_progress: Cell<Instant>,
}

/// What the requests of a connection count against.
enum ConnectionAccount {
    /// The connection's client.
    Client(ConnectionPermit),
    /// Their own clients, since a trusted proxy sends them.
    Proxy(Arc<AddressLimiter>),
    /// Nothing: the connection comes from the admin API, and all requests have this key.
    Operator(Arc<ApiKey>),
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
        // HTTP/1.1's connection asks again only when everything is written.
        let Some(multiplexed) = socket.multiplexed.get() else { return true };
        if self.done.get() {
            return true;
        }
        *self.waker.borrow_mut() = Some(cx.waker().clone());
        if !self.requested.replace(true) {
            multiplexed.flush_notifies.borrow_mut().push(Rc::clone(self));
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
            multiplexed: OnceCell::new(),
            exchanges: Cell::new(0),
            awaiting_client: Cell::new(0),
            idle_state: Cell::new(IdleState::NoRequest { since: Instant::now() }),
            streaming_body: RefCell::default(),
            stage: Cell::new(stage),
            task: RefCell::default(),
            auth_cache: AuthCache::default(),
            peer: Cell::new(None),
            account: OnceCell::new(),
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
        self.account.set(ConnectionAccount::Operator(key)).unwrap_or_default();
    }

    pub(crate) fn operator_key(&self) -> Option<&Arc<ApiKey>> {
        match self.account.get() {
            Some(ConnectionAccount::Operator(key)) => Some(key),
            _ => None,
        }
    }

    /// Sets the permit of the connection's client, against whose address [`Self::record_offence`] counts.
    pub(super) fn set_permit(&self, permit: ConnectionPermit) {
        self.account.set(ConnectionAccount::Client(permit)).unwrap_or_default();
    }

    /// Releases the client's permit: the connection is over.
    pub(super) fn release_permit(&self) {
        self.permit().inspect(|permit| permit.release());
    }

    fn permit(&self) -> Option<&ConnectionPermit> {
        match self.account.get() {
            Some(ConnectionAccount::Client(permit)) => Some(permit),
            _ => None,
        }
    }

    /// Makes the connection that of a trusted proxy: each of its requests counts against its own client.
    pub(super) fn set_proxy_limiter(&self, limiter: Arc<AddressLimiter>) {
        self.account.set(ConnectionAccount::Proxy(limiter)).unwrap_or_default();
    }

    /// The limiter of the requests' clients, on a trusted proxy's connection.
    pub(crate) fn proxy_limiter(&self) -> Option<&Arc<AddressLimiter>> {
        match self.account.get() {
            Some(ConnectionAccount::Proxy(limiter)) => Some(limiter),
            _ => None,
        }
    }

    /// Sets the core to whose load the exchanges count.
    pub(super) fn set_core_load(&self, core: Rc<CoreLoadHandle>) {
        self.core_load.set(core).unwrap_or_default();
    }

    /// The body bytes held by the client's address.
    pub(crate) fn body_bytes(&self) -> Option<Arc<BodyByteCounter>> {
        self.permit().map(ConnectionPermit::body_bytes)
    }

    /// Counts an offence: an action that only a broken or hostile client takes.
    pub(crate) fn record_offence(&self) {
        if let Some(offender) = self.permit() {
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
        self.note_progress(now);
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
    /// stream without a window waits forever and blocks no write. `None` over HTTP/1.1.
    pub(crate) fn all_stalled_since(&self) -> Option<Instant> {
        let (open, state) = (self.exchanges.get(), self.multiplexed.get()?);
        (open > 0 && self.awaiting_client.get() == open).then(|| state.last_progress.get())
    }

    /// Records that the client read something, or lost unread data.
    pub(crate) fn note_progress(&self, now: Instant) {
        if let Some(state) = self.multiplexed.get() {
            state.last_progress.set(now);
        }
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
        let now = Instant::now();
        self.multiplexed.get_or_init(|| {
            Box::new(MultiplexedState {
                flush_notifies: RefCell::default(),
                streaming_bodies: RefCell::default(),
                last_progress: Cell::new(now),
            })
        });
        self.idle_state.set(IdleState::KeepAlive { since: now });
    }

    pub(crate) fn is_multiplexed(&self) -> bool {
        self.multiplexed.get().is_some()
    }

    /// Watches this body for stalls until [`Self::unwatch_body`].
    pub(crate) fn watch_body(&self, streaming_body: &Rc<StreamingBody>) {
        let streaming_body = Rc::downgrade(streaming_body);
        match self.multiplexed.get() {
            None => *self.streaming_body.borrow_mut() = streaming_body,
            Some(state) => state.streaming_bodies.borrow_mut().push(streaming_body),
        }
    }

    /// Forgets a body at its end. Otherwise a reference to it would keep its memory on the idle connection.
    pub(crate) fn unwatch_body(&self, ended: &StreamingBody) {
        let is_ended = |body: &Weak<StreamingBody>| ptr::eq(body.as_ptr(), ended);
        // While a list is read, its reader owns the bodies too, so none of them ends.
        if let Ok(mut body) = self.streaming_body.try_borrow_mut()
            && is_ended(&body)
        {
            *body = Weak::new();
        }
        if let Some(state) = self.multiplexed.get()
            && let Ok(mut bodies) = state.streaming_bodies.try_borrow_mut()
            && let Some(at) = bodies.iter().position(is_ended)
        {
            bodies.swap_remove(at);
        }
    }

    /// How many bodies the socket refers to, with those that have ended.
    #[cfg(test)]
    pub(crate) fn watched_bodies(&self) -> usize {
        let several = self.multiplexed.get().map_or(0, |state| state.streaming_bodies.borrow().len());
        usize::from(!self.streaming_body.borrow().ptr_eq(&Weak::new())) + several
    }

    pub(crate) fn streaming_bodies(&self) -> Vec<Rc<StreamingBody>> {
        let mut bodies: Vec<_> = self.streaming_body.borrow().upgrade().into_iter().collect();
        if let Some(state) = self.multiplexed.get() {
            bodies.extend(state.streaming_bodies.borrow().iter().filter_map(Weak::upgrade));
        }
        bodies
    }

    pub(crate) fn any_stalled(&self) -> bool {
        let is_stalled = |body: &Weak<StreamingBody>| {
            body.upgrade().is_some_and(|streaming_body| streaming_body.stalled_since().is_some())
        };
        is_stalled(&self.streaming_body.borrow())
            || self
                .multiplexed
                .get()
                .is_some_and(|state| state.streaming_bodies.borrow().iter().any(is_stalled))
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
        let Some(multiplexed) = self.multiplexed.get() else { return Poll::Ready(Ok(())) };
        if multiplexed.flush_notifies.borrow().is_empty() {
            return Poll::Ready(Ok(()));
        }
        for flushed in multiplexed.flush_notifies.take() {
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
        if let Some(state) = self.socket.multiplexed.get() {
            state.last_progress.set(Instant::now());
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
