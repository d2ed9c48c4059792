//! The engine's answer on its way to the client, and everything that ends with it.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{BufMut, Bytes, BytesMut};
use http::Response;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};

use super::{
    Observer, Outcome, Pool, Target, Timeouts,
    connection::Connection,
    decode::Decoder,
    head::{Head, Malformed},
    headers,
    payload::Unsent,
    pool::Key,
    record::Record,
    watch::{Deadline, Watch},
};
use crate::{
    fault::{Cause, Fault, Timer},
    lease::Lease,
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
    target: Target,
    /// Follows what can be read of it: the events of a stream, or one document.
    scanner: Option<Scanner>,
    /// It is a stream of events with room for one of ours, and in whose words that is written.
    events: Option<Form>,
    /// Between two frames; `None` where one deadline covers the whole answer.
    idle: Option<Millis>,
    begun: bool,
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
    pub(super) watch_json: bool,
    pub(super) form: Form,
}

#[derive(Debug)]
enum Stage {
    Flowing {
        flow: Box<Flow>,
        decoder: Decoder,
    },
    /// The error event is out, and is given time to leave.
    Farewell(Pin<Box<Sleep>>, Fault),
    Broken(Fault),
    Ended,
}

/// The connection while it carries an answer.
pub(super) struct Flow {
    connection: Connection,
    /// What the engine had not read of the request when it began to answer.
    unsent: Unsent,
    watch: Pin<Box<Watch>>,
    pool: Pool,
    /// Where in the pool the connection goes afterwards, when it can be used again.
    home: Option<Key>,
}

impl<O: Observer + Unpin> RelayBody<O> {
    pub(super) fn respond(
        head: Head,
        flow: Flow,
        record: Record<O>,
        target: Target,
        timeouts: &Timeouts,
        wanted: Wanted,
    ) -> Response<Self> {
        let Head { status, mut headers, decoder, .. } = head;
        let readable = headers::is_readable_stream(&headers);
        let document = wanted.watch_json && headers::is_readable_json(&headers);
        let scanner = readable.then(Scanner::new).or_else(|| document.then(Scanner::of_json));
        // With a length given there is no room for an event of ours; encoded, nothing can be read or written.
        let events = readable && decoder.left().is_none();
        headers::to_client(&mut headers, events, decoder.left().is_none());
        let mut body = Self {
            stage: Stage::Ended,
            record,
            target,
            scanner,
            events: events.then_some(wanted.form),
            idle: wanted.stream.then_some(timeouts.idle),
            begun: false,
        };
        if decoder.is_done() {
            body.complete(flow);
        } else {
            let flow = Box::new(flow);
            body.stage = Stage::Flowing { flow, decoder };
        }
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response
    }

    /// The exchange broke, and its last event, if there is one, is out of here: nothing comes any more but the error. A
    /// server that knows when it has written that event need not poll on.
    #[must_use]
    pub const fn is_broken(&self) -> bool {
        matches!(self.stage, Stage::Farewell(..) | Stage::Broken(_))
    }

    fn complete(&mut self, flow: Flow) {
        flow.finish();
        self.record.end(Outcome::Complete);
    }

    /// Takes note of a frame that is about to pass.
    fn passes(&mut self, frame: &Bytes) {
        if let Some(scanner) = &mut self.scanner {
            scanner.feed(frame);
        }
        let Some(open) = self.record.open() else { return };
        let now = Instant::now();
        open.lease.progress(now);
        if !self.begun {
            open.observer.first_byte();
        }
        let facts = self.scanner.as_ref().map(Scanner::facts);
        open.observer.frame(frame.len(), facts);
        self.begun = true;
        if let (Some(idle), Stage::Flowing { flow, .. }) = (self.idle, &mut self.stage) {
            let deadline = Deadline::after(Timer::Idle, idle, now);
            flow.watch.as_mut().set(deadline);
        }
    }

    /// Ends the exchange with a fault. Gives the last event, where the stream has room for one.
    fn fail(&mut self, fault: Fault) -> Option<Bytes> {
        let farewell = self.events.zip(self.scanner.as_ref()).and_then(|(form, scanner)| {
            let open = !scanner.facts().done && !scanner.facts().error;
            open.then(|| last_event(&fault, form, scanner))
        });
        self.stage = if farewell.is_some() {
            Stage::Farewell(Box::pin(sleep(FAREWELL.duration())), fault.clone())
        } else {
            Stage::Broken(fault.clone())
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
        loop {
            match &mut this.stage {
                Stage::Ended => return Poll::Ready(None),
                Stage::Farewell(pause, fault) => {
                    ready!(pause.as_mut().poll(cx));
                    this.stage = Stage::Broken(fault.clone());
                }
                Stage::Broken(fault) => {
                    let broken = Broken(fault.clone());
                    this.stage = Stage::Ended;
                    return Poll::Ready(Some(Err(broken)));
                }
                Stage::Flowing { flow, decoder } => {
                    let Some(open) = this.record.open() else {
                        this.stage = Stage::Broken(Fault::Internal);
                        continue;
                    };
                    if !this.begun {
                        // An engine that floods never makes this wait, and yet a revocation must find its task.
                        flow.watch.as_mut().register(&open.lease, cx);
                    }
                    let next = match ready!(flow.poll_next(decoder, &open.lease, &this.target, cx)) {
                        // An end by closing looks the same when the engine died: only the stream can tell.
                        Ok(None)
                            if !decoder.is_done()
                                && this.events.and(this.scanner.as_ref()).is_some_and(is_cut_short) =>
                        {
                            Err(broke_off(&this.target))
                        }
                        next => next,
                    };
                    let frame = match next {
                        Ok(frame) => frame,
                        Err(fault) => match this.fail(fault) {
                            Some(event) => return Poll::Ready(Some(Ok(Frame::data(event)))),
                            None => continue,
                        },
                    };
                    let last = frame.is_none() || decoder.is_done();
                    if let Some(frame) = &frame {
                        this.passes(frame);
                    }
                    if last
                        && let Stage::Flowing { flow, .. } = std::mem::replace(&mut this.stage, Stage::Ended)
                    {
                        this.complete(*flow);
                    }
                    return Poll::Ready(frame.map(|frame| Ok(Frame::data(frame))));
                }
            }
        }
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
            Stage::Farewell(..) | Stage::Broken(_) => SizeHint::default(),
        }
    }
}

impl Flow {
    pub(super) const fn new(
        connection: Connection,
        unsent: Unsent,
        watch: Pin<Box<Watch>>,
        pool: Pool,
        home: Option<Key>,
    ) -> Self {
        Self { connection, unsent, watch, pool, home }
    }

    /// The next piece of payload, as much as is there; `None` at the end.
    fn poll_next(
        &mut self,
        decoder: &mut Decoder,
        lease: &Lease,
        target: &Target,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Bytes>, Fault>> {
        if let Some(fault) = lease.revoked() {
            return Poll::Ready(Err(fault.clone()));
        }
        let held = &mut self.connection.held;
        if !held.is_empty() {
            let payload = decoder.decode_held(held).map_err(|_| broke_off(target))?;
            if !payload.is_empty() {
                return Poll::Ready(Ok(Some(payload)));
            }
        }
        while !decoder.is_done() {
            if let Poll::Ready(Err(_)) = self.connection.poll_send(&mut self.unsent, cx) {
                self.connection.spent = true;
                self.unsent.abandon();
            }
            let read = self.connection.poll_read(&self.pool, cx, |connection, read| {
                if read.is_empty() {
                    return Ok(None);
                }
                let (payload, used) = decoder.decode(read)?;
                connection.spent |= used < read.len();
                Ok::<_, Malformed>(Some(Bytes::copy_from_slice(&read[payload])))
            });
            match read {
                Poll::Ready(Ok(Ok(Some(payload)))) if payload.is_empty() => {}
                Poll::Ready(Ok(Ok(Some(payload)))) => return Poll::Ready(Ok(Some(payload))),
                Poll::Ready(Ok(Ok(None))) if matches!(decoder, Decoder::UntilClose) => break,
                Poll::Ready(_) => return Poll::Ready(Err(broke_off(target))),
                Poll::Pending => return self.watch.as_mut().poll(lease, target, cx).map(Err),
            }
        }
        Poll::Ready(Ok(None))
    }

    /// The answer is complete: the connection waits for its next use, if there can be one.
    fn finish(self) {
        let clean = self.unsent.is_empty() && self.connection.held.is_empty() && !self.connection.spent;
        if let (Some(key), true) = (self.home, clean) {
            self.pool.put(key, self.connection);
        }
    }
}

impl std::fmt::Debug for Flow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flow").field("connection", &self.connection).finish_non_exhaustive()
    }
}

/// Events came, and not the last one.
const fn is_cut_short(events: &Scanner) -> bool {
    let facts = events.facts();
    !facts.done && !facts.error && (facts.events > 0 || !events.at_border())
}

/// The engine died, or what it sends is no longer HTTP. Why it died, others will find out.
fn broke_off(target: &Target) -> Fault {
    Fault::EngineFailed { model: target.engine.model.clone(), cause: Cause::Unreachable, wait: None }
}

/// The error event; what the engine left unfinished is closed first, lest ours become a part of it.
fn last_event(fault: &Fault, form: Form, events: &Scanner) -> Bytes {
    let event = error::event_after(fault, form, events.facts().events);
    if events.at_border() {
        return event;
    }
    let mut out = BytesMut::with_capacity(event.len() + 2);
    out.put_slice(b"\n\n");
    out.put(event);
    out.freeze()
}
