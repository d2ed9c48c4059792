//! A client's socket that keeps being read while its request is served.
//!
//! A client that leaves must be noticed in every phase, because a forgotten generation holds a GPU. So the socket is
//! shared between hyper and the task that drives the connection, which reads on where hyper does not look
//! ([`rouse::client::Ahead`]).
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

use rouse::{
    client::{Ahead, Peer, Wire},
    tcp::Tcp,
};
use tokio::{io::AsyncWrite, time::Instant};

use super::{Stage, addresses::Offender, balance::OnCore, stream::Stream};
use crate::{
    http::{InFlight, reply::Live},
    keys::Remembered,
};

mod duplex;

pub(crate) use duplex::Io;

/// What the connection's task and its exchanges share.
pub(crate) struct Socket {
    stream: RefCell<Stream>,
    ahead: Ahead,
    multiplexed: Cell<bool>,
    exchanges: Cell<u32>,
    /// Of the exchanges, those whose client has not asked for more since it was handed something.
    handed: Cell<u32>,
    /// When that last changed for any of them, or some of what was handed went out.
    moved: Cell<Instant>,
    rest: Cell<Rest>,
    /// It rests no more: a part of a head came, and nobody has looked at the clock yet.
    head: Cell<bool>,
    flushed: RefCell<Vec<Rc<Flushed>>>,
    lives: RefCell<Vec<Weak<Live>>>,
    stage: Cell<Stage>,
    task: RefCell<Option<Waker>>,
    refused: Cell<Option<u16>>,
    /// The key that its client showed last.
    pub(crate) key: Remembered,
    unread: Cell<bool>,
    peer: Cell<Option<SocketAddr>>,
    offender: OnceCell<Offender>,
    /// Where its exchanges weigh.
    core: OnceCell<Rc<OnCore>>,
}

/// What a connection does between exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// Nothing was sent, not even a first request.
    Fresh {
        since: Instant,
    },
    Idle {
        since: Instant,
    },
    /// A part of a head arrived.
    Head {
        since: Instant,
    },
}

/// Counts an exchange from the call of the service until the response's body is gone.
pub(crate) struct InExchange {
    socket: Rc<Socket>,
    handed: Cell<bool>,
    /// When it ended, if it is known when it is dropped.
    ended: Cell<Option<Instant>>,
}

/// Whether hyper has written out all that it held since this was first asked. On HTTP/2 that is all it may send: what a
/// stream has no window for is not among it, and is lost when the stream is then reset.
#[derive(Debug, Default)]
pub(crate) struct Flushed {
    asked: Cell<bool>,
    done: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Flushed {
    /// Until it is so, the task is woken when it is.
    pub(crate) fn poll(self: &Rc<Self>, socket: &Socket, cx: &Context<'_>) -> bool {
        if self.done.get() {
            return true;
        }
        *self.waker.borrow_mut() = Some(cx.waker().clone());
        if !self.asked.replace(true) {
            socket.flushed.borrow_mut().push(Rc::clone(self));
            // On HTTP/2 all may be written already, and nothing else would make hyper look.
            if let Some(task) = &*socket.task.borrow() {
                task.wake_by_ref();
            }
        }
        false
    }
}

impl Socket {
    pub(crate) fn new(stream: impl Into<Tcp>, stage: Stage) -> Rc<Self> {
        Rc::new(Self {
            stream: RefCell::new(Stream::plain(stream)),
            ahead: Ahead::default(),
            multiplexed: Cell::new(false),
            exchanges: Cell::new(0),
            handed: Cell::new(0),
            moved: Cell::new(Instant::now()),
            rest: Cell::new(Rest::Fresh { since: Instant::now() }),
            head: Cell::new(false),
            flushed: RefCell::default(),
            lives: RefCell::default(),
            stage: Cell::new(stage),
            task: RefCell::default(),
            refused: Cell::new(None),
            key: Remembered::default(),
            unread: Cell::new(false),
            peer: Cell::new(None),
            offender: OnceCell::new(),
            core: OnceCell::new(),
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
        matches!(*self.stream.borrow(), Stream::Tls(_))
    }

    /// Whom [`Self::offends`] is said of.
    pub(crate) fn is_of(&self, offender: Offender) {
        self.offender.set(offender).unwrap_or_default();
    }

    /// Its exchanges count for this core.
    pub(super) fn weighs_on(&self, core: Rc<OnCore>) {
        self.core.set(core).unwrap_or_default();
    }

    /// What its client's address holds in bodies.
    pub(crate) fn bodies(&self) -> Option<Arc<InFlight>> {
        self.offender.get().map(Offender::bodies)
    }

    /// The client did something that only a broken or hostile one does.
    pub(crate) fn offends(&self) {
        if let Some(offender) = self.offender.get() {
            offender.offends();
        }
    }

    /// Takes the connection away for its handshake; nothing can be read or written until it is back.
    pub(super) fn take_wire(&self) -> Option<Wire> {
        match self.stream.replace(Stream::Away) {
            Stream::Plain(wire) => Some(wire),
            Stream::Tls(_) | Stream::Away => None,
        }
    }

    pub(super) fn give_back(&self, stream: Stream) {
        self.stream.replace(stream);
    }

    pub(crate) fn io(self: &Rc<Self>) -> Io {
        Io(Rc::clone(self))
    }

    pub(crate) fn begin(self: &Rc<Self>, now: Instant) -> InExchange {
        self.exchanges.set(self.exchanges.get() + 1);
        self.core.get().inspect(|core| core.begun());
        self.head.set(false);
        self.moved.set(now);
        InExchange { socket: Rc::clone(self), handed: Cell::new(false), ended: Cell::new(None) }
    }

    pub(crate) fn exchanges(&self) -> u32 {
        self.exchanges.get()
    }

    /// Since when no exchange moved, when all that are open wait for the client alone: on HTTP/2, where a stream without
    /// a window waits for ever and blocks no write.
    pub(crate) fn unasked_since(&self) -> Option<Instant> {
        let open = self.exchanges.get();
        (open > 0 && self.handed.get() == open).then(|| self.moved.get())
    }

    /// The client took something, or lost what it did not take.
    pub(crate) fn note_moved(&self, now: Instant) {
        self.moved.set(now);
    }

    pub(crate) fn rest(&self) -> Rest {
        // Asked for after each poll, so that is when the head began. Most are there whole, and need no clock for it.
        if self.head.take() {
            self.rest.set(Rest::Head { since: Instant::now() });
        }
        self.rest.get()
    }

    /// Since when the client has taken none of the bytes that are ready for it.
    pub(crate) fn write_blocked(&self) -> Option<Instant> {
        self.stream.borrow().blocked()
    }

    /// The status with which hyper refused a head that it could not take.
    pub(crate) fn refused(&self) -> Option<u16> {
        self.refused.get()
    }

    /// A request was answered before its body was read: the client may still be sending.
    pub(crate) fn leave_unread(&self) {
        self.unread.set(true);
    }

    pub(crate) fn is_unread(&self) -> bool {
        self.unread.get()
    }

    pub(crate) fn set_multiplexed(&self) {
        self.multiplexed.set(true);
        self.head.set(false);
        self.rest.set(Rest::Idle { since: Instant::now() });
    }

    pub(crate) fn is_multiplexed(&self) -> bool {
        self.multiplexed.get()
    }

    /// Has this body looked after while it lasts.
    pub(crate) fn watch(&self, live: &Rc<Live>) {
        let mut lives = self.lives.borrow_mut();
        lives.retain(|live| live.strong_count() > 0);
        if lives.is_empty() {
            // On HTTP/1.1 there are never two.
            lives.reserve_exact(1);
        }
        lives.push(Rc::downgrade(live));
    }

    pub(crate) fn lives(&self) -> Vec<Rc<Live>> {
        self.lives.borrow().iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn any_stalled(&self) -> bool {
        let lives = self.lives.borrow();
        lives.iter().filter_map(Weak::upgrade).any(|live| live.stalled_since().is_some())
    }

    pub(crate) fn stage(&self) -> Stage {
        self.stage.get()
    }

    /// Tells the connection's task that the gateway is at this stage.
    pub(crate) fn set_stage(&self, stage: Stage) {
        self.stage.set(stage);
        if let Some(task) = &*self.task.borrow() {
            task.wake_by_ref();
        }
    }

    /// The task that [`Self::set_stage`] wakes. Returns whether it was that one before.
    pub(crate) fn wake_with(&self, cx: &Context<'_>) -> bool {
        let mut task = self.task.borrow_mut();
        let same = task.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        if !same {
            *task = Some(cx.waker().clone());
        }
        same
    }

    /// Completes at this stage. To be awaited by the connection's task only.
    pub(crate) async fn until(&self, stage: Stage) {
        poll_fn(|cx| {
            self.wake_with(cx);
            if self.stage() >= stage { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// To be called before hyper is polled.
    pub(crate) fn before_poll(&self) {
        self.ahead.before_poll();
    }

    /// To be called after hyper was polled: true when the client left during an exchange.
    pub(crate) fn poll_left(&self, cx: &mut Context<'_>) -> bool {
        self.exchanges.get() > 0 && !self.multiplexed.get() && self.ahead.poll_left(&self.stream, cx)
    }

    /// Waits until `wanted` bytes or the end have been read ahead; returns whether what came is the start of `wanted`
    /// in full. Used once, before hyper owns the connection, to tell HTTP/2 by its preface.
    pub(crate) fn poll_starts_with(&self, cx: &mut Context<'_>, wanted: &[u8]) -> Poll<io::Result<bool>> {
        self.ahead.poll_starts_with(&self.stream, cx, wanted, || {
            self.note_head();
            // Nobody else looks at the clock for it yet.
            self.rest();
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
        poll_fn(|cx| self.ahead.poll_discard(&self.stream, cx)).await
    }

    fn note_head(&self) {
        if self.exchanges.get() == 0 && !self.has_head() {
            self.head.set(true);
        }
    }

    fn has_head(&self) -> bool {
        self.head.get() || matches!(self.rest.get(), Rest::Head { .. })
    }

    /// hyper answers a head that it cannot parse by itself, bare. While no exchange is open, a head is being read and
    /// no earlier write is stuck, nothing else starts like that; the caller then answers in its place.
    fn refuses(&self, bytes: &[u8]) -> Option<u16> {
        let stuck = self.write_blocked().is_some();
        if self.exchanges.get() > 0 || stuck || !self.has_head() {
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

impl Peer for Socket {
    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.stream.borrow_mut()).poll_write(cx, bytes)
    }

    /// Says so to those who asked, too.
    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut *self.stream.borrow_mut()).poll_flush(cx))?;
        if self.flushed.borrow().is_empty() {
            return Poll::Ready(Ok(()));
        }
        for flushed in self.flushed.take() {
            flushed.done.set(true);
            if let Some(waker) = flushed.waker.take() {
                waker.wake();
            }
        }
        Poll::Ready(Ok(()))
    }

    fn unread(&self, bytes: &[u8]) {
        self.ahead.unread(bytes);
    }

    fn is_blocked(&self) -> bool {
        self.write_blocked().is_some()
    }
}

impl InExchange {
    /// The client was handed something, and did not ask for more yet.
    pub(crate) fn handed(&self) {
        self.note(true);
    }

    /// The client can take more.
    pub(crate) fn asked(&self) {
        self.note(false);
    }

    /// It is dropped at `now`.
    pub(crate) fn ends(&self, now: Instant) {
        self.ended.set(Some(now));
    }

    fn note(&self, handed: bool) {
        let before = self.handed.replace(handed);
        let others = self.socket.handed.get() - u32::from(before);
        self.socket.handed.set(others + u32::from(handed));
        // Where there is one exchange, whoever stalls blocks a write.
        if self.socket.is_multiplexed() {
            self.socket.moved.set(Instant::now());
        }
    }
}

impl Drop for InExchange {
    fn drop(&mut self) {
        self.asked();
        let left = self.socket.exchanges.get() - 1;
        self.socket.exchanges.set(left);
        self.socket.core.get().inspect(|core| core.ended());
        if left == 0 {
            let since = self.ended.get().unwrap_or_else(Instant::now);
            self.socket.rest.set(Rest::Idle { since });
        }
    }
}
