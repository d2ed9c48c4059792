//! A server that somebody else runs: known by a name of its own, perhaps under a path, perhaps behind TLS.
//!
//! Engines are spoken to in plain HTTP at their addresses. What is different of a backend is here, and whoever connects asks for it;
//! what TLS is made of is the gateway's affair.

use std::{
    fmt::Debug,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    pin::Pin,
    sync::Arc,
};

use tokio::io::{AsyncRead, AsyncWrite};

use crate::tcp::Tcp;

/// How a server is spoken to that is no engine at a bare address.
#[derive(Clone, Debug)]
pub struct BackendOrigin {
    /// What `Host` says.
    pub host: Box<str>,
    /// What the path of each request is put behind: empty, or beginning with `/` and ending without one.
    pub path: Box<str>,
    pub tls: Option<Arc<dyn BackendTls>>,
    /// Of its name and whether there is TLS: connections to another origin at the same address are others.
    id: u64,
}

/// A connection as both sides of HTTP use it.
pub trait Duplex: AsyncRead + AsyncWrite + Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Debug + Send + Unpin> Duplex for T {}

/// What comes of [`BackendTls::handshake`].
pub type TlsHandshake = Pin<Box<dyn Future<Output = io::Result<Box<dyn Duplex>>> + Send>>;

/// Makes TLS connections to one name.
pub trait BackendTls: Debug + Send + Sync {
    /// Nothing has been said on the connection yet.
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

/// TLS is made of nothing but the name.
impl PartialEq for BackendOrigin {
    fn eq(&self, other: &Self) -> bool {
        (&self.host, &self.path, self.tls.is_some()) == (&other.host, &other.path, other.tls.is_some())
    }
}
