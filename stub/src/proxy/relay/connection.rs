//! Serves one client connection until it ends. HTTP/1.1 only, which engines and the gateway speak.
//!
//! Every end of the connection drops hyper's side of it, and with it the exchange with the engine. An exchange is
//! cancelled in no other way.

use std::{
    convert::Infallible,
    future::{pending, poll_fn},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
    time::Duration,
};

use http::Version;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use rouse_net::downstream::{Http1Connection, RawResponseSlot, bypass};
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use super::{
    RelayThreadContext,
    exchange::{self, RelayReplyBody},
    socket::RelaySocket,
};

/// Longest idle time of a connection, and longest time for a head. Longer than any gateway keeps an idle connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);
/// The gateway's own heads are no larger than this.
const MAX_HEAD_BYTES: usize = 72 << 10;
/// The gateway accepts 100 fields from its clients and adds its own.
const MAX_HEADER_FIELDS: usize = 128;
/// How long a client may accept no bytes: while its gate is open, while its engine drains, and after its request was
/// cut.
const WRITE_STALL_TIMEOUT: Duration = Duration::from_secs(60);
const DRAINING_WRITE_STALL_TIMEOUT: Duration = Duration::from_secs(5);
const CUT_WRITE_STALL_TIMEOUT: Duration = Duration::from_millis(500);
/// How often a stalled client is checked.
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// How long a refused client may keep sending, and how long it may pause.
const LINGER_TIMEOUT: Duration = Duration::from_secs(30);
const LINGER_IDLE_TIMEOUT: Duration = Duration::from_secs(5);

enum RelayConnectionEnd {
    /// hyper has finished.
    Done,
    ClientLeft,
    Stalled,
}

pub(super) async fn serve(context: Rc<RelayThreadContext>, socket: Rc<RelaySocket>) {
    let slot = RawResponseSlot::<_, RelayReplyBody>::new(
        Rc::clone(&socket),
        context.pool.clone(),
        Rc::clone(&context.dates),
    );
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .max_header_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADER_FIELDS)
        .max_buf_size(MAX_HEAD_BYTES + (8 << 10))
        .writev(false);
    let hyper = || {
        let (io, context) = (TokioIo::new(socket.io()), Rc::clone(&context));
        let (socket, slot) = (Rc::clone(&socket), Rc::clone(&slot));
        let service = service_fn(move |request| {
            let follows =
                bypass::accepts_chunked(&request).then(|| bypass::has_connection_close(request.headers()));
            let old = request.version() == Version::HTTP_10;
            let (slot, answer) = (Rc::clone(&slot), exchange::serve(&context, &socket, request));
            async move {
                let (mut answer, whole) = answer.await;
                if old {
                    bypass::mark_http10_close(&mut answer);
                }
                match follows.filter(|_| whole && bypass::needs_chunking(&answer)) {
                    Some(closes) => {
                        slot.put(answer, closes);
                        pending().await
                    }
                    None => Ok::<_, Infallible>(answer),
                }
            }
        });
        Box::new(builder.serve_connection(io, service))
    };
    let mut http1 = Http1Connection::new(Rc::clone(&slot), hyper);
    let (mut asked, mut stall) = (false, WriteStallTimer::default());
    let end = poll_fn(|cx| {
        socket.before_poll();
        if http1.poll(cx).is_ready() {
            return Poll::Ready(RelayConnectionEnd::Done);
        }
        if socket.poll_client_left(cx) {
            return Poll::Ready(RelayConnectionEnd::ClientLeft);
        }
        if socket.is_closing(cx) && !asked {
            asked = true;
            http1.close();
            // hyper may have finished at once.
            cx.waker().wake_by_ref();
        }
        stall.poll(&socket, cx)
    })
    .await;
    drop(http1);
    match end {
        RelayConnectionEnd::Stalled => {
            tracing::debug!("closed a client connection: the client stopped reading")
        }
        RelayConnectionEnd::Done if socket.is_body_unread() => linger(&socket).await,
        RelayConnectionEnd::Done | RelayConnectionEnd::ClientLeft => {}
    }
}

/// Checks a stalled client periodically.
#[derive(Default)]
struct WriteStallTimer(Option<Pin<Box<Sleep>>>);

impl WriteStallTimer {
    fn poll(&mut self, socket: &RelaySocket, cx: &mut Context<'_>) -> Poll<RelayConnectionEnd> {
        let Some(since) = socket.blocked_since() else {
            self.0 = None;
            return Poll::Pending;
        };
        let timer =
            self.0.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + STALL_CHECK_INTERVAL)));
        while timer.as_mut().poll(cx).is_ready() {
            let stall_timeout = match socket.gate_generation() {
                Some(generation) if generation.gate.revoked().is_some() => CUT_WRITE_STALL_TIMEOUT,
                Some(generation) if !generation.gate.is_open() => DRAINING_WRITE_STALL_TIMEOUT,
                _ => WRITE_STALL_TIMEOUT,
            };
            let now = Instant::now();
            if since + stall_timeout <= now {
                return Poll::Ready(RelayConnectionEnd::Stalled);
            }
            timer.as_mut().reset(now + STALL_CHECK_INTERVAL);
        }
        Poll::Pending
    }
}

/// Discards what the client still sends. Closing the socket with unread bytes would reset the connection, and the
/// client would lose the response with the reason.
async fn linger(socket: &RelaySocket) {
    let all = async {
        if socket.shutdown().await.is_ok() {
            while let Ok(Ok(true)) = timeout(LINGER_IDLE_TIMEOUT, socket.discard()).await {}
        }
    };
    drop(timeout(LINGER_TIMEOUT, all).await);
}
