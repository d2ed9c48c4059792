//! Certificates for a test gateway and its clients.

use std::{fs, io, net::SocketAddr, path::PathBuf, sync::Arc};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rouse_config::Config;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::InProcessGateway;

/// A certificate authority, and a directory with certificates that it issued.
pub(crate) struct TestCertificateAuthority {
    pub(crate) issuer: CertifiedIssuer<'static, KeyPair>,
    dir: tempfile::TempDir,
}

impl TestCertificateAuthority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, dir }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn params() -> CertificateParams {
        CertificateParams::new(vec!["localhost".to_owned()]).unwrap()
    }

    /// Writes `NAME.pem` and `NAME.key`, and returns the certificate in DER and the key.
    pub(crate) fn issue(&self, name: &str, params: &CertificateParams) -> (CertificateDer<'static>, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(self.file(&format!("{name}.pem")), cert.pem()).unwrap();
        fs::write(self.file(&format!("{name}.key")), key.serialize_pem()).unwrap();
        (cert.der().clone(), key)
    }

    pub(crate) fn load(&self, more: &str) -> Result<Config, rouse_config::ConfigErrors> {
        let text =
            format!("tls: {{cert: {:?}, key: {:?}{more}}}", self.file("server.pem"), self.file("server.key"));
        fs::write(self.file("rouse.yaml"), text).unwrap();
        rouse_config::load(&self.file("rouse.yaml"))
    }

    /// Starts a gateway with a certificate of this authority.
    pub(crate) fn gateway(&self, more: &str, change: impl FnOnce(&mut Config)) -> InProcessGateway {
        let tls = self.tls(more);
        InProcessGateway::start(|config| {
            config.tls = tls;
            change(config);
        })
    }

    pub(crate) fn client_config(
        &self,
    ) -> rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert> {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).unwrap();
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
    }

    /// The `tls` section of a configuration with a new certificate.
    pub(crate) fn tls(&self, more: &str) -> Option<rouse_config::TlsConfig> {
        self.issue("server", &Self::params());
        self.load(more).unwrap().tls
    }

    pub(crate) async fn connect(&self, address: SocketAddr) -> TlsStream<TcpStream> {
        connect_tls(address, self.client_config().with_no_client_auth()).await.unwrap()
    }
}

pub(crate) async fn connect_tls(
    address: SocketAddr,
    client: ClientConfig,
) -> io::Result<TlsStream<TcpStream>> {
    let tcp = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(client)).connect(name, tcp).await
}
