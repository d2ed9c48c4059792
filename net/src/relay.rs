//! One streamed exchange with an engine: forwards the request, streams the response back, and always releases the
//! lease.
//!
//! ```text
//!   exchange()                                    RelayBody
//!   pool ─▶ connect ─▶ send ─▶ wait for head ─▶   frame ─▶ frame ─▶ … ─▶ end
//!           Connecting  Headers                   Streaming
//! ```
//!
//! **No task.** The connection belongs to the future, and then to the body. Dropping either closes the socket at that
//! moment, in every phase, and so the engine learns that its client has disconnected. A task in between would need a
//! notification, which would arrive late.
//!
//! **The lease lives as long as the body**, never only as long as the head: an engine that is put to sleep between the
//! head and the last token is the failure that this crate exists to prevent.
//!
//! **At most one replay, and only without a response byte.** The engine may have closed a kept-alive connection in the
//! instant it was picked. When the connection closes at once and without a response byte, the request is sent once more
//! on a new connection. An engine that has held the whole request for longer may be working on it: after that, and
//! after the first response byte, nothing is sent again.
//!
//! **Frames pass through.** One read of the socket is one frame. The next read happens when the client's side asks for
//! it, so a slow client slows its engine and fills no buffer here. The price: while a client reads nothing, its server
//! does not poll, and the body cannot end by itself, not even when its lease is revoked. So a server must cut a client
//! that reads nothing, by a deadline of its own that is short once the gate is closed.
//!
//! **Memory.** A core reads into scratch memory. The bytes are copied out, or forwarded at once where the client's
//! socket is at hand ([`RelayBody::poll_frame_into`]). An idle stream holds no buffer.
//!
//! **Time is coarse.** An exchange has one timer. Each frame moves a deadline, a plain number; the timer checks it only
//! when it fires.
//!
//! The upstream side is our own and not a general client: the peer is an engine we started, the protocol is plain
//! HTTP/1.1, and the large parts of general clients (proxies, upgrades, pipelining, retries by status) are absent. ADR
//! 1 has the figures.

use std::{net::SocketAddr, sync::Arc};

use http::{HeaderMap, HeaderValue, Method, StatusCode, uri::PathAndQuery};
use tokio::time::Instant;

use crate::{
    backend_origin::BackendOrigin,
    engine_load::EngineLoad,
    lease::Lease,
    openai::{ApiSchema, sse::ResponseFacts},
};
use rouse::{
    fault::{DisconnectPhase, Fault},
    model::EngineId,
    units::{Generation, Millis},
};

mod abort_watch;
#[doc(hidden)]
pub mod bench;
mod body;
mod connection;
mod decode;
mod guard;
mod head;
pub mod headers;
mod payload;
pub mod pool;
mod send;
mod stream_tail;

pub(crate) use decode::{BodyDecoder, DecodedBytes};
pub(crate) use head::{parse as parse_response_head, write_request_line};

pub use body::{RelayBody, RelayBodyError, ScratchFrame};
pub use payload::{Payload, RequestBodyStream};
pub use pool::ConnectionPool;
pub use send::exchange;

/// The engine that a request is sent to.
#[derive(Clone, Debug)]
pub struct RelayTarget {
    pub engine: EngineId,
    pub generation: Generation,
    pub address: SocketAddr,
    /// Sent instead of the client's key when the engine requires one.
    pub authorization: Option<HeaderValue>,
    /// Set for a backend that another operator runs.
    pub origin: Option<Arc<BackendOrigin>>,
}

/// The request to send. `headers` are the client's own; headers that must not be forwarded are filtered while writing.
/// All fields except the body are borrowed until the response head arrives.
#[derive(Clone, Debug)]
pub struct UpstreamRequest<'a> {
    pub method: &'a Method,
    pub path: &'a PathAndQuery,
    pub headers: &'a HeaderMap,
    /// Sent as `x-request-id` instead of the client's header; `None` forwards that header unchanged.
    pub request_id: Option<&'a HeaderValue>,
    pub body: Payload,
    /// The client asked for a stream: stream deadlines apply, and the engine is asked not to compress.
    pub stream: bool,
    /// The API schema of the error event that ends a broken stream.
    pub schema: ApiSchema,
    pub inspection: ResponseInspection,
    /// Asks the stub in front of the engine for a report of the engine's load.
    pub wants_load_report: bool,
}

/// How much of a response is inspected as it passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseInspection {
    /// Only the position in an event stream, so that an error event can be appended when it breaks. For a proxy whose
    /// own client inspects the stream. Yields no [`ResponseFacts`]. A stream of the responses API is inspected in full
    /// all the same, because its events are numbered.
    StreamEnd,
    #[default]
    Events,
    /// Events, and also a response that is one JSON document, for its id and usage. The engine is asked not to
    /// compress.
    EventsAndJson,
}

/// How long an engine may take.
#[derive(Clone, Copy, Debug)]
pub struct RelayTimeouts {
    pub connect: Millis,
    /// From the start to the first byte of a stream's body.
    pub first_byte: Millis,
    /// From the start to the end of a response that is not a stream.
    pub non_stream: Millis,
    /// Between two frames of a stream.
    pub idle: Millis,
    /// From the break of a stream until its client gets the error, unless the lease is revoked first. A dying engine
    /// closes its connections before its exit is detected. Zero where no supervisor watches the process.
    pub exit_wait: Millis,
}

/// One attempt at one engine.
#[derive(Debug)]
pub struct Exchange<'a, O> {
    /// The start of all deadlines.
    pub now: Instant,
    pub target: RelayTarget,
    pub request: UpstreamRequest<'a>,
    /// The rest of a body that is still arriving. `request.body` then holds its beginning, sent as the first chunk when
    /// the total length is unknown.
    pub upload: Option<RequestBodyStream>,
    pub lease: Lease,
    pub timeouts: RelayTimeouts,
    pub observer: O,
}

/// Response extension of a 503 with a stub's mark: no engine has seen the request. The stub's gate is closed, or it
/// does not know its engine yet. Trust it only for an engine behind a stub, because a stub strips such marks from the
/// engine's own responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedByStub;

/// Why an exchange yields no response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangeError {
    pub fault: Fault,
    /// No engine has seen the request: it may be tried on another engine, or parked again.
    pub reroutable: bool,
    /// An engine held the whole request for long enough to be working on it, or began to answer.
    pub begun: bool,
}

/// Observes an exchange, for metrics and access logs.
///
/// One observer sees one attempt. `end` is called exactly once in every case, including when [`exchange`] fails, or is
/// dropped before it returns.
pub trait RelayObserver {
    /// A connection exists, kept or new, and the request is being sent. Called again after each [`Self::replayed`].
    fn connected(&mut self) {}

    /// The request is sent a second time, because the kept-alive connection closed without a byte.
    fn replayed(&mut self) {}

    /// The engine's response head arrived.
    fn head(&mut self, status: StatusCode) {
        let _ = status;
    }

    /// That head carries the load report that [`UpstreamRequest::wants_load_report`] asked for. Called after
    /// [`Self::head`].
    fn load_report(&mut self, load: &EngineLoad) {
        let _ = load;
    }

    /// The first byte of the body arrived.
    fn first_byte(&mut self) {}

    /// A frame of `bytes` bytes passes. `facts`: facts of the response so far, including this frame, when it is an
    /// event stream or inspected JSON. They are complete with the last frame.
    fn frame(&mut self, bytes: usize, facts: Option<&ResponseFacts>) {
        let _ = (bytes, facts);
    }

    /// The exchange ended at `now`, and its lease is released.
    fn end(&mut self, outcome: ExchangeOutcome, now: Instant);
}

/// How an exchange ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExchangeOutcome {
    Complete,
    /// The future or the body was dropped.
    ClientLeft(DisconnectPhase),
    Failed(Fault),
}

/// No observer.
impl RelayObserver for () {
    fn end(&mut self, _: ExchangeOutcome, _: Instant) {}
}

#[cfg(test)]
mod tests;
