//! TLS to servers of others: backends and trace collectors.
//!
//! Certificates are verified against the machine's roots; `SSL_CERT_FILE` and `SSL_CERT_DIR` set where those are.

use std::{
    io,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use rouse_net::{
    backend_origin::{BackendTls, Duplex, TlsHandshake},
    tcp::Tcp,
};
use rustls::{CertificateError, ClientConfig, RootCertStore, pki_types::ServerName};
use tokio_rustls::TlsConnector;

/// Loads the machine's roots, without those that cannot be read.
pub fn native_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

pub fn tls_client_config(roots: RootCertStore) -> Result<Arc<ClientConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

/// TLS to the backend of this name, verified against roots.
#[derive(Debug)]
pub struct RootVerifiedTls {
    name: String,
    /// Built for the first connection. Objects that only name a backend cause no read of the roots.
    config: OnceLock<Result<Arc<ClientConfig>, rustls::Error>>,
    /// The last logged error, since connections to an untrusted backend are retried again and again.
    last_logged_error: Arc<Mutex<String>>,
}

impl RootVerifiedTls {
    /// `name` is a host name or an address.
    pub fn new(name: String) -> Self {
        Self { name, config: OnceLock::new(), last_logged_error: Arc::default() }
    }

    /// The same with these roots.
    #[must_use]
    pub fn with_roots(name: &str, roots: RootCertStore) -> Self {
        Self { config: OnceLock::from(tls_client_config(roots)), ..Self::new(name.to_owned()) }
    }
}

impl BackendTls for RootVerifiedTls {
    fn handshake(&self, connection: Tcp) -> TlsHandshake {
        let config = self.config.get_or_init(|| tls_client_config(native_roots())).clone();
        let name = ServerName::try_from(self.name.clone());
        let (logged, backend) = (Arc::clone(&self.last_logged_error), self.name.clone());
        Box::pin(async move {
            let connector = TlsConnector::from(config.map_err(io::Error::other)?);
            let name = name.map_err(io::Error::other)?;
            let outcome = connector.connect(name, connection).await.map_err(explain_tls_error);
            log_once(&backend, outcome.as_ref().err(), &logged);
            Ok(Box::new(outcome?) as Box<dyn Duplex>)
        })
    }
}

/// Logs each error once, when it begins.
fn log_once(backend: &str, error: Option<&io::Error>, logged: &Mutex<String>) {
    let reason = error.map(ToString::to_string).unwrap_or_default();
    let mut logged = logged.lock().unwrap_or_else(PoisonError::into_inner);
    if !reason.is_empty() && *logged != reason {
        tracing::warn!(backend, reason, "TLS connection to the backend failed");
    }
    *logged = reason;
}

/// Adds which roots are trusted, if the issuer is unknown.
fn explain_tls_error(error: io::Error) -> io::Error {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
    let unknown = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
    if cause != Some(&unknown) {
        return error;
    }
    let trusted =
        "the gateway trusts the roots in SSL_CERT_FILE and SSL_CERT_DIR, or else the machine's roots";
    io::Error::new(error.kind(), format!("{error}; {trusted}"))
}
