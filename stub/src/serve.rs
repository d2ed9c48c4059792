//! Listeners for everything that is rare: orders, questions, watches.
//!
//! Not by axum's own server: that drops a call whose caller hangs up while it is carried out, and an order holds all the
//! same. What only makes sense for somebody who listens ends by [`Gone`].

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::{Duration, sleep},
};

/// How long a call's head may take, and a connection may be idle.
const HEAD: Duration = Duration::from_secs(60);
/// After an accept that failed for want of descriptors: the listener stays readable, so trying again at once would spin.
const BACK_OFF: Duration = Duration::from_millis(500);

/// Whether the other side of a connection has closed it, or at least its own half: an extension of each request.
#[derive(Clone, Debug)]
pub(crate) struct Gone(watch::Receiver<bool>);

impl Gone {
    /// Completes when it has.
    pub(crate) async fn wait(mut self) {
        // A connection that is over has no other side.
        drop(self.0.wait_for(|gone| *gone).await);
    }
}

/// A connection that notices its end, which hyper keeps to itself.
struct Noticed {
    stream: TcpStream,
    gone: watch::Sender<bool>,
}

impl AsyncRead for Noticed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buf));
        if buf.filled().len() == before {
            self.gone.send_replace(true);
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for Noticed {
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

/// Serves until `ends` says so, and what is under way then.
pub(crate) async fn serve(listener: TcpListener, router: Router, mut ends: watch::Receiver<bool>) {
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
                tracing::warn!(%error, "cannot accept a controller's connection");
                sleep(BACK_OFF).await;
                continue;
            }
        };
        drop(stream.set_nodelay(true));
        let (noticed, gone) = watch::channel(false);
        let router = router.clone().layer(Extension(Gone(gone)));
        let stream = Noticed { stream, gone: noticed };
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .half_close(true)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
        let connection = open.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a controller's connection broke");
            }
        });
    }
    drop(listener);
    open.shutdown().await;
}
