//! One client's connection, from its first byte until the gateway can write nothing more to it.
//!
//! `api.rs` accepted the connection and gave it a task. Here the task finds out which protocol the client speaks, and
//! drives the connection: our own loop for HTTP/1.1 ([`Http1Connection`]), hyper for HTTP/2. Both call
//! [`crate::http::serve`] for each request.
//!
//! One timer, set as rarely as possible, checks every condition that must not last (a slow head, idleness, a client
//! that reads nothing). When one of them ends the connection, or the client disconnects, the connection is dropped, and
//! with it every future and body that served the client. An exchange is cancelled in no other way.

use std::{
    cell::Cell,
    convert::Infallible,
    future::poll_fn,
    io,
    pin::{Pin, pin},
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{HeaderValue, Request, Response, header};
use hyper::{
    body::Incoming,
    server::conn::http2,
    service::{HttpService, service_fn},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rouse::{
    fault::Fault,
    units::{Bytes, Millis},
};
use rouse_config::ApiLimits;
use rouse_net::{
    openai,
    server::{
        HeadRefusal, Http1Connection, Http1End, Http1Limits, Http1Phase, Http1RequestBody, ServerIo as _,
        deadlines::IdleState, last_response,
    },
};
use tokio::time::{Instant, Sleep};

use super::{
    ShutdownStage,
    socket::{ClientSocket, HyperIo},
    tls::{self, HandshakeOutcome, HandshakePool},
};
use crate::http::{self as api, ClientBody, WorkerContext, response_body::ClientResponseBody};

mod deadlines;

use deadlines::ConnectionDeadlines;

const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How late a request's timeouts may fire, and how often a stalled client is checked.
const TIMER_GRANULARITY: Duration = Duration::from_secs(1);
/// The longest stall of a client while its engine drains, and of a handshake while the gateway drains.
const MAX_STALL_WHILE_DRAINING: Duration = Duration::from_secs(5);
/// The most headers of a request over HTTP/1.1.
const MAX_HEADERS: usize = 100;
/// The most concurrent exchanges on one HTTP/2 connection.
const MAX_CONCURRENT_STREAMS: u32 = 256;
/// The most streams that a client may reset before they are accepted; beyond, its connection ends. Half of
/// [`MAX_CONCURRENT_STREAMS`]: a client that cancels a whole batch is not a flood.
const MAX_PENDING_RESETS: usize = 128;
/// How long an idle connection's end may take: under TLS the client gets a close notification.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a connection is over.
enum ConnectionEnd {
    /// The connection broke, or the gateway drained, before the client sent anything: there is nothing to answer.
    NotStarted,
    /// Either side closed the connection in order. `request_unread`: the client may still be sending the body of its
    /// last request.
    Closed {
        request_unread: bool,
    },
    /// The connection broke, or a response was cut off.
    Broken,
    ClientLeft,
    /// The client violated HTTP/2.
    Http2Violation,
    /// The next request's head cannot be served, and nothing was written for it.
    Refused(HeadRefusal),
    /// The first or next head did not arrive in time.
    SlowHead,
    Idle,
    Stalled,
    /// The client does not speak TLS on a TLS port.
    Plaintext,
    /// The gateway terminates.
    Terminating,
}

/// Runs HTTP/2's streams on this core.
#[derive(Clone, Copy)]
pub(crate) struct LocalExecutor;

impl<F: Future + 'static> hyper::rt::Executor<F> for LocalExecutor
where
    F::Output: 'static,
{
    fn execute(&self, future: F) {
        tokio::task::spawn_local(future);
    }
}

/// Why a connection is over before its protocol is known. Smaller than [`ConnectionEnd`], since the connection's future
/// holds it.
enum NegotiationEnd {
    /// As [`ConnectionEnd::NotStarted`].
    NotStarted,
    /// As [`ConnectionEnd::SlowHead`].
    SlowHead,
}

impl From<NegotiationEnd> for ConnectionEnd {
    fn from(end: NegotiationEnd) -> Self {
        match end {
            NegotiationEnd::NotStarted => Self::NotStarted,
            NegotiationEnd::SlowHead => Self::SlowHead,
        }
    }
}

/// The detected protocol of a connection.
enum DetectedProtocol {
    Http1,
    Http2,
    Plaintext,
}

/// The limits that a connection needs for its whole life.
#[derive(Clone, Copy, Debug)]
struct ConnectionLimits {
    /// `limits.header`.
    header: Bytes,
    /// `limits.headerRead`.
    header_read: Millis,
    /// `limits.connectionIdle`.
    connection_idle: Millis,
    /// `limits.clientStall`.
    client_stall: Millis,
}

impl From<&ApiLimits> for ConnectionLimits {
    fn from(limits: &ApiLimits) -> Self {
        let ApiLimits { header, header_read, connection_idle, client_stall, .. } = *limits;
        Self { header, header_read, connection_idle, client_stall }
    }
}

/// Serves the connection until it is over. `handshakes`: the connection begins with a TLS handshake.
///
/// Returns a block instead of being an `async fn`, which would hold its arguments twice; so do [`http1`] and [`drive`].
/// Every byte of this future is a byte of each idle connection.
pub(super) fn serve(
    worker: &Rc<WorkerContext>,
    socket: &Rc<ClientSocket>,
    handshakes: Option<&HandshakePool>,
) -> impl Future<Output = ()> {
    let limits = ConnectionLimits::from(&worker.server.config.load().limits);
    async move {
        // The work before the first request and after the last one is boxed, so that it takes no memory in between.
        let opened = Box::pin(negotiate_protocol(worker, socket, &limits, handshakes)).await;
        let end = match opened {
            Err(end) => ConnectionEnd::from(end),
            Ok(DetectedProtocol::Plaintext) => ConnectionEnd::Plaintext,
            Ok(DetectedProtocol::Http2) => Box::pin(http2(worker, socket, &limits)).await,
            Ok(DetectedProtocol::Http1) => http1(worker, socket, &limits).await,
        };
        Box::pin(close_connection(worker, socket, &limits, &end)).await;
    }
}

/// Detects the protocol, or returns why the connection ended before that.
async fn negotiate_protocol(
    worker: &WorkerContext,
    socket: &ClientSocket,
    limits: &ConnectionLimits,
    handshakes: Option<&HandshakePool>,
) -> Result<DetectedProtocol, NegotiationEnd> {
    let step = Cell::new((Instant::now(), TIMER_GRANULARITY));
    let is_http2 = tokio::time::timeout(
        limits.header_read.duration(),
        detect_protocol(worker, socket, handshakes, &step),
    );
    let stalled = async {
        socket.wait_for_stage(ShutdownStage::Draining).await;
        let drains = Instant::now();
        loop {
            let (since, most) = step.get();
            let ends = since.max(drains) + most;
            if ends <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(ends).await;
        }
    };
    let negotiated = tokio::select! {
        biased;
        begun = is_http2 => begun,
        () = stalled => return Err(NegotiationEnd::NotStarted),
    };
    match negotiated {
        Err(_) => Err(NegotiationEnd::SlowHead),
        Ok(Err(error)) => {
            tracing::debug!(%error, "connection failed before its first request");
            if tls::is_client_offence(&error) {
                socket.record_offence();
            }
            Err(NegotiationEnd::NotStarted)
        }
        Ok(Ok(protocol)) => Ok(protocol),
    }
}

/// Completes the handshake, if any, and reads enough to tell HTTP/2 from HTTP/1.1. `step`: when the current step began,
/// and how long it may last while the gateway drains.
async fn detect_protocol(
    worker: &WorkerContext,
    socket: &ClientSocket,
    handshakes: Option<&HandshakePool>,
    step: &Cell<(Instant, Duration)>,
) -> io::Result<DetectedProtocol> {
    let mut agreed = None;
    if let Some(handshakes) = handshakes {
        let identity = worker.server.config.load().tls.as_ref().and_then(|tls| tls.identity.clone());
        let (Some(identity), Some(wire)) = (identity, socket.take_wire()) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        wire.first_byte().await?;
        // From here on the client may also wait for the gateway: for its turn behind a crowd of other handshakes.
        step.set((Instant::now(), MAX_STALL_WHILE_DRAINING));
        let opened = handshakes.accept(wire, Arc::clone(&identity.api_config)).await?;
        step.set((Instant::now(), TIMER_GRANULARITY));
        match opened {
            HandshakeOutcome::Secure { stream, http2 } => {
                socket.put_stream(stream);
                agreed = Some(http2);
            }
            HandshakeOutcome::NotTls(stream) => {
                socket.put_stream(stream);
                return Ok(DetectedProtocol::Plaintext);
            }
        }
    }
    if agreed == Some(true) {
        // From here on an HTTP/1.1 text has no place on the connection.
        socket.set_multiplexed();
    }
    // Wait for data even where only HTTP/1.1 is possible: once the gateway drains, a connection that has sent nothing
    // yet is closed, and the first request may be on its way.
    match (poll_fn(|cx| socket.poll_starts_with(cx, HTTP2_PREFACE)).await?, agreed) {
        (_, Some(false)) | (false, None) => Ok(DetectedProtocol::Http1),
        (true, _) => Ok(DetectedProtocol::Http2),
        (false, Some(_)) => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the client negotiated HTTP/2 but does not send HTTP/2",
        )),
    }
}

fn http1<'a>(
    worker: &Rc<WorkerContext>,
    socket: &'a Rc<ClientSocket>,
    limits: &'a ConnectionLimits,
) -> impl Future<Output = ConnectionEnd> {
    let http1_limits = Http1Limits {
        max_head_bytes: usize::try_from(limits.header.0).unwrap_or(usize::MAX),
        max_headers: MAX_HEADERS,
        ..Http1Limits::default()
    };
    let (pool, dates) = (worker.pool.clone(), Rc::clone(&worker.dates));
    let (peer, core) = (Rc::clone(socket), Rc::clone(worker));
    let service = move |request: Request<Http1RequestBody<ClientSocket>>| {
        respond(&core, &peer, request.map(ClientBody::Http1))
    };
    let connection = Http1Connection::new(Rc::clone(socket), service, http1_limits, pool, dates);
    drive(connection, socket, limits)
}

async fn http2(
    worker: &Rc<WorkerContext>,
    socket: &Rc<ClientSocket>,
    limits: &ConnectionLimits,
) -> ConnectionEnd {
    socket.set_multiplexed();
    let (peer, core) = (Rc::clone(socket), Rc::clone(worker));
    let service = service_fn(move |request: Request<Incoming>| {
        let response = respond(&core, &peer, request.map(ClientBody::Http2));
        async move { Ok::<_, Infallible>(response.await) }
    });
    let connection = http2::Builder::new(LocalExecutor)
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(limits.header.0).unwrap_or(u32::MAX))
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        // A slow client slows its engine; it does not fill the gateway's memory.
        .max_send_buf_size(64 << 10)
        .serve_connection(TokioIo::new(socket.io()), service);
    drive(Box::pin(connection), socket, limits).await
}

/// Answers one request of either protocol. The head is handled before the returned future is polled.
fn respond(
    worker: &Rc<WorkerContext>,
    socket: &Rc<ClientSocket>,
    request: Request<ClientBody>,
) -> impl Future<Output = Response<ClientResponseBody>> + use<> {
    let response = api::serve(worker, socket, request);
    let socket = Rc::clone(socket);
    async move {
        let mut response = response.await;
        if socket.stage() > ShutdownStage::Serving && !socket.is_multiplexed() {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// A connection with a known protocol.
trait ServerConnection {
    /// Ready when the connection is over.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd>;

    /// Ends the connection once running exchanges are done.
    fn close(&mut self);

    /// Reports whether a part of the next request's head has arrived. HTTP/2 has no deadline for that.
    fn is_reading_head(&self) -> bool;
}

impl<S> ServerConnection for Pin<Box<http2::Connection<TokioIo<HyperIo>, S, LocalExecutor>>>
where
    S: HttpService<Incoming, ResBody = ClientResponseBody, Error = Infallible>,
    S::Future: 'static,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        let result = ready!(Future::poll(self.as_mut(), cx));
        Poll::Ready(match result {
            Ok(()) => ConnectionEnd::Closed { request_unread: false },
            Err(error) if is_http2_violation(&error) => ConnectionEnd::Http2Violation,
            Err(_) => ConnectionEnd::Broken,
        })
    }

    fn close(&mut self) {
        self.as_mut().graceful_shutdown();
    }

    fn is_reading_head(&self) -> bool {
        false
    }
}

impl<S, F> ServerConnection for Http1Connection<ClientSocket, S, F, ClientResponseBody>
where
    S: Fn(Request<Http1RequestBody<ClientSocket>>) -> F,
    F: Future<Output = Response<ClientResponseBody>>,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        Poll::Ready(match ready!(Self::poll(self, cx)) {
            Http1End::Closed { request_unread } => ConnectionEnd::Closed { request_unread },
            Http1End::ClientLeft => ConnectionEnd::ClientLeft,
            Http1End::Refused(refusal) => ConnectionEnd::Refused(refusal),
            Http1End::Truncated | Http1End::Broken(_) => ConnectionEnd::Broken,
        })
    }

    fn close(&mut self) {
        Self::close(self);
    }

    fn is_reading_head(&self) -> bool {
        self.phase() == Http1Phase::ReadingHead
    }
}

/// Polls the connection and checks its deadlines until it is over.
fn drive<'a>(
    connection: impl ServerConnection,
    socket: &'a ClientSocket,
    limits: &'a ConnectionLimits,
) -> impl Future<Output = ConnectionEnd> {
    let mut driven = DrivenConnection { connection, deadlines: ConnectionDeadlines::new(limits, socket) };
    async move {
        let mut timer = pin!(tokio::time::sleep(driven.deadlines.first_timeout()));
        poll_fn(|cx| driven.poll(timer.as_mut(), cx)).await
    }
}

/// A connection beside its deadlines.
struct DrivenConnection<'a, C> {
    connection: C,
    deadlines: ConnectionDeadlines<'a>,
}

impl<C: ServerConnection> DrivenConnection<'_, C> {
    /// Ready when the connection is over.
    fn poll(&mut self, timer: Pin<&mut Sleep>, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        let Self { connection, deadlines } = self;
        if let Poll::Ready(end) = connection.poll(cx) {
            return Poll::Ready(end);
        }
        let socket = deadlines.socket();
        if connection.is_reading_head() {
            socket.note_head_started();
        }
        deadlines.note_same_task(socket.set_task(cx));
        // On HTTP/1.1 the next response carries `connection: close`, or the deadlines end an idle connection.
        let asks = if socket.is_multiplexed() { ShutdownStage::Draining } else { ShutdownStage::Terminating };
        if socket.stage() >= asks && deadlines.request_close() {
            connection.close();
            // The connection may be over at once.
            cx.waker().wake_by_ref();
        }
        match deadlines.poll(timer, cx) {
            // A GOAWAY shows a client that sends another request at this moment whether the request was accepted.
            Poll::Ready(ConnectionEnd::Idle) if socket.is_multiplexed() && deadlines.request_close() => {
                connection.close();
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            end => end,
        }
    }
}

/// Whether the gateway ended the connection because its client violated HTTP/2: invalid frames, or floods of resets. A
/// broken connection, or an error that the client reports about the gateway, does not count.
fn is_http2_violation(error: &hyper::Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<h2::Error>());
    cause.is_some_and(|cause| {
        cause.is_go_away() && cause.is_library() && cause.reason() != Some(h2::Reason::NO_ERROR)
    })
}

/// Sends the client the final error, if any, and lets the client read it.
async fn close_connection(
    worker: &WorkerContext,
    socket: &ClientSocket,
    limits: &ConnectionLimits,
    end: &ConnectionEnd,
) {
    if let Some(fault) = final_fault(socket, limits, end) {
        socket.record_offence();
        worker.server.metrics_sink().connection_rejected(openai::error::status(&fault).as_u16());
        let answer = api::error_response_bytes(worker, &fault);
        if last_response::send_last_response(socket, &answer).await.is_err() {
            return;
        }
    } else {
        match end {
            ConnectionEnd::Closed { request_unread: true } => {}
            // Nothing is cut off.
            ConnectionEnd::Idle => {
                drop(tokio::time::timeout(CLOSE_TIMEOUT, poll_fn(|cx| socket.poll_shutdown(cx))).await);
                return;
            }
            ConnectionEnd::Http2Violation => {
                socket.record_offence();
                return;
            }
            _ => return,
        }
    }
    tokio::select! {
        () = last_response::linger(socket) => {}
        () = socket.wait_for_stage(ShutdownStage::Terminating) => {}
    }
}

/// The error that the client gets at the end of its connection, if any.
fn final_fault(socket: &ClientSocket, limits: &ConnectionLimits, end: &ConnectionEnd) -> Option<Fault> {
    let invalid = |message: String| Some(Fault::InvalidRequest { message, param: None });
    if socket.write_blocked_since().is_some() {
        // The error would land in the middle of a response that is still stuck.
        return None;
    }
    match end {
        ConnectionEnd::Refused(refusal @ HeadRefusal::Malformed(_)) => invalid(refusal.to_string()),
        ConnectionEnd::Refused(_) => Some(Fault::HeadersTooLarge { limit: limits.header }),
        ConnectionEnd::SlowHead
            if matches!(socket.idle_state(), IdleState::ReadingHead { .. }) && !socket.is_multiplexed() =>
        {
            Some(Fault::RequestTimeout { what: "its head took longer than limits.headerRead".into() })
        }
        ConnectionEnd::Plaintext => invalid("this port speaks TLS: use https".into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
