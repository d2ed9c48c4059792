//! HTTP servers for infrequent requests: orders, queries, watches.
//!
//! Not axum's own server, which drops a handler when its caller disconnects: an order must complete all the same.
//! Handlers that serve only a connected caller end by [`PeerDisconnect`].

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::{BoxError, Extension, Router, body::Body, extract::Request, middleware};
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    time::{Duration, Instant, Sleep, sleep},
};

/// Longest time for a request head, and longest idle time of a connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Limits of each listener. A leader and a kubelet have a few connections each, and a launcher has one more for each
/// watcher.
const DEFAULT_LIMITS: HttpServerLimits =
    HttpServerLimits { max_connections: 256, body_idle_timeout: Duration::from_secs(30) };
/// Pause after a failed accept, for example without free descriptors. The listener stays readable, so an immediate
/// retry would spin.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug)]
struct HttpServerLimits {
    /// Concurrent connections. Further ones wait in the kernel's queue until one ends.
    max_connections: usize,
    /// Longest pause within a request body.
    body_idle_timeout: Duration,
}

/// A body that fails when its sender pauses too long. Otherwise a silent sender would hold its connection.
struct IdleTimeoutBody {
    body: Body,
    idle_timeout: Duration,
    idle_timer: Pin<Box<Sleep>>,
}

/// Whether the peer has closed the connection or its sending half. An extension of each request.
#[derive(Clone, Debug)]
pub(crate) struct PeerDisconnect(watch::Receiver<bool>);

impl PeerDisconnect {
    /// Completes when the peer has disconnected.
    pub(crate) async fn wait(mut self) {
        // An error means that the connection itself has ended.
        drop(self.0.wait_for(|disconnected| *disconnected).await);
    }
}

/// A connection that reports the peer's end of stream, which hyper keeps to itself.
struct EofDetectingStream {
    stream: TcpStream,
    eof_tx: watch::Sender<bool>,
}

impl AsyncRead for EofDetectingStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buf));
        if buf.filled().len() == before {
            self.eof_tx.send_replace(true);
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for EofDetectingStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl IdleTimeoutBody {
    fn new(body: Body, pause: Duration) -> Self {
        Self { body, idle_timeout: pause, idle_timer: Box::pin(sleep(pause)) }
    }
}

impl HttpBody for IdleTimeoutBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else {
            ready!(self.idle_timer.as_mut().poll(cx));
            let message = format!("no byte of the body arrived for {} s", self.idle_timeout.as_secs());
            return Poll::Ready(Some(Err(message.into())));
        };
        let next = Instant::now() + self.idle_timeout;
        self.idle_timer.as_mut().reset(next);
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Serves until `ends` is true, then finishes the requests in flight.
pub(crate) async fn serve(listener: TcpListener, router: Router, ends: watch::Receiver<bool>) {
    serve_with_limits(listener, router, ends, DEFAULT_LIMITS).await;
}

async fn serve_with_limits(
    listener: TcpListener,
    router: Router,
    mut ends: watch::Receiver<bool>,
    limits: HttpServerLimits,
) {
    let router = router.layer(middleware::map_request(move |request: Request| async move {
        request.map(|body| Body::new(IdleTimeoutBody::new(body, limits.body_idle_timeout)))
    }));
    let permits = Arc::new(Semaphore::new(limits.max_connections));
    let open = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            biased;
            _ = ends.wait_for(|ends| *ends) => break,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "accepting a controller's connection failed, retrying");
                sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        let permit = tokio::select! {
            biased;
            _ = ends.wait_for(|ends| *ends) => break,
            place = Arc::clone(&permits).acquire_owned() => place,
        };
        drop(stream.set_nodelay(true));
        let (eof_tx, eof_rx) = watch::channel(false);
        let router = router.clone().layer(Extension(PeerDisconnect(eof_rx)));
        let stream = EofDetectingStream { stream, eof_tx };
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .half_close(true)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
        let connection = open.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a controller's connection broke");
            }
            drop(permit);
        });
    }
    drop(listener);
    open.shutdown().await;
}

#[cfg(test)]
mod tests {
    use axum::routing::post;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        time::timeout,
    };

    use super::*;

    /// Longer than any step takes on a busy machine; it only bounds a failure.
    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    /// A head that announces a body of one byte.
    const HEAD: &[u8] = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n";

    async fn status(stream: &mut TcpStream) -> String {
        let mut line = [0; 12];
        timeout(TEST_TIMEOUT, stream.read_exact(&mut line)).await.expect("it is answered").unwrap();
        String::from_utf8_lossy(&line).into_owned()
    }

    async fn start_server(limits: HttpServerLimits) -> (std::net::SocketAddr, watch::Sender<bool>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (over, ends) = watch::channel(false);
        let router = Router::new().route("/", post(async |body: Bytes| body));
        tokio::spawn(serve_with_limits(listener, router, ends, limits));
        (address, over)
    }

    #[tokio::test]
    async fn a_body_that_never_comes_is_not_waited_for_without_end() {
        let (address, _over) =
            start_server(HttpServerLimits { body_idle_timeout: Duration::from_millis(50), ..DEFAULT_LIMITS })
                .await;
        let mut late = TcpStream::connect(address).await.unwrap();
        late.write_all(HEAD).await.unwrap();
        assert_eq!(status(&mut late).await, "HTTP/1.1 400");
        // The server closes the connection without further bytes.
        timeout(TEST_TIMEOUT, late.read_to_end(&mut Vec::new())).await.expect("it is closed").unwrap();
        let mut prompt = TcpStream::connect(address).await.unwrap();
        prompt.write_all(&[HEAD, b"x"].concat()).await.unwrap();
        assert_eq!(status(&mut prompt).await, "HTTP/1.1 200");
    }

    #[tokio::test]
    async fn so_many_connections_are_served_and_the_next_when_one_has_ended() {
        let (address, over) = start_server(HttpServerLimits { max_connections: 1, ..DEFAULT_LIMITS }).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        first.write_all(&[HEAD, b"x"].concat()).await.unwrap();
        assert_eq!(status(&mut first).await, "HTTP/1.1 200");
        let mut second = TcpStream::connect(address).await.unwrap();
        second.write_all(&[HEAD, b"x"].concat()).await.unwrap();
        let early = timeout(Duration::from_millis(100), second.readable()).await;
        assert!(early.is_err(), "two are served");
        drop(first);
        assert_eq!(status(&mut second).await, "HTTP/1.1 200");
        // The shutdown does not wait for a free permit.
        let mut third = TcpStream::connect(address).await.unwrap();
        third.write_all(HEAD).await.unwrap();
        over.send_replace(true);
        timeout(TEST_TIMEOUT, third.read_to_end(&mut Vec::new())).await.expect("it is closed").ok();
    }
}
