//! The inference API's listeners: one thread, one runtime and one socket per core.
//!
//! A connection stays on one core, so a request's path shares only the routes (read without a lock) and the leases (one
//! atomic word). That core is the one that accepted the connection or, if its load is well above the mean, the least
//! loaded one ([`super::balance`]). The connection moves before its first byte is read, together with its address's
//! permit, and the new core does all further work, the handshake included.
//!
//! `api/worker.rs` is one thread, which accepts connections. `api/connections.rs` gives each connection of a core its
//! task.

use std::{io, net::SocketAddr, sync::Arc, thread};

use tokio::sync::{mpsc, oneshot, watch};

use super::{
    Error, ShutdownStage,
    address_limiter::AddressLimiter,
    api_workers::ApiWorkers,
    balance::CoreLoads,
    listener::{self, BoundSockets},
    tls::HandshakePool,
};
use crate::http::ServerContext;

mod connections;
#[cfg(feature = "pipe")]
pub mod pipe;
mod worker;

use worker::WorkerSetup;

/// Moved connections that may wait for a core. When they are as many, the core that accepts a further one keeps it: a
/// core that falls so far behind is no better place.
const MAX_MOVED_CONNECTIONS: usize = 1024;

/// The bound listeners.
pub struct ApiServer {
    address: SocketAddr,
    listeners: Vec<std::net::TcpListener>,
    shared: Arc<ServerContext>,
    handshakes: Option<Arc<HandshakePool>>,
    loads: Arc<CoreLoads>,
    workers: Arc<ApiWorkers>,
}

impl ApiServer {
    /// Binds `cores` sockets to one address (`None`: one per core). Connections queue once the sockets listen, and are
    /// accepted after [`Self::start`].
    ///
    /// # Errors
    /// The address is taken, or is none of this machine's.
    pub fn bind(address: SocketAddr, cores: Option<usize>) -> Result<BoundSockets, Error> {
        let cores = cores.or_else(|| thread::available_parallelism().ok().map(usize::from)).unwrap_or(1);
        listener::bind_shared(address, cores)
    }

    /// Prepares one thread per listener.
    ///
    /// # Errors
    /// The certificates cannot be used.
    pub fn from_listeners(
        address: SocketAddr,
        listeners: Vec<std::net::TcpListener>,
        shared: Arc<ServerContext>,
    ) -> Result<Self, Error> {
        let address = match listeners.first() {
            Some(first) => first.local_addr().map_err(|source| Error::Bind { address, source })?,
            None => address,
        };
        let handshakes =
            HandshakePool::for_listener(shared.config.load().tls.as_ref(), listeners.len())?.map(Arc::new);
        let loads = CoreLoads::new(listeners.len());
        Ok(Self { address, listeners, shared, handshakes, loads, workers: Arc::default() })
    }

    /// Lets the admin API reach the serving threads through these workers, from [`Self::start`] on.
    #[must_use]
    pub fn with_workers(self, workers: Arc<ApiWorkers>) -> Self {
        Self { workers, ..self }
    }

    /// The bound address, with the actual port for port 0.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    #[cfg(test)]
    pub(crate) fn loads(&self) -> Arc<CoreLoads> {
        Arc::clone(&self.loads)
    }

    /// Starts the serving threads.
    pub fn start(self, stage: watch::Receiver<ShutdownStage>) -> Result<ServingThreads, Error> {
        let addresses = Arc::<AddressLimiter>::default();
        let (mut ups, mut ends) = (Vec::new(), Vec::new());
        let (ways, arrivals): (Vec<_>, Vec<_>) =
            self.listeners.iter().map(|_| mpsc::channel(MAX_MOVED_CONNECTIONS)).unzip();
        for ((number, listener), moved) in self.listeners.into_iter().enumerate().zip(arrivals) {
            let (tell, end) = oneshot::channel();
            let (ready_tx, ready_rx) = oneshot::channel();
            // Not to itself: a core has received all its connections once no sender is left.
            let peers = ways.iter().enumerate().map(|(at, way)| (at != number).then(|| way.clone()));
            let setup = WorkerSetup {
                listener,
                shared: Arc::clone(&self.shared),
                stage: stage.clone(),
                address_limiter: Arc::clone(&addresses),
                handshakes: self.handshakes.clone(),
                core_index: number,
                loads: Arc::clone(&self.loads),
                peers: peers.collect(),
                moved_rx: moved,
                tasks_rx: self.workers.add(),
                ready_tx,
            };
            thread::Builder::new()
                .name(format!("api-{number}"))
                .spawn(move || {
                    // The receiver is gone when the control runtime is gone.
                    drop(tell.send(worker::run(setup)));
                })
                .map_err(Error::Thread)?;
            ups.push(ready_rx);
            ends.push(end);
        }
        Ok(ServingThreads { ready: ups, results: ends })
    }
}

/// The running serving threads.
pub struct ServingThreads {
    ready: Vec<oneshot::Receiver<()>>,
    results: Vec<oneshot::Receiver<io::Result<()>>>,
}

impl ServingThreads {
    /// Returns when each thread accepts connections or has already ended.
    pub async fn wait_until_ready(&mut self) {
        for up in self.ready.drain(..) {
            up.await.unwrap_or_default();
        }
    }

    /// Returns when the gateway shuts down and every connection is closed: at [`ShutdownStage::Draining`] when their
    /// exchanges are over, at [`ShutdownStage::Terminating`] at most two seconds later. Errors: a thread failed.
    pub async fn join(self) -> Result<(), Error> {
        for end in self.results {
            end.await
                .unwrap_or_else(|_| Err(io::Error::other("a serving thread panicked")))
                .map_err(|error| Error::Ended("api", error))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
