//! A TLS server's identity for tests.

use std::sync::Arc;

use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};

/// Returns a server with a self-signed certificate for these names and addresses, and its root.
///
/// # Panics
/// A name is not valid in a certificate.
#[must_use]
pub fn server(names: &[&str]) -> (Arc<ServerConfig>, RootCertStore) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let own = rcgen::generate_simple_self_signed(names).expect("valid names");
    let mut roots = RootCertStore::empty();
    roots.add(own.cert.der().clone()).expect("a certificate that was just made");
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(own.signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has the default versions")
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key)
        .expect("a key that belongs to the certificate");
    (Arc::new(config), roots)
}
