//! Follows the events of a response as it passes, and renders the error event that can end it.
//!
//! Apart from the body, because only this depends on how much of a response is inspected.

use bytes::{BufMut, Bytes, BytesMut};

use crate::{
    openai::{ApiSchema, error, sse::ResponseScanner},
    relay::stream_tail::StreamTail,
};
use rouse::fault::Fault;

/// Follows a response as it passes.
#[derive(Debug)]
pub(super) enum StreamTracker {
    /// The events of a stream, or one JSON document.
    Events(ResponseScanner),
    /// Only the position in the stream.
    Tail(StreamTail),
}

impl StreamTracker {
    /// Reports whether the stream has reached its own end, or an error event of the engine's.
    pub(super) fn is_over(&self) -> bool {
        match self {
            Self::Events(scanner) => scanner.facts().done || scanner.facts().error,
            Self::Tail(tail) => tail.is_over(),
        }
    }
}

/// Renders the error event. An unfinished event of the engine is ended first, so that the error does not become part of
/// it.
pub(super) fn error_event(fault: &Fault, form: ApiSchema, stream: &StreamTracker) -> Bytes {
    let (events, at_border) = match stream {
        StreamTracker::Events(scanner) => (scanner.facts().events, scanner.at_event_boundary()),
        // Only the events of the responses API are numbered, and those are tracked with a scanner.
        StreamTracker::Tail(tail) => (0, tail.at_event_boundary()),
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
