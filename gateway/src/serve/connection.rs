//! One client's connection, from its first byte until the gateway can write nothing more to it.
//!
//! The task here owns hyper's connection and watches the socket beside it. After each poll of hyper it checks whether
//! the client has disconnected. One timer, set as rarely as possible, checks every condition that must not last (a slow
//! head, idleness, a client that reads nothing). When one of them ends the connection, hyper's side is dropped, and
//! with it every future and body that served the client. An exchange is cancelled in no other way.

use std::{
    cell::Cell,
    convert::Infallible,
    future::poll_fn,
    io,
    pin::{Pin, pin},
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderValue, Request, Response, Version, header};
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::{HttpService, service_fn},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rouse::fault::Fault;
use rouse_config::ApiLimits;
use rouse_net::{
    downstream::{Http1Connection, RawResponseSlot, bypass},
    openai,
};
use tokio::time::Instant;

use super::{
    ShutdownStage,
    socket::{ClientSocket, HyperIo, IdleState},
    tls::{self, HandshakeOutcome, HandshakePool},
};
use crate::http::{self as api, WorkerContext, response_body::ClientResponseBody};

mod deadlines;

use deadlines::ConnectionDeadlines;

const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How late a request's timeouts may fire, and how often a stalled client is checked.
const TIMER_GRANULARITY: Duration = Duration::from_secs(1);
/// The longest stall of a client while its engine drains, and of a handshake while the gateway drains.
const MAX_STALL_WHILE_DRAINING: Duration = Duration::from_secs(5);
/// The most concurrent exchanges on one HTTP/2 connection.
const MAX_CONCURRENT_STREAMS: u32 = 256;
/// The most streams that a client may reset before they are accepted; beyond, its connection ends. Half of
/// [`MAX_CONCURRENT_STREAMS`]: a client that cancels a whole batch is not a flood.
const MAX_PENDING_RESETS: usize = 128;
/// How long a refused client may continue to send its request, and how long it may pause.
const LINGER_TIMEOUT: Duration = Duration::from_secs(30);
const LINGER_IO_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a connection is over.
enum ConnectionEnd {
    /// The connection broke, or the gateway drained, before the client sent anything: there is nothing to answer.
    NotStarted,
    /// hyper has finished: either side closed the connection, or it broke.
    Closed,
    ClientLeft,
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

/// The detected protocol of a connection.
enum DetectedProtocol {
    Http1,
    Http2,
    Plaintext,
}

/// Serves the connection until it is over. `handshakes`: the connection begins with a TLS handshake.
pub(super) async fn serve(
    worker: &Rc<WorkerContext>,
    socket: &Rc<ClientSocket>,
    handshakes: Option<&HandshakePool>,
) {
    let limits = worker.server.config.load().limits;
    // The work before the first request and after the last one is boxed, so an open stream carries no memory for it.
    let opened = Box::pin(negotiate_protocol(worker, socket, &limits, handshakes)).await;
    let end = match opened {
        Err(end) => end,
        Ok(DetectedProtocol::Plaintext) => ConnectionEnd::Plaintext,
        Ok(DetectedProtocol::Http2) => Box::pin(http2(worker, socket, &limits)).await,
        Ok(DetectedProtocol::Http1) => http1(worker, socket, &limits).await,
    };
    Box::pin(close_connection(worker, socket, &limits, &end)).await;
}

/// Detects the protocol, or returns why the connection ended before that.
async fn negotiate_protocol(
    worker: &WorkerContext,
    socket: &ClientSocket,
    limits: &ApiLimits,
    handshakes: Option<&HandshakePool>,
) -> Result<DetectedProtocol, ConnectionEnd> {
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
        () = stalled => return Err(ConnectionEnd::NotStarted),
    };
    match negotiated {
        Err(_) => Err(ConnectionEnd::SlowHead),
        Ok(Err(error)) => {
            tracing::debug!(%error, "connection failed before its first request");
            if tls::is_client_offence(&error) {
                socket.record_offence();
            }
            Err(ConnectionEnd::NotStarted)
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
    // Wait for data even where only HTTP/1.1 is possible: once the gateway drains, hyper closes a connection that has
    // sent nothing yet, and the first request may be on its way.
    match (poll_fn(|cx| socket.poll_starts_with(cx, HTTP2_PREFACE)).await?, agreed) {
        (_, Some(false)) | (false, None) => Ok(DetectedProtocol::Http1),
        (true, _) => Ok(DetectedProtocol::Http2),
        (false, Some(_)) => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the client negotiated HTTP/2 but does not send HTTP/2",
        )),
    }
}

async fn http1(worker: &Rc<WorkerContext>, socket: &Rc<ClientSocket>, limits: &ApiLimits) -> ConnectionEnd {
    let slot = RawResponseSlot::new(Rc::clone(socket), worker.pool.clone(), Rc::clone(&worker.dates));
    let hyper = || {
        let service = service(worker, socket, Some(&slot));
        Box::new(http1_settings(limits).serve_connection(TokioIo::new(socket.io()), service))
    };
    drive(&mut Http1Connection::new(Rc::clone(&slot), hyper), socket, limits).await
}

/// Built again for each new hyper connection, so that an open stream keeps no memory for it.
fn http1_settings(limits: &ApiLimits) -> http1::Builder {
    // Room for a head of the largest size; bodies pass frame by frame and never fill it.
    let room = usize::try_from(limits.header.0).unwrap_or(usize::MAX).max(8 << 10);
    let mut builder = http1::Builder::new();
    builder
        // The task below measures from the first byte of a head; hyper's timeout would also end idle connections.
        .header_read_timeout(None)
        .max_header_size(room)
        .max_buf_size(room.saturating_add(8 << 10))
        .writev(false);
    builder
}

async fn http2(worker: &Rc<WorkerContext>, socket: &Rc<ClientSocket>, limits: &ApiLimits) -> ConnectionEnd {
    socket.set_multiplexed();
    let service = service(worker, socket, None);
    let connection = http2::Builder::new(LocalExecutor)
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(limits.header.0).unwrap_or(u32::MAX))
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        // A slow client slows its engine; it does not fill the gateway's memory.
        .max_send_buf_size(64 << 10)
        .serve_connection(TokioIo::new(socket.io()), service);
    drive(&mut Box::pin(connection), socket, limits).await
}

/// The service that answers a connection's requests. `slot`: the slot in which a response is left for the connection's
/// task to take over; HTTP/2 has none.
fn service(
    worker: &Rc<WorkerContext>,
    socket: &Rc<ClientSocket>,
    slot: Option<&Rc<RawResponseSlot<ClientSocket, ClientResponseBody>>>,
) -> impl hyper::service::Service<
    Request<Incoming>,
    Response = Response<ClientResponseBody>,
    Error = Infallible,
    Future = impl Future<Output = Result<Response<ClientResponseBody>, Infallible>> + 'static,
> + 'static {
    let (worker, socket, slot) = (Rc::clone(worker), Rc::clone(socket), slot.map(Rc::clone));
    service_fn(move |request| {
        let slot = slot.as_ref().and_then(|slot| {
            let follows =
                worker.server.config.load().stream.bypass_hyper && bypass::accepts_chunked(&request);
            follows.then(|| (Rc::clone(slot), bypass::has_connection_close(request.headers())))
        });
        let old = request.version() == Version::HTTP_10;
        let answer = api::serve(&worker, &socket, request);
        let socket = Rc::clone(&socket);
        async move {
            let mut answer = answer.await;
            if socket.stage() > ShutdownStage::Serving && !socket.is_multiplexed() {
                answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            if old {
                bypass::mark_http10_close(&mut answer);
            }
            match slot {
                Some((slot, closes)) if answer.body().is_streaming() && bypass::needs_chunking(&answer) => {
                    slot.put(answer, closes);
                    std::future::pending().await
                }
                _ => Ok(answer),
            }
        }
    })
}

/// A connection with a known protocol.
trait ServerConnection {
    /// Ready when the connection is over.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>>;

    /// Ends the connection once running exchanges are done.
    fn close(&mut self);
}

impl<S> ServerConnection for Pin<Box<http2::Connection<TokioIo<HyperIo>, S, LocalExecutor>>>
where
    S: HttpService<Incoming, ResBody = ClientResponseBody, Error = Infallible>,
    S::Future: 'static,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        Future::poll(self.as_mut(), cx)
    }

    fn close(&mut self) {
        self.as_mut().graceful_shutdown();
    }
}

impl<S, H> ServerConnection for Http1Connection<ClientSocket, HyperIo, S, H>
where
    S: HttpService<Incoming, ResBody = ClientResponseBody, Error = Infallible>,
    H: Fn() -> Box<http1::Connection<TokioIo<HyperIo>, S>>,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        Self::poll(self, cx)
    }

    fn close(&mut self) {
        Self::close(self);
    }
}

/// Polls the connection and watches the socket until the connection is over.
async fn drive(
    connection: &mut impl ServerConnection,
    socket: &ClientSocket,
    limits: &ApiLimits,
) -> ConnectionEnd {
    let mut watch = ConnectionDeadlines::new(limits);
    let mut timer = pin!(tokio::time::sleep(limits.header_read.duration()));
    poll_fn(|cx| {
        socket.before_poll();
        if let Poll::Ready(result) = connection.poll(cx) {
            if result.is_err_and(|error| is_http2_violation(&error)) {
                socket.record_offence();
            }
            return Poll::Ready(ConnectionEnd::Closed);
        }
        if socket.poll_client_left(cx) {
            return Poll::Ready(ConnectionEnd::ClientLeft);
        }
        watch.note_same_task(socket.set_task(cx));
        // On HTTP/1.1 the next response carries `connection: close`, or the deadlines end an idle connection.
        let asks = if socket.is_multiplexed() { ShutdownStage::Draining } else { ShutdownStage::Terminating };
        if socket.stage() >= asks && watch.request_close() {
            connection.close();
            // The connection may be over at once.
            cx.waker().wake_by_ref();
        }
        match watch.poll(socket, timer.as_mut(), cx) {
            // A GOAWAY shows a client that sends another request at this moment whether the request was accepted.
            Poll::Ready(ConnectionEnd::Idle) if socket.is_multiplexed() && watch.request_close() => {
                connection.close();
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            end => end,
        }
    })
    .await
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
    limits: &ApiLimits,
    end: &ConnectionEnd,
) {
    let fault = match (end, socket.hyper_refusal(), socket.idle_state()) {
        // The error would land in the middle of a response that is still stuck.
        _ if socket.write_blocked_since().is_some() => None,
        (ConnectionEnd::Closed, Some(414 | 431), _) => Some(Fault::HeadersTooLarge { limit: limits.header }),
        (ConnectionEnd::Closed, Some(_), _) => Some(Fault::InvalidRequest {
            message: "the request's head is not valid HTTP".into(),
            param: None,
        }),
        (ConnectionEnd::SlowHead, _, IdleState::ReadingHead { .. }) if !socket.is_multiplexed() => {
            Some(Fault::RequestTimeout { what: "its head took longer than limits.headerRead".into() })
        }
        (ConnectionEnd::Plaintext, ..) => {
            Some(Fault::InvalidRequest { message: "this port speaks TLS: use https".into(), param: None })
        }
        _ => None,
    };
    if let Some(fault) = &fault {
        socket.record_offence();
        worker.server.metrics_sink.connection_rejected(openai::error::status(fault).as_u16());
        let answer = api::error_response_bytes(worker, fault);
        let written = tokio::time::timeout(LINGER_IO_TIMEOUT, socket.write_all(&answer)).await;
        if !matches!(written, Ok(Ok(()))) {
            return;
        }
    } else if matches!(end, ConnectionEnd::Idle) {
        // Nothing is cut off; under TLS the client gets a close notification.
        drop(tokio::time::timeout(LINGER_IO_TIMEOUT, socket.shutdown()).await);
        return;
    } else if !(matches!(end, ConnectionEnd::Closed) && socket.is_body_unread()) {
        return;
    }
    linger(socket).await;
}

/// Reads and discards everything that the client still sends. Closing the socket with unread bytes would reset the
/// connection, and the client would lose the answer with the reason.
async fn linger(socket: &ClientSocket) {
    let all = async {
        if socket.shutdown().await.is_err() {
            return;
        }
        while let Ok(Ok(true)) = tokio::time::timeout(LINGER_IO_TIMEOUT, socket.discard()).await {}
    };
    tokio::select! {
        () = all => {}
        () = socket.wait_for_stage(ShutdownStage::Terminating) => {}
        () = tokio::time::sleep(LINGER_TIMEOUT) => tracing::debug!("rejected client did not stop sending, closing the connection"),
    }
}

#[cfg(test)]
mod tests;
