//! The client of the admin API: one connection per request, plain HTTP.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use rouse_net::http_client::{HttpClient, HttpClientError, ResponseStream};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use rouse_config::DEFAULT_ADMIN_ADDRESS;

/// Timeout of a stream's head, and of a whole response that is not a stream.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit in bytes for a response that is read as a whole. None comes near it.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// `HOST:PORT` of an admin API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AdminEndpoint(String);

pub(super) struct AdminClient {
    endpoint: AdminEndpoint,
    client: HttpClient,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(
        "cannot connect to a gateway at {endpoint}: {reason}; start the gateway, or set its address with --admin or ROUSE_ADMIN"
    )]
    NotRunning { endpoint: AdminEndpoint, reason: Arc<str> },
    #[error("the gateway at {0} did not answer within 10 s")]
    Timeout(AdminEndpoint),
    #[error("the admin API at {0} requires a valid token: set ROUSE_ADMIN_TOKEN")]
    TokenRequired(AdminEndpoint),
    #[error("{0}; check --token or ROUSE_ADMIN_TOKEN")]
    InvalidToken(HttpClientError),
    #[error("{0}")]
    Refused(String),
    #[error("the gateway at {0} closed the stream: the gateway is shutting down or was killed")]
    StreamEnded(AdminEndpoint),
    #[error("{endpoint} does not answer like a gateway's admin API: {detail}; check --admin or ROUSE_ADMIN")]
    UnexpectedResponse { endpoint: AdminEndpoint, detail: String },
}

impl AdminClient {
    pub(super) fn new(endpoint: AdminEndpoint, token: Option<String>) -> Self {
        Self { client: HttpClient::for_host(&endpoint.0, token), endpoint }
    }

    /// Returns the whole response to `GET path`.
    pub(super) async fn get(&self, path: &str) -> Result<Bytes, Error> {
        self.request(Method::GET, path).await
    }

    /// Returns the whole response to `POST path`, which has no body.
    pub(super) async fn post(&self, path: &str) -> Result<Bytes, Error> {
        self.request(Method::POST, path).await
    }

    /// Returns the response to `GET path` as a stream.
    pub(super) async fn stream(&self, path: &str) -> Result<ResponseStream, Error> {
        let request = self.empty_request(Method::GET, path)?;
        let opened = self.client.open(request, RESPONSE_TIMEOUT).await;
        let mut answer = opened.map_err(|error| self.call_error(error))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let refusal = timeout(RESPONSE_TIMEOUT, answer.body(MAX_RESPONSE_BYTES)).await;
        let refusal = refusal.map_err(|_| HttpClientError::Timeout).flatten();
        Err(self.response_error(status, &refusal.map_err(|error| self.call_error(error))?))
    }

    async fn request(&self, method: Method, path: &str) -> Result<Bytes, Error> {
        let request = self.empty_request(method, path)?;
        let answered = self.client.send(request, MAX_RESPONSE_BYTES, RESPONSE_TIMEOUT).await;
        let answer = answered.map_err(|error| self.call_error(error))?;
        if answer.success() {
            return Ok(answer.body);
        }
        let status = StatusCode::from_u16(answer.status).map_err(|error| self.unexpected_response(error))?;
        Err(self.response_error(status, &answer.body))
    }

    fn empty_request(&self, method: Method, path: &str) -> Result<Request<Bytes>, Error> {
        let request = Request::builder().method(method).uri(path).body(Bytes::new());
        request.map_err(|error| self.unexpected_response(error))
    }

    fn call_error(&self, error: HttpClientError) -> Error {
        match error {
            HttpClientError::Unreachable(reason) => {
                Error::NotRunning { endpoint: self.endpoint.clone(), reason }
            }
            HttpClientError::Timeout => Error::Timeout(self.endpoint.clone()),
            // Paths are valid by then, and so is the endpoint.
            HttpClientError::InvalidRequest(_) => Error::InvalidToken(error),
            error => self.unexpected_response(error),
        }
    }

    fn response_error(&self, status: StatusCode, body: &[u8]) -> Error {
        if status == StatusCode::UNAUTHORIZED {
            return Error::TokenRequired(self.endpoint.clone());
        }
        let message = serde_json::from_slice::<serde_json::Value>(body)
            .ok()
            .and_then(|body| body.pointer("/error/message")?.as_str().map(str::to_owned));
        match message {
            Some(message) => Error::Refused(message),
            None => self.unexpected_response(status),
        }
    }

    /// Returns the JSON response to `GET path`.
    pub(super) async fn get_json<T: DeserializeOwned>(&self, path: &str) -> Result<T, Error> {
        let body = self.get(path).await?;
        serde_json::from_slice(&body).map_err(|error| self.unexpected_response(error))
    }

    /// Returns the error for a stream that broke off.
    pub(super) fn stream_ended(&self) -> Error {
        Error::StreamEnded(self.endpoint.clone())
    }

    /// Returns the error for a response of another form than expected.
    pub(super) fn unexpected_response(&self, what: impl fmt::Display) -> Error {
        Error::UnexpectedResponse { endpoint: self.endpoint.clone(), detail: what.to_string() }
    }
}

impl Error {
    /// Whether a later request may succeed: the gateway is away or busy, or begins or ends.
    pub(super) const fn may_pass(&self) -> bool {
        !matches!(self, Self::TokenRequired(_) | Self::InvalidToken(_) | Self::Refused(_))
    }
}

impl FromStr for AdminEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let uri: http::Uri =
            if text.contains("://") { text.parse() } else { format!("http://{text}").parse() }
                .map_err(|error| format!("not a URL: {error}"))?;
        if uri.scheme_str() != Some("http") {
            return Err("only http:// is supported: use the loopback address or a tunnel".to_owned());
        }
        let authority = uri.authority().ok_or("the URL has no host")?;
        if authority.as_str().contains('@') {
            return Err("the URL contains credentials: set the token in ROUSE_ADMIN_TOKEN instead".to_owned());
        }
        let port = authority.port_u16().unwrap_or(DEFAULT_ADMIN_ADDRESS.port());
        Ok(Self(format!("{}:{port}", authority.host())))
    }
}

impl From<SocketAddr> for AdminEndpoint {
    /// The endpoint by which this machine reaches a gateway that listens there.
    fn from(address: SocketAddr) -> Self {
        let ip = match address.ip() {
            ip if !ip.is_unspecified() => ip,
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        };
        Self(SocketAddr::new(ip, address.port()).to_string())
    }
}

impl Default for AdminEndpoint {
    fn default() -> Self {
        Self(DEFAULT_ADMIN_ADDRESS.to_string())
    }
}

impl fmt::Display for AdminEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Encodes a model's name as one path segment.
pub(super) fn encode_path_segment(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_url_or_an_address() {
        for (text, endpoint) in [
            ("http://127.0.0.1:9", "127.0.0.1:9"),
            ("localhost:1234", "localhost:1234"),
            ("http://[::1]:9/", "[::1]:9"),
            ("box", "box:8180"),
        ] {
            assert_eq!(text.parse::<AdminEndpoint>().unwrap().0, endpoint, "{text}");
        }
        assert_eq!(AdminEndpoint::default().0, "127.0.0.1:8180");
        for (listens, endpoint) in
            [("0.0.0.0:9", "127.0.0.1:9"), ("[::]:9", "[::1]:9"), ("10.0.0.1:9", "10.0.0.1:9")]
        {
            assert_eq!(AdminEndpoint::from(listens.parse::<SocketAddr>().unwrap()).0, endpoint);
        }
        for text in ["https://box:8180", "", "http://user:secret@box", "a b"] {
            assert!(text.parse::<AdminEndpoint>().is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_token_that_no_header_can_have_is_named_and_not_sent() {
        let client = AdminClient::new(AdminEndpoint::default(), Some("secret\n".to_owned()));
        let error = client.get("/healthz").await.unwrap_err();
        assert!(matches!(error, Error::InvalidToken(_)) && !error.may_pass(), "{error}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }

    #[test]
    fn a_name_is_one_segment() {
        assert_eq!(encode_path_segment("Qwen/Qwen3-8B:q4"), "Qwen%2FQwen3-8B%3Aq4");
    }
}
