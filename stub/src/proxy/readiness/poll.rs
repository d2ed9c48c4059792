//! Polls an endpoint repeatedly. Each poll opens a new connection, like a new client of the engine, and reads only the
//! response's status.

use std::{fmt, sync::Arc, time::Duration};

use axum::http::{Request, StatusCode, header};
use bytes::Bytes;
use rouse_net::http_client::{HttpClient, HttpClientError};
use tokio::time::{self, Instant};

use super::{Readiness, endpoint::PolledEndpoint};

/// Kubernetes' default. An engine that responds more slowly is not ready.
const POLL_TIMEOUT: Duration = Duration::from_secs(1);

/// The result of one poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PollResponse {
    Status(StatusCode),
    /// No connection.
    ConnectFailed,
    /// No response in time.
    TimedOut,
    /// A connection, but no HTTP response.
    ProtocolError,
}

impl PollResponse {
    /// A redirect is not followed, so it counts as a failure.
    pub(super) fn is_success(self) -> bool {
        matches!(self, Self::Status(status) if status.is_success())
    }
}

impl fmt::Display for PollResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "status {}", status.as_u16()),
            Self::ConnectFailed => f.write_str("no connection"),
            Self::TimedOut => f.write_str("timed out"),
            Self::ProtocolError => f.write_str("the connection broke"),
        }
    }
}

/// Polls until a newer order replaces this one.
pub(super) async fn run(readiness: Arc<Readiness>, order_seq: u64, endpoint: PolledEndpoint) {
    let client = HttpClient::new(endpoint.address, None);
    loop {
        let sent_at = Instant::now();
        let answer = poll_once(&client, &endpoint).await;
        let Some(again) = readiness.record_response(order_seq, &answer, sent_at, Instant::now()) else {
            return;
        };
        time::sleep_until(again).await;
    }
}

/// Sends one poll. Leaves the body unread: dropping the response closes the connection.
async fn poll_once(client: &HttpClient, endpoint: &PolledEndpoint) -> PollResponse {
    let request = Request::get(endpoint.path.as_str())
        .header(header::USER_AGENT, concat!("rouse-stub/", env!("CARGO_PKG_VERSION")))
        .body(Bytes::new());
    let Ok(request) = request else {
        return PollResponse::ProtocolError;
    };
    match client.open(request, POLL_TIMEOUT).await {
        Ok(response) => PollResponse::Status(response.status()),
        Err(HttpClientError::Unreachable(_)) => PollResponse::ConnectFailed,
        Err(HttpClientError::Timeout) => PollResponse::TimedOut,
        Err(_) => PollResponse::ProtocolError,
    }
}
