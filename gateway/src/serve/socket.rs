//! A client's socket that keeps being read while its request is served.
//!
//! A client that leaves must be noticed in every phase, because a forgotten generation holds a GPU. So the socket is
//! shared between hyper and the task that drives the connection, which reads on where hyper does not look
//! ([`rouse_net::downstream::ReadAhead`]).
//!
//! The same place knows when a client takes nothing any more, when it dawdles over a request's head, and when hyper
//! refuses a head by itself with an empty answer, which then gets a body like every other refusal.

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
    keys::AuthCache,
};

mod hyper_io;

pub(crate) use hyper_io::HyperIo;

/// What the connection's task and its exchanges share.
pub(crate) struct ClientSocket {
    stream: RefCell<ClientStream>,
    read_ahead: ReadAhead,
    multiplexed: Cell<bool>,
    exchanges: Cell<u32>,
    /// Of the exchanges, those whose client has not asked for more since it was handed something.
    awaiting_client: Cell<u32>,
    /// When that last changed for any of them, or some of what was handed went out.
    last_progress: Cell<Instant>,
    idle_state: Cell<IdleState>,
    /// It rests no more: a part of a head came, and nobody has looked at the clock yet.
    head_started: Cell<bool>,
    flush_notifies: RefCell<Vec<Rc<FlushNotify>>>,
    streaming_bodies: RefCell<Vec<Weak<StreamingBody>>>,
    stage: Cell<ShutdownStage>,
    task: RefCell<Option<Waker>>,
    hyper_refusal: Cell<Option<u16>>,
    /// The key that its client showed last.
    pub(crate) auth_cache: AuthCache,
    body_unread: Cell<bool>,
    peer: Cell<Option<SocketAddr>>,
    address_usage: OnceCell<AddressUsageHandle>,
    /// Where its exchanges weigh.
    core_load: OnceCell<Rc<CoreLoadHandle>>,
}

/// What a connection does between exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdleState {
    /// Nothing was sent, not even a first request.
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

/// Counts an exchange from the call of the service until the response's body is gone.
pub(crate) struct ConnectionExchangeGuard {
    socket: Rc<ClientSocket>,
    awaiting_client: Cell<bool>,
    /// When it ended, if it is known when it is dropped.
    ended_at: Cell<Option<Instant>>,
}

/// Whether hyper has written out all that it held since this was first asked. On HTTP/2 that is all it may send: what a
/// stream has no window for is not among it, and is lost when the stream is then reset.
#[derive(Debug, Default)]
pub(crate) struct FlushNotify {
    requested: Cell<bool>,
    done: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl FlushNotify {
    /// Until it is so, the task is woken when it is.
    pub(crate) fn poll(self: &Rc<Self>, socket: &ClientSocket, cx: &Context<'_>) -> bool {
        if self.done.get() {
            return true;
        }
        *self.waker.borrow_mut() = Some(cx.waker().clone());
        if !self.requested.replace(true) {
            socket.flush_notifies.borrow_mut().push(Rc::clone(self));
            // On HTTP/2 all may be written already, and nothing else would make hyper look.
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
            body_unread: Cell::new(false),
            peer: Cell::new(None),
            address_usage: OnceCell::new(),
            core_load: OnceCell::new(),
        })
    }

    /// Who is at the other end, for those who write down who asked what.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.peer.get()
    }

    pub(super) fn set_peer(&self, peer: SocketAddr) {
        self.peer.set(Some(peer));
    }

    /// Nobody between reads along.
    pub(crate) fn is_secure(&self) -> bool {
        matches!(*self.stream.borrow(), ClientStream::Tls(_))
    }

    /// Whom [`Self::record_offence`] is said of.
    pub(crate) fn set_address_usage(&self, offender: AddressUsageHandle) {
        self.address_usage.set(offender).unwrap_or_default();
    }

    /// Its exchanges count for this core.
    pub(super) fn set_core_load(&self, core: Rc<CoreLoadHandle>) {
        self.core_load.set(core).unwrap_or_default();
    }

    /// What its client's address holds in bodies.
    pub(crate) fn body_bytes(&self) -> Option<Arc<BodyByteCounter>> {
        self.address_usage.get().map(AddressUsageHandle::body_bytes)
    }

    /// The client did something that only a broken or hostile one does.
    pub(crate) fn record_offence(&self) {
        if let Some(offender) = self.address_usage.get() {
            offender.record_offence();
        }
    }

    /// Takes the connection away for its handshake; nothing can be read or written until it is back.
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

    /// Since when no exchange moved, when all that are open wait for the client alone: on HTTP/2, where a stream without
    /// a window waits for ever and blocks no write.
    pub(crate) fn all_stalled_since(&self) -> Option<Instant> {
        let open = self.exchanges.get();
        (open > 0 && self.awaiting_client.get() == open).then(|| self.last_progress.get())
    }

    /// The client took something, or lost what it did not take.
    pub(crate) fn note_progress(&self, now: Instant) {
        self.last_progress.set(now);
    }

    pub(crate) fn idle_state(&self) -> IdleState {
        // Asked for after each poll, so that is when the head began. Most are there whole, and need no clock for it.
        if self.head_started.take() {
            self.idle_state.set(IdleState::ReadingHead { since: Instant::now() });
        }
        self.idle_state.get()
    }

    /// Since when the client has taken none of the bytes that are ready for it.
    pub(crate) fn write_blocked_since(&self) -> Option<Instant> {
        self.stream.borrow().blocked_since()
    }

    /// The status with which hyper refused a head that it could not take.
    pub(crate) fn hyper_refusal(&self) -> Option<u16> {
        self.hyper_refusal.get()
    }

    /// A request was answered before its body was read: the client may still be sending.
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

    /// Has this body looked after while it lasts.
    pub(crate) fn watch_body(&self, live: &Rc<StreamingBody>) {
        let mut lives = self.streaming_bodies.borrow_mut();
        lives.retain(|live| live.strong_count() > 0);
        if lives.is_empty() {
            // On HTTP/1.1 there are never two.
            lives.reserve_exact(1);
        }
        lives.push(Rc::downgrade(live));
    }

    pub(crate) fn streaming_bodies(&self) -> Vec<Rc<StreamingBody>> {
        self.streaming_bodies.borrow().iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn any_stalled(&self) -> bool {
        let lives = self.streaming_bodies.borrow();
        lives.iter().filter_map(Weak::upgrade).any(|live| live.stalled_since().is_some())
    }

    pub(crate) fn stage(&self) -> ShutdownStage {
        self.stage.get()
    }

    /// Tells the connection's task that the gateway is at this stage.
    pub(crate) fn set_stage(&self, stage: ShutdownStage) {
        self.stage.set(stage);
        if let Some(task) = &*self.task.borrow() {
            task.wake_by_ref();
        }
    }

    /// The task that [`Self::set_stage`] wakes. Returns whether it was that one before.
    pub(crate) fn set_task(&self, cx: &Context<'_>) -> bool {
        let mut task = self.task.borrow_mut();
        let same = task.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        if !same {
            *task = Some(cx.waker().clone());
        }
        same
    }

    /// Completes at this stage. To be awaited by the connection's task only.
    pub(crate) async fn wait_for_stage(&self, stage: ShutdownStage) {
        poll_fn(|cx| {
            self.set_task(cx);
            if self.stage() >= stage { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// To be called before hyper is polled.
    pub(crate) fn before_poll(&self) {
        self.read_ahead.before_poll();
    }

    /// To be called after hyper was polled: true when the client left during an exchange.
    pub(crate) fn poll_client_left(&self, cx: &mut Context<'_>) -> bool {
        self.exchanges.get() > 0
            && !self.multiplexed.get()
            && self.read_ahead.detect_disconnect(&self.stream, cx)
    }

    /// Waits until `wanted` bytes or the end have been read ahead; returns whether what came is the start of `wanted`
    /// in full. Used once, before hyper owns the connection, to tell HTTP/2 by its preface.
    pub(crate) fn poll_starts_with(&self, cx: &mut Context<'_>, wanted: &[u8]) -> Poll<io::Result<bool>> {
        self.read_ahead.poll_starts_with(&self.stream, cx, wanted, || {
            self.note_head_started();
            // Nobody else looks at the clock for it yet.
            self.idle_state();
        })
    }

    /// Writes past hyper, which must be gone.
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

    /// Reads some bytes and forgets them; false at the end.
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

    /// hyper answers a head that it cannot parse by itself, bare. While no exchange is open, a head is being read and
    /// no earlier write is stuck, nothing else starts like that; the caller then answers in its place.
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

    /// Says so to those who asked, too.
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
    /// The client was handed something, and did not ask for more yet.
    pub(crate) fn note_handed(&self) {
        self.set_awaiting_client(true);
    }

    /// The client can take more.
    pub(crate) fn note_polled(&self) {
        self.set_awaiting_client(false);
    }

    /// It is dropped at `now`.
    pub(crate) fn set_ended_at(&self, now: Instant) {
        self.ended_at.set(Some(now));
    }

    fn set_awaiting_client(&self, handed: bool) {
        let before = self.awaiting_client.replace(handed);
        let others = self.socket.awaiting_client.get() - u32::from(before);
        self.socket.awaiting_client.set(others + u32::from(handed));
        // Where there is one exchange, whoever stalls blocks a write.
        if self.socket.is_multiplexed() {
            self.socket.last_progress.set(Instant::now());
        }
    }
}

impl Drop for ConnectionExchangeGuard {
    fn drop(&mut self) {
        self.note_polled();
        let left = self.socket.exchanges.get() - 1;
        self.socket.exchanges.set(left);
        self.socket.core_load.get().inspect(|core| core.exchange_ended());
        if left == 0 {
            let since = self.ended_at.get().unwrap_or_else(Instant::now);
            self.socket.idle_state.set(IdleState::KeepAlive { since });
        }
    }
}
