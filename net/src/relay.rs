//! One streamed exchange with an engine: the request goes out, the answer comes back as it comes, and whatever happens
//! the lease is given back.
//!
//! ```text
//!   exchange()                                    RelayBody
//!   pool ─▶ connect ─▶ send ─▶ wait for head ─▶   frame ─▶ frame ─▶ … ─▶ end
//!           Connecting  Headers                   Streaming
//! ```
//!
//! **No task.** The connection belongs to the future, and then to the body. Dropping either closes the socket at that
//! moment, in every phase, which is how an engine learns that its client has left. A task in between would have to be
//! told, and would be told late.
//!
//! **The lease lives as long as the body**, never only as long as the head: an engine that is put to sleep between the
//! head and the last token is the failure this whole crate exists to prevent.
//!
//! **One replay, and only of nothing.** A kept-alive connection may have been closed by the engine in the instant it
//! was picked. When it closes at once and gave no byte at all, the request goes out once more on a new one. An engine
//! that has the whole request for longer may be working on it: after that, as after the first byte, nothing is ever sent
//! again.
//!
//! **Frames pass.** One read of the socket is one frame. The next read happens when
//! the client's side asks for it, so a slow client slows its engine and fills no buffer here. The price: while a client
//! takes nothing, its server does not ask, and the body cannot end by itself, not even when its lease is revoked. So a
//! server must cut a client that takes nothing, by a deadline of its own that is a short one once the gate is closed.
//!
//! **Memory.** A core reads into memory of its own, and what was read is copied out, or passed on at once where the client's
//! socket is at hand ([`RelayBody::poll_frame_into`]). An idle stream holds no buffer.
//!
//! **Time is coarse.** An exchange has one timer. Each frame moves a deadline, a plain number; the timer looks at it
//! only when it fires.
//!
//! The upstream side is our own and not a general client: the peer is an engine we started, the protocol is plain
//! HTTP/1.1, and what makes general clients large (proxies, upgrades, pipelining, retries by status) is absent. ADR 1
//! has the figures.

use std::{net::SocketAddr, sync::Arc};

use http::{HeaderMap, HeaderValue, Method, StatusCode, uri::PathAndQuery};
use tokio::time::Instant;

use crate::{
    backend_origin::BackendOrigin,
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

pub use body::{RelayBody, RelayBodyError, ScratchFrame};
pub use payload::{Payload, RequestBodyStream};
pub use pool::ConnectionPool;
pub use send::exchange;

/// Where a request goes.
#[derive(Clone, Debug)]
pub struct RelayTarget {
    pub engine: EngineId,
    pub generation: Generation,
    pub address: SocketAddr,
    /// Sent instead of the client's key, when the engine wants one.
    pub authorization: Option<HeaderValue>,
    /// Of a backend that somebody else runs.
    pub origin: Option<Arc<BackendOrigin>>,
}

/// What is sent. `headers` are the client's own: what must not pass is left out as they are written. All of it but the
/// body is borrowed until the answer's head is there.
#[derive(Clone, Debug)]
pub struct UpstreamRequest<'a> {
    pub method: &'a Method,
    pub path: &'a PathAndQuery,
    pub headers: &'a HeaderMap,
    /// Goes as `x-request-id`, instead of what the headers say; without one, what they say passes.
    pub request_id: Option<&'a HeaderValue>,
    pub body: Payload,
    /// The client asked for a stream: other deadlines hold, and the engine is asked not to compress.
    pub stream: bool,
    /// In whose words a stream that breaks is told why.
    pub schema: ApiSchema,
    pub inspection: ResponseInspection,
}

/// How much of an answer is looked into as it passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseInspection {
    /// Nothing but where a stream of events stands, so that it can be told why it breaks: for whoever passes on to
    /// somebody that looks. There are no [`ResponseFacts`]. A stream of the responses API is followed all the same, since its
    /// events are numbered.
    StreamEnd,
    #[default]
    Events,
    /// An answer that is one JSON document as well, for its id and usage; the engine is asked not to compress it.
    EventsAndJson,
}

/// How long an engine may take.
#[derive(Clone, Copy, Debug)]
pub struct RelayTimeouts {
    pub connect: Millis,
    /// From the start to the first byte of a stream's body.
    pub first_byte: Millis,
    /// From the start to the end of an answer that is no stream.
    pub non_stream: Millis,
    /// Between two frames of a stream.
    pub idle: Millis,
    /// From the break of a stream until its client is told, unless the lease is revoked first: an engine that dies closes its
    /// connections before its process is seen to have ended. Zero where nobody watches the process.
    pub exit_wait: Millis,
}

/// One attempt at one engine.
#[derive(Debug)]
pub struct Exchange<'a, O> {
    /// Its deadlines count from here.
    pub now: Instant,
    pub target: RelayTarget,
    pub request: UpstreamRequest<'a>,
    /// What follows its body, which is then the beginning of one; its first chunk, where the whole has no length.
    pub upload: Option<RequestBodyStream>,
    pub lease: Lease,
    pub timeouts: RelayTimeouts,
    pub observer: O,
}

/// Stands in the extensions of a 503 which says that it is a stub's, whose gate is closed or which was not told of an engine
/// yet: no engine has seen the request. To be believed only of an engine that is known to be behind a stub, which lets no
/// such mark of the engine's own through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedByStub;

/// There is no answer to pass on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangeError {
    pub fault: Fault,
    /// No engine has seen the request: it may be tried on another one, or parked again.
    pub reroutable: bool,
    /// An engine had all of the request for long enough to be working on it, or began to answer.
    pub begun: bool,
}

/// Looks on while an exchange runs; metrics and access logs hang on it.
///
/// One observer sees one attempt, and `end` is called exactly once, whatever happens: also when [`exchange`] fails, or
/// is dropped before it returns.
pub trait RelayObserver {
    /// There is a connection, kept or new: the request is being sent. Once more after each [`Self::replayed`].
    fn connected(&mut self) {}

    /// The request goes out a second time: the kept-alive connection it was sent on gave no byte.
    fn replayed(&mut self) {}

    /// The engine's head came.
    fn head(&mut self, status: StatusCode) {
        let _ = status;
    }

    /// The first byte of the body came.
    fn first_byte(&mut self) {}

    /// So many bytes pass on. `facts`: what the answer has shown so far, these bytes included, when it is a stream of
    /// events, or JSON that is watched. With the last frame they are complete.
    fn frame(&mut self, bytes: usize, facts: Option<&ResponseFacts>) {
        let _ = (bytes, facts);
    }

    /// It is over at `now`, and the lease is given back.
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

/// Nobody looks on.
impl RelayObserver for () {
    fn end(&mut self, _: ExchangeOutcome, _: Instant) {}
}

#[cfg(test)]
mod tests;
