//! The loop of one connection: head, service, response, next head.

use std::{
    io,
    ops::ControlFlow::{self, Break, Continue},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use http::{Request, Response, StatusCode};

use super::{
    DateCache, HeadRefusal, Http1Limits, Http1RequestBody, ScratchBody, ServerIo,
    head::{RequestFacts, RequestHead},
    head_reader::HeadReader,
    response::ResponseWriter,
    response_head::ResponsePlan,
    wire::Wire,
};
use crate::relay::ConnectionPool;

/// Pipelined exchanges that one poll completes, before other tasks of the core run.
const MAX_EXCHANGES_PER_POLL: u64 = 16;

/// An HTTP/1.1 connection. `S` is the service, `F` its futures, and `B` the bodies of its responses.
pub struct Http1Connection<P, S, F, B> {
    // Dropped first, so that a body may still reach the connection.
    stage: Http1Stage<F, B>,
    wire: Rc<Wire<P>>,
    service: S,
    limits: Http1Limits,
    dates: Rc<DateCache>,
    head: HeadReader,
    closing: bool,
    requests: u64,
}

/// What a connection is doing. The futures are boxed by the loop, so that an idle connection or an open stream has no
/// room for one.
enum Http1Stage<F, B> {
    Head,
    Serving(Pin<Box<F>>, RequestFacts),
    Responding(ResponseWriter<B>),
    ShuttingDown { request_unread: bool },
    Over,
}

/// What a connection waits for. A caller's deadlines depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http1Phase {
    /// Nothing of the next head has arrived.
    Idle,
    /// A part of a head has arrived.
    ReadingHead,
    /// The service runs, and may be reading the request's body.
    Serving,
    /// The response's head is decided, and frames of its body follow.
    Responding,
    /// The client has not accepted all of a complete response, or the connection is about to end.
    Flushing,
}

/// How a connection ended.
#[derive(Debug)]
pub enum Http1End {
    /// In order: either side asked for it. The socket is shut down for writing.
    Closed {
        /// The last request's body was not read to its end, so the client may still be sending it.
        request_unread: bool,
    },
    /// The client closed or reset its side during an exchange, or only its sending half.
    ClientLeft,
    /// The next head was refused. Nothing was written for it, and all earlier responses are out: the caller answers.
    Refused(HeadRefusal),
    /// The response's body failed after its head was decided: the client must not take what it got for the whole.
    Truncated,
    /// Reading between two exchanges failed, or writing did.
    Broken(io::Error),
}

impl<P, S, F, B> Http1Connection<P, S, F, B>
where
    P: ServerIo,
    S: Fn(Request<Http1RequestBody<P>>) -> F,
    F: Future<Output = Response<B>>,
    B: ScratchBody + Unpin,
{
    /// `pool` lends the memory that requests and responses are read into.
    pub fn new(
        peer: Rc<P>,
        service: S,
        limits: Http1Limits,
        pool: ConnectionPool,
        dates: Rc<DateCache>,
    ) -> Self {
        Self {
            stage: Http1Stage::Head,
            wire: Rc::new(Wire::new(peer, pool)),
            service,
            limits,
            dates,
            head: HeadReader::default(),
            closing: false,
            requests: 0,
        }
    }

    /// Ready when the connection is over. The future and the body of an unfinished exchange are then dropped.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Http1End> {
        self.wire.begin_poll(cx);
        // A stream whose frames are always ready would otherwise hide that its client has left.
        if matches!(&self.stage, Http1Stage::Responding(writer) if writer.has_body())
            && self.has_client_left(cx)
        {
            return self.end(Http1End::ClientLeft);
        }
        let before = self.requests;
        loop {
            if let Break(end) = ready!(self.poll_stage(cx)) {
                return self.end(end);
            }
            if self.requests - before >= MAX_EXCHANGES_PER_POLL {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }

    /// Closes the connection after the exchange in progress. An idle connection closes at the next poll, for which the
    /// caller must wake its task. A request that has arrived, even in part, is still served.
    pub const fn close(&mut self) {
        self.closing = true;
    }

    /// What the connection waits for.
    #[must_use]
    pub fn phase(&self) -> Http1Phase {
        match &self.stage {
            Http1Stage::Head if self.wire.buffered_bytes() == 0 => Http1Phase::Idle,
            Http1Stage::Head => Http1Phase::ReadingHead,
            Http1Stage::Serving(..) => Http1Phase::Serving,
            Http1Stage::Responding(writer) if writer.has_body() => Http1Phase::Responding,
            Http1Stage::Responding(_) | Http1Stage::ShuttingDown { .. } | Http1Stage::Over => {
                Http1Phase::Flushing
            }
        }
    }

    /// The number of requests so far.
    #[must_use]
    pub const fn requests(&self) -> u64 {
        self.requests
    }

    fn end(&mut self, end: Http1End) -> Poll<Http1End> {
        self.stage = Http1Stage::Over;
        Poll::Ready(end)
    }

    fn has_client_left(&self, cx: &mut Context<'_>) -> bool {
        self.wire.detect_disconnect(self.limits.max_read_ahead_bytes, cx)
    }

    /// Ready when the stage has passed.
    fn poll_stage(&mut self, cx: &mut Context<'_>) -> Poll<ControlFlow<Http1End>> {
        match &mut self.stage {
            Http1Stage::Head => self.poll_head(cx),
            Http1Stage::Serving(future, facts) => {
                let facts = *facts;
                if let Poll::Ready(response) = future.as_mut().poll(cx) {
                    return Poll::Ready(self.respond(response, facts, cx));
                }
                if let Poll::Ready(Err(error)) = self.wire.poll_interim(cx) {
                    return Poll::Ready(Break(Http1End::Broken(error)));
                }
                if self.has_client_left(cx) {
                    Poll::Ready(Break(Http1End::ClientLeft))
                } else {
                    Poll::Pending
                }
            }
            Http1Stage::Responding(writer) => match writer.poll(&self.wire, cx) {
                Poll::Ready(Ok(())) => {
                    let close = writer.closes_connection();
                    Poll::Ready(self.finish_exchange(close, cx))
                }
                Poll::Ready(Err(end)) => Poll::Ready(Break(end)),
                Poll::Pending if writer.has_body() && self.has_client_left(cx) => {
                    Poll::Ready(Break(Http1End::ClientLeft))
                }
                Poll::Pending => Poll::Pending,
            },
            Http1Stage::ShuttingDown { request_unread } => {
                let request_unread = *request_unread;
                // A client that is gone already needs no orderly end.
                drop(ready!(self.wire.peer.poll_shutdown(cx)));
                Poll::Ready(Break(Http1End::Closed { request_unread }))
            }
            Http1Stage::Over => Poll::Ready(Break(Http1End::Closed { request_unread: false })),
        }
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<ControlFlow<Http1End>> {
        let next = match self.head.poll(&self.wire, &self.limits, cx) {
            Poll::Ready(Ok(next)) => next,
            Poll::Ready(Err(error)) => return Poll::Ready(Break(Http1End::Broken(error))),
            Poll::Pending if self.closing && self.wire.buffered_bytes() == 0 => None,
            Poll::Pending => return Poll::Pending,
        };
        match next {
            Some(Ok(head)) => self.serve(head, cx),
            Some(Err(refusal)) => return Poll::Ready(Break(Http1End::Refused(refusal))),
            None => self.stage = Http1Stage::ShuttingDown { request_unread: false },
        }
        Poll::Ready(Continue(()))
    }

    fn serve(&mut self, head: RequestHead, cx: &Context<'_>) {
        let RequestHead { parts, framing, facts, expects_continue } = head;
        self.requests += 1;
        let body = self.wire.begin_request(framing, expects_continue, &self.limits, cx);
        let future = (self.service)(Request::from_parts(parts, body));
        self.stage = Http1Stage::Serving(Box::pin(future), facts);
    }

    /// Writes the beginning of a response, and drops the service's future.
    fn respond(
        &mut self,
        response: Response<B>,
        facts: RequestFacts,
        cx: &mut Context<'_>,
    ) -> ControlFlow<Http1End> {
        self.stage = Http1Stage::Over;
        self.wire.stop_continue();
        // A body that the response still reads may never be read to its end, and the client must know from the head.
        let complete =
            if self.wire.body_held.get() { self.wire.is_body_complete() } else { self.wire.discard_body(cx) };
        let (parts, body) = response.into_parts();
        let (mut status, mut headers, mut close) = (parts.status, parts.headers, self.closing || !complete);
        if status.is_informational() {
            // Interim responses are the server's own, and a connection is never upgraded.
            tracing::error!(%status, "the service answered with an interim status");
            (status, close) = (StatusCode::INTERNAL_SERVER_ERROR, true);
            headers.clear();
        }
        let plan = ResponsePlan::new(facts, (status, &headers), &body, close);
        let head = |out: &mut Vec<u8>| plan.write_head(out, status, &headers, &self.dates);
        match ResponseWriter::start(&self.wire, &plan, head, body, cx) {
            Ok(writer) => {
                self.stage = Http1Stage::Responding(writer);
                Continue(())
            }
            Err(end) => Break(end),
        }
    }

    /// Goes on to the next request, or to the end of the connection.
    fn finish_exchange(&mut self, close: bool, cx: &mut Context<'_>) -> ControlFlow<Http1End> {
        let request_unread = !self.wire.discard_body(cx) && !self.wire.client_left.get();
        let ends = close || self.closing || request_unread || self.wire.client_left.get();
        self.wire.end_request();
        self.stage = if ends { Http1Stage::ShuttingDown { request_unread } } else { Http1Stage::Head };
        Continue(())
    }
}

impl<P, S, F, B> Drop for Http1Connection<P, S, F, B> {
    fn drop(&mut self) {
        // A body in another task would keep the socket open, and read from it.
        self.wire.abandon_body();
    }
}
