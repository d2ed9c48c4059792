//! The way to the collector: one connection for each export.
//!
//! There is one export a second at most, so a kept connection would save little, and a new one finds a collector that
//! moved. The collector's certificate is checked against the machine's roots (`SSL_CERT_FILE` and `SSL_CERT_DIR` say
//! where those are). Proxies are not used.

use std::{future::Future, io, pin::Pin, sync::Arc};

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

/// A collector's answer is a few bytes; more is not read.
const ANSWER: usize = 64 << 10;

#[derive(Clone, Debug)]
pub(super) struct Client {
    tls: Arc<ClientConfig>,
}

impl Client {
    /// With the machine's roots. One that cannot be read is left out; with none at all, only `http` will work.
    pub(super) fn new() -> Result<Self, rustls::Error> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        Self::trusting(roots)
    }

    fn trusting(roots: RootCertStore) -> Result<Self, rustls::Error> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { tls: Arc::new(tls) })
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
            exchange(stream, request).await
        } else {
            exchange(stream, request).await
        }
    }
}

async fn exchange<S>(stream: S, mut request: Request<Bytes>) -> Result<Response<Bytes>, HttpError>
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
        let body = Limited::new(body, ANSWER).collect().await?.to_bytes();
        Ok::<_, HttpError>(Response::from_parts(head, body))
    };
    // The answer may be whole before the connection has closed, and the connection may close first.
    let (mut answer, mut connection) = (Box::pin(answer), Box::pin(connection));
    tokio::select! {
        answer = &mut answer => answer,
        ended = &mut connection => {
            ended?;
            answer.await
        }
    }
}

impl HttpClient for Client {
    fn send_bytes<'a, 'f>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'f>>
    where
        'a: 'f,
        Self: 'f,
    {
        let exported = self.clone().send(request);
        Box::pin(async move {
            let response = exported.await?;
            if response.status().is_success() || response.status().is_redirection() {
                return Ok(response);
            }
            // The exporter would tell the whole body, and nobody needs a page in the log.
            Err(io::Error::other(format!("the collector answers {}", response.status())).into())
        })
    }
}
