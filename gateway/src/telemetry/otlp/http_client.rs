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
use http::{HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::rt::TokioIo;
use opentelemetry_http::{HttpClient, HttpError};
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use rouse_platform::upstream_tls;

/// Limit for a response. A collector's is a few bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

#[derive(Clone, Debug)]
pub(super) struct OtlpHttpClient {
    tls: Arc<ClientConfig>,
    /// The last error, since the exporter only reports that there was one.
    last_failure: Arc<Mutex<String>>,
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

    async fn send(self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let host = request.uri().host().ok_or("the collector's address has no host")?;
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let secure = request.uri().scheme_str() == Some("https");
        let port = request.uri().port_u16().unwrap_or(if secure { 443 } else { 80 });
        let stream = TcpStream::connect((bare.as_str(), port)).await?;
        stream.set_nodelay(true)?;
        if secure {
            let connector = TlsConnector::from(self.tls);
            let stream = connector.connect(ServerName::try_from(bare)?, stream).await?;
            send_request(stream, request).await
        } else {
            send_request(stream, request).await
        }
    }
}

async fn send_request<S>(stream: S, mut request: Request<Bytes>) -> Result<Response<Bytes>, HttpError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let authority = request.uri().authority().map(|authority| authority.as_str().to_owned());
    let host = authority.as_deref().and_then(|all| all.rsplit('@').next()).unwrap_or_default();
    request.headers_mut().insert(header::HOST, HeaderValue::from_str(host)?);
    request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str()).parse::<Uri>()?;
    *request.uri_mut() = path;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let answer = async {
        let (head, body) = sender.send_request(request.map(Full::new)).await?.into_parts();
        let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await?.to_bytes();
        Ok::<_, HttpError>(Response::from_parts(head, body))
    };
    // The response may be complete before the connection closes, and the connection may close first.
    let (mut answer, mut connection) = (Box::pin(answer), Box::pin(connection));
    tokio::select! {
        answer = &mut answer => answer,
        ended = &mut connection => {
            ended?;
            answer.await
        }
    }
}

impl HttpClient for OtlpHttpClient {
    fn send_bytes<'a, 'f>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'f>>
    where
        'a: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            let sent = self.clone().send(request).await;
            let sent = sent.and_then(|response| match response.status() {
                status if status.is_success() => Ok(response),
                status => Err(io::Error::other(format!("the collector returned status {status}")).into()),
            });
            if let Err(error) = &sent {
                *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = error.to_string();
            }
            sent
        })
    }
}

#[cfg(test)]
mod tests {
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
