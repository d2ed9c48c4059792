//! The engine's answer on its way to the client, and everything that ends with it.

use std::{
    future::Future,
    ops::Range,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{BufMut, Bytes, BytesMut};
use http::Response;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep};

use super::{
    Gated, Look, Observer, Outcome, Pool, Timeouts,
    connection::Connection,
    decode::Decoder,
    head::Head,
    headers,
    payload::Unsent,
    pool::Key,
    record::Record,
    tail::Tail,
    watch::{Deadline, Watch},
};
use crate::{
    fault::{Cause, Fault, Timer},
    lease::Lease,
    model::ModelName,
    openai::{Form, error, sse::Scanner},
    units::Millis,
};

/// How long the last event of a broken stream has to leave before the connection is torn down behind it. A server drops
/// what it has not written when a body fails. One that can tell when it has written asks
/// [`RelayBody::is_broken`] instead of waiting for this.
const FAREWELL: Millis = Millis(50);

/// An answer's body. Holds the engine's connection and the lease; both go when it ends or is dropped.
#[derive(Debug)]
pub struct RelayBody<O: Observer> {
    // Dropped in this order: the connection is closed before the lease is given back.
    stage: Stage,
    record: Record<O>,
    model: ModelName,
    /// Follows what can be read of it.
    follow: Option<Follow>,
    /// It is a stream of events with room for one of ours, and in whose words that is written.
    events: Option<Form>,
    /// Between two frames; `None` where one deadline covers the whole answer.
    idle: Option<Millis>,
    /// [`Timeouts::death`].
    death: Millis,
    /// When its last frame passed.
    passed: Option<Instant>,
}

/// What passes next.
#[derive(Debug)]
pub enum Piece {
    /// It lies in the memory that was lent, here.
    Here(Range<usize>),
    /// It has memory of its own: it came along with the head, or is the last word of a stream that broke.
    Own(Bytes),
}

/// The client must not take what it has for the whole: the exchange broke. The fault was told in the stream already,
/// where that was possible.
#[derive(Debug, thiserror::Error)]
#[error("the answer broke off: {0}")]
pub struct Broken(pub Fault);

/// What the request asked for, as far as its answer depends on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) stream: bool,
    pub(super) look: Look,
    pub(super) form: Form,
}

/// What follows an answer as it passes.
#[derive(Debug)]
enum Follow {
    /// The events of a stream, or one document.
    Events(Scanner),
    /// Only where a stream stands.
    Tail(Tail),
}

#[derive(Debug)]
enum Stage {
    Flowing {
        flow: Pin<Box<Flow>>,
        decoder: Decoder,
    },
    /// It broke, and its client will be told of it: as soon as the lease is revoked, or as all that is known after a while.
    Sought(Pin<Box<Flow>>, Pin<Box<Sleep>>),
    /// The error event is out, and is given time to leave.
    Farewell(Pin<Box<Sleep>>, Box<Fault>),
    Broken(Box<Fault>),
    Ended,
}

pin_project! {
    /// An exchange's watch, and from the answer's head on the connection that carries the answer: in one piece of memory,
    /// made when the exchange begins and never moved.
    pub(super) struct Flow {
        #[pin]
        watch: Watch,
        pool: Pool,
        connection: Option<Connection>,
        // What the engine had not read of the request when it began to answer.
        unsent: Unsent,
        // Where in the pool the connection goes afterwards, when it can be used again.
        home: Option<Key>,
    }
}

impl<O: Observer + Unpin> RelayBody<O> {
    pub(super) fn respond(
        head: Head,
        flow: Pin<Box<Flow>>,
        record: Record<O>,
        model: ModelName,
        timeouts: &Timeouts,
        wanted: Wanted,
    ) -> Response<Self> {
        let Head { status, mut headers, decoder, gated, .. } = head;
        let readable = headers::is_readable_stream(&headers);
        let document = wanted.look == Look::Documents && headers::is_readable_json(&headers);
        // With a length given there is no room for an event of ours; encoded, nothing can be read or written.
        let events = readable && decoder.left().is_none();
        let follow = match (wanted.look, wanted.form) {
            (Look::Ends, Form::OpenAi | Form::Anthropic) => events.then(|| Follow::Tail(Tail::default())),
            _ if readable => Some(Follow::Events(Scanner::new())),
            _ => document.then(|| Follow::Events(Scanner::of_json())),
        };
        headers::to_client(&mut headers, events, decoder.left().is_none());
        let mut body = Self {
            stage: Stage::Ended,
            record,
            model,
            follow,
            events: events.then_some(wanted.form),
            idle: wanted.stream.then_some(timeouts.idle),
            death: timeouts.death,
            passed: None,
        };
        if decoder.is_done() {
            body.complete(flow, Instant::now());
        } else {
            body.stage = Stage::Flowing { flow, decoder };
        }
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        if gated {
            response.extensions_mut().insert(Gated);
        }
        response
    }

    /// The exchange broke, and its last event, if there is one, is out of here: nothing comes any more but the error. A
    /// server that knows when it has written that event need not poll on.
    #[must_use]
    pub const fn is_broken(&self) -> bool {
        matches!(self.stage, Stage::Farewell(..) | Stage::Broken(_))
    }

    /// When its last frame passed; a server need not ask the clock again for each.
    #[must_use]
    pub const fn passed(&self) -> Option<Instant> {
        self.passed
    }

    fn complete(&mut self, mut flow: Pin<Box<Flow>>, now: Instant) {
        flow.as_mut().finish(now);
        drop(flow);
        self.record.complete(now);
    }

    /// Takes note of a frame that is about to pass at `now`.
    fn passes(&mut self, frame: &[u8], now: Instant) {
        match &mut self.follow {
            Some(Follow::Events(scanner)) => scanner.feed(frame),
            Some(Follow::Tail(tail)) => tail.feed(frame),
            None => {}
        }
        let Some(open) = self.record.open() else { return };
        open.lease.progress(now);
        if self.passed.is_none() {
            open.observer.first_byte();
        }
        let facts = match &self.follow {
            Some(Follow::Events(scanner)) => Some(scanner.facts()),
            _ => None,
        };
        open.observer.frame(frame.len(), facts);
        self.passed = Some(now);
        if let (Some(idle), Stage::Flowing { flow, .. }) = (self.idle, &mut self.stage) {
            let deadline = Deadline::after(Timer::Idle, idle, now);
            flow.as_mut().watch().set(deadline);
        }
    }

    /// The next of the answer, as a body gives it, and for those who pass it on at once without a copy: it is read into
    /// `memory`, which is lent for this call, and left there.
    pub fn poll_piece(
        &mut self,
        memory: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Piece, Broken>>> {
        loop {
            match &mut self.stage {
                Stage::Ended => return Poll::Ready(None),
                Stage::Farewell(pause, fault) => {
                    ready!(pause.as_mut().poll(cx));
                    self.stage = Stage::Broken(fault.clone());
                }
                Stage::Broken(fault) => {
                    let broken = Broken((**fault).clone());
                    self.stage = Stage::Ended;
                    return Poll::Ready(Some(Err(broken)));
                }
                Stage::Sought(flow, patience) => {
                    let known = self.record.open().and_then(|open| {
                        flow.as_mut().watch().register(&open.lease, cx);
                        open.lease.revoked().cloned()
                    });
                    if known.is_none() {
                        ready!(patience.as_mut().poll(cx));
                    }
                    let fault = known.unwrap_or_else(|| broke_off(&self.model));
                    if let Some(event) = self.fail(fault) {
                        return Poll::Ready(Some(Ok(Piece::Own(event))));
                    }
                }
                Stage::Flowing { flow, decoder } => {
                    let Some(open) = self.record.open() else {
                        self.stage = Stage::Broken(Box::new(Fault::Internal));
                        continue;
                    };
                    if self.passed.is_none() {
                        // An engine that floods never makes this wait, and yet a revocation must find its task.
                        flow.as_mut().watch().register(&open.lease, cx);
                    }
                    let next = flow.as_mut().poll_next(decoder, &open.lease, &self.model, memory, cx);
                    let next = match ready!(next) {
                        // An end by closing looks the same when the engine died: only the stream can tell.
                        Ok(None)
                            if !decoder.is_done()
                                && self
                                    .events
                                    .and(self.follow.as_ref())
                                    .is_some_and(|follow| !follow.is_over()) =>
                        {
                            Err(broke_off(&self.model))
                        }
                        next => next,
                    };
                    let piece = match next {
                        Ok(piece) => piece,
                        Err(fault) => {
                            if self.death > Millis::ZERO && fault == broke_off(&self.model) && self.tells() {
                                self.seek();
                                continue;
                            }
                            match self.fail(fault) {
                                Some(event) => return Poll::Ready(Some(Ok(Piece::Own(event)))),
                                None => continue,
                            }
                        }
                    };
                    let last = piece.is_none() || decoder.is_done();
                    let now = Instant::now();
                    if let Some(piece) = &piece {
                        self.passes(piece.bytes(memory), now);
                    }
                    if last
                        && let Stage::Flowing { flow, .. } = std::mem::replace(&mut self.stage, Stage::Ended)
                    {
                        self.complete(flow, now);
                    }
                    return Poll::Ready(piece.map(Ok));
                }
            }
        }
    }

    /// The stream has room for an event of ours.
    fn tells(&self) -> bool {
        self.events.is_some() && self.follow.as_ref().is_some_and(|follow| !follow.is_over())
    }

    /// Waits for the word that the engine died. An engine that lives hears at once that nobody reads on.
    fn seek(&mut self) {
        if let Stage::Flowing { mut flow, .. } = std::mem::replace(&mut self.stage, Stage::Ended) {
            flow.as_mut().hang_up();
            self.stage = Stage::Sought(flow, Box::pin(sleep(self.death.duration())));
        }
    }

    /// Ends the exchange with a fault. Gives the last event, where the stream has room for one.
    fn fail(&mut self, fault: Fault) -> Option<Bytes> {
        let told = self.events.zip(self.follow.as_ref()).filter(|_| self.tells());
        let farewell = told.map(|(form, follow)| last_event(&fault, form, follow));
        let told = Box::new(fault.clone());
        self.stage = if farewell.is_some() {
            Stage::Farewell(Box::pin(sleep(FAREWELL.duration())), told)
        } else {
            Stage::Broken(told)
        };
        self.record.end(Outcome::Failed(fault));
        farewell
    }
}

impl<O: Observer + Unpin> Body for RelayBody<O> {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let this = &mut *self;
        let Stage::Flowing { flow, .. } = &this.stage else {
            return this.poll_piece(&mut [], cx).map_ok(|piece| Frame::data(piece.into_bytes(&[])));
        };
        flow.pool.clone().with_scratch(|memory| {
            this.poll_piece(memory, cx).map_ok(|piece| Frame::data(piece.into_bytes(memory)))
        })
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.stage, Stage::Ended)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.stage {
            Stage::Ended => SizeHint::with_exact(0),
            Stage::Flowing { decoder, .. } => {
                decoder.left().map_or_else(SizeHint::default, SizeHint::with_exact)
            }
            Stage::Sought(..) | Stage::Farewell(..) | Stage::Broken(_) => SizeHint::default(),
        }
    }
}

impl Flow {
    pub(super) fn new(watch: Watch, pool: Pool) -> Pin<Box<Self>> {
        Box::pin(Self { watch, pool, connection: None, unsent: Unsent::nothing(), home: None })
    }

    pub(super) fn watch(self: Pin<&mut Self>) -> Pin<&mut Watch> {
        self.project().watch
    }

    /// The answer's head came over this connection.
    pub(super) fn carry(self: Pin<&mut Self>, connection: Connection, unsent: Unsent, home: Option<Key>) {
        let this = self.project();
        *this.connection = Some(connection);
        *this.unsent = unsent;
        *this.home = home;
    }

    fn hang_up(self: Pin<&mut Self>) {
        *self.project().connection = None;
    }

    /// The next piece of payload, as much as is there; `None` at the end.
    fn poll_next(
        self: Pin<&mut Self>,
        decoder: &mut Decoder,
        lease: &Lease,
        model: &ModelName,
        memory: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Piece>, Fault>> {
        if let Some(fault) = lease.revoked() {
            return Poll::Ready(Err(fault.clone()));
        }
        let this = self.project();
        let Some(connection) = this.connection else {
            return Poll::Ready(Err(Fault::Internal));
        };
        let held = &mut connection.held;
        if !held.is_empty() {
            let payload = decoder.decode_held(held).map_err(|_| broke_off(model))?;
            if !payload.is_empty() {
                return Poll::Ready(Ok(Some(Piece::Own(payload))));
            }
        }
        while !decoder.is_done() {
            if let Poll::Ready(Err(_)) = connection.poll_send(this.unsent, cx) {
                connection.spent = true;
                this.unsent.abandon();
                if let Some(fault) = this.unsent.take_fault() {
                    return Poll::Ready(Err(fault));
                }
            }
            let read = match connection.poll_read(memory, cx) {
                Poll::Ready(Ok(0)) if matches!(decoder, Decoder::UntilClose) => break,
                Poll::Ready(Ok(read @ 1..)) => read,
                Poll::Ready(_) => return Poll::Ready(Err(broke_off(model))),
                Poll::Pending => return this.watch.poll(lease, model, cx).map(Err),
            };
            let Some(Ok(found)) = memory.get_mut(..read).map(|read| decoder.decode(read)) else {
                return Poll::Ready(Err(broke_off(model)));
            };
            // It says more than it was asked.
            connection.spent |= found.used < read;
            if !found.payload.is_empty() {
                return Poll::Ready(Ok(Some(Piece::Here(found.payload))));
            }
        }
        Poll::Ready(Ok(None))
    }

    /// The answer is complete: the connection waits for its next use, if there can be one.
    fn finish(self: Pin<&mut Self>, now: Instant) {
        let this = self.project();
        let Some(connection) = this.connection.take() else { return };
        let clean = this.unsent.is_empty() && connection.held.is_empty() && !connection.spent;
        if let (Some(key), true) = (*this.home, clean) {
            this.pool.put(key, connection, now);
        }
    }
}

impl Follow {
    /// It came to its own end, or to an error of its own.
    fn is_over(&self) -> bool {
        match self {
            Self::Events(scanner) => scanner.facts().done || scanner.facts().error,
            Self::Tail(tail) => tail.is_over(),
        }
    }
}

impl Piece {
    /// In bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Here(range) => range.len(),
            Self::Own(bytes) => bytes.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `memory`: what was lent when it was asked for.
    #[must_use]
    pub fn bytes<'a>(&'a self, memory: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Here(range) => memory.get(range.clone()).unwrap_or_default(),
            Self::Own(bytes) => bytes,
        }
    }

    /// The same, to be kept.
    #[must_use]
    pub fn into_bytes(self, memory: &[u8]) -> Bytes {
        match self {
            Self::Here(range) => Bytes::copy_from_slice(memory.get(range).unwrap_or_default()),
            Self::Own(bytes) => bytes,
        }
    }
}

impl std::fmt::Debug for Flow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flow").field("connection", &self.connection).finish_non_exhaustive()
    }
}

/// The engine died, or what it sends is no longer HTTP. Why it died, others will find out.
fn broke_off(model: &ModelName) -> Fault {
    Fault::EngineFailed { model: model.clone(), cause: Cause::BrokeOff, wait: None }
}

/// The error event; what the engine left unfinished is closed first, lest ours become a part of it.
fn last_event(fault: &Fault, form: Form, stream: &Follow) -> Bytes {
    let (events, at_border) = match stream {
        Follow::Events(scanner) => (scanner.facts().events, scanner.at_border()),
        // Only the events of the responses API are numbered, and those are followed.
        Follow::Tail(tail) => (0, tail.at_border()),
    };
    let event = error::event_after(fault, form, events);
    if at_border {
        return event;
    }
    let mut out = BytesMut::with_capacity(event.len() + 2);
    out.put_slice(b"\n\n");
    out.put(event);
    out.freeze()
}
