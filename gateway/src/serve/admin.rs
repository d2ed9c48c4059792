//! The admin listener, on the control runtime. HTTP/1.1 only, with few connections, none of them on a request's path.
//! TLS handshakes run on their own threads, because the driver runs here.
//!
//! A client that follows events or logs keeps its connection for as long as it likes, and every descriptor that it
//! holds is missing for the inference API. So the number of connections is limited. A connection beyond the limit gets
//! an error, or the response to a health check.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use rouse_config::Config;
use rouse_net::{fd_limit, server::StallTrackingTcp};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Notify, OwnedSemaphorePermit, Semaphore, watch},
};

use super::{
    Error, ShutdownStage, listener,
    stream::ClientStream,
    tls::{HandshakeOutcome, HandshakePool},
};
use crate::http::admin::{self, AdminSources};

/// From a connection's first byte to the end of a request's head; also the longest idle time of a connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// The most served connections: at most 1 / [`DESCRIPTOR_SHARE_DIVISOR`] of the descriptors, since each may also hold a
/// file.
const MAX_CONNECTIONS: u64 = 128;
const DESCRIPTOR_SHARE_DIVISOR: u64 = 8;
/// The most rejected connections at a time, and the time each may take to send its request.
const MAX_REJECTED_CONNECTIONS: usize = 16;
const REJECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause after an accept that failed for want of descriptors.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(500);

/// The bound listener.
pub struct AdminServer {
    address: SocketAddr,
    listener: std::net::TcpListener,
    sources: AdminSources,
    handshakes: Option<Arc<HandshakePool>>,
    permits: AdminConnectionPermits,
}

/// The permits for served and for rejected connections.
struct AdminConnectionPermits {
    served: Arc<Semaphore>,
    rejected: Arc<Semaphore>,
}

impl AdminConnectionPermits {
    fn new(descriptors: u64) -> Self {
        let served = (descriptors / DESCRIPTOR_SHARE_DIVISOR)
            .clamp(MAX_REJECTED_CONNECTIONS as u64, MAX_CONNECTIONS) as usize;
        Self {
            served: Arc::new(Semaphore::new(served)),
            rejected: Arc::new(Semaphore::new(MAX_REJECTED_CONNECTIONS)),
        }
    }

    /// A permit, and whether its connection is served.
    fn acquire(&self) -> Option<(OwnedSemaphorePermit, bool)> {
        let take = |semaphore: &Arc<Semaphore>| Arc::clone(semaphore).try_acquire_owned().ok();
        let served = take(&self.served).map(|permit| (permit, true));
        served.or_else(|| take(&self.rejected).map(|permit| (permit, false)))
    }
}

impl AdminServer {
    /// Binds the listener. Connections queue from here on.
    ///
    /// # Errors
    /// The address is taken, or is none of this machine's.
    pub fn listen(address: SocketAddr) -> Result<std::net::TcpListener, Error> {
        listener::bind_one(address)
    }

    /// # Errors
    /// The certificates cannot be used.
    pub fn from_listener(listener: std::net::TcpListener, sources: AdminSources) -> Result<Self, Error> {
        let address = listener
            .local_addr()
            .map_err(|source| Error::Bind { address: sources.config.load().admin.address, source })?;
        let config = sources.config.load();
        let handshakes =
            if config.admin.tls { HandshakePool::for_listener(config.tls.as_ref(), 1)? } else { None };
        drop(config);
        let permits = AdminConnectionPermits::new(fd_limit::soft_limit().unwrap_or(u64::MAX));
        Ok(Self { address, listener, sources, handshakes: handshakes.map(Arc::new), permits })
    }

    /// The bound address, with the actual port for port 0.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until [`ShutdownStage::Terminating`], so that operators can watch a drain. Connections still open then
    /// end with the runtime.
    pub async fn run(self, mut stage: watch::Receiver<ShutdownStage>) -> Result<(), Error> {
        let listener = TcpListener::from_std(self.listener).map_err(|error| Error::Ended("admin", error))?;
        let config = Arc::clone(&self.sources.config);
        let service = admin::AdminService::new(self.sources, stage.clone());
        let closed = Arc::new(Notify::new());
        loop {
            let accepted = tokio::select! {
                biased;
                _ = stage.wait_for(|stage| *stage == ShutdownStage::Terminating) => return Ok(()),
                accepted = listener.accept() => accepted,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an admin connection, retrying");
                    drop(tokio::time::timeout(ACCEPT_BACKOFF, closed.notified()).await);
                    continue;
                }
            };
            let Some((permit, is_served)) = self.permits.acquire() else { continue };
            if !is_served {
                tracing::debug!(%peer, "admin connection limit reached, the connection gets only health checks");
            }
            let (service, closed) = (service.clone(), Arc::clone(&closed));
            let (handshakes, config) = (self.handshakes.clone(), Arc::clone(&config));
            tokio::spawn(async move {
                let Some(stream) = accept_tls(stream, handshakes.as_deref(), &config).await else {
                    closed.notify_waiters();
                    return;
                };
                let answer = service_fn(move |request| {
                    let service = service.clone();
                    async move {
                        let answer = if is_served || admin::is_health_check(&request) {
                            service.handle(request, peer).await
                        } else {
                            admin::too_many_connections()
                        };
                        Ok::<_, Infallible>(answer)
                    }
                });
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(if is_served { HEAD_TIMEOUT } else { REJECT_TIMEOUT })
                    .keep_alive(is_served)
                    .serve_connection(TokioIo::new(stream), answer);
                if let Err(error) = connection.await {
                    tracing::debug!(%error, %peer, "admin connection failed");
                }
                drop(permit);
                closed.notify_waiters();
            });
        }
    }
}

/// Completes the TLS handshake, if the listener has TLS.
async fn accept_tls(
    stream: TcpStream,
    handshakes: Option<&HandshakePool>,
    config: &ArcSwap<Config>,
) -> Option<ClientStream> {
    let Some(handshakes) = handshakes else { return Some(ClientStream::plain(stream)) };
    let identity = config.load().tls.as_ref()?.identity.clone()?;
    let opening = handshakes.accept(StallTrackingTcp::new(stream), Arc::clone(&identity.admin_config));
    match tokio::time::timeout(HEAD_TIMEOUT, opening).await {
        Ok(Ok(HandshakeOutcome::Secure { stream, .. })) => Some(stream),
        Ok(Ok(HandshakeOutcome::NotTls(_)) | Err(_)) | Err(_) => {
            tracing::debug!("admin connection failed in the TLS handshake");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_have_a_part_of_the_descriptors_and_never_all() {
        for (descriptors, served) in [(64, 16), (400, 50), (1 << 20, 128), (u64::MAX, 128)] {
            let places = AdminConnectionPermits::new(descriptors);
            let taken: Vec<_> = std::iter::from_fn(|| places.acquire()).collect();
            assert_eq!(taken.iter().filter(|(_, is_served)| *is_served).count(), served, "{descriptors}");
            assert_eq!(taken.len(), served + MAX_REJECTED_CONNECTIONS);
            drop(taken);
            assert!(places.acquire().is_some_and(|(_, is_served)| is_served));
        }
    }
}
