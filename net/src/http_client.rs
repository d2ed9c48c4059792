//! Small calls to an engine, a stub or a launcher: one connection each, one deadline for the whole call, a bounded
//! body.
//!
//! [`LineStream`] reads a response of unlimited duration line by line.

mod exchange;
mod line_stream;

use std::{fmt::Debug, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, header};
use serde_json::Value;
use tokio::{
    net::TcpStream,
    time::{self, Instant},
};

use crate::{
    backend_origin::{BackendOrigin, Duplex},
    stub_api::{EPOCH_HEADER, Epoch},
};
use rouse::fault::FailureCause;

use self::exchange::OneShotResponse;
pub use self::line_stream::LineStream;

/// The metrics of an engine with many models and histograms take a few hundred KiB. A body over this limit is an error.
const MAX_BODY_BYTES: usize = 4 << 20;

/// Sends requests to one address.
#[derive(Debug)]
pub struct HttpClient {
    address: SocketAddr,
    api_key: Option<String>,
    /// Set for a backend that another operator runs.
    origin: Option<Arc<BackendOrigin>>,
    observer: Option<Arc<dyn CallObserver>>,
}

/// Observes each call that has ended. Calls that were dropped before their end are not reported, nor are line streams.
pub trait CallObserver: Debug + Send + Sync {
    /// `status` is `None` when no whole response arrived.
    fn call_ended(&self, method: &Method, path: &str, status: Option<u16>, duration: Duration);
}

/// A response.
#[derive(Debug)]
pub struct HttpClientReply {
    pub status: u16,
    pub body: Bytes,
    /// A 503 with a stub's mark: its gate is closed, or it does not know its engine yet.
    pub gated: bool,
}

/// Why no response arrived.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpClientError {
    #[error("connection failed")]
    Unreachable,
    #[error("TLS failed: {0}")]
    Tls(Arc<str>),
    #[error("timed out")]
    Timeout,
    #[error("the connection broke")]
    Broken,
}

impl HttpClientError {
    #[must_use]
    pub const fn cause(&self) -> FailureCause {
        match self {
            Self::Timeout => FailureCause::Timeout,
            Self::Unreachable | Self::Tls(_) | Self::Broken => FailureCause::Unreachable,
        }
    }
}

impl HttpClientReply {
    #[must_use]
    pub const fn success(&self) -> bool {
        matches!(self.status, 200..=299)
    }
}

impl HttpClient {
    /// `api_key` is sent as a bearer token.
    #[must_use]
    pub const fn new(address: SocketAddr, api_key: Option<String>) -> Self {
        Self { address, api_key, origin: None, observer: None }
    }

    /// Sets the origin of the server at this address.
    #[must_use]
    pub fn with_origin(self, origin: Option<Arc<BackendOrigin>>) -> Self {
        Self { origin, ..self }
    }

    /// Reports each finished call to `observer`.
    #[must_use]
    pub fn with_observer(self, observer: Arc<dyn CallObserver>) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// Sends a GET request.
    ///
    /// # Errors
    /// No whole response arrived in time.
    pub async fn get(&self, path: &str, within: Duration) -> Result<HttpClientReply, HttpClientError> {
        self.call(Method::GET, path, None, None, within).await
    }

    /// Sends a POST request.
    ///
    /// # Errors
    /// No whole response arrived in time.
    pub async fn post(
        &self,
        path: &str,
        body: Option<&Value>,
        within: Duration,
    ) -> Result<HttpClientReply, HttpClientError> {
        self.call(Method::POST, path, body, None, within).await
    }

    /// Sends a request. `epoch`: the sender's epoch, for requests whose body does not carry it.
    ///
    /// # Errors
    /// No whole response arrived in time.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        epoch: Option<Epoch>,
        within: Duration,
    ) -> Result<HttpClientReply, HttpClientError> {
        let request = self.request(method.clone(), path, body, epoch)?;
        let started_at = Instant::now();
        // Boxed, so that a caller's future stays small while no call is under way.
        let exchanged = time::timeout(within, Box::pin(self.exchange(request))).await;
        let reply = exchanged.map_err(|_| HttpClientError::Timeout).flatten();
        if let Some(observer) = &self.observer {
            observer.call_ended(
                &method,
                path,
                reply.as_ref().ok().map(|reply| reply.status),
                started_at.elapsed(),
            );
        }
        reply
    }

    /// Opens a response that is read line by line. `within` covers the response head; the lines after it have no
    /// deadline. A line of more than `longest` bytes counts as a broken connection.
    ///
    /// # Errors
    /// No response head arrived in time.
    pub async fn stream_lines(
        &self,
        path: &str,
        epoch: Option<Epoch>,
        within: Duration,
        longest: usize,
    ) -> Result<LineStream, HttpClientError> {
        let request = self.request(Method::GET, path, None, epoch)?;
        let opened = Box::pin(LineStream::open(self.address, request, longest));
        time::timeout(within, opened).await.map_err(|_| HttpClientError::Timeout)?
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        epoch: Option<Epoch>,
    ) -> Result<Request<Bytes>, HttpClientError> {
        let (host, path) = match &self.origin {
            Some(origin) => (origin.host.to_string(), format!("{}{path}", origin.path)),
            None => (self.address.to_string(), path.to_owned()),
        };
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, host)
            .header(header::CONNECTION, "close");
        if let Some(key) = &self.api_key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        if let Some(epoch) = epoch {
            request = request.header(EPOCH_HEADER, epoch);
        }
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        request.body(Bytes::from(body)).map_err(|_| HttpClientError::Broken)
    }

    async fn exchange(&self, request: Request<Bytes>) -> Result<HttpClientReply, HttpClientError> {
        let stream = TcpStream::connect(self.address).await.map_err(|_| HttpClientError::Unreachable)?;
        let stream: Box<dyn Duplex> = match self.origin.as_ref().and_then(|origin| origin.tls.as_ref()) {
            Some(tls) => {
                let secured = tls.handshake(stream.into()).await;
                secured.map_err(|error| HttpClientError::Tls(error.to_string().into()))?
            }
            None => Box::new(stream),
        };
        let mut response = OneShotResponse::open(stream, request).await?;
        let body = response.body(MAX_BODY_BYTES).await?;
        Ok(HttpClientReply { status: response.status, body, gated: response.gated })
    }
}
