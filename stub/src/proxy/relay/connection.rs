//! One client's connection, until it is over. HTTP/1.1 only: that is what engines speak, and what the gateway speaks to
//! them.
//!
//! Whatever ends the connection drops hyper's side of it, and with it the exchange with the engine: there is no other
//! way in which one is cancelled.

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
use rouse::client::{Http1, Offer, offer};
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use super::{
    Core,
    exchange::{self, Reply},
    socket::Socket,
};

/// How long a connection may be idle, or a head may take. Longer than any gateway keeps one idle.
const REST: Duration = Duration::from_secs(75);
/// The gateway's own heads are no larger than this.
const HEAD: usize = 72 << 10;
/// The gateway takes 100 fields from its clients, and adds its own.
const FIELDS: usize = 128;
/// How long a client may take nothing: while its engine is in use anyhow, while others wait for it to be drained, and
/// when it has been cut already.
const STALL: Duration = Duration::from_secs(60);
const DRAINING_STALL: Duration = Duration::from_secs(5);
const CUT_STALL: Duration = Duration::from_millis(500);
/// How often such a client is looked at.
const COARSE: Duration = Duration::from_millis(500);
/// How long a client that was refused may go on sending what nobody reads, and how long it may pause.
const LINGER: Duration = Duration::from_secs(30);
const LINGER_PAUSE: Duration = Duration::from_secs(5);

enum End {
    /// hyper is done with it.
    Done,
    Left,
    Stalled,
}

pub(super) async fn serve(core: Rc<Core>, socket: Rc<Socket>) {
    let offer = Offer::<_, Reply>::new(Rc::clone(&socket), core.pool.clone(), Rc::clone(&core.dates));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(REST)
        .max_header_size(HEAD)
        .max_headers(FIELDS)
        .max_buf_size(HEAD + (8 << 10))
        .writev(false);
    let hyper = || {
        let (io, core) = (TokioIo::new(socket.io()), Rc::clone(&core));
        let (socket, offer) = (Rc::clone(&socket), Rc::clone(&offer));
        let service = service_fn(move |request| {
            let follows = offer::can_follow(&request).then(|| offer::closes(request.headers()));
            let old = request.version() == Version::HTTP_10;
            let (offer, answer) = (Rc::clone(&offer), exchange::serve(&core, &socket, request));
            async move {
                let (mut answer, whole) = answer.await;
                if old {
                    offer::close_behind(&mut answer);
                }
                match follows.filter(|_| whole && offer::is_open(&answer)) {
                    Some(closes) => {
                        offer.make(answer, closes);
                        pending().await
                    }
                    None => Ok::<_, Infallible>(answer),
                }
            }
        });
        Box::new(builder.serve_connection(io, service))
    };
    let mut http1 = Http1::new(Rc::clone(&offer), hyper);
    let (mut asked, mut stall) = (false, Stall::default());
    let end = poll_fn(|cx| {
        socket.before_poll();
        if http1.poll(cx).is_ready() {
            return Poll::Ready(End::Done);
        }
        if socket.poll_left(cx) {
            return Poll::Ready(End::Left);
        }
        if socket.closes(cx) && !asked {
            asked = true;
            http1.close();
            // It may be over at once.
            cx.waker().wake_by_ref();
        }
        stall.poll(&socket, cx)
    })
    .await;
    drop(http1);
    match end {
        End::Stalled => tracing::debug!("cut a client that took nothing"),
        End::Done if socket.is_unread() => linger(&socket).await,
        End::Done | End::Left => {}
    }
}

/// Looks at a client that takes nothing, from time to time.
#[derive(Default)]
struct Stall(Option<Pin<Box<Sleep>>>);

impl Stall {
    fn poll(&mut self, socket: &Socket, cx: &mut Context<'_>) -> Poll<End> {
        let Some(since) = socket.blocked() else {
            self.0 = None;
            return Poll::Pending;
        };
        let timer = self.0.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + COARSE)));
        while timer.as_mut().poll(cx).is_ready() {
            let most = match socket.life() {
                Some(life) if life.gate.revoked().is_some() => CUT_STALL,
                Some(life) if !life.gate.is_open() => DRAINING_STALL,
                _ => STALL,
            };
            let now = Instant::now();
            if since + most <= now {
                return Poll::Ready(End::Stalled);
            }
            timer.as_mut().reset(now + COARSE);
        }
        Poll::Pending
    }
}

/// Takes and forgets what the client still sends. Closing the socket with unread bytes in it would reset the
/// connection, and the client would lose the answer that says why.
async fn linger(socket: &Socket) {
    let all = async {
        if socket.shutdown().await.is_ok() {
            while let Ok(Ok(true)) = timeout(LINGER_PAUSE, socket.discard()).await {}
        }
    };
    drop(timeout(LINGER, all).await);
}
