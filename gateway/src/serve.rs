//! The listeners: one for the inference API, one for the admin API.
//!
//! The inference API runs on one current-thread runtime per core, each with its own `SO_REUSEPORT` listener, so a
//! request never crosses threads between its client and its engine. The admin API runs on the control runtime, because
//! it must respond even when every core is busy.
//!
//! Both addresses are bound before anything else starts, also in a cluster. A taken port is a startup error and is
//! never retried.

use std::{io, net::SocketAddr};

mod address_limiter;
mod admin;
#[cfg(not(feature = "pipe"))]
mod api;
#[cfg(feature = "pipe")]
pub mod api;
mod api_workers;
pub(crate) mod balance;
pub(crate) mod client_address;
mod connection;
mod listener;
pub(crate) mod socket;
mod stream;
pub mod tls;

pub(crate) use address_limiter::{RequestPermit, limiter_key};
pub use admin::AdminServer;
pub use api::{ApiServer, ServingThreads};
pub use api_workers::ApiWorkers;
#[cfg(test)]
pub(crate) use connection::LocalExecutor;
pub use listener::BoundSockets;
pub(crate) use listener::bind_errors;

/// The stage of the gateway's shutdown. Only moves forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShutdownStage {
    #[default]
    Serving,
    /// The inference API accepts only connections that already queue; running exchanges finish.
    Draining,
    /// Leases are revoked: exchanges get a moment to send their error, then their sockets are closed.
    Terminating,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "cannot listen on {address}: address in use by another process, maybe another gateway; find it with \
         `ss -ltnp 'sport = :{}'` and stop it, or set another address with --{listener} ADDR or listen.{listener}", .address.port()
    )]
    InUse { address: SocketAddr, listener: &'static str },
    #[error("cannot listen on {address}: {source}")]
    Bind { address: SocketAddr, source: io::Error },
    #[error("cannot start a serving thread: {0}")]
    Thread(io::Error),
    #[error("tls is configured, but its certificates were not read")]
    NoIdentity,
    #[error("the {0} listener failed: {1}")]
    Ended(&'static str, io::Error),
}

#[cfg(test)]
mod tests;
