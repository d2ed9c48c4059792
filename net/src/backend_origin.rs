//! The origin of a backend that another operator runs: its host name, its path prefix, and its TLS.
//!
//! Engines serve plain HTTP at their addresses. Backends differ as described here, and each connection to a backend
//! applies it. The gateway provides the TLS implementation.

use std::{
    fmt::Debug,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    pin::Pin,
    sync::Arc,
};

use tokio::io::{AsyncRead, AsyncWrite};

use crate::tcp::Tcp;

/// How to address a backend, as opposed to an engine at a bare address.
#[derive(Clone, Debug)]
pub struct BackendOrigin {
    /// Value of the `Host` header.
    pub host: Box<str>,
    /// Prefix of each request's path: empty, or begins with `/` and does not end with one.
    pub path: Box<str>,
    pub tls: Option<Arc<dyn BackendTls>>,
    /// Hash of the host and of whether TLS is used. Keeps connections to different origins at one address apart.
    id: u64,
}

/// A connection that both sides of HTTP can read and write.
pub trait Duplex: AsyncRead + AsyncWrite + Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Debug + Send + Unpin> Duplex for T {}

/// Future of [`BackendTls::handshake`].
pub type TlsHandshake = Pin<Box<dyn Future<Output = io::Result<Box<dyn Duplex>>> + Send>>;

/// Makes TLS connections to one host.
pub trait BackendTls: Debug + Send + Sync {
    /// Performs the TLS handshake on a connection that has carried no bytes yet.
    fn handshake(&self, connection: Tcp) -> TlsHandshake;
}

impl BackendOrigin {
    #[must_use]
    pub fn new(host: &str, path: &str, tls: Option<Arc<dyn BackendTls>>) -> Self {
        let mut hasher = DefaultHasher::new();
        (host, tls.is_some()).hash(&mut hasher);
        Self { host: host.into(), path: path.into(), tls, id: hasher.finish() }
    }

    pub(crate) const fn id(&self) -> u64 {
        self.id
    }
}

/// Compares TLS only by presence, since the host name determines the rest.
impl PartialEq for BackendOrigin {
    fn eq(&self, other: &Self) -> bool {
        (&self.host, &self.path, self.tls.is_some()) == (&other.host, &other.path, other.tls.is_some())
    }
}
