//! The body of a request, read from the connection as the service polls it.

use std::{
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker},
};

use bytes::{Buf as _, Bytes};
use http_body::{Body, Frame, SizeHint};

use super::{Http1Limits, ServerIo, chunked::RequestChunkDecoder, head::RequestFraming, wire::Wire};
use crate::relay::DecodedBytes;

/// Most bytes of an unread body that are discarded so that the connection can go on.
const MAX_DISCARDED_BYTES: usize = 64 << 10;

/// The body of a request. Trailers are checked and dropped.
///
/// A body that outlives its exchange yields no more bytes. If it was not read to its end, it then yields
/// an error, so that its reader does not take it for whole.
#[derive(Debug)]
pub struct Http1RequestBody<P> {
    source: BodySource<P>,
    request: u64,
}

/// Where the rest of a body comes from.
#[derive(Debug)]
enum BodySource<P> {
    Connection(Rc<Wire<P>>),
    /// The request has no body, or all of it was read.
    Complete,
    /// An error was read, and nothing follows it.
    Failed,
}

/// Why a request's body ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestBodyError {
    /// The client closed or reset its side in the middle of the body.
    #[error("the client disconnected before the end of the request's body")]
    Disconnected,
    /// The framing is broken, or exceeds a limit; with the reason. The connection closes after the response.
    #[error("the framing of the request's body is broken: {0}")]
    Malformed(&'static str),
    /// The response ended before the body was read to its end. The rest is discarded.
    #[error("the exchange ended before the request's body was read to its end")]
    ExchangeEnded,
}

/// The progress of the current request's body.
#[derive(Debug, Default)]
pub(super) struct RequestBodyState {
    phase: RequestBodyPhase,
    /// The client waits for `100 Continue`.
    expects_continue: bool,
    /// The task that polls the loop.
    loop_waker: Option<Waker>,
    /// What polled the body last, where that is not the loop's task.
    body_waker: Option<Waker>,
}

#[derive(Debug, Default)]
enum RequestBodyPhase {
    #[default]
    Complete,
    Length(u64),
    /// Boxed, because most bodies have a length, and a connection keeps this room between its requests.
    Chunked(Box<RequestChunkDecoder>),
    Failed,
}

impl RequestBodyPhase {
    /// Decodes the next bytes. Ends the phase with the body, or with an error.
    fn decode(&mut self, bytes: &mut [u8]) -> Result<DecodedBytes, RequestBodyError> {
        let (decoded, complete) = match self {
            Self::Length(left) => {
                let length = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= length as u64;
                (Ok(DecodedBytes { payload: 0..length, used: length }), *left == 0)
            }
            Self::Chunked(chunks) => (chunks.decode(bytes), chunks.is_done()),
            Self::Complete | Self::Failed => (Ok(DecodedBytes { payload: 0..0, used: 0 }), false),
        };
        if complete {
            *self = Self::Complete;
        }
        decoded.map_err(|why| self.fail(RequestBodyError::Malformed(why)))
    }

    fn fail(&mut self, error: RequestBodyError) -> RequestBodyError {
        *self = Self::Failed;
        error
    }

    const fn is_open(&self) -> bool {
        matches!(self, Self::Length(_) | Self::Chunked(_))
    }
}

impl<P: ServerIo> Wire<P> {
    /// Starts the body of the next request.
    pub(super) fn begin_request(
        self: &Rc<Self>,
        framing: RequestFraming,
        expects_continue: bool,
        limits: &Http1Limits,
        cx: &Context<'_>,
    ) -> Http1RequestBody<P> {
        let request = self.request.get() + 1;
        self.request.set(request);
        let phase = match framing {
            RequestFraming::Empty => return Http1RequestBody { source: BodySource::Complete, request },
            RequestFraming::Length(length) => RequestBodyPhase::Length(length),
            RequestFraming::Chunked => RequestBodyPhase::Chunked(Box::new(RequestChunkDecoder::new(limits))),
        };
        self.body_held.set(true);
        let loop_waker = Some(cx.waker().clone());
        *self.body.borrow_mut() = RequestBodyState { phase, expects_continue, loop_waker, body_waker: None };
        Http1RequestBody { source: BodySource::Connection(Rc::clone(self)), request }
    }

    /// Ends the current request: its body yields nothing more, but an error if it was not read to its end.
    pub(super) fn end_request(&self) {
        self.body_held.set(false);
        self.request.set(self.request.get() + 1);
        drop(self.body.take());
    }

    /// Call this at the beginning of each poll of the loop.
    pub(super) fn begin_poll(&self, cx: &Context<'_>) {
        self.read_registered.set(false);
        let mut body = self.body.borrow_mut();
        if body.phase.is_open() && !body.loop_waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()))
        {
            body.loop_waker = Some(cx.waker().clone());
        }
    }

    /// From now on the client gets no `100 Continue`.
    pub(super) fn stop_continue(&self) {
        self.body.borrow_mut().expects_continue = false;
    }

    /// Reports whether the current request's body was read to its end.
    pub(super) fn is_body_complete(&self) -> bool {
        matches!(self.body.borrow().phase, RequestBodyPhase::Complete)
    }

    /// Discards the rest of the body if it has arrived already. Reports whether the body is complete now.
    pub(super) fn discard_body(&self, cx: &mut Context<'_>) -> bool {
        // A task that still waits for the body gets no more of it, and must learn that.
        self.wake_body();
        let mut discarded = 0;
        while discarded <= MAX_DISCARDED_BYTES && self.body.borrow().phase.is_open() {
            match self.poll_body(cx) {
                Poll::Ready(Some(Ok(bytes))) => discarded += bytes.len(),
                Poll::Ready(None | Some(Err(_))) | Poll::Pending => break,
            }
        }
        self.is_body_complete()
    }

    /// Returns the next piece of the current request's body.
    fn poll_body(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, RequestBodyError>>> {
        loop {
            if !self.body.borrow().phase.is_open() {
                return Poll::Ready(None);
            }
            let piece = if self.buffered_bytes() > 0 {
                self.decode_buffered()
            } else if self.client_left.get() {
                Err(self.body.borrow_mut().phase.fail(RequestBodyError::Disconnected))
            } else {
                match self.poll_read_body(cx) {
                    Poll::Ready(piece) => piece,
                    Poll::Pending => return Poll::Pending,
                }
            };
            match piece {
                // Only framing, or the end of the client's side.
                Ok(bytes) if bytes.is_empty() => {}
                piece => return Poll::Ready(Some(piece)),
            }
        }
    }

    /// Decodes bytes that were read ahead, without a copy.
    fn decode_buffered(&self) -> Result<Bytes, RequestBodyError> {
        let decoded = self.scan_buffered(|bytes| (0, self.body.borrow_mut().phase.decode(bytes)))?;
        let mut bytes = self.take_buffered(decoded.used);
        bytes.truncate(decoded.payload.end);
        bytes.advance(decoded.payload.start);
        Ok(bytes.freeze())
    }

    fn poll_read_body(&self, cx: &mut Context<'_>) -> Poll<Result<Bytes, RequestBodyError>> {
        let max_bytes = match self.body.borrow().phase {
            RequestBodyPhase::Length(left) => usize::try_from(left).unwrap_or(usize::MAX),
            _ => usize::MAX,
        };
        let read = self.poll_read(cx, max_bytes, |bytes| {
            if bytes.is_empty() {
                self.client_left.set(true);
                return Ok(Bytes::new());
            }
            let decoded = self.body.borrow_mut().phase.decode(bytes)?;
            self.push(bytes.get(decoded.used..).unwrap_or_default());
            Ok(Bytes::copy_from_slice(bytes.get(decoded.payload).unwrap_or_default()))
        });
        match read {
            Poll::Pending => {
                self.note_body_waits(cx);
                Poll::Pending
            }
            Poll::Ready(Ok(piece)) => Poll::Ready(piece),
            Poll::Ready(Err(_)) => {
                self.client_left.set(true);
                Poll::Ready(Ok(Bytes::new()))
            }
        }
    }

    /// Records a waker that is not the loop's, so that the loop wakes it when the loop reads in its place.
    fn note_body_waits(&self, cx: &Context<'_>) {
        let mut body = self.body.borrow_mut();
        let is_loop = body.loop_waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        body.body_waker = (!is_loop).then(|| cx.waker().clone());
    }

    /// Wakes the loop, unless the loop's own task is running.
    fn wake_loop(&self, cx: &Context<'_>) {
        let body = self.body.borrow();
        if let Some(waker) = body.loop_waker.as_ref().filter(|waker| !waker.will_wake(cx.waker())) {
            waker.wake_by_ref();
        }
    }
}

impl<P> Wire<P> {
    pub(super) fn wake_body(&self) {
        let waker = self.body.borrow_mut().body_waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends the body with an error: the loop is gone, and nothing else may read from the connection.
    pub(super) fn abandon_body(&self) {
        self.client_left.set(true);
        self.wake_body();
    }
}

impl<P> Http1RequestBody<P> {
    /// Returns the connection while this body is the current request's.
    fn current(&self) -> Option<&Rc<Wire<P>>> {
        match &self.source {
            BodySource::Connection(wire) if wire.request.get() == self.request => Some(wire),
            BodySource::Connection(_) | BodySource::Complete | BodySource::Failed => None,
        }
    }
}

impl<P: ServerIo> Body for Http1RequestBody<P> {
    type Data = Bytes;
    type Error = RequestBodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RequestBodyError>>> {
        let this = self.get_mut();
        let BodySource::Connection(wire) = &this.source else { return Poll::Ready(None) };
        if wire.request.get() != this.request {
            this.source = BodySource::Failed;
            return Poll::Ready(Some(Err(RequestBodyError::ExchangeEnded)));
        }
        if std::mem::take(&mut wire.body.borrow_mut().expects_continue) {
            wire.begin_interim();
            wire.wake_loop(cx);
        }
        let piece = wire.poll_body(cx);
        if piece.is_ready() && !wire.body.borrow().phase.is_open() {
            // Another task that read the body has replaced the loop's waker at the socket.
            wire.wake_loop(cx);
            wire.body_held.set(false);
            let is_complete = wire.is_body_complete();
            this.source = if is_complete { BodySource::Complete } else { BodySource::Failed };
        }
        piece.map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.source, BodySource::Complete)
    }

    fn size_hint(&self) -> SizeHint {
        if self.is_end_stream() {
            return SizeHint::with_exact(0);
        }
        let Some(wire) = self.current() else { return SizeHint::default() };
        match wire.body.borrow().phase {
            RequestBodyPhase::Length(left) => SizeHint::with_exact(left),
            RequestBodyPhase::Complete | RequestBodyPhase::Chunked(_) | RequestBodyPhase::Failed => {
                SizeHint::default()
            }
        }
    }
}

impl<P> Drop for Http1RequestBody<P> {
    fn drop(&mut self) {
        if let Some(wire) = self.current() {
            wire.body_held.set(false);
            let body = wire.body.borrow();
            // As at the body's end: the task that waited for it no longer does.
            if let (Some(_), Some(waker)) = (&body.body_waker, &body.loop_waker) {
                waker.wake_by_ref();
            }
        }
    }
}
