//! One client's connection, from its first byte until nobody can write to it any more.
//!
//! The task here owns hyper's connection and looks at the socket beside it: after each poll of hyper it asks whether
//! the client left, and one timer that is set as rarely as possible looks at everything that must not last (a head in
//! dribs, idleness, a client that takes nothing). When one of them ends the connection, hyper's side is dropped, and
//! with it every future and body that served the client: there is no other way in which an exchange is cancelled.

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
use rouse::{
    client::{Http1, Offer, offer},
    fault::Fault,
    openai,
};
use tokio::time::Instant;

use super::{
    Stage,
    socket::{Io, Rest, Socket},
    tls::{self, Handshakes, Opened},
};
use crate::{
    config::Limits,
    http::{self as api, Core, reply::Reply},
};

mod watch;

use watch::Watch;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How much of a request's time limits may be late, and how often a stalled client is looked at.
const COARSE: Duration = Duration::from_secs(1);
/// A client may stall no longer than this while its engine drains for others, nor a handshake while the gateway does.
const DRAINING_STALL: Duration = Duration::from_secs(5);
/// Exchanges at a time on one HTTP/2 connection.
const STREAMS: u32 = 256;
/// Streams that a client resets before they were looked at; beyond, its connection ends. Half of [`STREAMS`]: a client
/// that gives up a whole batch is no flood.
const RESETS: usize = 128;
/// How long a client that was refused before it had sent everything may go on sending, and how long it may pause.
const LINGER: Duration = Duration::from_secs(30);
const LINGER_PAUSE: Duration = Duration::from_secs(5);

/// Why a connection is over.
enum End {
    /// It broke, or the gateway drains, before anything of it was heard: there is nothing to say.
    Unbegun,
    /// hyper is done with it: closed by either side, or broken.
    Done,
    Left,
    /// Its first or next head did not come in time.
    SlowHead,
    Idle,
    Stalled,
    /// It does not speak TLS, on a port that does.
    Plaintext,
    /// The gateway goes.
    Ending,
}

/// Runs HTTP/2's streams on this core.
#[derive(Clone, Copy)]
pub(crate) struct Here;

impl<F: Future + 'static> hyper::rt::Executor<F> for Here
where
    F::Output: 'static,
{
    fn execute(&self, future: F) {
        tokio::task::spawn_local(future);
    }
}

/// What a connection was found to carry.
enum Protocol {
    Http1,
    Http2,
    Plaintext,
}

/// Serves the connection until it is over. `handshakes`: it begins with one.
pub(super) async fn serve(core: &Rc<Core>, socket: &Rc<Socket>, handshakes: Option<&Handshakes>) {
    let limits = core.shared.config.load().limits;
    // What happens before its first request and after its last one is in memory of its own: an open stream has none of it.
    let opened = Box::pin(open(core, socket, &limits, handshakes)).await;
    let end = match opened {
        Err(end) => end,
        Ok(Protocol::Plaintext) => End::Plaintext,
        Ok(Protocol::Http2) => Box::pin(http2(core, socket, &limits)).await,
        Ok(Protocol::Http1) => http1(core, socket, &limits).await,
    };
    Box::pin(finish(core, socket, &limits, &end)).await;
}

/// What the connection carries, or why it is over before that was known.
async fn open(
    core: &Core,
    socket: &Socket,
    limits: &Limits,
    handshakes: Option<&Handshakes>,
) -> Result<Protocol, End> {
    let step = Cell::new((Instant::now(), COARSE));
    let begun = tokio::time::timeout(limits.header_read.duration(), begin(core, socket, handshakes, &step));
    let gone = async {
        socket.until(Stage::Draining).await;
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
    let begun = tokio::select! {
        biased;
        begun = begun => begun,
        () = gone => return Err(End::Unbegun),
    };
    match begun {
        Err(_) => Err(End::SlowHead),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a connection that did not begin");
            if tls::offends(&error) {
                socket.offends();
            }
            Err(End::Unbegun)
        }
        Ok(Ok(protocol)) => Ok(protocol),
    }
}

/// The handshake, where there is one, and as much of what follows as tells HTTP/2 from HTTP/1.1. `step`: when the last
/// part of that began, and how long it may last while the gateway drains.
async fn begin(
    core: &Core,
    socket: &Socket,
    handshakes: Option<&Handshakes>,
    step: &Cell<(Instant, Duration)>,
) -> io::Result<Protocol> {
    let mut agreed = None;
    if let Some(handshakes) = handshakes {
        let identity = core.shared.config.load().tls.as_ref().and_then(|tls| tls.identity.clone());
        let (Some(identity), Some(wire)) = (identity, socket.take_wire()) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        wire.first_byte().await?;
        // From here on it may wait for us as well: for its turn behind a crowd of others.
        step.set((Instant::now(), DRAINING_STALL));
        let opened = handshakes.open(wire, Arc::clone(&identity.clients)).await?;
        step.set((Instant::now(), COARSE));
        match opened {
            Opened::Secure { stream, http2 } => {
                socket.give_back(stream);
                agreed = Some(http2);
            }
            Opened::Plain(stream) => {
                socket.give_back(stream);
                return Ok(Protocol::Plaintext);
            }
        }
    }
    if agreed == Some(true) {
        // From here on there is no place for a text of HTTP/1.1.
        socket.set_multiplexed();
    }
    // Waited for also where it can only be HTTP/1.1: once the gateway drains, hyper closes what sent nothing yet, and
    // the first request may be on its way.
    match (poll_fn(|cx| socket.poll_starts_with(cx, PREFACE)).await?, agreed) {
        (_, Some(false)) | (false, None) => Ok(Protocol::Http1),
        (true, _) => Ok(Protocol::Http2),
        (false, Some(_)) => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "HTTP/2 was agreed on and is not spoken"))
        }
    }
}

async fn http1(core: &Rc<Core>, socket: &Rc<Socket>, limits: &Limits) -> End {
    let offer = Offer::new(Rc::clone(socket), core.pool.clone(), Rc::clone(&core.dates));
    let hyper = || {
        let service = service(core, socket, Some(&offer));
        Box::new(settings(limits).serve_connection(TokioIo::new(socket.io()), service))
    };
    drive(&mut Http1::new(Rc::clone(&offer), hyper), socket, limits).await
}

/// Made anew when hyper is: an open stream needs none.
fn settings(limits: &Limits) -> http1::Builder {
    // Room for a head of the largest size; bodies are passed on frame by frame and never fill it.
    let room = usize::try_from(limits.header.0).unwrap_or(usize::MAX).max(8 << 10);
    let mut builder = http1::Builder::new();
    builder
        // Measured from the first byte of a head by the task below; hyper's would also end idle connections.
        .header_read_timeout(None)
        .max_header_size(room)
        .max_buf_size(room.saturating_add(8 << 10))
        .writev(false);
    builder
}

async fn http2(core: &Rc<Core>, socket: &Rc<Socket>, limits: &Limits) -> End {
    socket.set_multiplexed();
    let service = service(core, socket, None);
    let connection = http2::Builder::new(Here)
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(limits.header.0).unwrap_or(u32::MAX))
        .max_concurrent_streams(STREAMS)
        .max_pending_accept_reset_streams(RESETS)
        // A slow client slows its engine; it does not fill our memory.
        .max_send_buf_size(64 << 10)
        .serve_connection(TokioIo::new(socket.io()), service);
    drive(&mut Box::pin(connection), socket, limits).await
}

/// Answers the requests of a connection. `offer`: where an answer may be kept back for the connection's task to take over;
/// on HTTP/2 there is no such thing.
fn service(
    core: &Rc<Core>,
    socket: &Rc<Socket>,
    offer: Option<&Rc<Offer<Socket, Reply>>>,
) -> impl hyper::service::Service<
    Request<Incoming>,
    Response = Response<Reply>,
    Error = Infallible,
    Future = impl Future<Output = Result<Response<Reply>, Infallible>> + 'static,
> + 'static {
    let (core, socket, offer) = (Rc::clone(core), Rc::clone(socket), offer.map(Rc::clone));
    service_fn(move |request| {
        let offer = offer.as_ref().and_then(|offer| {
            let follows = core.shared.config.load().stream.take_over && offer::can_follow(&request);
            follows.then(|| (Rc::clone(offer), offer::closes(request.headers())))
        });
        let old = request.version() == Version::HTTP_10;
        let answer = api::serve(&core, &socket, request);
        let socket = Rc::clone(&socket);
        async move {
            let mut answer = answer.await;
            if socket.stage() > Stage::Serving && !socket.is_multiplexed() {
                answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            if old {
                offer::close_behind(&mut answer);
            }
            match offer {
                Some((offer, closes)) if answer.body().is_live() && offer::is_open(&answer) => {
                    offer.make(answer, closes);
                    std::future::pending().await
                }
                _ => Ok(answer),
            }
        }
    })
}

/// What serves a connection once its protocol is known.
trait Serves {
    /// Ready when it is over.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>>;

    /// Ends it when what is under way is done.
    fn close(&mut self);
}

impl<S> Serves for Pin<Box<http2::Connection<TokioIo<Io>, S, Here>>>
where
    S: HttpService<Incoming, ResBody = Reply, Error = Infallible>,
    S::Future: 'static,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        Future::poll(self.as_mut(), cx)
    }

    fn close(&mut self) {
        self.as_mut().graceful_shutdown();
    }
}

impl<S, H> Serves for Http1<Socket, Io, S, H>
where
    S: HttpService<Incoming, ResBody = Reply, Error = Infallible>,
    H: Fn() -> Box<http1::Connection<TokioIo<Io>, S>>,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        Self::poll(self, cx)
    }

    fn close(&mut self) {
        Self::close(self);
    }
}

/// Polls what serves the connection and looks at the socket until it is over.
async fn drive(connection: &mut impl Serves, socket: &Socket, limits: &Limits) -> End {
    let mut watch = Watch::new(limits);
    let mut timer = pin!(tokio::time::sleep(limits.header_read.duration()));
    poll_fn(|cx| {
        socket.before_poll();
        if let Poll::Ready(result) = connection.poll(cx) {
            if result.is_err_and(|error| breaks_http2(&error)) {
                socket.offends();
            }
            return Poll::Ready(End::Done);
        }
        if socket.poll_left(cx) {
            return Poll::Ready(End::Left);
        }
        watch.is_of(socket.wake_with(cx));
        // On HTTP/1.1 the next answer says it, or the watch does when there is none.
        let asks = if socket.is_multiplexed() { Stage::Draining } else { Stage::Ending };
        if socket.stage() >= asks && watch.asks() {
            connection.close();
            // It may be over at once.
            cx.waker().wake_by_ref();
        }
        match watch.poll(socket, timer.as_mut(), cx) {
            // A client that asks for more at this very moment is told whether it was heard, by a GOAWAY.
            Poll::Ready(End::Idle) if socket.is_multiplexed() && watch.asks() => {
                connection.close();
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            end => end,
        }
    })
    .await
}

/// The connection was ended by us for what its client did to HTTP/2: frames that are none, or floods of resets. What the
/// client says that we did, or a connection that breaks, is something else.
fn breaks_http2(error: &hyper::Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<h2::Error>());
    cause.is_some_and(|cause| {
        cause.is_go_away() && cause.is_library() && cause.reason() != Some(h2::Reason::NO_ERROR)
    })
}

/// Says what is left to say to the client, and lets it read it.
async fn finish(core: &Core, socket: &Socket, limits: &Limits, end: &End) {
    let fault = match (end, socket.refused(), socket.rest()) {
        // It would stand in the middle of the answer that is still stuck.
        _ if socket.write_blocked().is_some() => None,
        (End::Done, Some(414 | 431), _) => Some(Fault::HeadersTooLarge { limit: limits.header }),
        (End::Done, Some(_), _) => Some(Fault::InvalidRequest {
            message: "the request's head is not valid HTTP".into(),
            param: None,
        }),
        (End::SlowHead, _, Rest::Head { .. }) if !socket.is_multiplexed() => {
            Some(Fault::RequestTimeout { what: "its head took longer than limits.headerRead".into() })
        }
        (End::Plaintext, ..) => {
            Some(Fault::InvalidRequest { message: "this port speaks TLS: use https".into(), param: None })
        }
        _ => None,
    };
    if let Some(fault) = &fault {
        socket.offends();
        core.shared.meter.refused(openai::error::status(fault).as_u16());
        let answer = api::bare(core, fault);
        let written = tokio::time::timeout(LINGER_PAUSE, socket.write_all(&answer)).await;
        if !matches!(written, Ok(Ok(()))) {
            return;
        }
    } else if matches!(end, End::Idle) {
        // Nothing is cut off: under TLS the client is told so.
        drop(tokio::time::timeout(LINGER_PAUSE, socket.shutdown()).await);
        return;
    } else if !(matches!(end, End::Done) && socket.is_unread()) {
        return;
    }
    linger(socket).await;
}

/// Takes and forgets what the client still sends. Closing the socket with unread bytes in it would reset the
/// connection, and the client would lose the answer that says why.
async fn linger(socket: &Socket) {
    let all = async {
        if socket.shutdown().await.is_err() {
            return;
        }
        while let Ok(Ok(true)) = tokio::time::timeout(LINGER_PAUSE, socket.discard()).await {}
    };
    tokio::select! {
        () = all => {}
        () = socket.until(Stage::Ending) => {}
        () = tokio::time::sleep(LINGER) => tracing::debug!("a refused client did not stop sending"),
    }
}

#[cfg(test)]
mod tests;
