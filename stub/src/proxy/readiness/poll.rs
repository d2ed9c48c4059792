//! Polls an endpoint repeatedly. Each poll opens a new connection, like a new client of the engine, and reads only the
//! response's status.

use std::{fmt, sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{Request, StatusCode, header},
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    time::{self, Instant},
};

use super::{Readiness, endpoint::PolledEndpoint};

/// Kubernetes' default. An engine that responds more slowly is not ready.
const POLL_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest response head: the smallest buffer that hyper accepts.
const MAX_HEAD_BYTES: usize = 8192;

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
    loop {
        let sent_at = Instant::now();
        let answer =
            time::timeout(POLL_TIMEOUT, poll_once(&endpoint)).await.unwrap_or(PollResponse::TimedOut);
        let Some(again) = readiness.record_response(order_seq, &answer, sent_at, Instant::now()) else {
            return;
        };
        time::sleep_until(again).await;
    }
}

async fn poll_once(endpoint: &PolledEndpoint) -> PollResponse {
    let Ok(stream) = TcpStream::connect(endpoint.address).await else {
        return PollResponse::ConnectFailed;
    };
    let mut client = hyper::client::conn::http1::Builder::new();
    let Ok((mut sender, connection)) =
        client.max_buf_size(MAX_HEAD_BYTES).handshake(TokioIo::new(stream)).await
    else {
        return PollResponse::ProtocolError;
    };
    let request = Request::get(endpoint.path.as_str())
        .header(header::HOST, endpoint.address.to_string())
        .header(header::USER_AGENT, concat!("rouse-stub/", env!("CARGO_PKG_VERSION")))
        .header(header::CONNECTION, "close")
        .body(Body::empty());
    let Ok(request) = request else {
        return PollResponse::ProtocolError;
    };
    let answer = async move {
        let answer = sender.send_request(request).await;
        answer.map_or(PollResponse::ProtocolError, |response| PollResponse::Status(response.status()))
    };
    // Driven in this task, so that ending the poller also closes its connection.
    tokio::pin!(answer, connection);
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        _ = &mut connection => answer.await,
    }
}
