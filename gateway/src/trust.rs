//! TLS towards servers that somebody else runs: backends, collectors of traces.
//!
//! Their certificates are checked against the machine's roots; `SSL_CERT_FILE` and `SSL_CERT_DIR` say where those are.

use std::{
    io,
    sync::{Arc, OnceLock},
};

use rouse::{
    origin::{Duplex, Secure, Secured},
    tcp::Tcp,
};
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tokio_rustls::TlsConnector;

/// The machine's. One that cannot be read is left out.
pub(crate) fn roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

pub(crate) fn trusting(roots: RootCertStore) -> Result<Arc<ClientConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

/// TLS to the backend of this name.
#[derive(Debug)]
pub(crate) struct Backend {
    name: String,
    /// Made for the first connection: the roots are read then, and not for each object that names a backend.
    config: OnceLock<Result<Arc<ClientConfig>, rustls::Error>>,
}

impl Backend {
    /// `name`: of a host, or an address.
    pub(crate) const fn new(name: String) -> Self {
        Self { name, config: OnceLock::new() }
    }

    #[cfg(test)]
    pub(crate) fn with_roots(name: &str, roots: RootCertStore) -> Self {
        Self { name: name.to_owned(), config: OnceLock::from(trusting(roots)) }
    }
}

impl Secure for Backend {
    fn secure(&self, connection: Tcp) -> Secured {
        let config = self.config.get_or_init(|| trusting(roots())).clone();
        let name = ServerName::try_from(self.name.clone());
        Box::pin(async move {
            let connector = TlsConnector::from(config.map_err(io::Error::other)?);
            let name = name.map_err(io::Error::other)?;
            let stream = connector.connect(name, connection).await;
            let stream = stream.inspect_err(|error| tracing::warn!(%error, "a backend's TLS"))?;
            Ok(Box::new(stream) as Box<dyn Duplex>)
        })
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use rustls::{
        ServerConfig,
        pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    };

    use super::*;

    /// A server with a certificate of its own, for `localhost`; and its root.
    pub(crate) fn server() -> (Arc<ServerConfig>, RootCertStore) {
        let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(own.cert.der().clone()).unwrap();
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(own.signing_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key)
            .unwrap();
        (Arc::new(config), roots)
    }
}
