//! Forwards the engine's response body to the client, and ends the exchange.
//!
//! `upstream` reads the body from the engine's connection, `stream_tracker` follows its events, and `scratch_frame` is
//! a piece of it.

mod scratch_frame;
mod stream_tracker;
mod upstream;

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};

pub use self::scratch_frame::ScratchFrame;
pub(super) use self::upstream::UpstreamStream;
use self::{
    stream_tracker::{StreamTracker, error_event},
    upstream::broken_off_fault,
};
use super::{
    ExchangeOutcome, GatedByStub, RelayObserver, RelayTimeouts, ResponseInspection,
    abort_watch::ExchangeDeadline, decode::BodyDecoder, guard::RelayGuard, head::UpstreamResponseHead,
    headers, stream_tail::StreamTail,
};
use crate::openai::{ApiSchema, sse::ResponseScanner};
use rouse::{
    fault::{ExchangeTimeout, Fault},
    model::ModelName,
    units::Millis,
};

/// How long a server may take to write a broken stream's error event. The connection is torn down after that. A server
/// drops unwritten data when a body fails. A server that knows when it has written the event checks
/// [`RelayBody::is_broken`] instead of waiting for this.
const DELAYED_CLOSE_TIMEOUT: Millis = Millis(50);

/// The body of a response. Holds the engine's connection and the lease, and releases both when it ends or is dropped.
#[derive(Debug)]
pub struct RelayBody<O: RelayObserver> {
    // Dropped in this order: the connection is closed before the lease is released.
    state: RelayBodyState,
    guard: RelayGuard<O>,
    model: ModelName,
    /// Follows the body, where it is readable.
    tracker: Option<StreamTracker>,
    /// The schema of an error event; `None` when the body is not an event stream that an event can be appended to.
    event_schema: Option<ApiSchema>,
    /// The deadline between two frames; `None` where one deadline covers the whole response.
    idle: Option<Millis>,
    /// [`RelayTimeouts::exit_wait`].
    exit_wait: Millis,
    /// When its last frame passed.
    last_frame_at: Option<Instant>,
}

/// The exchange broke: the client must not take the received bytes for the whole response. The stream ends with an
/// error event where that was possible.
#[derive(Debug, thiserror::Error)]
#[error("the engine's response ended early: {0}")]
pub struct RelayBodyError(pub Fault);

/// The properties of the request that affect its response.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResponseOptions {
    pub(super) stream: bool,
    pub(super) inspection: ResponseInspection,
    pub(super) schema: ApiSchema,
}

#[derive(Debug)]
enum RelayBodyState {
    Streaming {
        upstream: Pin<Box<UpstreamStream>>,
        decoder: BodyDecoder,
    },
    /// The stream broke, and its client gets an error event: with the lease's fault once it is revoked, or with a
    /// generic one after a while.
    AwaitingCause(Pin<Box<UpstreamStream>>, Pin<Box<Sleep>>),
    /// The error event was handed out, and has some time to be written.
    DelayedClose(Pin<Box<Sleep>>, Box<Fault>),
    Broken(Box<Fault>),
    Ended,
}

impl<O: RelayObserver + Unpin> RelayBody<O> {
    pub(super) fn respond(
        head: UpstreamResponseHead,
        flow: Pin<Box<UpstreamStream>>,
        record: RelayGuard<O>,
        model: ModelName,
        timeouts: &RelayTimeouts,
        options: ResponseOptions,
    ) -> Response<Self> {
        let UpstreamResponseHead { status, mut headers, decoder, gated, .. } = head;
        let readable = headers::is_readable_stream(&headers);
        let document =
            options.inspection == ResponseInspection::EventsAndJson && headers::is_readable_json(&headers);
        // A body with a given length has no room for an error event, and an encoded one can be neither read nor
        // appended to.
        let events = readable && decoder.remaining().is_none();
        let follow = match (options.inspection, options.schema) {
            (ResponseInspection::StreamEnd, ApiSchema::OpenAi | ApiSchema::Anthropic) => {
                events.then(|| StreamTracker::Tail(StreamTail::default()))
            }
            _ if readable => Some(StreamTracker::Events(ResponseScanner::new())),
            _ => document.then(|| StreamTracker::Events(ResponseScanner::for_json())),
        };
        headers::to_client(&mut headers, events, decoder.remaining().is_none());
        let mut body = Self {
            state: RelayBodyState::Ended,
            guard: record,
            model,
            tracker: follow,
            event_schema: events.then_some(options.schema),
            idle: options.stream.then_some(timeouts.idle),
            exit_wait: timeouts.exit_wait,
            last_frame_at: None,
        };
        if decoder.is_done() {
            body.complete(flow, Instant::now());
        } else {
            body.state = RelayBodyState::Streaming { upstream: flow, decoder };
        }
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        if gated {
            response.extensions_mut().insert(GatedByStub);
        }
        response
    }

    /// Reports whether the exchange broke and its error event, if any, was handed out: only the error follows. A server
    /// that knows when it has written that event need not poll further.
    #[must_use]
    pub const fn is_broken(&self) -> bool {
        matches!(self.state, RelayBodyState::DelayedClose(..) | RelayBodyState::Broken(_))
    }

    /// When the last frame passed. Spares a server from reading the clock for each frame.
    #[must_use]
    pub const fn last_frame_at(&self) -> Option<Instant> {
        self.last_frame_at
    }

    fn complete(&mut self, mut flow: Pin<Box<UpstreamStream>>, now: Instant) {
        flow.as_mut().finish(now);
        drop(flow);
        self.guard.complete(now);
    }

    /// Records a frame that passes at `now`.
    fn note_frame(&mut self, frame: &[u8], now: Instant) {
        match &mut self.tracker {
            Some(StreamTracker::Events(scanner)) => scanner.feed(frame),
            Some(StreamTracker::Tail(tail)) => tail.feed(frame),
            None => {}
        }
        let Some(open) = self.guard.live() else { return };
        open.lease.progress(now);
        if self.last_frame_at.is_none() {
            open.observer.first_byte();
        }
        let facts = match &self.tracker {
            Some(StreamTracker::Events(scanner)) => Some(scanner.facts()),
            _ => None,
        };
        open.observer.frame(frame.len(), facts);
        self.last_frame_at = Some(now);
        if let (Some(idle), RelayBodyState::Streaming { upstream: flow, .. }) = (self.idle, &mut self.state) {
            let deadline = ExchangeDeadline::after(ExchangeTimeout::Idle, idle, now);
            flow.as_mut().abort_watch().set(deadline);
        }
    }

    /// Polls the next piece for a caller that forwards it without a copy: the piece is read into the borrowed `memory`
    /// and left there.
    pub fn poll_frame_into(
        &mut self,
        memory: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<ScratchFrame, RelayBodyError>>> {
        loop {
            match &mut self.state {
                RelayBodyState::Ended => return Poll::Ready(None),
                RelayBodyState::DelayedClose(pause, fault) => {
                    ready!(pause.as_mut().poll(cx));
                    self.state = RelayBodyState::Broken(fault.clone());
                }
                RelayBodyState::Broken(fault) => {
                    let broken = RelayBodyError((**fault).clone());
                    self.state = RelayBodyState::Ended;
                    return Poll::Ready(Some(Err(broken)));
                }
                RelayBodyState::AwaitingCause(flow, patience) => {
                    let revocation = self.guard.live().and_then(|open| {
                        flow.as_mut().abort_watch().register(&open.lease, cx);
                        open.lease.revoked().cloned()
                    });
                    if revocation.is_none() {
                        ready!(patience.as_mut().poll(cx));
                    }
                    let fault = revocation.unwrap_or_else(|| broken_off_fault(&self.model));
                    if let Some(event) = self.fail(fault) {
                        return Poll::Ready(Some(Ok(ScratchFrame::Owned(event))));
                    }
                }
                RelayBodyState::Streaming { upstream: flow, decoder } => {
                    let Some(open) = self.guard.live() else {
                        self.state = RelayBodyState::Broken(Box::new(Fault::Internal));
                        continue;
                    };
                    if self.last_frame_at.is_none() {
                        // An engine that floods never makes this wait, and yet a revocation must wake its task.
                        flow.as_mut().abort_watch().register(&open.lease, cx);
                    }
                    let next = flow.as_mut().poll_next(decoder, &open.lease, &self.model, memory, cx);
                    let next = match ready!(next) {
                        // An end by closing looks the same when the engine died: only the stream's content shows the
                        // difference.
                        Ok(None)
                            if !decoder.is_done()
                                && self
                                    .event_schema
                                    .and(self.tracker.as_ref())
                                    .is_some_and(|follow| !follow.is_over()) =>
                        {
                            Err(broken_off_fault(&self.model))
                        }
                        next => next,
                    };
                    let piece = match next {
                        Ok(piece) => piece,
                        Err(fault) => {
                            if self.exit_wait > Millis::ZERO
                                && fault == broken_off_fault(&self.model)
                                && self.can_append_event()
                            {
                                self.await_cause();
                                continue;
                            }
                            match self.fail(fault) {
                                Some(event) => return Poll::Ready(Some(Ok(ScratchFrame::Owned(event)))),
                                None => continue,
                            }
                        }
                    };
                    let last = piece.is_none() || decoder.is_done();
                    let now = Instant::now();
                    if let Some(piece) = &piece {
                        self.note_frame(piece.bytes(memory), now);
                    }
                    if last
                        && let RelayBodyState::Streaming { upstream: flow, .. } =
                            std::mem::replace(&mut self.state, RelayBodyState::Ended)
                    {
                        self.complete(flow, now);
                    }
                    return Poll::Ready(piece.map(Ok));
                }
            }
        }
    }

    /// Reports whether an error event can be appended to the stream.
    fn can_append_event(&self) -> bool {
        self.event_schema.is_some() && self.tracker.as_ref().is_some_and(|follow| !follow.is_over())
    }

    /// Waits for the report that the engine died. Closes the connection, so that a live engine notices the disconnect
    /// at once.
    fn await_cause(&mut self) {
        if let RelayBodyState::Streaming { upstream: mut flow, .. } =
            std::mem::replace(&mut self.state, RelayBodyState::Ended)
        {
            flow.as_mut().close_connection();
            self.state = RelayBodyState::AwaitingCause(flow, Box::pin(sleep(self.exit_wait.duration())));
        }
    }

    /// Ends the exchange with a fault. Returns the error event, if one can be appended to the stream.
    fn fail(&mut self, fault: Fault) -> Option<Bytes> {
        let event_inputs = self.event_schema.zip(self.tracker.as_ref()).filter(|_| self.can_append_event());
        let error_event_bytes = event_inputs.map(|(schema, follow)| error_event(&fault, schema, follow));
        let boxed_fault = Box::new(fault.clone());
        self.state = if error_event_bytes.is_some() {
            RelayBodyState::DelayedClose(Box::pin(sleep(DELAYED_CLOSE_TIMEOUT.duration())), boxed_fault)
        } else {
            RelayBodyState::Broken(boxed_fault)
        };
        self.guard.end(ExchangeOutcome::Failed(fault));
        error_event_bytes
    }
}

impl<O: RelayObserver + Unpin> Body for RelayBody<O> {
    type Data = Bytes;
    type Error = RelayBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RelayBodyError>>> {
        let this = &mut *self;
        let RelayBodyState::Streaming { upstream: flow, .. } = &this.state else {
            return this.poll_frame_into(&mut [], cx).map_ok(|piece| Frame::data(piece.into_bytes(&[])));
        };
        flow.pool.clone().with_scratch(|memory| {
            this.poll_frame_into(memory, cx).map_ok(|piece| Frame::data(piece.into_bytes(memory)))
        })
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, RelayBodyState::Ended)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            RelayBodyState::Ended => SizeHint::with_exact(0),
            RelayBodyState::Streaming { decoder, .. } => {
                decoder.remaining().map_or_else(SizeHint::default, SizeHint::with_exact)
            }
            RelayBodyState::AwaitingCause(..)
            | RelayBodyState::DelayedClose(..)
            | RelayBodyState::Broken(_) => SizeHint::default(),
        }
    }
}
