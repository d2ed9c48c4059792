//! Measures the CPU cost of one request and one streamed event of the connection loop, against hyper's server.
//!
//! One thread serves, and another one holds all the clients. Both servers run in the same process, in turns, with the
//! same service and the same clients over loopback. The serving thread's CPU time comes from the kernel
//! (`/proc/thread-self/schedstat`), so other load on the machine has little effect. The least of all rounds counts.
//! Figures of an unoptimized build are meaningless.
//!
//! ```sh
//! cargo run --release -p rouse-net --example server_cost
//! ```

#[path = "common/loopback.rs"]
mod loopback;

use std::{
    cell::RefCell,
    convert::Infallible,
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use rouse_net::{
    relay::{ConnectionPool, ScratchFrame},
    server::{DateCache, Http1Connection, Http1Limits, Http1RequestBody, ScratchBody, ServerIo},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    runtime::{Builder, Runtime},
    task::spawn_local,
    time::{Instant, Sleep, sleep},
};

use loopback::{ClientLoad, serve_clients};

const ROUNDS: usize = 5;
const CLIENTS: usize = 64;
const REQUESTS: usize = 1000;
const STREAMS: usize = 200;
const EVENTS: usize = 250;
const PACE: Duration = Duration::from_millis(20);

const HEAD: &str = "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway.example:8080\r\n\
                    user-agent: OpenAI/Python 2.1.0\r\n\
                    accept: application/json\r\ncontent-type: application/json\r\n\
                    authorization: Bearer sk-0123456789abcdef0123456789abcdef\r\n";
const REQUEST_BYTES: usize = 1024;
const ANSWER: &[u8] = &[b'x'; 600];
const EVENT: &[u8] = &[b'e'; 200];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServerKind {
    Hyper,
    Loop,
}

fn main() -> anyhow::Result<()> {
    let load = Builder::new_current_thread().enable_all().build()?;
    for (unit, clients, requests, events) in
        [("request", CLIENTS, REQUESTS, 0), ("event", STREAMS, 1, EVENTS)]
    {
        let units = (clients * requests * events.max(1)) as f64;
        let mut least = [f64::INFINITY; 2];
        for _ in 0..ROUNDS {
            for (kind, least) in [ServerKind::Hyper, ServerKind::Loop].into_iter().zip(&mut least) {
                let spent = run(&load, kind, clients, requests, events)?;
                *least = least.min(spent.as_secs_f64() * 1e6 / units);
            }
        }
        let [hyper, own] = least;
        println!(
            "{unit}: hyper {hyper:.2} us, the loop {own:.2} us of CPU, {:.2} times hyper's",
            own / hyper
        );
    }
    Ok(())
}

/// Runs one server and its clients, and returns the CPU time of serving.
fn run(
    load: &Runtime,
    kind: ServerKind,
    clients: usize,
    requests: usize,
    events: usize,
) -> anyhow::Result<Duration> {
    let clients = ClientLoad {
        clients,
        requests,
        request: format!("{HEAD}content-length: {REQUEST_BYTES}\r\n\r\n{}", "x".repeat(REQUEST_BYTES)),
        response_end: if events > 0 { b"0\r\n\r\n" } else { ANSWER },
    };
    serve_clients(load, clients, move || {
        let (pool, dates) = (ConnectionPool::default(), Rc::new(DateCache::default()));
        move |socket: TcpStream| match kind {
            ServerKind::Hyper => drop(spawn_local(serve_by_hyper(socket, events))),
            ServerKind::Loop => {
                drop(spawn_local(serve_by_loop(socket, events, pool.clone(), Rc::clone(&dates))));
            }
        }
    })
}

async fn serve_by_hyper(socket: TcpStream, events: usize) {
    let service = service_fn(move |request: Request<Incoming>| async move {
        Ok::<_, Infallible>(answer(request, events).await)
    });
    let connection = http1::Builder::new()
        .writev(false)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(socket), service);
    drop(connection.await);
}

async fn serve_by_loop(socket: TcpStream, events: usize, pool: ConnectionPool, dates: Rc<DateCache>) {
    let peer = Rc::new(Socket(RefCell::new(socket)));
    let service = move |request: Request<Http1RequestBody<Socket>>| answer(request, events);
    let mut connection = Http1Connection::new(peer, service, Http1Limits::default(), pool, dates);
    drop(std::future::poll_fn(|cx| connection.poll(cx)).await);
}

/// Answers a request once its body was read, with a text or with events.
async fn answer<B: Body<Data = Bytes, Error: std::fmt::Debug>>(
    request: Request<B>,
    events: usize,
) -> Response<Answer> {
    let body = request.into_body().collect().await.map(http_body_util::Collected::to_bytes);
    if body.map_or(0, |body| body.len()) != REQUEST_BYTES {
        return Response::new(Answer::Text(None));
    }
    Response::new(match events {
        0 => Answer::Text(Some(Bytes::from_static(ANSWER))),
        left => Answer::Events { left, pace: Box::pin(sleep(PACE)) },
    })
}

/// The body of a response.
enum Answer {
    Text(Option<Bytes>),
    Events { left: usize, pace: Pin<Box<Sleep>> },
}

impl Answer {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<&'static [u8]>> {
        match self {
            Self::Text(text) => Poll::Ready(text.take().map(|_| ANSWER)),
            Self::Events { left: 0, .. } => Poll::Ready(None),
            Self::Events { left, pace } => {
                ready!(pace.as_mut().poll(cx));
                pace.as_mut().reset(Instant::now() + PACE);
                *left -= 1;
                Poll::Ready(Some(EVENT))
            }
        }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = ready!(self.poll_next(cx));
        Poll::Ready(next.map(|bytes| Ok(Frame::data(Bytes::from_static(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Text(None) | Self::Events { left: 0, .. })
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Text(text) => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
            Self::Events { .. } => SizeHint::default(),
        }
    }
}

impl ScratchBody for Answer {
    /// As the gateway: events come from an engine, and are read into the core's memory.
    fn uses_scratch(&self) -> bool {
        matches!(self, Self::Events { .. })
    }

    fn poll_frame_into(
        &mut self,
        memory: Option<&mut [u8]>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<ScratchFrame, Infallible>>> {
        let next = ready!(self.poll_next(cx));
        Poll::Ready(next.map(|bytes| {
            Ok(match memory.and_then(|memory| memory.get_mut(..bytes.len())) {
                Some(room) => {
                    room.copy_from_slice(bytes);
                    ScratchFrame::InScratch(0..bytes.len())
                }
                None => ScratchFrame::Owned(Bytes::from_static(bytes)),
            })
        }))
    }
}

/// A client's socket.
struct Socket(RefCell<TcpStream>);

impl ServerIo for Socket {
    fn poll_read(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_read(cx, buf)
    }

    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_write(cx, bytes)
    }

    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_flush(cx)
    }

    fn poll_shutdown(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_shutdown(cx)
    }
}
