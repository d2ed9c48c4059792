//! The one-shot HTTP/1.1 client of gateway, stub and command line: one connection for each call, one deadline for the
//! whole call, a bounded body.
//!
//! Callers are engines' adapters, the clients of stubs and launchers, probes, the export of traces and the commands
//! that query a gateway. [`HttpClient::call`] sends JSON, [`HttpClient::send`] any request. [`ResponseStream`] reads a
//! response of unlimited duration in pieces, and [`LineStream`] line by line. Redirects are not followed and proxies
//! are not used.

mod connect;
mod error;
mod line_stream;
mod request;
mod response_stream;

use std::{fmt::Debug, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request};
use serde_json::Value;
use tokio::time::{self, Instant};

use self::connect::CallTarget;
use crate::{backend_origin::BackendOrigin, stub_api::Epoch};

pub use self::{error::HttpClientError, line_stream::LineStream, response_stream::ResponseStream};

/// The metrics of an engine with many models and histograms take a few hundred KiB. A body over this limit is an error.
const MAX_BODY_BYTES: usize = 4 << 20;

/// Sends requests to one server.
#[derive(Debug)]
pub struct HttpClient {
    target: CallTarget,
    api_key: Option<String>,
    /// Set for a server that another operator runs.
    origin: Option<Arc<BackendOrigin>>,
    observer: Option<Arc<dyn CallObserver>>,
}

/// Observes each call that has ended. Calls that were dropped before their end are not reported, nor are streams.
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
        Self { target: CallTarget::Address(address), api_key, origin: None, observer: None }
    }

    /// As [`Self::new`], with `HOST:PORT`. Each call tries the host's addresses in turn.
    #[must_use]
    pub fn for_host(host_and_port: &str, api_key: Option<String>) -> Self {
        Self { target: CallTarget::Name(host_and_port.into()), api_key, origin: None, observer: None }
    }

    /// Sets the origin of the server at this address: its name, path prefix and TLS.
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
    /// No whole response arrived in time, or its body has more than 4 MiB.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        epoch: Option<Epoch>,
        within: Duration,
    ) -> Result<HttpClientReply, HttpClientError> {
        let request = request::json(method, path, body, epoch)?;
        self.send(request, MAX_BODY_BYTES, within).await
    }

    /// Sends a request of any content. `within` covers the whole call, from the look-up of the host to the last byte of
    /// the body, which may have `max_body_bytes`.
    ///
    /// The client sets `Host`, `Connection`, the body's framing and the bearer token. Of the request's URL it uses the
    /// path and the query.
    ///
    /// # Errors
    /// No whole response arrived in time, or its body is too large.
    pub fn send(
        &self,
        request: Request<Bytes>,
        max_body_bytes: usize,
        within: Duration,
    ) -> impl Future<Output = Result<HttpClientReply, HttpClientError>> + Send {
        // Boxed, so that a caller's future stays small while no call is under way.
        Box::pin(self.exchange(request, max_body_bytes, within))
    }

    /// Sends a request, and returns once the head of its response has arrived. `within` covers that much; the body has
    /// no deadline. The kernel closes the connection when the server's host does not answer for about 25 s.
    ///
    /// # Errors
    /// No response head arrived in time.
    pub async fn open(
        &self,
        request: Request<Bytes>,
        within: Duration,
    ) -> Result<ResponseStream, HttpClientError> {
        let wire = self.to_wire(&request)?;
        let opened = Box::pin(self.open_response(wire, request.method(), true));
        time::timeout(within, opened).await.map_err(|_| HttpClientError::Timeout)?
    }

    /// Opens a response that is read line by line. `within` covers the response head; the lines after it have no
    /// deadline. A line of more than `longest` bytes is an error.
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
        let response = self.open(request::json(Method::GET, path, None, epoch)?, within).await?;
        Ok(LineStream::new(response, longest))
    }

    fn to_wire(&self, request: &Request<Bytes>) -> Result<Bytes, HttpClientError> {
        let (host, path_prefix) = match &self.origin {
            Some(origin) => (origin.host.to_string(), &*origin.path),
            None => (self.target.to_string(), ""),
        };
        request::to_wire(request, &host, path_prefix, self.api_key.as_deref())
    }

    async fn exchange(
        &self,
        request: Request<Bytes>,
        max_body_bytes: usize,
        within: Duration,
    ) -> Result<HttpClientReply, HttpClientError> {
        let wire = self.to_wire(&request)?;
        let (head, _) = request.into_parts();
        let started_at = Instant::now();
        let answered = async {
            let mut response = self.open_response(wire, &head.method, false).await?;
            let body = response.body(max_body_bytes).await?;
            let status = response.status().as_u16();
            Ok::<_, HttpClientError>(HttpClientReply { status, body, gated: response.is_gated() })
        };
        let reply = time::timeout(within, answered).await.map_err(|_| HttpClientError::Timeout).flatten();
        if let Some(observer) = &self.observer {
            let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
            let status = reply.as_ref().ok().map(|reply| reply.status);
            observer.call_ended(&head.method, path, status, started_at.elapsed());
        }
        reply
    }

    /// `has_no_deadline`: the body may take unlimited time.
    async fn open_response(
        &self,
        wire: Bytes,
        method: &Method,
        has_no_deadline: bool,
    ) -> Result<ResponseStream, HttpClientError> {
        let tls = self.origin.as_ref().and_then(|origin| origin.tls.as_deref());
        let io = self.target.connect(tls, has_no_deadline).await?;
        ResponseStream::open(io, wire, method).await
    }
}

#[cfg(test)]
mod tests;
