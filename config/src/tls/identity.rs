//! The identity of a TLS server: its certificate, its key and its trusted client authorities, read and checked to match.

use std::{fmt, fs, path::Path, sync::Arc, time::Duration};

use aws_lc_rs::digest::{Context, SHA256};
use rustls::{
    CertificateError, InconsistentKeys, RootCertStore, ServerConfig,
    client::verify_server_cert_signed_by_trust_anchor,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::{ParsedCertificate, WebPkiClientVerifier},
};

use super::TlsConfig;

/// The protocol name of HTTP/2 in a handshake.
pub const ALPN_HTTP2: &[u8] = b"h2";
const ALPN_HTTP1: &[u8] = b"http/1.1";
/// A certificate that expires within this time causes a warning.
const EXPIRY_WARNING: Duration = Duration::from_secs(14 * 24 * 3600);

/// The year 10000, which no certificate can name.
const YEAR_10000: Duration = Duration::from_secs(253_402_300_800);

/// A certificate chain with its key, and the client authorities: read and checked to match.
pub struct TlsIdentity {
    pub api_config: Arc<ServerConfig>,
    /// The admin API serves only HTTP/1.1, so this configuration offers nothing else.
    pub admin_config: Arc<ServerConfig>,
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
