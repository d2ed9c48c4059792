//! `tls`: which files, and what is in them.

use std::{path::PathBuf, sync::Arc};

use super::{
    At, Config, Problem,
    reader::{Reader, Section},
};
use crate::serve::tls::Identity;

/// Certificate files, and what was read from them.
#[derive(Clone, Debug)]
pub struct Tls {
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Clients must show a certificate of one of these authorities.
    pub client_ca: Option<PathBuf>,
    /// `None` when only a text was parsed: [`super::load`] reads the files.
    pub identity: Option<Arc<Identity>>,
    at: At,
}

impl Tls {
    /// What changes when the certificates do.
    pub fn files(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.cert, &self.key].into_iter().chain(&self.client_ca)
    }

    /// The files still say what was read from them.
    #[must_use]
    pub fn is_as_read(&self) -> bool {
        Identity::read(self).is_ok_and(|now| self.identity.as_deref() == Some(&now))
    }

    /// When the certificate ends, in seconds of Unix time.
    #[must_use]
    pub fn expires(&self) -> Option<u64> {
        self.identity.as_ref()?.expires()
    }

    /// What clients will not like about the certificate.
    #[must_use]
    pub fn doubt(&self) -> Option<Problem> {
        let why = self.identity.as_ref()?.untimely()?;
        Some(Problem::new(self.at, format!("tls.cert: {}: {why}", self.cert.display())))
    }
}

impl PartialEq for Tls {
    fn eq(&self, other: &Self) -> bool {
        let what = |tls: &Self| (tls.cert.clone(), tls.key.clone(), tls.client_ca.clone());
        what(self) == what(other) && self.identity == other.identity
    }
}

pub(super) fn tls(reader: &mut Reader, root: &mut Section) -> Option<Tls> {
    let (mut at, mut given) = (At::default(), false);
    root.read(reader, "tls", |reader, node| {
        at = node.at;
        let mut section = reader.section(node);
        let mut file = |reader: &mut Reader, key| section.read(reader, key, Reader::text).map(PathBuf::from);
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
        Some(Tls { cert, key, client_ca, identity: None, at })
    })
}

/// Reads the files that the configuration names.
pub(super) fn read(config: &mut Config) -> Result<(), Problem> {
    if let Some(tls) = &mut config.tls {
        let identity = Identity::read(tls).map_err(|error| Problem::new(tls.at, format!("tls.{error}")))?;
        tls.identity = Some(Arc::new(identity));
    }
    Ok(())
}
