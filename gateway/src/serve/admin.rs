//! The operators' listener, on the control runtime. HTTP/1.1 only; few connections, none of them on a request's way. With
//! TLS, handshakes are made elsewhere: the driver runs here.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use rouse::client::Wire;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Notify, watch},
};

use super::{
    Error, Stage, listener,
    stream::Stream,
    tls::{Handshakes, Opened},
};
use crate::{
    config::Config,
    http::admin::{self, Parts},
};

/// From a connection's first byte to the end of a request's head; also how long a connection may be idle.
const HEAD: Duration = Duration::from_secs(30);
/// After an accept that failed for want of descriptors.
const BACK_OFF: Duration = Duration::from_millis(500);

/// The bound listener.
pub struct Admin {
    address: SocketAddr,
    listener: std::net::TcpListener,
    parts: Parts,
    handshakes: Option<Arc<Handshakes>>,
}

impl Admin {
    pub fn bind(address: SocketAddr, parts: Parts) -> Result<Self, Error> {
        let listener = listener::bind_one(address)?;
        let address = listener.local_addr().map_err(|source| Error::Bind { address, source })?;
        let config = parts.config.load();
        let handshakes = if config.admin.tls { Handshakes::of(config.tls.as_ref(), 1)? } else { None };
        drop(config);
        Ok(Self { address, listener, parts, handshakes: handshakes.map(Arc::new) })
    }

    /// Where it listens, with the port that was given for port 0.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until [`Stage::Ending`], so that a drain can be watched. What is still open then ends with the runtime.
    pub async fn run(self, mut stage: watch::Receiver<Stage>) -> Result<(), Error> {
        let listener = TcpListener::from_std(self.listener).map_err(|error| Error::Ended("admin", error))?;
        let config = Arc::clone(&self.parts.config);
        let service = admin::Service::new(self.parts, stage.clone());
        let closed = Arc::new(Notify::new());
        loop {
            let accepted = tokio::select! {
                biased;
                _ = stage.wait_for(|stage| *stage == Stage::Ending) => return Ok(()),
                accepted = listener.accept() => accepted,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an operator's connection");
                    drop(tokio::time::timeout(BACK_OFF, closed.notified()).await);
                    continue;
                }
            };
            let (service, closed) = (service.clone(), Arc::clone(&closed));
            let (handshakes, config) = (self.handshakes.clone(), Arc::clone(&config));
            tokio::spawn(async move {
                let Some(stream) = opened(stream, handshakes.as_deref(), &config).await else {
                    closed.notify_waiters();
                    return;
                };
                let answer = service_fn(move |request| {
                    let service = service.clone();
                    async move { Ok::<_, Infallible>(service.answer(request, peer).await) }
                });
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD)
                    .serve_connection(TokioIo::new(stream), answer);
                if let Err(error) = connection.await {
                    tracing::debug!(%error, %peer, "an operator's connection broke");
                }
                closed.notify_waiters();
            });
        }
    }
}

/// The connection after its handshake, where there is one.
async fn opened(
    stream: TcpStream,
    handshakes: Option<&Handshakes>,
    config: &ArcSwap<Config>,
) -> Option<Stream> {
    let Some(handshakes) = handshakes else { return Some(Stream::plain(stream)) };
    let identity = config.load().tls.as_ref()?.identity.clone()?;
    let opening = handshakes.open(Wire::new(stream), Arc::clone(&identity.operators));
    match tokio::time::timeout(HEAD, opening).await {
        Ok(Ok(Opened::Secure { stream, .. })) => Some(stream),
        Ok(Ok(Opened::Plain(_)) | Err(_)) | Err(_) => {
            tracing::debug!("an operator's connection that did not begin");
            None
        }
    }
}
