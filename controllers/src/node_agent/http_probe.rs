//! Probes the HTTP endpoints of a configuration.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    sync::Arc,
};

use futures_util::future::join_all;
use rouse::units::Millis;
use rouse_net::{
    backend_origin::{BackendOrigin, BackendTls},
    http_client::{HttpClient, HttpClientError},
};
use rouse_platform::upstream_tls::RootVerifiedTls;
use tokio::{sync::Semaphore, task, time};

use super::agent_view::SeenDevice;
use crate::crd::device_configuration::HttpEndpoint;

/// Look-ups of names under way, for all configurations. One that hangs keeps its thread after its probe has ended, and
/// the driver is queried on such threads, too.
static LOOKUPS: Semaphore = Semaphore::const_new(MAX_LOOKUPS);
/// Half of the agent's threads for blocking calls.
const MAX_LOOKUPS: usize = 16;

/// The endpoints of one configuration.
pub(super) struct HttpProbe {
    targets: Vec<ProbeTarget>,
    timeout: Millis,
}

/// One endpoint.
struct ProbeTarget {
    url: String,
    properties: BTreeMap<String, String>,
    host: String,
    port: u16,
    /// Path and query.
    path: String,
    origin: Arc<BackendOrigin>,
    /// Why the last probe failed.
    failure: Option<String>,
}

/// Why an endpoint counts as offline.
#[derive(Debug, thiserror::Error)]
enum ProbeError {
    #[error("its name cannot be resolved: {0}")]
    Lookup(#[from] io::Error),
    #[error("its name has no address")]
    NoAddress,
    #[error(transparent)]
    Call(#[from] HttpClientError),
    #[error("it answered with status {0}")]
    Status(u16),
    #[error("it did not answer within {0}")]
    Timeout(Millis),
}

impl HttpProbe {
    pub(super) fn new(endpoints: &[HttpEndpoint], timeout: Millis) -> Self {
        Self { targets: endpoints.iter().filter_map(ProbeTarget::new).collect(), timeout }
    }

    /// Returns the servers that answer with a status of 200 to 299, by URL.
    pub(super) async fn run(&mut self) -> BTreeMap<String, SeenDevice> {
        let timeout = self.timeout;
        let outcomes = join_all(self.targets.iter().map(|target| target.probe(timeout))).await;
        let mut seen = BTreeMap::new();
        for (target, outcome) in self.targets.iter_mut().zip(outcomes) {
            target.log(outcome.as_ref().err());
            if outcome.is_ok() {
                let properties = target.properties.clone();
                let device = SeenDevice { properties, healthy: true, ..SeenDevice::default() };
                seen.insert(target.url.clone(), device);
            }
        }
        seen
    }
}

impl ProbeTarget {
    /// `None` if the URL cannot be asked, which the conversion of a configuration excludes.
    fn new(endpoint: &HttpEndpoint) -> Option<Self> {
        let uri: http::Uri = endpoint.url.parse().ok()?;
        let (authority, is_tls) = (uri.authority()?, uri.scheme_str() == Some("https"));
        let bare = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let tls = is_tls.then(|| Arc::new(RootVerifiedTls::new(bare.clone())) as Arc<dyn BackendTls>);
        Some(Self {
            url: endpoint.url.clone(),
            properties: endpoint.properties.clone(),
            port: authority.port_u16().unwrap_or(if is_tls { 443 } else { 80 }),
            host: bare,
            path: uri.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string),
            origin: Arc::new(BackendOrigin::new(authority.as_str(), "", tls)),
            failure: None,
        })
    }

    async fn probe(&self, timeout: Millis) -> Result<(), ProbeError> {
        let asked = time::timeout(timeout.duration(), Box::pin(self.ask(timeout))).await;
        asked.map_err(|_| ProbeError::Timeout(timeout)).flatten()
    }

    /// Asks the server at its first address that can be reached.
    async fn ask(&self, timeout: Millis) -> Result<(), ProbeError> {
        let mut outcome = Err(ProbeError::NoAddress);
        for address in self.addresses().await? {
            let client = HttpClient::new(address, None).with_origin(Some(Arc::clone(&self.origin)));
            match client.get(&self.path, timeout.duration()).await {
                Ok(reply) if reply.success() => return Ok(()),
                Ok(reply) => return Err(ProbeError::Status(reply.status)),
                Err(error) => outcome = Err(error.into()),
            }
        }
        outcome
    }

    async fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = self.host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, self.port)]);
        }
        // Nothing closes the semaphore.
        let permit = LOOKUPS.acquire().await.ok();
        let (host, port) = (self.host.clone(), self.port);
        let lookup = task::spawn_blocking(move || {
            let _permit = permit;
            (host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<SocketAddr>>)
        });
        lookup.await?
    }

    /// Logs the first failure, each new cause and the recovery.
    fn log(&mut self, failure: Option<&ProbeError>) {
        let failure = failure.map(ToString::to_string);
        if self.failure == failure {
            return;
        }
        match &failure {
            Some(error) => tracing::warn!(url = self.url, error, "endpoint is offline"),
            None => tracing::info!(url = self.url, "endpoint is online again"),
        }
        self.failure = failure;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    /// Serves one connection with this response head, and returns the head of its request.
    async fn serve_once(listener: &TcpListener, status: &str) -> String {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = vec![0; 4096];
        let length = stream.read(&mut head).await.unwrap();
        let response = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
        stream.write_all(response.as_bytes()).await.unwrap();
        String::from_utf8_lossy(&head[..length]).into_owned()
    }

    fn probe(url: &str) -> HttpProbe {
        let properties = BTreeMap::from([("url".to_owned(), url.to_owned())]);
        HttpProbe::new(&[HttpEndpoint { url: url.to_owned(), properties }], Millis::secs(20))
    }

    #[tokio::test]
    async fn an_endpoint_is_seen_while_it_answers_with_success() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let url = format!("http://{address}/health?deep=1");
        let mut probe = probe(&url);
        let (seen, request) = tokio::join!(probe.run(), serve_once(&listener, "204 No Content"));
        assert!(request.starts_with("GET /health?deep=1 HTTP/1.1\r\n"), "{request}");
        assert!(request.to_lowercase().contains(&format!("host: {address}")), "{request}");
        assert_eq!(seen[&url].properties["url"], url);
        assert!(seen[&url].healthy);
        let (seen, _) = tokio::join!(probe.run(), serve_once(&listener, "503 Service Unavailable"));
        assert!(seen.is_empty());
        drop(listener);
        assert!(probe.run().await.is_empty(), "the connection is refused");
    }

    #[tokio::test]
    async fn look_ups_that_hang_delay_other_names_and_no_addresses() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let _all = LOOKUPS.acquire_many(u32::try_from(MAX_LOOKUPS).unwrap()).await.unwrap();
        let mut by_address = probe(&format!("http://{address}/"));
        let (seen, _) = tokio::join!(by_address.run(), serve_once(&listener, "200 OK"));
        assert_eq!(seen.len(), 1);
        let mut by_name = probe(&format!("http://localhost:{}/", address.port()));
        by_name.timeout = Millis(1);
        assert!(by_name.run().await.is_empty(), "it waits for its turn");
    }

    #[tokio::test]
    async fn an_endpoint_that_does_not_answer_in_time_is_not_seen() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut probe = probe(&format!("http://{}", listener.local_addr().unwrap()));
        probe.timeout = Millis(1);
        assert!(time::timeout(Duration::from_secs(20), probe.run()).await.unwrap().is_empty());
    }
}
