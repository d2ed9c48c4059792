//! Certificates for tests, and a TLS client over plain blocking sockets.

use std::{
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName},
};

pub(crate) type BlockingTlsStream = StreamOwned<ClientConnection, TcpStream>;

/// A certificate authority and the folder for its certificates.
pub(crate) struct CertificateAuthority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: PathBuf,
}

impl CertificateAuthority {
    /// Creates an authority and writes its `ca.pem` to the folder.
    pub(crate) fn new(dir: &Path) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(dir.join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, dir: dir.to_owned() }
    }

    /// Writes `NAME.pem` and `NAME.key` of a certificate for `localhost`. Returns the certificate and its key.
    pub(crate) fn issue(&self, name: &str) -> (CertificateDer<'static>, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.dir.join(format!("{name}.pem")), cert.pem()).unwrap();
        std::fs::write(self.dir.join(format!("{name}.key")), key.serialize_pem()).unwrap();
        (cert.der().clone(), key)
    }

    /// The configuration's `tls` entry for the certificate issued as `server`.
    pub(crate) fn settings(&self, more: &str) -> String {
        let file = |name: &str| self.dir.join(name).display().to_string();
        format!("tls: {{cert: {:?}, key: {:?}{more}}}", file("server.pem"), file("server.key"))
    }

    pub(crate) fn client(
        &self,
        alpn: &[&str],
        shows: Option<(CertificateDer<'static>, KeyPair)>,
    ) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match shows {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                let key = PrivatePkcs8KeyDer::from(key.serialize_der());
                builder.with_client_auth_cert(vec![cert], key.into()).unwrap()
            }
        };
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}

/// Connects. The first read or write does the handshake.
pub(crate) fn connect_tls(address: SocketAddr, client: &Arc<ClientConfig>) -> BlockingTlsStream {
    let tcp = TcpStream::connect(address).unwrap();
    tcp.set_nodelay(true).unwrap();
    tcp.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    tls_over(tcp, client)
}

/// Speaks TLS over a connection. The first read or write does the handshake.
pub(crate) fn tls_over(tcp: TcpStream, client: &Arc<ClientConfig>) -> BlockingTlsStream {
    let name = ServerName::try_from("localhost").unwrap();
    StreamOwned::new(ClientConnection::new(Arc::clone(client), name).unwrap(), tcp)
}
