//! Reads `tls`: the certificate files and their content.

mod identity;

use std::{path::PathBuf, sync::Arc};

pub use identity::{ALPN_HTTP2, TlsIdentity};

use super::{
    Config, ConfigProblem, SourceLocation,
    reader::{ConfigReader, ConfigSection},
};

/// Certificate files, and the identity read from them.
#[derive(Clone, Debug)]
pub struct TlsConfig {
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Clients must present a certificate from one of these authorities.
    pub client_ca: Option<PathBuf>,
    /// `None` if only a text was parsed: [`super::load`] reads the files.
    pub identity: Option<Arc<TlsIdentity>>,
    at: SourceLocation,
}

impl TlsConfig {
    /// Returns the files to watch for changes of the certificates.
    pub fn files(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.cert, &self.key].into_iter().chain(&self.client_ca)
    }

    /// Whether the files still have the content that was read.
    #[must_use]
    pub fn is_unchanged_on_disk(&self) -> bool {
        TlsIdentity::read(self).is_ok_and(|now| self.identity.as_deref() == Some(&now))
    }

    /// Returns the certificate's expiry in seconds of Unix time.
    #[must_use]
    pub fn expires(&self) -> Option<u64> {
        self.identity.as_ref()?.expires_at()
    }

    /// Returns why clients may reject the certificate.
    #[must_use]
    pub fn validity_warning(&self) -> Option<ConfigProblem> {
        let why = self.identity.as_ref()?.validity_warning()?;
        Some(ConfigProblem::new(self.at, format!("tls.cert: {}: {why}", self.cert.display())))
    }
}

impl PartialEq for TlsConfig {
    fn eq(&self, other: &Self) -> bool {
        let what = |tls: &Self| (tls.cert.clone(), tls.key.clone(), tls.client_ca.clone());
        what(self) == what(other) && self.identity == other.identity
    }
}

pub(super) fn tls(reader: &mut ConfigReader, root: &mut ConfigSection) -> Option<TlsConfig> {
    let (mut at, mut given) = (SourceLocation::default(), false);
    root.read(reader, "tls", |reader, node| {
        at = node.at;
        let mut section = reader.section(node);
        let mut file =
            |reader: &mut ConfigReader, key| section.read(reader, key, ConfigReader::text).map(PathBuf::from);
        let (cert, key) = (file(reader, "cert"), file(reader, "key"));
        let client_ca = file(reader, "clientCa");
        given = cert.is_some() || key.is_some() || client_ca.is_some();
        section.close(reader);
        let (Some(cert), Some(key)) = (cert, key) else {
            if given {
                reader.note(at, "both cert and key are needed");
            }
            return None;
        };
        Some(TlsConfig { cert, key, client_ca, identity: None, at })
    })
}

/// Reads the files that the configuration names.
pub(super) fn read(config: &mut Config) -> Result<(), ConfigProblem> {
    if let Some(tls) = &mut config.tls {
        let identity =
            TlsIdentity::read(tls).map_err(|error| ConfigProblem::new(tls.at, format!("tls.{error}")))?;
        tls.identity = Some(Arc::new(identity));
    }
    Ok(())
}
