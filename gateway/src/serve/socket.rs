//! A client's socket that the gateway keeps reading while it serves the client's request.
//!
//! A client's disconnect must be noticed in every phase, because a forgotten generation holds a GPU. So hyper and the
//! task that drives the connection share the socket, and the task reads ahead where hyper does not read
//! ([`rouse_net::downstream::ReadAhead`]).
//!
//! The socket also detects a client that reads nothing, a client that sends a head too slowly, and a head that hyper
//! refuses by itself with an empty response. The gateway then sends a body like for every other refusal.

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
    downstream::{DownstreamIo, ReadAhead, StallTrackingTcp},
    tcp::Tcp,
};
use tokio::{io::AsyncWrite, time::Instant};

use super::{
    ShutdownStage, address_limiter::AddressUsageHandle, balance::CoreLoadHandle, stream::ClientStream,
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
    read_ahead: ReadAhead,
    multiplexed: Cell<bool>,
    exchanges: Cell<u32>,
    /// The exchanges that have handed something to the client and were not polled since.
    awaiting_client: Cell<u32>,
    /// When that last changed for any exchange, or some handed bytes were written.
    last_progress: Cell<Instant>,
    idle_state: Cell<IdleState>,
    /// A part of a head arrived, but its time is not recorded yet.
    head_started: Cell<bool>,
    flush_notifies: RefCell<Vec<Rc<FlushNotify>>>,
    streaming_bodies: RefCell<Vec<Weak<StreamingBody>>>,
    stage: Cell<ShutdownStage>,
    task: RefCell<Option<Waker>>,
    hyper_refusal: Cell<Option<u16>>,
    /// The key that the client last presented.
    pub(crate) auth_cache: AuthCache,
    /// The key of all requests of a connection that comes from the admin API.
    operator_key: OnceCell<Arc<ApiKey>>,
    body_unread: Cell<bool>,
    peer: Cell<Option<SocketAddr>>,
    address_usage: OnceCell<AddressUsageHandle>,
    /// The core to whose load the exchanges count.
    core_load: OnceCell<Rc<CoreLoadHandle>>,
}

/// The state of a connection between exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdleState {
    /// The client has sent nothing, not even a first request.
    NoRequest {
        since: Instant,
    },
    KeepAlive {
        since: Instant,
    },
    /// A part of a head arrived.
    ReadingHead {
        since: Instant,
    },
}

/// Counts an exchange from the call of the service until the response's body is dropped.
pub(crate) struct ConnectionExchangeGuard {
    socket: Rc<ClientSocket>,
    awaiting_client: Cell<bool>,
    /// When the exchange ended, if known at the drop.
    ended_at: Cell<Option<Instant>>,
}

/// Whether hyper has written everything that it held since the first poll of this value. On HTTP/2 this covers only
/// data that may be sent: data of a stream without a window is not included, and is lost when the stream is then reset.
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
            // On HTTP/2 everything may be written already, and nothing else would make hyper flush.
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
            read_ahead: ReadAhead::default(),
            multiplexed: Cell::new(false),
            exchanges: Cell::new(0),
            awaiting_client: Cell::new(0),
            last_progress: Cell::new(Instant::now()),
            idle_state: Cell::new(IdleState::NoRequest { since: Instant::now() }),
            head_started: Cell::new(false),
            flush_notifies: RefCell::default(),
            streaming_bodies: RefCell::default(),
            stage: Cell::new(stage),
            task: RefCell::default(),
            hyper_refusal: Cell::new(None),
            auth_cache: AuthCache::default(),
            operator_key: OnceCell::new(),
            body_unread: Cell::new(false),
            peer: Cell::new(None),
            address_usage: OnceCell::new(),
            core_load: OnceCell::new(),
        })
    }

    /// The client's address, for logs and access records.
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
        self.head_started.set(false);
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

    pub(crate) fn idle_state(&self) -> IdleState {
        // Called after each poll, so that is the head's start. Most heads arrive whole and need no clock reading.
        if self.head_started.take() {
            self.idle_state.set(IdleState::ReadingHead { since: Instant::now() });
        }
        self.idle_state.get()
    }

    /// Since when the client has read none of the bytes that are ready for it.
    pub(crate) fn write_blocked_since(&self) -> Option<Instant> {
        self.stream.borrow().blocked_since()
    }

    /// The status with which hyper refused a head.
    pub(crate) fn hyper_refusal(&self) -> Option<u16> {
        self.hyper_refusal.get()
    }

    /// Records that a request was answered before its body was read: the client may still be sending.
    pub(crate) fn set_body_unread(&self) {
        self.body_unread.set(true);
    }

    pub(crate) fn is_body_unread(&self) -> bool {
        self.body_unread.get()
    }

    pub(crate) fn set_multiplexed(&self) {
        self.multiplexed.set(true);
        self.head_started.set(false);
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

    /// Call this before polling hyper.
    pub(crate) fn before_poll(&self) {
        self.read_ahead.before_poll();
    }

    /// Call this after polling hyper. True: the client disconnected during an exchange.
    pub(crate) fn poll_client_left(&self, cx: &mut Context<'_>) -> bool {
        self.exchanges.get() > 0
            && !self.multiplexed.get()
            && self.read_ahead.detect_disconnect(&self.stream, cx)
    }

    /// Waits until `wanted.len()` bytes or the end have been read ahead, or the bytes differ. Returns whether they
    /// equal `wanted`. Used once, before hyper owns the connection, to detect HTTP/2 by its preface.
    pub(crate) fn poll_starts_with(&self, cx: &mut Context<'_>, wanted: &[u8]) -> Poll<io::Result<bool>> {
        self.read_ahead.poll_starts_with(&self.stream, cx, wanted, || {
            self.note_head_started();
            // Record the time now, since no other code reads the clock for it yet.
            self.idle_state();
        })
    }

    /// Writes past hyper, which must have been dropped.
    pub(crate) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let write = |cx: &mut Context<'_>| Pin::new(&mut *self.stream.borrow_mut()).poll_write(cx, bytes);
            let written = poll_fn(write).await?;
            bytes = bytes.get(written..).unwrap_or_default();
        }
        poll_fn(|cx| Pin::new(&mut *self.stream.borrow_mut()).poll_flush(cx)).await
    }

    pub(crate) async fn shutdown(&self) -> io::Result<()> {
        poll_fn(|cx| Pin::new(&mut *self.stream.borrow_mut()).poll_shutdown(cx)).await
    }

    /// Reads and discards some bytes; false at the end.
    pub(crate) async fn discard(&self) -> io::Result<bool> {
        poll_fn(|cx| self.read_ahead.poll_discard(&self.stream, cx)).await
    }

    fn note_head_started(&self) {
        if self.exchanges.get() == 0 && !self.is_reading_head() {
            self.head_started.set(true);
        }
    }

    fn is_reading_head(&self) -> bool {
        self.head_started.get() || matches!(self.idle_state.get(), IdleState::ReadingHead { .. })
    }

    /// Detects hyper's own bare answer to a head that it cannot parse. While no exchange is open, a head is being read
    /// and no earlier write is stuck, nothing else starts like that. The caller then sends its own answer instead.
    fn hyper_refusal_status(&self, bytes: &[u8]) -> Option<u16> {
        let stuck = self.write_blocked_since().is_some();
        if self.exchanges.get() > 0 || stuck || !self.is_reading_head() {
            return None;
        }
        match bytes.strip_prefix(b"HTTP/1.1 ")?.get(..3)? {
            b"400" => Some(400),
            b"414" => Some(414),
            b"431" => Some(431),
            _ => None,
        }
    }
}

impl DownstreamIo for ClientSocket {
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

    fn unread(&self, bytes: &[u8]) {
        self.read_ahead.unread(bytes);
    }

    fn is_write_blocked(&self) -> bool {
        self.write_blocked_since().is_some()
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
