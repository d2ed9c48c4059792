//! TLS: the gateway's certificate, its trusted client authorities, and handshakes.
//!
//! Certificates are a part of the configuration: they are read with it, a mismatch rejects it, and connections accepted
//! later use them. A session cannot be resumed across a change, since each configuration keeps its own sessions: a
//! client admitted by an authority that is no longer trusted must authenticate again.
//!
//! A handshake with a long RSA key computes for milliseconds, in which no stream of the core would progress. So
//! handshakes run on their own threads, and the connection returns to its core afterwards.

use std::{fmt, fs, io, path::Path, sync::Arc, time::Duration};

use aws_lc_rs::digest::{Context, SHA256};
use rouse_net::downstream::StallTrackingTcp;
use rustls::{
    CertificateError, InconsistentKeys, RootCertStore, ServerConfig,
    client::verify_server_cert_signed_by_trust_anchor,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::{ParsedCertificate, WebPkiClientVerifier},
};
use tokio::task::JoinHandle;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::stream::ClientStream;
use crate::config::TlsConfig;

const ALPN_HTTP2: &[u8] = b"h2";
const ALPN_HTTP1: &[u8] = b"http/1.1";
/// The type of a TLS record that begins a handshake. No HTTP request begins with this byte.
const HANDSHAKE_RECORD_TYPE: u8 = 0x16;
/// A certificate that expires within this time causes a warning.
const EXPIRY_WARNING: Duration = Duration::from_secs(14 * 24 * 3600);

/// The year 10000, which no certificate can name.
const YEAR_10000: Duration = Duration::from_secs(253_402_300_800);

/// A certificate chain with its key, and the client authorities: read and checked to match.
pub struct TlsIdentity {
    pub(super) api_config: Arc<ServerConfig>,
    /// The admin API serves only HTTP/1.1, so this configuration offers nothing else.
    pub(super) admin_config: Arc<ServerConfig>,
    /// The digest of all files that the identity was read from.
    digest: [u8; 32],
    leaf: CertificateDer<'static>,
}

/// A file that cannot be used: its key under `tls`, and why.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {file}: {reason}")]
pub struct Error {
    key: &'static str,
    file: String,
    reason: String,
}

impl TlsIdentity {
    /// Reads the files. Errors: a file cannot be read, is not PEM, or does not match the others.
    pub fn read(tls: &TlsConfig) -> Result<Self, Error> {
        let mut digest = Context::new(&SHA256);
        let mut bytes = |key, file: &Path| {
            let bytes = fs::read(file).map_err(|error| file_error(key, file, &error))?;
            digest.update(&bytes.len().to_le_bytes());
            digest.update(&bytes);
            Ok::<_, Error>(bytes)
        };
        let chain = certificates("cert", &tls.cert, &bytes("cert", &tls.cert)?)?;
        let key = PrivateKeyDer::from_pem_slice(&bytes("key", &tls.key)?).map_err(|error| match error {
            rustls::pki_types::pem::Error::NoItemsFound => {
                file_error("key", &tls.key, &"the file has no private key; use an unencrypted PEM key")
            }
            other => file_error("key", &tls.key, &other),
        })?;
        let authorities = match &tls.client_ca {
            Some(file) => Some((file, certificates("clientCa", file, &bytes("clientCa", file)?)?)),
            None => None,
        };
        let leaf = chain.first().cloned().ok_or_else(|| file_error("cert", &tls.cert, &NO_CERTIFICATE))?;
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| file_error("cert", &tls.cert, &error))?;
        let builder = match authorities {
            None => builder.with_no_client_auth(),
            Some((file, authorities)) => {
                let mut roots = RootCertStore::empty();
                for authority in authorities {
                    roots.add(authority).map_err(|error| file_error("clientCa", file, &error))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
                    .build()
                    .map_err(|error| file_error("clientCa", file, &error))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut server = builder.with_single_cert(chain, key).map_err(|error| match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => file_error(
                "key",
                &tls.key,
                &format_args!("the key does not match the certificate in {}", tls.cert.display()),
            ),
            other => file_error("cert", &tls.cert, &other),
        })?;
        server.alpn_protocols = vec![ALPN_HTTP1.to_vec()];
        let operators = Arc::new(server.clone());
        server.alpn_protocols = vec![ALPN_HTTP2.to_vec(), ALPN_HTTP1.to_vec()];
        let mut identity =
            Self { api_config: Arc::new(server), admin_config: operators, digest: [0; 32], leaf };
        identity.digest.copy_from_slice(digest.finish().as_ref());
        Ok(identity)
    }

    /// A warning if the certificate is not valid now (clients refuse it) or expires within 14 days.
    #[must_use]
    pub fn validity_warning(&self) -> Option<String> {
        let now = UnixTime::now();
        let soon = UnixTime::since_unix_epoch(Duration::from_secs(now.as_secs()) + EXPIRY_WARNING);
        self.validity_error_at(now).map(str::to_owned).or_else(|| {
            self.validity_error_at(soon).map(|_| "the certificate expires within 14 days".to_owned())
        })
    }

    /// When the certificate expires, in seconds of Unix time.
    #[must_use]
    pub fn expires_at(&self) -> Option<u64> {
        match self.verify_at(UnixTime::since_unix_epoch(YEAR_10000))? {
            CertificateError::ExpiredContext { not_after, .. } => Some(not_after.as_secs()),
            _ => None,
        }
    }

    fn validity_error_at(&self, at: UnixTime) -> Option<&'static str> {
        match self.verify_at(at)? {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                Some("the certificate has expired")
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                Some("the certificate is not valid yet")
            }
            _ => None,
        }
    }

    /// Checks the certificate at this time. The verifier checks the time before it looks for an issuer, and there is no
    /// issuer here.
    fn verify_at(&self, at: UnixTime) -> Option<CertificateError> {
        let leaf = ParsedCertificate::try_from(&self.leaf).ok()?;
        let algorithms = provider().signature_verification_algorithms.all;
        let roots = RootCertStore::empty();
        match verify_server_cert_signed_by_trust_anchor(&leaf, &roots, &[], at, algorithms) {
            Err(rustls::Error::InvalidCertificate(error)) => Some(error),
            _ => None,
        }
    }
}

/// Equal files make equal identities.
impl PartialEq for TlsIdentity {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

/// Hides the contents of the files.
impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsIdentity").finish_non_exhaustive()
    }
}

/// The crypto provider of all TLS code here.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

const NO_CERTIFICATE: &str = "the file has no certificate; use PEM";

fn certificates(key: &'static str, file: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let chain: Vec<_> = CertificateDer::pem_slice_iter(bytes)
        .collect::<Result<_, _>>()
        .map_err(|error| file_error(key, file, &error))?;
    if chain.is_empty() {
        return Err(file_error(key, file, &NO_CERTIFICATE));
    }
    Ok(chain)
}

fn file_error(key: &'static str, file: &Path, why: &dyn fmt::Display) -> Error {
    Error { key, file: file.display().to_string(), reason: why.to_string() }
}

/// Whether a failed start of a connection counts as its client's offence. A client that ended the handshake with an
/// alert does not offend: it most likely rejects the gateway's certificate, and all clients of its address would pay
/// for that.
pub(super) fn is_client_offence(error: &io::Error) -> bool {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
    error.kind() == io::ErrorKind::InvalidData && !matches!(cause, Some(rustls::Error::AlertReceived(_)))
}

/// The handshake threads.
pub(super) struct HandshakePool {
    runtime: Option<tokio::runtime::Runtime>,
}

/// The outcome of a handshake on a port that expects TLS.
pub(super) enum HandshakeOutcome {
    Secure {
        stream: ClientStream,
        http2: bool,
    },
    /// The client speaks another protocol, most likely HTTP.
    NotTls(ClientStream),
}

impl HandshakePool {
    /// Starts one thread per four `cores` of the API.
    fn start(cores: usize) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads((cores / 4).max(1))
            .thread_name("tls")
            .enable_all()
            .build()?;
        Ok(Self { runtime: Some(runtime) })
    }

    /// The handshake threads of a listener, if TLS is configured. Errors: TLS is configured but no certificate was
    /// read.
    pub(super) fn for_listener(tls: Option<&TlsConfig>, cores: usize) -> Result<Option<Self>, super::Error> {
        match tls {
            None => Ok(None),
            Some(tls) if tls.identity.is_none() => Err(super::Error::NoIdentity),
            Some(_) => Self::start(cores).map(Some).map_err(super::Error::Thread),
        }
    }

    /// Runs a handshake. Dropping the future abandons the connection. Errors: the client disconnected, or the
    /// negotiation failed.
    pub(super) async fn accept(
        &self,
        wire: StallTrackingTcp,
        server: Arc<ServerConfig>,
    ) -> io::Result<HandshakeOutcome> {
        let Some(runtime) = &self.runtime else { return Err(io::ErrorKind::NotConnected.into()) };
        let mut task = AbortOnDrop(runtime.spawn(handshake(wire, server)));
        (&mut task.0).await.map_err(io::Error::other)?
    }
}

/// A connection in a running handshake has no core to return to, so abandon it.
impl Drop for HandshakePool {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

struct AbortOnDrop(JoinHandle<io::Result<HandshakeOutcome>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn handshake(wire: StallTrackingTcp, server: Arc<ServerConfig>) -> io::Result<HandshakeOutcome> {
    match wire.first_byte().await? {
        None => return Err(io::ErrorKind::UnexpectedEof.into()),
        Some(HANDSHAKE_RECORD_TYPE) => {}
        Some(_) => return Ok(HandshakeOutcome::NotTls(ClientStream::Plain(wire))),
    }
    let stream: TlsStream<StallTrackingTcp> = TlsAcceptor::from(server).accept(wire).await?;
    let http2 = stream.get_ref().1.alpn_protocol() == Some(ALPN_HTTP2);
    Ok(HandshakeOutcome::Secure { stream: ClientStream::Tls(Box::new(stream)), http2 })
}

#[cfg(test)]
mod tests;
