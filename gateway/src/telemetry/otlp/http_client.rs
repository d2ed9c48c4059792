//! HTTP client for the collector, with one connection per export.
//!
//! There is at most one export a second, so keeping a connection would save little, and a new one finds a collector
//! that moved. The collector's certificate is verified against the machine's roots (`SSL_CERT_FILE` and `SSL_CERT_DIR`
//! set where those are). Proxies are not used.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use opentelemetry_http::HttpError;
use rouse_net::{
    backend_origin::{BackendOrigin, BackendTls, Duplex, TlsHandshake},
    http_client::{HttpClient, HttpClientError},
    tcp::Tcp,
};
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tokio_rustls::TlsConnector;

use super::EXPORT_TIMEOUT;
use rouse_platform::upstream_tls;

/// Limit for a response. A collector's is a few bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

#[derive(Clone, Debug)]
pub(super) struct OtlpHttpClient {
    tls: Arc<ClientConfig>,
    /// The last error, since the exporter only reports that there was one.
    last_failure: Arc<Mutex<String>>,
}

/// TLS to the collector of this name.
#[derive(Debug)]
struct CollectorTls {
    name: String,
    config: Arc<ClientConfig>,
}

impl OtlpHttpClient {
    /// Creates a client with the machine's roots.
    ///
    /// Roots that cannot be read are skipped; without any root, only `http` works.
    pub(super) fn new() -> Result<Self, rustls::Error> {
        Self::with_roots(upstream_tls::native_roots())
    }

    fn with_roots(roots: RootCertStore) -> Result<Self, rustls::Error> {
        Ok(Self { tls: upstream_tls::tls_client_config(roots)?, last_failure: Arc::default() })
    }

    /// Returns why the last failed export failed.
    pub(super) fn last_failure(&self) -> String {
        self.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let uri = request.uri();
        let authority = uri.authority().ok_or("the collector's address has no host")?;
        let secure = uri.scheme_str() == Some("https");
        let port = authority.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let host = authority.host();
        let tls = secure.then(|| {
            let name = host.trim_start_matches('[').trim_end_matches(']').to_owned();
            Arc::new(CollectorTls { name, config: Arc::clone(&self.tls) }) as Arc<dyn BackendTls>
        });
        let without_user = authority.as_str().rsplit('@').next().unwrap_or_default();
        let origin = BackendOrigin::new(without_user, "", tls);
        let client =
            HttpClient::for_host(&format!("{host}:{port}"), None).with_origin(Some(Arc::new(origin)));
        let sent = client.send(request, MAX_RESPONSE_BYTES, EXPORT_TIMEOUT).await;
        let reply = sent.map_err(|error| io::Error::other(failure_text(&error)))?;
        match StatusCode::from_u16(reply.status)? {
            status if status.is_success() => Ok(Response::builder().status(status).body(reply.body)?),
            status => Err(io::Error::other(format!("the collector returned status {status}")).into()),
        }
    }
}

fn failure_text(error: &HttpClientError) -> String {
    match error {
        HttpClientError::Unreachable(reason) | HttpClientError::Tls(reason) => reason.to_string(),
        HttpClientError::Timeout => {
            format!("the collector did not answer within {} s", EXPORT_TIMEOUT.as_secs())
        }
        error => error.to_string(),
    }
}

impl BackendTls for CollectorTls {
    fn handshake(&self, connection: Tcp) -> TlsHandshake {
        let connector = TlsConnector::from(Arc::clone(&self.config));
        let name = ServerName::try_from(self.name.clone());
        Box::pin(async move {
            let name = name.map_err(io::Error::other)?;
            Ok(Box::new(connector.connect(name, connection).await?) as Box<dyn Duplex>)
        })
    }
}

impl opentelemetry_http::HttpClient for OtlpHttpClient {
    fn send_bytes<'a, 'f>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'f>>
    where
        'a: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            let sent = self.send(request).await;
            if let Err(error) = &sent {
                *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = error.to_string();
            }
            sent
        })
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry_http::HttpClient as _;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };
    use tokio_rustls::TlsAcceptor;

    use super::*;

    /// Starts a collector with a self-signed certificate that accepts one export; returns its root too.
    async fn secure() -> (u16, RootCertStore, tokio::task::JoinHandle<Vec<u8>>) {
        let (config, roots) = rouse_testing::tls::server(&["localhost"]);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let taken = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(mut stream) = TlsAcceptor::from(config).accept(stream).await else {
                return Vec::new();
            };
            let mut bytes = vec![0; 4096];
            let read = stream.read(&mut bytes).await.unwrap();
            bytes.truncate(read);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            bytes
        });
        (port, roots, taken)
    }

    fn export(port: u16) -> Request<Bytes> {
        let uri = format!("https://localhost:{port}/v1/traces");
        Request::post(uri).body(Bytes::from_static(b"spans")).unwrap()
    }

    #[tokio::test]
    async fn a_collector_behind_tls_is_reached_when_its_root_is_known() {
        let (port, roots, taken) = secure().await;
        let client = OtlpHttpClient::with_roots(roots).unwrap();
        assert_eq!(client.send_bytes(export(port)).await.unwrap().status(), 200);
        let head = String::from_utf8(taken.await.unwrap()).unwrap().to_lowercase();
        assert!(head.starts_with("post /v1/traces http/1.1\r\n"), "{head}");
        assert!(head.contains(&format!("host: localhost:{port}\r\n")), "{head}");
    }

    #[tokio::test]
    async fn a_collector_whose_root_is_unknown_is_told_nothing() {
        let (port, _, taken) = secure().await;
        let client = OtlpHttpClient::with_roots(RootCertStore::empty()).unwrap();
        assert!(client.send_bytes(export(port)).await.is_err());
        assert!(client.last_failure().contains("certificate"), "{}", client.last_failure());
        assert!(taken.await.unwrap().is_empty());
    }
}
