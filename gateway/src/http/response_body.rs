//! The response's body as the client's connection reads it, and all state that must last exactly as long.
//!
//! A body has one of three forms: the gateway's own text, a relayed engine response, or a stream whose head went out
//! while its request still waits. The third keeps the connection alive with heartbeats that the API's clients do not
//! take for model output, and becomes the second when the engine responds. After the head, a failure can only be an
//! error event. No `[DONE]` follows and the connection is cut, so no client takes half a response for a complete one.
//!
//! A client that reads nothing pins an engine. A connection polls for the next frame only when it could write the last
//! one, so the time between a handed-over frame and the next poll is the time of the stall. On HTTP/2, written parts of
//! a frame count as progress too (`tracked_bytes`).
//!
//! This file has the body of every form; `streaming` has the second and the third.

use std::{
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use rouse::fault::Fault;
use rouse_net::{
    lease::Gate,
    relay::{RelayBody, ScratchFrame},
    server::ScratchBody,
};
use tokio::time::Instant;

use super::{engine_request::RequestExchangeObserver, request_context::RequestContext};
use crate::serve::socket::ConnectionExchangeGuard;

mod streaming;
mod tracked_bytes;

use streaming::StreamingState;
pub(crate) use streaming::{RemainingWait, StreamingBody, StreamingBodyContext, drain_detached};
use tracked_bytes::TrackedBytes;

/// An engine's response body as it is relayed.
pub(crate) type EngineResponseBody = RelayBody<RequestExchangeObserver>;

/// A future for the response to a request that may still be parked.
pub(crate) type EngineResponseFuture = Pin<Box<dyn Future<Output = Result<Box<EngineResponse>, Fault>>>>;

/// An engine's response and the gate of its engine.
pub(crate) struct EngineResponse {
    pub(crate) response: Response<EngineResponseBody>,
    pub(crate) gate: Arc<Gate>,
}

pub(crate) struct ClientResponseBody {
    content: ResponseContent,
    context: Rc<RequestContext>,
    exchange: ConnectionExchangeGuard,
}

enum ResponseContent {
    Text(Option<Bytes>),
    Streaming(Rc<StreamingBody>),
}

/// Ends a body uncleanly: the client must not take a partial response for a complete one.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the response was aborted")]
pub(crate) struct ResponseAborted;

impl ClientResponseBody {
    pub(crate) fn text(text: Bytes, context: Rc<RequestContext>, exchange: ConnectionExchangeGuard) -> Self {
        exchange.note_handed();
        Self { content: ResponseContent::Text(Some(text)), context, exchange }
    }

    /// Drops the text, for a response to HEAD.
    pub(crate) fn without_body(mut self) -> Self {
        if let ResponseContent::Text(text) = &mut self.content {
            *text = None;
        }
        self
    }

    pub(crate) fn streaming(streaming_body: Rc<StreamingBody>, exchange: ConnectionExchangeGuard) -> Self {
        exchange.note_handed();
        Self {
            context: Rc::clone(&streaming_body.context),
            content: ResponseContent::Streaming(streaming_body),
            exchange,
        }
    }

    /// Polls the next frame. `memory`: scratch space of a caller that writes the frame before it polls again; the frame
    /// may be left there.
    fn poll_next(&mut self, memory: Option<&mut [u8]>, cx: &mut Context<'_>) -> ResponseFramePoll {
        self.exchange.note_polled();
        let next = match &mut self.content {
            ResponseContent::Text(text) => {
                let text = text.take();
                self.context.set_complete();
                self.context.add_bytes_out(text.as_ref().map_or(0, Bytes::len));
                Poll::Ready(text.map(|text| Ok(ScratchFrame::Owned(text))))
            }
            ResponseContent::Streaming(streaming_body) => streaming_body.poll(memory, cx),
        };
        if matches!(next, Poll::Ready(Some(Ok(_)))) {
            self.exchange.note_handed();
        }
        next
    }

    /// Tracks the bytes of a stream on HTTP/2. On HTTP/1.1 a client that reads nothing blocks the socket, so no
    /// tracking is needed.
    fn track_bytes(&self, frame: ScratchFrame) -> TrackedBytes {
        // `into_bytes` copies only out of scratch memory, and no caller lent any here.
        let bytes = frame.into_bytes(&[]);
        match &self.content {
            ResponseContent::Streaming(streaming_body) if streaming_body.socket.is_multiplexed() => {
                TrackedBytes::tracked(streaming_body, bytes)
            }
            ResponseContent::Streaming(_) | ResponseContent::Text(_) => TrackedBytes::untracked(bytes),
        }
    }
}

/// The result of polling for a frame.
type ResponseFramePoll = Poll<Option<Result<ScratchFrame, ResponseAborted>>>;

impl Body for ClientResponseBody {
    type Data = TrackedBytes;
    type Error = ResponseAborted;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<TrackedBytes>, ResponseAborted>>> {
        let next = ready!(self.poll_next(None, cx));
        Poll::Ready(next.map(|frame| frame.map(|frame| Frame::data(self.track_bytes(frame)))))
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            ResponseContent::Text(text) => text.as_ref().is_none_or(Bytes::is_empty),
            ResponseContent::Streaming(streaming_body) => match &*streaming_body.state.borrow() {
                StreamingState::Ended => true,
                StreamingState::Relayed(body) => body.is_end_stream(),
                _ => false,
            },
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            ResponseContent::Text(text) => {
                SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64))
            }
            ResponseContent::Streaming(streaming_body) => match &*streaming_body.state.borrow() {
                StreamingState::Relayed(body) => body.size_hint(),
                StreamingState::Ended => SizeHint::with_exact(0),
                _ => SizeHint::default(),
            },
        }
    }
}

impl ScratchBody for ClientResponseBody {
    fn uses_scratch(&self) -> bool {
        matches!(&self.content, ResponseContent::Streaming(live) if matches!(*live.state.borrow(), StreamingState::Relayed(_)))
    }

    fn poll_frame_into(&mut self, memory: Option<&mut [u8]>, cx: &mut Context<'_>) -> ResponseFramePoll {
        self.poll_next(memory, cx)
    }
}

impl Drop for ClientResponseBody {
    fn drop(&mut self) {
        let ended_at = match &self.content {
            ResponseContent::Text(_) => None,
            // A connection stops polling once a body reports its end, and never polls the body of a response to HEAD.
            ResponseContent::Streaming(streaming_body) if self.is_end_stream() => {
                streaming_body.ended_at.get()
            }
            ResponseContent::Streaming(_) => return,
        };
        // One clock read serves both records, and a known end needs none.
        let now = ended_at.unwrap_or_else(Instant::now);
        self.context.set_complete_at(now);
        self.exchange.set_ended_at(now);
    }
}

#[cfg(test)]
mod tests;
